"""Fused accumulation: matrix products add the gradients of linear weights to the sums of a window themselves."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.recorded import DEVICE, Decoder, TwinsCapturer, autocast, batch_of, make, recordings
from macrobatch import Encoded, MacroStep, causal_lm_loss
from macrobatch._cudagraph import fused
from macrobatch._cudagraph.capture import CAPTURERS

pytestmark = pytest.mark.usefixtures("captures")


@pytest.fixture
def always(monkeypatch):
    """Weights of every dtype are fused, so that float64 takes the same way."""
    monkeypatch.setattr(fused, "gains", lambda dtype, total: dtype == total.dtype)


@pytest.fixture
def added(monkeypatch):
    """The shapes of the sums to which products were added."""
    shapes = []
    add = fused._Weight.add_product

    def noting(self, left, right):
        add(self, left, right)
        shapes.append(tuple(self.total.shape))

    monkeypatch.setattr(fused._Weight, "add_product", noting)
    return shapes


class Checkpointed(Decoder):
    """Each block is computed again in the backward."""

    def __init__(self, *, reentrant, **options):
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


class Addmm(nn.Module):
    """A layer as those of GPT-2: its weight is (in, out)."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(x.shape)


class Odd(Decoder):
    """Attention, a layer used three times, addmm, low ranks beside a frozen weight, and a weight that is transposed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
        self.shared, self.addmm = nn.Linear(32, 32), Addmm(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.square = nn.Parameter(torch.randn(32, 32) / 32)

    def forward(self, input_ids):
        hidden = self.attention(self.embedding(input_ids))
        hidden = self.shared(self.shared(hidden).relu()) + self.addmm(hidden)
        hidden = self.frozen(hidden) + self.up(self.down(hidden))
        hidden = self.shared(hidden) + F.linear(hidden, self.square.t())
        return self.head(hidden)


MODELS = {
    "tied": Decoder,
    "recomputed": partial(Checkpointed, reentrant=False),
    "recomputed, reentrant": partial(Checkpointed, reentrant=True),
    "odd": Odd,
}


def built(kind, dtype):
    torch.manual_seed(0)
    return MODELS[kind]().to(DEVICE, dtype)


def step_of(model, loss_fn=causal_lm_loss, *, windows=3, **options):
    """The gradient of the last window, whose recordings were made in the first; and the MacroStep."""
    train = MacroStep(model, None, loss_fn, **({"micro": 4, "cuda_graph": True} | options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(windows):
        optimizer.zero_grad()
        train(batch_of(seed=seed))
        if seed < windows - 1:
            optimizer.step()  # so that weights change between windows
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, train


def errors(gradients, expected):
    """The error of each parameter, relative to the largest gradient."""
    assert gradients.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values())
    return {name: (g.double() - expected[name]).abs().max().item() / largest for name, g in gradients.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_the_gradient_is_that_of_eager_micro_steps(kind, always, added):
    model = built(kind, torch.float64)
    expected, _ = step_of(copy.deepcopy(model), cuda_graph=False)
    found, train = step_of(model)
    assert max(errors(found, expected).values()) < 1e-12
    assert len(recordings(train)) == 2
    assert (64, 32) in added or kind == "odd"


def test_every_kind_of_layer_is_fused(always, added):
    step_of(built("odd", torch.float64), windows=1)
    of_layers = {(96, 32), (32, 32), (2, 32), (32, 2), (61, 32)}  # attention; addmm and others; both low ranks; head
    assert set(added) == of_layers
    once = [shape for shape in added if shape == (2, 32)]
    # out of the attention, two of its feed-forward, three times the shared one, addmm; not the frozen or transposed one
    assert added.count((32, 32)) == 7 * len(once)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["autocast", "half weights"])
def test_at_least_as_close_to_float64_as_unfused(kind, how, added):
    options = {"loss_fn": autocast(torch.bfloat16)} if how == "autocast" else {"accumulate_dtype": torch.float32}
    model = built(kind, torch.float32)
    model = model if how == "autocast" else model.to(torch.bfloat16)
    exact, _ = step_of(copy.deepcopy(model).double(), cuda_graph=False, windows=1)
    plain, _ = step_of(copy.deepcopy(model), windows=1, fuse=False, **options)
    assert not added
    found, _ = step_of(model, windows=1, **options)
    assert added
    fused_errors, unfused_errors = (sum(errors(g, exact).values()) for g in (found, plain))
    assert fused_errors <= 1.05 * unfused_errors


def test_weights_are_cast_again_in_every_window(added):
    model, loss_fn = make(), autocast(torch.bfloat16)
    expected, _ = step_of(copy.deepcopy(model), loss_fn, fuse=False)
    found, _ = step_of(model, loss_fn)
    assert max(errors(found, expected).values()) < 0.02

    model = make()
    with pytest.MonkeyPatch.context() as patch:  # the planted bug
        patch.setattr(fused.FusedWeights, "renew", lambda self: None)
        stale, _ = step_of(model, loss_fn)
    assert max(errors(stale, expected).values()) > 0.02


def test_a_loss_that_differentiates_by_weights_is_recorded_unfused(always, added):
    def loss_fn(model, batch):
        loss = model(batch["input_ids"]).logsumexp(-1).mean(1).sum()
        norm = torch.autograd.grad(loss, model.head.weight, retain_graph=True, create_graph=True)[0].square().sum()
        return (loss + 0.1 * norm) / 4, 4

    model = make(torch.float64)
    expected, _ = step_of(copy.deepcopy(model), loss_fn, cuda_graph=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, train = step_of(model, loss_fn)
    assert max(errors(found, expected).values()) < 1e-12
    assert recordings(train)
    assert not added
    assert any("fuse=True has no effect" in str(one.message) for one in caught)


def test_a_penalty_on_the_gradient_of_inputs(always):
    def loss_fn(model, batch):
        hidden = model.embedding(batch["input_ids"]).detach().requires_grad_()
        out = model.head(model.blocks[0](hidden)).logsumexp(-1).mean(1).sum()
        (slope,) = torch.autograd.grad(out, hidden, create_graph=True)
        return (out + slope.square().mean((1, 2)).sum()) / 4, 4

    model = make(torch.float64)
    expected, _ = step_of(copy.deepcopy(model), loss_fn, cuda_graph=False)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        found, train = step_of(model, loss_fn)
    assert max(errors(found, expected).values()) < 1e-12
    assert recordings(train)


def test_losses_of_the_whole_batch(always, added):
    def encode(model, batch):
        return Encoded(one=model.blocks[0](model.embedding(batch["input_ids"])).mean(1))

    def joint(model, encoded):
        return (encoded.one @ encoded.one.t()).logsumexp(1).mean()

    model = make(torch.float64)
    expected, _ = step_of(copy.deepcopy(model), encode, joint=joint, cuda_graph=False)
    found, _ = step_of(model, encode, joint=joint)
    assert max(errors(found, expected).values()) < 1e-12
    assert added


def test_clipping_and_a_mean_of_unequal_micro_batches(always, added):
    model = make(torch.float64)
    twin = copy.deepcopy(model)
    for one, records in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        train = MacroStep(one, optimizer, causal_lm_loss, micro=4, max_norm=0.5, cuda_graph=records)
        norms = [train(batch_of(seed=seed)).grad_norm.item() for seed in range(3)]
        assert min(norms) > 0.5
    assert added
    assert max((p - q).abs().max().item() for p, q in zip(model.parameters(), twin.parameters(), strict=True)) < 1e-13


def test_a_compiled_model_is_recorded_in_the_ordinary_way(always, added):
    model = make(torch.float64)
    expected, _ = step_of(copy.deepcopy(model), cuda_graph=False, windows=1)
    model.blocks[0].compile(backend="eager")
    found, _ = step_of(model, windows=1)
    assert max(errors(found, expected).values()) < 1e-12
    assert not added


def test_ddp(always, added, tmp_path, monkeypatch):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = TwinsCapturer.model = make(torch.float64)
        if DEVICE == "cpu":
            monkeypatch.setitem(CAPTURERS, "cpu", TwinsCapturer)
        expected, _ = step_of(copy.deepcopy(model), cuda_graph=False)
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        found, train = step_of(ddp)
        found = {name.removeprefix("module."): gradient for name, gradient in found.items()}
        assert max(errors(found, expected).values()) < 1e-12
        assert recordings(train)
        assert added
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_torch_has_its_own_functions_back(fails, always):
    def loss_fn(model, batch):
        loss, items = causal_lm_loss(model, batch)
        if fails and F.linear is not before[0]:
            raise ZeroDivisionError
        return loss, items

    before = F.linear, torch.addmm
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_of(make(torch.float64), loss_fn, windows=2)
    assert (F.linear, torch.addmm) == before
    assert [str(one.message).startswith("fuse=True has no effect") for one in caught] == [True] * fails
