"""Closing a window: one factor, clip, guard, optimizer, scaler, scheduler -> `StepResult`.

The division by the window's items, the clipping and the un-scaling are one divisor, computed on the device. A fused
optimizer takes it as its ``grad_scale``, and a flag as its ``found_inf``, so that nothing passes over the gradients
once more and the host waits for nothing; for every other optimizer there is one writing pass.

The host reads one number a window (`Verdict`), only where it has to know (`TakeStep._needs_host`), and not before
a fused step is queued. On a CPU nothing is ever waited for, so errors come at once there.
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
    """What becomes of the gradients of a complete window; and what nobody may do to them before.

    Attributes:
        taken: how many steps were taken; by a program itself, how many windows were left to it.
        leaves_gradients: whether they stay in ``.grad`` after the close.
    """

    taken: int
    leaves_gradients: bool

    def guard_steps(self, window_is_open: Callable[[], bool], holds_cleared: Callable[[Optimizer], bool]) -> None:
        """From now on, refuse steps that others take with parameters of a window. Bound methods, kept weakly."""

    def begin_window(self) -> None:
        """A window begins: what was done before belongs to no window."""

    def check_loss(self, loss: Tensor) -> None:
        """An error if this loss cannot be handed to a backward."""

    def check_untouched(self) -> None:
        """An error if somebody has begun to close the window in another way."""

    def close(self, window: Window, gradients: Gradients, *, shared: bool) -> StepResult:
        """Close the window. `shared`: whether optimizers hold a parameter twice."""

    def settle(self) -> None:
        """Raise the error that the last window turned out to have."""


class TakeStep(Closing):
    """The policy of `Accumulator`: divides, clips, guards, and takes the optimizer step, with all that belongs to it.

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
        self._pending: Verdict | None = None  # of the last window under "raise", on its way to the host
        self._taken = 0
        self._unread: Tensor | None = None  # how many of `_taken` the device skipped after all

    def guard_steps(self, window_is_open: Callable[[], bool], holds_cleared: Callable[[Optimizer], bool]) -> None:
        own = [StepGuard(optimizer, window_is_open) for optimizer in self._optimizers]
        self._guards = [*own, OtherStepsGuard(self._optimizers, window_is_open, holds_cleared)]

    @property
    def taken(self) -> int:
        """How many optimizer steps were taken. Waits for the device where only that knows."""
        if self._unread is not None:
            self._taken, self._unread = self._taken - int(self._unread.item()), None
        return self._taken

    @taken.setter
    def taken(self, number: int) -> None:
        self._taken, self._unread = number, None

    def begin_window(self) -> None:
        """A window begins: what was unscaled before belongs to no window."""
        if self._scaler is not None:
            for optimizer in self._optimizers:
                forget_unscaling(self._scaler, optimizer)

    def check_untouched(self) -> None:
        """Inside a window nobody else may unscale: it leaves no mark on the gradients, only in the scaler."""
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
        """A loss that ``scaler.scale()`` has multiplied already would be scaled twice."""
        if self._scaler is None or (scale := scale_of(self._scaler)) is None or (factor := factor_of(loss)) is None:
            return
        with unobserved():  # an address is no number that the device has computed
            is_scaled = factor.data_ptr() == scale.data_ptr()
        if is_scaled:
            raise UsageError(
                "the loss was multiplied by scaler.scale() already; backward() does that itself. Hand over the loss."
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
        """Divide, clip, guard, step: the device gets all of it queued, and the host reads only what it must know."""
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

        The gradients are divided already on return, but where the optimizer `folds` that into its own kernel.
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
        """Whether the device itself can leave out the step, in all optimizers."""
        return all(skips_on_device(optimizer) for optimizer in self._optimizers)

    def _needs_host(self, window: Window, verdict: Verdict, *, fused: bool) -> bool:
        """Whether the host has to know the verdict before it goes on."""
        if not window.has_items or window.knows_miscount:
            return True
        if verdict.may_be_miscounted and (not fused or verdict.on_host):  # no such step may be taken
            return True
        if self._scaler is not None:
            return not fused or self._counts_on_host or verdict.needs_host
        return self._nonfinite == "skip" or verdict.on_host

    def _defer_verdict(self, verdict: Verdict) -> bool | Tensor:
        """Queue the flag without waiting for it; returns what the result says of `skipped`."""
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
    """What became of a window, with its totals."""
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
    """Those of each parameter group as they are now: schedulers fill tensors anew in place. NaN where it has none."""
    rates = (group.get("lr", math.nan) for optimizer in optimizers for group in optimizer.param_groups)
    return tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)


def _tensor(number: float | Tensor, device: torch.device) -> Tensor:
    """A ``grad_scale``: float32, on the device."""
    return number.float() if isinstance(number, Tensor) else torch.full((), number, device=device, dtype=torch.float32)
