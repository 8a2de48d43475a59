"""A prepared optimizer that asks its windows before it steps, or clears gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_lomo_available
from torch import Tensor

from macrobatch._torch.optimizers import overflows_of

if TYPE_CHECKING:
    from macrobatch.accelerate.windows import Windows

_has_lomo = functools.cache(is_lomo_available)  # cached, because Accelerate searches for this package in every step


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's prepared optimizer, with windows. A copy or a pickle of it has no windows, as Accelerate's."""

    windows: Windows | None = None
    _skipped: bool | Tensor = False

    @classmethod
    def adopt(cls, prepared: Any, windows: Windows) -> None:
        """Make Accelerate's prepared optimizer one of ours: the same object, because programs may refer to it."""
        if type(prepared) not in (AcceleratedOptimizer, cls):  # DeepSpeed's
            return
        prepared.__class__ = cls
        is_new, prepared.windows = prepared.windows is None, windows  # it may have had windows of another Accelerator
        if is_new and prepared.scaler is not None:
            prepared.scaler = windows.share(prepared.scaler)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, if the window is complete and has items."""
        if self.windows is None:
            super().step(closure)
            return
        if not self.gradient_state.sync_gradients:
            return
        self._skipped = self.windows.begin_step(self)
        if self._skipped:
            return
        if self.scaler is None and not _has_lomo():
            self.optimizer.step() if closure is None else self.optimizer.step(closure)
            return
        super().step(closure)
        if isinstance(self.scaler, SharedScaler):
            self._skipped = self.scaler.overflow

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they belong to a window that is not complete."""
        if self.windows is None:
            super().zero_grad(set_to_none)
        elif self.windows.may_clear(self):
            super().zero_grad(set_to_none)
            if set_to_none is False and self.gradient_state.sync_gradients:
                self.windows.note_zeros(self)

    def parameters(self) -> list[Tensor]:
        """All parameters of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped: because a gradient had overflowed, or because the window had no items."""
        if isinstance(self._skipped, Tensor):  # a fused optimizer skips a step on the device
            self._skipped = bool(self._skipped)
        return self._skipped or bool(super().step_was_skipped)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state = {key: value for key, value in state.items() if key not in ("windows", "_skipped")}
        if isinstance(state["scaler"], SharedScaler):
            state["scaler"] = state["scaler"].scaler
        return state


class SharedScaler:
    """A GradScaler that updates its scale once per window, after the last optimizer with scaled gradients has stepped.

    Accelerate updates it after each optimizer. If one loss trains two optimizers, the gradients of the second one are
    then divided by another scale than the loss was multiplied with.
    """

    def __init__(self, scaler: Any, is_awaited: Callable[[], bool]) -> None:
        self.scaler = scaler
        self.overflow: bool | Tensor = False  # whether the last stepped optimizer had an overflow
        self._is_awaited = is_awaited
        self._is_due = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, and note whether the step was skipped."""
        result = self.scaler.step(optimizer, *args, **kwargs)
        flags = overflows_of(self.scaler, optimizer)
        self.overflow = torch.stack([flag.to(flags[0].device) for flag in flags]).sum() if flags else False
        return result

    def update(self, *args: Any) -> None:
        """Update the scale, or leave it to the next optimizer that steps."""
        self._is_due = self._is_awaited()
        if not self._is_due:
            self.scaler.update(*args)

    def catch_up(self) -> None:
        """Before a new window, do the update that waited for an optimizer that has not stepped."""
        if self._is_due:
            self._is_due = False
            self.scaler.update()
