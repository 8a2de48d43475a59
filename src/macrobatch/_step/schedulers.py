"""Steps the schedulers that were handed over, and notices if the program steps them too."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim.lr_scheduler import LRScheduler

from macrobatch.errors import warn

TIMES = 2  # that somebody else was seen to step one before it is told: to resume sets it once


class Schedulers:
    """Those that step once for each optimizer step that is taken."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = schedulers
        self._left: list[object] = []  # where each was, when the last step was over
        self._times = 0

    def __bool__(self) -> bool:
        return bool(self._schedulers)

    def step(self) -> None:
        """After an optimizer step."""
        if self._times < TIMES:
            self._notice_others()
        for scheduler in self._schedulers:
            scheduler.step()
        self._left = self._places()

    def _notice_others(self) -> None:
        self._times = self._times + 1 if self._left and self._places() != self._left else 0
        if self._times == TIMES:
            warn(
                "a scheduler that was handed over is stepped by the program as well, and runs ahead of the training. "
                "Leave out scheduler.step(): step() calls it once for each optimizer step (told once)."
            )

    def _places(self) -> list[object]:
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._schedulers]
