"""The gradients of a window: where they are accumulated, and how they are normed and divided at its close.

All operations work on groups of gradients of the same device and dtype, so that one foreach kernel of torch processes a
whole group. The host does not read the values of gradients.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import local_tensor
from macrobatch._ranks.placements import (
    Spread,
    largest_over,
    layout_of,
    norm_over_ranks,
    redistribute_like,
    spread_over,
)
from macrobatch._torch.foreach import HALF, multiply_alike, norm_of, norms_of, takes_float32
from macrobatch._torch.tensors import unobserved, unscale_all, wide
from macrobatch.errors import BackendError

GRADIENT_OF = operator.attrgetter("grad")
VIEW: Any = object()  # stands for a view of a gradient that the backend holds elsewhere

logger = logging.getLogger("macrobatch")


class Parameters:
    """The parameters of some models and optimizers, by name. It searches the models again only after a change.

    Attributes:
        shared: whether optimizers hold a parameter twice.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._seen: object = None
        self.shared = False
        if not any(parameter.requires_grad for parameter in self.named().values()):
            raise BackendError("no parameter of the given models requires a gradient: there is nothing to train.")

    def named(self, *, anew: bool = False) -> dict[str, nn.Parameter]:
        """All parameters, including frozen ones, each once. They may be frozen, unfrozen or replaced at any time.

        `anew`: search the models again, even if the optimizers hold the same parameters as before.
        """
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        seen = [(id(p), p.requires_grad) for p in held]
        if anew or seen != self._seen:
            self._all = self._search(held)
            self._seen = seen
            self.shared = len(set(map(id, held))) < len(held)
        return self._all

    def _search(self, held: Sequence[Tensor]) -> dict[str, nn.Parameter]:
        known: set[int] = set()
        named: dict[str, nn.Parameter] = {}
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, parameter in model.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[prefix + name] = parameter
        for stray in (p for p in held if id(p) not in known):
            raise BackendError(
                f"an optimizer holds a parameter of shape {tuple(stray.shape)} that belongs to no given model. Hand "
                "over all its models as a list, and make the optimizer after anything that replaces parameters."
            )
        return named


class GradientStore(Protocol):
    """Where the gradients of a window are accumulated.

    Attributes:
        named: all parameters of the models, by name.
        own: the names of these parameters, by their ids.
        parameters: those whose gradients the window accumulates.
        trained: the ids of these.
        left: the tensors that hold accumulated gradients, as the last backward left them.
        has_spread: whether parts of gradients are on several ranks, or their version counters do not show all writes.
        foldable: after `gather`, whether a fused optimizer can divide as precisely as `divide`.
    """

    named: dict[str, nn.Parameter]
    own: dict[int, str]
    parameters: list[nn.Parameter]
    trained: set[int]
    left: list[Tensor | None]

    def begin(self) -> None:
        """Begin a window. Gradients from before belong to no window."""

    def absorb(self) -> None:
        """Take over what a backward has added. Called after each."""

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Also accumulate these leaves, if they are parameters of the models."""

    def gather(self) -> None:
        """Prepare the sums for the methods below. Called after the last backward."""

    def divide(self, divisor: float | Tensor) -> None:
        """Divide all gradients, and leave them in ``.grad``, in the dtype of their parameters."""

    def let_go(self) -> None:
        """Drop all references to gradients. After the close, what is in ``.grad`` belongs to the user."""

    def clear(self) -> None:
        """Clear all gradients."""


class Kind(NamedTuple):
    """The properties that the gradients of one foreach kernel call have in common."""

    device: torch.device
    dtype: torch.dtype
    widened: bool
    spread: Spread  # how parameters are distributed over ranks


class InGrad(GradientStore):
    """Accumulates in ``.grad``, as torch does, or in a wider dtype there.

    Args:
        parameters: the parameters of the models.
        backend: the backend, which may hold gradients outside of ``.grad``.
        accumulate_dtype: gradients of narrower parameters are summed in this dtype.
    """

    def __init__(self, parameters: Parameters, backend: Local, accumulate_dtype: torch.dtype | None = None) -> None:
        self._source = parameters
        self._backend = backend
        self._dtype = accumulate_dtype if backend.abilities.leaves_are_parameters else None
        self._holds_elsewhere = backend.held_gradients() is not None
        self._are_views = backend.abilities.shows_views
        self._plain = Spread(backend.shards)
        self._all: dict[str, nn.Parameter] = {}
        self._widened: dict[int, tuple[nn.Parameter, torch.dtype | None]] = {}  # by id, with the earlier grad_dtype
        self._groups: dict[Kind, list[Tensor]] = {}
        self._inverse: tuple[float, Tensor] | None = None  # 1 / divisor as a float32 tensor, with the last divisor
        self._has_warned = False
        self.named, self.own, self.parameters, self.trained, self.left = {}, {}, [], set(), []
        self._is_spread = False  # whether parts of a parameter are on several ranks

    # ------------------------------------------------------------------------------------------ within the window

    def begin(self) -> None:
        self._backend.drop_stale_gradients()
        named = self._source.named()
        if named is not self._all:
            self._ids = dict(zip(map(id, named.values()), named, strict=True))
            self._spreads: dict[Any, Spread] = {}  # by layout, also of parameters without a gradient
            self._spread_by_id: dict[int, Spread] = {}
            self._is_spread = False
            self.tells_by_norm = self._are_views or any(isinstance(p, DTensor) for p in named.values())
            self._all = named
        self.named, self.own = named, self._ids
        if any(gradient is not None for gradient in map(GRADIENT_OF, named.values())):
            self._warn_once()
            self.clear()
        self.parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        self.trained = set(map(id, self.parameters))
        self._widen(self.parameters)
        self.left = self.now()

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
            self._widen(thawed)
            self.left = self.now()

    def absorb(self) -> None:
        """Note the gradients after a backward. If there are new ones, give each memory of its own."""
        now, left = self.now(), self.left
        if len(now) != len(left) or not all(map(operator.is_, now, left)):
            now = self._unalias(now)
        self.left = now

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

    def let_go(self) -> None:
        self.left, self._groups = [], {}

    def clear(self) -> None:
        self.let_go()
        for parameter in self.named.values():
            parameter.grad = None
        for parameter, dtype in self._widened.values():
            parameter.grad_dtype = dtype
        self._widened.clear()

    def _widen(self, parameters: Iterable[Tensor]) -> None:
        dtype = self._dtype
        if dtype is None:
            return
        for parameter in parameters:
            kept = parameter.grad_dtype
            if kept is not None and kept.itemsize < parameter.dtype.itemsize:
                parameter.grad_dtype = parameter.dtype  # it was set when the parameter was narrower, too
            if parameter.dtype.is_floating_point and parameter.dtype.itemsize < dtype.itemsize:
                self._widened[id(parameter)] = parameter, parameter.grad_dtype  # type: ignore[assignment]
                parameter.grad_dtype = dtype

    # ------------------------------------------------------------------------------------------ at its close

    def gather(self) -> None:
        """Group the gradients for the methods below."""
        groups: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for name, parameter in self.named.items():
            spread = self._spread_by_id.get(id(parameter)) or self._spread_of(name, parameter)
            if (gradient := parameter.grad) is None:
                continue
            if gradient.layout is not torch.strided:
                raise BackendError(
                    f"parameter {name!r} has a gradient of layout {gradient.layout}, which cannot be accumulated "
                    "exactly in one pass. Make it dense, e.g. nn.Embedding(..., sparse=False)."
                )
            part = gradient
            if type(gradient) is not Tensor:
                if (placed := redistribute_like(gradient, parameter)) is not gradient:
                    parameter.grad = gradient = placed
                part = local_tensor(gradient)
            groups[part.device, part.dtype, id(parameter) in self._widened, spread].append(part)
        self._groups = dict(zip(map(Kind._make, groups), groups.values(), strict=True))

    def _spread_of(self, name: str, parameter: Tensor) -> Spread:
        layout = layout_of(parameter)
        if (spread := self._spreads.get(layout)) is None:
            spread = self._spreads[layout] = self._plain if layout is None else spread_over(*layout, name)
            self._is_spread |= bool(spread.shards)
        self._spread_by_id[id(parameter)] = spread
        return spread

    @property
    def foldable(self) -> bool:
        """Whether the optimizer's kernel can divide by a float32 number as precisely as a pass over the gradients."""
        return all(kind.dtype in (torch.float32, *HALF) and not kind.widened for kind in self._groups)

    def norm(self, order: float, device: torch.device, note: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients together; infinite or NaN if one of them is.

        `note`: a number above 0 if this rank has something to tell. The returned one is that of all ranks with parts.
        """
        norms: dict[Spread, list[Tensor]] = {spread: [] for spread in self._spreads.values()}
        for kind, group in self._groups.items():
            norm = norm_of(norms_of([part for part in group if part.numel()], order), order, device)
            norms[kind.spread].append(norm.to(device, wide(device), non_blocking=True))
        whole = {spread: norm_of(parts, order, device) for spread, parts in norms.items()}
        if not self._is_spread:
            return norm_of(list(whole.values()), order, device), self.tell_ranks(note)
        told = torch.zeros((), device=device, dtype=wide(device))
        norm, told = norm_over_ranks(whole, order, told if note is None else told + note.to(device))
        return norm, None if note is None else told

    def tell_ranks(self, note: Tensor | None) -> Tensor | None:
        """The largest `note` of all ranks that hold parts or copies of the gradients."""
        if note is None or not self._spreads:
            return note
        groups = dict.fromkeys(g for spread in self._spreads.values() for g in (*spread.shards, *spread.copies))
        return largest_over(groups, note)

    def divide(self, divisor: float | Tensor) -> None:
        """Divide all gradients in one pass. Widened ones get the dtype of their parameters again."""
        factor = 1 / divisor
        for (device, dtype, widened, _), group in self._groups.items():
            if widened:
                self._narrow(device, factor)
            else:
                multiply_alike(group, factor, device, dtype)
        self._groups = {}

    def divide_and_check(self, divisor: float | Tensor, device: torch.device) -> Tensor | None:
        """Divide all gradients and check that they are finite, if one kernel can do both. Otherwise do nothing.

        Returns a tensor that is not zero if a gradient was not finite; None if nothing was done.
        """
        if len(self._groups) != 1 or self._is_spread:
            return None
        ((where, dtype, widened, _), group), *_ = self._groups.items()
        if widened or where != device or dtype not in (torch.float32, *HALF) or not takes_float32(where, dtype):
            return None
        found = torch.zeros((), device=device, dtype=torch.float32)
        inverse = (1 / divisor).float() if isinstance(divisor, Tensor) else self._inverse_of(divisor, device)
        unscale_all(group, found, inverse)
        return found

    def _inverse_of(self, divisor: float, device: torch.device) -> Tensor:
        """1 / divisor as a tensor, kept because most windows have the same divisor."""
        if self._inverse is None or self._inverse[0] != divisor or self._inverse[1].device != device:
            self._inverse = divisor, torch.full((), 1 / divisor, device=device, dtype=torch.float32)
        return self._inverse[1]

    def _narrow(self, device: torch.device, factor: float | Tensor) -> None:
        if isinstance(factor, Tensor):
            factor = factor.to(device, torch.float32, non_blocking=True)
        for parameter, dtype in self._widened.values():
            gradient = parameter.grad
            if gradient is None or gradient.device != device:
                continue
            narrowed = torch.empty_like(gradient, dtype=parameter.dtype)
            torch.mul(local_tensor(gradient), factor, out=local_tensor(narrowed))
            parameter.grad = None  # one at a time, so that the wide and the narrow ones never all exist at once
            parameter.grad_dtype = dtype
            parameter.grad = narrowed


def _has_address(gradient: object) -> TypeGuard[Tensor]:
    return isinstance(gradient, Tensor) and not isinstance(gradient, DTensor) and gradient.layout == torch.strided
