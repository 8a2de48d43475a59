"""Prepared optimizers and schedulers: they wait for the micro-batch that closes a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from macrobatch.accelerate.state import AcceleratorState, GradientState


class Scaling:
    """The loss scale of fp16, shared by all optimizers: it moves once a window, not once an optimizer.

    Args:
        scaler: torch's.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._stepped: set[int] = set()
        self.optimizers: list[Optimizer] = []  # those that share it

    def seed(self, seed: Tensor) -> Tensor:
        """What a backward starts with, scaled."""
        self.update()
        return self.scaler.scale(seed)

    def unscale(self, optimizer: Optimizer) -> None:
        """Once a window, however often it is asked for."""
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if not self.scaler.is_enabled() or state["stage"] is not OptState.READY:
            return
        self.scaler.unscale_(optimizer)  # of shards, torch lets all ranks know what one has found

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Tensor | None:
        """Step unless a gradient overflowed; returns a number that is not zero if one did."""
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return None  # a scaler would complain that it has seen nothing
        self.unscale(optimizer)
        found = list(self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        overflow = torch.stack([f.to(found[0].device) for f in found]).sum() if found else None
        if closure is None:
            self.scaler.step(optimizer)
        else:
            self.scaler.step(optimizer, closure)
        self._stepped.add(id(optimizer))
        if self._stepped >= {id(other) for other in self.optimizers}:
            self.update()
        return overflow

    def update(self) -> None:
        """All optimizers of a window have stepped, or the next window begins."""
        if self._stepped:
            self._stepped.clear()
            self.scaler.update()


class AcceleratedOptimizer(Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing but in the micro-batch that closes a window.

    Args:
        optimizer: the one that does the work.
        scaling: of fp16.
        is_void: asked before every step that is due: whether to leave it out.
        before_clear: called before gradients are cleared.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaling: Scaling | None,
        is_void: Callable[[AcceleratedOptimizer], bool],
        before_clear: Callable[[AcceleratedOptimizer], None],
    ) -> None:
        self.optimizer = optimizer
        self._scaling = scaling
        self._is_void = is_void
        self._before_clear = before_clear
        self._skipped: bool | Tensor = False
        self._state = GradientState()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step if the window is complete."""
        if not self._state.sync_gradients:
            return
        if self._is_void(self):
            self._skipped = True
        elif self._scaling is not None:
            overflow = self._scaling.step(self.optimizer, closure)
            self._skipped = False if overflow is None else overflow
        else:
            self._skipped = False
            self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients if the window is complete."""
        if self._state.sync_gradients:
            self._before_clear(self)
            self.optimizer.zero_grad(True if set_to_none is None else set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient had overflowed. Waits for the device."""
        self._skipped = bool(self._skipped)
        return self._skipped

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:  # e.g. the train() and eval() that some optimizers have, and their hooks
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class AcceleratedScheduler:
    """A scheduler that steps when the optimizer has: once for each process, or once where batches are split.

    Args:
        scheduler: the one that does the work.
        optimizers: those that it is for.
        follows: whether it steps with the optimizers; else whenever it is told to.
        once: whether one step is enough for all processes.
    """

    def __init__(
        self, scheduler: Any, optimizers: Sequence[AcceleratedOptimizer], *, follows: bool, once: bool
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self._follows = follows
        self._once = once
        self._state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer has just done so."""
        if not self._follows:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._state.sync_gradients:
            if self._state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(1 if self._once else AcceleratorState().num_processes):
            if self._once or total is None or self.scheduler.last_epoch < total:  # one too many would be an error
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
