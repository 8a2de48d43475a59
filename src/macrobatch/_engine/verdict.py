"""Whether a closing window may take its step. The device computes the answer; the host reads it only if necessary."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from macrobatch._border.reasons import invalid_items, nonfinite_gradient
from macrobatch._engine.window import Window
from macrobatch.errors import MacrobatchError

NONFINITE, NO_ITEMS = "nonfinite", "no items"


class Flag(NamedTuple):
    """A reason against a step."""

    holds: Tensor
    error: Callable[[], MacrobatchError] | None = None
    blocks: bool = False
    is_known: bool = False


Flags = dict[str, Flag]


class Verdict:
    """Whether a window's step may be taken: one number on the device, the sum of the reasons against it as bits.

    The number is float32, as fused optimizers and scalers require.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._arrival: torch.cuda.Event | None = None
        self._simple = len(flags) == 1 and NONFINITE in flags
        self.blocks = self.has_mistakes = False
        self.needs_host = NO_ITEMS in flags
        if self._simple:
            self._number = self._host = flags[NONFINITE].holds.float()
            return
        self.blocks = any(flag.blocks for flag in flags.values())
        self.needs_host |= any(flag.is_known for flag in flags.values())
        self.has_mistakes = any(flag.error is not None and name != NONFINITE for name, flag in flags.items())
        device = next(iter(flags.values())).holds.device
        numbers = [flag.holds.to(device, torch.float32, non_blocking=True) for flag in flags.values()]
        self._number = self._host = _as_bits(numbers)

    @property
    def found_inf(self) -> Tensor:
        """The value for fused optimizers: exactly 0.0 or 1.0."""
        return self._number if self._simple else (self._number != 0).float()

    @property
    def overflow(self) -> Tensor:
        """The value for scalers. A window without items is no overflow, whatever it computed."""
        return self._number if self._simple else (self._number == 1).float()

    @property
    def on_host(self) -> bool:
        """Whether the host can read it without waiting."""
        return self._number.device.type == "cpu"

    def send(self) -> Verdict:
        """Start to copy the number to the host, without waiting."""
        if self._number.device.type == "cuda":
            self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
            self._host.copy_(self._number, non_blocking=True)
            self._arrival = torch.cuda.current_stream(self._number.device).record_event()
        return self

    def read(self) -> list[str]:
        """The names of the reasons that hold. The host waits for them if they have not arrived yet."""
        if self._arrival is None:
            self.send()
        if self._arrival is not None:
            self._arrival.synchronize()
        # The number is in host memory now. `item()` would look like a read of the device to modes that watch for reads.
        host = self._host.cpu()
        bits = int(ctypes.c_float.from_address(host.data_ptr()).value)
        if not bits:
            return []
        return [name for index, name in enumerate(self._flags) if bits >> index & 1]

    def error(self, reasons: list[str]) -> MacrobatchError | None:
        """The error to raise for these reasons; None if there is none. An infinite gradient counts only if alone."""
        if not reasons:
            return None
        errors = [self._flags[name].error for name in reasons if name != NONFINITE or reasons == [NONFINITE]]
        return next((make() for make in errors if make is not None), None)


def _as_bits(numbers: list[Tensor]) -> Tensor:
    return torch.stack([(number != 0).float() * 2**index for index, number in enumerate(numbers)]).sum()


def verdict_on(window: Window, flags: Flags, nonfinite: Tensor | None = None) -> Verdict | None:
    """The verdict on a closing window; None if the host knows that its step may be taken."""
    reasons: Flags = {}
    if nonfinite is not None:
        reasons[NONFINITE] = Flag(nonfinite, lambda: nonfinite_gradient(window.number))
    if (bad_items := window.bad_items()) is not None:
        reasons["bad items"] = Flag(bad_items, lambda: invalid_items(window.number))
    reasons |= flags
    if not window.has_items:
        reasons[NO_ITEMS] = Flag(window.lacks_items())
    return Verdict(reasons) if reasons else None
