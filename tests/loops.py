"""Training loops to verify, right and wrong: the vocabulary of test_verify*.py.

A loop is a `step(model, batch)`. The hand-written ones are `Loop`s, whose fields say what is done where, or wrongly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import reference
import torch
import torch.nn.functional as F
from reference import IGNORED, VOCABULARY, WIDTH, Batch
from torch import Tensor, nn

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


def by_items(window: list[Batch], micro: Batch) -> float:
    """The right weight of a mean loss."""
    return micro.items / sum(other.items for other in window)


def never(window: list[Batch], micro: Batch) -> float:
    return 1.0


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
