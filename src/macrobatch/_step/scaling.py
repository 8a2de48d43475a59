"""The factors of losses: the seeds of backwards, and a power of two that keeps sums within the range of float16."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from macrobatch._ranks.collectives import Group, all_reduce_max
from macrobatch._torch.tensors import unobserved
from macrobatch.types import Items


class Countable(Protocol):
    """The part of a window that counts items."""

    typical: float | Tensor | None

    def typical_items(self) -> float | Tensor:
        """The mean number of items of a micro-batch."""


class TypicalItems:
    """The typical number of items per micro-batch, from the last window. Sums in float16 are divided by about it.

    All ranks must use the same number. They agree on the first one; later ones come from the totals of all ranks.

    Attributes:
        items: the number; None before the first window.
        shrinks: whether gradients are float16 at some point.
    """

    def __init__(self, scaler: GradScaler | None, group: Group, *, shrinks: bool) -> None:
        self.items: float | Tensor | None = None
        self.shrinks = shrinks
        self._is_used = scaler is not None or shrinks
        self._group = group

    def agree(self, items: Items, device: torch.device, window: Countable | None) -> None:
        """Agree on the first number, once before the first backward. All ranks call this together."""
        if not self._is_used or self._group is None or self.items is not None:
            return
        self.items = all_reduce_max(1.0 if items is None else items, self._group, device)
        if window is not None:
            window.typical = self.items

    def update(self, window: Countable) -> None:
        """Take the number of a window that closes."""
        if self._is_used:
            self.items = window.typical_items()


class Seeds:
    """The seeds of backwards. Copying the last seed takes a third of the time of making a new one."""

    def __init__(self) -> None:
        self._last: tuple[float, Tensor] | None = None

    def of(self, weight: float, loss: Tensor) -> Tensor:
        """A new tensor like `loss` that holds `weight`."""
        if self._last is not None and self._last[0] == weight:
            seed = self._last[1]
            if seed.dtype is loss.dtype and seed.device == loss.device and seed.shape == loss.shape:
                return seed.clone()
        seed = torch.full_like(loss, weight)
        self._last = weight, seed
        return seed.clone()


FEWEST_ITEMS = 1e-30  # the smallest valid number of items besides 0: 1 / a much smaller one is infinite in float32
_ON_HOST: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
    torch.int32: ctypes.c_int32,
}


def number_on_host(tensor: Tensor) -> Any:
    """The value of a one-element tensor that is already in the host's memory, without any wait; None otherwise."""
    if type(tensor) is not Tensor or not tensor.is_cpu or (kind := _ON_HOST.get(tensor.dtype)) is None:
        return None
    if tensor.is_neg() or is_on_its_way(tensor):  # the memory of a negated view holds the opposite sign
        return None
    with unobserved():  # this reads no device; item() would look like it to a mode that watches reads
        address = tensor.data_ptr()
    return kind.from_address(address).value if address else None


def is_on_its_way(tensor: Tensor) -> bool:
    """Whether a device may still write to a tensor, as after ``to("cpu", non_blocking=True)``: it is pinned then."""
    if type(tensor) is not Tensor or not tensor.is_cpu:
        return False
    with unobserved():
        return tensor.is_pinned()


def in_order(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, moved back to the device if it may still be on its way to the host. So nobody has to wait for it.

    This must not convert the dtype: torch would convert on the host first, even in one call ``to(device, dtype)``.
    """
    if not is_on_its_way(tensor):
        return tensor
    with torch.enable_grad():
        return tensor.to(device, non_blocking=True)


def inverse_power_of_two(count: int | float | Tensor) -> float | Tensor:
    """The power of two between 1 / (2 * count) and 1 / count. Multiplying by it changes no digit.

    >>> inverse_power_of_two(1000), inverse_power_of_two(torch.tensor(1000))
    (0.0009765625, tensor(0.0010))
    """
    if isinstance(count, Tensor):
        number = count.detach().reshape(()).to(torch.float32).clamp(min=1)
        return torch.frexp(number).mantissa / number  # mantissa * 2**exponent = number, so this is exact
    return 2.0 ** -math.frexp(ctypes.c_float(max(count, 1)).value)[1]  # rounded as above
