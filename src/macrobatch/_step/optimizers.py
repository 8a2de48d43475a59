"""Optimizers: which of them divide gradients and skip steps on the device, and guards against other calls of step()."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from macrobatch._torch.optimizers import has_hooks_after_step, hooks_before_step, hooks_on_all_optimizers
from macrobatch.errors import UsageError

LEAVE_OUT = (
    "acc.step(), which steps the optimizer itself, once a window: leave the other call out of the loop, and out of "
    "hooks. discard() drops what was accumulated."
)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel divides by ``grad_scale`` and skips the step at ``found_inf``.

    Only the fused kernels of torch's own Adam, AdamW, SGD and Adagrad do. Others raise, or silently ignore both. SGD
    with dampening is excluded: its first step differs from later ones, and it would take a skipped step for the first.
    """
    is_fused = all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)
    return is_fused and _is_torchs_own(optimizer.step)


def _is_torchs_own(step: Any) -> bool:
    """Whether a step, with everything that wraps it, is torch's own code: neither overridden nor replaced."""
    while True:
        step = getattr(step, "__func__", step)  # the function of a bound method
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        if not hasattr(step, "__wrapped__"):
            return step in _own_steps()
        step = step.__wrapped__


@functools.cache
def _own_steps() -> set[Callable[..., Any]]:
    return {inspect.unwrap(own.step) for own in (Adam, AdamW, SGD, Adagrad)}


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of others run before or after each step. They must see the mean in ``.grad``."""
    if has_hooks_after_step(optimizer) or any(hook is not _check_step for hook in hooks_on_all_optimizers()):
        return True
    return not all(isinstance(hook, StepGuard) for hook in hooks_before_step(optimizer))


class StepGuard:
    """A step pre-hook of an optimizer. It raises an error if somebody else steps the optimizer in an open window.

    It is removed when the owner of `window_is_open` is deleted; the optimizer does not keep that owner alive.

    Args:
        optimizer: the optimizer to watch.
        window_is_open: whether a window has accumulated gradients. A bound method, kept by a weak reference.
        advice: what to do instead, for the error message.
    """

    def __init__(self, optimizer: Optimizer, window_is_open: Callable[[], bool], advice: str = LEAVE_OUT) -> None:
        self._window_is_open = weakref.WeakMethod(window_is_open)
        self._advice = advice
        self.is_open = False  # whether steps are allowed
        try:
            handle = optimizer.register_step_pre_hook(self)
        except (AttributeError, TypeError):  # it has no table of hooks, or another than torch's
            raise UsageError(
                f"{type(optimizer).__name__} takes no hooks, because its class does not call Optimizer.__init__(). "
                "Call it there, or pass the optimizer that it wraps."
            ) from None
        weakref.finalize(window_is_open.__self__, handle.remove)  # type: ignore[attr-defined]

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        window_is_open = self._window_is_open()
        if self.is_open or window_is_open is None or not window_is_open():
            return
        raise UsageError(
            f"{type(optimizer).__name__}.step() was called inside the open window. Its gradients are undivided sums "
            f"until {self._advice}"
        )


class OtherStepsGuard:
    """Raises an error if an optimizer that was not passed steps parameters of a window.

    Inside the window its step would use undivided sums. After the window it would do nothing, because the gradients are
    cleared.

    Args:
        optimizers: the optimizers that were passed.
        window_is_open: whether a window has gradients. A bound method, kept by a weak reference.
        holds_cleared: whether an optimizer holds parameters whose gradients windows have cleared. Likewise.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        window_is_open: Callable[[], bool],
        holds_cleared: Callable[[Optimizer], bool],
    ) -> None:
        self.is_open = False  # whether steps are allowed: an optimizer that was passed may step others
        self._own = set(map(id, optimizers))
        self._window_is_open = weakref.WeakMethod(window_is_open)
        self._holds = weakref.WeakMethod(holds_cleared)
        _watch_all_steps()
        number = id(self)
        _guards[number] = weakref.ref(self, lambda _: _guards.pop(number, None))

    def check(self, optimizer: Optimizer) -> None:
        """Raise an error if this optimizer must not step now."""
        if self.is_open or id(optimizer) in self._own:
            return
        window_is_open, holds = self._window_is_open(), self._holds()
        if window_is_open is None or holds is None:
            return
        is_inside = window_is_open()
        if not is_inside and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return
        if not holds(optimizer):
            return
        name = type(optimizer).__name__
        if is_inside:
            raise UsageError(
                f"{name}.step() was called inside the open window, by an optimizer that was not passed but holds "
                "parameters of it: their gradients are undivided sums by now. Pass all optimizers of these models "
                "as a list, and leave out the other call: step() steps them all. discard() drops what was accumulated."
            )
        raise UsageError(
            f"{name}.step() would do nothing: the gradients of its parameters were those of the window before, and "
            "were cleared with it, as this optimizer was not passed. Pass all optimizers of these models "
            "as a list, and leave out the other call: step() steps them all."
        )


# Every step in the process iterates over torch's one list of such hooks, so only one hook is added, once.
_guards: dict[int, weakref.ref[OtherStepsGuard]] = {}


@functools.cache
def _watch_all_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: object) -> None:
    for reference in list(_guards.values()):
        if (guard := reference()) is not None:
            guard.check(optimizer)


def step_fused(optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Take a step that divides the gradients by `grad_scale`, and does nothing if `found_inf` is 1."""
    fresh = [
        parameter
        for group in optimizer.param_groups
        if group.get("momentum") and found_inf is not None
        for parameter in group["params"]
        if parameter.grad is not None and (optimizer.state.get(parameter) or {}).get("momentum_buffer") is None
    ]
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    for parameter in fresh:  # if fused SGD skips its first step, the momentum that it made is uninitialised memory
        buffer = optimizer.state[parameter]["momentum_buffer"]
        buffer.masked_fill_(found_inf.to(buffer.device, torch.bool), 0)  # type: ignore[union-attr]
