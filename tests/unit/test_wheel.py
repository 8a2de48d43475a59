"""The wheel: what is in it, and that it works where nothing but torch is installed. Nothing is downloaded."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import macrobatch
from harness import ROOT
from harness.pages import blocks_of


def done(*command: object, **options: object) -> subprocess.CompletedProcess:
    """A program that ended, which no variable of this one's environment leads to the checkout."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [*map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT]
    built = done(sys.executable, "-m", "pip", *build)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def tracked() -> set[str]:
    """The files of the package in a checkout, but what explains rooms to those who work on them."""
    paths = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(ROOT / "src").as_posix() for path in paths if path.name != "README.md"}


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    information = f"macrobatch-{macrobatch.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(information)} == tracked()
    assert "macrobatch/py.typed" in names


# --------------------------------------------------------------------------------------------- an empty environment


def requirements(name: str) -> set[str]:
    """A distribution that is installed, and all that it cannot do without."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another platform
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", line)[0] for line in needed if "extra ==" not in line]
    return found


def link_torch(folder: Path) -> None:
    """A folder to import torch from, and what torch requires, and nothing else."""
    folder.mkdir()
    for name in requirements("torch"):
        one = distribution(name)
        for top in {path.parts[0] for path in one.files if path.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(one.locate_file(top))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    link_torch(folder / "torch-alone")
    (packages / "torch.pth").write_text(f"{folder / 'torch-alone'}\n")
    python = folder / "bin" / "python"
    installed = done(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    return folder


def first_example() -> str:
    """The README's Python from its top to the end of the first block that imports the package."""
    program = ""
    for block in blocks_of((ROOT / "README.md").read_text()):
        if block.language == "python":
            program += block.text
            if "import macrobatch" in block.text or "from macrobatch" in block.text:
                return program
    raise AssertionError("no block of the README imports macrobatch")


def test_the_first_example_of_the_readme_runs_from_the_wheel(environment, tmp_path):
    program = f"{first_example()}\nimport macrobatch\nprint(macrobatch.__file__)\n"
    ran = done(environment / "bin" / "python", "-c", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.splitlines()[-1]).is_relative_to(environment), "not that of the checkout"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "compare a training step with one big batch"),
        (["--version"], 0, f"macrobatch {macrobatch.__version__}"),
        (["train", "--help"], 0, "The number of samples in the batch of one optimizer step"),
        (["generate", "runs/none"], 2, "which is not installed: pip install 'macrobatch[train]'"),
        (["bench"], 2, "the benchmarks are in the project's repository, not in the installed package"),
    ],
)
def test_the_command_without_extras(environment, tmp_path, words, status, said):
    ran = done(environment / "bin" / "macrobatch", *words, cwd=tmp_path)
    output = ran.stdout + ran.stderr
    assert (ran.returncode, said in " ".join(output.split())) == (status, True), output  # lines are wrapped
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("from macrobatch.transformers import exact", "transformers"),
        ("from macrobatch.accelerate import Accelerator", "accelerate"),
        ("from macrobatch.train import Settings, train", "train"),
        ("from macrobatch.lightning import ExactStrategy; ExactStrategy('ddp', steps=2)", "lightning"),
    ],
)
def test_an_import_without_its_extra_says_what_to_install(environment, tmp_path, line, extra):
    ran = done(environment / "bin" / "python", "-c", line, cwd=tmp_path)
    assert f"pip install 'macrobatch[{extra}]' (in a checkout '.[{extra}]')" in ran.stderr.splitlines()[-1], ran.stderr


def test_verify_runs_without_extras(environment, tmp_path):
    (tmp_path / "loop.py").write_text(
        "import torch\n"
        "def given():\n"
        "    return torch.nn.Linear(3, 1), lambda model, x: (model(x).square().mean(), len(x)), torch.ones(6, 3)\n"
    )
    ran = done(environment / "bin" / "macrobatch", "verify", "loop:given", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
