"""The backend for FullyShardedDataParallel, the first generation of FSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.backend import Abilities, Local, closed_early
from macrobatch._ranks.collectives import Group
from macrobatch._torch import fsdp1 as fsdp
from macrobatch.errors import BackendError
from macrobatch.types import When


class FSDP1(Local):
    """FullyShardedDataParallel. Its `no_sync` holds unsharded gradients until the last micro-batch."""

    abilities = Abilities(
        lockstep=True,  # parameters are gathered for every micro-batch
        leaves_are_parameters=False,  # torch forbids it here
        shows_views=True,
        can_hold=False,
        needs_every_rank=True,
        can_skip=False,
        can_record=False,
    )

    def __init__(self, models: Sequence[Any], *, sync: When, group: Group) -> None:
        self._models = models
        self._micro = sync == "micro"
        self._flags = contextlib.ExitStack()
        self._synced = False
        self.group = group
        if models[0].sharding_strategy.name != "NO_SHARD":
            self.shards = (models[0].process_group,)
        if any(fsdp.flattens_dtensors(module) for model in models for module in model.modules()):
            raise BackendError(
                "FullyShardedDataParallel around parameters that are DTensors, as under tensor parallelism, hides "
                "which ranks hold which parts: no norm of all gradients can be known. Shard with fully_shard instead."
            )

    @property
    def average(self) -> float:  # type: ignore[override]
        return fsdp.divisor_of(self._models[0])

    def uses_float16(self) -> bool:
        return fsdp.may_use_float16(self._models)

    def held_gradients(self) -> list[Tensor | None]:
        return fsdp.held_gradients(self._models)

    def stored(self) -> list[fsdp.Stored]:
        return fsdp.stored_parameters(self._models)

    def begin(self, last: bool) -> None:
        if any(module.training_state.name != "IDLE" for module in fsdp.modules_of(self._models)):
            raise BackendError(
                "a forward or backward of FullyShardedDataParallel was left by an exception, and torch has no way to "
                "put its state back. Start again from a checkpoint; fully_shard goes on after discard()."
            )
        self._synced = last or self._micro
        if not self._synced:
            for model in self._models:
                self._flags.enter_context(model.no_sync())

    def end(self) -> None:
        self._flags.close()

    def zeroing_hooks(self, parameters: Sequence[Tensor]) -> list[RemovableHandle]:
        return super().zeroing_hooks(fsdp.flat_parameters(self._models))

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        if not self._synced:
            raise closed_early("FullyShardedDataParallel")

    def drop_gradients(self) -> None:
        fsdp.drop_held_gradients(self._models)

    def drop_stale_gradients(self) -> None:
        self.drop_gradients()
