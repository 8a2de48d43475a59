"""Checks that both passes gave the same encodings, and all ranks the same loss, up to rounding. The host reads nothing.

Integers must be equal. In floating-point tensors, infinities and NaN must be in the same places. The other elements may
differ by a tolerance relative to their size, plus the same tolerance relative to the largest element of their field,
because a sum that cancels has the rounding errors of its parts. Outliers such as a mask of -1e9 are left out of that
largest element: an outlier is the same in both passes, and a thousand times as large as the elements that differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from macrobatch._torch.modules import modules_of, parameters_of
from macrobatch._torch.tensors import wide
from macrobatch.types import Items

# Kernels may compute differently without a graph, and float32 encodings may have been computed in bfloat16, whose
# rounding step is 4e-3. Only a model with nothing but float64 parameters surely computes in float64: autocast does not
# change that dtype.
TOLERANCE = 1e-2
TOLERANCE_OF_FLOAT64 = 1e-10
OUTLIER = 1e3
SAMPLED = 4096  # the number of elements for a median


def is_all_double(models: Sequence[nn.Module]) -> bool:
    """Whether all parameters are float64."""
    parameters = (p for module in modules_of(models) for p in parameters_of(module).values() if p is not None)
    return all(p.dtype in (torch.float64, torch.complex128) for p in parameters)


def differs(
    first: Sequence[Tensor], second: Sequence[Tensor], device: torch.device, *, is_double: bool
) -> Tensor | None:
    """Whether these tensors differ by more than rounding: a bool on the device; None if there is nothing to compare."""
    pairs = [(before, on_device(now, before.device)) for before, now in zip(first, second, strict=True) if now.numel()]
    found = [_are_apart(before, now, is_double).to(device) for before, now in pairs]
    return torch.stack(found).any() if found else None


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """A scalar on the host, moved to the device without a copy from host memory, which a recording does not allow."""
    if number.device == device or number.dim() or not number.is_cpu:
        return number
    return torch.full((), number.item(), dtype=number.dtype, device=device)


def ordinary_differs(first: Tensor, loss: Tensor, items: Items, *, is_double: bool) -> Tensor:
    """The same for an ordinary loss and its items. `first` holds both from the first pass."""
    device = first.device
    value, count = first.unbind()
    is_apart = _are_apart(value, loss.detach().reshape(()).to(device, wide(device)), is_double)
    if not isinstance(items, Tensor):
        dtype = torch.int64 if isinstance(items, int) else wide(device)
        items = torch.full((), items or 0, dtype=dtype, device=device)
    number = items.detach().reshape(()).to(device, wide(device))
    return is_apart | (_are_apart(count, number, is_double) if items.is_floating_point() else number != count)


def ranks_differ(losses: Tensor, dtype: torch.dtype, *, is_double: bool) -> Tensor:
    """Whether ranks have computed different losses. If none is finite, the check of the gradients reports that."""
    is_finite = losses.isfinite()
    high = losses.masked_fill(~is_finite, -torch.inf).amax()
    low = losses.masked_fill(~is_finite, torch.inf).amin()
    rounding = _tolerance(dtype, is_double) * torch.maximum(high.abs(), low.abs()) + 10 * torch.finfo(dtype).eps
    return is_finite.any() & (~is_finite.all() | (high - low > rounding))


def _tolerance(dtype: torch.dtype, is_double: bool) -> float:
    return TOLERANCE_OF_FLOAT64 if is_double and dtype == torch.float64 else TOLERANCE


@torch.no_grad()
def _are_apart(before: Tensor, now: Tensor, is_double: bool) -> Tensor:
    if not (now.is_floating_point() or now.is_complex()):
        return (before != now).any()
    before, now = _real(before), _real(now)
    same = (before == now) | (before.isnan() & now.isnan())
    is_finite = before.isfinite() & now.isfinite()
    size, apart = torch.maximum(before.abs(), now.abs()), (now - before).abs()
    typical = _median(size, ~same & is_finite)
    largest = size.masked_fill(~is_finite | (same & (size > OUTLIER * typical)), 0).amax()
    is_close = apart <= _tolerance(now.dtype, is_double) * (size + largest)
    return ~(same | (is_finite & is_close)).all()


def _median(sizes: Tensor, counts: Tensor) -> Tensor:
    """The median of a sample of the sizes that count; infinite if none counts. (`nanmedian` makes the host wait.)"""
    step = sizes.numel() // SAMPLED | 1  # odd, so as not to sample only one column of a matrix
    sizes, counts = sizes[::step], counts[::step]
    middle = (counts.sum() - 1).clamp(min=0) // 2
    return sizes.masked_fill(~counts, torch.inf).sort().values.gather(0, middle.reshape(1))


def _real(tensor: Tensor) -> Tensor:
    """A flat real tensor, of a dtype that supports comparison."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).reshape(-1)
