"""One big batch: the gradient that should have come out, and those that known mistakes would give.

`BigBatch` computes the gradient of any weighted sum of losses over parts of a batch, over all ranks, in float64 where
the model can be copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch.arguments import checked_items, checked_loss
from macrobatch.collectives import Group, local
from macrobatch.errors import BatchError, FitError
from macrobatch.snapshot import Snapshot
from macrobatch.split import Part, Tree, transformed
from macrobatch.verification.gradient import Gradient, Named, Ranks, reduced
from macrobatch.verification.witness import Call, bare, dense, entries_of, recorded_calls

LossFunction = Callable[[Any, Any], Any]


class Term(NamedTuple):
    """A part of the batch (None: all of it), and how much its loss weighs."""

    samples: Sequence[int] | None
    weight: float


class BigBatch:
    """Gradients of a user's loss over parts of a batch, summed over all ranks.

    Args:
        model: where the step runs. The gradients are computed on a float64 copy of it, or on itself.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Any, ranks: Ranks) -> None:
        self.ranks = ranks
        self._loss_fn = loss_fn
        self._batch = batch
        self._outermost = model
        self._own = model if ranks.shards else unwrapped(model)
        self._model = self._own
        self._autocast: torch.dtype | None = None
        self._items: dict[tuple[int, ...] | None, float] = {}  # of the parts that were asked for
        self.copied = False
        self.counted = False  # whether loss_fn returns items
        try:
            self.samples: Tree | None = Tree(batch)
        except BatchError:
            self.samples = None

    def copy(self) -> str | None:
        """Compute in float64 from now on. Returns why not, where that is impossible."""
        if self.ranks.shards:
            return "a sharded model cannot be copied"
        try:
            twin = copy.deepcopy(self._own).double()
        except Exception as error:
            return f"the model cannot be copied ({_first_line(error)})"
        twin.zero_grad()
        self._model, self._batch_before, self._batch = twin, self._batch, transformed(self._batch, _widened)
        problem = None
        try:
            if all(part is None for part in self._own_gradient([Term(None, 1.0)]).values()):
                problem = "loss_fn does not use the model that it is given"
        except Exception as error:
            problem = f"it does not run in float64 ({_first_line(error)})"
        if self.ranks.largest(float(problem is not None)):
            self._model, self._batch = self._own, self._batch_before
            return problem or "it does not run in float64 on another rank"
        self.copied = True
        return None

    @contextlib.contextmanager
    def in_own_precision(self, autocast: torch.dtype | None) -> Iterator[None]:
        """Compute on the model itself, with autocast where the step had it on."""
        saved = self._model, self._batch
        if self.copied:
            self._model, self._batch = self._own, self._batch_before
        self._autocast = autocast
        try:
            yield
        finally:
            self._model, self._batch = saved
            self._autocast = None

    @property
    def model(self) -> nn.Module:
        """The module that `loss_fn` is given: a copy, or the model itself."""
        return self._model

    @property
    def model_itself(self) -> nn.Module:
        """The plain module that is trained."""
        return self._own

    def calls(self) -> list[Call]:
        """How the model is called for the whole batch."""
        entries = [self._model.get_submodule(name) for name in self._entries]
        return recorded_calls(lambda: self.gradient([Term(None, 0.0)]), self._model, entries)

    def entries(self) -> list[nn.Module]:
        """The modules that `loss_fn` calls: the model, as it is wrapped, or parts of it."""
        self._entries = entries_of(lambda: self.gradient([Term(None, 0.0)]), self._model)
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
            return self._batch
        assert self.samples is not None, "asked for where samples can be told apart"
        return Tree(self._batch).take(Part(sorted(samples)))

    def gradient(self, terms: Sequence[Term]) -> Gradient:
        """The sum of the terms' gradients, each so many times, over all ranks."""
        found = self._own_gradient(terms)
        if self.ranks.group is not None and not self.ranks.shards:
            found = _summed(found, dict(self._parameters()), self.ranks.group)
        return Gradient(found, self.ranks.group)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((bare(name), p) for name, p in self._model.named_parameters() if p.requires_grad)

    def _own_gradient(self, terms: Sequence[Term]) -> Named:
        """Of this rank; or, where every backward communicates, of all."""
        parameters = dict(self._parameters())
        snapshot = Snapshot([self._model])
        saved = {name: p.grad for name, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        try:
            for samples, weight in self._in_step(terms):
                self._backward(samples, weight * self.ranks.average)
                snapshot.restore()
            found = {name: None if p.grad is None else dense(local(p.grad)) for name, p in parameters.items()}
        finally:
            snapshot.restore()
            for name, parameter in parameters.items():
                parameter.grad = saved[name]
        return found

    def _in_step(self, terms: Sequence[Term]) -> Sequence[Term]:
        """As many on every rank where every backward communicates: others weigh nothing."""
        if not self.ranks.shards:
            return terms
        longest = int(self.ranks.largest(len(terms)))
        return [*terms, *[Term(None, 0.0)] * (longest - len(terms))]

    def _backward(self, samples: Sequence[int] | None, weight: float) -> None:
        try:
            (self._loss(samples) * weight).backward()  # type: ignore[no-untyped-call]
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

    @contextlib.contextmanager
    def _autocasting(self) -> Iterator[None]:
        if self._autocast is None:
            yield
            return
        device = next(self._model.parameters()).device.type
        with torch.autocast(device, dtype=self._autocast):
            yield


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module: not compiled, not wrapped for data parallelism."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


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
        total = torch.zeros_like(parameters[name]) if part is None else part.clone()
        dist.all_reduce(total, group=group)
        summed[name] = total
    return summed
