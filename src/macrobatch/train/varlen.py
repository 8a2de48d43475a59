"""Attention inside each sample of a packed row, by torch's kernels for sequences of different lengths.

With a mask, every token is compared with its whole row, and memory is needed for all pairs. These kernels know where
samples begin. They support only half precision, and only models of transformers whose attention can be replaced.
"""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError

kernel: Any
try:
    from torch.nn.attention.varlen import varlen_attn as kernel
except ImportError:  # a torch without this kernel
    kernel = None

NAME = "macrobatch_varlen"  # the name of this attention in transformers
HALF = (torch.bfloat16, torch.float16)
UNSUPPORTED = ("softcap", "position_bias", "s_aux", "sliding_window")  # arguments that these kernels do not support


def can_serve(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether to try it: the model's attention can be replaced, and device and precision suit the kernels."""
    precision = dtype or next(model.parameters()).dtype
    is_there = kernel is not None and device.type == "cuda" and precision in HALF
    return is_there and hasattr(without_ddp(model), "set_attn_implementation")


def switch(model: nn.Module, *, on: bool) -> None:
    """Set this attention in a model, or its usual one again."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    without_ddp(model).set_attn_implementation(NAME if on else "sdpa")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for a layer, with tensors (rows, heads, width, size). Without bounds, call torch's usual attention."""
    bounds = others.get("cu_seq_lens_q")
    if bounds is None:
        usual = AttentionInterface()["sdpa"]
        found: tuple[Tensor, None] = usual(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    given = [name for name in UNSUPPORTED if others.get(name) is not None] + (["dropout"] if dropout else [])
    if given:
        raise UsageError(f"the kernels for sequences of unequal lengths do not support {given[0]}.")
    rows, heads, width, _ = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    dtype = _common_dtype(value)
    flat = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    out: Tensor = kernel(*flat, bounds, bounds, width, width, scale=scaling, **_causal(kernel))
    return out.unflatten(0, (rows, width)), None


def _common_dtype(value: Tensor) -> torch.dtype:
    """The dtype to which autocast would cast the arguments: rotary embeddings leave queries and keys in float32."""
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype


@functools.cache
def _causal(kernel: Callable[..., Any]) -> dict[str, Any]:
    """The argument for causal attention in this version of torch."""
    return {"is_causal": True} if "is_causal" in inspect.signature(kernel).parameters else {"window_size": (-1, 0)}
