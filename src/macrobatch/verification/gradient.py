"""The gradient of a whole model as one vector over all ranks.

All ranks must call the same methods in the same order. All get the same results, so that they take the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._ranks.collectives import Group
from macrobatch._ranks.select import common_wrapper, select_backend

NamedGradients = dict[str, Tensor | None]  # by the names of parameters; None: no gradient


class Gradient:
    """The gradient of a whole model as one vector. All ranks must call the same methods; all get the same results.

    >>> right, wrong = Gradient({"w": torch.tensor([3.0, 4.0])}), Gradient({"w": torch.tensor([6.0, 8.0])})
    >>> wrong.distance(right), wrong.fit(right), wrong.distance(right, factor=2.0)
    (4.0, 2.0, 0.0)
    """

    def __init__(self, parts: NamedGradients, group: Group = None) -> None:
        self.parts = {name: parts[name] for name in sorted(parts)}  # the order of a set differs from rank to rank
        self.group = group

    def only(self, names: set[str]) -> Gradient:
        """The gradient of these parameters only."""
        return Gradient({name: part for name, part in self.parts.items() if name in names}, self.group)

    def plus(self, other: Gradient, factor: float = 1.0) -> Gradient:
        """This gradient plus `factor` times the other."""
        return Gradient(
            {name: _sum(part, other.parts.get(name), factor) for name, part in self.parts.items()}, self.group
        )

    def clamp(self, limit: float) -> Gradient:
        """The gradient with all numbers clamped to -limit and +limit."""
        return Gradient(
            {name: None if part is None else part.clamp(-limit, limit) for name, part in self.parts.items()}, self.group
        )

    @cached_property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(self.sizes().values(), default=0.0)

    def sizes(self) -> dict[str, float]:
        """The largest absolute value of each parameter's gradient."""
        return self._over_ranks({name: _largest(part) for name, part in self.parts.items()})

    def distances(self, other: Gradient, factor: float = 1.0) -> dict[str, float]:
        """For each parameter, the largest absolute difference to `factor` times the other."""
        return self._over_ranks(
            {name: _distance(part, other.parts.get(name), factor) for name, part in self.parts.items()}
        )

    def distance(self, other: Gradient, factor: float = 1.0) -> float:
        """The largest absolute difference to `factor` times the other."""
        return max(self.distances(other, factor).values(), default=0.0)

    def dot(self, other: Gradient) -> float:
        products = [_dot_product(part, other.parts.get(name)) for name, part in self.parts.items()]
        return reduce_numbers([sum(products)], self.group, dist.ReduceOp.SUM)[0]

    def squares(self) -> dict[str, float]:
        """The squared norm of each parameter's gradient."""
        numbers = [_dot_product(part, part) for part in self.parts.values()]
        return dict(zip(self.parts, reduce_numbers(numbers, self.group, dist.ReduceOp.SUM), strict=True))

    def fit(self, other: Gradient) -> float:
        """The factor that brings the other gradient closest to this one."""
        square = other.dot(other)
        return self.dot(other) / square if square else 0.0

    def spread(self) -> float:
        """The largest difference between the ranks' versions of a gradient that should be the same on all."""
        present = reduce_numbers(
            [float(part is not None) for part in self.parts.values()], self.group, dist.ReduceOp.SUM
        )
        apart = [0.0]
        for part, ranks in zip(self.parts.values(), present, strict=True):
            if part is None or ranks < dist.get_world_size(self.group):
                apart.append(_largest(part))  # some ranks have no gradient
                continue
            mean = part.to(torch.float64, copy=True)
            dist.all_reduce(mean, group=self.group)
            apart.append(_distance(part, mean, 1 / ranks))
        return reduce_numbers([max(apart)], self.group, dist.ReduceOp.MAX)[0]

    def _over_ranks(self, numbers: dict[str, float]) -> dict[str, float]:
        return dict(zip(numbers, reduce_numbers(list(numbers.values()), self.group, dist.ReduceOp.MAX), strict=True))


def as_dense(gradient: Tensor) -> Tensor:
    """Convert a sparse gradient to a dense one, and a complex gradient to real numbers."""
    gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def reduce_numbers(numbers: list[float], group: Group, how: Any) -> list[float]:
    """Reduce each number over the ranks of a group. Without a group they stay the same."""
    if group is None or not numbers:
        return numbers
    device = "cpu" if "cpu" in str(dist.get_backend_config(group)) else "cuda"
    together = torch.tensor(numbers, dtype=torch.float64, device=device)
    if how == dist.ReduceOp.MAX:
        together = together.nan_to_num(nan=math.inf, posinf=math.inf)  # MAX may ignore NaN
    dist.all_reduce(together, how, group=group)
    return list(together.tolist())


def sum_over_ranks(found: NamedGradients, parameters: dict[str, nn.Parameter], group: Group) -> NamedGradients:
    """Sum gradients over the ranks. A gradient stays None if no rank has one."""
    present = reduce_numbers([float(part is not None) for part in found.values()], group, dist.ReduceOp.SUM)
    summed: NamedGradients = {}
    for (name, part), ranks in zip(found.items(), present, strict=True):
        if not ranks:
            summed[name] = None
            continue
        total = as_dense(torch.zeros_like(parameters[name])) if part is None else part.clone()
        dist.all_reduce(total, group=group)
        summed[name] = total
    return summed


def is_finite(gradient: NamedGradients) -> bool:
    return all(part is None or bool(part.isfinite().all()) for part in gradient.values())


def _largest(part: Tensor | None) -> float:
    if part is None or not part.numel():
        return 0.0
    largest = part.abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def _distance(one: Tensor | None, other: Tensor | None, factor: float) -> float:
    if one is None or other is None:
        return _largest(one) if other is None else abs(factor) * _largest(other)
    return _largest(one.double() - factor * other.to(one.device, torch.float64))


def _dot_product(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return 0.0
    return float(torch.vdot(one.double().flatten(), other.to(one.device, torch.float64).flatten()).item())


def _sum(one: Tensor | None, other: Tensor | None, factor: float) -> Tensor | None:
    if other is None:
        return one
    other = factor * other.double()
    return other if one is None else one.double() + other.to(one.device)


def projection(whole: Gradient, parts: Sequence[Gradient]) -> list[float]:
    """The weights that bring the weighted sum of the parts closest to the whole."""
    matrix = torch.tensor([[one.dot(other) for other in parts] for one in parts], dtype=torch.float64)
    vector = torch.tensor([whole.dot(part) for part in parts], dtype=torch.float64)
    return list(torch.linalg.lstsq(matrix, vector, driver="gelsd").solution.tolist())


# ---------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model together, and what its wrapper does to gradients.

    Attributes:
        group: None in one process.
        is_sharded: whether every backward communicates, so that no rank can run the model alone.
        average: the number that a backward of a sharded model divides gradients by.
    """

    group: Group = None
    is_sharded: bool = False
    average: float = 1.0

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        kind = common_wrapper([model])
        if kind is None:  # the program synchronises the gradients itself, if at all
            return Ranks(dist.group.WORLD if dist.get_world_size() > 1 else None)
        sync = select_backend([model], sync="window", gather="micro", process_group=None, accumulate_dtype=None)
        if kind == "DistributedDataParallel":
            return Ranks(sync.group if dist.get_world_size(sync.group) > 1 else None)
        return Ranks(sync.group, True, sync.average)

    @property
    def world_size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def sum(self, number: float) -> float:
        return reduce_numbers([number], self.group, dist.ReduceOp.SUM if self.group is not None else None)[0]

    def largest(self, number: float) -> float:
        return reduce_numbers([number], self.group, dist.ReduceOp.MAX if self.group is not None else None)[0]

    def gather(self, answer: Any) -> list[Any]:
        """The answers of all ranks, on all ranks."""
        answers = [answer] * self.world_size
        if self.group is not None:
            dist.all_gather_object(answers, answer, group=self.group)
        return answers

    def broadcast(self, answer: Any) -> Any:
        """The value of the first rank, on all ranks."""
        if self.group is None:
            return answer
        answers = [answer]
        dist.broadcast_object_list(answers, src=dist.get_global_rank(self.group, 0), group=self.group)
        return answers[0]
