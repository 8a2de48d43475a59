"""Every table of figures on a page is what its file of results says."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT

PAGE = "# Title\n\nBefore.\n\n<!-- figures: {} -->\n\n<!-- /figures -->\n\nAfter.\n"


def tables(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "benchmarks" / "tables.py", *words]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)


def test_every_page_agrees_with_its_results():
    done = tables()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "`make tables` rewrites the pages"


def factor(program: str) -> float:
    """What the report card says of a program with windows of four."""
    rows = project("report_card")["rows"]
    return next(row["factor"] for row in rows if row["name"] == program and row["configuration"].startswith("4 steps"))


def links() -> list[float]:
    return [link["target"]["speedup"] for link in project("network")["links"].values()]


def story() -> list[float]:
    """The last losses of the first, the second and the right loop."""
    page = (ROOT / "docs" / "stories" / "is-my-loop-right.md").read_text()
    return [
        float(re.search(rf"^ +{loop}_loop +([\d.]+)", page, re.MULTILINE)[1]) for loop in ("first", "second", "right")
    ]


def graphs() -> float:
    """How many times as fast as the hand-written loop recorded micro-steps are, at most."""
    cases = [
        {row["name"]: row for row in case["rows"]} for case in project("gpu")["cases"] if case["section"] == "fixed"
    ]
    return max(rows["Macrobatch, cuda_graph"]["per_second"] / rows["hand-written"]["per_second"] for rows in cases)


def of_terms() -> float:
    return 100 * (max(row["target"]["found"] for row in project("terms")["rows"]) - 1)


def of_pairs() -> list[float]:
    found = [target["found"] for target in project("contrastive")["sizes"]["targets"]]
    return [min(found), max(found)]


LOSSES = r"ends with ([\d.]+) nats .* mistakes, with ([\d.]+) after the second, and with ([\d.]+) "
PROSE = {
    "what others do, GPT-2": ("README.md", r"GPT-2: ([\d.]+) times", lambda: [factor("Trainer, GPT-2")]),
    "what others do, BERT": ("README.md", r"BERT: ([\d.]+) times", lambda: [factor("Trainer, BERT, masked words")]),
    "what others do, short": ("README.md", r"two micro-batches \| ([\d.]+) times", lambda: [factor("accumulate()")]),
    "the story": ("README.md", LOSSES, story),
    "the story, why": ("docs/why.md", r"with ([\d.]+) and ([\d.]+) nats .* with ([\d.]+) without", story),
    "seven": ("README.md", r"up to (\d+) times as fast as other loops", lambda: [graphs()]),
    "a slow link": ("docs/scaling.md", r"this was ([\d.]+) times .* 200 Mbit/s ([\d.]+) times", links),
    "two terms": ("docs/losses.md", r"at most ([\d.]+) % of a window", lambda: [of_terms()]),
    "a loss of all pairs": ("docs/contrastive.md", r"was ([\d.]+) to ([\d.]+) times as fast as a loop", of_pairs),
}


@pytest.mark.parametrize("name", PROSE)
def test_numbers_in_sentences_are_those_of_the_results(name):
    page, pattern, results = PROSE[name]
    said = re.search(pattern, (ROOT / page).read_text().replace("\n", " ")).groups()
    assert list(said) == [f"{found:.{len(one.partition('.')[2])}f}" for one, found in zip(said, results(), strict=True)]


@pytest.fixture
def tree(tmp_path) -> Path:
    """A README with nothing in it yet, and the results of the project."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE.format("overhead"))
    return tmp_path


def test_a_page_is_rewritten_between_its_marks_alone(tree):
    assert tables("--root", tree).returncode == 1
    assert tables("--root", tree, "--write").returncode == 0
    assert tables("--root", tree).returncode == 0
    before, table, after = (tree / "README.md").read_text().partition("| Accelerate |")
    assert before.startswith("# Title\n\nBefore.\n\n<!-- figures: overhead -->\n\n| micro")
    assert after.endswith("\n\n<!-- /figures -->\n\nAfter.\n")
    assert table


def test_a_figure_that_changed_is_seen(tree):
    tables("--root", tree, "--write")
    path = tree / "results" / "overhead.json"
    result = json.loads(path.read_text())
    result["rows"][1]["overhead"] = 19.2
    path.write_text(json.dumps(result))
    done = tables("--root", tree)
    assert done.returncode == 1
    assert "+| Macrobatch | 19 |" in done.stdout


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (PAGE.format("speeds"), "there is no table 'speeds': there are overhead, "),
        (PAGE.replace("<!-- /figures -->", "").format("overhead"), "needs a <!-- /figures -->"),
        (PAGE.format("earlier"), "network.json: run `macrobatch bench network`"),
    ],
)
def test_a_table_that_cannot_be_made(tree, page, said):
    (tree / "results" / "network.json").unlink()
    assert tables("--root", tree, "--write").returncode == 0, "no page needs that file"
    (tree / "docs" / "page.md").write_text(page)
    done = tables("--root", tree, "--write")
    assert done.returncode == 1
    assert f"{tree / 'docs' / 'page.md'}: " in done.stderr
    assert said in done.stderr
    assert (tree / "docs" / "page.md").read_text() == page


# --------------------------------------------------------------------------------------------------- what tables say


@pytest.fixture
def imported(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def results_of(result: object):
    return lambda name: result


def project(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


LLAMA = ("fixed", "variable")


@pytest.mark.parametrize(
    ("name", "file", "sections"),
    [
        ("gpu", "gpu", LLAMA),
        ("shapes", "gpu", ("others",)),
        ("micro_batch_size", "gpu_sweep", ("sweep",)),
    ],
)
def test_every_row_is_shown_and_wrong_ones_are_named(imported, name, file, sections):
    result = project(file)
    for case in result["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        rows["hand-written"]["agrees"] = False
        rows["Accelerate"]["error"] = "ValueError: no"
    table = imported("tables").BLOCKS[name](results_of(result))
    cases = [case for case in result["cases"] if case["section"] in sections]
    for loop in {row["name"] for case in cases for row in case["rows"]}:
        assert f"\n| {loop} | " in table
    assert table.count("gradient wrong") == table.count("| failed ") == len(cases)


def test_a_gain_is_of_two_loops_that_ran_and_agree(imported):
    files = {name: project(name) for name in ("gpu", "gpu_sweep", "eager", "overhead")}

    def gain() -> str:
        lines = imported("tables").performance(files.__getitem__).splitlines()
        return next(line for line in lines if line.startswith("| `cuda_graph=True` |"))

    first, second = (files["gpu"]["cases"][index] for index in (0, 1))
    fast, slow = (
        {row["name"]: row for row in first["rows"]}[name] for name in ("Macrobatch, cuda_graph", "Macrobatch")
    )
    assert f"{fast['per_second'] / slow['per_second']:.2g} ({first['name']})" in gain()
    fast["agrees"] = False
    assert first["name"] not in gain()
    assert second["name"] in gain()
    fast["agrees"], slow["per_second"] = True, None
    assert first["name"] not in gain()
    assert "at most 0.25: missed" in imported("tables").overhead(files.__getitem__)


def test_missed_targets_are_said(imported):
    tables, result = imported("tables"), project("gpu")
    shown = {case["name"] for case in result["cases"] if case["section"] in ("fixed", "variable")}
    own = [target for target in result["targets"] if target["name"].partition(":")[0] in shown]
    for target in result["targets"]:
        target["reached"] = True
    assert f"\n\nTargets: {len(own)} of {len(own)} reached." in tables.gpu(results_of(result))
    name = f"{result['cases'][0]['name']}: a loop"
    own[3].clear()
    own[3].update({"name": name, "at_least": 8.0, "found": 7.6, "reached": False})
    said = f"Targets: {len(own) - 1} of {len(own)} reached ([those that were missed]("
    assert said in tables.gpu(results_of(result))
    assert tables.targets(results_of(result)).count(name) == len(tables.WITH_TARGETS)


def test_what_an_earlier_version_gave_says_all_its_targets(imported):
    tuning = imported("tuning")
    ours = tuning.Measured(seconds=[1.0] * 4, losses=[3.0, 2.5], tokens=[300] * 4, padded=[330] * 4, peak_bytes=2**31)
    peer = tuning.Measured(seconds=[1.0] * 4, losses=[3.0, 2.9], tokens=[250] * 4, padded=[500] * 4)
    grouped = tuning.Measured(seconds=[1.0] * 4, losses=[3.0, 2.4], tokens=[400] * 4, padded=[420] * 4)
    found = {"macrobatch": ours, "Trainer": peer, "Trainer, grouped": grouped}
    report = tuning.report(found, tuning.TINY)
    table = imported("tables").earlier(lambda name: report if name == "tuning" else project(name)).splitlines()
    (row,) = [line for line in table if "`tuning.json`" in line]
    assert "the fastest peer on the same batches: at least 1.50: missed (1.20); " in row
    assert f"the fastest peer of all: at least 1.00: missed (0.75) | {report['versions']['macrobatch']} | " in row
    (row,) = [line for line in table if "`network.json`" in line]
    assert "1gbit: at most 1.03: reached (0.99); 200mbit: at most 1.03: reached (1.00) |" in row


def test_trainers_show_times_targets_and_what_failed(imported):
    rows = [
        {"trainer": "Lightning", "way": "as it is", "tokens_per_second": 10.0, "times": 1.0, "apart": 0.0},
        {"trainer": "Lightning", "way": "by tokens", "tokens_per_second": 28.0, "times": 2.8, "apart": 1e-4},
        {"trainer": "Lightning", "way": "exact", "tokens_per_second": None, "times": None, "apart": None},
    ]
    rows[1]["target"] = {"found": 2.8, "at_least": 3.0, "reached": False}
    rows[2]["error"] = "no memory"
    result = project("trainers")
    result["trainers"] = {"Lightning": {"rows": [{"reserved_gib": 1.0, **row} for row in rows]}}
    table = imported("tables").trainers(results_of(result)).splitlines()
    assert table[2:5] == [
        "| Lightning, as it is | 10 | 1.00 | 1.0 | 0 | |",
        "| Lightning, by tokens | 28 | 2.80 | 1.0 | 1e-04 | at least 3.00: missed (2.80) |",
        "| Lightning, exact [1] | failed | | 1.0 | | |",
    ]
    assert "[1] no memory." in table


def test_shapes_show_every_loop_and_why_one_is_missing(imported):
    def row(name: str, speed: float | None, **changed: object) -> dict:
        plain = {"windows": 10 if speed else 0, "reserved_gib": 2.04, "agrees": True, "note": "", "error": ""}
        return {"name": name, "per_second": speed, **plain, **changed}

    def case(name: str, *rows: dict, error: str = "") -> dict:
        return {"name": name, "section": "others", "rows": rows, "error": error}

    late = "not run: no time was left to compile it"
    images = [row("hand-written", 601.4), row("hand-written, compiled", None, note=late)]
    texts = [
        row("hand-written", 28_950.0, agrees=None, note="not compared: with dropout it is the reference of the others"),
        row("hand-written, grouped", 30_000.0),
        row("Macrobatch", 28_496.0, agrees=False, windows=12, reserved_gib=None),
        row("hand-written, compiled", None, error="ValueError: no"),
    ]
    cases = [case("ResNet-50", *images), case("LoRA", error="ImportError: no peft"), case("GPT-2", *texts)]
    table = imported("tables").shapes(results_of({**project("gpu"), "cases": cases})).splitlines()
    assert table[:6] == [
        "| tokens or images per second (reserved GiB) | ResNet-50 | GPT-2 |",
        "|---|---|---|",
        "| hand-written | 601 (2.0) | 28,950 (2.0) [1] |",
        "| hand-written, grouped | | 30,000 (2.0) |",
        "| Macrobatch | | 28,496, gradient wrong |",
        "| hand-written, compiled | not run [2] | failed [3] |",
    ]
    assert table[7:14:2] == [
        "[1] not compared: with dropout it is the reference of the others.",
        f"[2] {late}.",
        "[3] ValueError: no.",
        "LoRA failed: ImportError: no peft.",
    ]
    assert table[-1].startswith("Medians over 10 to 12 windows. NVIDIA H200, ")
