"""Samples that share a row have the losses and gradients that they have alone; other models are refused."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from harness.reference import relative_error
from macrobatch import MacroStep
from macrobatch._cut.plans import plan_rows
from macrobatch._cut.policies import PackedRows
from macrobatch._cut.samples import samples_of
from macrobatch.errors import FitError, UsageError
from macrobatch.losses import causal_lm_loss
from macrobatch.train import varlen
from macrobatch.train.corpus import Sample, collate
from macrobatch.train.flags import parse_flags
from macrobatch.train.models import _widen_norms
from macrobatch.train.packing import Packer, add_bounds, add_mask, inputs_for, mask_for
from macrobatch.train.suitable import states_of
from macrobatch.train.trainer import train

WORDS = 40
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = {
    "llama": SMALL | {"intermediate_size": 24, "num_key_value_heads": 1},
    "gpt2": {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen2": SMALL | {"intermediate_size": 24, "num_key_value_heads": 2},
}
CPU = torch.device("cpu")


def model_of(kind: str, attention: str = "sdpa", **more) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS.get(kind, SMALL | {"intermediate_size": 24}) | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    _widen_norms(model)
    return model


def samples(*lengths: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(len(lengths))
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, WORDS, (length,), generator=draw)
        labels = ids.clone()
        labels[: number % 3] = -100  # some have a prompt
        found.append({"input_ids": ids, "labels": labels})
    return found


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 20))
def test_rows_hold_each_sample_once_and_are_found_again_by_whoever_fills_them(lengths, width):
    rows = plan_rows(lengths, width)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= width for row in rows)
    in_order = [{"input_ids": torch.zeros(lengths[i]), "labels": i} for row in rows for i in row]
    assert [[sample["labels"] for sample in row] for row in Packer(width)._rows(in_order)] == rows
    half = [sum(lengths[i] for i in row) <= width / 2 for row in rows]
    assert sum(half) <= 1  # two rows that are half empty would be one


@pytest.mark.parametrize("few_shapes", [False, True])
def test_micro_batches_of_rows(few_shapes):
    given = samples(*[5] * 11)  # two in a row of 10: six rows, of which 4 in a micro-batch
    parts = PackedRows(40, width=10).parts(samples_of(given, Packer(10)), few_shapes)
    assert [len(part.samples) for part in parts] == [8, 3]
    batch = Packer(10, whole=few_shapes)([given[i] for i in parts[1].samples])
    assert batch["input_ids"].shape == (2, 10)
    parts = PackedRows(40, width=10).parts(samples_of(samples(*[10] * 7), Packer(10)), few_shapes)
    assert [len(part.samples) for part in parts] == ([4, 2, 1] if few_shapes else [4, 3])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_packed_losses_and_gradients_are_those_of_the_samples_alone(kind, attention, dtype, tolerance):
    tolerance = max(tolerance, 1e-6 if attention == "eager" else 0)  # its softmax is in float32
    model = model_of(kind, attention).to(dtype)
    dtypes = {"sdpa": torch.bool, "eager": torch.float32}
    assert mask_for(model, Packer(14), CPU) == dtypes[attention]
    given = samples(9, 3, 14, 2, 7, 5, 1, 11)
    losses, gradients = [], []
    for packer in (None, Packer(14), Packer(16, whole=True)):
        batch = collate(given) if packer is None else add_mask(packer(given), dtypes[attention])
        loss, items = causal_lm_loss(model, batch)
        losses.append((loss.item(), items.item()))
        gradients.append(dict(zip(range(99), torch.autograd.grad(loss, list(model.parameters())), strict=False)))
    alone = [causal_lm_loss(model, collate([sample])) for sample in given]
    by_hand = sum((loss * items).item() for loss, items in alone) / sum(items.item() for _, items in alone)
    for (loss, items), gradient in zip(losses, gradients, strict=True):
        assert loss == pytest.approx(by_hand, rel=tolerance)
        assert items == sum(items.item() for _, items in alone)
        assert relative_error(gradient, gradients[0]) <= tolerance


@pytest.mark.parametrize("micro", ["auto", 40])
def test_a_window_of_packed_rows_is_that_of_the_samples(micro):
    weights = []

    def packed_loss(model, batch):
        return causal_lm_loss(model, add_mask(batch))

    ways = ((1, collate, causal_lm_loss), (PackedRows(micro, width=14), Packer(14), packed_loss))
    for policy, layout, loss in ways:
        model = model_of("llama").double()
        step = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro=policy, collate=layout)
        for seed in range(2):
            step(samples(9, 3, 14, 2, 7, 5, 1, 11, 4, 4, 6)[seed:])
        weights.append({name: p.detach() for name, p in model.named_parameters()})
    assert relative_error(weights[1], weights[0]) <= 1e-12


# --------------------------------------------------------------------------------------- where kernels know the bounds


def by_parts(query, key, value, bounds, _, most, longest, *, scale=None, window_size=None):
    """What the kernels compute, on a CPU: attention inside each part of the tokens."""
    assert window_size == (-1, 0)
    assert most == longest >= bounds.diff().max()
    assert query.dtype == key.dtype == value.dtype
    parts = [tensor.tensor_split(bounds[1:-1].tolist()) for tensor in (query, key, value)]
    attended = [
        F.scaled_dot_product_attention(*(one.transpose(0, 1) for one in part), is_causal=True, scale=scale)
        for part in zip(*parts, strict=True)
    ]
    return torch.cat([one.transpose(0, 1) for one in attended])


def across_parts(query, key, value, bounds, *others, **options):
    """Ones that take no notice of where samples begin."""
    return by_parts(query, key, value, bounds[[0, -1]], None, len(query), len(query), window_size=(-1, 0))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels on a CPU, in any precision."""
    monkeypatch.setattr(varlen, "kernel", by_parts)
    monkeypatch.setattr(varlen, "can_serve", lambda *_: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_know_the_bounds_compute_the_same(kind):
    model = model_of(kind).double()
    inputs = inputs_for(model, Packer(14), CPU, None)
    assert inputs is add_bounds
    given = samples(9, 3, 14, 2, 7, 5, 1, 11)
    found = []
    for batch in (collate(given), add_bounds(Packer(14)(given)), add_mask(Packer(14)(given))):
        loss, _ = causal_lm_loss(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.item(), dict(enumerate(gradients))))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        assert relative_error(gradients, found[0][1]) <= 1e-12


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_under_autocast(kind):
    """Where queries and keys may come in float32, and values in bfloat16."""
    assert inputs_for(model_of(kind), Packer(14), CPU, torch.bfloat16) is add_bounds


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("why", ["wrong kernels", "dropout", "few shapes", "a kernel that fails"])
def test_otherwise_there_is_a_mask(why, monkeypatch):
    model = model_of("llama", **({"attention_dropout": 0.1} if why == "dropout" else {}))
    if why == "wrong kernels":
        monkeypatch.setattr(varlen, "kernel", across_parts)
    elif why == "a kernel that fails":
        monkeypatch.setattr(varlen, "kernel", mock.Mock(side_effect=RuntimeError("no kernel")))
    model.train()
    before = torch.get_rng_state()
    inputs = inputs_for(model, Packer(14, whole=why == "few shapes"), CPU, None)
    assert inputs is not add_bounds
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert inputs(Packer(14)(samples(9, 3, 14)))["attention_mask"].shape == (2, 1, 14, 14)


@pytest.mark.usefixtures("kernels")
def test_a_model_is_saved_with_its_usual_attention(tmp_path):
    model = model_of("llama")
    assert inputs_for(model, Packer(14), CPU, None) is add_bounds
    model.save_pretrained(tmp_path)
    assert varlen.NAME not in (tmp_path / "config.json").read_text()


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_keep_samples_apart_are_packed(kind):
    mask_for(model_of(kind), Packer(32), CPU)


@pytest.mark.parametrize("width", [16, 24, 26, 30, 64])
def test_a_sliding_window_is_refused_where_it_is_shorter_than_a_row(width):
    model = model_of("mistral", num_key_value_heads=2, sliding_window=24)
    if width <= 24:
        mask_for(model, Packer(width), CPU)
    else:
        with pytest.raises(UsageError, match="attends to a limited number"):
            mask_for(model, Packer(width), CPU)


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_a_model_that_fails_on_a_packed_row_is_refused(kind):
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(UsageError, match="--pack"):
        mask_for(model, Packer(12), CPU)


@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_what_passes_between_samples_does_not_hide_behind_rounding(data, tmp_path, precision):
    """Convolutions over tokens, which no mask confines, in weights so small that bfloat16 rounds as much away."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {
        "model_type": "lfm2",
        "vocab_size": 300,
        "intermediate_size": 48,
        "layer_types": ["conv", "full_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 64}))
    with pytest.raises(UsageError, match="--pack"):
        run(data, tmp_path / "out", "--model", str(tmp_path / "config.json"), "--pack", "--precision", precision)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_makes_no_logits(kind):
    """Of long rows and many words they would be more than training itself needs."""
    model = model_of(kind).eval()
    made = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, logits: made.append(tuple(logits.shape)))
    ids = samples(9)[0]["input_ids"].unsqueeze(0)
    states = states_of(model, input_ids=ids)
    assert states.shape == (1, 9, 16)
    assert made == [(1, 1, WORDS)]
    assert torch.equal(model.get_output_embeddings()(states), model(input_ids=ids).logits)


def test_a_model_that_fails_with_one_mask_is_in_its_mode_with_the_next():
    """Not left in eval mode, in which it would be trained without its dropout."""
    model = model_of("llama", "eager").train()
    forward = model.forward

    def picky(*args, attention_mask=None, **more):
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            raise TypeError("a mask is added")
        return forward(*args, attention_mask=attention_mask, **more)

    model.forward = picky
    assert mask_for(model, Packer(14), CPU) == torch.float32
    assert model.training


class Deaf(nn.Module):
    """Takes a mask, and makes nothing of it."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WORDS)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.embedding(input_ids).cumsum(1))


def test_a_model_that_ignores_the_mask_is_refused():
    with pytest.raises(UsageError, match="gives another result"):
        mask_for(Deaf(), Packer(12), CPU)


# ---------------------------------------------------------------------------------------------------------- the trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("packing") / "data.jsonl"
    lines = [{"prompt": f"{n} and {n}", "completion": "is " + "more " * (n % 7)} for n in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(data, out, *more: str) -> list[dict]:
    """The lines of a run's metrics."""
    flags = ["--model", "tiny", "--data", str(data), "--steps", "6", "--seq-len", "48", "--precision", "float64"]
    flags += ["--vocabulary-size", "300", "--sample-tokens", "0", "--out", str(out)]
    assert train(parse_flags([*flags, *more])) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("micro", ["tokens:128", "tokens", "auto", "4"])
def test_a_packed_run_has_the_losses_of_another(data, tmp_path, micro):
    plain, packed = run(data, tmp_path / "plain"), run(data, tmp_path / "packed", "--pack", "--micro", micro)
    assert [row["loss"] for row in packed] == pytest.approx([row["loss"] for row in plain], rel=1e-10)
    assert all(row["padded_tokens"] >= row["tokens"] for row in packed)
    if micro == "tokens:128":
        assert sum(row["padded_tokens"] for row in packed) < 1.25 * sum(row["tokens"] for row in packed)


# ------------------------------------------------------------------------------- activations that are computed again


@pytest.fixture
def little_memory(monkeypatch):
    """In which not even one sample fits, unless layers are computed again."""

    def loss(model, batch):
        if torch.is_grad_enabled() and not model.is_gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return causal_lm_loss(model, batch)

    monkeypatch.setattr("macrobatch.train.learner.causal_lm_loss", loss)


@pytest.mark.parametrize("more", [(), ("--pack",)])
def test_layers_are_computed_again_where_a_sample_does_not_fit(data, tmp_path, little_memory, caplog, more):
    found = run(data, tmp_path / "auto", "--micro", "auto", "--checkpoint-activations", "auto", *more)
    assert "recomputed in the backward from now on, because otherwise not even one sample fits" in caplog.text
    assert caplog.text.count("recomputed") == 1
    assert {row["micro_batches"] for row in found} == {1}  # the sizes that did not fit before are forgotten
    kept = run(data, tmp_path / "yes", "--checkpoint-activations", "yes", *more)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in kept], rel=1e-10)


@pytest.mark.usefixtures("little_memory")
def test_else_a_sample_that_does_not_fit_ends_the_run(data, tmp_path):
    with pytest.raises(FitError, match="not even one sample fits"):
        run(data, tmp_path / "no", "--micro", "auto")
