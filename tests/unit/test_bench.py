"""`macrobatch bench` and the scripts behind it: what is found, run, judged, summed up and drawn. Nothing is timed."""

import doctest
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import macrobatch
from harness import ROOT
from macrobatch import cli
from macrobatch.cli import main
from macrobatch.errors import UsageError

SCRIPT = '''"""{what}

More of it.
"""
import argparse, json, pathlib, sys

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--loudly", action="store_true")
    parsed = parser.parse_args()
    parsed.out.parent.mkdir(exist_ok=True)
    if {status} != 2:
        parsed.out.write_text(json.dumps({result}))
    print("LOUD" if parsed.loudly else "quiet", flush=True)
    return {status}

sys.exit(main())
'''
RESULT = {
    "date": "2030-01-02",
    "processor": "an abacus",
    "rows": [{"exact": True}, {"deeper": {"exact": False}}, {"agrees": True}, {"agrees": None}],
    "targets": [
        {"name": "speed", "at_least": 4.5, "found": 5.0, "reached": False},  # its gradient was wrong
        {"name": "memory", "at_most": 1.15, "found": 1.1, "reached": True},
    ],
    "links": {
        "slow": {"target": {"time": 1.2, "time_at_most": 1.03, "speed": 4, "speed_at_least": 3, "reached": False}}
    },
}


@pytest.fixture
def scripts(tmp_path, monkeypatch) -> Path:
    """A folder with two benchmarks, one that cannot run, and what is none."""
    where = tmp_path / "benchmarks"
    where.mkdir()
    shutil.copy(ROOT / "benchmarks/runner.py", where)
    for name, status in (("right", 0), ("wrong", 1), ("elsewhere", 2)):
        filled = SCRIPT.format(what=f"What {name} measures.", name=name, status=status, result=RESULT)
        (where / f"{name}.py").write_text(filled)
    (where / "record.py").write_text('"""No main."""\n')
    (where / "silent.py").write_text("def main(): ...\n")
    (where / "figures.py").write_text('"""Draws."""\ndef main(): ...\n')
    monkeypatch.setattr(cli, "_benchmarks_folder", lambda: where)
    return where


@pytest.fixture
def imported(monkeypatch):
    """A script of the folder as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: importlib.import_module(name)


# -------------------------------------------------------------------------------------------------- which there are


def test_a_benchmark_has_a_main_and_says_what_it_measures(scripts, imported):
    found = imported("runner").benchmarks(scripts)
    assert list(found) == ["elsewhere", "right", "wrong"]
    assert found["right"].what == "What right measures."


def test_those_of_the_project(capsys):
    assert main(["bench", "--list"]) == 0
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"gpu", "network", "overhead", "variable_length"} <= set(listed)
    assert not {"record", "figures", "tables"} & set(listed)
    assert all(what.endswith(".") for what in listed.values()), "one line, a sentence"


def test_a_name_that_is_none(scripts, imported):
    runner = imported("runner")
    with pytest.raises(UsageError, match="no benchmark 'left': there are elsewhere, right, wrong"):
        runner.chosen(["right", "left"], runner.benchmarks(scripts))


def test_outside_of_a_checkout_it_says_where_they_are(tmp_path):
    installed = tmp_path / "site" / "macrobatch"
    shutil.copytree(Path(macrobatch.__file__).parent, installed, ignore=shutil.ignore_patterns("__pycache__"))
    for words in (["--list"], ["overhead"]):
        done = run("-m", "macrobatch", "bench", *words, path=installed.parent, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"not in the installed package ({installed}). Run `make bench` in a checkout" in done.stderr


# --------------------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize(
    ("names", "status"), [(["right"], 0), (["right", "elsewhere"], 0), (["elsewhere"], 2), ([], 1)]
)
def test_the_exit_status(scripts, tmp_path, capfd, names, status):
    assert main(["bench", *names, "--out", str(tmp_path / "out")]) == status
    out = capfd.readouterr().out
    assert out.count("quiet") == len(names or ["all", "three", "run"])
    assert ("right" in (names or ["right"])) == ("[1/1] right" in out or "] right: What right measures." in out)


def test_options_are_handed_on_and_only_new_results_are_shown(scripts, tmp_path, capfd):
    (tmp_path / "old.json").write_text(json.dumps(RESULT))
    assert main(["bench", "right", "--out", str(tmp_path), "--options=--loudly"]) == 0
    out = capfd.readouterr().out
    assert "LOUD" in out
    assert str(tmp_path / "right.json") in out
    assert "old.json" not in out


def test_options_that_it_does_not_have(scripts, tmp_path, capfd):
    assert main(["bench", "right", "--out", str(tmp_path), "--options=--softly"]) == 2
    assert "cannot run here, or not with these options" in capfd.readouterr().out


def test_what_was_found(imported, tmp_path):
    path = tmp_path / "made_up.json"
    path.write_text(json.dumps(RESULT))
    assert imported("runner").summary([path]).splitlines() == [
        "target                             wanted  found",
        "---------------------------  ------------  -----  -------",
        "made_up, speed               at least 4.5      5   MISSED",
        "made_up, memory              at most 1.15    1.1  reached",
        "made_up, links, slow, time   at most 1.03    1.2   MISSED",
        "made_up, links, slow, speed    at least 3      4  reached",
        "",
        f"{path}: 2030-01-02, an abacus; 2 of 3 rows agreed with their reference",
    ]


def test_every_file_of_results_can_be_summed_up(imported):
    files = sorted((ROOT / "results").glob("*.json"))
    lines = imported("runner").summary(files).splitlines()
    assert len(files) >= 4
    assert all(any(line.startswith(f"{path}: 20") for line in lines) for path in files)


# -------------------------------------------------------------------------------------------------- targets, figures


def a_row(name: str, speed: float, **changed: object) -> dict:
    row = {
        "name": name,
        "per_second": speed,
        "quartiles": [speed - 1, speed + 1],
        "over_accelerate": speed / 100,
        "over_hand": None,
        "reserved_gib": 2.0,
        "agrees": True,
        "error": "",
    }
    return {**row, **changed}


def a_case(section: str, micro_batch: int, *rows: dict) -> dict:
    return {
        "name": "Llama 110M, 1 x 512 x 16",
        "section": section,
        "micro_batch": micro_batch,
        "micro_batches": 16 // micro_batch,
        "size_of_a_window": 8192,
        "largest_micro_batch": 512 * micro_batch,
        "rows": list(rows),
    }


def test_targets(imported):
    rows = [
        a_row("Accelerate", 100.0),
        a_row("Macrobatch", 100.0, over_hand=0.98),
        a_row("Macrobatch, cuda_graph", 460.0, reserved_gib=2.2),
        a_row("Macrobatch, compiled, cuda_graph", 900.0, agrees=False, reserved_gib=None),
    ]
    case = a_case("fixed", 1, *rows)
    found = imported("cases").targets_of([case])
    assert [(each["name"].partition(": ")[2], each["found"], each["reached"]) for each in found] == [
        ("Macrobatch, time over the hand-written loop's", 1.0204, False),
        ("Macrobatch, cuda_graph, speed over eager Accelerate's", 4.6, True),
        ("Macrobatch, cuda_graph, memory over Macrobatch's", 1.1, True),
        ("Macrobatch, compiled, cuda_graph, speed over eager Accelerate's", 9.0, False),  # fast, and wrong
    ]


def test_every_loop_has_a_colour(imported):
    """One without would be missing in the figures."""
    gpu, shapes = imported("gpu"), imported("models").SHAPES
    ways = {way.name for shape in shapes for compiled in (False, True) for way in gpu.ways_of(shape, compiled)}
    assert ways <= set(imported("figures").COLOURS)


def test_by_tokens_has_no_larger_micro_batches_than_the_peers(imported):
    """Its bound was once four times what their micro-batches could hold: it was faster for that alone."""
    models = imported("models")
    varying = [shape for shape in [*models.SHAPES, *models.TINY] if shape.longest is not None]
    assert [shape.name for shape in varying] == ["chats", "bert"] * 2
    for shape in varying:
        drawn = shape.draw(500, torch.Generator().manual_seed(0))
        assert max(batch["input_ids"].numel() for batch in models.cut(drawn, shape.micro_batch)) == shape.budget


def test_figures(imported, tmp_path):
    figures = imported("figures")
    rows = [
        a_row("Accelerate", 100.0),
        a_row("Macrobatch", 250.0, agrees=False),
        a_row("Lightning Fabric", 1.0, error="x"),
    ]
    sweep = [a_case("sweep", n, a_row("Accelerate", 100.0 * n), a_row("Macrobatch", 300.0)) for n in (1, 2, 4)]
    sweep[-1]["rows"].append(a_row("one big batch", 500.0))
    result = {
        "versions": {"torch": "2.13"},
        "processor": "an abacus",
        "date": "2030-01-02",
        "precision": "float32",
        "optimizer": "AdamW",
        "cases": [a_case("fixed", 1, *rows), a_case("variable", 2, *rows)],
    }
    swept = result | {"cases": sweep}
    (tmp_path / "gpu.json").write_text(json.dumps(result))
    (tmp_path / "gpu_sweep.json").write_text(json.dumps(swept))
    drawn = run(
        ROOT / "benchmarks/figures.py", "--results", tmp_path, "--out", tmp_path, path=ROOT / "src", cwd=tmp_path
    )
    assert drawn.returncode == 0, drawn.stderr
    names = ["fixed", "micro_batch_size", "variable_lengths"]
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))

    by_name = figures.figures_of(result)
    (panel,) = by_name["fixed"].axes
    assert sorted(bar.get_width() for bar in panel.patches) == [100.0, 250.0]
    assert [text.get_text() for text in panel.texts] == ["2.5x gradient wrong", "1.0x"]
    speeds, memory = figures.figures_of(swept)["micro_batch_size"].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in speeds.lines}
    assert lines == {"Accelerate": [100, 200, 400], "Macrobatch": [300] * 3, "one big batch": [500, 500]}
    assert {tuple(line.get_ydata()) for line in memory.lines} == {(2, 2, 2), (2, 2)}


def test_a_table_without_rich(imported, monkeypatch, capsys):
    record = imported("record")
    monkeypatch.setitem(sys.modules, "rich.table", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    record.show("Speeds", ["loop", "tokens/s"], [["by hand", "9"]], "On an abacus.")
    with record.progress("measuring", 3) as tick:
        tick()
    said = capsys.readouterr().out.split("\n")
    assert said == [
        "",
        "Speeds",
        "",
        "loop     tokens/s",
        "-------  --------",
        "by hand         9",
        "",
        "On an abacus.",
        "",
        "",
    ]


@pytest.mark.parametrize(("name", "examples"), [("runner", 4), ("record", 1)])
def test_the_examples_of_docstrings(imported, name, examples):
    assert doctest.testmod(imported(name)) == (0, examples)


def test_where_results_go(imported):
    import argparse

    parser = argparse.ArgumentParser()
    imported("record").add_output(parser, "gpu")
    places = [parser.parse_args(words).output.as_posix() for words in ([], ["--out", "a"], ["--output", "a/b.json"])]
    assert places == ["results/gpu.json", "a/gpu.json", "a/b.json"]


def test_nothing_to_draw(tmp_path):
    drawn = run(
        ROOT / "benchmarks/figures.py", "--results", tmp_path, "--out", tmp_path, path=ROOT / "src", cwd=tmp_path
    )
    assert (drawn.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "macrobatch bench gpu" in drawn.stderr


def run(*words, path, cwd, **environment) -> subprocess.CompletedProcess:
    """Python with these words, and this to import from."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )
