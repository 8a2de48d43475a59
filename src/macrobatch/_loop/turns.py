"""Plans the micro-batches of a rank in an epoch: which of them close windows, and which repeat a batch.

A window has a planned number of micro-batches, the same on all ranks. A rank that has no batch left for one of them
skips it. But it takes part at least once in each window of each epoch, if necessary with its last batch again. The
reason is that a forward and a backward may contain operations that all ranks must run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from macrobatch._engine.totals import IN_BETWEEN, LAST_OF_ALL, MicroPlan
from macrobatch._engine.window import Window
from macrobatch._loop.lookahead import ReadAhead, length_of, require_length, with_remaining
from macrobatch.types import Remainder

Batch = TypeVar("Batch")
PLAIN = MicroPlan()


def plan_turns(
    loader: Iterable[Batch], longest: int | None, window: Callable[[], Window], *, remainder: Remainder, lockstep: bool
) -> Iterator[tuple[Batch, MicroPlan]]:
    """The turns of a rank that knows how long the longest loader of all ranks is.

    `longest` is None in one process, whose loader may have no length. With `lockstep`, all ranks take equally many.
    """
    own = length_of(loader)
    source = with_remaining(loader)
    longest = own if longest is None else longest
    slot = 0
    fetched: tuple[Batch, int | None] | None = None
    while longest is None or slot < longest:
        current = window()
        room = current.num_planned - current.num_begun
        if own is None:  # in one process: reading ahead shows the last batch
            fetched = next(source)
            longest = slot + 1 if fetched[1] == 0 else None
        part = room if longest is None else min(room, longest - slot)  # the remaining slots of the window in this epoch
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
        yield fetched[0], MicroPlan(last, last and slot == longest and remainder == "step", mine < 1, slots)
    next(source, None)  # raises an error if there are more batches than the length said


def plan_alone(loader: Iterable[Batch], length: int) -> Iterator[tuple[Batch, MicroPlan]]:
    """In one process with `remainder="step"`: windows close at their length, or at the end of the loader."""
    index = 0
    for batch in loader:
        index += 1
        if index > length:
            require_length(length, index)
        yield batch, PLAIN if index < length else LAST_OF_ALL
    require_length(length, index)


def negotiate_turns(
    loader: Iterable[Batch], window: Callable[[], Window], others_go_on: Callable[[], bool], *, lockstep: bool
) -> Iterator[tuple[Batch, MicroPlan]]:
    """The turns of one of several ranks that do not know the number of batches. Flags tell the other ranks.

    `others_go_on` says whether another rank had batches left when the last window closed.
    """
    source = with_remaining(loader if isinstance(loader, ReadAhead) else iter(loader))
    (batch, left), has_batch = next(source), True
    while has_batch or others_go_on():
        room = window().num_planned - window().num_begun
        ends = has_batch and left == 0
        last = room == 1 or (not lockstep and (ends or not has_batch))
        more = has_batch and not ends
        complete = has_batch and room == 1
        yield batch, MicroPlan(last, ends and not lockstep, not has_batch, room if last else 1, more, complete)
        if more:
            batch, left = next(source)
        has_batch = more
