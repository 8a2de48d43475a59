"""`macrobatch train` on a GPU: packed, recorded, with adapters, in little memory; losses stay those of plain runs."""

import pytest
import torch

from harness.commands import arguments, farthest, json_lines, losses, metrics, sentences
from harness.recorded import DEVICE
from macrobatch.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures", "own_cache")]

CLOSE = {"float32": 1e-4, "float64": 1e-9}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("train")
    chats = [
        {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text}]}
        for text in sentences(200)
    ]
    return json_lines(place / "chat.jsonl", chats)


def run(data, out, *more: object) -> list[float]:
    flags = arguments(data, out, "--device", DEVICE, "--steps", 12, "--seq-len", 128, "--save-every", 0, *more)
    assert main(flags) == 0
    return losses(out)


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize(
    "more",
    [
        ("--pack",),
        ("--cuda-graph",),
        ("--pack", "--cuda-graph"),
        ("--micro", "auto"),
        ("--pack", "--micro", "tokens:512", "--cuda-graph"),
        ("--checkpoint-activations", "yes"),
    ],
    ids=" ".join,
)
def test_losses_are_those_of_a_plain_run(data, tmp_path, more, precision):
    plain = run(data, tmp_path / "plain", "--micro", "8", "--precision", precision)
    found = run(data, tmp_path / "found", "--precision", precision, *more)
    assert farthest(found, plain) <= CLOSE[precision]


@pytest.mark.parametrize(
    "more", [(), ("--cuda-graph",), ("--pack", "--cuda-graph"), ("--precision", "bf16")], ids=" ".join
)
def test_adapters(data, tmp_path, more):
    assert main(arguments(data, tmp_path / "base", "--device", DEVICE, "--steps", 4, "--seq-len", 128)) == 0
    lora = ("--lora", "--lora-rank", 4, "--model", tmp_path / "base", "--lr", 1e-2)
    plain = run(data, tmp_path / "plain", "--micro", "8", *lora)
    found = run(data, tmp_path / "found", *lora, *more)
    assert farthest(found, plain) <= (5e-2 if "bf16" in more else 1e-4)
    assert (tmp_path / "found" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "sgd"])
def test_other_optimizers_learn(data, tmp_path, optimizer):
    found = run(data, tmp_path / "found", "--optimizer", optimizer, "--lr", "0.5" if optimizer == "sgd" else "5e-3")
    assert found[-1] < found[0]


@pytest.mark.skipif(DEVICE == "cpu", reason="memory that runs out")
@pytest.mark.parametrize("more", [(), ("--pack",), ("--cuda-graph",)], ids=" ".join)
def test_as_many_tokens_as_fit(data, tmp_path, more):
    """In so little memory that a whole batch does not fit."""
    flags = ("--batch-size", 192, "--model", "small", "--vocabulary-size", 4096, "--steps", 4)
    plain = run(data, tmp_path / "plain", "--micro", "4", *flags)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 400 * 2**20) / total)
    try:
        found = run(data, tmp_path / "found", "--micro", "tokens", *flags, *more)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert farthest(found, plain) <= 1e-3
    assert metrics(tmp_path / "found")[-1]["micro_batches"] > 1
