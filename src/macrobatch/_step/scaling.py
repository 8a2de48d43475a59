"""What losses are multiplied with: the seeds of backwards, and a power of two where sums pass through float16."""

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
    """A window, as far as it counts items."""

    typical: float | Tensor | None

    def typical_items(self) -> float | Tensor:
        """The mean number of items of a micro-batch."""


class TypicalItems:
    """How many items a micro-batch has, by the last window: what sums are shrunk by where they pass through float16.

    All ranks must shrink alike, so they agree on the first number; later ones are those of all ranks.

    Attributes:
        items: None until the first window.
        shrinks: whether gradients are float16 somewhere on their way.
    """

    def __init__(self, scaler: GradScaler | None, group: Group, *, shrinks: bool) -> None:
        self.items: float | Tensor | None = None
        self.shrinks = shrinks
        self._is_used = scaler is not None or shrinks
        self._group = group

    def agree(self, items: Items, device: torch.device, window: Countable | None) -> None:
        """Once, before the first backward: all ranks call this together."""
        if not self._is_used or self._group is None or self.items is not None:
            return
        self.items = all_reduce_max(1.0 if items is None else items, self._group, device)
        if window is not None:
            window.typical = self.items

    def update(self, window: Countable) -> None:
        """A window closes."""
        if self._is_used:
            self.items = window.typical_items()


class Seeds:
    """What backwards start with: copies of the last number, which take a third of the time of making it anew."""

    def __init__(self) -> None:
        self._last: tuple[float, Tensor] | None = None

    def of(self, weight: float, loss: Tensor) -> Tensor:
        """That number, as a tensor like `loss`, in memory of its own."""
        if self._last is not None and self._last[0] == weight:
            seed = self._last[1]
            if seed.dtype is loss.dtype and seed.device == loss.device and seed.shape == loss.shape:
                return seed.clone()
        seed = torch.full_like(loss, weight)
        self._last = weight, seed
        return seed.clone()


FEWEST_ITEMS = 1e-30  # but for none: fractions may be weights, but one over much less is infinite in float32
_ON_HOST: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
    torch.int32: ctypes.c_int32,
}


def number_on_host(tensor: Tensor) -> Any:
    """The value of a tensor of one element that has arrived in the host's memory: nobody is waited for; or None."""
    if type(tensor) is not Tensor or not tensor.is_cpu or (kind := _ON_HOST.get(tensor.dtype)) is None:
        return None
    if tensor.is_neg() or is_on_its_way(tensor):  # of the first, what lies in memory has the other sign
        return None
    with unobserved():  # this is no read of a device, and none that a mode would take for one, as item() is
        address = tensor.data_ptr()
    return kind.from_address(address).value if address else None


def is_on_its_way(tensor: Tensor) -> bool:
    """Whether a device may still be writing it, as after ``to("cpu", non_blocking=True)``: that memory is pinned."""
    if type(tensor) is not Tensor or not tensor.is_cpu:
        return False
    with unobserved():
        return tensor.is_pinned()


def in_order(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, if it is on its way from there: what follows comes in its turn, and nobody waits.

    Converting it first would be done on the host: torch does so also in one call, ``to(device, dtype)``.
    """
    if not is_on_its_way(tensor):
        return tensor
    with torch.enable_grad():
        return tensor.to(device, non_blocking=True)


def inverse_power_of_two(count: int | float | Tensor) -> float | Tensor:
    """The power of two between 1 / (2 * count) and 1 / count: multiplying with it changes no digit.

    >>> inverse_power_of_two(1000), inverse_power_of_two(torch.tensor(1000))
    (0.0009765625, tensor(0.0010))
    """
    if isinstance(count, Tensor):
        number = count.detach().reshape(()).to(torch.float32).clamp(min=1)
        return torch.frexp(number).mantissa / number  # mantissa * 2**exponent = number, so this is exact
    return 2.0 ** -math.frexp(ctypes.c_float(max(count, 1)).value)[1]  # rounded as above
