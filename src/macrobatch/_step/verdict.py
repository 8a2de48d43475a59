"""Whether a closing window may take its step. The device computes the answer; the host reads it only if necessary."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from macrobatch._step.gradients import UNDIVIDED
from macrobatch._step.scaling import FEWEST_ITEMS
from macrobatch._step.totals import Window
from macrobatch.errors import BatchError, MacrobatchError, NonFiniteError, UsageError

# The reasons not to take a step, as bits of one number.
NONFINITE, NO_ITEMS, BAD_ITEMS, TOUCHED, MISCOUNTED = 1, 2, 4, 8, 16


class Verdict:
    """Whether a window's step may be taken: one number on the device. 0 means yes.

    The number is the sum of the reasons against the step. It is float32, as fused optimizers and scalers require.
    """

    def __init__(self, window: Window, reasons: dict[int, Tensor]) -> None:
        self.window = window.number
        self._miscounting = window if MISCOUNTED in reasons else None  # this window can tell what differs
        self._simple = list(reasons) == [NONFINITE]
        numbers = [holds.float() if bit == 1 else holds.float() * bit for bit, holds in reasons.items()]
        self._number = self._host = numbers[0] if self._simple else torch.stack(numbers).sum()
        self._arrival: torch.cuda.Event | None = None
        self.needs_host = TOUCHED in reasons  # whether the host must read it: a skipped step would hide the error
        self.may_be_miscounted = MISCOUNTED in reasons

    @property
    def found_inf(self) -> Tensor:
        """The value for fused optimizers: exactly 0.0 or 1.0."""
        return self._number if self._simple else (self._number != 0).float()

    @property
    def overflow(self) -> Tensor:
        """The value for scalers. A window without items is no overflow, whatever it computed."""
        return self._number if self._simple else (self._number == NONFINITE).float()

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

    def read(self) -> int:
        """The reasons. The host waits for them if they have not arrived yet."""
        if self._arrival is None:
            self.send()
        if self._arrival is not None:
            self._arrival.synchronize()
        # The number is in host memory now. `item()` would look like a read of the device to modes that watch for reads.
        host = self._host.cpu()
        return int(ctypes.c_float.from_address(host.data_ptr()).value)

    def error(self, reasons: int) -> MacrobatchError | None:
        """The error to raise for these reasons; None if there is none."""
        if reasons & TOUCHED:
            return UsageError(
                f"somebody else changed the gradients of the open window {self.window}, so its step was not taken. "
                f"{UNDIVIDED}"
            )
        if reasons & BAD_ITEMS:
            return BatchError(
                f"items passed in window {self.window} were negative or not finite; its step was not taken. "
                "They are what the loss is a mean over: count them, e.g. items=(labels != -100).sum(). Less than "
                f"{FEWEST_ITEMS:g} in all, or more than {1 / FEWEST_ITEMS:g}, is no count either."
            )
        if reasons & MISCOUNTED and self._miscounting is not None:
            return BatchError(self._miscounting.miscount())
        if reasons == NONFINITE:
            return NonFiniteError(
                f"window {self.window} has an infinite or NaN gradient. Look at its batches and its loss (a mean over "
                'no items is 0 / 0: pass sums with reduction="sum", or items as ints), lower the learning rate, '
                'or set max_norm; nonfinite="skip" drops such windows, nonfinite="keep" does not look.'
            )
        return None


def verdict_on_ranks(window: Window) -> Verdict | None:
    """Whether some ranks pass items and others do not; None in one process."""
    unlike = window.unlike_ranks()
    return None if unlike is None else Verdict(window, {MISCOUNTED: unlike})


def verdict_on(window: Window, *, nonfinite: Tensor | None = None, writes: Tensor | None = None) -> Verdict | None:
    """The verdict on a closing window; None if the host knows that its step may be taken.

    Args:
        window: the window. Its items may be known only to the device.
        nonfinite: whether a gradient is infinite or NaN; None if that does not matter.
        writes: whether somebody else wrote to a gradient; None if the host has checked that.
    """
    reasons = {}
    if writes is not None:
        reasons[TOUCHED] = writes.to(window.device, non_blocking=True)
    if nonfinite is not None:
        reasons[NONFINITE] = nonfinite
    if not window.has_items:
        reasons[NO_ITEMS] = window.lacks_items()
    if (bad_items := window.bad_items()) is not None:
        reasons[BAD_ITEMS] = bad_items
    if (miscounted := window.miscounted()) is not None:
        reasons[MISCOUNTED] = miscounted.any()
    return Verdict(window, reasons) if reasons else None
