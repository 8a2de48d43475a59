"""Tensors: their version counters, hooks on their gradients, and arithmetic on many of them at once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Direct references to fast functions: they run for every gradient of every micro-batch.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")  # a counter of writes
multiply_all = torch._foreach_mul_
copy_all = torch._foreach_copy_
zero_all = torch._foreach_zero_
norms_of_all = torch._foreach_norm
# Multiplies by a float32 factor, and sets a flag if a number is not finite. A GradScaler divides with it.
unscale_all = torch._amp_foreach_non_finite_check_and_unscale_

# Inside this context, modes and tensor subclasses do not see the calls of torch functions.
unobserved = torch._C.DisableTorchFunction


def hooks_after_accumulation(parameter: Tensor) -> dict[int, Any]:
    """The hooks that run after each addition to a gradient, in order. This is torch's own dict, if there is one."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def hooks_on_gradient(tensor: Tensor) -> dict[int, Any]:
    """The hooks that see, and may change, a gradient before it is added to this tensor's."""
    return tensor._backward_hooks or {}


def layout_before_ddp(parameter: Tensor) -> Any:
    """The mesh and placements of a DTensor that DistributedDataParallel(device_mesh=) has made a plain tensor."""
    return getattr(parameter, "_st_info", None)
