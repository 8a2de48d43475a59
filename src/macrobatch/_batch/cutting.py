"""Cut each batch into micro-batches, in a way that all ranks agree on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from macrobatch._cut.fitting import Fitting, FittingCount, FittingTokens, Sized
from macrobatch._cut.memory import UNLIMITED, FittingSizes
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import ByCount, ByTokens, Cut, Policy, require_each_once
from macrobatch._cut.samples import Collate, Samples, samples_of
from macrobatch._cut.trees import copy_shared, map_tensors
from macrobatch._engine.engine import Engine
from macrobatch._ranks.agreement import Agreement, Row
from macrobatch._ranks.select import require_own_statistics
from macrobatch._terms.denominators import BatchTerms
from macrobatch._torch.modules import BatchNorm
from macrobatch.errors import BatchError


class Cutter:
    """Cuts batches into micro-batches."""

    def __init__(
        self,
        engine: Engine,
        micro: Policy | FittingCount | FittingTokens,
        collate: Collate | None,
        sizes: FittingSizes,
        *,
        records: bool,  # whether micro-batches are recorded, so that few shapes help
        has_passes: bool,  # whether each window has two passes
    ) -> None:
        self._engine = engine
        self._micro = micro
        self._collate = collate
        self._sizes = sizes
        self._records = records
        self._holds = records or has_passes
        self._agreement = Agreement(engine.backend)
        self._containers: set[str] = set()  # the paths of lists in batches that have no entry for each sample
        self.placeholder = PlaceholderBatch(engine, self._agreement)

    @property
    def fitting(self) -> Fitting | None:
        """The way to cut the batch if the size of micro-batches is found by trying; otherwise None."""
        return self._micro if isinstance(self._micro, FittingCount | FittingTokens) else None

    @property
    def has_few_shapes(self) -> bool:
        """Whether recorded micro-batches are cut so that there are few different shapes."""
        return isinstance(self._micro, ByTokens | FittingTokens)

    def cut(self, batch: Any, terms: BatchTerms | None) -> Cut:
        """Cut a batch, as agreed with the other ranks, and count its terms."""
        try:
            samples = samples_of(batch, self._collate, self._containers)
            (parts, size), row = self._plan(samples)
            if samples.count and terms is not None:
                terms.count(batch)
        except Exception:
            self._exchange(Row(failed=1))
            raise
        rows = self._exchange(row)
        if any(row.failed for row in rows):
            ranks = [rank for rank, row in enumerate(rows) if row.failed]
            raise BatchError(f"the batch of rank {ranks[0]} cannot be cut; its own error says why. No step was taken.")
        least = min(row.proposed for row in rows)
        if any(row.size > least for row in rows):  # all cut alike: by what fits on every rank
            (parts, size), row = self._plan(samples, least)
            rows = self._exchange(row)
        counts = [row.parts for row in rows]
        abilities = self._engine.backend.abilities
        is_new_size = self.fitting is not None and any(row.size > row.proven for row in rows)
        held = self._holds or is_new_size or (0 in counts and not abilities.needs_every_rank)
        held = held and not self._agreement.is_alone and abilities.can_hold
        if held or counts.count(counts[0]) < len(counts):
            require_own_statistics(
                self._engine.models,
                f"{counts} micro-batches on the ranks: all would have to take turns together, and succeed together. "
                "Give every rank equally many samples, and micro= a number.",
            )
        turns = max(counts) if abilities.lockstep and not held else max(len(parts), abilities.needs_every_rank)
        self.placeholder.find(rows, samples, parts)
        self._engine.begin_epoch(may_repeat=counts.count(counts[0]) < len(counts), steps=max(*counts, 1))
        return Cut(samples, parts, turns, held, is_empty=not any(counts), size=size)

    def _plan(self, samples: Samples, most: int = UNLIMITED) -> tuple[Sized, Row]:
        """The micro-batches of this rank and the row it sends to the others. `most` limits a size found by trying."""
        few_shapes, has_spare = self._records, samples.count > 0 or self.placeholder.is_there
        if not samples.count:
            return Sized([], 0), Row(has_spare=has_spare)
        if isinstance(self._micro, FittingCount | FittingTokens):
            shape = self._micro.shape(samples)
            proposed = min(self._sizes.proposal(shape), most)
            cut = self._micro.cut(samples, proposed, few_shapes=few_shapes)
            proven = self._sizes.proven_size(shape)
            return cut, Row(samples.count, len(cut.parts), cut.size, proposed, proven, has_spare)
        parts = self._micro.parts(samples, few_shapes=few_shapes)
        if not isinstance(self._micro, ByCount | ByTokens):
            require_each_once(parts, samples.count)
        size = max(len(part.samples) for part in parts)
        return Sized(parts, size), Row(samples.count, len(parts), has_spare=has_spare)

    def _exchange(self, row: Row) -> list[Row]:
        with self._engine.spans.of("communication"):
            return self._agreement.exchange(row)


class PlaceholderBatch:
    """A small micro-batch for ranks that have no samples for a window but must run one. It counts for nothing.

    It is kept from an earlier window, or received from another rank.
    """

    def __init__(self, engine: Engine, agreement: Agreement) -> None:
        self._engine = engine
        self._agreement = agreement
        self._micro_batch: Any = None

    @property
    def is_there(self) -> bool:
        """Whether this rank has one."""
        return self._micro_batch is not None

    def copy(self) -> Any:
        """A copy, which a forward may change."""
        return map_tensors(self._micro_batch, Tensor.clone)

    def find(self, rows: list[Row], samples: Samples, parts: list[Part]) -> None:
        """Get one before a window in which every rank must run a micro-batch. All ranks call this together."""
        if not self._engine.backend.abilities.needs_every_rank or not any(row.samples for row in rows):
            return
        if self._micro_batch is None and parts:
            part = parts[-1]._replace(samples=parts[-1].samples[: self._smallest])
            self._micro_batch = copy_shared(samples.take(part), lambda _: True)  # a view would keep the whole batch
        if all(row.has_spare for row in rows):
            return
        source = next(rank for rank, row in enumerate(rows) if row.samples)
        sent = self._agreement.broadcast(map_tensors(self._micro_batch, Tensor.cpu), source)
        if self._micro_batch is None:
            self._micro_batch = map_tensors(sent, lambda tensor: tensor.to(self._engine.device))

    @property
    def _smallest(self) -> int:
        """The number of samples that a forward needs: batch normalisation needs two for a variance."""
        modules = (module for model in self._engine.models for module in model.modules())
        return 2 if any(isinstance(module, BatchNorm) and module.training for module in modules) else 1
