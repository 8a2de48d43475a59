"""Loaders: their length, and reading ahead: by one batch if the length is unknown, or by a window of batches."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from macrobatch._cut.trees import leaves
from macrobatch._torch.tensors import version_of
from macrobatch.errors import BatchError, UsageError

Batch = TypeVar("Batch")


class Epoch(Iterator[Batch]):
    """The batches of one pass over a loader. It has a length if the loader does, for progress bars."""

    def __init__(self, batches: Generator[Batch, None, None], length: int | None) -> None:
        self._batches = batches
        self._length = length

    def __iter__(self) -> Iterator[Batch]:
        # A loop over a closed one would end at once, as if the epoch had no batches.
        if inspect.getgeneratorstate(self._batches) == inspect.GEN_CLOSED:
            raise UsageError("this batches() is over: call acc.batches(loader) again for each epoch.")
        return self._batches

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader does not know its length")
        return self._length

    def close(self) -> None:
        """End the epoch early, as `break` does."""
        self._batches.close()


def require_iterable(loader: object) -> None:
    """Raise an error if this is not an iterable of batches."""
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not is_iterable or isinstance(loader, Mapping | str | bytes | type):
        raise UsageError(f"batches() needs a loader, i.e. an iterable of batches: got a {type(loader).__name__}.")


def length_of(loader: Iterable[Batch]) -> int | None:
    """The number of batches according to the loader; None if it does not know, or only estimates it."""
    if isinstance(loader, ReadAhead):
        return loader.length
    source: Any = loader
    while not isinstance(source, DataLoader) and hasattr(source, "iterable"):  # a progress bar, such as tqdm
        source = source.iterable
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return None  # its workers may yield more short batches, or fewer samples than the dataset says
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # usually a TypeError, but loaders report an unknown length in many ways
        return None


class ReadAhead(Iterator[Batch]):
    """An iterator that can read batches ahead, and keeps them until they are used."""

    def __init__(
        self, loader: Iterable[Batch], length: int | None = None, note: Callable[[Batch], Any] | None = None
    ) -> None:
        self.length = length  # the number of batches according to the loader; None if it does not know
        self.note: Any = None  # of the batch returned last
        self._iterator = iter(loader)
        self._take_note = note  # its result is remembered for each batch that is read
        self._ahead: deque[tuple[Batch, Any]] = deque()
        self._current: Batch | None = None  # the batch in use, while later ones are read
        self._is_first = True

    def reads(self, loader: Iterable[Batch]) -> bool:
        """Whether `loader` is the iterator that is read here, and not one that starts again each time."""
        return loader is self or loader is self._iterator

    def has_more(self) -> bool:
        """Whether another batch follows."""
        return bool(self._ahead) or self._read()

    def notes(self, count: int) -> list[Any]:
        """The notes of the next `count` batches, or of fewer if there are no more.

        An error if reading one batch overwrote another that is in use or not used yet.
        """
        while len(self._ahead) < count:
            before = _Contents(self._ahead[-1][0] if self._ahead else self._current, copies=self._is_first)
            self._is_first = False
            if not self._read():
                break
            before.require_same()
        return [note for _, note in list(self._ahead)[:count]]

    def _read(self) -> bool:
        for batch in self._iterator:
            self._ahead.append((batch, None if self._take_note is None else self._take_note(batch)))
            return True
        return False

    def __next__(self) -> Batch:
        if not self.has_more():
            raise StopIteration
        batch, self.note = self._ahead.popleft()
        self._current = batch if self._take_note is not None else None
        return batch


def with_remaining(loader: Iterable[Batch]) -> Iterator[tuple[Batch, int | None]]:
    """Each batch with the number of batches after it. None means an unknown number, but not 0."""
    length = length_of(loader)
    if length is None:
        yield from _with_lookahead(loader)
        return
    index = 0
    for index, batch in enumerate(loader, start=1):
        if index > length:
            require_length(length, index)
        yield batch, length - index
    require_length(length, index)


def require_length(length: int, found: int) -> None:
    """Raise an error if a loader that says this length has yielded another number of batches."""
    if found > length:
        raise BatchError(
            f"the loader says its length is {length}, but yields more batches. The window was closed at its end: "
            "correct the length, or pass iter(loader), which is read ahead instead."
        )
    if not length:
        raise BatchError("the loader is empty: there is no batch to train on (drop_last with too few samples?).")
    if found < length:
        raise BatchError(
            f"the loader says its length is {length}, but yielded {found} batches. Correct the length, or pass "
            "iter(loader), which is read ahead instead."
        )


def _with_lookahead(loader: Iterable[Batch]) -> Iterator[tuple[Batch, int | None]]:
    source = loader if isinstance(loader, ReadAhead) else ReadAhead(loader)
    if not source.has_more():
        raise BatchError("the loader is empty: there is no batch to train on.")
    is_first = True
    for batch in source:
        before = _Contents(batch, copies=is_first)
        has_more, is_first = source.has_more(), False
        before.require_same()
        yield batch, None if has_more else 0


class _Contents:
    """The tensors of a batch, to notice when the loader writes the next batch to the same memory.

    Version counters show the writes of torch. They do not show writes from outside of torch, e.g. to the numpy array
    behind a tensor. So the first batch of an epoch is compared with a copy, if it is on the host.
    """

    def __init__(self, batch: object, *, copies: bool) -> None:
        self._batch, self._leaves = batch, _leaves_of(batch)
        arrays = [leaf for leaf in self._leaves if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
        self._tensors = [leaf for leaf in arrays if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions = list(map(version_of, self._tensors))
        self._copies = [(leaf, copied) for leaf in arrays if copies and (copied := _copy_on_host(leaf)) is not None]

    def require_same(self) -> None:
        now = _leaves_of(self._batch)  # a dict may now hold other tensors
        is_same = len(now) == len(self._leaves) and all(map(operator.is_, now, self._leaves))
        if (
            is_same
            and self._versions == list(map(version_of, self._tensors))
            and all(_are_equal(leaf, before) for leaf, before in self._copies)
        ):
            return
        raise BatchError(
            "the loader writes every batch to the same memory, or to the same dict or list: reading one ahead, which "
            "shows where it ends, has overwritten the batch before. Let it yield new ones, e.g. batch.clone(), or give "
            "it a __len__, with which nothing is read ahead (but with counts=, which reads windows ahead)."
        )


def _leaves_of(batch: object) -> list[Any]:
    return [leaf for _, leaf in leaves(batch, "batch")]


def _copy_on_host(leaf: Any) -> Any:
    """A copy; None for what is not an array of numbers in the host's memory."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone() if leaf.device.type == "cpu" and leaf.layout == torch.strided else None
    return copy.deepcopy(leaf) if getattr(leaf.dtype, "kind", None) in tuple("biufc") else None


def _are_equal(leaf: Any, before: Any) -> bool:
    return bool(((leaf == before) | ((leaf != leaf) & (before != before))).all())
