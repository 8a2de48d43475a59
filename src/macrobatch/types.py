"""The public types: arguments and results of `Accumulator` and `MacroStep`."""

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
Joint = Callable[[Any, Any], Tensor]  # of the model and an `Encoded` of the whole batch: its loss
Reduction = Literal["mean", "sum", "total"]
When = Literal["window", "micro"]
Gather = Literal["micro", "window", "auto"]
Remainder = Literal["step", "drop", "carry"]
NonFinite = Literal["raise", "skip", "keep"]


class Options(TypedDict, total=False):
    """The options that `Accumulator` and `MacroStep` have in common."""

    scheduler: LRScheduler | Sequence[LRScheduler] | None
    max_norm: float | None
    scaler: GradScaler | None
    reduction: Reduction
    sync: When
    gather: Gather
    accumulate_dtype: torch.dtype | None
    nonfinite: NonFinite
    process_group: object


class Sum:
    """Marks a field of `Encoded` as a statistic of the micro-batch, which is added up over micro-batches and ranks.

    `loss_fn` puts it into an `Encoded`. The function ``joint`` of `MacroStep` then gets the total.

    >>> Sum(torch.tensor([3.0, 5.0])).value            # how many tokens each expert got, say
    tensor([3., 5.])

    Args:
        value: the statistic of one micro-batch: a number, or a tensor of any shape.
    """

    def __init__(self, value: Tensor | float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Sum({self.value!r})"


class Encoded:
    """The encodings of a micro-batch, from which ``joint`` of `MacroStep` computes the loss of the whole batch.

    `loss_fn` returns it if you use ``MacroStep(..., joint=joint)``. The function ``joint`` gets an `Encoded` with the
    same fields, which has the rows of all samples on all ranks.

    >>> encoded = Encoded(image=torch.randn(4, 8), text={"first": torch.randn(4, 8), "length": torch.arange(4)})
    >>> encoded.image.shape, encoded.text["length"]
    (torch.Size([4, 8]), tensor([0, 1, 2, 3]))

    Args:
        loss: an ordinary loss of the micro-batch, which is added to that of ``joint``: a mean over its items, or with
            ``reduction="sum"`` their sum. Default: there is only the loss of ``joint``.
        items: the number of items of that ordinary loss. Default: the number of samples.
        fields: what ``joint`` needs of the samples, by any names. A field is a tensor with one row per sample, or a
            `Sum`, or a dict, list, tuple or dataclass of these.
    """

    def __init__(self, loss: Tensor | None = None, items: Items = None, **fields: Any) -> None:
        self.loss = loss
        self.items = items
        self._names = tuple(fields)
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:  # where there is no such attribute
        has = ", ".join(vars(self).get("_names", ())) or "none"
        raise AttributeError(f"Encoded has no field {name!r}. Its fields: {has}.")

    def __repr__(self) -> str:
        return f"Encoded({', '.join(self._names)})"


def fields_of(encoded: Encoded) -> dict[str, Any]:
    """The fields of an `Encoded` as a dict by name."""
    return {name: vars(encoded)[name] for name in encoded._names}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one window, that is, of one optimizer step. `Accumulator.step` and `MacroStep` return it.

    Its tensors are on the device, so that nothing waits for them. ``result.loss.item()`` makes the host wait: call it
    only for the steps that you log. On several ranks, ``loss``, ``items``, ``grad_norm`` and ``losses`` are those of
    all ranks together.

    Attributes:
        step: the number of optimizer steps taken so far, including this one. It is a tensor if only the device knows.
        micro_batches: the number of micro-batches in the window on this rank.
        loss: the mean loss over all items of the window; NaN if there were none. For several terms, the sum of their
            means.
        items: the number of items in the window; if no items were given, the number of micro-batches. For several
            terms, the items of the first one.
        grad_norm: the norm of the window's mean gradient before clipping; None without ``max_norm``.
        lr: the learning rate of each parameter group in this step.
        skipped: whether no step was taken. It is a tensor if only the device knows.
        losses: the mean of each term, by name; NaN for a term without items. None if the loss has a single term.
    """

    step: int | Tensor
    micro_batches: int
    loss: Tensor
    items: Tensor
    grad_norm: Tensor | None
    lr: tuple[float | Tensor, ...]
    skipped: bool | Tensor
    losses: dict[str, Tensor] | None = None
