"""One big batch: the gradient that should have come out, and those that known mistakes would give.

`BigBatch` computes the gradient of any weighted sum of losses over parts of a batch, over all ranks, in float64 where
the model can be copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._cut.plans import Part
from macrobatch._cut.samples import Collate, Samples, samples_of
from macrobatch._cut.trees import map_tensors
from macrobatch._ranks.collectives import Group, local_tensor
from macrobatch._step.graph import reach_of
from macrobatch._step.snapshot import Snapshot
from macrobatch._step.validation import checked_items, checked_loss
from macrobatch._torch.modules import REPLICATED, unwrapped
from macrobatch._torch.tensors import hooks_after_accumulation, hooks_on_gradient
from macrobatch.errors import BatchError, FitError, UsageError
from macrobatch.verification.gradient import Gradient, Named, Ranks, dense, reduced
from macrobatch.verification.keep import Attributes
from macrobatch.verification.names import Names
from macrobatch.verification.seen import Call
from macrobatch.verification.witness import eager, entries_of, recorded_calls, removed

WIDE = (torch.float64, torch.complex128)
LossFunction = Callable[[Any, Any], Any]


class Term(NamedTuple):
    """A part of the batch (None: all of it), and how much its loss weighs."""

    samples: Sequence[int] | None
    weight: float


class BigBatch:
    """Gradients of a user's loss over parts of a batch, summed over all ranks.

    Args:
        model: where the step runs. The gradients are computed on a float64 copy of it, or on itself.
        collate: where the batch is a list of samples: what makes a batch of some of them.

    Attributes:
        names: the parameters of the model, by name.
        foreign: leaves outside of the model that the loss trains too; known once `entries` are.
        copied: whether the gradients are computed in float64.
        counted: whether loss_fn returns items.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, batch: Any, ranks: Ranks, collate: Collate | None = None
    ) -> None:
        self.ranks = ranks
        self._loss_fn = loss_fn
        self._outermost = model
        self._own = model if ranks.shards else unwrapped(model, REPLICATED)
        self._model = self._own
        self._autocast: torch.dtype | None = None
        self._items: dict[tuple[int, ...] | None, float] = {}  # of the parts that were asked for
        self.names = Names(self._own, fixed=ranks.shards)
        self.foreign: list[Tensor] = []
        self._reached: list[Tensor] = []  # leaves outside of the model that the last loss reached
        self.copied = False
        self.counted = False
        self._batch = batch if collate is None else collate(list(batch))
        try:
            self.samples: Samples | None = samples_of(batch, collate)
        except BatchError:
            self.samples = None

    def copy(self) -> str | None:
        """Compute in float64 from now on. Returns why not, where that is impossible."""
        if self.ranks.shards:
            return "a sharded model cannot be copied"
        try:
            twin = copy.deepcopy(self._own).double()
            for parameter in twin.parameters():
                parameter.data = _widened(parameter.data)  # complex ones too
        except Exception as error:
            return f"the model cannot be copied ({_first_line(error)})"
        twin.zero_grad()
        _copy_hooks(self.names.parameters(), self.names.parameters_of(twin))
        self._model, self.copied = twin, True
        problem = None
        try:
            gradient = self._own_gradient([Term(None, 1.0)])
            if all(part is None for part in gradient.values()):
                problem = "loss_fn does not use the model that it is given"
            elif not _is_finite(gradient) and self._is_finite_itself():
                problem = "its gradient is not finite in float64"
        except Exception as error:
            problem = f"it does not run in float64 ({_first_line(error)})"
        if self.ranks.largest(float(problem is not None)):
            self._model, self.copied = self._own, False
            return problem or "it does not run in float64 on another rank"
        return None

    def _is_finite_itself(self) -> bool:
        with self.in_own_precision(None):
            return _is_finite(self._own_gradient([Term(None, 1.0)]))

    @contextlib.contextmanager
    def in_own_precision(self, autocast: torch.dtype | None) -> Iterator[None]:
        """Compute on the model itself, with autocast where the step had it on."""
        saved = self._model, self.copied
        self._model, self.copied, self._autocast = self._own, False, autocast
        try:
            yield
        finally:
            self._model, self.copied = saved
            self._autocast = None

    @property
    def model(self) -> nn.Module:
        """The module that `loss_fn` is given: a copy, or the model itself."""
        return self._model

    @property
    def model_itself(self) -> nn.Module:
        """The plain module that is trained."""
        return self._own

    def reseed(self, seed: int) -> None:
        """Draw other random numbers from now on, also from generators that the model holds."""
        torch.manual_seed(seed)
        for module in self._model.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Generator):
                    value.manual_seed(seed)

    def calls(self, *, hooks: bool = False) -> list[Call]:
        """How the model is called for the whole batch; perhaps with hooks on all its modules."""
        entries = [self._model.get_submodule(name) for name in self._entries]
        modules = self._model.modules() if hooks else ()
        with removed([module.register_forward_hook(lambda *_: None) for module in modules]), eager():
            return recorded_calls(lambda: self.gradient([Term(None, 1.0)]), self._model, self.names, entries)

    def entries(self) -> list[nn.Module]:
        """The modules that `loss_fn` calls: the model, as it is wrapped, or parts of it."""
        self._entries = entries_of(lambda: self.gradient([Term(None, 0.0)]), self._model)
        if self.ranks.largest(len(self._reached)):  # a loss may make some itself, anew each time
            first = self._reached
            self.gradient([Term(None, 0.0)])
            self.foreign = [leaf for leaf in first if any(leaf is other for other in self._reached)]
        return [self._own.get_submodule(name) if name else self._outermost for name in self._entries]

    def items(self, parts: Sequence[Sequence[int] | None]) -> list[float]:
        """What the loss of each part (None: all of it) is a mean over; its samples where `loss_fn` does not say.

        Ranks may ask for different numbers of parts.
        """
        keys = [None if part is None else tuple(part) for part in parts]
        if self.ranks.largest(float(any(key not in self._items for key in keys))):
            self.gradient([Term(part, 0.0) for part in parts])
        return [self._items[key] for key in keys]

    def part(self, samples: Sequence[int] | None) -> Any:
        """A part of the batch."""
        if samples is None:
            part = self._batch
        else:
            assert self.samples is not None, "asked for where samples can be told apart"
            part = self.samples.take(Part(sorted(samples)))
        return map_tensors(part, _widened if self.copied else lambda tensor: tensor)  # it may be taken apart

    def gradient(self, terms: Sequence[Term]) -> Gradient:
        """The sum of the terms' gradients, each so many times, over all ranks."""
        found = self._own_gradient(terms)
        if self.ranks.group is not None and not self.ranks.shards:
            found = _summed(found, self._parameters(), self.ranks.group)
        return Gradient(found, self.ranks.group)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.names.parameters_of(self._model).items() if p.requires_grad}

    def _own_gradient(self, terms: Sequence[Term]) -> Named:
        """Of this rank; or, where every backward communicates, of all."""
        parameters = self._parameters()
        snapshot = Snapshot([self._model]), Attributes(self._model, shards=self.ranks.shards)
        hooked = [] if self.ranks.shards else list(parameters.values())
        with without_gradients(parameters.values()), _unhooked(hooked):
            try:
                for samples, weight in self._in_step(terms):
                    self._backward(samples, weight * self.ranks.average)
                    _restore(snapshot)
                return {name: None if p.grad is None else dense(local_tensor(p.grad)) for name, p in parameters.items()}
            finally:
                _restore(snapshot)

    def _in_step(self, terms: Sequence[Term]) -> Sequence[Term]:
        """As many on every rank where every backward communicates: others weigh nothing."""
        if not self.ranks.shards:
            return terms
        longest = int(self.ranks.largest(len(terms)))
        return [*terms, *[Term(None, 0.0)] * (longest - len(terms))]

    def _backward(self, samples: Sequence[int] | None, weight: float) -> None:
        try:
            loss = self._loss(samples) * weight
            self._check_complete()
            self._reached = self._foreign_leaves(loss)
            with without_gradients(self._reached):
                loss.backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError as error:
            message = _first_line(error)
        else:
            return
        raise FitError(
            f"the whole batch does not fit into memory at once, which is what the step is compared with ({message}). "
            "Hand over fewer samples: the cut matters here, not the size."
        )

    def _loss(self, samples: Sequence[int] | None) -> Tensor:
        """The loss of a part. Its items are noted."""
        with self._autocasting():
            returned = self._loss_fn(self._model, self.part(samples))
        loss, items = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
        items = checked_items(items)
        self.counted = items is not None
        if items is None and (samples is not None or self.samples is not None):
            items = len(samples) if samples is not None else self.samples.count  # type: ignore[union-attr]
        self._items[None if samples is None else tuple(samples)] = 1.0 if items is None else float(items)
        return checked_loss(loss)

    def _check_complete(self) -> None:
        """Calling the model must not make parameters: no optimizer could hold them."""
        made = self.names.strange() if self._model is self._own and not self.ranks.shards else []
        if made:
            raise UsageError(
                f"calling the model made new parameters: {', '.join(made[:3])}. Call it once before verifying it."
            )

    def _foreign_leaves(self, loss: Tensor) -> list[Tensor]:
        """Leaves outside of the model, in which the graph of a loss ends."""
        if self.ranks.shards:
            return []
        own = {id(parameter) for parameter in self._model.parameters()}
        return [leaf for leaf in reach_of(loss).leaves if id(leaf) not in own]

    @contextlib.contextmanager
    def _autocasting(self) -> Iterator[None]:
        if self._autocast is None:
            yield
            return
        device = next(self._model.parameters()).device.type
        with torch.autocast(device, dtype=self._autocast):
            yield


@contextlib.contextmanager
def without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Leaves whose ``.grad`` is None here, and as before afterwards."""
    saved = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in saved:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved:
            leaf.grad = gradient


@contextlib.contextmanager
def _unhooked(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters without what is to happen once they have their gradient: an optimizer may step there."""
    hooks = [hooks for p in parameters if (hooks := hooks_after_accumulation(p))]
    saved = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, content in zip(hooks, saved, strict=True):
            each.update(content)


def _copy_hooks(own: dict[str, nn.Parameter], copied: dict[str, nn.Parameter]) -> None:
    """What changes a gradient on its way to a parameter must change a copy's too: copying leaves hooks behind."""
    for name, parameter in own.items():
        for hook in hooks_on_gradient(parameter).values() if parameter.requires_grad else ():
            copied[name].register_hook(hook)  # type: ignore[no-untyped-call]


def _restore(snapshot: tuple[Snapshot, Attributes]) -> None:
    for part in snapshot:
        part.restore()


def _is_finite(gradient: Named) -> bool:
    return all(part is None or bool(part.isfinite().all()) for part in gradient.values())


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(WIDE[tensor.is_complex()]) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def _summed(found: Named, parameters: dict[str, nn.Parameter], group: Group) -> Named:
    """Over the ranks. A gradient is None where no rank has one."""
    present = reduced([float(part is not None) for part in found.values()], group, dist.ReduceOp.SUM)
    summed: Named = {}
    for (name, part), ranks in zip(found.items(), present, strict=True):
        if not ranks:
            summed[name] = None
            continue
        total = dense(torch.zeros_like(parameters[name])) if part is None else part.clone()
        dist.all_reduce(total, group=group)
        summed[name] = total
    return summed
