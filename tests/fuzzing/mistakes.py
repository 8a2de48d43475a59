"""Mistakes that programs make in an open window: with gradients, losses and items."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuzzing.run import Run


def gradients_of(run: Run) -> list[Tensor]:
    return [q.grad for q in run.net.parameters() if q.grad is not None]


def zero_grad(run: Run, to_none: bool = True) -> None:
    for optimizer in run.own.optimizers:
        optimizer.zero_grad(set_to_none=to_none)


def scale_gradients(run: Run) -> None:
    for gradient in gradients_of(run):
        gradient.mul_(0.5)


def set_a_gradient(run: Run, to: Callable[[Tensor], Tensor | None]) -> None:
    parameter = next((q for q in run.net.parameters() if q.grad is not None), None)
    if parameter is not None:  # what FSDP2 holds gathered shows none
        parameter.grad = to(parameter.grad)


def unscale(run: Run) -> None:
    if run.own.scaler is not None:
        run.own.scaler.scale(torch.ones(()))  # else torch's own error says that nothing has been scaled yet
        run.own.scaler.unscale_(run.own.optimizers[0])


def update_scaler(run: Run) -> None:
    if run.own.scaler is not None:
        with contextlib.suppress(AssertionError):  # torch's own, where nothing has been scaled yet
            run.own.scaler.update(4.0 * run.own.scaler.get_scale())


SPOILS: dict[str, Callable[[Run], Any]] = {
    "zero_grad": zero_grad,
    "zero_grad to zeros": lambda run: zero_grad(run, to_none=False),
    "clip": lambda run: nn.utils.clip_grad_norm_(run.net.parameters(), 0.01),
    "scale gradients": scale_gradients,
    "drop a gradient": lambda run: set_a_gradient(run, lambda gradient: None),
    "replace a gradient": lambda run: set_a_gradient(run, lambda gradient: 2 * gradient),
    "optimizer.step": lambda run: run.own.optimizers[0].step(),
    "unscale": unscale,
    "update scaler": update_scaler,
}
BAD: dict[str, Callable[[Tensor, Any], tuple[Any, Any]]] = {
    "negative items": lambda loss, items: (loss, torch.tensor(-1.0) if isinstance(items, Tensor) else -1),
    "nan items": lambda loss, items: (loss, torch.tensor(math.nan) if isinstance(items, Tensor) else math.nan),
    "infinite items": lambda loss, items: (loss, torch.tensor(math.inf) if isinstance(items, Tensor) else math.inf),
    "items of two elements": lambda loss, items: (loss, torch.ones(2)),
    "items as text": lambda loss, items: (loss, "3"),
    "items mixed with None": lambda loss, items: (loss, 3 if items is None else None),
    "loss of two elements": lambda loss, items: (loss * torch.ones(2, dtype=loss.dtype), items),
    "loss without a graph": lambda loss, items: (loss.detach(), items),
    "scaled loss": lambda loss, items: (loss, items),  # by a scaler, which only the program knows
    "loss of nothing": lambda loss, items: (2 * torch.ones((), dtype=loss.dtype, requires_grad=True), items),
}
