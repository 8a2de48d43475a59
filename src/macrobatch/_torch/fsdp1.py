"""FullyShardedDataParallel: its flat parameters, and the gradients that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def modules_of(models: Iterable[Any]) -> list[Any]:
    """All modules that it wraps, including the models themselves."""
    return [module for model in models for module in type(model).fsdp_modules(model)]


def flat_parameters(models: Iterable[Any]) -> list[Any]:
    """The flat parameters, into which it has joined the parameters of the modules."""
    return [module._handle.flat_param for module in modules_of(models) if module._handle is not None]


def held_gradients(models: Iterable[Any]) -> list[Tensor | None]:
    """All accumulated gradients: unsharded ones, and this rank's shards of reduced ones."""
    flat = flat_parameters(models)
    return [parameter.grad for parameter in flat] + [getattr(p, "_saved_grad_shard", None) for p in flat]


def drop_held_gradients(models: Iterable[Any]) -> None:
    """Drop all accumulated gradients."""
    for parameter in flat_parameters(models):
        parameter.grad = None
        if hasattr(parameter, "_saved_grad_shard"):
            del parameter._saved_grad_shard


def divisor_of(model: Any) -> float:
    """The number by which it divides gradients."""
    return float(model._gradient_predivide_factor * model._gradient_postdivide_factor)


def may_use_float16(models: Iterable[Any]) -> bool:
    """Whether weights or gradients may be float16 at some point. A communication hook may do anything."""
    handles = [module._handle for module in modules_of(models) if module._handle is not None]
    dtypes = {dtype for handle in handles for dtype in (handle._fwd_bwd_param_dtype, handle._reduce_dtype)}
    return torch.float16 in dtypes or any(getattr(model, "_comm_hook", None) is not None for model in models)


def flattens_dtensors(module: nn.Module) -> bool:
    """Whether this module's flat parameter was made of DTensors."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    return any(layout is not None for layout in getattr(flat, "_param_extensions", ()))
