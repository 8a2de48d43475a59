"""Training loops to verify, right and wrong: the vocabulary of test_verify*.py.

A loop is a `step(model, batch)`. The hand-written ones are `Loop`s, whose fields say what is done where, or wrongly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import reference
from harness.reference import IGNORED, VOCABULARY, WIDTH, Batch

EQUAL, UNEQUAL = 8, None  # items of each sample: all its tokens but the last ones, or some random number


def batch_of(samples: int = 20, *, length: int = 10, items: int | None = EQUAL, seed: int = 0) -> Batch:
    """Sequences whose labels are the sequences themselves, IGNORED beyond a number of items."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(1, VOCABULARY, (samples, length), generator=draw)
    lengths = torch.randint(2, length + 1, (samples, 1), generator=draw) if items is None else items
    return Batch(x, x.masked_fill(torch.arange(length) >= lengths, IGNORED))


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True):
        yield Batch(x, y)


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return reference.mean_loss(model, batch), batch.items


def sum_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return reference.sum_loss(model, batch), batch.items


def next_token_loss(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Each position predicts the one after it: a label less a sample than there are labels."""
    logits, labels = model(batch.x)[:, :-1], batch.y[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def next_token_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return next_token_loss(model, batch), int((batch.y[:, 1:] != IGNORED).sum())


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Accumulation as people write it by hand.

    `weight` is what the loss of a micro-batch is multiplied with, given its window. `closes(index, count, steps)` says
    after which micro-batches the optimizer steps.
    """

    size: int = 5
    steps: int = 4
    loss: Callable[[nn.Module, Batch], Any] = loss_fn
    weight: Callable[[list[Batch], Batch], float] = lambda window, micro: 1 / len(window)
    closes: Callable[[int, int, int], bool] = lambda index, count, steps: (index + 1) % steps == 0 or index + 1 == count
    zero_before: bool = False
    zero_after: bool = True
    zero_each: bool = False
    step_times: int = 1
    max_norm: float | None = None
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), 0.1
    )
    cut: Callable[[Batch, int], Iterator[Batch]] = pieces

    def __call__(self, model: nn.Module, batch: Batch) -> None:
        optimizer, micro_batches = self.make_optimizer(model), list(self.cut(batch, self.size))
        if self.zero_before:
            optimizer.zero_grad()
        for index, micro in enumerate(micro_batches):
            first = index - index % self.steps
            if self.zero_each:
                optimizer.zero_grad()
            loss = self.loss(model, micro)
            loss = loss[0] if isinstance(loss, tuple) else loss
            (loss * self.weight(micro_batches[first : first + self.steps], micro)).backward()
            if self.closes(index, len(micro_batches), self.steps):
                if self.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
                for _ in range(self.step_times):
                    optimizer.step()
                if self.zero_after:
                    optimizer.zero_grad()


def multiplied_by_a_hook(factor: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """For `make_optimizer`: one whose own hook changes the gradients before each step."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @optimizer.register_step_pre_hook
        def hook(*_: object) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor

        return optimizer

    return make


def two_terms(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    """Cross-entropy over the tokens, and a penalty over the samples."""
    penalty = model(batch.x).square().flatten(1).mean(1).mean()
    return {"tokens": (reference.mean_loss(model, batch), batch.items), "samples": (penalty, len(batch.x))}


def two_counts(batch: Batch) -> dict[str, int]:
    return {"tokens": batch.items, "samples": len(batch.x)}


@dataclass(frozen=True, kw_only=True)
class TermLoop:
    """A loop by hand over a loss of two terms: `weights` of each, given the window."""

    weights: Callable[[list[Batch], Batch], dict[str, float]]
    size: int = 6
    loss: Callable[[nn.Module, Batch], dict[str, Any]] = two_terms

    def __call__(self, model: nn.Module, batch: Batch) -> None:
        optimizer, window = torch.optim.SGD(model.parameters(), 0.1), list(pieces(batch, self.size))
        for micro in window:
            weights = self.weights(window, micro)
            sum(loss * weights[name] for name, (loss, _) in self.loss(model, micro).items()).backward()
        optimizer.step()
        optimizer.zero_grad()


def term_shares(window: list[Batch], micro: Batch) -> dict[str, float]:
    """The right weights of both terms."""
    return {"tokens": by_items(window, micro), "samples": len(micro.x) / sum(len(other.x) for other in window)}


def by_items(window: list[Batch], micro: Batch) -> float:
    """The right weight of a mean loss."""
    return micro.items / sum(other.items for other in window)


def never(window: list[Batch], micro: Batch) -> float:
    return 1.0


def sequences(*, masked: bool = True) -> dict[str, Tensor]:
    """As a tokenizer gives them: filled up on the right, with a mask; labels are the tokens, or IGNORED in padding."""
    batch = batch_of(items=UNEQUAL)
    mask = batch.y != IGNORED
    tokens = batch.x.masked_fill(~mask, 0)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": batch.y if masked else tokens}


def cut(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    parts = (tensor.split(size) for tensor in batch.values())
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


def cross_entropy(shift: int = 1, key: str = "labels", ignored: int = IGNORED, reduction: str = "mean") -> Any:
    """The loss of a language model as people write it, right and wrong: `shift` labels ahead."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        logits, labels = model(batch["input_ids"]), batch[key]
        logits, labels = logits[:, : labels.shape[1] - shift], labels[:, shift:]
        items = int((labels != ignored).sum())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction=reduction)
        return loss, items

    return loss


def on_sequences(loss: Any, divisor: Any = None) -> Callable[[nn.Module, dict[str, Tensor]], None]:
    """Micro-batches of 5, weighed rightly for that loss; or its sums, divided by something of the whole batch."""

    def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        micro_batches = cut(batch, 5)
        total = sum(loss(model, micro)[1] for micro in micro_batches) if divisor is None else divisor(batch)
        for micro in micro_batches:
            value, items = loss(model, micro)
            (value * (items if divisor is None else 1) / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Statistics(nn.Module):
    """An embedding, something that may look at the other samples, and a head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(VOCABULARY, WIDTH), norm, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(self.norm(h.flatten(0, 1)).view_as(h))


class Centred(nn.Module):
    """Takes the mean over all samples away: a batch statistic that no class name gives away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Forgetful(nn.Module):
    """Dropout whose probability no module holds."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3), 0.5)  # whose draws come in another order in another cut


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample's embedding must find its own target's among those of all the others."""
    seen, wanted = model(batch.x).mean(1), model(batch.x.flip(1)).mean(1).detach()
    return F.cross_entropy(seen @ wanted.T, torch.arange(len(batch.x)))


class Perceptron(nn.Module):
    """Two layers, for regression."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def regression(samples: int) -> Batch:
    """Far off in one direction, so that gradients add up instead of cancelling each other."""
    draw = torch.Generator().manual_seed(0)
    return Batch(torch.rand(samples, 16, generator=draw), torch.rand(samples, 4, generator=draw) + 1)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(batch.x.to(dtype)), batch.y.to(dtype))


# ------------------------------------------------------------------------------------------------ the smallest of all

Pair = tuple[Tensor, Tensor]
Step = Callable[[Any, Any], None]


def numbers(dtype: torch.dtype = torch.float64) -> Pair:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(12, 3, generator=draw).to(dtype), torch.randn(12, 1, generator=draw).to(dtype)


def squares(model: nn.Module, batch: Pair) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def thirds(batch: Pair) -> list[Pair]:
    return list(zip(batch[0].split(4), batch[1].split(4), strict=True))


def by_hand(*, first: Any = None, last: Any = None) -> Step:
    """A right loop; something is done to the model first, and to its gradients last."""

    def step(model: nn.Module, batch: Pair) -> None:
        if first is not None:
            first(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for micro in thirds(batch):
            (squares(model, micro) / 3).backward()
        if last is not None:
            last(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()


def spoil(parameter: nn.Parameter) -> None:
    """Its gradient is wrong from now on."""
    assert parameter.grad is not None
    parameter.grad *= 3


def causes(report: Any) -> list[str]:
    return [cause.name for cause in report.causes]
