"""A micro-batch for ranks that have no samples for a window but must run one. It counts for nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from macrobatch._cut.plans import Part
from macrobatch._cut.samples import Samples
from macrobatch._cut.trees import copy_shared, map_tensors
from macrobatch._ranks.agreement import Agreement, Row
from macrobatch._step.engine import Engine
from macrobatch._torch.modules import BatchNorm


class Spare:
    """One small micro-batch, kept from an earlier window or received from another rank."""

    def __init__(self, engine: Engine, agreement: Agreement) -> None:
        self._engine = engine
        self._agreement = agreement
        self._micro_batch: Any = None

    @property
    def is_there(self) -> bool:
        """Whether this rank has a spare micro-batch."""
        return self._micro_batch is not None

    def copy(self) -> Any:
        """A copy, which a forward may change."""
        return map_tensors(self._micro_batch, Tensor.clone)

    def find(self, rows: list[Row], samples: Samples, parts: list[Part]) -> None:
        """Get a spare before a window in which every rank must run a micro-batch. All ranks call this together."""
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
