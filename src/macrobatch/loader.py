"""Which turns a rank takes in an epoch: its batches, where windows close, and what it does when it has run out.

A window is so many *slots* long, on all ranks alike. A rank that has no batch left for a slot skips it; but in each
window of each epoch it takes at least one turn, if need be with its last batch once more, because a forward and a
backward may hold something that all ranks do together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

from macrobatch.errors import BatchError
from macrobatch.window import Window

Batch = TypeVar("Batch")
Remainder = Literal["step", "drop", "carry"]


class Turn(NamedTuple):
    """One micro-batch of one rank.

    Attributes:
        last: whether it closes the window; None: the window's length decides.
        ends: whether it does so because the epoch ends, however short the window is.
        repeat: whether the batch was handed out before, and counts for nothing now.
        slots: how many slots of the window are past after it.
        flags: what the other ranks are told when it closes the window: 1.0 if this one has more batches after it, and
            1.0 if it had one for every slot.
    """

    last: bool | None = None
    ends: bool = False
    repeat: bool = False
    slots: int = 1
    flags: tuple[float, ...] = ()


IN_BETWEEN = Turn(last=False)


def length_of(loader: Iterable[Batch]) -> int | None:
    """How many batches a loader says it has; None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # also what a DataLoader over an iterable without a length says
        return None


def exchanged_lengths(
    loader: Iterable[Batch], gather: Callable[[int], list[int]]
) -> tuple[Iterable[Batch], list[int | None]]:
    """How long every rank's loader is, None for those that do not know; and the own loader, from its first batch on."""
    length = length_of(loader)
    if length is None:  # whether there is a first batch must be known all the same
        iterator = iter(loader)
        first = list(itertools.islice(iterator, 1))
        loader, length = itertools.chain(first, iterator), -1 if first else 0
    lengths = gather(length)
    if 0 in lengths:
        empty = [rank for rank, length in enumerate(lengths) if length == 0]
        raise BatchError(f"the loaders of ranks {empty} are empty: every rank needs at least one batch.")
    return loader, [None if length == -1 else length for length in lengths]


def counted_down(loader: Iterable[Batch]) -> Iterator[tuple[Batch, int | None]]:
    """Each batch with the number of those that follow it; None where that is only known not to be 0.

    >>> list(counted_down("abc"))
    [('a', 2), ('b', 1), ('c', 0)]
    >>> list(counted_down(iter("abc")))
    [('a', None), ('b', None), ('c', 0)]
    """
    length = length_of(loader)
    if length is None:
        yield from _looked_ahead(loader)
        return
    index = 0
    for index, batch in enumerate(loader, start=1):
        if index > length:
            raise BatchError(
                f"the loader says its length is {length}, but yields more batches. The window was closed at its end: "
                "correct the length, or hand over iter(loader), which is read ahead instead."
            )
        yield batch, length - index
    if not length:
        raise BatchError("the loader is empty: there is no batch to train on (drop_last with too few samples?).")
    if index < length:
        raise BatchError(
            f"the loader says its length is {length}, but yielded {index} batches. Correct the length, or hand over "
            "iter(loader), which is read ahead instead."
        )


def _looked_ahead(loader: Iterable[Batch]) -> Iterator[tuple[Batch, int | None]]:
    iterator = iter(loader)
    try:
        batch = next(iterator)
    except StopIteration:
        raise BatchError("the loader is empty: there is no batch to train on.") from None
    for following in iterator:
        yield batch, None
        batch = following
    yield batch, 0


def planned_turns(
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
    source = counted_down(loader)
    own = length_of(loader)
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
        yield fetched[0], Turn(last, last and part < room, mine < 1, slots)
    next(source, None)  # complains if there is more than the length said


def agreed_turns(
    loader: Iterable[Batch], window: Callable[[], Window], others_go_on: Callable[[], bool], *, lockstep: bool
) -> Iterator[tuple[Batch, Turn]]:
    """The turns of one of several ranks that do not know how many batches there are: flags tell the others.

    Args:
        loader: the rank's own.
        window: the open window, or a new one.
        others_go_on: whether, as of the last window closed, another rank has batches left.
        lockstep: whether all ranks take equally many turns.
    """
    source = counted_down(iter(loader))
    (batch, left), has_batch = next(source), True
    while has_batch or others_go_on():
        room = window().length - window().slots
        ends = has_batch and left == 0
        last = room == 1 or (not lockstep and (ends or not has_batch))
        more = has_batch and not ends
        complete = has_batch and room == 1
        flags = float(more), float(complete)
        yield batch, Turn(last, last and room > 1, not has_batch, room if last else 1, flags)
        if more:
            batch, left = next(source)
        has_batch = more
