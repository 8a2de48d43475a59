"""Checks of optimizers, schedulers and scalers: step() calls them, once a window, and nobody else does inside one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from macrobatch._engine.closing import TakeStep
from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._engine.totals import Micro
from macrobatch._torch.autograd import factor_of
from macrobatch._torch.optimizers import has_unscaled, scale_of
from macrobatch._torch.tensors import unobserved
from macrobatch.errors import UsageError, warn

LEAVE_OUT = (
    "acc.step(), which steps the optimizer itself, once a window: leave the other call out of the loop, and out of "
    "hooks. discard() drops what was accumulated."
)


class StepGuard:
    """A step pre-hook of an optimizer. It raises an error if somebody else steps the optimizer in an open window.

    It is removed when the owner of `must_not_step` is deleted; the optimizer does not keep that owner alive.

    Args:
        optimizer: the optimizer to watch.
        must_not_step: whether a window has accumulated gradients. A bound method, kept by a weak reference.
        advice: what to do instead, for the error message.
    """

    only_checks = True

    def __init__(self, optimizer: Optimizer, must_not_step: Callable[[], bool], advice: str = LEAVE_OUT) -> None:
        self._must_not_step = weakref.WeakMethod(must_not_step)
        self._advice = advice
        try:
            handle = optimizer.register_step_pre_hook(self)
        except (AttributeError, TypeError):  # it takes no hooks. `OtherOptimizer` sees the steps of one that it wraps,
            return  # and `ChangedParameters` what it does itself
        weakref.finalize(must_not_step.__self__, handle.remove)  # type: ignore[attr-defined]

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        must_not_step = self._must_not_step()
        if must_not_step is None or not must_not_step():
            return
        raise UsageError(
            f"{type(optimizer).__name__}.step() was called inside the open window. Its gradients are undivided sums "
            f"until {self._advice}"
        )


class StepInside(Check):
    """A hook before each step of the given optimizers."""

    name = "a step inside a window"
    sentence = "The program steps the optimizer inside a window, with the undivided sum of a part of it."
    cost = "a hook of each optimizer per window"
    shows = "SGD.step() was called inside the open window. Its gradients are undivided sums"
    program = """
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            optimizer.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._engine = weakref.ref(engine)
        for optimizer in engine.optimizers:
            StepGuard(optimizer, self._must_not_step)
        return True

    def _must_not_step(self) -> bool:
        engine = self._engine()
        return engine is not None and not engine.is_closing and engine.has_accumulated


class OtherOptimizer(Check):
    """A hook before the steps of all optimizers of the process.

    Inside a window, the step of an optimizer that was not given would use undivided sums. After it, it would do
    nothing, because the gradients are cleared.
    """

    name = "a forgotten optimizer"
    sentence = "An optimizer that was not given steps parameters of the given models."
    cost = "a lookup per step of any optimizer of the process"
    shows = "by an optimizer that was not passed but holds parameters of it"
    program = """
        forgotten = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            forgotten.step()
        """

    def watch(self, engine: Engine) -> bool:
        if not isinstance(engine.closing, TakeStep):  # a program that steps itself steps what it wants
            return False
        self._engine = weakref.ref(engine)
        self._own = set(map(id, engine.optimizers))
        _watch_all_steps()
        number = id(self)
        _guards[number] = weakref.ref(self, lambda _: _guards.pop(number, None))
        return True

    def check(self, optimizer: Optimizer) -> None:
        """Raise an error if this optimizer must not step now."""
        engine = self._engine()
        if engine is None or engine.is_closing or id(optimizer) in self._own:  # a given optimizer may step others
            return
        is_inside = engine.has_accumulated
        if not is_inside and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return
        if not self._holds_cleared(engine, optimizer):
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

    def _holds_cleared(self, engine: Engine, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters whose gradients a window has used or cleared."""
        if not (engine.num_windows or engine.has_accumulated):
            return False
        own = set(map(id, engine.parameters.named().values()))
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


# Every step in the process iterates over torch's one list of such hooks, so only one hook is added, once.
_guards: dict[int, weakref.ref[OtherOptimizer]] = {}


@functools.cache
def _watch_all_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: object) -> None:
    for reference in list(_guards.values()):
        if (guard := reference()) is not None:
            guard.check(optimizer)


_check_step.only_checks = True  # type: ignore[attr-defined]


class SchedulerTwice(Check):
    """Compares how far each scheduler is with where the last step left it."""

    name = "a scheduler stepped twice"
    sentence = "The program steps a scheduler that it has also given, so that the schedule runs ahead (a warning)."
    cost = "a look at each scheduler per window"
    shows = "a scheduler that was passed is stepped by the program as well"
    program = """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        acc = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
        for batch in acc.batches(loader * 3):
            acc.backward(loss_fn(batch))
            if acc.step():
                scheduler.step()
        """
    TIMES = 2  # how often a scheduler must be found ahead before the warning: resuming may cause it once

    def watch(self, engine: Engine) -> bool:
        self._schedulers = getattr(engine.closing, "schedulers", ())
        self._left: list[int] = []  # the number of steps of each, after the last window
        self._times = 0
        return bool(self._schedulers)

    def before_close(self, engine: Engine) -> None:
        is_further = any(place > left for left, place in zip(self._left, self._places(), strict=False))
        self._times += is_further
        if is_further and self._times == self.TIMES:
            warn(
                "a scheduler that was passed is stepped by the program as well, and runs ahead of the training. "
                "Leave out scheduler.step(): step() calls it once for each optimizer step (told once)."
            )

    def window_end(self, engine: Engine) -> None:
        self._left = self._places()

    def _places(self) -> list[int]:
        return [_place_of(scheduler) for scheduler in self._schedulers]


def _place_of(scheduler: LRScheduler) -> int:
    """How many steps a scheduler has taken. For one that chains others, the number of the first one.

    0 if the number is unknown.

    >>> import torch
    >>> from torch.optim.lr_scheduler import ChainedScheduler, StepLR
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> _place_of(ChainedScheduler([StepLR(optimizer, 2), StepLR(optimizer, 3)]))
    0
    """
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    states = [state for value in scheduler.state_dict().values() if isinstance(value, list) for state in value]
    return next((state["last_epoch"] for state in states if isinstance(state, dict) and "last_epoch" in state), 0)


class UnscaledInside(Check):
    """Asks the scaler. The gradients do not show it."""

    name = "unscaled inside a window"
    sentence = "The program unscales or steps with the scaler inside a window."
    cost = "with a scaler, a look into it per micro-batch and window"
    shows = "scaler.unscale_() or scaler.step() was called inside the open window"
    program = """
        scaler = torch.amp.GradScaler("cpu")
        acc = Accumulator(model, optimizer, steps=2, scaler=scaler)
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            scaler.unscale_(optimizer)
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._scaler: Any = getattr(engine.closing, "scaler", None)
        return self._scaler is not None

    def before_backward(self, engine: Engine, micro: Micro | None = None) -> None:
        if any(has_unscaled(self._scaler, optimizer) for optimizer in engine.optimizers):
            raise UsageError(
                "scaler.unscale_() or scaler.step() was called inside the open window. Until step() the gradients "
                "are undivided, scaled sums, and step() unscales them itself, once: leave the call out, and call "
                "discard() to drop what was accumulated."
            )

    before_close = before_backward


class ScaledLoss(Check):
    """Looks at the last factor of a loss."""

    name = "a loss scaled twice"
    sentence = "The program multiplies the loss by the scaler's scale itself."
    cost = "with a scaler, a look at the last node of each loss"
    shows = "the loss was multiplied by scaler.scale() already"
    program = """
        scaler = torch.amp.GradScaler("cpu")
        acc = Accumulator(model, optimizer, steps=2, scaler=scaler)
        for batch in acc.batches(loader):
            acc.backward(scaler.scale(loss_fn(batch)))
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._scaler: Any = getattr(engine.closing, "scaler", None)
        return self._scaler is not None

    def before_backward(self, engine: Engine, micro: Micro) -> None:
        for loss in micro.given or micro.losses:
            if loss is not None and self._is_scaled(loss):
                raise UsageError(
                    "the loss was multiplied by scaler.scale() already; backward() does that itself. Pass the loss."
                )

    def _is_scaled(self, loss: Tensor) -> bool:
        if (scale := scale_of(self._scaler)) is None or (factor := factor_of(loss)) is None:
            return False
        with unobserved():  # an address is no number that the device has computed
            return factor.data_ptr() == scale.data_ptr()
