"""The usual micro-batch: its loss is the same kind of mean as an earlier one, and weighed in the same proportion."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from macrobatch._loss.proportions import Kind, Pair
from macrobatch._loss.sizes import FirstSizes
from macrobatch._torch.loss_nodes import name_of, sizes_of_plain_mean
from macrobatch._torch.tensors import number_on_host


class Steady:
    """How a micro-batch was weighed whose loss is one mean right above the model.

    Most others are weighed alike. `items_of` tells that from all that the general way would read of them, and compares
    what that would compare.

    Attributes:
        pair: the numbers whose proportion a window keeps, if all its micro-batches are weighed so.
        is_given: whether the program gives the items. Otherwise they are read.
    """

    __slots__ = ("_count", "_items", "_kind", "_node", "is_given", "pair")

    def __init__(self, loss: Tensor, pair: Pair, count: int, items: int) -> None:
        self._node, self._kind = name_of(loss.grad_fn), type(loss.grad_fn)
        self._count, self._items = count, items
        self.is_given = pair[0] is Kind.ITEMS
        self.pair = pair

    @classmethod
    def of(cls, loss: Tensor, pairs: tuple[Pair, ...], items: Any) -> Steady | None:
        """Of a loss that is such a mean; None if it is not, or if only the device knows its items."""
        if type(loss) is not Tensor or type(items) is not int or len(pairs) != 1:
            return None
        sizes = sizes_of_plain_mean(loss.grad_fn)
        is_choice = items == 1 and pairs[0][0] is Kind.ITEMS  # equal weights, in no proportion to anything
        return None if sizes is None or is_choice else cls(loss, pairs[0], math.prod(sizes), items)

    def items_of(self, loss: Any, items: Any, sizes: FirstSizes, batch: object, *, are_samples: bool) -> int | None:
        """The items of a micro-batch that is weighed alike; None if it may not be.

        `sizes`: those of the first micro-batch of the window. `are_samples`: the items are samples, not given.
        """
        if type(loss) is not Tensor or type(root := loss.grad_fn) is not self._kind:
            return None
        if torch.is_inference_mode_enabled() or (shape := sizes_of_plain_mean(root)) is None:
            return None
        count = math.prod(shape)
        if items is None or are_samples:
            if self.is_given:
                return None
            sizes.compare(self._node, count, shape, batch, items)
            return count
        if type(items) is Tensor and items.numel() == 1:
            items = number_on_host(items)
        is_kept = type(items) is int and items > 0 and items * self._count == count * self._items
        return items if is_kept and self.is_given else None
