"""DistributedDataParallel: the parameters of its reducer, and the communication in its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook


def prepare_forward(model: Any) -> None:
    """Do now what the next forward would do together with the other ranks, so that it does not do it again."""
    model.reducer._rebuild_buckets()
    if model.will_sync_module_buffers():
        model._sync_buffers()
    model.require_forward_param_sync = False


def is_joining(model: Any) -> bool:
    """Whether the program is inside a `Join` context."""
    return bool(model._join_config.enable)


def knows_static_graph(model: Any) -> bool:
    """Whether a model with ``static_graph=True`` has had its first synchronised iteration."""
    return bool(model._static_graph_delay_allreduce_enqueued)


def parameters_in_care(model: Any) -> Sequence[nn.Parameter]:
    """The parameters that DistributedDataParallel manages, including frozen ones."""
    return model._module_parameters  # type: ignore[no-any-return]


def ignored_parameters(models: Sequence[Any]) -> dict[str, nn.Parameter]:
    """The parameters that DistributedDataParallel was told to ignore."""
    named = ((model.parameters_to_ignore, found) for model in models for found in model.module.named_parameters())
    return {name: parameter for ignored, (name, parameter) in named if name in ignored}


def reduced_parameters(models: Sequence[Any]) -> set[int] | None:
    """The ids of the parameters that were trained when DDP was made; None if torch cannot tell."""
    try:  # this allocates the buckets once, which takes as much memory as the gradients
        buckets = [bucket for model in models for bucket in model.reducer._get_zeros_like_grad_buckets()]
    except (AttributeError, RuntimeError):
        return None
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


def may_compress_to_half(model: Any) -> bool:
    """Whether a communication hook may convert gradients to float16. Any hook but that for bfloat16 may."""
    hooks = [hook for hook, _ in getattr(model, "_comm_hooks", ())]
    built_in = str(model._get_ddp_logging_data().get("comm_hook", ""))
    return any(hook is not bf16_compress_hook for hook in hooks) or "FP16" in built_in.upper()
