"""Tensors: version counters, hooks on gradients, numbers in the host's memory, arithmetic on many tensors at once."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Sequence
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

# One vector with the numbers of all these tensors.
flat: Callable[[Any], Tensor] = torch._C._nn.flatten_dense_tensors

# Inside this context, modes and tensor subclasses do not see the calls of torch functions.
unobserved = torch._C.DisableTorchFunction
is_observed: Callable[[], bool] = torch._C._is_torch_function_mode_enabled  # whether there is such a mode
# Whether there is a device besides the CPU. Without one nothing is pinned, and asking a tensor would take 4 us.
has_accelerator = functools.cache(torch.accelerator.is_available)


DATA_OF: Callable[[Tensor], Tensor] = operator.attrgetter("data")
ADDRESS_OF: Callable[[Tensor], int] = operator.methodcaller("data_ptr")


def has_dense_memory(tensor: Tensor) -> bool:
    """Whether its numbers fill one piece of memory, in any order of dimensions."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


HOOKS_OF = operator.attrgetter("_post_accumulate_grad_hooks")  # None if there were never any
GRADIENT_HOOKS_OF = operator.attrgetter("_backward_hooks")  # the same


def hooks_after_accumulation(parameter: Tensor) -> dict[int, Any]:
    """The hooks that run after each addition to a gradient, in order. This is torch's own dict, if there is one."""
    return HOOKS_OF(parameter) or {}


def hooks_on_gradient(tensor: Tensor) -> dict[int, Any]:
    """The hooks that see, and may change, a gradient before it is added to this tensor's."""
    return GRADIENT_HOOKS_OF(tensor) or {}


def layout_before_ddp(parameter: Tensor) -> Any:
    """The mesh and placements of a DTensor that DistributedDataParallel(device_mesh=) has made a plain tensor."""
    return getattr(parameter, "_st_info", None)


# ---------------------------------------------------------------------------------------------- single numbers

_IN_C: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
    torch.int32: ctypes.c_int32,
    torch.bool: ctypes.c_bool,
}


def wide(device: torch.device) -> torch.dtype:
    """The dtype for totals: float64, except on Apple's GPUs, which do not support it."""
    return torch.float32 if device.type == "mps" else torch.float64


def number_on_host(tensor: Tensor) -> Any:
    """The value of a one-element tensor that is already in the host's memory, without any wait; None otherwise."""
    if type(tensor) is not Tensor or not tensor.is_cpu or (kind := _IN_C.get(tensor.dtype)) is None:
        return None
    if tensor.is_neg():  # the memory of a negated view holds the opposite sign
        return None
    with unobserved():  # this reads no device; item() would look like it to a mode that watches reads
        address = 0 if has_accelerator() and tensor.is_pinned() else tensor.data_ptr()
    return kind.from_address(address).value if address else None


def value_of(loss: Tensor) -> float | None:
    """The value of a scalar that was just computed on the CPU; None if C has no such type."""
    kind = _IN_C.get(loss.dtype)
    return None if kind is None or is_observed() else kind.from_address(loss.data_ptr()).value


def in_order(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, moved back to the device if it may still be on its way to the host. So nobody has to wait for it."""
    if type(tensor) is not Tensor or not tensor.is_cpu:
        return tensor
    with unobserved():
        is_pinned = has_accelerator() and tensor.is_pinned()  # as after ``to("cpu", non_blocking=True)``
    if not is_pinned:
        return tensor
    with torch.enable_grad():
        return tensor.to(device, non_blocking=True)  # with a dtype, torch would convert on the host first


def inverse_power_of_two(count: float | Tensor) -> float | Tensor:
    """The power of two between 1 / (2 * count) and 1 / count. Multiplying by it changes no digit.

    >>> inverse_power_of_two(1000), inverse_power_of_two(torch.tensor(1000))
    (0.0009765625, tensor(0.0010))
    """
    if isinstance(count, Tensor):
        number = count.detach().reshape(()).to(torch.float32).clamp(min=1)
        return torch.frexp(number).mantissa / number  # mantissa * 2**exponent = number, so this is exact
    return 2.0 ** -math.frexp(ctypes.c_float(max(count, 1)).value)[1]  # rounded as above


def rounding_of(count: int | float | Tensor) -> float:
    """The relative error that a count may have: 0 for whole numbers. A float may come from a float32 tensor."""
    if isinstance(count, int) or (isinstance(count, Tensor) and not count.is_floating_point()):
        return 0.0
    dtype = count.dtype if isinstance(count, Tensor) else torch.float32
    return max(1e-9, 64 * torch.finfo(dtype).eps)


def scalar_on(device: torch.device, number: Tensor) -> Tensor:
    """A detached scalar on the device."""
    scalar = number.data  # only read after this: cheaper than detach()
    if scalar.dim():
        scalar = scalar.reshape(())
    return scalar if scalar.device == device else scalar.to(device, non_blocking=True)


def vector_of(numbers: Sequence[int | float], device: torch.device) -> Tensor:
    """These numbers on the device, without a copy from host memory if there is one, or if all are 0."""
    if len(numbers) == 1 or not any(numbers):
        return torch.full((len(numbers),), numbers[0] if numbers else 0, device=device, dtype=wide(device))
    return torch.tensor(numbers, dtype=wide(device), device="cpu").to(device, non_blocking=True)


def float32_on(device: torch.device, number: float | Tensor) -> Tensor:
    """The number as a float32 tensor on the device, for ``grad_scale`` of a fused optimizer."""
    return number.float() if isinstance(number, Tensor) else torch.full((), number, device=device, dtype=torch.float32)
