"""`macrobatch.verify` is a function and a module: every form of import gives what it should."""

import importlib
import inspect
import pickle
import pydoc

import pytest

import macrobatch
from harness.preloaded import Preloaded
from macrobatch import verify
from macrobatch.verification import Cause, Report

NAMES = {"Cause": Cause, "Report": Report, "verify": verify}

FORMS = {
    "a name of the package": "from macrobatch import verify; assert verify(model, loss_fn, batch).ok",
    "a name of the module": "from macrobatch.verify import Report, verify; assert isinstance(verified(verify), Report)",
    "the module": "import macrobatch.verify; assert isinstance(verified(macrobatch.verify), macrobatch.verify.Report)",
    "the module by another name": "import macrobatch.verify as v; assert isinstance(verified(v.verify), v.Report)",
    "the module by its name": "import importlib; v = importlib.import_module('macrobatch.verify'); assert v.Cause",
    "everything": "from macrobatch.verify import *; assert isinstance(verified(verify), Report)",
    "first the module": "import macrobatch.verify; from macrobatch import verify; verified(verify)",
    "first the function": "from macrobatch import verify; import macrobatch.verify; verified(verify)",
    "again": "import importlib, macrobatch; importlib.reload(macrobatch); verified(macrobatch.verify)",
}
SETTING = """
import torch
from torch import nn
model, batch = nn.Linear(3, 1), torch.randn(10, 3)
def loss_fn(model, batch): return model(batch).square().mean()
def verified(verify): return verify(model, loss_fn, batch)
"""


@pytest.fixture(scope="module")
def python():
    with Preloaded("torch", flags=("-W", "error")) as python:
        yield python


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_import(python, form):
    """Each in a process of its own: what was imported before must not matter."""
    done = python.run("-c", SETTING + FORMS[form])
    assert done.returncode == 0, done.stderr


def test_one_object_under_every_name():
    module = importlib.import_module("macrobatch.verify")
    assert inspect.ismodule(module)
    assert inspect.isfunction(macrobatch.verify)
    for name, value in NAMES.items():
        assert getattr(module, name) is getattr(macrobatch.verify, name) is value


def test_the_rooms_inside_have_one_name():
    """A second copy of a module would have classes of its own."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("macrobatch.verify.report")


def test_it_reads_like_any_function():
    assert list(inspect.signature(macrobatch.verify).parameters)[:3] == ["model", "loss_fn", "batch"]
    assert "Check whether a training step uses the right gradient" in pydoc.render_doc(verify)
    assert pickle.loads(pickle.dumps(verify)) is verify
    report = Report(verdict="exact", max_relative_error=0.0, bound=1.0, reference="", worst=(), windows=())
    assert pickle.loads(pickle.dumps(report)) == report
