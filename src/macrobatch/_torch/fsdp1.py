"""FullyShardedDataParallel: its flat parameters, and the gradients that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def modules_of(models: Iterable[Any]) -> list[Any]:
    """All modules that it wraps, including the models themselves."""
    return [module for model in models for module in type(model).fsdp_modules(model)]


def flat_parameters(models: Iterable[Any]) -> list[Any]:
    """The flat parameters, into which it has joined the parameters of the modules."""
    return [module._handle.flat_param for module in modules_of(models) if module._handle is not None]


class Stored(NamedTuple):
    """What this rank keeps of a parameter between forwards, which see gathered copies of it."""

    name: str
    holder: nn.Module  # the module of the parameter
    parameter: Tensor  # the flat one, without ``use_orig_params=True``
    values: Tensor


def stored_parameters(models: Iterable[Any]) -> list[Stored]:
    """What this rank keeps of all parameters."""
    paths = {module: path for model in models for path, module in model.named_modules()}
    found = []
    for flat in flat_parameters(models):
        values = getattr(flat, "_local_shard", flat).detach()  # set by the first forward, which takes the same memory
        originals = flat._params or [flat] * len(flat._param_infos)
        for info, part, parameter in zip(flat._param_infos, flat._shard_param_infos, originals, strict=True):
            if part.in_shard:
                here = values[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]
                path = f"{paths[info.module]}.".replace("_fsdp_wrapped_module.", "").removeprefix(".")
                found.append(Stored(path + info.param_name, info.module, parameter, here))
    return found


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
