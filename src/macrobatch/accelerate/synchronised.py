"""DistributedDataParallel: whether the last micro-batch of a window has synchronised all that the window holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from macrobatch._torch.modules import without_compile
from macrobatch.errors import BackendError


def needs_every_parameter(models: Iterable[object]) -> bool:
    """Whether one of them synchronises nothing of a bucket until all of it has had its backward."""
    return any(map(_reduces_whole_buckets, models))


def require_synchronised(models: Iterable[object], used: Collection[int] | None) -> None:
    """An error if the closing backwards, which used these parameters, left a gradient on this rank alone."""
    if used is None:
        return
    for model in models:
        if not isinstance(model, nn.Module) or not _reduces_whole_buckets(model):
            continue
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in used]:
            raise BackendError(
                f"{len(missing)} parameters have no part in this rank's last micro-batch of the window, the first of "
                f"them {missing[0]!r}: DistributedDataParallel has not synchronised what they have accumulated. "
                "Prepare the model with DistributedDataParallelKwargs(find_unused_parameters=True)."
            )


def _reduces_whole_buckets(model: object) -> bool:
    bare = without_compile(model) if isinstance(model, nn.Module) else None
    return isinstance(bare, DistributedDataParallel) and not (bare.find_unused_parameters or bare.static_graph)
