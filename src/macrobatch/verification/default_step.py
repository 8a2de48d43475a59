"""The step that `verify` checks if it is given none: `MacroStep`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cut.policies import ByCount, ByTokens
from macrobatch._cut.samples import Collate, samples_of
from macrobatch.macrostep import MacroStep
from macrobatch.types import Counts, Joint, Reduction
from macrobatch.verification.bigbatch import LossFunction
from macrobatch.verification.step_watcher import Step


def default_step(
    loss_fn: LossFunction,
    micro: int | ByCount | ByTokens | None,
    reduction: Reduction,
    collate: Collate | None,
    counts: Counts | None = None,
    joint: Joint | None = None,
) -> Step:
    """A step that runs `MacroStep` with a learning rate of 0."""

    def step(model: nn.Module, batch: Any) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        size = micro or uneven_size(samples_of(batch, collate).count)
        options: Any = {"reduction": reduction, "collate": collate, "counts": counts, "joint": joint}
        MacroStep(model, optimizer, _unrefused(loss_fn), micro=size, **options)(batch)

    return step


def _unrefused(loss_fn: LossFunction) -> LossFunction:
    """The same function, but a loss that comes with items cannot be read: the report tells whether they are wrong."""

    def unread(model: nn.Module, batch: Any) -> Any:
        returned = loss_fn(model, batch)
        if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor):
            return _Unread.apply(returned[0]), returned[1]  # type: ignore[no-untyped-call]
        return returned

    return unread


class _Unread(torch.autograd.Function):
    """The identity. No graph is read through it."""

    @staticmethod
    def forward(_: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def uneven_size(samples: int) -> int:
    """A micro-batch size that cuts the samples into about three micro-batches, the last smaller than the others.

    >>> [uneven_size(samples) for samples in (1, 2, 3, 8, 9, 64)]
    [1, 1, 2, 3, 4, 22]
    """
    return 1 if samples < 3 else samples // 3 + 1
