"""Seeing through what wraps a model: `torch.compile`, DistributedDataParallel, FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

Wrapper = Literal["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"]
WRAPPERS: tuple[Wrapper, ...] = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def without_compile(model: nn.Module) -> Any:
    """The module that `torch.compile` was given."""
    return getattr(model, "_orig_mod", model)


def wrapper_of(model: nn.Module) -> Wrapper | None:
    """Which data-parallel wrapper a model has, compiled or not."""
    names = [kind.__name__ for kind in type(without_compile(model)).__mro__]
    return next((wrapper for wrapper in WRAPPERS if wrapper in names), None)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    return wrapper_of(module) == "FSDPModule"
