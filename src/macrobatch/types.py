"""The types that users meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

Items = int | float | Tensor | None
Terms = Mapping[str, Tensor | tuple[Tensor, Items]]  # several losses, each with its own items
Counts = Callable[[Any], Mapping[str, int | float | Tensor]]  # of a batch: the items of each term
Reduction = Literal["mean", "sum"]
When = Literal["window", "micro"]
Remainder = Literal["step", "drop", "carry"]
NonFinite = Literal["raise", "skip", "keep"]


class Options(TypedDict, total=False):
    """What `Accumulator` and `MacroStep` both take."""

    scheduler: LRScheduler | Sequence[LRScheduler] | None
    max_norm: float | None
    scaler: GradScaler | None
    reduction: Reduction
    sync: When
    gather: When
    accumulate_dtype: torch.dtype | None
    nonfinite: NonFinite
    process_group: object


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What became of one window. Tensors stay on the device until you ask for their values.

    Attributes:
        step: how many optimizer steps were taken so far, this one included; a tensor where the host does not know.
        micro_batches: how many of them the window held.
        loss: the mean loss over the items of the window; NaN where there were none. Of several terms, the sum.
        items: how many items that was (the number of micro-batches where no items were given); of the first term where
            there are several.
        grad_norm: of the window's mean gradient, before clipping; None without ``max_norm``.
        lr: the learning rate of each parameter group in this step.
        skipped: whether no step was taken; a tensor where the host does not know.
        losses: the mean of each term by name, NaN where it had no items in the window; None without terms.
    """

    step: int | Tensor
    micro_batches: int
    loss: Tensor
    items: Tensor
    grad_norm: Tensor | None
    lr: tuple[float | Tensor, ...]
    skipped: bool | Tensor
    losses: dict[str, Tensor] | None = None
