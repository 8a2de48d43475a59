"""Close a window: divide, clip and check the gradients; step the optimizer, the scaler and the schedulers.

The division by the window's items, the clipping and the unscaling are combined into one divisor, which is computed on
the device. A fused optimizer takes the divisor as its ``grad_scale``, and a flag as its ``found_inf``. So the gradients
need no extra pass, and the host does not wait. For all other optimizers, one pass divides the gradients in place.

The host reads one number per window (`Verdict`), only if it has to know it (`TakeStep._needs_host`), and only after a
fused step is queued. On a CPU there is nothing to wait for, so errors come at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._engine.store import GradientStore
from macrobatch._engine.verdict import NONFINITE, Flags, Verdict, verdict_on
from macrobatch._engine.window import Window
from macrobatch._torch.optimizers import (
    advance,
    current_scale,
    forget_unscaling,
    has_hooks,
    learning_rates,
    note_overflow,
    reason_against_step,
    skips_on_device,
    step_fused,
)
from macrobatch._torch.tensors import float32_on, number_on_host, wide
from macrobatch.errors import NonFiniteError
from macrobatch.types import NonFinite, StepResult

TOUCHED = "touched"  # a reason against a step that a rank knows of its own parts of the gradients only


class Closing:
    """What to do with the gradients of a complete window. A subclass needs `close`, which counts in `_taken`."""

    leaves_gradients = False  # whether the program uses and clears them
    _taken = 0

    @property
    def taken(self) -> int:
        """The number of optimizer steps taken. If the program steps itself, the number of windows closed."""
        return self._taken

    def restore(self, taken: int) -> None:
        """Set the number of steps taken, from a checkpoint."""
        self._taken = taken

    def begin_window(self) -> None:
        """Begin a window. What was done before does not belong to it."""

    def close(self, window: Window, store: GradientStore, flags: Flags, *, average: float, shared: bool) -> StepResult:
        """Close the window, and return its result."""
        raise NotImplementedError

    def settle(self) -> None:
        """Raise the error that the last window turned out to have."""


class TakeStep(Closing):
    """Closes a window with an optimizer step: divides, clips and checks the gradients, and steps the optimizers."""

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
        self.schedulers = schedulers
        self._optimizers = optimizers
        self.scaler = scaler
        self._max_norm = max_norm
        self._nonfinite = "skip" if scaler is not None else nonfinite  # an overflow is skipped, whatever was asked
        self._counts_on_host = counts_on_host or bool(schedulers)
        self._pending: Verdict | None = None  # of the last window under "raise": being copied to the host
        self._unread: Tensor | None = None  # how many of `_taken` the device skipped after all

    @property
    def taken(self) -> int:
        """The number of optimizer steps taken. The host waits for the device if only the device knows it."""
        if self._unread is not None:
            self._taken, self._unread = self._taken - int(self._unread.item()), None
        return self._taken

    def restore(self, taken: int) -> None:
        self._taken, self._unread = taken, None

    def begin_window(self) -> None:
        """Begin a window. What the scaler unscaled before does not belong to it."""
        if self.scaler is not None:
            for optimizer in self._optimizers:
                forget_unscaling(self.scaler, optimizer)

    def settle(self) -> None:
        pending, self._pending = self._pending, None
        self._raise_for(pending)

    def _raise_for(self, pending: Verdict | None) -> None:
        if pending is None or (error := pending.error(pending.read())) is None:
            return
        if isinstance(error, NonFiniteError) and self._nonfinite != "raise":
            return
        if self.scaler is None and all(map(skips_on_device, self._optimizers)):  # a scaler counts on the device
            self._taken -= 1  # the device knew, and did not take it
        raise error

    # ------------------------------------------------------------------------------------------ the main path

    def close(self, window: Window, store: GradientStore, flags: Flags, *, average: float, shared: bool) -> StepResult:
        """Take the step of `window`; then raise the error of the one before, if it turned out to have one.

        All of it is queued on the device; the host reads only what it must know.
        """
        earlier, self._pending = self._pending, None
        result = self._close(window, store, flags, average=average, shared=shared)
        if earlier is not None:
            self._raise_for(earlier)
        return result

    def _close(self, window: Window, store: GradientStore, flags: Flags, *, average: float, shared: bool) -> StepResult:
        if window.is_empty:
            return self._result(window, None, skipped=True)
        store.gather()
        is_fused = all(map(skips_on_device, self._optimizers))  # then the device can skip the step
        folds = is_fused and store.groups.foldable and not (shared or any(map(has_hooks, self._optimizers)))
        divisor, grad_norm, nonfinite = self._divide(window.divisor(average), window, store, flags, folds=folds)
        grad_scale = float32_on(window.device, divisor) if folds else None
        if nonfinite is not None and self.scaler is None and number_on_host(nonfinite) == 0:
            nonfinite = None  # the host knows already: there is nothing to judge
        verdict = verdict_on(window, flags, nonfinite)

        if verdict is None:
            self._queue(grad_scale, None)
            return self._result(window, grad_norm, skipped=False)
        if not self._needs_host(verdict, is_fused=is_fused):
            self._queue(grad_scale, verdict.found_inf if is_fused else None)
            return self._result(window, grad_norm, skipped=self._defer_verdict(verdict))
        if is_fused:
            self._queue(grad_scale, verdict.found_inf)
        reasons = verdict.read()
        if self.scaler is not None and reasons in ([], [NONFINITE]):
            self._update_scale(self.scaler, verdict)
        error = verdict.error(reasons)
        if error is not None and (self._nonfinite == "raise" or not isinstance(error, NonFiniteError)):
            raise error
        if not is_fused and not reasons:
            self._queue(None, None)
        return self._result(window, grad_norm, skipped=bool(reasons))

    def _divide(
        self, divisor: float | Tensor, window: Window, store: GradientStore, flags: Flags, *, folds: bool
    ) -> tuple[float | Tensor, Tensor | None, Tensor | None]:
        """The divisor that clips too, the norm before clipping, and whether a gradient is not finite.

        On return the gradients are already divided, unless the optimizer divides in its own kernel (`folds`).
        """
        guards, device = self._nonfinite != "keep", window.device
        grad_norm = nonfinite = None
        if self._max_norm is not None:
            norm = norm_and_tell(store, 2.0, device, flags)
            grad_norm = norm / divisor
            # The very formula of torch.nn.utils.clip_grad_norm_, so that clipped runs agree with it to the last digits.
            divisor = divisor / (self._max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
            nonfinite = ~torch.isfinite(norm) if guards else None
        elif guards and not folds and (found := store.groups.divide_and_check(divisor, device)) is not None:
            if flags:
                tell(store, device, flags)
            return divisor, None, found
        elif guards:
            nonfinite = ~torch.isfinite(norm_and_tell(store, math.inf, device, flags))
        else:
            tell(store, device, flags)
        if not folds:
            store.divide(divisor)
        return divisor, grad_norm, nonfinite

    # ------------------------------------------------------------------------------------------ steps, and who knows

    def _needs_host(self, verdict: Verdict, *, is_fused: bool) -> bool:
        """Whether the host must read the verdict before it continues."""
        if verdict.needs_host or (verdict.blocks and (not is_fused or verdict.on_host)):
            return True
        if self.scaler is not None:
            return not is_fused or self._counts_on_host
        return self._nonfinite == "skip" or verdict.on_host

    def _defer_verdict(self, verdict: Verdict) -> bool | Tensor:
        """Send the verdict to the host without waiting. Returns the value of `skipped` for the result."""
        if self.scaler is None or verdict.has_mistakes:
            self._pending = verdict.send()
        if self.scaler is None:
            return False
        self._update_scale(self.scaler, verdict)
        skipped = verdict.found_inf
        self._unread = skipped.long() if self._unread is None else self._unread + skipped.long()
        return skipped.bool()

    def _queue(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        for optimizer in self._optimizers:
            try:
                if grad_scale is None and found_inf is None:
                    optimizer.step()
                else:
                    step_fused(optimizer, grad_scale, found_inf)
            except Exception as error:
                if (reason := reason_against_step(optimizer, error)) is not None:
                    raise reason from error
                raise

    def _update_scale(self, scaler: GradScaler, verdict: Verdict) -> None:
        note_overflow(scaler, self._optimizers[0], verdict.overflow)  # our own pass has looked at the gradients already
        scaler.update()

    def _result(self, window: Window, grad_norm: Tensor | None, *, skipped: bool | Tensor) -> StepResult:
        lr = learning_rates(self._optimizers)  # before the schedulers step
        if skipped is not True:
            self._taken += 1
            for scheduler in self.schedulers:
                advance(scheduler, self._taken)
        if grad_norm is None and self._max_norm is not None:
            grad_norm = torch.full((), math.nan, device=window.device, dtype=wide(window.device))  # no items, no mean
        step = self._taken if self._unread is None else self._taken - self._unread
        return result_of(window, step=step, lr=lr, skipped=skipped, grad_norm=grad_norm)


class LeaveMean(Closing):
    """Makes ``.grad`` the mean over the window's items, and leaves it there; with a scaler, still scaled.

    The program clips the gradients, takes the step and clears them.
    """

    leaves_gradients = True

    def __init__(
        self, optimizers: Sequence[Optimizer], scaler: GradScaler | None = None, *, narrows: bool = True
    ) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._narrows = narrows  # whether widened gradients get the dtype of their parameters again
        self._verdict: Verdict | None = None  # on the last window, until the host has read it
        self._is_empty = False

    def close(self, window: Window, store: GradientStore, flags: Flags, *, average: float, shared: bool) -> StepResult:
        self.settle()
        skipped: bool | Tensor = window.is_empty
        self._is_empty = window.is_empty
        if not skipped:
            store.gather()
            divisor = window.divisor(average)
            if isinstance(divisor, Tensor):
                skipped = divisor == 0
                divisor = divisor.masked_fill(skipped, 1)  # without items there is nothing to divide
            if self._scaler is not None:
                divisor = divisor / current_scale(self._scaler, window.device)
            store.divide(divisor, narrows=self._narrows)
            tell(store, window.device, flags)
            self._verdict = verdict_on(window, flags)
            blocking = {name for name, flag in flags.items() if flag.blocks}
            if blocking and self._verdict is not None and self._verdict.on_host and blocking & {*self._verdict.read()}:
                self.is_void()  # the host can know at once
        self._taken += 1
        return result_of(window, step=self._taken, lr=learning_rates(self._optimizers), skipped=skipped)

    def settle(self) -> None:
        self.is_void()

    def is_void(self) -> bool:
        """Whether the last window had no items, so that there must be no step. An error if the window was invalid.

        The host waits for the device if only the device knows.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            reasons = verdict.read()
            self._is_empty = bool(reasons)
            if (error := verdict.error(reasons)) is not None:
                raise error
        return self._is_empty


def norm_and_tell(store: GradientStore, order: float, device: torch.device, flags: Flags) -> Tensor:
    """The norm of all gradients. All ranks that hold parts learn `TOUCHED` of each other with it."""
    touched = flags.get(TOUCHED)
    norm, told = store.groups.norm(order, device, None if touched is None else touched.holds.to(device, wide(device)))
    if touched is not None and told is not None:
        flags[TOUCHED] = touched._replace(holds=told > 0)
    return norm


def tell(store: GradientStore, device: torch.device, flags: Flags) -> None:
    """Tell `TOUCHED` to all ranks that hold parts of the gradients, where no norm is computed."""
    if (touched := flags.get(TOUCHED)) is not None:
        told = store.groups.tell_ranks(touched.holds.to(device, torch.float32))
        flags[TOUCHED] = touched._replace(holds=touched.holds if told is None else told)


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
