"""What the processes of a program tell each other before gradients are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._ranks.collectives import all_gather_numbers, host_group
from macrobatch._torch.ddp import knows_static_graph
from macrobatch._torch.modules import data_parallel_of, without_compile
from macrobatch.errors import UsageError

HOST = torch.device("cpu")


class Sharing(Enum):
    """How processes share the work on the models of a micro-batch."""

    ALONE = auto()  # there is one process, or each trains for itself
    APART = auto()  # there are several, but nothing exchanges the gradients of these models
    REPLICATED = auto()  # DistributedDataParallel: gradients travel in the backward that closes a window
    SHARDED = auto()  # FSDP: every forward and every backward communicates


def sharing_of(models: Sequence[Any], *, sends: bool) -> Sharing:
    """How processes share the work on these models. `sends`: the next backward should exchange gradients."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Sharing.ALONE
    trained = [m for m in models if isinstance(m, nn.Module) and any(p.requires_grad for p in m.parameters())]
    kinds = {data_parallel_of(model) for model in trained}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        return Sharing.SHARDED
    if "DistributedDataParallel" not in kinds:
        return Sharing.APART
    replicas = [without_compile(model) for model in trained if data_parallel_of(model) is not None]
    if sends and not all(model.require_backward_grad_sync for model in replicas):  # as under Accelerate's LocalSGD
        return Sharing.ALONE
    return Sharing.REPLICATED


def require_known_graphs(models: Sequence[Any]) -> None:
    """Raise an error before a backward that torch would end with an internal one."""
    for model in models if dist.is_available() and dist.is_initialized() else ():
        if not isinstance(model, nn.Module) or data_parallel_of(model) != "DistributedDataParallel":
            continue
        bare = without_compile(model)
        if bare.static_graph and not bare.require_backward_grad_sync and not knows_static_graph(bare):
            raise UsageError(
                "DistributedDataParallelKwargs(static_graph=True) cannot accumulate: torch must exchange gradients in "
                "the first backward. Leave static_graph out, or exchange them in every micro-batch, with "
                "GradientAccumulationPlugin(sync_each_batch=True)."
            )


class Ranks:
    """Exchanges numbers between all processes. All of them must call each method together."""

    def __init__(self) -> None:
        self._host: Any = None

    @property
    def world(self) -> int:
        """The number of processes."""
        return dist.get_world_size()

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every process, without waiting for a device."""
        return all_gather_numbers(numbers, self._host_group(), HOST)

    def gather(self, numbers: Tensor) -> Tensor:
        """The numbers of every process, one row for each, where these are."""
        everyone = [torch.empty_like(numbers) for _ in range(self.world)]
        dist.all_gather(everyone, numbers, group=self._host_group() if numbers.is_cpu else None)
        return torch.stack(everyone)

    def _host_group(self) -> Any:
        if self._host is None:
            self._host = host_group(dist.group.WORLD)
        return self._host
