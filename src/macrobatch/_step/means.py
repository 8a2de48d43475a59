"""A window that accumulates means: the denominators of its losses are known before its first backward.

At its close only two divisors remain: the scale of a scaler, and the number of ranks over which a backend averages.
Windows of several terms, and windows with a loss of the whole batch, are such windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from macrobatch._step.totals import UNSCALED, Window, wide


class MeanWindow(Window):
    """The totals of one window whose denominators are known before its first backward."""

    def _begin_on(self, device: torch.device) -> None:
        """Set the device of the window, and take the scaler's scale, once the denominators are known."""
        self._device = device
        if self._multiplier is None:
            one = torch.ones((), device=device, dtype=torch.float32)
            self._multiplier = UNSCALED if self._scaler is None else self._scaler.scale(one)

    @property
    def knows_multiplier(self) -> bool:
        return True

    def divisor(self) -> float | Tensor:
        multiplier = self.multiplier
        if isinstance(multiplier, Tensor):
            multiplier = multiplier.to(wide(self.device))
        return multiplier / self.average

    def typical_items(self) -> float | Tensor:
        raise AssertionError("means are accumulated, so nothing is shrunk")

    def unlike_ranks(self) -> Tensor | None:
        return None  # ranks have agreed on the denominators before
