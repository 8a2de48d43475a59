"""Run windows that may run out of memory. If one does, restore the state before it, and retry it.

If a window may fail on one rank and not on another, it is *held*: ranks exchange nothing in its micro-batches. At its
end all ranks vote, and exchange gradients only if no rank has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from macrobatch._batch.engine import BatchEngine, Mark
from macrobatch._cudagraph.cache import RecordingCache
from macrobatch._cudagraph.two_passes import JointRecordings
from macrobatch._cut.fitting import Fitting
from macrobatch._cut.memory import (
    FittingSizes,
    Pressure,
    is_out_of_memory,
    release_cached_memory,
    requested_memory,
    too_large_error,
)
from macrobatch._cut.policies import Cut
from macrobatch._joint.kept_graphs import KeptGraphs
from macrobatch._ranks import collectives
from macrobatch._ranks.agreement import Agreement, Status
from macrobatch._torch.snapshot import Snapshot
from macrobatch.errors import BackendError, FitError

Recordings = RecordingCache | JointRecordings
NO_ROOM = "memory ran out beside what had been recorded"

logger = logging.getLogger("macrobatch")


class AbandonedError(Exception):
    """Another rank has failed in this window, so this rank leaves the window too."""

    def __init__(self, statuses: list[Status]) -> None:
        super().__init__()
        self.statuses = statuses


class Attempts:
    """Runs windows, and reports whether they fitted into memory."""

    def __init__(self, engine: BatchEngine, fitting: Fitting | None, sizes: FittingSizes) -> None:
        self._engine = engine
        self._agreement = Agreement(engine.backend)
        self._fitting = fitting  # None if the size of micro-batches is given
        self._sizes = sizes
        self._pressure: Pressure | None = None

    def may_repeat(self, cut: Cut, recordings: Recordings | None) -> bool:
        """Whether this window can be retried if memory runs out."""
        can_fail = self._fitting is not None or recordings is not None
        return can_fail and (cut.is_held or self._agreement.is_alone)

    def run(
        self, cut: Cut, take_turns: Callable[[], None], recordings: Recordings | None, kept: KeptGraphs | None
    ) -> bool:
        """Run all micro-batches of a window. Returns False if memory ran out; the state before the window is restored.

        The `kept` graphs are given up before micro-batches become smaller, and recording only if they cannot.
        """
        engine, may_repeat = self._engine, self.may_repeat(cut, recordings)
        if cut.is_held:
            engine.backend.hold_window()
        mark = engine.mark()
        if self._fitting is not None:
            self._pressure = Pressure(engine.device)
        before, asked, abandoned = None, None, None
        try:
            if may_repeat:
                before = Snapshot(engine.models)
            take_turns()
        except AbandonedError as error:
            abandoned = error.statuses
        except BaseException as error:
            could_fit = self._fitting is not None or _holds_memory(recordings)
            has_begun = before is not None or not may_repeat
            if not (is_out_of_memory(error) and could_fit and has_begun):
                self._give_up(cut, mark, error)
                raise
            asked = requested_memory(error)
        # From here on outside of the except block: its traceback kept the failed micro-batch alive.
        if asked is not None and before is None:
            self._end_job(cut, asked)
        drops_kept = asked is not None and kept is not None and kept.has_kept
        shrinks = asked is not None and not drops_kept and self._fitting is not None and cut.size > 1
        makes_room = asked is not None and not (drops_kept or shrinks) and _holds_memory(recordings)
        can_go_on = drops_kept or shrinks or makes_room
        status = Status.DONE if asked is None else Status.RAN_OUT if can_go_on else Status.TOO_LARGE
        statuses = abandoned or (self._vote(status) if cut.is_held else [status])
        if not any(statuses):
            return True
        engine.roll_back(mark)
        if before is not None:
            before.restore()
        if kept is not None:
            kept.drop()
            if drops_kept:
                kept.refuse(cut.size)
        if asked is not None and not (drops_kept or makes_room):
            self._learn(cut, asked)
        if recordings is not None:
            recordings.forget()
            if makes_room:
                recordings.refuse(NO_ROOM)
        release_cached_memory(engine.device)
        if Status.FAILED in statuses:
            raise BackendError(f"rank {statuses.index(Status.FAILED)} failed in this window: its own error says why.")
        if Status.TOO_LARGE in statuses:
            raise too_large_error(asked or f"what rank {statuses.index(Status.TOO_LARGE)} says")
        return False

    def agree(self) -> None:
        """Ask all ranks, between the two passes of a held window, whether one has failed; if so, leave the window."""
        statuses = self._vote(Status.DONE)
        if any(statuses):
            raise AbandonedError(statuses)

    def note_success(self, cut: Cut, kept: KeptGraphs | None) -> None:
        """Remember that this size fits, or that it barely does."""
        if self._fitting is None or self._pressure is None or not cut.parts:
            return
        barely = cut.size > 1 and self._pressure.has_risen()
        if barely and kept is not None and kept.has_kept:
            kept.refuse(cut.size)
            return
        note = self._sizes.note_failure if barely else self._sizes.note_success
        note(self._fitting.shape(cut.samples), cut.size)

    def _vote(self, status: Status) -> list[Status]:
        if status != Status.DONE:
            self._engine.catch_up()
        with self._engine.spans.of("communication"):
            return self._agreement.vote(status)

    def _learn(self, cut: Cut, asked: str) -> None:
        if self._fitting is None:
            return
        shape = self._fitting.shape(cut.samples)
        self._sizes.note_failure(shape, cut.size)
        if cut.size > 1:
            message = "out of memory with %d %s in a micro-batch (%s more was asked for): going on with %d"
            logger.warning(message, cut.size, self._fitting.unit, asked, self._sizes.proposal(shape))

    def _give_up(self, cut: Cut, mark: Mark, error: BaseException) -> None:
        """Drop the window after an error, and tell the other ranks, so that none of them waits for this one."""
        if cut.is_held and isinstance(error, Exception):
            self._vote(Status.FAILED)
        elif not self._agreement.is_alone and (note := collectives.abort_reason()) is not None:
            raise FitError(note) from error
        self._engine.roll_back(mark)

    def _end_job(self, cut: Cut, asked: str) -> NoReturn:
        """End the job, because other ranks wait in a collective. With a `fit_file`, the next job starts smaller."""
        self._learn(cut, asked)
        remembers = self._fitting is not None and self._sizes.file is not None
        unit = "samples" if self._fitting is None else self._fitting.unit
        how = ', with a smaller micro=, or with fit_file="...", which remembers sizes that did not fit.'
        why = (
            f"rank {dist.get_rank()} ran out of memory: {asked} more was asked for in a micro-batch of {cut.size} "
            f"{unit}. Other ranks were waiting for it in a collective, so this window cannot be done again. Start the "
            f"job again (torchrun --max-restarts does){': it will begin with smaller ones.' if remembers else how}"
        )
        collectives.abort_job(why)
        raise FitError(why)


def _holds_memory(recordings: Recordings | None) -> bool:
    return recordings is not None and recordings.has_recordings
