"""Optimizers and `GradScaler`: hooks around steps, and what a scaler records for each optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_OF_ALL = vars(sys.modules["torch.optim.optimizer"])  # the attribute of this name in torch.optim is deleted


def hooks_before_step(optimizer: Optimizer) -> Iterable[Any]:
    """The hooks of this optimizer alone."""
    return getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()


def has_hooks_after_step(optimizer: Optimizer) -> bool:
    """Whether this optimizer has hooks of its own."""
    return bool(getattr(optimizer, "_optimizer_step_post_hooks", {}))


def hooks_on_all_optimizers() -> list[Any]:
    """The hooks that run before or after the steps of every optimizer of the process."""
    return [*_OF_ALL["_global_optimizer_pre_hooks"].values(), *_OF_ALL["_global_optimizer_post_hooks"].values()]


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The scale, on its device; None before the scaler was used."""
    return scaler._scale


def has_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients of this optimizer were unscaled since the last update."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"])


def forget_unscaling(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Make the scaler treat the gradients of this optimizer as scaled."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


def note_overflow(scaler: GradScaler, optimizer: Optimizer, overflow: Tensor) -> None:
    """Record an overflow flag of 0 or 1, as `scaler.unscale_()` does, but without its pass over the gradients."""
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {overflow.device: overflow}


def overflows_of(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """The flags that `scaler.unscale_()` has recorded since the last update, one for each device."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
