"""`macrobatch demo`, as one types it: what it prints is what it says."""

import math
import re
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from macrobatch import demo


@pytest.fixture(scope="module")
def printed() -> str:
    """On a terminal that can show nothing but ASCII, and without colours: what is not written for it would raise."""
    command = [sys.executable, "-X", "utf8=0", "-m", "macrobatch", "demo"]
    environment = {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=demo.os.environ | environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return float(found[1])


def test_the_usual_loop_is_wrong_and_the_cure_is_exact(printed):
    assert number(r"the usual loop  (\d+)%", printed) > 10
    assert number(r"Macrobatch      (\S+)\n", printed) < 1e-12
    losses = {
        name: number(rf"{name} +(\d\.\d+)\n", printed) for name in ("one big batch", "the usual loop", "Macrobatch")
    }
    assert losses["Macrobatch"] == losses["one big batch"] < losses["the usual loop"]


def test_the_weights_of_letters_are_those_of_the_loop(printed):
    rows = re.findall(r"^  \d +(\d+)   #+ (\d\.\d+)$", printed, re.MULTILINE)
    counts, weights = zip(*((int(count), float(weight)) for count, weight in rows), strict=True)
    assert sum(c * w for c, w in zip(counts, weights, strict=True)) == pytest.approx(sum(counts), rel=0.01)
    assert max(weights) > 2 * min(weights)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not say what a process takes")
def test_micro_batches_take_less_memory(printed):
    whole, part, share = (
        number(p, printed) for p in (r"at once +#+ (\d+) MiB", r"MacroStep.* (\d+) MiB", r"(\d+)% of the")
    )
    assert part < whole / 2
    assert share == pytest.approx(100 * part / whole, abs=1.5)
    assert number(r"the step differ by (\S+)", printed) < 1e-12


def test_the_code_that_is_shown_is_the_code_that_runs():
    """Each of the two loops, taken from the text, trains as the function of its name does."""
    names = demo.emoji_names()[:72]  # the last window has one micro-batch
    for text, loop in ((demo.USUAL, demo.usual_loop), (demo.EXACT, demo.exact_loop)):
        models = demo.new_speller(), demo.new_speller()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        assert len(list(loop(models[0], optimizers[0], names))) == 3
        loader = demo.micro_batches(names)
        words = {"model": models[1], "optimizer": optimizers[1], "loader": loader, "F": F}
        if "acc" in text:
            from macrobatch import Accumulator

            exec(text, words | {"Accumulator": Accumulator})
        else:
            for i, (x, y) in enumerate(loader):
                exec(text, words | {"i": i, "x": x, "y": y})
        for own, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(own, other)


def test_the_plot_is_logarithmic():
    lines = demo.plot({"a": [1.0] * 5, "b": [1e-8] * 5, "c": [0.0, 1e-30, 1e-16, 1e-16, 1e-16]})
    places = {key: [number for number, line in enumerate(lines) if f"{key * 5}" in line] for key in "abc"}
    assert places == {"a": [0], "b": [round((demo.HEIGHT - 1) / 2)], "c": [demo.HEIGHT - 1]}


def test_no_colour_where_nobody_looks(printed, monkeypatch):
    assert "\x1b" not in printed
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert demo._coloured("x", demo.RED) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert demo._coloured("x", demo.RED) == "x"


def test_memory_that_is_not_known_is_not_invented(monkeypatch, capsys):
    class Found:
        def get(self, timeout):
            return demo.Measured([1.0], math.nan)

    demo.print_memory([Found(), Found()])
    assert "cannot be measured" in capsys.readouterr().out
