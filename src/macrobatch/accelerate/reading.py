"""What a loss of a program for Accelerate says that it is a mean over."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from macrobatch._loss.anatomy import anatomy_of, plain_mean
from macrobatch._loss.proportions import Number, Pair
from macrobatch._loss.weighing import weigh


class Reading(NamedTuple):
    """The items of a mean, or the reason why they are not known."""

    items: Number | None = None
    pairs: tuple[Pair, ...] = ()  # numbers that must keep their proportion over a window
    reason: str = ""
    # Whether the program has divided a sum over labels itself, as Accelerate's recipe for tokens does. Then nothing may
    # weigh it, and nothing is wrong with it.
    is_scaled: bool = False

    @property
    def is_on_device(self) -> bool:
        """Whether only the device may know some of the numbers."""
        numbers = (self.items, *(number for _, *pair in self.pairs for number in pair))
        return any(isinstance(number, Tensor) for number in numbers)


def read(loss: Tensor) -> Reading:
    """Read what a loss is a mean over. It waits for no device.

    >>> import torch
    >>> x = torch.ones(3, 5, requires_grad=True)
    >>> read(0.5 * x.mean()).items
    15
    >>> read(x.sum() / 3).reason
    'what the loss is a mean over cannot be read from its graph (because of DivBackward0)'
    """
    if plain_mean(loss) is None:
        anatomy = anatomy_of(loss)
        parts = [part for part in anatomy.parts if not part.leaf_only]  # a regulariser is the same in each micro-batch
        if anatomy.quotient is not None:
            return Reading(is_scaled=True)
        if not parts:
            node = anatomy.unknown or anatomy.parts[0].node
            return Reading(reason=f"what the loss is a mean over cannot be read from its graph (because of {node})")
        for part in parts:
            is_one = len(parts) == 1 and type(part.count) is int  # the sum of one number is its mean
            if part.kind == "sum" and not is_one:
                return Reading(reason=f"the loss is a sum, or contains one ({part.node})")
        for part in anatomy.parts:
            if isinstance(part.factor, Tensor):
                return Reading(reason=f"the loss has a constant factor that only the device knows (at {part.node})")
    weight = weigh(loss, None, is_mean=True, steps=None, on_host=True)
    return Reading(weight.items, weight.pairs)
