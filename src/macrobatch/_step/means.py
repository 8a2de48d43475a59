"""A window that accumulates means: what its losses are divided by is known before its first backward.

Nothing but the scale of a scaler, and what a backend averages over, is then left to be divided by at its close. Windows
of several terms, and windows with a loss of the whole batch, are such windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from macrobatch._step.totals import UNSCALED, Window, wide


class MeanWindow(Window):
    """The totals of one window whose denominators come first."""

    def _begin_on(self, device: torch.device) -> None:
        """The denominators are known: the window is on this device, and takes the scaler's scale."""
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
        return None  # what each term is divided by is agreed on before
