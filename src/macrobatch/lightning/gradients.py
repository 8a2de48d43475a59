"""Which parameters are trained, and the gradients that the step before has left."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch._torch.modules import data_parallel_of, is_fully_sharded
from macrobatch.errors import BackendError


class ClearingHook:
    """The module's own ``optimizer_zero_grad``, which may keep gradients on purpose. No window begins with them.

    Args:
        module: the module. Lightning's own hook is ignored.
        base: Lightning's module class.
        optimizers: the optimizers whose gradients the hook should clear.
    """

    def __init__(self, module: Any, base: Any, optimizers: Iterable[Optimizer]) -> None:
        self._name = f"{type(module).__name__}.optimizer_zero_grad"
        is_own = type(module).optimizer_zero_grad is not base.optimizer_zero_grad
        held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        self._held = set(map(id, held)) if is_own else set()

    def warn_about(self, left: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Warn once if it has left gradients other than zero. The host reads them only if a module has such a hook."""
        if not self._held or not any(id(p) in self._held and bool(gradient.any()) for p, gradient in left):
            return
        self._held = set()
        warnings.warn(
            f"{self._name} keeps the gradients of the step before, but ExactStrategy clears them: each window is one "
            "big batch. To accumulate over more batches, make steps= larger.",
            stacklevel=2,
        )


class StaleGradients:
    """The gradients of the step before. Hooks may read them until Lightning clears them, after the next forward.

    A window must not begin with them. So they are removed while it begins, and dropped before its first backward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self._parameters = parameters
        self._found: list[tuple[nn.Parameter, Tensor]] = []
        self._widened: list[tuple[nn.Parameter, torch.dtype | None]] = []  # with the window's dtype

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """A context that removes them during the first forward of a window."""
        self._found, self._widened = [(p, p.grad) for p in self._parameters if p.grad is not None], []
        for parameter, _ in self._found:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in self._found:
                if parameter.grad is not None:
                    continue
                if parameter.grad_dtype not in (None, gradient.dtype):
                    self._widened.append((parameter, parameter.grad_dtype))
                    parameter.grad_dtype = gradient.dtype
                parameter.grad = gradient

    def drop(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Clear the gradients that are still there, also if zeroed in place. Those that others have set stay."""
        dropped = [(parameter, gradient) for parameter, gradient in self._found if parameter.grad is gradient]
        for parameter, _ in dropped:
            parameter.grad = None
        for parameter, dtype in self._widened:
            if parameter.grad is None:
                parameter.grad_dtype = dtype
        self._found, self._widened = [], []
        return dropped


def trained_modules(model: nn.Module) -> list[nn.Module]:
    """The model, as it is wrapped; or its sharded parts, which must contain all trained parameters."""
    if data_parallel_of(model) is not None:
        return [model]
    sharded = list(_outermost_sharded(model))
    known = {id(p) for part in sharded for p in part.parameters()}
    for name, parameter in model.named_parameters() if sharded else ():
        if parameter.requires_grad and id(parameter) not in known:
            raise BackendError(
                f"parameter {name!r} is in no module that configure_model() shards: nothing synchronises its "
                "gradient. Call fully_shard on the module that holds it, or freeze it."
            )
    return sharded or [model]


def require_own(optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    """Raise an error if an optimizer has parameters that are not in the module, and never get gradients."""
    known = set(map(id, parameters))
    for parameter in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        if parameter.requires_grad and id(parameter) not in known:
            raise BackendError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the module: it "
                "belongs to something else, or configure_model() has replaced it since. Make the optimizer in "
                "configure_optimizers(), of self.parameters()."
            )


def _outermost_sharded(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_fully_sharded(child):
            yield child
        else:
            yield from _outermost_sharded(child)
