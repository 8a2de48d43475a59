"""`make peers`, on a small suite of its own: no checkout of a peer is needed."""

import argparse
import json

import pytest
from accelerate import Accelerator
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from transformers import Trainer

import macrobatch
from harness.trainers import arguments
from macrobatch.errors import BackendError
from macrobatch.lightning import ExactStrategy
from macrobatch.transformers.trainer import ExactTrainer
from peers import __main__ as program
from peers import comparing, known
from peers.plugin import substituted
from peers.suites import SUITES, Suite

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about themselves


class Own(Trainer):
    """A class of a suite, made before anything is substituted."""


def test_trainers_are_exact_while_they_are_substituted():
    with substituted("peers.plugin:substitute_trainer"):
        for kind in (Trainer, Own):
            made = kind(model=nn.Linear(1, 1), args=arguments())
            assert isinstance(made, ExactTrainer)
            assert isinstance(made, kind)
        assert type(Own(nn.Linear(1, 1), arguments())) is type(made)
    assert type(Own(model=nn.Linear(1, 1), args=arguments())) is Own


def test_accelerators_are_ours_while_they_are_substituted():
    class Derived(Accelerator):
        pass

    with substituted("peers.plugin:substitute_accelerator"):
        assert type(Accelerator(cpu=True, gradient_accumulation_steps=3)) is macrobatch.accelerate.Accelerator
        assert type(Derived(cpu=True)) is Derived
    assert type(Accelerator(cpu=True)) is Accelerator


def test_strategies_are_exact_while_they_are_substituted():
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with substituted("peers.plugin:substitute_strategy"):
        strategy = LightningTrainer(accumulate_grad_batches=3, **quiet).strategy
        assert (type(strategy).__mro__[1], strategy.steps) == (ExactStrategy, 3)
        scheduler = GradientAccumulationScheduler({0: 2, 4: 3})
        trainer = LightningTrainer(callbacks=[scheduler], **quiet)
        assert trainer.strategy.steps == {0: 2, 4: 3}
        assert scheduler not in trainer.callbacks
        both = LightningTrainer(accumulate_grad_batches=2, callbacks=[scheduler], **quiet)  # an error, later
        assert scheduler in both.callbacks
        with pytest.raises(BackendError):
            ExactStrategy("fsdp")
        with pytest.raises(ValueError, match="requires a GPU"):  # as it is
            LightningTrainer(strategy="fsdp", **quiet)
    assert not isinstance(LightningTrainer(**quiet).strategy, ExactStrategy)


CLASS = """
class Trainer:
    name = "theirs"

def substitute():
    return Trainer, "name", "ours", "theirs"
"""
TESTS = """
import os, time
import pytest
from small import Trainer

IS_OURS = Trainer.name == "ours"

def test_is_the_same(): pass
def test_is_ours(): assert IS_OURS
@pytest.mark.parametrize("how", ["a", "b"])
def test_is_theirs(how): assert not IS_OURS
def test_ends_the_process(): IS_OURS and os._exit(9)
def test_is_skipped(): pytest.skip("here")
def test_hangs(): IS_OURS and time.sleep(600)
def test_comes_last(): pass
"""


def test_what_a_suite_says_of_both_sides(tmp_path, monkeypatch):
    """Each side in its own processes. One that crashes or hangs loses a test, and another one goes on after it."""
    (tmp_path / "small.py").write_text(CLASS)
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others start slowly
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    environment = program._environment(tmp_path / "home") | {"PEERS_DATASETS": ""}
    monkeypatch.setattr(program, "SECONDS_PER_TEST", 2)
    monkeypatch.setitem(known.KNOWN, "trl", {"*::test_is_theirs[a]": "it asks for a name"})
    suite = Suite(package="small", ours="small:substitute", groups=(("test_small.py",),))
    found = program.Run("trl", suite, tmp_path, tmp_path, environment).compared()
    assert found.stock == {"passed": 6, "failed": 1, "skipped": 1}
    assert found.ours == {"passed": 3, "failed": 3, "skipped": 1, "lost": 1}
    assert found.known == {"test_small.py::test_is_theirs[a]": "it asks for a name"}
    assert found.only_ours == ["test_small.py::test_is_ours"]
    unknown = {test.partition("::")[2]: end for test, end in found.unknown.items()}
    assert unknown.keys() == {"test_is_theirs[b]", "test_ends_the_process", "test_hangs"}
    assert unknown["test_is_theirs[b]"].startswith("failed: assert not True")
    assert unknown["test_ends_the_process"].startswith("lost")
    assert "Timeout" in unknown["test_hangs"]


def test_what_is_named_must_be_a_checkout(tmp_path):
    for wrong in ("trl", f"trl={tmp_path}", f"keras={tmp_path}"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"no checkout|no suite"):
            program._checkout(wrong)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sft_trainer.py").touch()
    assert program._checkout(f"trl={tmp_path}") == ("trl", tmp_path)


def test_what_came_of_it_is_added_to_the_file(tmp_path):
    file = tmp_path / "peers.json"
    for suite in ("trl", "accelerate"):
        ends = {"a": ("passed", ""), "b": ("failed", "why")}
        program._write(
            file, SUITES, {suite: tmp_path}, {suite: comparing.compare(suite, ends, {"a": ("lost", "gone")})}
        )
    written = json.loads(file.read_text())["suites"]
    assert written.keys() == {"trl", "accelerate"}
    assert written["trl"]["unknown"] == {"a": "lost: gone"}
    assert str(tmp_path) not in file.read_text()


def test_files_can_be_chosen():
    found = program.chosen(SUITES["trl"], ["sft", "kto"])
    assert found.groups == (("tests/test_sft_trainer.py",), ("tests/test_kto_trainer.py",))
    assert program.chosen(SUITES["trl"], None) == SUITES["trl"]


def test_what_is_known_is_of_a_suite_and_has_a_reason():
    assert known.KNOWN.keys() == SUITES.keys()
    assert all(reason for patterns in known.KNOWN.values() for reason in patterns.values())
    test = "tests_pytorch/trainer/test_trainer.py::test_gradient_accumulation_scheduling_last_batch[3-1.0]"
    assert "backward()" in known.reason_for("lightning", test)
    assert known.reason_for("lightning", test.replace("scheduling", "")) is None
