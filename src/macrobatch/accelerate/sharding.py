"""Which samples each process gets: plans over indices, and datasets that hand out one process's share.

All of them cut a stream into *rounds*, in which every process has one batch. Only the last round can be short. It is
dropped, or handed out as it is, or filled up with samples from the start, so that all processes have equally many
batches of one size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from macrobatch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Share:
    """One process's part of the data.

    Attributes:
        rank: which process.
        world: of how many.
        split: whether a round is one batch of the loader, cut into parts; else it is one batch for each process.
        even: whether a short last round is filled up.
    """

    rank: int = 0
    world: int = 1
    split: bool = False
    even: bool = True

    def batch_sizes(self, batch_size: int) -> tuple[int, int]:
        """How many samples one process has in a round, and all of them together."""
        if not self.split:
            return batch_size, batch_size * self.world
        if batch_size % self.world:
            raise UsageError(
                f"split_batches cuts every batch into {self.world} equal parts, but the batch size is {batch_size}. "
                "Choose a multiple of the number of processes, or leave split_batches out."
            )
        return batch_size // self.world, batch_size


def whole_rounds(
    batches: Iterable[Sequence[int]], batch_size: int, share: Share, *, drop_last: bool
) -> Iterator[list[int]]:
    """The batches of one process, from those of a sampler whose batches are all of one size, but for the last.

    >>> batches = [[0, 1], [2, 3], [4]]
    >>> [list(whole_rounds(batches, 2, Share(rank=rank, world=2), drop_last=False)) for rank in (0, 1)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    >>> [list(whole_rounds(batches, 2, Share(rank=rank, world=2, split=True), drop_last=False)) for rank in (0, 1)]
    [[[0], [2], [4]], [[1], [3], [0]]]
    """
    size, all_sizes = share.batch_sizes(batch_size)
    own = slice(share.rank * size, (share.rank + 1) * size)
    first: list[int] = []
    iterator = iter(batches)
    while found := list(itertools.islice(iterator, 1 if share.split else share.world)):
        complete = len(found) == (1 if share.split else share.world) and len(found[-1]) == batch_size
        if complete and not share.split:
            part = list(found[share.rank])
        elif complete:
            part = list(found[0][own])
        elif drop_last:
            return
        else:
            together = list(itertools.chain(*found))
            if share.even:
                missing = max(all_sizes - len(together), 0)
                together += itertools.islice(itertools.cycle(first or list(together)), missing)
            part = together[own]
        first = first or list(itertools.chain(*found))
        if part:
            yield part


def dynamic_rounds(batches: Iterable[Sequence[int]], share: Share, *, drop_last: bool) -> Iterator[list[int]]:
    """The same for a sampler whose batches have any size: a short last round is filled up with whole batches."""
    first: list[Sequence[int]] = []
    iterator = iter(batches)
    while found := list(itertools.islice(iterator, share.world)):
        first = first or list(found)
        if len(found) < share.world:
            if drop_last:
                return
            if share.even:
                found += itertools.islice(itertools.cycle(first), share.world - len(found))
        if share.rank < len(found):
            yield list(found[share.rank])


class BatchSamplerShard(BatchSampler):
    """One process's part of the batches of a sampler."""

    def __init__(self, batch_sampler: Any, share: Share) -> None:
        self.batch_sampler = batch_sampler
        self.share = share
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        if self.batch_size is not None:
            share.batch_sizes(self.batch_size)
        elif share.split:
            raise UsageError("split_batches needs a batch sampler with a batch_size: this one has none.")

    def __iter__(self) -> Iterator[list[int]]:
        if self.batch_size is None:
            return dynamic_rounds(self.batch_sampler, self.share, drop_last=self.drop_last)
        return whole_rounds(self.batch_sampler, self.batch_size, self.share, drop_last=self.drop_last)

    def __len__(self) -> int:
        length, world = len(self.batch_sampler), self.share.world
        if self.share.split:
            if self.drop_last or self.share.even:
                return length
            return length - self._misses_the_last()
        if self.drop_last:
            return length // world
        if self.share.even:
            return math.ceil(length / world)
        return length // world + (self.share.rank < length % world)

    def _misses_the_last(self) -> bool:
        """Whether a split last batch is too small for this process to get a part of it."""
        try:
            left = len(self.sampler) % self.batch_size  # type: ignore[arg-type]
        except TypeError:  # what has no length
            return False
        return bool(left) and left <= self.share.rank * (self.batch_size // self.share.world)


class IterableDatasetShard(IterableDataset[Any]):
    """One process's part of the samples of an iterable dataset, a short last round filled up or dropped."""

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, share: Share, *, drop_last: bool) -> None:
        self.dataset = dataset
        self.drop_last = drop_last
        self.epoch = 0
        self._share = share
        self._size, self._all_sizes = share.batch_sizes(batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        own = slice(self._share.rank * self._size, (self._share.rank + 1) * self._size)
        first: list[Any] = []
        iterator = iter(self.dataset)
        while found := list(itertools.islice(iterator, self._all_sizes)):
            first = first or found
            if len(found) < self._all_sizes:
                if self.drop_last:
                    return
                found = [*found, *itertools.islice(itertools.cycle(first), self._all_sizes - len(found))]
            yield from found[own]

    def __len__(self) -> int:
        rounds = len(self.dataset) / self._all_sizes  # type: ignore[arg-type]
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self._size


class SeededSampler(RandomSampler):
    """Shuffles by a seed and the number of the epoch: the same order wherever an epoch begins."""

    def __init__(self, sampler: RandomSampler, seed: int | None) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples, torch.Generator())
        self.seed = torch.random.initial_seed() if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


class SkippingSampler(Sampler[list[int]]):
    """The batches of a sampler from the one numbered `skipped` on."""

    def __init__(self, batch_sampler: Any, skipped: int) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self.skipped = skipped

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skipped, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skipped, 0)
