"""DistributedDataParallel: the parameters of its reducer, and the communication in its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook


def will_broadcast(model: Any) -> bool:
    """Whether the next forward broadcasts the buffers of the first rank."""
    return bool(model.will_sync_module_buffers())


def run_empty(model: Any) -> None:
    """Run a forward and a backward of the wrapper around nothing: the gradients travel as they are.

    A parameter without a gradient was not used; with ``find_unused_parameters``, the reducer is told so. But it waits
    for one that was.
    """
    trained = [p for p in model._module_parameters if p.requires_grad]
    used = [p for p in trained if p.grad is not None] or trained[:1] if model.find_unused_parameters else trained
    module, model.module = model.module, _Views(used)
    try:
        with torch.enable_grad():
            views = model.forward()  # without hooks on the model, which belong to real forwards
    finally:
        model.module = module
    zeros = [torch.zeros((), dtype=view.dtype, device=view.device).expand_as(view) for view in views]
    torch.autograd.backward(views, zeros)


class _Views(nn.Module):
    """Stands for the module that DDP wraps. It returns views of parameters, and has none of its own."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._views = [parameter.view_as(parameter) for parameter in parameters]

    def forward(self) -> list[Tensor]:
        return self._views


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
