"""What a recording must leave no trace of, what cannot be recorded, and what makes recordings worthless."""

import copy
import gc
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.gpu import difference
from harness.recorded import (
    DEVICE,
    DROPOUT,
    Decoder,
    agree,
    batch_of,
    beside_eager,
    gpu,
    is_capturing,
    is_recording,
    make,
    recordings,
    said,
    trained,
)
from macrobatch import MacroStep, by_tokens, causal_lm_loss
from macrobatch._cudagraph.cache import MAX_SHAPES

pytestmark = pytest.mark.usefixtures("captures")

# ------------------------------------------------------------------------------------------ no trace


@gpu
def test_warming_up_leaves_no_trace():
    model = make(dropout=0.2, batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=True)
    cut = train._cutter.cut(batch_of(), None)
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.cuda.get_rng_state()
    train._graphs.open(train._engine, train._feed.coming(cut), few_shapes=False)
    assert len(recordings(train)) == 2
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert not any(total.any() for total in train._graphs._recorder._static._sums)
    train._engine.discard()


def reads(model, batch):
    loss, items = causal_lm_loss(model, batch)
    return loss, int(items.item())


def ends_the_capture(model, batch):
    """What only a capture forbids."""
    torch.cuda.synchronize()
    return causal_lm_loss(model, batch)


@gpu
@pytest.mark.parametrize("loss_fn", [reads, ends_the_capture])
def test_what_cannot_be_recorded_runs_eagerly_and_says_why_once(loss_fn):
    model = make()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, train = trained(model, cuda_graph=True, loss_fn=loss_fn, windows=6)
    trained(twin, cuda_graph=False, loss_fn=loss_fn, windows=6)
    assert len(said(caught)) == 1, said(caught)
    assert "run eagerly" in said(caught)[0]
    assert not recordings(train)
    assert difference(model, twin) == 0.0
    # and nothing is broken for others
    assert agree(make())[0] == 0.0


@gpu
@pytest.mark.parametrize("loss_fn", [reads, ends_the_capture])
def test_random_numbers_go_on_after_a_failed_recording(loss_fn):
    model = make(dropout=DROPOUT)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model, cuda_graph=True, loss_fn=loss_fn)
    trained(twin, cuda_graph=False, loss_fn=loss_fn)
    assert difference(model, twin) == 0.0


def with_hook(model):
    model.head.register_forward_hook(lambda *_: None)
    return model


def with_gradient_hook(model):
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize("hook", [with_hook, with_gradient_hook])
def test_hooks_are_not_left_out(hook):
    with pytest.warns(UserWarning, match="has a hook"):
        _, train = trained(hook(make()), cuda_graph=True, windows=3)
    assert not recordings(train)


@pytest.mark.filterwarnings("ignore:.*changes inside a window")  # that is seen too
def test_a_buffer_that_is_replaced_is_seen():
    class Counting(Decoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input_ids):
            self.calls = self.calls + 1
            return super().forward(input_ids)

    model = Counting().to(DEVICE)
    with pytest.warns(UserWarning, match="replaces a buffer"):
        trained(model, cuda_graph=True, windows=3)
    assert model.calls.item() == 12


def test_a_shape_that_does_not_gain_stays_eager(monkeypatch):
    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_TIME_SHARE", 0.0)
    _, train = trained(make(), cuda_graph=True)
    assert train._graphs._recordings
    assert not recordings(train)


def test_the_number_of_recordings_is_limited():
    model = make(layers=1)
    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), causal_lm_loss, micro=200, cuda_graph=True)
    sizes = [*range(1, MAX_SHAPES + 5)] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for samples in [*sizes, MAX_SHAPES + 2, MAX_SHAPES + 2]:
            train(batch_of(samples))
    assert [f"{MAX_SHAPES} shapes" in str(one.message) for one in caught] == [True]
    assert len(recordings(train)) == MAX_SHAPES


def test_checkpointing_falls_back_or_is_right():
    class Checkpointed(Decoder):
        def forward(self, input_ids):
            hidden = self.embedding(input_ids)
            for block in self.blocks:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
            return self.head(hidden)

    torch.manual_seed(0)
    model = Checkpointed().to(DEVICE)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model, cuda_graph=True)
        trained(twin, cuda_graph=False)
    assert difference(model, twin) == 0.0


def test_a_nan_is_raised_and_named():
    model = make()
    train = MacroStep(
        model, torch.optim.AdamW(model.parameters(), fused=True), causal_lm_loss, micro=4, max_norm=1.0, cuda_graph=True
    )
    for seed in range(3):
        train(batch_of(seed=seed))
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(Exception, match="window 4"):
        train(batch_of())
        train(batch_of())
    assert torch.equal(weights[-1], list(model.parameters())[-1])


def test_a_plan_of_many_shapes_is_limited_too(monkeypatch):
    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_SHAPES", 3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(256), cuda_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(4):
            train(batch_of(64, 120, seed=seed))
    assert len(recordings(train)) == len(train._graphs._recordings) == 3
    assert len(said(caught)) == 1
    assert "3 shapes of micro-batches have been tried, and 3 of them are replayed" in said(caught)[0]


def test_a_number_that_changes_in_every_batch_is_told(monkeypatch):
    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_WAITING", 8)

    def loss_fn(model, batch):
        loss, items = causal_lm_loss(model, {name: batch[name] for name in ("input_ids", "labels")})
        return loss * (1 + batch["step"] / 100), items

    def run(model, cuda_graph):
        train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro=4, cuda_graph=cuda_graph)
        for step in range(20):
            train(batch_of(12, seed=step) | {"step": step})
        return cuda_graph and len(train._graphs._waiting)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart, waiting = beside_eager(make(), run)
    assert apart == 0.0
    assert waiting == 8
    assert len(said(caught)) == 1
    assert "came only once" in said(caught)[0]


# ------------------------------------------------------------------------------------------ what a replay cannot do


class Caching(Decoder):
    """Makes something for each length when it first comes, and keeps it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.made = {}

    def forward(self, input_ids):
        length = input_ids.shape[1]
        if length not in self.made:
            positions = torch.arange(length, device=input_ids.device, dtype=torch.float32)
            self.made[length] = torch.sin(positions[:, None] / torch.arange(1, 33, device=input_ids.device))
        hidden = self.embedding(input_ids) + self.made[length]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def test_what_a_forward_keeps_is_not_overwritten():
    """The table for a length is made while that one warms up, beside recordings of others."""

    def run(model, cuda_graph):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(256), cuda_graph=cuda_graph)
        for seed in range(8):
            train(batch_of(32, 60 + 20 * (seed % 3), seed=seed))
        return cuda_graph and (len(recordings(train)), model.made)

    torch.manual_seed(0)
    apart, (recorded, made) = beside_eager(Caching().to(DEVICE, torch.float64), run)
    assert apart < 1e-12
    assert recorded > 4
    assert len(made) > 4
    for length, table in made.items():
        positions = torch.arange(length, device=DEVICE, dtype=torch.float32)
        assert torch.equal(table, torch.sin(positions[:, None] / torch.arange(1, 33, device=DEVICE)))


def on_the_host(kind):
    draw = {"torch": torch.rand, "random": lambda _: random.random(), "numpy": lambda _: np.random.rand()}[kind]

    def loss_fn(model, batch):
        loss, items = causal_lm_loss(model, batch)
        return loss * (0.5 if draw(1) < 0.5 else 2.0), items

    return loss_fn


@pytest.mark.parametrize("kind", ["torch", "random", "numpy"])
def test_random_numbers_of_the_host_are_not_frozen(kind):
    def run(model, cuda_graph):
        random.seed(0)
        np.random.seed(0)
        _, train = trained(model, cuda_graph=cuda_graph, loss_fn=on_the_host(kind), windows=4)
        return cuda_graph and recordings(train)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart, recorded = beside_eager(make(), run)
    assert apart == 0.0
    assert not recorded
    assert len(said(caught)) == 1
    assert "random numbers on the host" in said(caught)[0]


@gpu
def test_losses_that_are_kept_are_not_overwritten():
    kept = []

    def loss_fn(model, batch):
        loss, items = causal_lm_loss(model, batch)
        kept.append(loss.detach())
        return loss, items

    with pytest.warns(UserWarning, match="keeps a tensor"):
        _, train = trained(make(), cuda_graph=True, loss_fn=loss_fn, windows=3)
    assert not recordings(train)
    losses = [loss.item() for loss in kept[-12:]]
    assert len(set(losses)) == 12


def test_a_shape_without_items_is_left_out():
    def loss_fn(model, batch):
        loss, items = causal_lm_loss(model, batch)
        return loss, 0 if len(batch["input_ids"]) == 1 else items

    apart, recorded = agree(make(), loss_fn=loss_fn)
    assert apart == 0.0
    assert len(recorded) == 1


# ------------------------------------------------------------------------------------------ what has changed since


def replaced(model):
    model.frozen.weight.data = model.frozen.weight.detach() * 2


def assigned(model):
    model.frozen.load_state_dict({"weight": torch.eye(32, device=DEVICE) * 3}, assign=True)
    model.frozen.weight.requires_grad_(False)


def another_module(model):
    model.norm = nn.ReLU()


@pytest.mark.parametrize("change", [replaced, assigned, another_module])
def test_a_model_that_is_changed_is_recorded_anew(change):
    """Also in what is not trained."""

    class Frozen(Decoder):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(False)

        def forward(self, input_ids):
            return self.head(self.norm(self.frozen(self.blocks[0](self.embedding(input_ids)))))

    def run(model, cuda_graph):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=cuda_graph)
        for seed in range(6):
            if seed == 3:
                change(model)
                garbage = [torch.full((32, 32), 7.0, device=DEVICE) for _ in range(100)]  # where the old one was
                del garbage
            train(batch_of(12, seed=seed))
        return cuda_graph and recordings(train)

    torch.manual_seed(0)
    apart, recorded = beside_eager(Frozen().to(DEVICE), run)
    assert apart == 0.0
    assert recorded


@gpu
def test_a_model_that_moves_to_the_host_runs_eagerly():
    def run(model, cuda_graph):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=cuda_graph)
        for seed in range(4):
            if seed == 2:
                model.cpu()
            train(batch_of(12, seed=seed, device="cuda" if seed < 2 else "cpu"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart, _ = beside_eager(make(), run)
    assert apart == 0.0
    assert ["the model is on cpu" in one for one in said(caught)] == [True]


# ------------------------------------------------------------------------------------------ what fails


@gpu
def test_a_failed_capture_gives_its_memory_back():
    def reserved(cuda_graph):
        gc.collect()
        torch.cuda.empty_cache()
        model = make(width=512, layers=8, words=8192)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained(model, cuda_graph=cuda_graph, loss_fn=ends_the_capture, samples=512, micro=256, windows=3)
        return torch.cuda.memory_reserved()

    reserved(False)
    assert reserved(True) <= 1.1 * reserved(False)


class Fault:
    """A loss that raises once."""

    def __init__(self, error, when):
        self.error, self.when, self.raised = error, when, 0

    def __call__(self, model, batch):
        result = causal_lm_loss(model, batch)
        if not self.raised and self.when(batch):
            self.raised += 1
            raise self.error
        return result


def capturing(_):
    return is_capturing()


def test_no_memory_for_a_recording_leaves_the_others_as_they_are():
    """Their random numbers too."""

    def run(model, cuda_graph):
        fault = Fault(torch.OutOfMemoryError("CUDA out of memory"), lambda b: capturing(b) and len(b["labels"]) == 1)
        _, train = trained(model, cuda_graph=cuda_graph, loss_fn=fault, windows=8)
        return cuda_graph and (fault.raised, len(recordings(train)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart, (raised, recorded) = beside_eager(make(dropout=DROPOUT), run)
    assert raised == 1
    assert recorded == 1
    assert apart == 0.0
    assert len(said(caught)) == 1
    assert "not enough memory to record" in said(caught)[0]


@pytest.mark.parametrize("micro", [4, "auto"])
def test_memory_that_recordings_hold_is_given_back_before_anything_fails(micro, monkeypatch):
    """An eager micro-batch of one sample does not fit beside them: the window is done again without."""
    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_AT_ONCE", 0)

    def run(model, cuda_graph):
        def does_not_fit(batch):
            return cuda_graph and not is_recording() and batch["labels"].shape == (1, 9)

        fault = Fault(torch.OutOfMemoryError("CUDA out of memory"), does_not_fit)
        _, train = trained(model, cuda_graph=cuda_graph, windows=3, loss_fn=fault, micro=micro)
        recorded = cuda_graph and len(recordings(train))
        results = [train(batch_of(1, 9, seed=seed)) for seed in (2, 7)]
        return recorded, fault.raised, cuda_graph and recordings(train), results[-1].step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart, found = beside_eager(make(dropout=DROPOUT), run)
    assert found == (1 if micro == "auto" else 2, 1, [], 5)
    assert apart == 0.0
    assert len(said(caught)) == 1
    assert "memory ran out beside what had been recorded" in said(caught)[0]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the traceback holds the graph of a capture
def test_an_interrupt_in_a_capture():
    def run(model, cuda_graph):
        fault = Fault(KeyboardInterrupt(), capturing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = MacroStep(model, optimizer, fault, micro=4, cuda_graph=cuda_graph)
        if cuda_graph:
            with pytest.raises(KeyboardInterrupt):
                train(batch_of())
        for seed in range(4):
            train(batch_of(seed=seed))
        return cuda_graph and len(recordings(train))

    apart, recorded = beside_eager(make(dropout=DROPOUT), run)
    assert recorded == 2
    assert apart == 0.0
