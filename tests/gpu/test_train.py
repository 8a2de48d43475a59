"""`macrobatch train` on a GPU: packed, recorded, with adapters, in little memory; losses stay those of plain runs."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.commands import arguments, farthest, json_lines, losses, metrics, sentences
from harness.recorded import DEVICE
from macrobatch import causal_lm_loss
from macrobatch.cli import main
from macrobatch.train.packing import Packer, add_bounds, add_mask, inputs_for

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


def train_on_gpu(data, out, *more: object) -> list[float]:
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
    plain = train_on_gpu(data, tmp_path / "plain", "--micro", "8", "--precision", precision)
    found = train_on_gpu(data, tmp_path / "found", "--precision", precision, *more)
    assert farthest(found, plain) <= CLOSE[precision]


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernels are there on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_kernels_that_know_the_bounds(kind, dtype):
    """As far from float64 as a mask in the same precision."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"intermediate_size": 128, "num_key_value_heads": 2}
    if kind == "gpt2":
        more = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more)).to(DEVICE)
    packer, where = Packer(256), torch.device(DEVICE)
    inputs = inputs_for(model, packer, where, dtype)
    assert inputs is add_bounds
    ids = [torch.randint(0, 64, (length,)) for length in (200, 130, 50, 7, 1, 90)]
    packed = packer([{"input_ids": one, "labels": one} for one in ids])
    packed = {name: value.to(where) for name, value in packed.items()}

    def gradients(inputs, model, dtype):
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            loss, _ = causal_lm_loss(model, inputs(packed))
        return torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, list(model.parameters()))])

    by_bounds, by_mask = gradients(add_bounds, model, dtype), gradients(add_mask, model, dtype)
    exact = gradients(add_mask, model.double(), None)
    errors = [((one - exact).norm() / exact.norm()).item() for one in (by_bounds, by_mask)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize(
    "more",
    [(), ("--cuda-graph",), ("--pack", "--cuda-graph"), ("--precision", "bf16"), ("--pack", "--precision", "bf16")],
    ids=" ".join,
)
def test_adapters(data, tmp_path, more):
    assert main(arguments(data, tmp_path / "base", "--device", DEVICE, "--steps", 4, "--seq-len", 128)) == 0
    lora = ("--lora", "--lora-rank", 4, "--model", tmp_path / "base", "--lr", 1e-2)
    plain = train_on_gpu(data, tmp_path / "plain", "--micro", "8", *lora)
    found = train_on_gpu(data, tmp_path / "found", *lora, *more)
    assert farthest(found, plain) <= (5e-2 if "bf16" in more else 1e-4)
    assert (tmp_path / "found" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "sgd"])
def test_other_optimizers_learn(data, tmp_path, optimizer):
    found = train_on_gpu(
        data, tmp_path / "found", "--optimizer", optimizer, "--lr", "0.5" if optimizer == "sgd" else "5e-3"
    )
    assert found[-1] < found[0]


@pytest.mark.skipif(DEVICE == "cpu", reason="memory that runs out")
@pytest.mark.parametrize("more", [(), ("--pack",), ("--cuda-graph",)], ids=" ".join)
def test_as_many_tokens_as_fit(data, tmp_path, more):
    """In so little memory that a whole batch does not fit."""
    flags = ("--batch-size", 192, "--model", "small", "--vocabulary-size", 4096, "--steps", 4)
    plain = train_on_gpu(data, tmp_path / "plain", "--micro", "4", *flags)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 400 * 2**20) / total)
    try:
        found = train_on_gpu(data, tmp_path / "found", "--micro", "tokens", *flags, *more)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert farthest(found, plain) <= 1e-3
    assert metrics(tmp_path / "found")[-1]["micro_batches"] > 1
