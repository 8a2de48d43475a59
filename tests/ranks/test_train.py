"""`macrobatch train` on many ranks: the trajectory depends on the seed and the batch only.

Every command runs under torchrun; its losses are compared with those of one process.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from harness import commands, ranks
from harness.commands import arguments, farthest, json_lines, losses, metrics, sentences
from macrobatch.cli import main

STEPS = 20
CLOSE = {"float32": 1e-5, "float64": 1e-10}
CUTS = ("1", "64", "auto", "tokens:256")

ONE = [("1", "float64"), ("auto", "float64"), ("tokens:128", "float64"), ("1", "float32"), ("tokens", "float32")]
# How a run is cut: name -> flags.
TWO = {
    **{f"{cut} {p}": ("--micro", cut, "--precision", p) for p in CLOSE for cut in CUTS},
    "fsdp float64": ("--micro", "tokens:256", "--precision", "float64", "--parallel", "fsdp"),
    "fsdp float32": ("--micro", "3", "--precision", "float32", "--parallel", "fsdp"),
    "checkpointed float64": ("--precision", "float64", "--checkpoint-activations"),
    "packed float64": ("--precision", "float64", "--pack", "--micro", "tokens:256"),
    "packed fsdp float32": ("--pack", "--parallel", "fsdp", "--micro", "tokens:128"),
}
LOW = {
    "fsdp pure-bf16": ("--precision", "pure-bf16", "--parallel", "fsdp"),
    "ddp fp16": ("--precision", "fp16"),
}
MOVED = ("--precision", "float64", "--save-every", 8, "--keep", 3)
FOUR = {
    "ddp float64": ("--micro", "tokens:256", "--precision", "float64"),
    "hsdp float64": ("--micro", "2", "--precision", "float64", "--parallel", "hsdp", "--shard-ranks", "2"),
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    json_lines(place / "data.jsonl", [{"text": text} for text in sentences()])
    return place


def command_for(place: Path, out: str, *more: object) -> list[str]:
    return arguments(place / "data.jsonl", place / out, "--steps", STEPS, "--save-every", 0, *more)


def launched(place: Path, number: int, named: dict[str, list[str]], *, status: int = 0) -> ranks.Launch:
    """Run those commands on so many ranks, one after the other; all of them must end with that status."""
    file = place / f"commands-{number}.json"
    file.write_text(json.dumps(list(named.values())))
    program = (number, Path(commands.__file__), file)
    launch = ranks.torchrun(*program, directory=place, imported=["harness.ranks", *commands.IMPORTED])
    assert launch.exit_code == 0, launch.output[-6000:]
    for rank in range(number):
        assert json.loads(Path(f"{file}.{rank}").read_text()) == [status] * len(named)
    return launch


@pytest.fixture(scope="module")
def alone(place) -> dict[str, list[float]]:
    """The losses of one process, in each precision."""
    found = {}
    for precision in CLOSE:
        assert main(command_for(place, f"alone-{precision}", "--micro", "64", "--precision", precision)) == 0
        found[precision] = losses(place / f"alone-{precision}")
        assert found[precision][-1] < 0.9 * found[precision][0]
    return found


@pytest.fixture(scope="module")
def on_two(place) -> ranks.Launch:
    named = {name: command_for(place, f"two {name}", *flags) for name, flags in (TWO | LOW | {"moved": MOVED}).items()}
    return launched(place, 2, named)


@pytest.fixture(scope="module")
def on_four(place) -> ranks.Launch:
    return launched(place, 4, {name: command_for(place, f"four {name}", *flags) for name, flags in FOUR.items()})


@pytest.mark.parametrize(("cut", "precision"), ONE)
def test_one_rank_however_cut(place, alone, cut, precision):
    name = f"one {cut} {precision}"
    assert main(command_for(place, name, "--micro", cut, "--precision", precision)) == 0
    assert farthest(losses(place / name), alone[precision]) <= CLOSE[precision]


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(place, alone, on_two, name):
    precision = name.split()[-1]
    assert farthest(losses(place / f"two {name}"), alone[precision]) <= CLOSE[precision]


@pytest.mark.parametrize("name", LOW)
def test_lower_precision_on_two_ranks(place, alone, on_two, name):
    assert farthest(losses(place / f"two {name}"), alone["float32"]) <= 0.01


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(place, alone, on_four, name):
    precision = name.split()[-1]
    assert farthest(losses(place / f"four {name}"), alone[precision]) <= CLOSE[precision]


def test_another_seed_is_another_run(place, alone):
    """The comparison above can fail."""
    assert main(command_for(place, "other seed", "--precision", "float64", "--seed", "1")) == 0
    assert farthest(losses(place / "other seed"), alone["float64"]) > 1e-3


def test_ranks_share_the_work(place, on_two):
    one, two = metrics(place / "two 1 float64"), metrics(place / "two tokens:256 float64")
    assert [row["micro_batches"] for row in one] == [24] * STEPS  # of both ranks together
    assert [row["items"] for row in one] == [row["items"] for row in two]
    assert all(row["time"]["communication"] > 0 for row in one)


def test_padding_is_counted_once(place, on_two):
    """Under fsdp a micro-batch is collated twice in the first step, for ranks that run out of them."""
    ddp, fsdp = (metrics(place / f"two {name}") for name in ("tokens:256 float64", "fsdp float64"))
    assert [row["padded_tokens"] for row in ddp] == [row["padded_tokens"] for row in fsdp]


def test_the_first_rank_speaks_for_all(on_two):
    assert on_two.output.count("parameters in float32") == sum(name.endswith("float32") for name in TWO)
    assert len(re.findall(r"2 on cpu, fsdp", on_two.output)) == 4
    warnings = [line for line in on_two.output.splitlines() if line.startswith("macrobatch: ")]
    assert len(warnings) == len(TWO | LOW) + 1  # one a run, also of "moved"
    assert all("the validation has only 4 samples" in line for line in warnings)


def test_the_model_of_shards_is_whole(place, alone, on_two, capsys):
    from safetensors.torch import load_file

    whole = load_file(place / "alone-float64" / "model" / "model.safetensors")
    shards = load_file(place / "two fsdp float64" / "model" / "model.safetensors")
    assert whole.keys() == shards.keys()
    assert ranks.relative_error(shards, whole) <= 1e-6
    capsys.readouterr()
    assert main(["generate", str(place / "two fsdp float64"), "--prompt", "the quick", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


def test_bad_input_ends_all_ranks_with_one_message(place):
    command = command_for(place, "bad", "--data", place / "nowhere.jsonl")
    launch = ranks.torchrun(2, "-m", "macrobatch", *command, directory=place, seconds=120)
    assert launch.exit_code != 0
    assert launch.output.count("macrobatch: ") == 1
    assert "nowhere.jsonl" in launch.output
    assert "Traceback" not in launch.output.partition("macrobatch: ")[0]
    assert not (place / "bad").exists()


def test_a_batch_smaller_than_the_ranks(place):
    launch = launched(place, 2, {"": command_for(place, "small", "--batch-size", 1)}, status=2)
    assert "macrobatch: a batch of 1 samples is smaller than the 2 ranks" in launch.output
    assert not (place / "small").exists()


def test_resumed_on_another_number_of_ranks(place, alone, on_two):
    """Stopped after 8 steps on two ranks; the rest on one. (`train/test_killed.py` has all other ways to stop.)"""
    moved = place / "two moved"
    shutil.rmtree(moved / "checkpoints" / "step-00000020")
    shutil.rmtree(moved / "checkpoints" / "step-00000016")
    shutil.rmtree(moved / "model")
    assert main(["train", "--resume", "--out", str(moved)]) == 0
    assert farthest(losses(moved), alone["float64"]) <= CLOSE["float64"]
