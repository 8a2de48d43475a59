"""The length of the windows in each epoch, and how the Trainer gets it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from macrobatch._border.arguments import checked_steps
from macrobatch.errors import UsageError

Steps = int | Mapping[int, int]


def checked_schedule(steps: Steps) -> Steps:
    """The number of micro-batches in a window, or a schedule of it by epochs, checked."""
    if not isinstance(steps, Mapping):
        return checked_steps(steps, "steps")
    if not steps or not all(_is_count(epoch) and epoch >= 0 for epoch in steps):
        raise UsageError(
            f"steps={dict(steps)} is no schedule: its keys are the epochs, counted from 0, from which its values hold."
        )
    return {0: 1} | {int(epoch): checked_steps(count, f"steps[{epoch}]") for epoch, count in steps.items()}


def _is_count(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def steps_in_epoch(steps: Steps, epoch: int) -> int:
    """The number of micro-batches in a window of that epoch."""
    return steps if isinstance(steps, int) else steps[max(begin for begin in steps if begin <= epoch)]


@contextlib.contextmanager
def tell_trainer(trainer: Any, steps: Steps, package: str) -> Iterator[None]:
    """A context in which the Trainer counts windows of that length, as with ``accumulate_grad_batches``.

    The length itself stays: hooks and programs read it after the fit, too.
    """
    own: Any = type(trainer)
    schedule = None if isinstance(steps, int) else _schedule_class(package)(dict(steps))
    if schedule is None:
        trainer.accumulate_grad_batches = steps
    else:
        trainer.callbacks.insert(0, schedule)  # before callbacks that may change it for an epoch
        schedule.set_length(trainer)
        trainer.__class__ = _estimating_class(own)
    try:
        yield
    finally:
        trainer.__class__ = own
        if schedule in trainer.callbacks:
            trainer.callbacks.remove(schedule)


@functools.cache
def _schedule_class(package: str) -> Any:
    callbacks = importlib.import_module(f"{package}.callbacks")

    class Schedule(callbacks.GradientAccumulationScheduler):  # type: ignore[misc, name-defined]
        """Lightning's scheduler, corrected: it also works in an epoch in the middle of which a run resumes."""

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            self.set_length(trainer)

        def set_length(self, trainer: Any) -> None:
            trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    return Schedule


@functools.cache
def _estimating_class(kind: Any) -> Any:
    """A Trainer class that counts the windows of each epoch. Lightning uses the length of the first epoch for all."""

    def estimated_stepping_batches(self: Any) -> int | float:
        estimate: int | float = kind.estimated_stepping_batches.fget(self)  # which also loads the data
        if not math.isfinite(self.num_training_batches) or self.max_epochs == -1:
            return estimate
        lengths = [steps_in_epoch(self.strategy.steps, epoch) for epoch in range(max(self.max_epochs, 1))]
        number: int = sum(math.ceil(self.num_training_batches / length) for length in lengths)
        return number if self.max_steps == -1 else min(number, int(self.max_steps))

    return type(kind.__name__, (kind,), {"estimated_stepping_batches": property(estimated_stepping_batches)})


def require_no_other(trainer: Any, package: str) -> None:
    """Raise an error if another callback sets the length of windows too."""
    theirs = importlib.import_module(f"{package}.callbacks").GradientAccumulationScheduler
    for callback in trainer.callbacks:
        if isinstance(callback, theirs) and not isinstance(callback, _schedule_class(package)):
            raise UsageError(
                f"the callback {type(callback).__name__} beside ExactStrategy: leave it out, and pass its "
                f"schedule, ExactStrategy(steps={callback.scheduling})."
            )


def wants_forwards_alone(trainer: Any, package: str) -> bool:
    """Whether this is the extra epoch after the last one, which updates batch norm statistics without a backward."""
    averaging = _averaging_class(package)
    return any(
        isinstance(callback, averaging) and trainer.current_epoch == callback.swa_end + 1
        for callback in trainer.callbacks
    )


@functools.cache
def _averaging_class(package: str) -> Any:
    return importlib.import_module(f"{package}.callbacks").StochasticWeightAveraging
