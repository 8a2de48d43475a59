"""Takes the micro-batches of a cut, and moves them to the device ahead of their turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from macrobatch._batch.cutting import PlaceholderBatch
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import Cut
from macrobatch._cut.prefetch import Prefetcher
from macrobatch._cut.trees import copy_shared
from macrobatch._engine.engine import Engine

MicroBatch = tuple[Any, int]  # with its number of samples


class Feed:
    """Takes micro-batches for one or two passes over a batch."""

    def __init__(self, engine: Engine, placeholder: PlaceholderBatch, *, collates: bool) -> None:
        self._engine = engine
        self._placeholder = placeholder
        self._collates = collates
        self._prefetcher = Prefetcher()

    def one_pass(self, cut: Cut) -> Iterator[MicroBatch]:
        """The micro-batch of each turn."""
        return self._each([partial(self._take, cut, part) for part in cut.part_per_turn()])

    def two_passes(self, cut: Cut) -> Callable[[Sequence[Part | None]], Iterable[MicroBatch]]:
        """A function that yields the micro-batches of given parts, for each pass. `collate` is called once for each.

        They are copies, so that `loss_fn` can change them in place without changing the batch, or the other pass.
        """
        taken: dict[int, MicroBatch] = {}

        def take(part: Part | None) -> MicroBatch:
            if not self._collates or part is None:
                return self._take(cut, part)
            if id(part) not in taken:
                taken[id(part)] = self._take(cut, part)
            return taken[id(part)]

        def shares_memory(tensor: Tensor) -> bool:
            return self._collates or cut.samples.shares_memory(tensor)

        def micro_batches(parts: Sequence[Part | None]) -> Iterator[MicroBatch]:
            for micro_batch, samples in self._each([partial(take, part) for part in parts]):
                yield copy_shared(micro_batch, shares_memory), samples

        return micro_batches

    def coming(self, cut: Cut) -> list[tuple[Hashable, Callable[[], MicroBatch]]]:
        """For each micro-batch: the key that identifies its shape, and a function that returns it before its turn."""
        takes = [partial(self._take, cut, part) for part in cut.parts]
        one, device = self._prefetcher.one, self._engine.device
        return [(part.key, partial(one, take, device)) for part, take in zip(cut.parts, takes, strict=True)]

    def _each(self, takes: Sequence[Callable[[], MicroBatch]]) -> Iterator[MicroBatch]:
        return self._prefetcher.each(takes, self._engine.device)

    def _take(self, cut: Cut, part: Part | None) -> MicroBatch:
        """A micro-batch. If `part` is None, it is a copy of the placeholder."""
        with self._engine.spans.of("data"):
            if part is None:
                return self._placeholder.copy(), 1
            return cut.samples.take(part), len(part.samples)
