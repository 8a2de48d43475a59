"""The gradients of a window's parameters: clear them, accumulate them in a wider dtype, check and divide them.

All operations work on groups of gradients of the same device and dtype, so that one foreach kernel of torch processes a
whole group. Apart from `_was_moved`, the host does not read the values of gradients.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._ranks.collectives import local_tensor
from macrobatch._ranks.placements import (
    Spread,
    largest_over,
    layout_of,
    norm_over_ranks,
    redistribute_like,
    spread_over,
)
from macrobatch._step.foreach import HALF, multiply_alike, norm_dtype, norm_of, norms_of, takes_float32
from macrobatch._step.hooks import hooked_parameters
from macrobatch._step.totals import wide
from macrobatch._torch.tensors import unobserved, unscale_all, version_of
from macrobatch.errors import BackendError, UsageError

UNDIVIDED = (
    "Until step() they are undivided sums: leave zero_grad() and clip_grad_norm_() out of the loop (step() clears, and "
    "clips with max_norm=, once a window), and call discard() to drop what was accumulated. In a program of "
    "Accelerate's, put accelerator.clip_grad_norm_() under `if accelerator.sync_gradients:`."
)
GRADIENT_OF = operator.attrgetter("grad")
VIEW = object()  # stands for a view of a gradient that the backend holds elsewhere


class Kind(NamedTuple):
    """The properties that the gradients of one foreach kernel call have in common."""

    device: torch.device
    dtype: torch.dtype
    widened: bool
    spread: Spread  # how parameters are distributed over ranks


class Gradients:
    """The gradients that one window accumulates.

    Args:
        named: all parameters of the models, each once, by the names for error messages. Frozen ones may be unfrozen
            inside the window.
        accumulate_dtype: gradients of narrower parameters are summed in this dtype.
        shards: the groups of ranks that hold the other parts of plain gradients. (A DTensor knows its own groups.)
        held: returns the tensors outside of ``.grad`` in which the backend holds accumulated gradients now.
        may_move: whether the backend may copy a gradient to another tensor between backwards.
        are_views: whether ``.grad`` is a view of a tensor in `held`. Each forward makes new views.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        accumulate_dtype: torch.dtype | None = None,
        shards: tuple[Any, ...] = (),
        held: Callable[[], list[Tensor | None]] | None = None,
        may_move: bool = False,
        are_views: bool = False,
    ) -> None:
        self._all = named
        self._own_of_all = dict(zip(map(id, named.values()), named, strict=True))
        self._plain = Spread(shards)
        self._spreads: dict[Any, Spread] = {}  # by layout, also of parameters without a gradient
        self._spread_by_id: dict[int, Spread] = {}  # by id of the parameter, as a cache
        self._held = held
        self._may_move = may_move
        self._are_views = are_views
        self._tells_by_size = are_views or any(isinstance(parameter, DTensor) for parameter in named.values())
        self._accumulate_dtype = accumulate_dtype
        self._widened: dict[int, tuple[nn.Parameter, torch.dtype | None]] = {}  # by id, with the earlier grad_dtype
        self._groups: dict[Kind, list[Tensor]] = {}
        self._left: list[Tensor | None] = []  # the gradients after the last backward
        self._versions: list[int] = []  # their version counters at that time
        self._sizes: list[Tensor] = []  # the norms of those whose version counters do not show all writes
        self._writes: Tensor | None = None  # whether a norm shows a write on this rank; on the device
        self._writes_of_all: Tensor | None = None  # the same for all ranks
        self._inverse: tuple[float, Tensor] | None = None  # 1 / divisor as a float32 tensor, with the last divisor
        self.begin()

    def begin(self) -> None:
        """Begin a window: clear gradients from before, which belong to no window."""
        named = self._all
        self.named = named
        self.own = self._own_of_all  # names by the parameters' ids
        self.parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        self.hooked = hooked_parameters(named)
        self.had_stale = any(gradient is not None for gradient in map(GRADIENT_OF, named.values()))
        self._watched_ids = set(map(id, self.parameters))
        if self.had_stale:
            self.clear()
        self._widen(self.parameters)
        self._left = [None] * len(self.parameters)
        self.mark()

    def are_of(self, named: dict[str, nn.Parameter]) -> bool:
        """Whether these are the gradients of exactly these parameters."""
        return self._all is named

    # ------------------------------------------------------------------------------------------ within the window

    def are_all_watched(self, leaves: Sequence[Tensor]) -> bool:
        """Whether all of these leaves are parameters that the window accumulates."""
        return self._watched_ids.issuperset(map(id, leaves))

    def adopt(self, named: dict[str, nn.Parameter]) -> None:
        """Add parameters that the models have got since the window began."""
        self.named = self.named | named
        self.own = self.own | dict(zip(map(id, named.values()), named, strict=True))

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Also accumulate these leaves, if they are parameters of the models that were frozen when the window began."""
        thawed = [p for p in leaves if id(p) not in self._watched_ids and id(p) in self.own]
        if not thawed:
            return
        self._watched_ids.update(map(id, thawed))
        self.parameters += thawed  # type: ignore[arg-type]
        self._widen(thawed)
        self.mark()

    def mark(self) -> None:
        """Remember the gradients as a backward left them, for `check_untouched`."""
        before, self._left = self._left, self._as_they_are()
        if not _are_same(before, self._left):
            self._left = self._apart()
        self._versions = _versions(self._left)
        if self._tells_by_size:
            self._sizes = self._local_sizes()

    def check_untouched(self) -> None:
        """Raise an error if somebody has changed, cleared, clipped or unscaled gradients since the last backward."""
        now = self._as_they_are()
        versions = _versions(now)
        if versions == self._versions and _are_same(now, self._left):
            if self._tells_by_size:
                self._notice_writes()
            return
        if self._are_views:  # only some ranks may see it: all ranks learn of it at the close
            was_cleared = any(left is VIEW and gradient is None for gradient, left in zip(now, self._left, strict=True))
            device = self.parameters[0].device
            self._writes = torch.full((), was_cleared, dtype=torch.bool, device=device) | (self._writes or False)
            self._notice_writes()
            return
        for index, (gradient, left) in enumerate(zip(now, self._left, strict=True)):
            if gradient is left and versions[index] == self._versions[index]:
                continue
            if self._may_move and _was_moved(left, self._versions[index], gradient):
                continue
            raise UsageError(self._meddling(index, gradient, left))
        self.mark()

    def _meddling(self, index: int, gradient: Tensor | None, left: Tensor | None) -> str:
        """The error message for a gradient that is not as the last backward left it."""
        seen = ""
        if index < len(self.parameters):
            seen = f" (seen at parameter {self.own[id(self.parameters[index])]!r})"
        if left is None:
            return (
                f"somebody else's backward() has added gradients to the open window{seen}. Until step() they are "
                "undivided sums, so nothing else may add to them: call acc.backward(loss) instead of loss.backward(), "
                "add several losses up and pass the sum, and freeze this model where another one is trained "
                "through it. discard() drops what was accumulated."
            )
        found = "cleared" if gradient is None else "changed"
        return f"the gradients of the open window were {found} since the last backward{seen}. {UNDIVIDED}"

    def _as_they_are(self) -> list[Tensor | None]:
        """All tensors that may hold a part of the accumulated gradients now."""
        now: list[Any] = list(map(GRADIENT_OF, self.parameters))
        if self._are_views:
            now = [None if gradient is None else VIEW for gradient in now]
        return now if self._held is None else now + self._held()

    def _apart(self) -> list[Tensor | None]:
        """The same as `_as_they_are`, after each gradient that shares memory with another was replaced by a copy.

        Parameters that reach the loss through views, e.g. ``a.squeeze() + b.squeeze()``, may get gradients that are
        views of one tensor. Adding to one of them, or dividing it, would change the other.
        """
        own = zip(self._left, range(len(self.parameters)), strict=False)  # without the tensors of the backend
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
        return self._as_they_are() if has_moved else self._left

    # Two kinds of writes do not change version counters: writes to a list of DTensors at once, as in clip_grad_norm_,
    # and writes to views of what a backend holds. Norms show them.

    def _local_sizes(self) -> list[Tensor]:
        """The norms of this rank's parts of the gradients whose version counters do not show all writes."""
        parts = [local_tensor(gradient) for gradient in self._left if isinstance(gradient, DTensor)]
        if self._are_views:
            nothing = torch.zeros((), device=self.parameters[0].device)
            parts = [nothing if parameter.grad is None else parameter.grad for parameter in self.parameters]
        with torch.no_grad():
            return [torch.linalg.vector_norm(part, dtype=norm_dtype(part)) for part in parts]

    def _notice_writes(self) -> None:
        """Compare those norms with the earlier ones, on the device."""
        for now, before in zip(self._local_sizes(), self._sizes, strict=True):
            differs = (now != before) & ~(now.isnan() & before.isnan())
            self._writes = differs if self._writes is None else self._writes | differs.to(self._writes.device)

    def were_written(self) -> Tensor | None:
        """Whether somebody wrote to a gradient, on any rank that holds a part of it; None if no norms were compared."""
        if self._writes is None or self._writes_of_all is not None:  # `norm` has exchanged it
            return self._writes_of_all
        groups = dict.fromkeys(g for spread in self._spreads.values() for g in (*spread.shards, *spread.copies))
        return largest_over(groups, self._writes.float()).bool()

    def exist(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(gradient is not None for gradient in map(GRADIENT_OF, self.named.values()))

    def let_go(self) -> None:
        """Drop all references to gradients. After the close, what is in ``.grad`` belongs to the user."""
        self._left, self._versions, self._sizes, self._groups = [], [], [], {}

    def clear(self) -> None:
        """Clear all gradients, and restore the ``grad_dtype`` of parameters."""
        self.let_go()
        self._writes = self._writes_of_all = None
        for parameter in self.named.values():
            parameter.grad = None
        for parameter, dtype in self._widened.values():
            parameter.grad_dtype = dtype
        self._widened.clear()

    def _widen(self, parameters: Iterable[Tensor]) -> None:
        dtype = self._accumulate_dtype
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
        """Group the gradients for the methods below. Call it after the last backward."""
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
        self._groups = {Kind(*kind): group for kind, group in groups.items()}

    def _spread_of(self, name: str, parameter: Tensor) -> Spread:
        layout = layout_of(parameter)
        if (spread := self._spreads.get(layout)) is None:
            spread = self._spreads[layout] = self._plain if layout is None else spread_over(*layout, name)
        self._spread_by_id[id(parameter)] = spread
        return spread

    @property
    def foldable(self) -> bool:
        """Whether the optimizer's kernel can divide by a float32 number as precisely as a pass over the gradients."""
        return all(kind.dtype in (torch.float32, *HALF) and not kind.widened for kind in self._groups)

    def norm(self, order: float, device: torch.device) -> Tensor:
        """The norm of all gradients together; infinite or NaN if one of them is."""
        norms: dict[Spread, list[Tensor]] = {spread: [] for spread in self._spreads.values()}
        for kind, group in self._groups.items():
            norm = norm_of(norms_of([part for part in group if part.numel()], order), order, device)
            norms[kind.spread].append(norm.to(device, wide(device), non_blocking=True))
        whole = {spread: norm_of(parts, order, device) for spread, parts in norms.items()}
        if not self._is_spread:
            return norm_of(list(whole.values()), order, device)
        flag = torch.zeros((), device=device, dtype=wide(device))
        norm, flag = norm_over_ranks(whole, order, flag if self._writes is None else flag + self._writes.to(device))
        self._writes_of_all = None if self._writes is None else flag > 0
        return norm

    @property
    def _is_spread(self) -> bool:
        """Whether the parts of any parameter are on several ranks."""
        return any(spread.shards for spread in self._spreads.values())

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
        if widened or where != device or dtype not in (torch.float32, *HALF):
            return None
        if not takes_float32(where, dtype):
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


def _versions(gradients: Sequence[Any]) -> list[int]:
    """The version counters of these tensors, which count writes; -1 if there is no tensor."""
    return [-1 if gradient is None or gradient is VIEW else version_of(gradient) for gradient in gradients]


def _was_moved(left: Tensor | None, version: int, gradient: Tensor | None) -> bool:
    """Whether a gradient was copied to another tensor, but not written to. The host waits to read the comparison."""
    if left is None or gradient is None or gradient is left or version_of(left) != version:
        return False
    return bool(((gradient == left) | (gradient.isnan() & left.isnan())).all())


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
