"""Fused accumulation: matrix products add the gradients of linear weights to the sums of a window themselves.

Under autocast, a micro-step casts every weight, writes the gradient of every weight in the low precision, casts it back
and adds it to the sum: 26 bytes a parameter. Here the cast weights (*shadows*) are kept for a window, and the product
that makes a gradient adds to the float32 sum: 8 bytes. The gradient is not rounded before it is added.

`F.linear` and `torch.addmm` are replaced while a micro-step is recorded, its backward and all recomputations of
checkpointing included. A weight that is used in any other way gets its gradient in the ordinary way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from macrobatch._torch.modules import can_have_compiled, is_compiled
from macrobatch._torch.tensors import copy_all

_linear, _addmm = F.linear, torch.addmm


class NotFusedError(Exception):
    """A gradient of weights is wanted for something else than the sums of the window."""


class FusedWeights:
    """The weights whose gradients are added by matrix products, and their shadows.

    Args:
        models: the models whose micro-steps are recorded.
        is_on: whether to fuse anything.
    """

    def __init__(self, models: Sequence[nn.Module], *, is_on: bool) -> None:
        self.is_on = is_on
        self.adds = False  # whether a backward of the window is running
        self._models = models
        self.release_memory()

    def release_memory(self) -> None:
        """Forget all shadows."""
        self._shadows: dict[tuple[nn.Parameter, torch.dtype], Tensor] = {}

    def renew(self) -> None:
        """Cast the weights again, before the first replay of a window."""
        if self._shadows:
            copy_all(list(self._shadows.values()), [weight.detach() for weight, _ in self._shadows])

    def prepare(self, uses: set[tuple[nn.Parameter, torch.dtype]]) -> None:
        """Make the shadows for these uses of weights."""
        for weight, dtype in uses - self._shadows.keys():
            if dtype != weight.dtype:
                self._shadows[weight, dtype] = weight.detach().to(dtype)

    @contextlib.contextmanager
    def noting(self, leaves_of: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[set[tuple[nn.Parameter, torch.dtype]]]:
        """Note in the block which weights can be fused, and in which dtype they are used. Nothing is fused."""
        uses: set[tuple[nn.Parameter, torch.dtype]] = set()
        owners = {id(leaf): parameter for parameter, leaf in leaves_of.items()}

        def note(x: Tensor, leaf: Tensor) -> None:
            parameter = owners.get(id(leaf))
            if parameter is not None and (dtype := _dtype_of_product(x, leaf)) is not None:
                uses.add((parameter, dtype))

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            note(x, weight)
            return _linear(x, weight, bias)

        def addmm(bias: Any, x: Any, weight: Any, **options: Any) -> Tensor:
            if not options:
                note(x, weight)
            return _addmm(bias, x, weight, **options)

        with _replacing(linear, addmm) if self._is_possible() else contextlib.nullcontext():
            yield uses

    @contextlib.contextmanager
    def fusing(self, leaves_of: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Fuse in the block what was noted. The leaves must have the sums of the window as ``.grad``."""
        weights = {
            id(leaf): _Weight(self, parameter, leaf.grad)
            for parameter, leaf in leaves_of.items()
            if leaf.grad is not None
        }

        def weight_of(x: Tensor, leaf: Tensor) -> tuple[_Weight, Tensor] | None:
            weight = weights.get(id(leaf))
            if weight is None or (dtype := _dtype_of_product(x, leaf)) is None:
                return None
            values = leaf if dtype == leaf.dtype else self._shadows.get((weight.parameter, dtype))
            return None if values is None or not gains(dtype, weight.total) else (weight, values.detach())

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if (found := weight_of(x, weight)) is None:
                return _linear(x, weight, bias)
            own, values = found
            cast_bias = None if bias is None else bias.to(values.dtype)
            return _fused_linear(x.to(values.dtype), weight, values, cast_bias, own)

        def addmm(bias: Any, x: Any, weight: Any, **options: Any) -> Tensor:
            if options or bias.dim() != 1 or (found := weight_of(x, weight)) is None:
                return _addmm(bias, x, weight, **options)
            own, values = found
            transposed = own._replace(is_transposed=True)
            return _fused_linear(x.to(values.dtype), weight, values.t(), bias.to(values.dtype), transposed)

        with _replacing(linear, addmm) if self._is_possible() else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """The block in which a backward may add to the sums."""
        self.adds = True
        try:
            yield
        finally:
            self.adds = False

    def _is_possible(self) -> bool:
        """Whether to replace anything: compiled code would be compiled again, and would not call what replaces it."""
        return self.is_on and not (can_have_compiled() and any(map(is_compiled, self._models)))


class _Weight(NamedTuple):
    """A weight, and the sum of its gradients."""

    fused: FusedWeights
    parameter: nn.Parameter
    total: Tensor
    is_transposed: bool = False  # (in, out), not (out, in)

    def add_product(self, gradient: Tensor, x: Tensor) -> None:
        """Add the gradient of the weight to the sum, from the rows of an output's gradient and those of an input."""
        if not self.fused.adds:
            raise NotFusedError("a loss differentiates with respect to weights itself")
        left, right = (x.t(), gradient) if self.is_transposed else (gradient.t(), x)
        if left.dtype == self.total.dtype:
            self.total.addmm_(left, right)
        elif self.total.is_cuda:
            _addmm(self.total, left, right, out_dtype=self.total.dtype, out=self.total)
        else:  # the product of a CPU does not add to another dtype
            self.total.addmm_(left.to(self.total.dtype), right.to(self.total.dtype))


class _FusedLinear(torch.autograd.Function):
    """``x @ values.T + bias``, whose backward adds the gradient of the weight to its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, values: Tensor, bias: Tensor | None, weight: _Weight) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(x, values)
        ctx.weight = weight
        return _linear(x, values, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, values = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.weight.add_product(rows, x.reshape(-1, x.shape[-1]))
        of_x = gradient.matmul(values) if ctx.needs_input_grad[0] else None
        return of_x, None, None, rows.sum(0) if ctx.needs_input_grad[3] else None, None


_fused_linear: Callable[..., Tensor] = _FusedLinear.apply


def gains(dtype: torch.dtype, total: Tensor) -> bool:
    """Whether fusing gains anything: a gradient of this dtype would be cast before it is added to the sum."""
    return dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32


def _dtype_of_product(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype in which a matrix product of these two runs; None if it is not one of plain floating-point tensors."""
    if weight.dim() != 2 or type(x) not in (Tensor, nn.Parameter) or not x.is_floating_point():
        return None
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (x.dtype, weight.dtype):  # autocast leaves these alone
        return torch.get_autocast_dtype(kind)
    return weight.dtype if x.dtype == weight.dtype else None


@contextlib.contextmanager
def _replacing(linear: Any, addmm: Any) -> Iterator[None]:
    """Replace both functions inside the block, for all threads: recomputations run on those of the backward."""
    before = F.linear, torch.addmm
    F.linear, torch.addmm = linear, addmm
    try:
        yield
    finally:
        F.linear, torch.addmm = before
