"""`benchmarks/trainers.py` with a tiny model: all rows are there, and wrong losses are seen. Nothing is timed."""

import json

import pytest

from harness import ROOT
from harness.benchmarks import run_benchmark

pytest.importorskip("transformers")
pytest.importorskip("trl")
pytest.importorskip("lightning")

WAYS = ["as it is", "exact", "by tokens", "by tokens, graphs"]
PLANTED = """
import sys
import trainers


def wrong(trainer):
    class Wrong(trainer):
        def compute_loss(self, *arguments, **options):
            return 1.1 * super().compute_loss(*arguments, **options)

    return Wrong


def families(budget):
    found = usual(budget)
    plain = found["Trainer"]["as it is"]
    ways = {"as it is": plain, "exact": plain, "by tokens": trainers.with_trainer(wrong), "by tokens, graphs": raises}
    return {"Trainer": ways}


def raises(*_):
    raise ZeroDivisionError("of its own")


usual, trainers.families = trainers.families, families
sys.exit(trainers.main())
"""


def tables_of(script, folder) -> tuple[int, dict, str]:
    done = run_benchmark(script, "--tiny", "--steps", 1, "--out", folder)
    tables = json.loads((folder / "trainers_tiny.json").read_text())["trainers"]
    return done.returncode, {name: table["rows"] for name, table in tables.items()}, done.stderr


def test_every_trainer_has_its_rows(tmp_path):
    status, tables, said = tables_of(ROOT / "benchmarks" / "trainers.py", tmp_path)
    assert status == 0, said
    assert list(tables) == ["Trainer", "SFTTrainer", "Lightning"]
    for rows in tables.values():
        assert [row["way"] for row in rows] == WAYS
        for row in rows:
            assert (row["agrees"], row["windows"], row["tokens_per_second"] > 0) == (True, 1, True), row


def test_wrong_losses_and_errors_are_told(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    status, tables, said = tables_of(tmp_path / "planted.py", tmp_path)
    right, also_right, wrong, raised = tables["Trainer"]
    assert status == 1
    assert (right["agrees"], also_right["agrees"], wrong["agrees"], raised["agrees"]) == (True, True, False, None)
    assert raised["error"] == "of its own"
    assert "by tokens, graphs: ZeroDivisionError: of its own" in said


def test_a_row_that_failed_is_a_failure(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED.replace("trainers.with_trainer(wrong)", "plain"))
    status, tables, _ = tables_of(tmp_path / "planted.py", tmp_path)
    assert (status, [row["agrees"] for row in tables["Trainer"]]) == (1, [True, True, True, None])
