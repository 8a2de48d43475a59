"""Step the learning rate schedulers that were passed, and warn if the program steps them too."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim.lr_scheduler import LRScheduler

from macrobatch.errors import warn

TIMES = 2  # how often a scheduler must be found ahead before the warning: resuming may cause it once


class Schedulers:
    """Schedulers that take one step after each optimizer step."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = schedulers
        self._left: list[int] = []  # the number of steps of each, after the last `step`
        self._times = 0

    def step(self) -> None:
        """Step all schedulers, after an optimizer step."""
        found = zip(self._left, self._places(), strict=False)
        is_further = any(place > left for left, place in found)
        for scheduler in self._schedulers:
            scheduler.step()
        self._left = self._places()
        self._times += is_further
        if is_further and self._times == TIMES:
            warn(
                "a scheduler that was passed is stepped by the program as well, and runs ahead of the training. "
                "Leave out scheduler.step(): step() calls it once for each optimizer step (told once)."
            )

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
