"""The harness's processes that start at once are like those that Python starts."""

import subprocess
import sys

import pytest

from harness.preloaded import Preloaded

PROGRAM = """
import atexit, os, sys, warnings
atexit.register(print, "at exit")
print(__name__, sys.argv[1:], os.getcwd(), os.environ["TOLD"], sorted(globals()))
print(__import__("beside").__name__, file=sys.stderr)
{end}
"""
ENDS = ["", "sys.exit(3)", "raise ValueError('planted')", "warnings.warn('careful')", "os.kill(os.getpid(), 9)"]


@pytest.fixture(scope="module")
def python():
    with Preloaded("json", flags=("-W", "error")) as python:
        yield python


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_a_program_does_what_it_does_in_pythons_own_process(python, tmp_path, monkeypatch, how, end):
    """But for the lines of a traceback."""
    monkeypatch.setenv("TOLD", "so")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "program.py").write_text(PROGRAM.format(end=end))
    words = {"-c": ("-c", PROGRAM.format(end=end)), "-m": ("-m", "program"), "file": (tmp_path / "program.py",)}[how]
    found = python.run(*words, "one", "two", cwd=tmp_path)
    command = [sys.executable, "-W", "error", *map(str, words), "one", "two"]
    wanted = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (found.returncode, said_by(found)) == (wanted.returncode, said_by(wanted))


def said_by(done):
    names = {"__annotations__", "__cached__", "__file__", "__loader__", "__package__", "__spec__", "__doc__"}
    shown = "".join(word for word in done.stdout.split(" ") if word.strip("[]',\n") not in names)
    lines = [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    return shown.replace(",", "").replace("[", ""), lines


def test_a_program_that_does_not_end(python):
    with pytest.raises(AssertionError, match=r"still running after 0.2 s"):
        python.run("-c", "import time; time.sleep(60)", timeout=0.2)
    assert python.run("-c", "print(1)").stdout == "1\n"
