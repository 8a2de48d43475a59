"""Close a window for programs that clip gradients and step the optimizer themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from macrobatch._step.closing import Closing, learning_rates, result_of
from macrobatch._step.gradients import Gradients
from macrobatch._step.optimizers import StepGuard
from macrobatch._step.totals import Window
from macrobatch._step.verdict import Verdict, verdict_on
from macrobatch.types import StepResult


class LeaveMean(Closing):
    """Makes ``.grad`` the mean over the window's items, and leaves it there; with a scaler, still scaled.

    The program clips the gradients, takes the step and clears them. A step inside an open window is an error.

    Args:
        optimizers: the optimizers that the program steps.
        scaler: the GradScaler. The gradients keep its scale, and the program unscales them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None = None) -> None:
        self.taken = 0
        self.leaves_gradients = True
        self._optimizers = optimizers
        self._scaler = scaler
        self._guards: list[StepGuard] = []
        self._verdict: Verdict | None = None  # on the last window, until the host has read it
        self._is_empty = False

    def guard_steps(
        self,
        window_is_open: Callable[[], bool],
        holds_cleared: Callable[[Optimizer], bool],  # noqa: ARG002 (others are the program's own business)
    ) -> None:
        self._guards = [StepGuard(optimizer, window_is_open) for optimizer in self._optimizers]

    def begin_window(self) -> None:
        pass

    def check_loss(self, loss: Tensor) -> None:
        pass

    def check_untouched(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self, window: Window, gradients: Gradients, *, shared: bool) -> StepResult:  # noqa: ARG002
        self._is_empty, self._verdict = window.is_empty, None
        skipped: bool | Tensor = window.is_empty
        if not skipped:
            gradients.gather()
            divisor = window.divisor()
            if isinstance(divisor, Tensor):
                skipped = divisor == 0
                divisor = divisor.masked_fill(skipped, 1)  # without items there is nothing to divide
            if self._scaler is not None:
                divisor = divisor / self._scaler.scale(torch.ones((), device=window.device, dtype=torch.float32))
            gradients.divide(divisor)
            self._verdict = verdict_on(window, writes=gradients.were_written())
        self.taken += 1
        return result_of(window, step=self.taken, lr=learning_rates(self._optimizers), skipped=skipped)

    def is_void(self) -> bool:
        """Whether the last window had no items, so that there must be no step. An error if the window was invalid.

        The host waits for the device if only the device knows.
        """
        if self._verdict is None:
            return self._is_empty
        reasons, self._is_empty = self._verdict.read(), False
        if (error := self._verdict.error(reasons)) is not None:
            raise error
        self._is_empty, self._verdict = bool(reasons), None
        return self._is_empty
