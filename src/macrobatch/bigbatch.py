"""One big batch: the gradient that should have come out, and those that known mistakes would give.

A `Gradient` is that of a whole model, over all ranks, as one long vector. `BigBatch` computes the gradient of any weighted
sum of losses over parts of a batch, in float64 where the model can be copied.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch.arguments import checked_items, checked_loss
from macrobatch.collectives import Group
from macrobatch.errors import BatchError, FitError
from macrobatch.keep import local
from macrobatch.snapshot import Snapshot
from macrobatch.split import Part, Tree, transformed
from macrobatch.sync import backend_of, sync_for
from macrobatch.witness import Call, Named, bare, recorded_calls

LossFunction = Callable[[Any, Any], Any]


# ---------------------------------------------------------------------------------------------- vectors


class Gradient:
    """The gradient of a whole model as one vector. All ranks must ask the same questions; all get the same answers.

    >>> right, wrong = Gradient({"w": torch.tensor([3.0, 4.0])}), Gradient({"w": torch.tensor([6.0, 8.0])})
    >>> wrong.distance(right), wrong.fit(right), wrong.distance(right, factor=2.0)
    (4.0, 2.0, 0.0)
    """

    def __init__(self, parts: Named, group: Group = None) -> None:
        self.parts = parts
        self.group = group

    def only(self, names: set[str]) -> Gradient:
        """Without the other parameters."""
        return Gradient({name: part for name, part in self.parts.items() if name in names}, self.group)

    def plus(self, other: Gradient, factor: float = 1.0) -> Gradient:
        """The sum of this and so many times the other."""
        return Gradient({name: _sum(part, other.parts.get(name), factor) for name, part in self.parts.items()}, self.group)

    @cached_property
    def largest(self) -> float:
        """The largest |number|."""
        return max(self.sizes().values(), default=0.0)

    def sizes(self) -> dict[str, float]:
        """The largest |number| of each parameter."""
        return self._over_ranks({name: _largest(part) for name, part in self.parts.items()})

    def distances(self, other: Gradient, factor: float = 1.0) -> dict[str, float]:
        """For each parameter, the largest |difference| to so many times the other."""
        return self._over_ranks({name: _apart(part, other.parts.get(name), factor) for name, part in self.parts.items()})

    def distance(self, other: Gradient, factor: float = 1.0) -> float:
        """The largest of them."""
        return max(self.distances(other, factor).values(), default=0.0)

    def dot(self, other: Gradient) -> float:
        products = [_dot(part, other.parts.get(name)) for name, part in self.parts.items()]
        return _reduced([sum(products)], self.group, dist.ReduceOp.SUM)[0]

    def fit(self, other: Gradient) -> float:
        """The factor with which the other comes closest."""
        square = other.dot(other)
        return self.dot(other) / square if square else 0.0

    def spread(self) -> float:
        """How far the ranks' own versions, of what should be the same on all, are apart."""
        present = _reduced([float(part is not None) for part in self.parts.values()], self.group, dist.ReduceOp.SUM)
        apart = [0.0]
        for part, ranks in zip(self.parts.values(), present, strict=True):
            if part is None or ranks < dist.get_world_size(self.group):
                apart.append(_largest(part))  # some have none
                continue
            mean = part.to(torch.float64, copy=True)
            dist.all_reduce(mean, group=self.group)
            apart.append(_apart(part, mean, 1 / ranks))
        return _reduced([max(apart)], self.group, dist.ReduceOp.MAX)[0]

    def _over_ranks(self, numbers: dict[str, float]) -> dict[str, float]:
        reduced = _reduced(list(numbers.values()), self.group, dist.ReduceOp.MAX)
        return dict(zip(numbers, reduced, strict=True))


def _reduced(numbers: list[float], group: Group, how: Any) -> list[float]:
    if group is None or not numbers:
        return numbers
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    together = torch.tensor(numbers, dtype=torch.float64, device=device)
    if how == dist.ReduceOp.MAX:
        together = together.nan_to_num(nan=math.inf, posinf=math.inf)  # the larger of NaN and a number may be the number
    dist.all_reduce(together, how, group=group)
    return list(together.tolist())


def _largest(part: Tensor | None) -> float:
    if part is None or not part.numel():
        return 0.0
    largest = part.abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def _apart(one: Tensor | None, other: Tensor | None, factor: float) -> float:
    if one is None or other is None:
        return _largest(one) if other is None else abs(factor) * _largest(other)
    return _largest(one.double() - factor * other.to(one.device, torch.float64))


def _dot(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return 0.0
    return float(torch.vdot(one.double().flatten(), other.to(one.device, torch.float64).flatten()).item())


def _sum(one: Tensor | None, other: Tensor | None, factor: float) -> Tensor | None:
    if other is None:
        return one
    other = factor * other.double()
    return other if one is None else one.double() + other.to(one.device)


# ---------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model together, and what its wrapper does to gradients.

    Attributes:
        group: None in one process.
        shards: whether every backward communicates, so that the model cannot be run on one rank alone.
        average: what a backward divides gradients by then.
    """

    group: Group = None
    shards: bool = False
    average: float = 1.0

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        kind = backend_of([model])
        if kind is None:  # synchronised by hand, if at all
            return Ranks(dist.group.WORLD if dist.get_world_size() > 1 else None)
        sync = sync_for([model], sync="window", gather="micro", process_group=None, accumulate_dtype=None)
        if kind == "DistributedDataParallel":
            return Ranks(sync.group if dist.get_world_size(sync.group) > 1 else None)
        return Ranks(sync.group, True, sync.average)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def sum(self, number: float) -> float:
        return _reduced([number], self.group, dist.ReduceOp.SUM if self.group is not None else None)[0]

    def largest(self, number: float) -> float:
        return _reduced([number], self.group, dist.ReduceOp.MAX if self.group is not None else None)[0]

    def same(self, answer: Any) -> Any:
        """The answer of the first rank, on all of them."""
        if self.group is None:
            return answer
        answers = [answer]
        dist.broadcast_object_list(answers, src=dist.get_global_rank(self.group, 0), group=self.group)
        return answers[0]


# ---------------------------------------------------------------------------------------------- gradients of losses


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
        before, self._model, self._batch_before = self._model, twin, self._batch
        self._batch = transformed(self._batch, _widened)
        try:
            gradient = self.gradient([Term(None, 1.0)])
            if all(part is None for part in gradient.parts.values()):
                raise BatchError("loss_fn does not use the model that it is given")
        except Exception as error:
            self._model, self._batch = before, self._batch_before
            return f"it does not run in float64 ({_first_line(error)})"
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
        """The module that `loss_fn` is given."""
        return self._model

    def calls(self) -> list[Call]:
        """How the model is called for the whole batch."""
        return recorded_calls(lambda: self.gradient([Term(None, 0.0)]), self._model)

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
        parameters = {bare(name): p for name, p in self._model.named_parameters() if p.requires_grad}
        snapshot = Snapshot([self._model])
        saved = {name: p.grad for name, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        try:
            for samples, weight in self._in_step(terms):
                self._backward(samples, weight * self.ranks.average)
                snapshot.restore()
            found = {name: None if p.grad is None else _dense(local(p.grad)) for name, p in parameters.items()}
        finally:
            snapshot.restore()
            for name, parameter in parameters.items():
                parameter.grad = saved[name]
        if self.ranks.group is not None and not self.ranks.shards:
            found = _summed(found, parameters, self.ranks.group)
        return Gradient(found, self.ranks.group)

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
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def _summed(found: Named, parameters: dict[str, nn.Parameter], group: Group) -> Named:
    """Over the ranks. A gradient is None where no rank has one."""
    present = _reduced([float(part is not None) for part in found.values()], group, dist.ReduceOp.SUM)
    summed: Named = {}
    for (name, part), ranks in zip(found.items(), present, strict=True):
        if not ranks:
            summed[name] = None
            continue
        total = torch.zeros_like(parameters[name]) if part is None else part.clone()
        dist.all_reduce(total, group=group)
        summed[name] = total
    return summed
