"""The slow, obvious reference, one big batch in plain torch, and the vocabulary of the tests.

Every model reads token ids `x` (samples, LENGTH) and gives logits (samples, LENGTH, VOCABULARY), so that every model
trains on the same batches, and a macro-batch is `torch.cat` of its micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from macrobatch import Accumulator, StepResult
from macrobatch.types import Reduction

torch.set_num_threads(1)

VOCABULARY, WIDTH, LENGTH = 11, 8, 4
IGNORED = -100  # a target that is no item
ROUTED = 0  # the first token of the samples that the expert sees

T = TypeVar("T")
Named = Mapping[str, Tensor | None]


# ---------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Batch:
    x: Tensor  # (samples, LENGTH) token ids
    y: Tensor  # (samples, LENGTH) targets, IGNORED where nothing is to be predicted

    @property
    def items(self) -> int:
        return int((self.y != IGNORED).sum())


def batch(samples: int, *, seed: int, items: int | None = None, routed: bool = False) -> Batch:
    """Random tokens, of which `items` (default: a random, nonzero number) are to be predicted."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=draw)
    y = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=draw)
    if items is None:
        items = int(torch.randint(1, samples * LENGTH + 1, (), generator=draw))
    y.view(-1)[torch.randperm(samples * LENGTH, generator=draw)[items:]] = IGNORED
    if routed:
        x[0, 0] = ROUTED
    return Batch(x, y)


def batches(sizes: Iterable[int], *, seed: int = 0) -> list[Batch]:
    return [batch(samples, seed=1000 * seed + i) for i, samples in enumerate(sizes)]


def concatenate(window: Sequence[Batch]) -> Batch:
    return Batch(torch.cat([b.x for b in window]), torch.cat([b.y for b in window]))


# ----------------------------------------------------------------------------------------------------------- models


class Reentrant(torch.autograd.Function):
    """Activation checkpointing as several libraries write it: with a backward inside its backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            output = function(hidden)
        ctx.function = function
        ctx.save_for_backward(hidden)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.function(hidden)
        torch.autograd.backward(output, gradient)
        return None, hidden.grad


class Attention(nn.Module):
    """One block with biases; the gradient of the key bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        scores = self.query(h) @ self.key(h).transpose(-1, -2) / WIDTH**0.5
        return self.head(self.norm(h + scores.softmax(-1) @ self.value(h)))


class Tied(nn.Module):
    """The embedding is the language-model head too: one parameter, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(x))))


class Experts(nn.Module):
    """An expert that only samples beginning with ROUTED reach: in other windows its gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, chosen = self.embedding(x), (x[:, 0] == ROUTED).nonzero().flatten()
        if len(chosen):
            h = h.index_add(0, chosen, torch.tanh(self.expert(h[chosen])))
        return self.head(h)


class Convolution(nn.Module):
    """A convolution over the tokens, then a BatchNorm, which `trainee` puts in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
        nn.init.uniform_(self.norm.get_buffer("running_mean"))
        nn.init.uniform_(self.norm.get_buffer("running_var"), 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convolution(self.embedding(x).transpose(1, 2))
        return self.head(torch.relu(self.norm(h)).transpose(1, 2))


class PartlyFrozen(nn.Module):
    """The embedding, and one bias in the middle, do not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.embedding.weight.requires_grad_(False), self.mix.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(x))))


MODELS = (Attention, Tied, Experts, Convolution, PartlyFrozen)
OPTIMIZERS = ("AdamW", "SGD")
HOWS = ("plain", "foreach", "fused")


@dataclass(frozen=True)
class Trainee:
    """A model with what trains it. `model` computes; the Accumulator may be given its parts."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[torch.optim.lr_scheduler.LRScheduler]

    def accumulator(self, **options: Any) -> Accumulator:
        return Accumulator(self.model, self.optimizers, scheduler=self.schedulers, **options)


def make_optimizer(parameters: Iterable[nn.Parameter], name: str = "SGD", how: str = "plain", lr: float = 0.02) -> Any:
    flags: Any = {"foreach": how == "foreach", "fused": how == "fused"}
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=lr, eps=1e-5, **flags)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, **flags)


def trainee(
    make: Callable[[], nn.Module] = Attention,
    name: str = "SGD",
    how: str = "plain",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Trainee:
    """The same weights for the same seed, whatever the dtype."""
    torch.manual_seed(seed)
    model = make().eval().to(dtype)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], name, how)
    return Trainee(model, [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])


# ----------------------------------------------------------------------------------------------------------- losses


def token_loss(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Cross-entropy over the tokens that are items."""
    return F.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED, reduction=reduction)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model, batch, "mean")


def sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model, batch, "sum")


def masked_mean(model: nn.Module, batch: Batch, count: int) -> Tensor:
    """The mean as people write it, with a mask. Of no items, and with their count, it is NaN, as is its gradient."""
    mask = batch.y != IGNORED
    losses = -model(batch.x).log_softmax(-1).gather(-1, batch.y.clamp(min=0)[..., None])[..., 0]
    return (losses * mask).sum() / count


@dataclass(frozen=True)
class Counting:
    """How a loop reports its losses: `items` is "int", "tensor", "mixed" (both by turns), "host tensor",
    "read" (from the loss) or "none" (where nothing is read).

    A "tensor" has a dtype that the host does not read, even on a CPU, as no tensor is read on a device.
    """

    items: str = "int"
    reduction: Reduction = "mean"

    def weight(self, batch: Batch) -> int:
        return 1 if self.items == "none" else batch.items

    def loss(self, model: nn.Module, batch: Batch, turn: int = 0) -> Tensor:
        if batch.items or self.reduction == "sum" or self.items == "read":
            return token_loss(model, batch, self.reduction)
        is_read = isinstance(self.given(batch, turn), int) or self.items == "host tensor"  # then it excuses 0 / 0
        return masked_mean(model, batch, 0 if is_read else 1)

    def given(self, batch: Batch, turn: int) -> int | Tensor | None:
        if self.items in ("none", "read"):
            return None
        if self.items == "host tensor":
            return torch.tensor(batch.items)
        as_tensor = self.items == "tensor" or (self.items == "mixed" and turn % 2)
        return torch.tensor(batch.items, dtype=torch.int16) if as_tensor else batch.items


BY_COUNT = Counting()  # mean losses with their items, as ints


def cut(
    *epochs: Sequence[Batch],
    steps: int | Callable[[int], int],
    remainder: str = "step",
    counting: Counting = BY_COUNT,
) -> list[list[Batch]]:
    """The windows of some epochs, the obvious way: walk along; close a window where it is full, or its epoch ends."""
    windows: list[list[Batch]] = []
    window: list[Batch] = []
    for epoch in epochs:
        for micro in epoch:
            window.append(micro)
            taken = sum(1 for closed in windows if sum(map(counting.weight, closed)))
            if len(window) == (steps(taken) if callable(steps) else steps):
                windows.append(window)
                window = []
        if remainder == "step" and window:
            windows.append(window)
        if remainder != "carry":
            window = []
    return [*windows, window] if window else windows


# ---------------------------------------------------------------------------------------------- one big batch, plainly


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw. `gradients` are those handed to the optimizer."""

    loss: Tensor
    items: int
    grad_norm: Tensor | None
    gradients: Named


def gradients_of(model: nn.Module) -> Named:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole_loss(model: nn.Module, window: Sequence[Batch], counting: Counting = BY_COUNT) -> Tensor:
    """One forward over the macro-batch: the mean over all its items (without items: over its micro-batches)."""
    losses = token_loss(model, concatenate(window), "none")
    share = [counting.weight(b) / max(b.items, 1) if counting.reduction == "mean" else 1.0 for b in window]
    shares = torch.cat([torch.full((b.y.numel(),), s, dtype=losses.dtype) for b, s in zip(window, share, strict=True)])
    return (losses * shares).sum() / sum(map(counting.weight, window))


def whole_batch_gradient(model: nn.Module, window: Sequence[Batch], counting: Counting = BY_COUNT) -> Named:
    model.zero_grad()
    whole_loss(model, window, counting).backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return gradients


def train_whole(
    whole: Trainee,
    windows: Iterable[Sequence[Batch]],
    *,
    max_norm: float | None = None,
    counting: Counting = BY_COUNT,
) -> list[Step | None]:
    """One big batch a window; None for a window without items."""
    return [whole_step(whole, window, max_norm, counting) for window in windows]


def whole_step(whole: Trainee, window: Sequence[Batch], max_norm: float | None, counting: Counting) -> Step | None:
    items, grad_norm = sum(map(counting.weight, window)), None
    if not items:
        return None
    whole.model.zero_grad()
    loss = whole_loss(whole.model, window, counting)
    loss.backward()
    if max_norm is not None:
        grad_norm = nn.utils.clip_grad_norm_(whole.model.parameters(), max_norm)
    gradients = gradients_of(whole.model)
    for optimizer in whole.optimizers:
        optimizer.step()
    for scheduler in whole.schedulers:
        scheduler.step()
    return Step(loss.detach(), items, grad_norm, gradients)


# --------------------------------------------------------------------------------------------- the same, accumulated


@dataclass
class Accumulation:
    """The loop that a user would write, which notes results and the gradients that the optimizer was handed."""

    own: Trainee
    acc: Accumulator
    counting: Counting = BY_COUNT
    results: list[StepResult] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)

    def __post_init__(self) -> None:
        note = lambda *_: self.gradients.append(gradients_of(self.own.model))  # noqa: E731
        self.own.optimizers[-1].register_step_pre_hook(note)

    def epoch(self, loader: Iterable[Batch]) -> "Accumulation":
        for turn, micro in enumerate(self.acc.batches(loader)):
            self.backward(micro, turn)
            self.note(self.acc.step())
        return self

    def backward(self, micro: Batch, turn: int = 0) -> None:
        self.acc.backward(self.counting.loss(self.own.model, micro, turn), items=self.counting.given(micro, turn))

    def note(self, result: StepResult | None) -> None:
        if result is not None:
            self.results.append(result)


def accumulate(own: Trainee, *loaders: Iterable[Batch], counting: Counting = BY_COUNT, **options: Any) -> Any:
    """Train over the loaders, one epoch each."""
    run = Accumulation(own, own.accumulator(reduction=counting.reduction, **options), counting)
    for loader in loaders:
        run.epoch(loader)
    return run


def unsized(micro_batches: Iterable[T]) -> Iterator[T]:
    yield from micro_batches


# -------------------------------------------------------------------------------------------------------- comparing


def relative_error(found: Named, expected: Named) -> float:
    """The largest |difference| over all parameters / the largest |expected| of the whole model. None must meet None."""
    assert [k for k, v in found.items() if v is None] == [k for k, v in expected.items() if v is None]
    pairs = [(f.double(), e.double()) for k, e in expected.items() if e is not None and (f := found[k]) is not None]
    assert len(found) == len(expected)
    assert all(f.isfinite().all() and e.isfinite().all() for f, e in pairs)
    difference = max(((f - e).abs().max().item() for f, e in pairs), default=0.0)
    return difference / (max((e.abs().max().item() for _, e in pairs), default=0.0) or 1.0)


def state_of(own: Trainee) -> dict[str, Named]:
    """Optimizer state by its name, then by parameter: None where there is none.

    A fused optimizer makes its state before the device says that the step is to be left out. That state, all zeros and
    of age zero, is none yet.
    """
    held = {p: (s, o.defaults["fused"]) for o in own.optimizers for p, s in o.state.items()}
    state = {
        p: s for p, (s, fused) in held.items() if not (fused and all(torch.count_nonzero(v) == 0 for v in s.values()))
    }
    named = list(own.model.named_parameters())
    return {
        key: {n: torch.as_tensor(state[p][key]).clone() if key in state.get(p, ()) else None for n, p in named}
        for key in sorted({key for s in state.values() for key in s})
    }


def same_training(own: Trainee, whole: Trainee, tolerance: float = 1e-12) -> None:
    """Weights, optimizer state, step counts and schedule are those of the big batches."""
    assert relative_error(weights_of(own.model), weights_of(whole.model)) <= tolerance
    found, expected = state_of(own), state_of(whole)
    assert found.keys() == expected.keys()
    for key in expected:
        assert relative_error(found[key], expected[key]) <= (0 if key == "step" else tolerance), key
    assert [s.last_epoch for s in own.schedulers] == [s.last_epoch for s in whole.schedulers]


def snapshot(own: Trainee) -> dict[str, Any]:
    """Everything that a window which is skipped must leave alone."""
    return {
        "weights": weights_of(own.model),
        "state": state_of(own),
        "schedule": [(s.last_epoch, s.get_last_lr()) for s in own.schedulers],
    }


def same_snapshot(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return True


class Hoard:
    """What recordings are to `MacroStep` when none is replayed: memory, held until it is given up."""

    def __init__(self) -> None:
        self.has_recordings = True
        self.refused: list[str] = []

    def open(self, *_: object, few_shapes: bool) -> None:
        pass

    def find(self, *_: object) -> None:
        return None

    def close(self, *_: object) -> None:
        pass

    def forget(self) -> None:
        self.has_recordings = False

    def refuse(self, why: str) -> None:
        self.refused.append(why)
