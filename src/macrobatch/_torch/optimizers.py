"""Optimizers and `GradScaler`: fused steps, hooks around steps, and what a scaler records for each optimizer."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch.errors import BackendError

NO_GRAPH = "does not require grad"  # a part of torch's message if a gradient is to be differentiated
_OWN_STEPS = {inspect.unwrap(own.step) for own in (Adam, AdamW, SGD, Adagrad)}
_OF_ALL = vars(sys.modules["torch.optim.optimizer"])  # the attribute of this name in torch.optim is deleted


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of others, which must see the mean in ``.grad``, run before or after each step."""
    registries = (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        _OF_ALL["_global_optimizer_pre_hooks"],
        _OF_ALL["_global_optimizer_post_hooks"],
    )
    # Hooks of this library only look: they have the attribute `only_checks`.
    return not all(hasattr(hook, "only_checks") for hooks in registries for hook in hooks.values())


# ---------------------------------------------------------------------------------------------- steps


def reason_against_step(optimizer: Optimizer, error: Exception) -> BackendError | None:
    """Why a step has failed, if it cannot use an accumulated gradient; None for any other error."""
    if isinstance(error, RuntimeError) and NO_GRAPH in str(error):
        return BackendError(f"{needs_graph(type(optimizer).__name__)} What it said: {error}")
    if isinstance(error, AssertionError | TypeError) and "closure" in str(error):
        return BackendError(f"{needs_closure(type(optimizer).__name__)} What it said: {error}")
    return None


def needs_closure(name: str) -> str:
    """The message for an optimizer that computes the loss several times in a step."""
    return (
        f"{name} evaluates the loss several times in a step, with a closure; an accumulated gradient is one of them. "
        "Use MacroStep(model, None, loss_fn), which leaves the mean gradient in .grad, inside of its closure."
    )


def needs_graph(name: str) -> str:
    """The message for an optimizer that differentiates gradients."""
    return (
        f"{name}.step() differentiates the gradients once more, which needs backward(create_graph=True); an "
        "accumulated gradient has no graph. Use an optimizer of first order, or take its step on one whole batch."
    )


def advance(scheduler: Any, taken: int) -> None:
    """Advance a schedule after a step, the number `taken`. One of timm counts updates, and leaves `step` to epochs."""
    if isinstance(scheduler, LRScheduler) or not hasattr(scheduler, "step_update"):
        scheduler.step()
    else:
        scheduler.step_update(num_updates=taken)


def learning_rates(optimizers: Sequence[Optimizer]) -> tuple[float | Tensor, ...]:
    """The learning rates of all parameter groups. Tensors are copied: schedulers change them. NaN if there is none."""
    rates: list[float | Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr", math.nan)
            rates.append(rate.clone() if isinstance(rate, Tensor) else rate)
    return tuple(rates)


# ---------------------------------------------------------------------------------------------- fused steps


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel divides by ``grad_scale`` and skips the step at ``found_inf``.

    Only the fused kernels of torch's own Adam, AdamW, SGD and Adagrad do. Others raise, or silently ignore both. SGD
    with dampening is excluded: its first step differs from later ones, and it would take a skipped step for the first.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") or group.get("dampening"):
            return False
    return _is_torchs_own(optimizer.step)


def _is_torchs_own(step: Any) -> bool:
    """Whether a step, with everything that wraps it, is torch's own code: neither overridden nor replaced."""
    while True:
        step = getattr(step, "__func__", step)  # the function of a bound method
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        if not hasattr(step, "__wrapped__"):
            return step in _OWN_STEPS
        step = step.__wrapped__


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


# ---------------------------------------------------------------------------------------------- scalers


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


def current_scale(scaler: GradScaler, device: torch.device) -> Tensor:
    """The current scale, on the device."""
    return scaler.scale(torch.ones((), device=device, dtype=torch.float32))
