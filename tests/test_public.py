"""Two guards: what users can import, and which module may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import macrobatch

SOURCE = Path(macrobatch.__file__).parent
PACKAGES = ("macrobatch", "macrobatch.accelerate", "macrobatch.train")

# Each module may import those in the rows above its own, and torch; nothing else but the standard library. The trainer
# may import what its extra installs.
TRAIN = {"transformers", "tokenizers", "safetensors", "rich", "tyro", "datasets"}
LAYERS = [
    {"errors", "snapshot", "collectives", "capture", "plan", "graph"},
    {"padding", "trees", "hooks"},
    {"window", "placements", "split", "bench"},
    {"sync"},
    {"gradients", "arguments", "loader", "order", "fit", "losses", "feed", "recordable", "uneven"},
    {"update", "recording"},
    {"cuda_graph"},
    {"accumulator"},
    {"macrostep"},
    {f"accelerate.{name}" for name in ("missing", "settings", "sharding", "checkpoints")},
    {"accelerate.state"},
    {f"accelerate.{name}" for name in ("logging", "seeding", "gathering", "loaders", "models", "wrappers")},
    {"accelerate.accumulation", "accelerate.resuming"},
    {"accelerate.accelerator"},
    {"accelerate", "accelerate.utils"},
    {"verification.report", "verification.gradient", "verification.names"},
    {"verification.keep", "verification.seen"},
    {"verification.witness", "verification.rows"},
    {"verification.bigbatch"},
    {"verification.comparison"},
    {"verification.coupling", "verification.aims", "verification.clipping"},
    {"verification.weights"},
    {"verification.causes"},
    {"verification.main"},
    {"verification"},
    {"verify"},
    {
        f"train.{name}"
        for name in ("settings", "cache", "storage", "stream", "signals", "clock", "record", "best", "charts")
    },
    {
        f"train.{name}"
        for name in ("flags", "documents", "pretrained", "manifest", "schedule", "folder", "world", "report")
    },
    {"train.checkpoint"},
    {"train.vocabulary"},
    {"train.corpus", "train.models"},
    {"train.data", "train.generate"},
    {"train.learner"},
    {"train.trainer"},
    {"train"},
    {"__init__", "subcommands"},
    {"cli"},
    {"__main__"},
]


def test_public_names():
    assert sorted(macrobatch.__all__) == [
        "Accumulator",
        "MacroStep",
        "MacrobatchError",
        "StepResult",
        "by_count",
        "by_tokens",
        "causal_lm_loss",
        "verify",
    ]
    assert all(hasattr(macrobatch, name) for name in macrobatch.__all__)


def test_every_module_has_its_layer():
    assert {module_of(path) for path in SOURCE.glob("**/*.py")} == set().union(*LAYERS)


@pytest.mark.parametrize("module", sorted(set().union(*LAYERS)))
def test_imports_point_down(module):
    path = next(path for path in SOURCE.glob("**/*.py") if module_of(path) == module)
    assert wrong_imports(path.read_text(), allowed_in(module), TRAIN if module.startswith("train.") else set()) == []


def test_the_guard_sees_an_import_that_points_up():
    assert wrong_imports("from macrobatch.accumulator import Accumulator", allowed_in("window")) == ["accumulator"]
    assert wrong_imports("import numpy", allowed_in("window")) == ["numpy"]
    assert wrong_imports("from macrobatch import update", allowed_in("gradients")) == ["update"]
    assert wrong_imports("from macrobatch.accelerate import loaders", allowed_in("macrostep")) == ["accelerate.loaders"]
    assert wrong_imports("from macrobatch.train import trainer", allowed_in("train.models")) == ["train.trainer"]


def test_the_core_starts_without_what_the_trainer_needs():
    """Importing it, and asking the command for help, loads none of it."""
    program = f"import sys, macrobatch.cli; print([n for n in {sorted(TRAIN)} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


def module_of(path):
    """By its name below the package; a package is its __init__."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def allowed_in(module):
    layer = next(index for index, names in enumerate(LAYERS) if module in names)
    return set().union(*LAYERS[:layer])


def wrong_imports(source, allowed, others_allowed=frozenset()):
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
    own = [name.removeprefix("macrobatch.") for name in found if name.startswith("macrobatch.")]
    others = {name.split(".")[0] for name in found if not name.startswith("macrobatch")}
    return [name for name in own if name not in allowed] + sorted(
        others - {"torch"} - others_allowed - sys.stdlib_module_names
    )


LAZY = """
import sys, macrobatch, macrobatch.cli
assert "torch" not in sys.modules
import macrobatch.verification.report
from macrobatch import verify
assert callable(verify) and verify is macrobatch.verify, verify
assert macrobatch.errors.UsageError
assert not hasattr(macrobatch, "no_such_name")
"""


def test_torch_is_imported_when_it_is_needed():
    """And the function `verify` is not hidden by the module of its name, whichever is imported first."""
    subprocess.run([sys.executable, "-c", LAZY], timeout=120, check=True)
