"""Which turns a rank takes in an epoch: its batches, where windows close, and what it does when it has run out.

A window is so many *slots* long, on all ranks alike. A rank that has no batch left for a slot skips it; but in each
window of each epoch it takes at least one turn, if need be with its last batch once more, because a forward and a
backward may hold something that all ranks do together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from macrobatch._step.lookahead import ReadAhead, length_of, with_remaining
from macrobatch._step.totals import Window
from macrobatch.errors import BatchError
from macrobatch.types import Remainder

Batch = TypeVar("Batch")


class Turn(NamedTuple):
    """One micro-batch of one rank.

    Attributes:
        last: whether it closes the window; None: the window's length decides.
        ends: whether this rank's part of the epoch ends with it, so that it closes a window of any length.
        repeat: whether the batch was handed out before, and counts for nothing now.
        slots: how many slots of the window are past after it.
        is_told: whether the user has said so.
        flags: what the other ranks are told when it closes the window: 1.0 if this one has more batches after it, and
            1.0 if it had one for every slot.
    """

    last: bool | None = None
    ends: bool = False
    repeat: bool = False
    slots: int = 1
    flags: tuple[float, ...] = ()
    is_told: bool = False


PLAIN = Turn()
IN_BETWEEN = Turn(last=False)
LAST_OF_ALL = Turn(last=True, ends=True)


def exchange_lengths(loader: Iterable[Batch], gather: Callable[[int], list[int]]) -> list[int | None]:
    """How long every rank's loader is; None for those that do not know."""
    length = length_of(loader)
    if length is None:  # whether there is a first batch must be known all the same
        assert isinstance(loader, ReadAhead), "one that does not know its length is read ahead"
        length = -1 if loader.has_more() else 0
    lengths = gather(length)
    if 0 in lengths:
        empty = [rank for rank, length in enumerate(lengths) if length == 0]
        raise BatchError(f"the loaders of ranks {empty} are empty: every rank needs at least one batch.")
    return [None if length == -1 else length for length in lengths]


def plan_turns(
    loader: Iterable[Batch], longest: int | None, window: Callable[[], Window], *, remainder: Remainder, lockstep: bool
) -> Iterator[tuple[Batch, Turn]]:
    """The turns of a rank that knows how long the longest rank's loader is.

    Args:
        loader: the rank's own.
        longest: that length; None in one process, whose loader may have none.
        window: the open window, or a new one.
        remainder: what becomes of a short last window.
        lockstep: whether all ranks take equally many turns.
    """
    own = length_of(loader)
    if own is not None and longest is None and remainder == "step":
        yield from _plan_alone(loader)
        return
    source = with_remaining(loader)
    longest = own if longest is None else longest
    slot = 0
    fetched: tuple[Batch, int | None] | None = None
    while longest is None or slot < longest:
        current = window()
        room = current.length - current.slots
        if own is None:  # in one process: reading ahead tells where it ends
            fetched = next(source)
            longest = slot + 1 if fetched[1] == 0 else None
        part = room if longest is None else min(room, longest - slot)  # the slots from here on, in this epoch
        closes = part == room or remainder == "step"
        if remainder == "drop" and not closes:
            return
        mine = part if own is None else min(own - slot, part)  # how many of them this rank has batches for
        last = closes and (part == 1 if lockstep else mine <= 1)
        if own is not None and mine >= 1:
            fetched = next(source)
        assert fetched is not None, "a rank has at least one batch"
        if not last and mine >= 1:
            slot += 1
            yield fetched[0], IN_BETWEEN
            continue
        slots = part if last or not lockstep else 1
        slot += slots
        yield fetched[0], Turn(last, last and slot == longest and remainder == "step", mine < 1, slots)
    next(source, None)  # complains if there is more than the length said


def _plan_alone(loader: Iterable[Batch]) -> Iterator[tuple[Batch, Turn]]:
    """In one process, where a short last window is closed: the window's length decides, or the end of the loader."""
    for batch, left in with_remaining(loader):
        yield batch, LAST_OF_ALL if left == 0 else PLAIN


def negotiate_turns(
    loader: Iterable[Batch], window: Callable[[], Window], others_go_on: Callable[[], bool], *, lockstep: bool
) -> Iterator[tuple[Batch, Turn]]:
    """The turns of one of several ranks that do not know how many batches there are: flags tell the others.

    Args:
        loader: the rank's own.
        window: the open window, or a new one.
        others_go_on: whether, as of the last window closed, another rank has batches left.
        lockstep: whether all ranks take equally many turns.
    """
    source = with_remaining(loader if isinstance(loader, ReadAhead) else iter(loader))
    (batch, left), has_batch = next(source), True
    while has_batch or others_go_on():
        room = window().length - window().slots
        ends = has_batch and left == 0
        last = room == 1 or (not lockstep and (ends or not has_batch))
        more = has_batch and not ends
        complete = has_batch and room == 1
        flags = float(more), float(complete)
        yield batch, Turn(last, ends and not lockstep, not has_batch, room if last else 1, flags)
        if more:
            batch, left = next(source)
        has_batch = more
