"""The gradient of a whole model as one long vector, over all ranks.

All ranks must ask the same questions in the same order; all get the same answers, so that they decide alike.
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

Named = dict[str, Tensor | None]  # by the names of parameters; None: no gradient


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
        return Gradient(
            {name: _sum(part, other.parts.get(name), factor) for name, part in self.parts.items()}, self.group
        )

    def clamped(self, limit: float) -> Gradient:
        """With no number beyond +-limit."""
        return Gradient(
            {name: None if part is None else part.clamp(-limit, limit) for name, part in self.parts.items()}, self.group
        )

    @cached_property
    def largest(self) -> float:
        """The largest |number|."""
        return max(self.sizes().values(), default=0.0)

    def sizes(self) -> dict[str, float]:
        """The largest |number| of each parameter."""
        return self._over_ranks({name: _largest(part) for name, part in self.parts.items()})

    def distances(self, other: Gradient, factor: float = 1.0) -> dict[str, float]:
        """For each parameter, the largest |difference| to so many times the other."""
        return self._over_ranks(
            {name: _apart(part, other.parts.get(name), factor) for name, part in self.parts.items()}
        )

    def distance(self, other: Gradient, factor: float = 1.0) -> float:
        """The largest of them."""
        return max(self.distances(other, factor).values(), default=0.0)

    def dot(self, other: Gradient) -> float:
        products = [_dot(part, other.parts.get(name)) for name, part in self.parts.items()]
        return reduced([sum(products)], self.group, dist.ReduceOp.SUM)[0]

    def fit(self, other: Gradient) -> float:
        """The factor with which the other comes closest."""
        square = other.dot(other)
        return self.dot(other) / square if square else 0.0

    def spread(self) -> float:
        """How far the ranks' own versions, of what should be the same on all, are apart."""
        present = reduced([float(part is not None) for part in self.parts.values()], self.group, dist.ReduceOp.SUM)
        apart = [0.0]
        for part, ranks in zip(self.parts.values(), present, strict=True):
            if part is None or ranks < dist.get_world_size(self.group):
                apart.append(_largest(part))  # some have none
                continue
            mean = part.to(torch.float64, copy=True)
            dist.all_reduce(mean, group=self.group)
            apart.append(_apart(part, mean, 1 / ranks))
        return reduced([max(apart)], self.group, dist.ReduceOp.MAX)[0]

    def _over_ranks(self, numbers: dict[str, float]) -> dict[str, float]:
        return dict(zip(numbers, reduced(list(numbers.values()), self.group, dist.ReduceOp.MAX), strict=True))


def dense(gradient: Tensor) -> Tensor:
    """All its numbers: embeddings may have sparse gradients, and complex parameters complex ones."""
    gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def reduced(numbers: list[float], group: Group, how: Any) -> list[float]:
    """These numbers over all ranks of a group; None: as they are."""
    if group is None or not numbers:
        return numbers
    device = "cpu" if "cpu" in str(dist.get_backend_config(group)) else "cuda"
    together = torch.tensor(numbers, dtype=torch.float64, device=device)
    if how == dist.ReduceOp.MAX:
        together = together.nan_to_num(
            nan=math.inf, posinf=math.inf
        )  # the larger of NaN and a number may be the number
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


def projection(whole: Gradient, parts: Sequence[Gradient]) -> list[float]:
    """The weights with which the parts add up to what is closest to the whole."""
    matrix = torch.tensor([[one.dot(other) for other in parts] for one in parts], dtype=torch.float64)
    vector = torch.tensor([whole.dot(part) for part in parts], dtype=torch.float64)
    return list(torch.linalg.lstsq(matrix, vector, driver="gelsd").solution.tolist())


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
        kind = common_wrapper([model])
        if kind is None:  # synchronised by hand, if at all
            return Ranks(dist.group.WORLD if dist.get_world_size() > 1 else None)
        sync = select_backend([model], sync="window", gather="micro", process_group=None, accumulate_dtype=None)
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
        return reduced([number], self.group, dist.ReduceOp.SUM if self.group is not None else None)[0]

    def largest(self, number: float) -> float:
        return reduced([number], self.group, dist.ReduceOp.MAX if self.group is not None else None)[0]

    def same(self, answer: Any) -> Any:
        """The answer of the first rank, on all of them."""
        if self.group is None:
            return answer
        answers = [answer]
        dist.broadcast_object_list(answers, src=dist.get_global_rank(self.group, 0), group=self.group)
        return answers[0]
