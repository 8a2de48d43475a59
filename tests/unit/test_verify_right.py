"""Steps that are right: no false alarm, whatever the model, the precision, the optimizer or the library."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness.loops import (
    UNEQUAL,
    Forgetful,
    Loop,
    Perceptron,
    Statistics,
    TermLoop,
    batch_of,
    by_items,
    cross_entropy,
    loss_fn,
    multiplied_by_a_hook,
    next_token_fn,
    on_sequences,
    pieces,
    regression,
    sequences,
    squared_error,
    sum_fn,
    term_shares,
    two_counts,
    two_terms,
)
from harness.peers import accelerate_loop, accelerate_tokens, accelerator, lightning_loop, loader_of, shifted_labels
from harness.reference import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    Attention,
    Batch,
    Convolution,
    Experts,
    PartlyFrozen,
    Tied,
    mean_loss,
    sum_loss,
)
from macrobatch import Accumulator, MacroStep, by_tokens, causal_lm_loss, verify

TWENTY = batch_of(items=UNEQUAL)  # in micro-batches of 5, one window of 4
FIFTY = batch_of(50, items=UNEQUAL)  # three windows, the last of 2
RIGHT = Loop(weight=by_items)


@dataclass(frozen=True, kw_only=True)
class Right:
    step: Callable[[nn.Module, Any], Any] | None = RIGHT
    batch: Any = FIFTY
    loss_fn: Callable[[nn.Module, Any], Any] = loss_fn
    make: Callable[[], nn.Module] = Attention
    dtype: torch.dtype = torch.float64
    training: bool = False
    note: str | None = None  # what the report has to mention
    windows: int = 3
    counts: Callable[[Any], Any] | None = None

    def verified(self) -> Any:
        torch.manual_seed(0)
        model = self.make().to(self.dtype).train(self.training)
        return verify(model, self.loss_fn, self.batch, step=self.step, counts=self.counts)


# ------------------------------------------------------------------------------------------------------------- models


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(checkpoint(lambda h: self.norm(h + torch.tanh(self.value(h))), h, use_reentrant=False))


class Uncalled(Attention):
    """Never called itself: its loss uses a method of its own."""

    def encode(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


def encoded_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    logits = model.encode(batch.x)
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED), batch.items


class Local(nn.Module):
    """Each position by itself, so that padding may be trimmed."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class Recurrent(nn.Module):
    """Dropout between the layers of a GRU, which is a number that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gru = nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(x))[0])


class Narrow(nn.Module):
    """Computes in float32 whatever it is given, as the norms of many language models do."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Aside(Local):
    """Keeps what the loss is made of, and returns something else."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.embedding(x)
        return self.head(self.hidden[:, :1])


def loss_aside(model: Any, batch: Batch) -> tuple[Tensor, int]:
    model(batch.x)
    logits = F.linear(model.hidden, model.head.weight, model.head.bias)
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED), batch.items


class Towers(nn.Module):
    """Called twice for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Local()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def distance_of_towers(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x) - model(batch.x.flip(1))).square().mean()


# -------------------------------------------------------------------------------------------------------------- loops


def accumulated(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> Callable[[nn.Module, Batch], None]:
    def step(model: nn.Module, batch: Batch) -> None:
        acc = Accumulator(model, make([p for p in model.parameters() if p.requires_grad], lr=0.1), steps=4, **options)
        for micro in acc.batches(list(pieces(batch, 5))):
            acc.backward(*loss_fn(model, micro))
            acc.step()

    return step


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def mean_left_to_clipping(model: nn.Module, batch: Batch) -> None:
    """The gradient is divided after the last backward, and clipped then."""
    MacroStep(model, None, loss_fn, micro=5)(batch)
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 0.02)
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


def clipping_each(limit: float, least_dims: int = 0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """For `make_optimizer`: each parameter's gradient is clipped by its own norm."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @optimizer.register_step_pre_hook
        def clip(*_: object) -> None:
            for parameter in model.parameters():
                if parameter.dim() >= least_dims:
                    nn.utils.clip_grad_norm_(parameter, limit)

        return optimizer

    return make


class CallsItsParent(torch.optim.SGD):
    """So hooks run twice in each step; and its step changes gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad - parameter.grad.mean()
        return super().step(closure)


torch.optim.SGD([nn.Parameter(torch.ones(1))])  # its step has hooks only after this


def scaled(model: nn.Module, batch: Batch) -> None:
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for micro in pieces(batch, 5):
        scaler.scale(mean_loss(model, micro) * by_items([batch], micro)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def autocast(model: nn.Module, batch: Batch) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(model, batch)


def in_a_closure(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> None:
        optimizer.zero_grad()
        for micro in pieces(batch, 5):
            (mean_loss(model, micro) * by_items([batch], micro)).backward()

    optimizer.step(closure)


def two_optimizers(model: Any, batch: Batch) -> None:
    head = torch.optim.SGD(model.head.parameters(), 0.1)
    rest = torch.optim.AdamW([p for name, p in model.named_parameters() if "head" not in name], 0.1)
    micro_batches = list(pieces(batch, 5))
    for index, micro in enumerate(micro_batches):
        first = index - index % 4
        (mean_loss(model, micro) * by_items(micro_batches[first : first + 4], micro)).backward()
        if index % 4 == 3 or index == len(micro_batches) - 1:
            head.step(), rest.step()
            head.zero_grad(), rest.zero_grad()


def in_the_backward(model: nn.Module, batch: Batch) -> None:
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    try:
        mean_loss(model, batch).backward()
    finally:
        for hook in hooks:
            hook.remove()


def without_an_optimizer(model: nn.Module, batch: Batch) -> None:
    for micro in pieces(batch, 5):
        (mean_loss(model, micro) * by_items([batch], micro)).backward()


def losses_added_first(model: nn.Module, batch: Batch) -> None:
    sum(mean_loss(model, micro) * by_items([batch], micro) for micro in pieces(batch, 5)).backward()


def divided_at_the_end(model: nn.Module, batch: Batch) -> None:
    for micro in pieces(batch, 5):
        sum_loss(model, micro).backward()
    for parameter in model.parameters():
        parameter.grad /= batch.items


def with_an_evaluation(model: nn.Module, batch: Batch) -> None:
    """Forwards that are no training, before, between and after the windows."""
    for _ in range(2):
        with torch.no_grad():
            model(batch.x)
        model(batch.x[:2])  # with a graph, but nobody goes back through it
        RIGHT(model, batch)
    model(batch.x[:3])


def in_training_mode(model: nn.Module, batch: Batch) -> None:
    model.train()
    mean_loss(model, batch).backward()


def recomputed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The whole forward happens again in the backward."""
    with set_checkpoint_early_stop(False):
        logits = checkpoint(model, batch.x, use_reentrant=False)
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED), batch.items


def shuffled(batch: Batch, size: int) -> Iterator[Batch]:
    order = torch.randperm(len(batch.x))
    yield from pieces(Batch(batch.x[order], batch.y[order]), size)


def trimmed(batch: Batch, size: int) -> Iterator[Batch]:
    for micro in pieces(batch, size):
        longest = int((micro.y != IGNORED).sum(1).max())
        yield Batch(micro.x[:, :longest], micro.y[:, :longest])


def padded(batch: Batch) -> Batch:
    return Batch(batch.x.masked_fill(batch.y == IGNORED, 0), batch.y)


def accelerate_in_bf16(model: nn.Module, batch: Batch) -> None:
    with accelerator(mixed_precision="bf16") as theirs:
        model, optimizer, loader = theirs.prepare(model, torch.optim.AdamW(model.parameters()), loader_of(batch))
        for x, y in loader:
            with theirs.accumulate(model):
                theirs.backward(mean_loss(model, Batch(x, y)))
                optimizer.step()
                optimizer.zero_grad()


def by_length(model: nn.Module, batch: dict[str, Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    MacroStep(model, optimizer, named_loss, micro=by_tokens(40))(batch)


def named_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    return loss, (batch["labels"] != IGNORED).sum()


SEQUENCES = sequences()


def prompted() -> dict[str, Tensor]:
    """With prompts, which are shown but not trained."""
    labels = SEQUENCES["labels"].clone()
    labels[:, :2] = IGNORED
    return SEQUENCES | {"labels": labels}


def filled_on_the_left() -> dict[str, Tensor]:
    return {name: tensor.flip(1) for name, tensor in SEQUENCES.items()}


def other_way_round() -> dict[str, Tensor]:
    """A mask of what is padding, not of what is shown."""
    return SEQUENCES | {"attention_mask": 1 - SEQUENCES["attention_mask"]}


def two_languages() -> dict[str, Tensor]:
    """Labels that are no tokens of the input, and have nothing to do with its mask."""
    return SEQUENCES | {"labels": batch_of(seed=1, items=UNEQUAL).y}


def with_a_label_for_padding() -> dict[str, Tensor]:
    return {"input_ids": SEQUENCES["input_ids"], "labels": SEQUENCES["input_ids"]}


def averaged_as_it_goes(model: nn.Module, batch: Batch) -> None:
    """Gradients are made smaller between backwards, on purpose: they are a mean at any time."""
    items = 0
    for micro in pieces(batch, 5):
        items += micro.items
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 - micro.items / items
        (mean_loss(model, micro) * micro.items / items).backward()


FLOATS = (torch.float64, torch.float32, torch.bfloat16)
EVERY_MODEL = (Attention, Tied, Experts, Convolution, PartlyFrozen)


def terms_in_windows(model: nn.Module, batch: Batch) -> None:
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=4, counts=two_counts)
    for micro in acc.batches(list(pieces(batch, 5))):
        acc.backward(two_terms(model, micro))
        acc.step()


STEPS = {
    f"{make.__name__}, {dtype}": Right(make=make, dtype=dtype, step=None, windows=1)
    for make in EVERY_MODEL
    for dtype in FLOATS
} | {
    "by hand": Right(),
    "by hand, float32": Right(dtype=torch.float32),
    "by hand, bf16": Right(dtype=torch.bfloat16),
    "partly frozen by hand": Right(make=PartlyFrozen),
    "cleared at the beginning": Right(
        step=Loop(weight=by_items, zero_before=True, zero_after=False), windows=1, batch=TWENTY
    ),
    "clipped": Right(step=Loop(weight=by_items, max_norm=0.05), note="clipped, to a norm of 0.05"),
    "clipped, float32": Right(step=Loop(weight=by_items, max_norm=0.05), dtype=torch.float32, note="clipped"),
    "clipped, bf16": Right(step=Loop(weight=by_items, max_norm=0.05), dtype=torch.bfloat16, note="clipped"),
    "clipped to an odd number": Right(step=Loop(weight=by_items, max_norm=0.05371), note="a norm of 0.05371"),
    "clipped, each parameter by itself": Right(
        step=Loop(weight=by_items, make_optimizer=clipping_each(0.02)),
        note="each parameter's",
    ),
    "clipped, each by itself, to an odd number, float32": Right(
        step=Loop(weight=by_items, make_optimizer=clipping_each(0.02371)), dtype=torch.float32, note="by itself"
    ),
    "clipped, each by itself, after a division": Right(step=mean_left_to_clipping, note="by itself", windows=1),
    "clipped, the weights alone": Right(
        step=Loop(weight=by_items, make_optimizer=clipping_each(0.02, least_dims=2)), note="by itself"
    ),
    "Accumulator": Right(step=accumulated()),
    "Accumulator, fused": Right(step=accumulated(fused), dtype=torch.float32),
    "Accumulator, fused and clipped": Right(
        step=accumulated(fused, max_norm=0.05), dtype=torch.float32, note="clipped"
    ),
    "Accumulator, in float32": Right(step=accumulated(accumulate_dtype=torch.float32), dtype=torch.bfloat16),
    "GradScaler": Right(step=scaled, dtype=torch.float32, windows=1),
    "a hook of the optimizer divides": Right(
        step=Loop(weight=lambda window, micro: 8 * by_items(window, micro), make_optimizer=multiplied_by_a_hook(1 / 8))
    ),
    "an optimizer that calls its parent's step": Right(step=Loop(weight=by_items, make_optimizer=CallsItsParent)),
    "autocast": Right(step=Loop(weight=by_items, loss=autocast), loss_fn=autocast, dtype=torch.float32),
    "autocast in the step alone": Right(step=Loop(weight=by_items, loss=autocast), dtype=torch.float32),
    "a closure": Right(step=in_a_closure, windows=1),
    "two optimizers": Right(step=two_optimizers),
    "optimizers in the backward": Right(step=in_the_backward, windows=1),
    "no optimizer": Right(step=without_an_optimizer, windows=1),
    "losses added first": Right(step=losses_added_first, windows=1),
    "divided at the end": Right(step=divided_at_the_end, windows=1),
    "evaluations in between": Right(step=with_an_evaluation, windows=6),
    "shuffled": Right(step=Loop(weight=by_items, cut=shuffled)),
    "padding trimmed": Right(make=Local, step=Loop(weight=by_items, cut=trimmed), batch=padded(FIFTY)),
    "sparse gradients": Right(make=lambda: Local(sparse=True)),
    "by tokens": Right(
        make=Local, step=by_length, loss_fn=named_loss, batch={"input_ids": FIFTY.x, "labels": FIFTY.y}, windows=1
    ),
    "averaged as it goes": Right(step=averaged_as_it_goes, windows=1),
    "sequences": Right(
        step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=SEQUENCES, windows=1, dtype=torch.float32
    ),
    "sequences, not shifted": Right(
        step=on_sequences(cross_entropy(shift=0)), loss_fn=cross_entropy(shift=0), batch=SEQUENCES, windows=1
    ),
    "sequences without labels": Right(
        step=None, loss_fn=causal_lm_loss, batch={"input_ids": SEQUENCES["input_ids"]}, windows=1
    ),
    "sequences, our own loss": Right(step=None, loss_fn=causal_lm_loss, batch=SEQUENCES, windows=1),
    "prompts": Right(step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=prompted(), windows=1),
    "filled on the left": Right(
        step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=filled_on_the_left(), windows=1
    ),
    "a mask the other way round": Right(
        step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=other_way_round(), windows=1
    ),
    "two languages": Right(
        step=on_sequences(cross_entropy(shift=0)), loss_fn=cross_entropy(shift=0), batch=two_languages(), windows=1
    ),
    "a label for padding": Right(
        step=on_sequences(cross_entropy(ignored=0)),
        loss_fn=cross_entropy(ignored=0),
        batch=with_a_label_for_padding(),
        windows=1,
    ),
    "two towers": Right(
        make=Towers, loss_fn=distance_of_towers, step=Loop(loss=distance_of_towers, size=10, steps=5), windows=1
    ),
    "float32 inside": Right(make=lambda: Statistics(Narrow()), step=None, windows=1),
    "a loss around what the model returns": Right(
        make=Aside, loss_fn=loss_aside, step=Loop(weight=by_items, loss=loss_aside)
    ),
    "checkpointing": Right(make=Checkpointed),
    "checkpointing as a whole": Right(loss_fn=recomputed_loss, step=Loop(weight=by_items, loss=recomputed_loss)),
    "a mode that the step sets": Right(
        make=lambda: Statistics(nn.BatchNorm1d(WIDTH)), step=in_training_mode, windows=1
    ),
    "never called itself": Right(make=Uncalled, loss_fn=encoded_loss, step=Loop(weight=by_items, loss=encoded_loss)),
    "compiled": Right(make=lambda: torch.compile(Local(), backend="eager"), batch=padded(FIFTY)),
    "dropout": Right(make=lambda: Statistics(nn.Dropout(0.5)), training=True, note="dropout was switched off"),
    "dropout in a GRU": Right(make=Recurrent, training=True, note="gru.dropout"),
    "BatchNorm, not training": Right(make=lambda: Statistics(nn.BatchNorm1d(WIDTH))),
    "many micro-batches in bf16": Right(
        make=Perceptron,
        dtype=torch.bfloat16,
        batch=regression(64),
        loss_fn=squared_error,
        step=Loop(size=1, steps=64, loss=squared_error),
        windows=1,
    ),
    "Accelerate, full windows": Right(
        step=accelerate_loop(mean_loss), batch=batch_of(40), dtype=torch.float32, windows=2
    ),
    "Accelerate, in bf16": Right(step=accelerate_in_bf16, batch=batch_of(40), dtype=torch.float32, windows=2),
    "Accelerate, labels counted rightly": Right(
        step=accelerate_tokens(shifted_labels), loss_fn=next_token_fn, dtype=torch.float32
    ),
    "Lightning, full windows": Right(step=lightning_loop(mean_loss), batch=batch_of(40), windows=2),
    "two terms": Right(step=None, loss_fn=two_terms, counts=two_counts, windows=1),
    "two terms, by hand": Right(step=TermLoop(weights=term_shares), loss_fn=two_terms, windows=1),
    "two terms, float32": Right(step=None, loss_fn=two_terms, counts=two_counts, dtype=torch.float32, windows=1),
    "two terms, in windows": Right(step=terms_in_windows, loss_fn=two_terms),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_false_alarm(name):
    right = STEPS[name]
    report = right.verified()
    assert report.ok, str(report)
    assert report.causes == ()
    assert report.max_relative_error <= report.bound
    assert len(report.windows) == right.windows
    assert right.note is None or any(right.note in note for note in report.notes)


@pytest.mark.parametrize(
    "name", ["by hand", "checkpointing as a whole", "evaluations in between", "losses added first"]
)
def test_micro_batches_are_counted_once(name):
    """A forward that happens again in the backward, or that no backward follows, is none."""
    right = STEPS[name]
    counts = [window.micro_batches for window in right.verified().windows]
    assert counts == ([10] if right.windows == 1 else [4, 4, 2] * (right.windows // 3))


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    st.integers(2, 5), st.integers(2, 5), st.integers(4, 12), st.sampled_from(EVERY_MODEL), st.sampled_from(FLOATS[:2])
)
def test_every_cut_is_judged_rightly(size, steps, count, make, dtype):
    """Weighed by items it is right; by ones, wrong wherever a window has several micro-batches."""
    torch.manual_seed(count)
    model, batch = make().to(dtype).eval(), batch_of(size * count, items=UNEQUAL, seed=count)
    assert verify(model, loss_fn, batch, step=Loop(size=size, steps=steps, weight=by_items)).ok
    report = verify(model, loss_fn, batch, step=Loop(size=size, steps=steps))
    assert [cause.name for cause in report.causes] == ["mean of means"], str(report)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro", [None, 1, 7, 50])
def test_the_default_step(reduction, micro):
    fn = loss_fn if reduction == "mean" else sum_fn
    torch.manual_seed(0)
    report = verify(Attention().double(), fn, FIFTY, micro=micro, reduction=reduction)
    assert report.ok, str(report)
    assert report.windows[0].micro_batches == {None: 3, 1: 50, 7: 8, 50: 1}[micro]


@pytest.mark.parametrize(
    "step", [None, lambda model, batch: sum_loss(model, batch).backward()], ids=["default", "by hand"]
)
def test_a_sum_without_items(step):
    """By hand it is the sum itself; a MacroStep makes it a mean over samples."""
    torch.manual_seed(0)
    assert verify(Attention().double(), sum_loss, FIFTY, step=step, reduction="sum").ok


def test_the_same_draws_are_no_error():
    """Random numbers are repeated, in whatever order they come in another cut."""
    torch.manual_seed(0)
    once = nn.Module()
    once.forward = lambda x: F.dropout(x, 0.5)
    assert verify(Statistics(once).double(), loss_fn, FIFTY).ok
    assert verify(Statistics(Forgetful()).double(), loss_fn, FIFTY).ok
