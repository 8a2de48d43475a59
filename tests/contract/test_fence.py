"""Two guards on what is private: torch's own is touched in `_torch` alone, and nobody reads another room's `x._y`."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import macrobatch
from macrobatch._torch.contract import CONTRACT
from macrobatch._torch.modules import CHILD_OF

SOURCE = Path(macrobatch.__file__).parent
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
TORCHS_OWN = {private.name for private in CONTRACT} | set(CHILD_OF.values())  # these: a model is unwrapped in one place
TORCHS_OWN -= {"post_backward"}  # a public name of Lightning's too
IN_CONTRACT = {part for private in CONTRACT for part in private.path.split(".")} | set(CHILD_OF.values())
# Underscores that are part of a public interface: those of named tuples, and of the operating system.
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "os._exit"}
BY_STRING = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}

# What still reaches over the fence. This list may only become shorter.
EXCEPTIONS = {
    "cli.py": {"atexit._run_exitfuncs"},  # of Python itself, which has no public name for it
    "lightning/private.py": {  # of Lightning's Trainer: the file is there for that
        "loop._data_fetcher",
        "module._on_before_batch_transfer",
        "trainer._accelerator_connector",
        "trainer._logger_connector",
        "trainer.fit_loop._data_source",
        "trainer.fit_loop.epoch_loop._build_kwargs",
    },
    "transformers/private.py": {  # of the trainers of transformers and TRL: the file is there for that
        "_metrics",
        "_total_train_tokens",
        "_use_triton",
        "trainer._prepare_inputs",
        "trainer._total_train_tokens",
        "utilities._use_triton",
    },
}


@pytest.mark.parametrize("file", FILES)
def test_private_names_stay_where_they_belong(file):
    found = set(private_names(source_of(file), file)) - EXCEPTIONS.get(file, set())
    assert not found, f"{file} touches what is private to torch, or to another room: {sorted(found)}"


def test_every_exception_is_needed():
    assert {file: set(private_names(source_of(file), file)) for file in EXCEPTIONS} == EXCEPTIONS


@pytest.mark.parametrize(
    "planted",
    [
        "torch._foreach_mul_(a, b)",
        "torch._C._cuda_releasePool(0, pool)",
        "from torch.autograd.graph import _engine_run_backward",
        "dist.distributed_c10d._get_default_store()",
        "loaded = 'torch._dynamo' in sys.modules",
        "gradient._version",  # also in a room that has a _version of its own
        "model._orig_mod.weight",
        "model.module.weight",
        "getattr(model, '_orig_mod', model)",
        "hasattr(p, '_post_accumulate_grad_hooks')",
        "operator.attrgetter('_version')",
        "group.fsdp_params",  # of a private class of torch
        "setattr(group, 'reduce_grads', True)",
    ],
)
def test_the_guard_sees_what_is_private_to_torch(planted):
    assert list(private_names(planted, "_step/gradients.py"))
    assert not list(private_names(planted, "_torch/tensors.py"))


@pytest.mark.parametrize(
    "planted",
    [
        "torch._not_in_the_contract(a, b)",
        "model._not_in_the_contract",
        "import torch._inductor",
        "from torch._inductor import config",
        "train._accumulator",
        "self._engine._totals_of_another",
        "super()._x._y_of_another",
        "from macrobatch._cut.plans import _tight_ends",
    ],
)
def test_the_guard_sees_what_nobody_may_touch(planted):
    for file in ("_step/gradients.py", "_torch/tensors.py", "macrostep.py"):
        assert list(private_names(planted, file))


@pytest.mark.parametrize(
    "harmless",
    [
        "self._version = 1",
        "cls._made",
        "super()._named()",
        "part._replace(samples=())",
        "x.__class__.__name__",
        "from macrobatch._torch.graph import reach_of",
        "class A:\n    def _own(self): ...\ndef f(a): return a._own()",  # of the same room
        '"""torch._foreach_mul_ is told of in a docstring."""',
    ],
)
def test_the_guard_lets_harmless_lines_pass(harmless):
    assert not list(private_names(harmless, "_step/gradients.py"))


# ---------------------------------------------------------------------------------------------- how they are found


def private_names(source: str, file: str) -> Iterator[str]:
    """What a file touches that is private to torch, or to another room."""
    tree, room = ast.parse(source), room_of(file)
    own = defined_in(room) | set(defined_by(tree))
    for node in ast.walk(tree):
        for name, owner in touched_by(node):
            told = f"{owner}.{name}" if owner else name
            if name in PUBLIC or told in PUBLIC or owner in ("self", "cls", "super()"):
                continue
            if room == "_torch" and name.split(".")[-1] in IN_CONTRACT:
                continue
            if name in TORCHS_OWN or is_torchs(told) or (is_private(name) and name not in own):
                yield told


def touched_by(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a node touches, each with the text of what has it."""
    if isinstance(node, ast.Attribute):
        if is_private(node.attr) or node.attr in TORCHS_OWN:
            yield node.attr, ast.unparse(node.value)
    elif isinstance(node, ast.ImportFrom):
        for name in (alias.name for alias in node.names):
            is_own = (node.module or "").startswith("macrobatch.")
            parts = [name] if is_own else [*node.module.split("."), name]
            if node.module != "__future__" and any(map(is_private, parts)):
                yield name, node.module
    elif isinstance(node, ast.Import):
        for name in (alias.name for alias in node.names):
            if any(map(is_private, name.split("."))):
                yield name, ""
    elif isinstance(node, ast.Call) and name_of(node.func) in BY_STRING:
        for argument in node.args:
            text = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(text, str) and (is_private(text) or text in TORCHS_OWN):
                yield text, ""
    elif isinstance(node, ast.Constant) and is_torchs(str(node.value)) and " " not in str(node.value):
        yield str(node.value), ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_torchs(name: str) -> bool:
    """Whether it begins with what belongs to torch, and has a private part."""
    first, *rest = name.split(".")
    return first in ("torch", "dist", "nn") and any(map(is_private, rest))


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def room_of(file: str) -> str:
    return file.split("/")[0]


@cache
def source_of(file: str) -> str:
    return (SOURCE / file).read_text()


@cache
def defined_in(room: str) -> frozenset[str]:
    """The private members that the classes of a room have."""
    files = [file for file in FILES if room_of(file) == room]
    return frozenset(name for file in files for name in defined_by(ast.parse(source_of(file))))


def defined_by(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (name for inner in node.body for name in targets_of(inner))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (target.attr for target in attributes_of(node) if name_of(target.value) in ("self", "cls"))


def targets_of(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def attributes_of(node: ast.Assign | ast.AnnAssign) -> list[ast.Attribute]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [inner for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Attribute)]
