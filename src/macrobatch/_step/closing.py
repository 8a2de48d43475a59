"""Close a window: divide, clip and check the gradients; step the optimizer, the scaler and the schedulers.

The division by the window's items, the clipping and the unscaling are combined into one divisor, which is computed on
the device. A fused optimizer takes the divisor as its ``grad_scale``, and a flag as its ``found_inf``. So the gradients
need no extra pass, and the host does not wait. For all other optimizers, one pass divides the gradients in place.

The host reads one number per window (`Verdict`), only if it has to know it (`TakeStep._needs_host`), and only after a
fused step is queued. On a CPU there is nothing to wait for, so errors come at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._step.gradients import Gradients
from macrobatch._step.optimizers import (
    OtherStepsGuard,
    StepGuard,
    has_hooks,
    skips_on_device,
    step_fused,
)
from macrobatch._step.schedulers import Schedulers
from macrobatch._step.totals import Window, wide
from macrobatch._step.verdict import NONFINITE, Verdict, verdict_on
from macrobatch._torch.autograd import factor_of
from macrobatch._torch.optimizers import forget_unscaling, has_unscaled, note_overflow, scale_of
from macrobatch._torch.tensors import unobserved
from macrobatch.errors import NonFiniteError, UsageError
from macrobatch.types import NonFinite, StepResult


class Closing(Protocol):
    """What to do with the gradients of a complete window, and the checks that nobody changes them before.

    Attributes:
        taken: the number of optimizer steps taken. If the program steps itself, the number of windows closed.
        leaves_gradients: whether the gradients stay in ``.grad`` after the window is closed.
    """

    taken: int
    leaves_gradients: bool

    def guard_steps(self, window_is_open: Callable[[], bool], holds_cleared: Callable[[Optimizer], bool]) -> None:
        """From now on, raise an error if other code steps an optimizer inside a window. Keeps the methods weakly."""

    def begin_window(self) -> None:
        """Begin a window. What was done before does not belong to it."""

    def check_loss(self, loss: Tensor) -> None:
        """Raise an error if this loss cannot be used for a backward."""

    def check_untouched(self) -> None:
        """Raise an error if other code has unscaled the gradients or stepped with them."""

    def close(self, window: Window, gradients: Gradients, *, shared: bool) -> StepResult:
        """Close the window, and return its result. `shared`: whether optimizers hold a parameter twice."""

    def settle(self) -> None:
        """Raise the error that the last window turned out to have."""


class TakeStep(Closing):
    """Closes a window with an optimizer step: divides, clips and checks the gradients, and steps the optimizers.

    Args:
        counts_on_host: whether the host must know after each window how many steps were taken.
        The others are those of `Accumulator`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        *,
        scaler: GradScaler | None,
        max_norm: float | None,
        nonfinite: NonFinite,
        counts_on_host: bool,
    ) -> None:
        self.leaves_gradients = False
        self._optimizers = optimizers
        self._guards: list[StepGuard | OtherStepsGuard] = []
        self._schedulers = Schedulers(schedulers)
        self._scaler = scaler
        self._max_norm = max_norm
        self._nonfinite = "skip" if scaler is not None else nonfinite  # an overflow is skipped, whatever was asked
        self._counts_on_host = counts_on_host or bool(schedulers)
        self._pending: Verdict | None = None  # of the last window under "raise": being copied to the host
        self._taken = 0
        self._unread: Tensor | None = None  # how many of `_taken` the device skipped after all

    def guard_steps(self, window_is_open: Callable[[], bool], holds_cleared: Callable[[Optimizer], bool]) -> None:
        own = [StepGuard(optimizer, window_is_open) for optimizer in self._optimizers]
        self._guards = [*own, OtherStepsGuard(self._optimizers, window_is_open, holds_cleared)]

    @property
    def taken(self) -> int:
        """The number of optimizer steps taken. The host waits for the device if only the device knows it."""
        if self._unread is not None:
            self._taken, self._unread = self._taken - int(self._unread.item()), None
        return self._taken

    @taken.setter
    def taken(self, number: int) -> None:
        self._taken, self._unread = number, None

    def begin_window(self) -> None:
        """Begin a window. What the scaler unscaled before does not belong to it."""
        if self._scaler is not None:
            for optimizer in self._optimizers:
                forget_unscaling(self._scaler, optimizer)

    def check_untouched(self) -> None:
        """Raise an error if other code has unscaled inside the window. Only the scaler shows it, not the gradients."""
        if self._scaler is None:
            return
        for optimizer in self._optimizers:
            if has_unscaled(self._scaler, optimizer):
                raise UsageError(
                    "scaler.unscale_() or scaler.step() was called inside the open window. Until step() the gradients "
                    "are undivided, scaled sums, and step() unscales them itself, once: leave the call out, and call "
                    "discard() to drop what was accumulated."
                )

    def check_loss(self, loss: Tensor) -> None:
        """Raise an error if ``scaler.scale()`` has already multiplied the loss: it would be scaled twice."""
        if self._scaler is None or (scale := scale_of(self._scaler)) is None or (factor := factor_of(loss)) is None:
            return
        with unobserved():  # an address is no number that the device has computed
            is_scaled = factor.data_ptr() == scale.data_ptr()
        if is_scaled:
            raise UsageError(
                "the loss was multiplied by scaler.scale() already; backward() does that itself. Pass the loss."
            )

    def settle(self) -> None:
        """Raise the error that the last window turned out to have."""
        pending, self._pending = self._pending, None
        self._raise_for(pending)

    def _raise_for(self, pending: Verdict | None) -> None:
        if pending is None or (error := pending.error(pending.read())) is None:
            return
        if isinstance(error, NonFiniteError) and self._nonfinite != "raise":
            return
        if self._fused and self._scaler is None:  # under a scaler, skipped steps are counted on the device
            self._taken -= 1  # the device knew, and did not take it
        raise error

    # ------------------------------------------------------------------------------------------ the main path

    def close(self, window: Window, gradients: Gradients, *, shared: bool) -> StepResult:
        """Take the step of `window`; then raise the error of the one before, if it turned out to have one.

        `shared`: whether optimizers hold a parameter twice, which a fused one would divide twice.
        """
        earlier, self._pending = self._pending, None
        for guard in self._guards:
            guard.is_open = True
        try:
            result = self._close(window, gradients, shared=shared)
        finally:
            for guard in self._guards:
                guard.is_open = False
        self._raise_for(earlier)
        return result

    def _close(self, window: Window, gradients: Gradients, *, shared: bool) -> StepResult:
        """Divide, clip, check and step. All of it is queued on the device; the host reads only what it must know."""
        if window.is_empty:
            return self._result(window, None, skipped=True)
        gradients.gather()
        fused = self._fused
        folds = fused and gradients.foldable and not (shared or any(map(has_hooks, self._optimizers)))
        divisor, grad_norm, nonfinite = self._divide(window, gradients, folds=folds)
        grad_scale = _tensor(divisor, window.device) if folds else None
        verdict = verdict_on(window, nonfinite=nonfinite, writes=gradients.were_written())

        if verdict is None:
            self._queue(grad_scale, None)
            return self._result(window, grad_norm, skipped=False)
        if not self._needs_host(window, verdict, fused=fused):
            self._queue(grad_scale, verdict.found_inf if fused else None)
            return self._result(window, grad_norm, skipped=self._defer_verdict(verdict))
        if fused:
            self._queue(grad_scale, verdict.found_inf)
        reasons = verdict.read()
        if self._scaler is not None and reasons in (0, NONFINITE):
            self._update_scale(self._scaler, verdict)
        error = verdict.error(reasons)
        if error is not None and (self._nonfinite == "raise" or not isinstance(error, NonFiniteError)):
            raise error
        if not fused and not reasons:
            self._queue(None, None)
        return self._result(window, grad_norm, skipped=bool(reasons))

    def _divide(
        self, window: Window, gradients: Gradients, *, folds: bool
    ) -> tuple[float | Tensor, Tensor | None, Tensor | None]:
        """The divisor that clips too, the norm before clipping, and whether a gradient is not finite.

        On return the gradients are already divided, unless the optimizer divides in its own kernel (`folds`).
        """
        divisor, guards = window.divisor(), self._nonfinite != "keep"
        if self._max_norm is not None:
            norm = gradients.norm(2.0, window.device)
            grad_norm = norm / divisor
            # The very formula of torch.nn.utils.clip_grad_norm_, so that clipped runs agree with it to the last digits.
            divisor = divisor / (self._max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
            if not folds:
                gradients.divide(divisor)
            return divisor, grad_norm, ~torch.isfinite(norm) if guards else None
        if guards and not folds and (found := gradients.divide_and_check(divisor, window.device)) is not None:
            return divisor, None, found
        nonfinite = ~torch.isfinite(gradients.norm(math.inf, window.device)) if guards else None
        if not folds:
            gradients.divide(divisor)
        return divisor, None, nonfinite

    # ------------------------------------------------------------------------------------------ steps, and who knows

    @property
    def _fused(self) -> bool:
        """Whether all optimizers are fused, so that the device can skip the step without the host."""
        return all(skips_on_device(optimizer) for optimizer in self._optimizers)

    def _needs_host(self, window: Window, verdict: Verdict, *, fused: bool) -> bool:
        """Whether the host must read the verdict before it continues."""
        if not window.has_items or window.knows_miscount:
            return True
        if verdict.may_be_miscounted and (not fused or verdict.on_host):  # no such step may be taken
            return True
        if self._scaler is not None:
            return not fused or self._counts_on_host or verdict.needs_host
        return self._nonfinite == "skip" or verdict.on_host

    def _defer_verdict(self, verdict: Verdict) -> bool | Tensor:
        """Send the verdict to the host without waiting. Returns the value of `skipped` for the result."""
        if self._scaler is None or verdict.may_be_miscounted:
            self._pending = verdict.send()
        if self._scaler is None:
            return False
        self._update_scale(self._scaler, verdict)
        skipped = verdict.found_inf
        self._unread = skipped.long() if self._unread is None else self._unread + skipped.long()
        return skipped.bool()

    def _queue(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        for optimizer in self._optimizers:
            if grad_scale is None and found_inf is None:
                optimizer.step()
            else:
                step_fused(optimizer, grad_scale, found_inf)

    def _update_scale(self, scaler: GradScaler, verdict: Verdict) -> None:
        note_overflow(scaler, self._optimizers[0], verdict.overflow)  # our own pass has looked at the gradients already
        scaler.update()

    def _result(self, window: Window, grad_norm: Tensor | None, *, skipped: bool | Tensor) -> StepResult:
        lr = learning_rates(self._optimizers)  # before the schedulers step
        if skipped is not True:
            self._taken += 1
            self._schedulers.step()
        if grad_norm is None and self._max_norm is not None:
            grad_norm = torch.full((), math.nan, device=window.device, dtype=wide(window.device))  # no items, no mean
        step = self._taken if self._unread is None else self._taken - self._unread
        return result_of(window, step=step, lr=lr, skipped=skipped, grad_norm=grad_norm)


def result_of(
    window: Window,
    *,
    step: int | Tensor,
    lr: tuple[float | Tensor, ...],
    skipped: bool | Tensor,
    grad_norm: Tensor | None = None,
) -> StepResult:
    """The result of a window, with its totals."""
    return StepResult(
        step=step,
        micro_batches=window.micro_batches,
        loss=window.loss(),
        items=window.items(),
        grad_norm=grad_norm,
        lr=lr,
        skipped=skipped,
        losses=window.losses(),
    )


def learning_rates(optimizers: Sequence[Optimizer]) -> tuple[float | Tensor, ...]:
    """The learning rates of all parameter groups. Tensors are copied: schedulers change them. NaN if there is none."""
    rates = (group.get("lr", math.nan) for optimizer in optimizers for group in optimizer.param_groups)
    return tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)


def _tensor(number: float | Tensor, device: torch.device) -> Tensor:
    """The number as a float32 tensor on the device, for ``grad_scale`` of a fused optimizer."""
    return number.float() if isinstance(number, Tensor) else torch.full((), number, device=device, dtype=torch.float32)
