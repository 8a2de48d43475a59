"""DistributedDataParallel: what its reducer knows, and what its forward does together with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook


def prepare_forward(model: Any) -> None:
    """Do now what the next forward would do together with the other ranks, and keep it from doing so again."""
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
    """The parameters that DistributedDataParallel looks after, frozen ones too."""
    parameters: Sequence[nn.Parameter] = model._module_parameters
    return parameters


def ignored_parameters(models: Sequence[Any]) -> dict[str, nn.Parameter]:
    """The parameters that DistributedDataParallel was told to leave alone."""
    named = ((model.parameters_to_ignore, found) for model in models for found in model.module.named_parameters())
    return {name: parameter for ignored, (name, parameter) in named if name in ignored}


def reduced_parameters(models: Sequence[Any]) -> set[int] | None:
    """The ids of the parameters that the reducers know: those that were trained when they were made.

    The buckets tell, which are laid out once for the question: as much memory as the gradients will take. None where
    torch does not tell: nothing is known then of parameters that were thawed since.
    """
    try:
        buckets = [bucket for model in models for bucket in model.reducer._get_zeros_like_grad_buckets()]
    except (AttributeError, RuntimeError):
        return None
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


def may_compress_to_half(model: Any) -> bool:
    """Whether a communication hook may make gradients float16: any but that of bfloat16 may."""
    hooks = [hook for hook, _ in getattr(model, "_comm_hooks", ())]
    built_in = str(model._get_ddp_logging_data().get("comm_hook", ""))
    return any(hook is not bf16_compress_hook for hook in hooks) or "FP16" in built_in.upper()
