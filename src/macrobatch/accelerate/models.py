"""Models and their optimizers, made ready: in mixed precision, replicated or sharded, and back again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from macrobatch._cut.trees import map_tensors
from macrobatch._torch.modules import without_compile, without_ddp
from macrobatch.accelerate.settings import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from macrobatch.accelerate.state import AcceleratorState
from macrobatch.errors import UsageError

Places = dict[int, tuple[nn.Module, str]]  # for the id of a parameter, the model that has it and its name there


def compute_in(autocast: Callable[[], AbstractContextManager[None]], model: nn.Module) -> None:
    """Let a model compute under `autocast`, and hand out float32.

    Its forward is replaced by a method, not by a function, so that a copy of the model computes with its own weights.
    """
    model = without_compile(model)
    plain = model.forward
    of_class = getattr(plain, "__func__", None) if "forward" not in vars(model) else None

    @functools.wraps(plain)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast():
            outputs = plain(*args, **kwargs) if of_class is None else of_class(module, *args, **kwargs)
        return map_tensors(outputs, _widened)

    forward._plain = plain if of_class is None else None  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def replicated(model: nn.Module, options: DistributedDataParallelKwargs, state: AcceleratorState) -> nn.Module:
    """The model in a DistributedDataParallel."""
    if isinstance(model, DistributedDataParallel | FSDPModule):
        return model
    devices = [state.device.index] if state.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, **options.to_kwargs())


def sharded(model: nn.Module, plugin: FullyShardedDataParallelPlugin, state: AcceleratorState) -> nn.Module:
    """The model with its parameters replaced by shards."""
    if isinstance(model, FSDPModule):
        return model
    options: Any = {
        "mesh": init_device_mesh(state.device.type, (state.num_processes,)),
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": plugin.policy(state.mixed_precision),
    }
    parts = [module for module in model.modules() if module is not model and plugin.wraps(module)]
    for part in (*reversed(parts), model):  # the inner ones first
        fully_shard(part, **options)
    return model


def places_of(models: Iterable[nn.Module]) -> Places:
    """Where each parameter is found, also when sharding has put another in its place."""
    return {id(p): (model, name) for model in models for name, p in model.named_parameters(remove_duplicate=False)}


def point_to_shards(optimizer: Optimizer, before: Places) -> None:
    """Let an optimizer that was made for whole parameters step the shards that took their places."""
    for group in optimizer.param_groups:
        found: list[Tensor] = []
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                found.append(parameter)
                continue
            if id(parameter) not in before:
                raise UsageError(
                    f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that belongs to no model given "
                    "to the same prepare(). Sharding replaces parameters, and it would step those that nobody uses any "
                    "more: prepare(model, optimizer) together, or make the optimizer of the prepared model."
                )
            if parameter in optimizer.state:
                raise UsageError(
                    "an optimizer that has already stepped whole parameters cannot go on with shards: prepare it first."
                )
            model, name = before[id(parameter)]
            found.append(model.get_parameter(name))
        group["params"] = found


def unwrapped(model: nn.Module, *, keep_precision: bool, keep_compiled: bool) -> nn.Module:
    """The model as it was before it was prepared; a sharded one stays sharded.

    Args:
        model: as `prepare` returned it, perhaps compiled since.
        keep_precision: let it compute in mixed precision still.
        keep_compiled: return a compiled model as such.
    """
    inner: Any = without_compile(model)
    if isinstance(inner, DistributedDataParallel):
        inner = without_ddp(inner)
    elif keep_compiled:
        inner = model
    bare = without_compile(inner)
    if not keep_precision and hasattr(bare.forward, "_plain"):
        if bare.forward._plain is None:
            del bare.forward
        else:
            bare.forward = bare.forward._plain
    found: nn.Module = inner if keep_compiled else bare
    return found
