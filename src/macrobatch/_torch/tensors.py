"""Tensors: how often they were written to, hooks on their gradients, and arithmetic on many at once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Functions of torch and of C themselves: they run for every gradient of every micro-step.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")  # grows with every write
multiply_all = torch._foreach_mul_
copy_all = torch._foreach_copy_
zero_all = torch._foreach_zero_
norms_of_all = torch._foreach_norm
# Multiplies by a float32 factor, and sets a flag where one was not finite: what a GradScaler divides with.
unscale_all = torch._amp_foreach_non_finite_check_and_unscale_

# Inside, torch's functions pass by modes and subclasses that watch what is read.
unobserved = torch._C.DisableTorchFunction


def hooks_after_accumulation(parameter: Tensor) -> dict[int, Any]:
    """Those that run after each addition to its gradient, in their order: the dictionary itself, where there is any."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def hooks_on_gradient(tensor: Tensor) -> dict[int, Any]:
    """Those that see, and may change, a gradient on its way to this tensor."""
    return tensor._backward_hooks or {}


def layout_before_ddp(parameter: Tensor) -> Any:
    """The mesh and placements of a DTensor that DistributedDataParallel(device_mesh=) has made a plain tensor of."""
    return getattr(parameter, "_st_info", None)
