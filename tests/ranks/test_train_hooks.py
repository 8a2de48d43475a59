"""`train()` in a program of two ranks: callbacks and an evaluation of one's own, replicated and sharded."""

import json
import sys
from pathlib import Path

import pytest

from harness import commands, ranks
from harness.commands import json_lines, sentences

STEPS = 5
PARALLEL = ("ddp", "fsdp")


def program(place: Path) -> dict[str, object]:
    """What every rank does; returns what it has seen."""
    import torch
    import torch.distributed as dist

    from macrobatch.train import Settings, StopTraining, train
    from macrobatch.train.world import OtherRankError

    dist.init_process_group("gloo")  # by the program, and it stays so
    rank = dist.get_rank()
    seen: dict[str, object] = {}

    def settings(name: str, **more: object) -> Settings:
        small = {"model": "tiny", "vocabulary_size": 300, "seq_len": 64, "batch_size": 24, "sample_tokens": 0}
        often = {"steps": STEPS, "validate_every": 2, "save_every": 0, "track": ("none",), "device": "cpu"}
        return Settings(data=(str(place / "data.jsonl"),), out=str(place / name), **{**small, **often, **more})

    def evaluate(model: torch.nn.Module, tokenizer: object) -> dict[str, float]:
        logits = model(tokenizer("the quick", return_tensors="pt")["input_ids"]).logits
        return {"spread": logits.std().item(), "rank": float(rank)}

    def stop(event: object) -> None:
        if event.step == 3:
            raise StopTraining

    def fail(event: object) -> None:
        if event.step == 2:
            raise LookupError("mine")

    def refuse(model: torch.nn.Module, tokenizer: object) -> dict[str, float]:
        if rank == 1:
            raise LookupError("of the second rank")
        return {}

    for parallel in PARALLEL:
        outcome = train(settings(parallel, parallel=parallel), callbacks=[stop] if rank == 0 else [], evaluate=evaluate)
        seen[parallel] = [int(outcome), outcome.steps, str(outcome.run)]
    failing = {"callback": {"callbacks": [fail]}, "evaluation": {"evaluate": refuse}}
    failing["one-sided"] = {"evaluate": evaluate if rank == 0 else None}
    for name, hooks in failing.items():
        try:
            train(settings(name), **hooks)
        except OtherRankError:
            seen[name] = "OtherRankError"
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("hooks")
    json_lines(place / "data.jsonl", [{"text": text} for text in sentences()])
    return place


@pytest.fixture(scope="module")
def seen(place, own_cache) -> list[dict]:
    """What each of the two ranks has seen."""
    imported = ["harness.ranks", *commands.IMPORTED]
    launch = ranks.torchrun(2, Path(__file__), place, directory=place, imported=imported)
    assert launch.exit_code == 0, launch.output[-6000:]
    return [json.loads((place / f"seen.{rank}").read_text()) for rank in range(2)]


def validations(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_callback_of_the_first_rank_stops_all(place, seen, parallel):
    assert [found[parallel] for found in seen] == [[0, 3, str(place / parallel)]] * 2
    assert [path.name for path in (place / parallel / "checkpoints").iterdir()] == ["step-00000003"]


def test_all_ranks_evaluate_and_the_first_one_is_heard(place, seen):
    replicated, sharded = (validations(place / parallel) for parallel in PARALLEL)
    assert [(row["step"], row["rank"]) for row in replicated] == [(0, 0.0), (2, 0.0)]
    for one, other in zip(replicated, sharded, strict=True):
        assert one["spread"] == pytest.approx(other["spread"], rel=1e-5)


def test_errors_end_all_ranks(place, seen):
    assert [found["callback"] for found in seen] == ["LookupError: mine", "OtherRankError"]
    assert [path.name for path in (place / "callback" / "checkpoints").iterdir()] == ["step-00000002"]
    assert [found["evaluation"] for found in seen] == ["OtherRankError", "LookupError: of the second rank"]
    assert not (place / "evaluation").exists()
    assert all("must be given on all ranks, or on none: got it on 1" in found["one-sided"] for found in seen)


if __name__ == "__main__":
    import os

    ranks.be_a_rank()
    Path(sys.argv[1], f"seen.{os.environ['RANK']}").write_text(json.dumps(program(Path(sys.argv[1]))))
