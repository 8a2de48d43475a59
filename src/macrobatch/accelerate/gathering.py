"""Values of all processes, on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from macrobatch._cut.trees import leaves, map_tensors
from macrobatch.accelerate.state import AcceleratorState, GradientState
from macrobatch.errors import UsageError


def gather(values: Any) -> Any:
    """The tensors of all processes, one after the other along the first dimension, in any nesting.

    A tensor without a dimension becomes one number a process. All processes must have tensors of the same shapes.
    """
    if AcceleratorState().num_processes == 1:
        return values
    for path, leaf in leaves(values, "values"):
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"gather() wants tensors: {path} is {type(leaf).__name__}. Use torch.distributed.all_gather_object."
            )
    return map_tensors(values, _gathered)


def gather_for_metrics(values: Any, *, as_objects: bool = False) -> Any:
    """The same, without the samples that the last round of the active loader repeats."""
    as_objects = as_objects or any(not isinstance(leaf, Tensor) for _, leaf in leaves(values, "values"))
    gathered = _gathered_objects(values) if as_objects else gather(values)
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return gathered
    kept = state.remainder
    return gathered[:kept] if as_objects else map_tensors(gathered, lambda tensor: tensor[:kept])


def _gathered(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    own = (own if own.dim() else own.reshape(1)).contiguous()
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return torch.cat(everyone)


def _gathered_objects(values: Any) -> Any:
    if AcceleratorState().num_processes == 1:
        return values
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return [value for own in everyone for value in own]
