"""`benchmarks/gpu.py` with tiny models: right loops are found right, wrong ones wrong. Nothing is timed."""

import json

import pytest

from harness import ROOT
from harness.benchmarks import run_benchmark

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("peft")

SWEEP = ["sweep-4x16x1", "sweep-2x16x2", "sweep-1x16x4"]
NAMES = ["1x16x4", "chats", "gpt2", "vit", "resnet", "lora", "1.1B", "bert", *SWEEP]
BIG_BATCH = {"1x16x4", "vit", "lora", SWEEP[0]}  # it fits, and has the same gradient; of the sweep, once
PLANTED = """
import sys
import gpu
import loops


def scaled(job):
    for parameter in job.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.999)
    return loops.macro_step(job)


def stale(job):  # trains on its first window again and again, as a graph would whose input is not filled anew
    run = loops.macro_step(job)
    return lambda index: run(0)


def raises(job):
    raise ZeroDivisionError("of its own")


def raises_later(job):
    run, done = loops.macro_step(job), []

    def late(index):
        done.append(index)
        if job.max_norm == gpu.MAX_NORM and len(done) > 3:  # in its second timed window
            raise ZeroDivisionError("later")
        return run(index)

    return late


def ways(shape, is_compiled):
    yield from usual(shape, is_compiled)
    if not is_compiled:
        for build in (scaled, stale, raises, raises_later):
            yield gpu.Way(name=build.__name__, build=build, is_compiled=False)


usual, gpu.ways_of = gpu.ways_of, ways
sys.exit(gpu.main())
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict:
    """All shapes without compiling, with loops that are wrong beside those that are right."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "planted.py").write_text(PLANTED)
    done = run_benchmark(folder / "planted.py", "--tiny", "--windows", 2, "--compile-within", 0, "--out", folder)
    assert done.returncode == 1, done.stderr
    files = [json.loads((folder / name).read_text()) for name in ("gpu_tiny.json", "gpu_tiny_sweep.json")]
    cases = [case for found in files for case in found["cases"]]
    return {case["shape"]: {row["name"]: row for row in case["rows"]} for case in cases}


def test_right_loops_agree(planted):
    assert list(planted) == NAMES
    for name, rows in planted.items():
        big = ["one big batch"] if name in BIG_BATCH else []
        fabric = [] if name in SWEEP or name in ("bert", "chats") else ["Lightning Fabric"]
        for loop in ("hand-written", "Accelerate", "Macrobatch", "Macrobatch, cuda_graph", *fabric, *big):
            is_reference = (name, loop) == ("gpt2", "hand-written")
            assert rows[loop]["agrees"] is (None if is_reference else True), (name, rows[loop])
            assert rows[loop]["per_second"] > 0
            assert rows[loop]["windows"] == 2
        assert "dropout" in planted["gpt2"]["hand-written"]["note"]
        assert "the model is on cpu" in rows["Macrobatch, cuda_graph"]["note"]
    assert {name for name, rows in planted.items() if "one big batch" in rows} == BIG_BATCH


@pytest.mark.parametrize("loop", ["scaled", "stale"])
def test_wrong_gradients_are_seen(planted, loop):
    assert {name: rows[loop]["agrees"] for name, rows in planted.items()} == dict.fromkeys(NAMES, False)


def test_a_loop_that_raises_leaves_the_others_their_places(planted):
    for rows in planted.values():
        assert rows["raises"]["error"] == "ZeroDivisionError: of its own"
        assert rows["raises_later"]["error"] == "ZeroDivisionError: later"
        assert rows["raises_later"]["per_second"] is None


def test_samples_of_unequal_lengths_are_cut_by_tokens_and_grouped(planted):
    for name in ("bert", "chats"):
        rows = planted[name]
        assert rows["Macrobatch"]["micro_batches"] < rows["hand-written"]["micro_batches"]
        for loop in ("hand-written, grouped", "Accelerate, grouped"):
            assert rows[loop]["agrees"]
            assert loop not in planted["gpt2"]


def test_loops_that_are_not_compiled_say_so(planted):
    for shape, rows in planted.items():
        late = [row for name, row in rows.items() if "compiled" in name]
        if shape in SWEEP:
            assert not late
            continue
        assert len(late) >= 4
        assert {(row["per_second"], row["note"]) for row in late} == {(None, "not run: no time was left to compile it")}


def test_compiled_loops_and_what_a_file_keeps(tmp_path):
    (tmp_path / "gpu_tiny.json").write_text("{}")
    script = ROOT / "benchmarks" / "gpu.py"
    first = run_benchmark(script, "--tiny", "--windows", 1, "--only", "1.1B", "--out", tmp_path)
    assert first.returncode == 0, first.stderr
    file, yesterday = tmp_path / "gpu_tiny.json", "2026-01-01"
    results = json.loads(file.read_text())
    results["cases"][0] |= {"date": yesterday, "source": "of then"}
    file.write_text(json.dumps(results))
    then = run_benchmark(
        script, "--tiny", "--windows", 1, "--only", "resnet", "--compile-within", 0, "--add", "--out", tmp_path
    )
    assert then.returncode == 0, then.stderr
    llama, resnet = json.loads(file.read_text())["cases"]
    assert (llama["date"], llama["source"]) == (yesterday, "of then")
    assert resnet["date"] > yesterday
    assert len(resnet["source"]) == 12
    assert (llama["shape"], resnet["shape"]) == ("1.1B", "resnet")
    compiled = [row for row in llama["rows"] if "compiled" in row["name"]]
    assert [row["agrees"] for row in compiled] == [True] * 4
    assert next(row for row in compiled if row["name"] == "Accelerate, compiled")["over_accelerate"] == 1.0


def test_memory_alone_can_be_taken_anew(tmp_path):
    script, file = ROOT / "benchmarks" / "gpu.py", tmp_path / "gpu_tiny.json"
    options = ["--tiny", "--only", "resnet", "--compile-within", 0, "--out", tmp_path]
    assert run_benchmark(script, *options, "--windows", 1).returncode == 0
    results = json.loads(file.read_text())
    for row in results["cases"][0]["rows"]:
        row["reserved_gib"] = 9.0
    file.write_text(json.dumps(results))
    done = run_benchmark(script, *options, "--add", "--memory", "Macrobatch", "Accelerate")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(file.read_text())["cases"]
    taken = [row["name"] for row in case["rows"] if row["reserved_gib"] is None]  # on a CPU there is none
    assert taken == ["Accelerate", "Macrobatch"]
    anew = [{**row, "reserved_gib": 9.0} for row in case["rows"]]
    assert anew == results["cases"][0]["rows"]
    assert "must be there" in run_benchmark(script, *options, "--memory", "Macrobatch").stderr
    assert "invalid choice: 'ours'" in run_benchmark(script, *options, "--add", "--memory", "ours").stderr
    missing = [{"resnet": "vit"}.get(option, option) for option in options]
    assert "has no vit. Measure it first" in run_benchmark(script, *missing, "--add", "--memory", "Macrobatch").stderr


SCRIPT = """
import gpu, loops, models


def scaled(job):
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.9)
    return loops.macro_step(job)


gpu.TOO_FAR = {too_far}
bench = gpu.Bench(models.TINY[0])
bench.take_references()
ways = [*loops.ways_of(bench.shape, False), loops.Way(name="scaled", build=scaled, is_compiled=False)]
bench.run(ways, windows=3, deadline={deadline})
print({{row.windows for row in bench.rows.values()}})
print({{row.name: row.agrees for row in bench.rows.values() if not row.agrees}})
"""


def said_by(folder, **values) -> list[str]:
    (folder / "script.py").write_text(SCRIPT.format(**values))
    return run_benchmark(folder / "script.py").stdout.splitlines()[-2:]


def test_where_rounding_leaves_nothing_the_loop_by_hand_is_the_reference(tmp_path):
    windows, others = said_by(tmp_path, too_far=-1.0, deadline="float('inf')")
    assert (windows, others) == ("{3}", "{'hand-written': None, 'scaled': False}")


def test_at_the_deadline_it_ends_with_what_it_has(tmp_path):
    windows, others = said_by(tmp_path, too_far=1.0, deadline=0.0)
    assert (windows, others) == ("{1}", "{'scaled': False}")
    done = run_benchmark(ROOT / "benchmarks" / "gpu.py", "--tiny", "--within", 0, "--out", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "Written to no file" in done.stdout
    assert not (tmp_path / "results").exists()


def test_without_a_gpu_it_says_so(tmp_path):
    done = run_benchmark(ROOT / "benchmarks" / "gpu.py", "--out", tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr == "It needs a CUDA device; --tiny shows that it runs.\n"
