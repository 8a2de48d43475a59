"""Select the backend for the given models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from macrobatch._ranks.backend import LeftToProgram, Local
from macrobatch._ranks.collectives import Group
from macrobatch._ranks.ddp import DDP
from macrobatch._ranks.fsdp1 import FSDP1
from macrobatch._ranks.fsdp2 import FSDP2
from macrobatch._ranks.gathering import choose_gathering
from macrobatch._ranks.placements import ranks_of
from macrobatch._torch.distributed import flattened
from macrobatch._torch.fsdp2 import mesh_of
from macrobatch._torch.modules import DataParallel, data_parallel_of, without_compile
from macrobatch.errors import BackendError, UsageError
from macrobatch.types import Gather, When


def select_backend(
    models: Sequence[nn.Module],
    *,
    sync: When,
    gather: Gather,
    process_group: object,
    accumulate_dtype: torch.dtype | None,
    leaves_mean: bool = False,
) -> Local:
    """The backend for these models, or an error that says which option does not fit.

    `leaves_mean`: the program takes the gradient and steps itself, so it may also exchange it itself.
    """
    for name, value, choices in (("sync", sync, get_args(When)), ("gather", gather, get_args(Gather))):
        if value not in choices:
            raise UsageError(f"{name} must be {' or '.join(map(repr, choices))}: got {value!r}.")
    kind = common_wrapper(models)
    if gather == "window" and kind != "FSDPModule":
        raise BackendError('gather="window" keeps the parameters of FSDP2 gathered; no given model is sharded by it.')
    if process_group is not None and not _initialized():
        raise BackendError("process_group was given, but torch.distributed is not initialized.")
    is_compiled = any(without_compile(model) is not model for model in models)
    # A frozen teacher need not be wrapped.
    models = [without_compile(model) for model in models if kind is None or data_parallel_of(model) == kind]
    if kind is None:
        group = _given(process_group)
        if _initialized() and dist.get_world_size(group) > 1:
            if leaves_mean and not ranks_of(p for model in models for p in model.parameters()):
                return LeftToProgram(dist.group.WORLD if group is None else group)
            raise _not_wrapped(models, group)
        return Local()
    own = _own_group(models[0], kind)
    group = own if process_group is None else _given(process_group)
    if _ranks(group) != _ranks(own):
        raise BackendError(
            f"process_group has the ranks {_ranks(group)}, but the model averages its gradients over {_ranks(own)}: "
            "items must be counted over the same ranks. Leave process_group out, or pass those."
        )
    for index, model in enumerate(models):
        if (others := _ranks(_own_group(model, kind))) != _ranks(own):
            raise BackendError(
                f"the first model averages its gradients over the ranks {_ranks(own)}, model {index} over {others}: "
                "one step needs the same ranks for all. Make an Accumulator for each, or wrap them alike."
            )
    sizes = [parameter.dtype.itemsize for model in models for parameter in model.parameters()]
    is_wider = accumulate_dtype is not None and any(size < accumulate_dtype.itemsize for size in sizes)
    if kind == "DistributedDataParallel":
        return DDP(models, sync=sync, group=group, flat=is_wider, sees_forwards=not is_compiled)
    if kind == "FSDPModule":
        when = choose_gathering(models, group) if gather == "auto" else gather
        backend = FSDP2(models, sync=sync, gather=when, group=group)
        if is_wider:
            backend.check_dtype(accumulate_dtype)
        return backend
    if is_wider:
        raise BackendError(
            "accumulate_dtype is for DistributedDataParallel and fully_shard. FullyShardedDataParallel sums in a dtype "
            "of its own: set MixedPrecision(reduce_dtype=torch.float32) there."
        )
    return FSDP1(models, sync=sync, group=group)


def wrapping(models: Sequence[nn.Module]) -> tuple[object, ...]:
    """A value that changes if a model is wrapped, or if ranks are added."""
    return (*map(type, models), dist.get_world_size() if _initialized() else 1)


def require_same_wrapping(models: Sequence[nn.Module], before: tuple[object, ...]) -> None:
    """Raise an error if `wrapping` has changed since."""
    if wrapping(models) != before:
        raise BackendError(
            "a model was wrapped, or torch.distributed initialized, after this Accumulator was made: it does not "
            "know how gradients are exchanged. Make it last, of the model as it is trained."
        )


def require_own_statistics(models: Sequence[nn.Module], why: str) -> None:
    """Raise an error if a layer computes its statistics over the micro-batches of all ranks together."""
    if any(isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules()):
        raise BackendError(f"SyncBatchNorm with {why}")


def common_wrapper(models: Sequence[nn.Module]) -> DataParallel | None:
    """The wrapper of all models that are trained, or an error if they differ."""
    kinds = {data_parallel_of(model) for model in models if any(p.requires_grad for p in model.parameters())}
    if len(kinds) > 1:
        found = sorted(kind or "no wrapper" for kind in kinds)
        raise BackendError(f"all models must have the same data-parallel wrapper: found {', '.join(found)}.")
    return kinds.pop() if kinds else None


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _given(process_group: Any) -> Group:
    """The process group, also of a DeviceMesh."""
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return process_group
    if not hasattr(process_group, "mesh_dim_names"):
        raise UsageError(f"process_group must be a ProcessGroup or a DeviceMesh: got {type(process_group).__name__}.")
    return flattened(process_group).get_group()


def _own_group(model: Any, kind: DataParallel) -> Group:
    """The ranks over which the model itself averages its gradients."""
    if kind == "DistributedDataParallel":
        return model.process_group
    if kind == "FSDPModule":
        mesh = mesh_of(model)
        return dist.group.WORLD if mesh.size() == dist.get_world_size() else _given(mesh)
    return dist.group.WORLD if "HYBRID" in model.sharding_strategy.name else model.process_group


def _ranks(group: Group) -> list[int]:
    return sorted(dist.get_process_group_ranks(group))


def _not_wrapped(models: Sequence[nn.Module], group: Group) -> BackendError:
    """The error for ranks whose gradients nothing synchronises. Ranks may train independently, or share a model."""
    world = dist.get_world_size(group)
    found = f"there are {world} ranks, but the model is not wrapped: nothing synchronises its gradients"
    sharing = ranks_of(p for model in models for p in model.parameters())
    if len(sharing) < 2:
        return BackendError(
            f"{found}.",
            "Wrap it in DistributedDataParallel or fully_shard and make the Accumulator after that; for ranks that "
            "train on their own, pass a process_group of one. A program that exchanges gradients itself: "
            "MacroStep(model, None, loss_fn), and then the mean of .grad over the ranks.",
            code="not wrapped",
        )
    return BackendError(
        f"{found} between the ranks {_ranks(group)}. Its parameters are DTensors over the ranks {sharing}. Ranks that "
        "share a model, as under tensor parallelism, get the same data and are one to the Accumulator: pass the "
        'ranks whose data differs, process_group=mesh["dp"]; a dimension of size 1, as in init_device_mesh(device, (1, '
        'ranks), mesh_dim_names=("dp", "tp")), where all share one model. Where it is larger, wrap the model too: '
        'fully_shard(model, mesh=mesh["dp"]).'
    )
