"""Where a loader ends, known before its last batch is handed out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from macrobatch.errors import BatchError

Batch = TypeVar("Batch")


def counted_down(loader: Iterable[Batch]) -> Iterator[tuple[Batch, int | None]]:
    """Each batch with the number of those that follow it; None where that is only known not to be 0.

    >>> list(counted_down("abc"))
    [('a', 2), ('b', 1), ('c', 0)]
    >>> list(counted_down(iter("abc")))
    [('a', None), ('b', None), ('c', 0)]
    """
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:  # also what a DataLoader over an iterable without a length says
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
    if index < length or not length:
        raise BatchError(
            f"the loader says its length is {length}, but yielded {index} batches. Correct the length, or hand over "
            "iter(loader), which is read ahead instead."
            if length
            else "the loader is empty: there is no batch to train on (drop_last with fewer samples than a batch?)."
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
