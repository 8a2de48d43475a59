"""The gradients of a window's parameters: cleared, widened, guarded, measured, scaled.

Everything here treats them as a whole, grouped by device and dtype so that one call of torch's foreach kernels serves
a group. Nothing is read by the host.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

try:
    from torch.autograd.graph import _engine_run_backward
except ImportError:  # not a public name: without it everything works, a little slower
    _engine_run_backward = None  # type: ignore[assignment]

from macrobatch.collectives import local
from macrobatch.errors import BackendError, UsageError
from macrobatch.placements import Spread, layout_of, norm_over_ranks, settled, spread_over
from macrobatch.window import wide

HALF = (torch.float16, torch.bfloat16)
GRADIENT_OF = operator.attrgetter("grad")
VERSION_OF = operator.attrgetter("_version")
_get_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None)


def run_backward(loss: Tensor, seed: Tensor, inputs: Sequence[nn.Parameter] | None) -> None:
    """``torch.autograd.backward(loss, seed, inputs=inputs)``, by its last line alone.

    What that function does before it, checking what is known to be right here, takes as long as the backward of a small
    layer.
    """
    if type(loss) is Tensor and _engine_run_backward is not None:
        inputs = inputs or ()
        _engine_run_backward((loss,), (seed,), False, False, inputs, allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, seed, inputs=inputs)


def num_nodes() -> int:
    """How many nodes this thread has added to graphs so far; always 0 where torch does not tell."""
    return 0 if _get_sequence_nr is None else int(_get_sequence_nr())


class Kind(NamedTuple):
    """What one call of a foreach kernel can serve."""

    device: torch.device
    dtype: torch.dtype
    widened: bool
    spread: Spread  # over ranks


class Parameters:
    """The parameters of some models and optimizers, by name; looked through anew only where something changed."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._seen: object = None
        self.trainable()  # an optimizer of some other model is an error already

    def trainable(self) -> dict[str, nn.Parameter]:
        """Those that require a gradient now, each once: they may be frozen, thawed or replaced between windows."""
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        seen = [(id(p), p.requires_grad) for p in held]
        if seen != self._seen:
            self._all = self._look_through(held)
            self._seen = seen
        trainable = {name: parameter for name, parameter in self._all.items() if parameter.requires_grad}
        if not trainable:
            raise BackendError("no parameter of the given models requires a gradient: there is nothing to train.")
        return trainable

    def _look_through(self, held: Sequence[Tensor]) -> dict[str, nn.Parameter]:
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


class Gradients:
    """The gradients that one window accumulates.

    Args:
        named: the trainable parameters, each once, by the name that errors call it.
        accumulate_dtype: sums gradients of narrower parameters in this dtype.
        shards: the groups of ranks that hold other parts of plain gradients. (A DTensor knows its own.)
        watched: how many parameters are looked at between backwards, spread over all of them; None: all.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        accumulate_dtype: torch.dtype | None = None,
        shards: tuple[Any, ...] = (),
        watched: int | None = None,
    ) -> None:
        self.parameters = list(named.values())
        self.named = named
        self._watched = self.parameters[:: -(-len(self.parameters) // watched)] if watched else self.parameters
        self._plain = Spread(shards)
        self._spreads: dict[Any, Spread] = {}  # by layout: of all parameters, those without a gradient too
        self._left: list[Tensor | None] | None = None  # for each that is watched, what the last backward left ...
        self._versions: list[int] = []  # ... and how often that had been written to
        self._widened: dict[int, tuple[nn.Parameter, torch.dtype | None]] = {}  # by id, with the dtype as it was
        self._groups: dict[Kind, list[Tensor]] = {}
        self.clear()  # what is left from before belongs to no window
        if accumulate_dtype is not None:
            self._widen(accumulate_dtype)

    # ------------------------------------------------------------------------------------------ within the window

    def mark(self) -> None:
        """Remember the gradients as a backward left them, for `check_untouched`."""
        self._left = list(map(GRADIENT_OF, self._watched))
        self._versions = _versions(self._left)

    def check_untouched(self) -> None:
        """Between a backward and the next, or `step`, nobody may clear, clip or unscale: these are undivided sums."""
        if self._left is None:
            return
        now = list(map(GRADIENT_OF, self._watched))
        versions = _versions(now)
        if versions == self._versions and all(map(operator.is_, now, self._left)):
            return
        for parameter, gradient, version, left, before in zip(
            self._watched, now, versions, self._left, self._versions, strict=True
        ):
            if gradient is not left or version != before:
                name = next(name for name, named in self.named.items() if named is parameter)
                found = "cleared" if gradient is None else "changed"
                raise UsageError(
                    f"the gradients of the open window were {found} since the last backward (seen at parameter "
                    f"{name!r}). Until step() they are undivided sums: leave zero_grad() and "
                    "clip_grad_norm_() out of the loop (step() clears, and clips with max_norm=, once a window), and "
                    "call discard() to drop what was accumulated."
                )

    def any(self) -> bool:
        """Whether a gradient is there at all."""
        return any(p.grad is not None for p in self.parameters)

    def clear(self) -> None:
        """Leave no gradient, and the parameters as they were."""
        self._left = None
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, dtype in self._widened.values():
            parameter.grad_dtype = dtype
        self._widened.clear()

    def _widen(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters:
            if parameter.dtype.is_floating_point and parameter.dtype.itemsize < dtype.itemsize:
                self._widened[id(parameter)] = parameter, parameter.grad_dtype
                parameter.grad_dtype = dtype

    # ------------------------------------------------------------------------------------------ at its close

    def gather(self) -> None:
        """Group what is there, for the methods below: no backward comes any more."""
        groups: defaultdict[Kind, list[Tensor]] = defaultdict(list)
        for name, parameter in self.named.items():
            spread = self._spread_of(name, parameter)
            if (gradient := parameter.grad) is None:
                continue
            if gradient.layout != torch.strided:
                raise BackendError(
                    f"parameter {name!r} has a gradient of layout {gradient.layout}, which cannot be accumulated "
                    "exactly in one pass. Make it dense, e.g. nn.Embedding(..., sparse=False)."
                )
            if (placed := settled(gradient, parameter)) is not gradient:
                parameter.grad = gradient = placed
            part = local(gradient)
            groups[Kind(part.device, part.dtype, id(parameter) in self._widened, spread)].append(part)
        self._groups = dict(groups)

    def _spread_of(self, name: str, parameter: Tensor) -> Spread:
        layout = layout_of(parameter)
        if (spread := self._spreads.get(layout)) is None:
            spread = self._spreads[layout] = self._plain if layout is None else spread_over(*layout, name)
        return spread

    @property
    def foldable(self) -> bool:
        """Whether a float32 divisor inside the optimizer's own kernel is as good as a pass over the gradients."""
        return all(kind.dtype in (torch.float32, *HALF) and not kind.widened for kind in self._groups)

    def norm(self, order: float, device: torch.device) -> Tensor:
        """The norm of all gradients together; infinite or NaN where one of them is."""
        norms: dict[Spread, list[Tensor]] = {spread: [] for spread in self._spreads.values()}
        for kind, group in self._groups.items():
            norm = _norm_of(_norms([part for part in group if part.numel()], order), order, device)
            norms[kind.spread].append(norm.to(device, wide(device), non_blocking=True))
        whole = {spread: _norm_of(parts, order, device) for spread, parts in norms.items()}
        return norm_over_ranks(whole, order) if self._is_spread else _norm_of(list(whole.values()), order, device)

    @property
    def _is_spread(self) -> bool:
        """Whether any parameter lies in parts on several ranks."""
        return any(spread.shards for spread in self._spreads.values())

    def divide(self, divisor: float | Tensor) -> None:
        """Divide all gradients, in one writing pass; widened ones come back in their parameters' dtype."""
        factor = 1 / divisor
        for (device, dtype, widened, _), group in self._groups.items():
            if widened:
                self._narrow(device, factor)
            else:
                _multiply_alike(group, factor, device, dtype)
        self._groups = {}

    def divide_and_check(self, divisor: float | Tensor, device: torch.device) -> Tensor | None:
        """The same with a look at whether all are finite, where one kernel can do both: else None, and nothing done.

        Returns a tensor that is not zero if one was not finite.
        """
        if len(self._groups) != 1 or self._is_spread:
            return None
        ((where, dtype, widened, _), group), *_ = self._groups.items()
        if widened or where != device or dtype not in (torch.float32, *HALF):
            return None
        if not _takes_float32(where, dtype):
            return None
        found = torch.zeros((), device=device)
        inverse = (1 / divisor).float() if isinstance(divisor, Tensor) else torch.full_like(found, 1 / divisor)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)
        return found

    def _narrow(self, device: torch.device, factor: float | Tensor) -> None:
        if isinstance(factor, Tensor):
            factor = factor.to(device, torch.float32, non_blocking=True)
        for parameter, dtype in self._widened.values():
            gradient = parameter.grad
            if gradient is None or gradient.device != device:
                continue
            narrowed = torch.empty_like(gradient, dtype=parameter.dtype)
            torch.mul(local(gradient), factor, out=local(narrowed))
            parameter.grad = None  # one at a time, so that the wide and the narrow ones never all exist at once
            parameter.grad_dtype = dtype
            parameter.grad = narrowed


def multiply(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all of them in place, whatever their devices and dtypes."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), group in groups.items():
        _multiply_alike(group, factor, device, dtype)


def _multiply_alike(group: list[Tensor], factor: float | Tensor, device: torch.device, dtype: torch.dtype) -> None:
    if not isinstance(factor, Tensor):
        torch._foreach_mul_(group, factor)
    elif dtype not in HALF:
        torch._foreach_mul_(group, factor.to(device, dtype.to_real(), non_blocking=True))
    else:  # a factor in the gradients' own dtype would lose digits
        factor = factor.to(device, torch.float32, non_blocking=True)
        if _takes_float32(device, dtype):
            torch._amp_foreach_non_finite_check_and_unscale_(group, torch.zeros_like(factor), factor)
            return
        for gradient in group:
            gradient.copy_(gradient.float().mul_(factor))


def _versions(gradients: list[Tensor | None]) -> list[int]:
    """How often each was written to; -1 for none."""
    try:
        return list(map(VERSION_OF, gradients))
    except AttributeError:
        return [-1 if gradient is None else gradient._version for gradient in gradients]


def _takes_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel that a GradScaler divides with takes such gradients: on CUDA it has no bfloat16."""
    return dtype != torch.bfloat16 or device.type == "cpu"


def _norms(gradients: list[Tensor], order: float) -> Sequence[Tensor]:
    """The norm of each, at least in float32."""
    if not gradients:
        return ()
    real = not gradients[0].is_complex()
    if order == math.inf and real and gradients[0].device.type == "cpu":  # the kernel below takes ten times as long
        return [torch.stack(torch.aminmax(gradient)).abs().max() for gradient in gradients]
    return torch._foreach_norm(gradients, order, dtype=torch.float32 if gradients[0].dtype in HALF else None)


def _norm_of(norms: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The norm of what has these norms in its parts."""
    if not norms:
        return torch.zeros((), device=device, dtype=wide(device))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)), order)
