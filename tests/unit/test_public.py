"""Two guards: what users can import, and which module may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import macrobatch

SOURCE = Path(macrobatch.__file__).parent
# Which room may import which others, and torch; within a room any file may import any other, but in no circle. Nothing
# else but the standard library, except for what the extras install.
ROOMS = {
    "errors": set(),
    "types": set(),
    "reference": set(),
    "_torch": {"errors"},
    "_io": {"errors"},
    "_ranks": {"errors", "types", "_torch", "_cut"},
    "_cut": {"errors", "_torch", "_io"},
    "_loss": {"errors", "_torch", "_cut"},
    "_border": {"errors", "types", "_torch", "_ranks"},
    "_engine": {"errors", "types", "_torch", "_ranks", "_border", "_loss"},
    "_checks": {"errors", "types", "_torch", "_cut", "_ranks", "_engine", "_loss"},
    "_terms": {"errors", "types", "_torch", "_cut", "_ranks", "_border", "_engine", "_loss"},
    "_joint": {"errors", "types", "_torch", "_cut", "_ranks", "_border", "_engine", "_checks", "_terms"},
    "_batch": {
        "errors",
        "types",
        "_torch",
        "_cut",
        "_ranks",
        "_border",
        "_engine",
        "_checks",
        "_terms",
        "_joint",
        "_loss",
        "_cudagraph",
    },
    "_loop": {"errors", "types", "_torch", "_cut", "_ranks", "_border", "_engine", "_checks", "_terms"},
    "_assembly": {"errors", "types", "_torch", "_ranks", "_border", "_engine", "_checks", "_terms"},
    "_cudagraph": {"errors", "types", "_torch", "_cut", "_border", "_engine", "_checks", "_joint"},
    "losses": {"errors", "types", "_torch", "_cut"},
    "contrastive": {"errors", "_torch"},
}
CORE = set(ROOMS)
ROOMS["accumulator"] = CORE
ROOMS["macrostep"] = CORE
FACES = {"accumulator", "macrostep", "losses", "contrastive"}
ROOMS["verification"] = CORE | FACES
ROOMS["verify"] = {"verification"}
ROOMS["verification"] |= {"transformers", "lightning"}  # only where the program has imported the library
ROOMS["accelerate"] = CORE | FACES | {"verification"}
ROOMS["transformers"] = CORE | FACES
ROOMS["lightning"] = CORE | FACES
ROOMS["train"] = CORE | FACES
ROOMS["demo"] = FACES
ROOMS["auditing"] = {"errors", "_torch", "_loss", "_ranks", "_io", "_engine", "__init__"}
ROOMS["cli"] = CORE | {"train", "verify", "demo", "auditing", "__init__"}
ROOMS["__init__"] = CORE | FACES | {"verify", "verification", "auditing"}
ROOMS["__main__"] = {"cli"}
TRAIN = {"transformers", "tokenizers", "safetensors", "peft", "rich", "yaml", "jinja2", "psutil", "datasets"}
TRAIN |= {"wandb", "mlflow", "trackio"}
EXTRAS = {name: {name} for name in ("accelerate", "transformers", "lightning")} | {"train": TRAIN}
EXTRAS["auditing"] = {"pytest"}  # its plugin, which pytest imports


def test_public_names():
    assert sorted(macrobatch.__all__) == [
        "Accumulator",
        "Encoded",
        "MacroStep",
        "MacrobatchError",
        "StepResult",
        "Sum",
        "audit",
        "by_count",
        "by_tokens",
        "causal_lm_loss",
        "contrastive_loss",
        "verify",
    ]
    assert all(hasattr(macrobatch, name) for name in macrobatch.__all__)


FILES = sorted(SOURCE.glob("**/*.py"))


def test_every_file_has_its_room():
    assert {room_of(module_of(path)) for path in FILES} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_rooms_import_those_they_may(path):
    assert wrong_imports(path.read_text(), room_of(module_of(path))) == []


def test_no_file_imports_itself_in_a_circle():
    imported = {module_of(path): imports_at_the_top(path.read_text()) for path in FILES}
    done = set()

    def walk(module, way):
        assert module not in way, " -> ".join([*way, module])
        if module not in done:
            for other in imported.get(module, ()):
                if other != "__init__":
                    walk(other, [*way, module])
            done.add(module)

    for module in imported:
        walk(module, [])


def test_the_guard_sees_a_wrong_import():
    assert wrong_imports("from macrobatch.accumulator import Accumulator", "_engine") == ["accumulator"]
    assert wrong_imports("import numpy", "_engine") == ["numpy"]
    assert wrong_imports("from macrobatch._engine import closing", "_ranks") == ["_engine.closing"]
    assert wrong_imports("from macrobatch import accelerate", "macrostep") == ["accelerate"]
    assert wrong_imports("import rich", "train") == []


def test_the_core_starts_without_what_the_trainer_needs():
    """Importing it, and asking the command for help, loads none of it."""
    program = f"import sys, macrobatch.cli; print([n for n in {sorted(TRAIN)} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"


def module_of(path):
    """By its name below the package; a package is its __init__."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def room_of(module):
    return module.split(".")[0]


def wrong_imports(source, room):
    own, others = imports_of(ast.walk(ast.parse(source)))
    allowed = ROOMS[room] | {room}
    foreign = others - {"torch"} - EXTRAS.get(room, set()) - sys.stdlib_module_names
    return [name for name in own if room_of(name) not in allowed] + sorted(foreign)


def imports_at_the_top(source):
    return imports_of(ast.parse(source).body)[0]


def imports_of(nodes):
    """The modules of this package, and the packages of others, that some statements import."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and is_package(node.module):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
    own = [name.removeprefix("macrobatch.") if "." in name else "__init__" for name in found if is_own(name)]
    return own, {name.split(".")[0] for name in found if not is_own(name)}


def is_own(name):
    return name.split(".")[0] == "macrobatch"


def is_package(module):
    """Whether what is imported from it may be modules."""
    return is_own(module) and (SOURCE / Path(*module.split(".")[1:])).is_dir()


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
