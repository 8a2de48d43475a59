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
Joint = Callable[[Any, Any], Tensor]  # of the model and an `Encoded` of the whole batch: its loss
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


class Sum:
    """A statistic of a micro-batch, for `Encoded`: ``joint`` sees the total over all micro-batches and ranks.

    >>> Sum(torch.tensor([3.0, 5.0])).value            # how many tokens each expert got, say
    tensor([3., 5.])

    Args:
        value: a tensor of any shape, or a number, that adds up over micro-batches.
    """

    def __init__(self, value: Tensor | float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Sum({self.value!r})"


class Encoded:
    """What a loss of the whole batch needs of each sample: `loss_fn` returns it where `MacroStep` has ``joint=``.

    >>> encoded = Encoded(image=torch.randn(4, 8), text={"first": torch.randn(4, 8), "length": torch.arange(4)})
    >>> encoded.image.shape, encoded.text["length"]
    (torch.Size([4, 8]), tensor([0, 1, 2, 3]))

    Args:
        loss: an ordinary loss of the micro-batch, to be added: a mean over its items, or their sum (``reduction``).
        items: what that loss is a mean over; None: the samples.
        fields: tensors with one row a sample, in dicts, lists, tuples or dataclasses, or alone; and `Sum`. ``joint``
            finds them under the same names, with the rows of the whole batch.
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
    """All fields, by their names."""
    return {name: vars(encoded)[name] for name in encoded._names}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What became of one window. Tensors stay on the device until you ask for their values.

    Attributes:
        step: how many optimizer steps were taken so far, this one included; a tensor where the host does not know.
        micro_batches: how many of them the window held, on this rank.
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
