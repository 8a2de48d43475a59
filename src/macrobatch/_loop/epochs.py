"""Iterate over data loaders, on one rank, or on several ranks whose loaders may have different lengths."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

from macrobatch._border import order
from macrobatch._checks.weights import EqualWeights
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import MicroPlan
from macrobatch._loop.lookahead import Epoch, ReadAhead, length_of, require_iterable
from macrobatch._loop.turns import negotiate_turns, plan_alone, plan_turns
from macrobatch._ranks.collectives import all_gather_numbers
from macrobatch._ranks.select import require_own_statistics
from macrobatch._terms.denominators import TermCounter
from macrobatch.errors import BackendError, BatchError, UsageError, warn
from macrobatch.types import Remainder

Batch = TypeVar("Batch")


class Epochs:
    """Drives an engine through loaders, one pass at a time."""

    def __init__(
        self, engine: Engine, remainder: Remainder, counter: TermCounter | None, weights: EqualWeights | None
    ) -> None:
        self._engine = engine
        self._remainder = remainder
        self._counter = (
            counter  # of the items of terms: with it windows are read ahead, as their denominators come first
        )
        self._weights = weights  # compares the sizes of micro-batches without items; None if checks are off
        self._told_of_nothing = False
        self._reader: ReadAhead[Any] | None = None  # of the current pass, where windows are read ahead
        self._current: object = None  # which pass is the current one
        self._stream: ReadAhead[Any] | None = None  # the last loader without a length, with what was read of it

    def begin(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Begin a pass over `loader`. The caller runs the backward and the step of each batch."""
        require_iterable(loader)
        order.require_new_epoch(self._engine.window)
        self._engine.give_up()
        self._current = object()
        if length_of(loader) is None or self._counter is not None:
            loader = self._read_ahead(loader)
        return Epoch(self._iterate(loader, self._current), self._num_batches(loader))

    def _iterate(self, loader: Iterable[Batch], epoch: object) -> Generator[Batch, None, None]:
        engine, closes_any = self._engine, False
        self._require_current(epoch)
        for batch, turn in self._turns(loader):
            if self._counter is not None and engine.open_window().awaits_denominators:
                self._count_window(turn.repeat)
            engine.begin(turn, batch)
            closes_any = closes_any or engine.is_last
            try:
                yield batch
            except GeneratorExit:
                if self._current is epoch:
                    self._note_size(batch)
                    engine.give_up()
                raise
            if self._current is not epoch:
                self._require_current(epoch)
            if (window := engine.window) is not None and (engine.is_last or window.plan is not None):
                if window.plan is not None and window.plan.may_lapse:  # it was left out after `discard`
                    engine.give_up()
                    engine.discard()
                    continue
                order.require_finished(window, engine.is_last)
            if engine.unread is not None:
                self._note_size(batch)
        self._current = self._reader = self._stream = None
        engine.end_epoch(drops=self._remainder == "drop")
        if self._remainder == "drop" and not closes_any:
            self._warn_of_nothing()

    def _note_size(self, batch: object) -> None:
        """Note the size of a batch after its backward, to warn if batches without items have different sizes."""
        unread = self._engine.unread
        if self._weights is not None and unread is not None and not self._engine.is_repeat:
            self._weights.note(batch, unread)

    def _warn_of_nothing(self) -> None:
        if not self._told_of_nothing:
            self._told_of_nothing = True
            warn(
                'this epoch took no step: it has fewer batches than a window (steps=), and remainder="drop" drops '
                'them. Use remainder="step", which is exact, or fewer steps (told once).'
            )

    def recount(self) -> None:
        """Count the items of the new window after one was dropped, if the current batch begins the new one."""
        if self._counter is not None and self._engine.num_begun:
            self._count_window(self._engine.is_repeat)

    def _count_window(self, is_repeat: bool) -> None:
        """Read the batches of the window that begins with the current one, and tell the engine its denominators."""
        assert self._counter is not None
        assert self._reader is not None
        more = self._engine.open_window().num_planned - 1
        counted = [] if is_repeat else [self._reader.note, *self._reader.notes(more)]
        self._counter.agree_on_names()
        self._engine.expect(self._counter.total(counted))

    def _require_current(self, epoch: object) -> None:
        if self._current is not epoch:
            raise UsageError("this batches() is over: another one was begun since. Iterate over the newest only.")

    def _num_batches(self, loader: Iterable[Batch]) -> int | None:
        """The number of this rank's batches that an epoch yields; None if it is not known."""
        length, steps = length_of(loader), self._engine.steps
        if length is None or self._remainder != "drop":
            return length
        return None if callable(steps) else length - (length + self._engine.num_begun) % steps

    def _read_ahead(self, loader: Iterable[Batch]) -> ReadAhead[Batch]:
        """A loader that is read ahead. If it continues an earlier pass, the batch read ahead then comes first."""
        note = None if self._counter is None else self._counter.count
        length = length_of(loader)
        if length is None and self._stream is not None and self._stream.reads(loader):
            self._reader = self._stream
        else:
            self._reader = ReadAhead(loader, length, note)
        if length is None:
            self._stream = self._reader
        return self._reader

    def _turns(self, loader: Iterable[Batch]) -> Iterator[tuple[Batch, MicroPlan]]:
        engine, longest = self._engine, None
        lockstep = engine.backend.abilities.lockstep
        engine.begin_epoch(may_repeat=False)
        if engine.backend.group is not None:
            lengths = self._exchange_lengths(loader)
            is_unknown = None in lengths
            may_repeat = is_unknown or lengths.count(lengths[0]) < len(lengths)
            engine.begin_epoch(may_repeat=may_repeat, others_go_on=is_unknown)
            if is_unknown:
                return negotiate_turns(loader, engine.open_window, lambda: engine.others_go_on, lockstep=lockstep)
            longest = max(length for length in lengths if length is not None)
        elif self._remainder == "step" and (length := length_of(loader)) is not None:
            return plan_alone(loader, length)
        return plan_turns(loader, longest, engine.open_window, remainder=self._remainder, lockstep=lockstep)

    def _exchange_lengths(self, loader: Iterable[Batch]) -> list[int | None]:
        """The lengths of the loaders of all ranks; None for those that do not know."""
        own = length_of(loader)
        if own is None:  # the other ranks must still know whether there is a first batch
            assert isinstance(loader, ReadAhead), "one that does not know its length is read ahead"
            own = -1 if loader.has_more() else 0
        everyone = [n for (n,) in all_gather_numbers([own], self._engine.backend.group, self._engine.device)]
        if 0 in everyone:
            empty = [rank for rank, length in enumerate(everyone) if length == 0]
            raise BatchError(f"the loaders of ranks {empty} are empty: every rank needs at least one batch.")
        lengths = [None if length == -1 else length for length in everyone]
        if None in lengths and self._remainder == "carry":
            raise BackendError('remainder="carry" on several ranks needs loaders that know their length.')
        if lengths.count(lengths[0]) < len(lengths) or None in lengths:
            require_own_statistics(
                self._engine.models,
                f"loaders of lengths {lengths}: a rank that has run out takes part with a repeated batch, which would "
                "change the others' statistics. Make the lengths equal.",
            )
        return lengths
