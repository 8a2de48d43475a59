"""Arithmetic on many gradients at once: multiply them, and compute their norm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from macrobatch._torch.tensors import multiply_all, norms_of_all, unscale_all, wide

HALF = (torch.float16, torch.bfloat16)


def multiply(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients in place, of any devices and dtypes."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), group in groups.items():
        multiply_alike(group, factor, device, dtype)


def multiply_alike(group: list[Tensor], factor: float | Tensor, device: torch.device, dtype: torch.dtype) -> None:
    if not isinstance(factor, Tensor):
        multiply_all(group, factor)
    elif dtype not in HALF:
        multiply_all(group, factor.to(device, dtype.to_real(), non_blocking=True))
    else:  # a factor in the gradients' dtype would lose digits
        factor = factor.to(device, torch.float32, non_blocking=True)
        if takes_float32(device, dtype):
            unscale_all(group, torch.zeros_like(factor), factor)
            return
        for gradient in group:
            gradient.copy_(gradient.float().mul_(factor))


def takes_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel with which a GradScaler divides supports such gradients: on CUDA it has no bfloat16."""
    return dtype != torch.bfloat16 or device.type == "cpu"


def norm_dtype(gradient: Tensor) -> torch.dtype | None:
    """The dtype for a norm: at least float32. None for the gradient's own dtype."""
    return torch.float32 if gradient.dtype in HALF else None


def norms_of(gradients: list[Tensor], order: float) -> Sequence[Tensor]:
    """The norm of each gradient, at least in float32."""
    if not gradients:
        return ()
    real = not gradients[0].is_complex()
    if order == math.inf and real and gradients[0].device.type == "cpu":  # the kernel below takes ten times as long
        return [torch.stack(torch.aminmax(gradient)).abs().max() for gradient in gradients]
    return norms_of_all(gradients, order, dtype=norm_dtype(gradients[0]))


def norm_of(norms: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The norm of a vector whose parts have these norms."""
    if not norms:
        return torch.zeros((), device=device, dtype=wide(device))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)), order)
