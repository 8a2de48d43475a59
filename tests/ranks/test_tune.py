"""Adapters and other optimizers on two ranks: the trajectory depends on the seed and the batch only.

All commands run one after the other under one torchrun; their losses are compared with those of one process.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness import commands, ranks
from harness.commands import arguments, farthest, json_lines, losses, sentences
from macrobatch.cli import main

pytestmark = pytest.mark.usefixtures("own_cache")

STEPS = 4
CLOSE = {"float32": 1e-5, "float64": 1e-10, "pure-bf16": 0.01}
LORA = ("--lora", "--lora-rank", 4, "--lr", 0.02, "--model")
FSDP, HSDP = ("--parallel", "fsdp"), ("--parallel", "hsdp", "--shard-ranks", 2)

# What is trained on two ranks, and how; the last word is the precision.
ADAPTERS = {
    "ddp float32": ("--micro", "1"),
    "ddp float64": ("--micro", "tokens:128"),
    "fsdp float32": (*FSDP, "--micro", "tokens:256"),
    "fsdp float64": (*FSDP, "--micro", "3", "--checkpoint-activations", "--save-every", 2),
    "hsdp float64": (*HSDP, "--micro", "5"),
    "fsdp pure-bf16": FSDP,
}
OPTIMIZERS = {
    "ddp muon": ("--optimizer", "muon"),
    "fsdp muon": ("--optimizer", "muon", *FSDP),
    "hsdp muon": ("--optimizer", "muon", "--optimizer-options", "nesterov=false", *HSDP),
    "ddp adafactor": ("--optimizer", "adafactor"),
    "fsdp sgd": ("--optimizer", "sgd", "--optimizer-options", "momentum=0.9", *FSDP),
}
RESUMED = ("fsdp float64", "fsdp muon", "ddp adafactor")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("tuned")
    json_lines(place / "data.jsonl", [{"text": text} for text in sentences(200)])
    assert main(command_for(place, "base", "--steps", 10)) == 0
    return place


def command_for(place: Path, out: str, *more: object) -> list[str]:
    flags = ("--steps", STEPS, *(() if "--save-every" in more else ("--save-every", 0)), *more)
    return arguments(place / "data.jsonl", place / out, *flags)


def with_adapter(place: Path, out: str, precision: str, *more: object) -> list[str]:
    return command_for(place, out, *LORA, place / "base" / "model", "--precision", precision, *more)


def with_optimizer(place: Path, out: str, *more: object) -> list[str]:
    return command_for(place, out, "--precision", "float64", "--micro", "7", "--save-every", 2, *more)


@pytest.fixture(scope="module")
def alone(place) -> dict[str, list[float]]:
    """The losses of one process, in each precision."""
    found = {}
    for precision in CLOSE:
        assert main(with_adapter(place, f"alone {precision}", precision)) == 0
        found[precision] = losses(place / f"alone {precision}")
    return found


@pytest.fixture(scope="module")
def on_two(place) -> ranks.Launch:
    """All of them, and some again from the middle, from what was saved there."""
    named = {name: with_adapter(place, f"two {name}", name.split()[-1], *how) for name, how in ADAPTERS.items()}
    named |= {name: with_optimizer(place, f"two {name}", *how) for name, how in OPTIMIZERS.items()}
    launched(place, "first", list(named.values()))
    for name in RESUMED:
        shutil.copytree(place / f"two {name}", place / f"again {name}")
        shutil.rmtree(place / f"again {name}" / "checkpoints" / f"step-{STEPS:08d}")
    return launched(place, "again", [["train", "--resume", "--out", str(place / f"again {name}")] for name in RESUMED])


def launched(place: Path, name: str, all_commands: list[list[str]]) -> ranks.Launch:
    file = place / f"{name}.json"
    file.write_text(json.dumps(all_commands))
    imported = ["harness.ranks", *commands.IMPORTED]
    launch = ranks.torchrun(2, Path(commands.__file__), file, directory=place, imported=imported)
    assert launch.exit_code == 0, launch.output[-6000:]
    for rank in range(2):
        assert set(json.loads(Path(f"{file}.{rank}").read_text())) == {0}, launch.output[-6000:]
    return launch


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_is_bitwise(place, on_two, name):
    assert losses(place / f"again {name}") == losses(place / f"two {name}")
    for file in (place / f"two {name}").rglob("model/*.safetensors"):
        assert (place / f"again {name}" / file.relative_to(place / f"two {name}")).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_two_ranks(place, on_two, name):
    alone = place / f"alone {name}"
    how = [word for word in OPTIMIZERS[name] if word not in (*FSDP, *HSDP)]
    assert main(with_optimizer(place, alone.name, *how)) == 0
    assert farthest(losses(place / f"two {name}"), losses(alone)) <= 1e-10


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_on_two_ranks(place, alone, on_two, name):
    precision = name.split()[-1]
    assert farthest(losses(place / f"two {name}"), alone[precision]) <= CLOSE[precision]


def test_another_seed_is_another_adapter(place, alone):
    """The comparison above can fail."""
    assert main(with_adapter(place, "other seed", "float64", "--seed", 1, "--validation", 0)) == 0
    assert farthest(losses(place / "other seed"), alone["float64"]) > 1e-3


@pytest.mark.parametrize("name", ["fsdp float64", "hsdp float64", "fsdp pure-bf16"])
def test_exports_of_shards_are_whole(place, alone, on_two, name):
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        one, two = (load_file(place / run / file) for run in (f"alone {name.split()[-1]}", f"two {name}"))
        assert one.keys() == two.keys()
        assert ranks.relative_error(two, one) <= (1e-6 if "64" in name else 0.05)
