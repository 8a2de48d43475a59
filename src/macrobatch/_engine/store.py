"""The gradients of a window: where they are accumulated, and how they are normed and divided at its close.

All operations work on groups of gradients of the same device and dtype, so that one foreach kernel of torch processes a
whole group. The host does not read the values of gradients.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._border.parameters import REQUIRES_GRADIENT, Parameters
from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import local_tensor
from macrobatch._ranks.gradient_groups import GradientGroups
from macrobatch._torch.tensors import unobserved

GRADIENT_OF = operator.attrgetter("grad")
VIEW: Any = object()  # stands for a view of a gradient that the backend holds elsewhere

logger = logging.getLogger("macrobatch")


class GradientStore:
    """Accumulates the gradients of a window in ``.grad``, as torch does, or in a wider dtype there.

    To sum elsewhere, override `absorb`, which is called after each backward, `exist`, and `settle`, which puts the sums
    into ``.grad`` before ranks exchange them; then everything after it stays as it is.
    """

    named: dict[str, nn.Parameter]  # all parameters of the models
    own: dict[int, str]  # their names, by their ids
    parameters: list[nn.Parameter]  # those whose gradients the window accumulates
    trained: set[int]  # the ids of these
    left: list[Tensor | None]  # the tensors that hold gradients, as the last backward left them
    has_gaps = True  # whether some of these are no tensors

    def __init__(self, parameters: Parameters, backend: Local, accumulate_dtype: torch.dtype | None = None) -> None:
        self._source = parameters
        self._backend = backend
        self._dtype = accumulate_dtype if backend.abilities.leaves_are_parameters else None
        self._holds_elsewhere = backend.held_gradients() is not None
        self._are_views = backend.abilities.shows_views
        self.is_elsewhere = self._holds_elsewhere or self._are_views  # whether ``.grad`` is not all there is
        self.groups = GradientGroups(backend.shards)
        self._all: dict[str, nn.Parameter] = {}
        self._widened: dict[int, tuple[nn.Parameter, torch.dtype | None]] = {}  # by id, with the earlier grad_dtype
        self._has_warned = False
        self.named, self.own, self.parameters, self.trained, self.left = {}, {}, [], set(), []

    # ------------------------------------------------------------------------------------------ within the window

    def begin(self) -> None:
        self._backend.drop_stale_gradients()
        named = self._source.named()
        if named is not self._all:
            self._ids = dict(zip(map(id, named.values()), named, strict=True))
            self.groups.begin()
            self.tells_by_norm = self._are_views or any(isinstance(p, DTensor) for p in named.values())
            self._all = named
        self.named, self.own = named, self._ids
        if not {type(None)}.issuperset(map(type, map(GRADIENT_OF, named.values()))):
            self._warn_once()
            self.clear()
        self.parameters = list(filter(REQUIRES_GRADIENT, named.values()))
        self.trained = set(map(id, self.parameters))
        if self._dtype is not None:
            self._unwiden()  # the last window may have left wide gradients to the program
            self._widen(self.parameters)
        if self.is_elsewhere:
            self._leave(self.now())
        else:
            self.left, self.has_gaps = [None] * len(self.parameters), True

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("gradients that a backward() outside of any window had left were cleared (told once)")

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Also accumulate these leaves, if they are parameters that were frozen, or not there, when it began."""
        if any(isinstance(leaf, nn.Parameter) and id(leaf) not in self.own for leaf in leaves):
            found = self._source.named(anew=True)
            self.named = self.named | found
            self.own = self.own | dict(zip(map(id, found.values()), found, strict=True))
        thawed: Any = [leaf for leaf in leaves if id(leaf) not in self.trained and id(leaf) in self.own]
        if thawed:
            self.trained.update(map(id, thawed))
            self.parameters += thawed
            if self._dtype is not None:
                self._widen(thawed)
            self._leave(self.now())

    def absorb(self) -> None:
        """Note the gradients after a backward. If there are new ones, give each memory of its own."""
        now, left = self.now() if self.is_elsewhere else list(map(GRADIENT_OF, self.parameters)), self.left
        if len(now) != len(left) or not all(map(operator.is_, now, left)):
            self._leave(self._unalias(now))

    def _leave(self, now: list[Tensor | None]) -> None:
        self.left = now
        self.has_gaps = not all(isinstance(gradient, Tensor) for gradient in now)

    def now(self) -> list[Tensor | None]:
        """All tensors that may hold a part of the accumulated gradients now."""
        now: list[Any] = list(map(GRADIENT_OF, self.parameters))
        if self._are_views:
            now = [None if gradient is None else VIEW for gradient in now]
        return now + self._backend.held_gradients() if self._holds_elsewhere else now  # type: ignore[operator]

    def _unalias(self, now: list[Tensor | None]) -> list[Tensor | None]:
        """Replace each gradient that shares memory with another by a copy.

        Parameters that reach the loss through views, e.g. ``a.squeeze() + b.squeeze()``, may get gradients that are
        views of one tensor. Adding to one of them, or dividing it, would change the other.
        """
        own = zip(now, range(len(self.parameters)), strict=False)  # without the tensors of the backend
        with unobserved():  # an address is not a result of the device
            taken = sorted([(g.data_ptr(), g.nbytes, i) for g, i in own if _has_address(g)])
        end, has_moved = 0, False
        for start, nbytes, index in taken:
            if start < end and start:  # 0: tensors without elements have no memory
                gradient = self.parameters[index].grad
                assert gradient is not None
                self.parameters[index].grad = gradient.clone()
                has_moved = True
            else:
                end = start + nbytes
        return self.now() if has_moved else now

    def exist(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(gradient is not None for gradient in map(GRADIENT_OF, self.named.values()))

    def settle(self) -> None:
        """Put the sums into ``.grad``, after the last backward and before ranks exchange them. They are there."""

    def let_go(self) -> None:
        self.left = []
        self.groups.clear()

    def clear(self) -> None:
        self.let_go()
        for parameter in self.named.values():
            parameter.grad = None
        self._unwiden()

    def _unwiden(self) -> None:
        for parameter, dtype in self._widened.values():
            parameter.grad_dtype = dtype
        self._widened.clear()

    def _widen(self, parameters: Iterable[Tensor]) -> None:
        dtype = self._dtype
        assert dtype is not None
        for parameter in parameters:
            kept = parameter.grad_dtype
            if kept is not None and kept.itemsize < parameter.dtype.itemsize:
                parameter.grad_dtype = parameter.dtype  # it was set when the parameter was narrower, too
            if parameter.dtype.is_floating_point and parameter.dtype.itemsize < dtype.itemsize:
                self._widened[id(parameter)] = parameter, parameter.grad_dtype  # type: ignore[assignment]
                parameter.grad_dtype = dtype

    # ------------------------------------------------------------------------------------------ at its close

    def gather(self) -> None:
        self.groups.gather(self.named, self._widened)

    def divide(self, divisor: float | Tensor, *, narrows: bool = True) -> None:
        """Divide all gradients in one pass. Widened ones get the dtype of their parameters again, if it `narrows`."""
        self.groups.divide(divisor, with_wide=not narrows)
        for parameter, dtype in self._widened.values() if narrows else ():
            if (gradient := parameter.grad) is not None:
                factor = 1 / divisor
                if isinstance(factor, Tensor):
                    factor = factor.to(gradient.device, torch.float32, non_blocking=True)
                if gradient.layout is torch.sparse_coo:
                    narrowed = (gradient * factor).to(parameter.dtype)
                else:
                    narrowed = torch.empty_like(gradient, dtype=parameter.dtype)
                    torch.mul(local_tensor(gradient), factor, out=local_tensor(narrowed))
                parameter.grad = None  # one at a time, so that the wide and the narrow ones never all exist at once
                parameter.grad_dtype = dtype
                parameter.grad = narrowed


def _has_address(gradient: object) -> TypeGuard[Tensor]:
    return isinstance(gradient, Tensor) and not isinstance(gradient, DTensor) and gradient.layout == torch.strided
