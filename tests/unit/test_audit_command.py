"""`macrobatch audit` as a command, and the pytest fixture: a program runs in its own process."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness

PROGRAM = """
import argparse, torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--divide-by", type=int, default=4)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--out")
given = parser.parse_args()
torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
loss_of = torch.compile(cross_entropy, backend="aot_eager") if given.compile else cross_entropy
print("the program speaks")
for index in range(48):
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    (loss_of(model(x), y) / given.divide_by).backward()
    if (index + 1) % given.steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    if given.fail and index == 9:
        raise ValueError("planted")
print("the program has ended")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def audited(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "macrobatch", "audit", *arguments],
        capture_output=True, text=True, timeout=120, cwd=folder, env=harness.environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip


def test_an_exact_program(folder):
    done = audited(folder, "--json", "found.json", "--html", "found.html", "--windows", "0", "train.py")
    assert done.returncode == 0, done.stderr
    assert "the program has ended" in done.stdout
    assert "exact: in 12 windows" in done.stdout
    found = json.loads((folder / "found.json").read_text())
    assert (found["verdict"], found["factor"], found["causes"]) == ("exact", 1.0, [])
    assert found["windows"][0] | {"optimizer": ""} == {
        "optimizer": "", "items": [4] * 4, "weights": [1.0] * 4, "scale": 1.0
    }  # fmt: skip
    page = (folder / "found.html").read_text()
    assert page.count("<circle") == 48
    assert "http" not in page.replace("http-equiv", "")


def test_a_wrong_program_and_json_alone_on_standard_output(folder):
    done = audited(folder, "--json", "-", "--windows", "2", "-m", "train", "--divide-by", "16")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["verdict"], found["factor"], found["causes"]) == ("wrong", 0.25, ["divided twice"])
    assert len(found["windows"]) == 2
    assert "the program speaks" in done.stderr
    assert "the program has ended" not in done.stderr
    assert "train.py:20" in done.stderr, "the line of the backward"
    assert "optimizer, steps=4)" in done.stderr
    done = audited(folder, "--windows", "2", "train.py", "--steps", "2")
    assert "optimizer, steps=2)" in done.stdout


def test_a_program_that_fails_is_unknown(folder):
    done = audited(folder, "--json", "-", "train.py", "--fail")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert (found["verdict"], found["causes"], len(found["windows"])) == ("unknown", [], 2)
    assert "ValueError: planted" in done.stderr


def test_a_compiled_loss_is_unknown_unless_it_is_not_compiled(folder):
    done = audited(folder, "--windows", "2", "train.py", "--compile")
    assert done.returncode == 2
    assert "--no-compile" in done.stdout
    assert audited(folder, "--windows", "2", "--no-compile", "train.py", "--compile").returncode == 0


def test_a_program_that_changes_its_folder(folder):
    (folder / "other").mkdir()
    program = "import os, sys\nos.chdir('other')\nprint(sys.argv[0], __file__, open(__file__).read()[:6])\n"
    (folder / "train.py").write_text(program + PROGRAM)
    done = audited(folder, "--json", "found.json", "--html", "found.html", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"train.py {folder / 'train.py'} import")
    assert (folder / "found.json").exists()
    assert (folder / "found.html").exists()


def test_wrong_arguments(folder):
    for arguments, said in (
        (["nothing.py"], "there is no program nothing.py"),
        (["-m", "nothing"], "No module named nothing"),
        ([], "needs a program"),
        (["--windows", "-1", "train.py"], "0 or more"),
    ):
        done = audited(folder, *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr


CATCHES_ALL = """
import sys, torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
caught = 0
for _ in range(60):
    try:
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    except:
        caught += 1
print("caught", caught)
"""


@pytest.mark.parametrize("last", ["", "sys.exit(3)", "raise ValueError('planted')"])
def test_a_program_that_catches_everything_runs_on_unwatched(folder, last):
    (folder / "train.py").write_text(CATCHES_ALL + last)
    done = audited(folder, "train.py")
    assert done.returncode == 0, done.stderr
    assert "caught 1\n" in done.stdout
    assert "exact: in 20 windows" in done.stdout


TEST = """
import torch
from torch.nn.functional import mse_loss

def test_training(macrobatch_audit):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (2, 6):
        (mse_loss(model(torch.ones(size, 3)), torch.ones(size, 1)) / 2).backward()
    optimizer.step()
    assert macrobatch_audit.causes == ["mean of means"]
    assert macrobatch_audit.verdict == "exact", macrobatch_audit
"""


def test_the_fixture(tmp_path):
    (tmp_path / "test_training.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_training.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=harness.environment(OMP_NUM_THREADS="1")
    )
    assert done.returncode == 1
    assert "wrong: in 1 window, items did not count as they should (mean of means)" in done.stdout


def test_the_readme_shows_what_audit_says_of_its_first_loop(folder):
    page = (harness.ROOT / "README.md").read_text()
    program = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    shown = re.search(r"^\$ macrobatch audit train.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    (folder / "train.py").write_text(program)
    ran = audited(folder, "train.py")
    assert ran.returncode == 1
    assert ran.stdout.strip() == shown.strip()
