"""One window: how many micro-batches it holds, and the totals of their losses and items. Knows no backend.

The gradient wanted is ``sum of grad S / sum of n`` over the micro-batches, where S is the summed loss of one and n its
number of items. So a window weighs each loss into its sum (`weigh`), adds up losses and items where they are (`add`),
and divides nothing: that happens once, when it closes. Items given as ints are added on the host, items given as
tensors on their device; nothing that lives on a device is read here.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from macrobatch.errors import BatchError

Reduction = Literal["mean", "sum"]
Items = int | float | Tensor | None


def wide(device: torch.device) -> torch.dtype:
    """The dtype for totals: float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


class Window:
    """The totals of one window, from its first micro-batch to its close.

    >>> window = Window(number=1, length=2, reduction="mean")
    >>> window.weigh(torch.tensor(2.0), items=3)   # the seed of backward: a mean over 3 items becomes their sum
    tensor(3.)
    >>> window.add(torch.tensor(2.0), items=3)
    >>> window.add(torch.tensor(6.0), items=torch.tensor(1))
    >>> window.items(), window.loss()              # 4 items; (3 * 2.0 + 1 * 6.0) / 4
    (tensor(4), tensor(3., dtype=torch.float64))

    Args:
        number: which window of its accumulator this is, counted from 1; errors name it.
        length: how many micro-batches close it.
        reduction: whether losses are means over their items, or sums.
        scaler: whose scale at the first micro-batch multiplies all losses of the window.
    """

    def __init__(self, *, number: int, length: int, reduction: Reduction, scaler: GradScaler | None = None) -> None:
        self.number = number
        self.length = length
        self.micro_batches = 0
        self._reduction = reduction
        self._scaler = scaler
        self._multiplier: float | Tensor | None = None  # chosen at the first micro-batch that has items
        self._counted: bool | None = None  # were items given? decided by the first micro-batch
        self._host_items: int | float = 0
        self._device_items: Tensor | None = None
        self._lowest: Tensor | None = None  # of the items that only the device knows: a negative one is an error
        self._loss: Tensor | None = None  # the sum, as wide as the device allows

    # ------------------------------------------------------------------------------------------ one micro-batch

    def weigh(self, loss: Tensor, items: Items) -> Tensor:
        """The seed of this micro-batch's backward: what its gradient is multiplied with to become that of a sum."""
        self._check_counted(items)
        count = 1 if items is None else items
        if self._multiplier is None and not is_zero(items):
            self._multiplier = self._choose_multiplier(loss, count)
        weight = count * self.multiplier if self._reduction == "mean" else self.multiplier
        if isinstance(weight, Tensor):
            return weight.to(loss.device, loss.dtype, non_blocking=True).reshape(loss.shape)
        return torch.full_like(loss, weight)

    def add(self, loss: Tensor, items: Items) -> None:
        """Count a micro-batch whose backward is done."""
        self._counted = items is not None
        self.micro_batches += 1
        loss = loss.detach().reshape(())
        if self._loss is None:
            self._loss = torch.zeros((), device=loss.device, dtype=wide(loss.device))
        elif self._loss.device != loss.device:
            loss = loss.to(self._loss.device, non_blocking=True)
        if isinstance(items, Tensor):
            self._add_on_device(self._loss, loss, items)
            return
        count = 1 if items is None else items
        self._host_items += count
        if not self.counts_for_nothing(items):
            self._loss.add_(loss, alpha=count if self._reduction == "mean" else 1)

    def counts_for_nothing(self, items: Items) -> bool:
        """Whether the host knows that this is a mean over no items: 0 / 0 in itself, and nothing in the window."""
        return self._reduction == "mean" and is_zero(items)

    def _choose_multiplier(self, loss: Tensor, count: int | float | Tensor) -> float | Tensor:
        """For float16: the scale that the scaler wants, shrunk because sums overflow where means do not."""
        if self._scaler is None and loss.dtype != torch.float16:
            return 1.0
        shrink = inverse_power_of_two(count)
        if self._scaler is None:
            return shrink
        return self._scaler.scale(torch.ones((), device=loss.device)) * shrink

    def _add_on_device(self, total: Tensor, loss: Tensor, items: Tensor) -> None:
        items = items.detach().reshape(()).to(total.device, non_blocking=True)
        if self._reduction == "mean":
            total.addcmul_(loss.masked_fill(items == 0, 0), items)
        else:
            total.add_(loss)
        # A copy: the caller may fill the same buffer anew for the next micro-batch.
        items = items.to(wide(items.device) if items.is_floating_point() else torch.int64, copy=True)
        if self._device_items is None or self._lowest is None:
            self._device_items, self._lowest = items, items
        else:
            self._device_items, self._lowest = self._device_items + items, torch.minimum(self._lowest, items)

    def _check_counted(self, items: Items) -> None:
        if self._counted is not None and self._counted != (items is not None):
            earlier, now = ("given", "None") if self._counted else ("None", "given")
            raise BatchError(
                f"items must be given for every micro-batch of a window, or for none: earlier in window {self.number} "
                f"they were {earlier}, now they are {now}. Without them every micro-batch weighs the same."
            )

    # ------------------------------------------------------------------------------------------ the totals

    @property
    def multiplier(self) -> float | Tensor:
        """What every loss of the window was multiplied with besides its weight: to be undone with the division."""
        return 1.0 if self._multiplier is None else self._multiplier

    @property
    def device(self) -> torch.device:
        assert self._loss is not None, "a window without a micro-batch has no totals"
        return self._loss.device

    @property
    def host_items(self) -> int | float | None:
        """The items of the window, or None where only the device knows them."""
        return self._host_items if self._device_items is None else None

    def items(self) -> Tensor:
        """The items of the window, on the device."""
        dtype = torch.int64 if isinstance(self._host_items, int) else wide(self.device)
        host = torch.full((), self._host_items, dtype=dtype, device=self.device)
        return host if self._device_items is None else host + self._device_items

    def loss(self) -> Tensor:
        """The mean loss over the items of the window, on the device; NaN where there are none."""
        assert self._loss is not None
        return self._loss / self.items()

    def bad_items(self) -> Tensor | None:
        """Whether an item count that only the device knows was negative or not finite."""
        if self._device_items is None or self._lowest is None:
            return None
        return (self._lowest < 0) | ~torch.isfinite(self._device_items)


def is_zero(items: Items) -> bool:
    """Whether the host knows that there are no items."""
    return items is not None and not isinstance(items, Tensor) and items == 0


def inverse_power_of_two(count: int | float | Tensor) -> float | Tensor:
    """The power of two between 1 / (2 * count) and 1 / count: multiplying with it changes no digit.

    >>> inverse_power_of_two(1000), inverse_power_of_two(torch.tensor(1000))
    (0.0009765625, tensor(0.0010))
    """
    if isinstance(count, Tensor):
        number = count.detach().reshape(()).to(torch.float32).clamp(min=1)
        return torch.frexp(number).mantissa / number  # mantissa * 2**exponent = number, so this is exact
    return 2.0 ** -math.frexp(max(count, 1))[1]
