"""Prepared loaders: they hand out one process's batches, on its device, and say which one is the last."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from macrobatch._cut.trees import leaves, map_tensors
from macrobatch.accelerate.settings import DataLoaderConfiguration
from macrobatch.accelerate.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeededSampler,
    Share,
    SkippingSampler,
)
from macrobatch.accelerate.state import GradientState
from macrobatch.errors import BatchError, UsageError

CARRIED = (  # arguments of a DataLoader that say nothing about which samples are in a batch
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class PreparedLoader(DataLoader[Any]):
    """A loader that reads one batch ahead, so that `GradientState` knows when it has handed out its last.

    Attributes:
        end_of_dataloader: whether the batch handed out is the last.
        remainder: how many samples of the last round are no repetitions; 0: all, -1: not known.
        iteration: how many times it was read to its end; samplers and datasets are told, if they have a `set_epoch`.
        total_batch_size: samples in a round, over all processes.
    """

    end_of_dataloader = False
    remainder = -1
    iteration = 0
    skipped = 0  # how many batches to leave out at the start, of those that a sampler cannot leave out
    device: torch.device | None
    non_blocking: bool
    shuffling: torch.Generator | None  # what the sampler draws from, the same on all processes
    total_batch_size: int
    total_dataset_length: int | None
    sheds_last: bool  # whether a short last round is dropped

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.shuffling is not None:
            synchronise(self.shuffling)
        state = GradientState()
        self.end_of_dataloader, self.remainder = False, self._remainder()
        iteration = state._begin(self)
        try:
            self.set_epoch(self.iteration)
            yield from self._batches()
            self.iteration += 1
        finally:
            state._end(iteration)

    def _batches(self) -> Iterator[Any]:
        iterator = super().__iter__()
        for _ in range(self.skipped):
            next(iterator, None)
        try:
            batch = self._placed(next(iterator))
        except StopIteration:
            return
        for following in iterator:
            yield batch
            batch = self._placed(following)
        self.end_of_dataloader = True
        yield batch

    def _placed(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        if callable(to := getattr(batch, "to", None)):  # a tensor, or what transformers collates
            try:
                return to(self.device, non_blocking=self.non_blocking)
            except TypeError:
                return to(self.device)
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=self.non_blocking))

    def _remainder(self) -> int:
        if self.sheds_last or self.total_dataset_length is None:
            return -1
        return self.total_dataset_length % self.total_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the dataset which epoch it is."""
        self.iteration = epoch
        told: Any = self.batch_sampler
        while told is not None:
            if hasattr(told, "set_epoch"):
                told.set_epoch(epoch)
            told = getattr(told, "batch_sampler", None) or getattr(told, "sampler", None)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class Sent(NamedTuple):
    """What process 0 sends to another one: a batch, or why there is none."""

    batch: Any = None
    is_last: bool = True
    remainder: int = -1
    is_empty: bool = False
    error: str | None = None


class DispatchedLoader(PreparedLoader):
    """Only process 0 reads; the others are sent their parts. Where a last round cannot be divided, it is filled up."""

    share: Share

    def _batches(self) -> Iterator[Any]:
        rounds = self._rounds() if self.share.rank == 0 else None
        turn = 0
        while True:
            sent = self._receive(rounds)
            if sent.error is not None:
                raise BatchError(f"process 0 could not read the next batch: {sent.error}")
            if sent.is_empty:
                return
            if sent.is_last:
                self.end_of_dataloader, self.remainder = True, sent.remainder
            if turn >= self.skipped:
                yield self._placed(sent.batch)
            turn += 1
            if sent.is_last:
                return

    def _receive(self, rounds: Iterator[list[Sent]] | None) -> Sent:
        """This process's part of the next round. An error of process 0 reaches all: else they would wait for it."""
        box: list[Any] = [None]
        if rounds is None:
            dist.scatter_object_list(box, None, src=0)
        else:
            failed = None
            try:
                sent = next(rounds)
            except Exception as error:
                failed, sent = error, [Sent(error=f"{type(error).__name__}: {error}")] * self.share.world
            dist.scatter_object_list(box, sent, src=0)
            if failed is not None:
                raise failed
        received: Sent = box[0]
        return received

    def _rounds(self) -> Iterator[list[Sent]]:
        """On process 0: for each round, what every process gets."""
        first = None
        whole = self._whole_rounds()
        together = next(whole, None)
        if together is None:
            yield [Sent(is_empty=True)] * self.share.world
        while together is not None:
            following = next(whole, None)
            world, samples = self.share.world, _samples(together)
            first = together if first is None else first
            size = samples // world
            if samples % world and not self.sheds_last:
                size += 1
                together = _concatenated([together, _from_the_start(first, size * world - samples)])
            parts = [_part(together, rank * size, (rank + 1) * size) for rank in range(world)]
            yield [Sent(part, following is None, samples) for part in parts]
            together = following

    def _whole_rounds(self) -> Iterator[Any]:
        """The batches that make a round, as one."""
        collected: list[Any] = []
        for batch in DataLoader.__iter__(self):
            collected.append(map_tensors(batch, lambda tensor: tensor.cpu()))
            if len(collected) == (1 if self.share.split else self.share.world):
                yield _concatenated(collected)
                collected = []
        if collected and not self.sheds_last:
            yield _concatenated(collected)

    def __len__(self) -> int:
        length = super().__len__()
        if self.share.split:
            return length
        return length // self.share.world if self.sheds_last else math.ceil(length / self.share.world)


def _tensors(batch: Any) -> list[Tensor]:
    found = [leaf for _, leaf in leaves(batch, "batch")]
    for path, leaf in leaves(batch, "batch"):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise BatchError(
                f"dispatch_batches sends tensors with a first dimension: {path} is {type(leaf).__name__}. Leave it out "
                "of the batch, or set dispatch_batches=False, so that every process reads for itself."
            )
    return found


def _samples(batch: Any) -> int:
    return len(_tensors(batch)[0])


def _part(batch: Any, begin: int, end: int) -> Any:
    return map_tensors(batch, lambda tensor: tensor[begin:end].clone())


def _from_the_start(batch: Any, samples: int) -> Any:
    """So many of its samples, from the first on, and again where there are not enough."""
    which = torch.arange(samples) % _samples(batch)
    return map_tensors(batch, lambda tensor: tensor[which])


def _concatenated(batches: list[Any]) -> Any:
    """One batch of several."""
    if len(batches) == 1:
        return batches[0]
    columns = iter(zip(*map(_tensors, batches), strict=True))
    try:
        return map_tensors(batches[0], lambda _: torch.cat(next(columns)))
    except RuntimeError as error:
        raise BatchError(
            f"batches of different shapes cannot be sent as one: {error}. Pad them alike, or set split_batches=True, "
            "or dispatch_batches=False, so that every process reads for itself."
        ) from error


def synchronise(generator: torch.Generator) -> None:
    """Let a generator go on from where that of process 0 is."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        state = [generator.get_state() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(state, src=0)
        assert state[0] is not None
        generator.set_state(state[0])


# ---------------------------------------------------------------------------------------------- preparing


def prepared(
    loader: DataLoader[Any], share: Share, settings: DataLoaderConfiguration, device: torch.device | None
) -> PreparedLoader:
    """A loader like the given one, for one process.

    Args:
        loader: as a program of one process would use it.
        share: which part of it this process gets.
        settings: how it is shared out.
        device: where batches go; None: they stay where they are.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    batch_sampler = _batch_sampler(loader)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    batch_size = loader.batch_size if is_iterable else getattr(batch_sampler, "batch_size", None)
    dispatches = is_iterable and device is not None if settings.dispatch_batches is None else settings.dispatch_batches
    shuffling = None
    if settings.use_seedable_sampler and isinstance(sampler := getattr(batch_sampler, "sampler", None), RandomSampler):
        batch_sampler.sampler = SeededSampler(sampler, settings.data_seed)
    elif share.world > 1 and not dispatches:
        shuffling = _shuffling_generator(loader, batch_sampler)

    if share.world == 1:
        made = _like(PreparedLoader, loader, batch_sampler)
    elif dispatches:
        made = _dispatched(loader, batch_sampler, batch_size, share)
    else:
        made = _sharded(loader, batch_sampler, batch_size, share)

    made.device, made.non_blocking, made.shuffling = device, settings.non_blocking, shuffling
    made.sheds_last = loader.drop_last or bool(getattr(batch_sampler, "drop_last", False))
    made.total_batch_size = 1 if batch_size is None else share.batch_sizes(batch_size)[1]
    made.total_dataset_length = None
    if batch_size is not None:
        with contextlib.suppress(TypeError):  # what has no length
            made.total_dataset_length = len(loader.dataset)  # type: ignore[arg-type]
    return made


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """The same loader without its first batches, e.g. those of a run that goes on; for one epoch."""
    if not isinstance(loader, PreparedLoader):
        raise UsageError("skip_first_batches() wants a prepared loader: hand it to accelerator.prepare() first.")
    batch_sampler = _batch_sampler(loader)
    skips = batch_sampler is not None and not isinstance(loader, DispatchedLoader)
    made = _like(type(loader), loader, SkippingSampler(batch_sampler, num_batches) if skips else batch_sampler)
    for name in (*PreparedLoader.__annotations__, "iteration", "share"):
        if hasattr(loader, name):
            setattr(made, name, getattr(loader, name))
    made.skipped = 0 if skips else loader.skipped + num_batches
    return made


def _dispatched(loader: DataLoader[Any], batch_sampler: Any, batch_size: int | None, share: Share) -> PreparedLoader:
    if share.split:
        _require_size(batch_size, share)
    made = _like(DispatchedLoader, loader, batch_sampler)
    made.share = share
    return made


def _sharded(loader: DataLoader[Any], batch_sampler: Any, batch_size: int | None, share: Share) -> PreparedLoader:
    if not isinstance(loader.dataset, IterableDataset):
        if batch_sampler is None:
            raise UsageError(
                "a loader with batch_size=None hands out samples as they are, which cannot be shared out among "
                "processes evenly. Give it a batch_size or a batch_sampler."
            )
        return _like(PreparedLoader, loader, BatchSamplerShard(batch_sampler, share))
    size, _ = _require_size(batch_size, share)
    assert batch_size is not None
    shard = IterableDatasetShard(loader.dataset, batch_size, share, drop_last=loader.drop_last)
    return PreparedLoader(shard, batch_size=size, drop_last=loader.drop_last, **_carried(loader))


def _require_size(batch_size: int | None, share: Share) -> tuple[int, int]:
    if batch_size is None:
        raise UsageError(
            "a loader whose batches have no fixed batch_size cannot be cut into equal parts: give it one, or let "
            "process 0 read whole batches for all with dispatch_batches=True and split_batches=False."
        )
    return share.batch_sizes(batch_size)


Made = TypeVar("Made", bound=PreparedLoader)


def _like(kind: type[Made], loader: DataLoader[Any], batch_sampler: Any) -> Made:
    """A loader that reads the same dataset in the same way, by this sampler."""
    if isinstance(loader.dataset, IterableDataset):
        which: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif isinstance(loader.sampler, BatchSampler):
        which = {"sampler": batch_sampler, "batch_size": None}
    elif batch_sampler is not None:
        which = {"batch_sampler": batch_sampler}
    else:
        which = {"sampler": loader.sampler, "batch_size": None}
    return kind(loader.dataset, **which, **_carried(loader))


def _carried(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in CARRIED}


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """What makes batches of indices: the loader's own, or one that it was given as its sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _shuffling_generator(loader: DataLoader[Any], batch_sampler: Any) -> torch.Generator | None:
    """What the samples are drawn with, to be kept in step on all processes; None where nothing is drawn."""
    owner: Any = loader.dataset if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    if not hasattr(owner, "generator"):
        return None
    if owner.generator is None and batch_sampler is not None:
        owner.generator = torch.Generator()
        owner.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    found: torch.Generator | None = owner.generator
    return found
