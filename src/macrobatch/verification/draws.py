"""Repeats the random numbers of a step in one big batch, as a checkpoint repeats those of its forward.

A step draws noise, masks or permutations for each micro-batch. One big batch draws the same numbers, if each of its
draws has the rows that the samples had in their micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from macrobatch._torch.autograd import backward_under_way
from macrobatch._torch.draws import Drawing, RandomOperations

PERMUTATION = "randperm"


class Draw(NamedTuple):
    """Random numbers that a forward has drawn.

    Attributes:
        backward: the number of the next backward.
        value: the numbers; None if they cannot be repeated.
    """

    backward: int
    name: str
    value: Tensor | None


class UnrepeatableError(Exception):
    """One big batch draws other numbers than its micro-batches. The argument says which."""


class Repetition:
    """The random numbers that one big batch of some samples draws.

    Args:
        whole: the draws of one big batch of all samples.
        parts: for each micro-batch, its samples and its draws.
    """

    def __init__(self, whole: Sequence[Draw], parts: Sequence[tuple[Sequence[int], Sequence[Draw]]]) -> None:
        count = sum(len(samples) for samples, _ in parts)
        self._parts = [(list(samples), aligned(whole, draws)) for samples, draws in parts]
        self._place = {sample: (i, row) for i, (samples, _) in enumerate(parts) for row, sample in enumerate(samples)}
        self._whole, self._num_samples = list(whole), count
        self._next, self._by_state = 0, dict[bytes, Tensor]()
        self._samples: Sequence[int] = ()

    def during(self, samples: Sequence[int]) -> RandomOperations:
        """A context in which the draws of a loss of these samples are those of the step."""
        self._samples, self._next = samples, 0
        self._by_state.clear()
        return RandomOperations(self._draw)

    def _draw(self, drawing: Drawing) -> Tensor | None:
        if backward_under_way() != -1:  # a checkpoint computes it again
            if drawing.state not in self._by_state:
                raise UnrepeatableError(f"a checkpoint draws other numbers for {drawing.name}")
            return self._by_state[drawing.state]
        index, self._next = self._next, self._next + 1
        if index >= len(self._whole) or self._whole[index].name != drawing.name or drawing.result is None:
            raise UnrepeatableError(f"the loss does not draw {drawing.name} in every micro-batch alike")
        value = self._by_state[drawing.state] = self._value(index, drawing.result)
        return value

    def _value(self, index: int, like: Tensor) -> Tensor:
        values = [draws[index].value for _, draws in self._parts]
        places = [self._place[sample] for sample in self._samples if sample in self._place]
        if len(places) < len(self._samples) or any(value is None for value in values):
            raise UnrepeatableError(f"some samples drew nothing by {self._whole[index].name}")
        if self._whole[index].name == PERMUTATION and like.numel() == len(places):
            position = {sample: place for place, sample in enumerate(self._samples)}
            chosen = [self._parts[i][0][int(values[i][row])] for i, row in places]  # type: ignore[index]
            if any(sample not in position for sample in chosen):
                raise UnrepeatableError("a permutation of other samples")
            return torch.tensor([position[sample] for sample in chosen], dtype=like.dtype)
        for dimension in range(like.ndim):
            sizes = [value.shape[dimension] for value in values]  # type: ignore[union-attr]
            each = like.shape[dimension] // (len(places) or 1)
            others = [(*value.shape[:dimension], *value.shape[dimension + 1 :]) for value in values]  # type: ignore[union-attr]
            own = (*like.shape[:dimension], *like.shape[dimension + 1 :])
            fits = all(size == each * len(samples) for size, (samples, _) in zip(sizes, self._parts, strict=True))
            if each and like.shape[dimension] == each * len(places) and fits and all(other == own for other in others):
                rows = [values[i].narrow(dimension, row * each, each) for i, row in places]  # type: ignore[union-attr]
                return torch.cat(rows, dimension)
        if all(value.shape == like.shape and torch.equal(value, values[0]) for value in values):  # type: ignore[union-attr, arg-type]
            return values[0]  # type: ignore[return-value]
        raise UnrepeatableError(f"{self._whole[index].name} draws numbers for a whole micro-batch, not for each sample")


def aligned(whole: Sequence[Draw], draws: Sequence[Draw]) -> list[Draw]:
    """The draws of a micro-batch that correspond to those of one big batch: a loop may draw others before.

    >>> one, two = Draw(0, "rand", torch.zeros(2)), Draw(0, "randperm", torch.zeros(9))
    >>> aligned([one], [two, one]) == [one]
    True
    """
    left, found = list(draws), list[Draw]()
    for wanted in reversed(whole):
        while left and not _is_alike(wanted, left[-1]):
            left.pop()
        if not left:
            raise UnrepeatableError(f"a micro-batch of the step does not draw {wanted.name} as loss_fn does")
        found.append(left.pop())
    return found[::-1]


def _is_alike(one: Draw, other: Draw) -> bool:
    if one.name != other.name or one.value is None or other.value is None:
        return False
    pairs = zip(one.value.shape, other.value.shape, strict=False)
    return one.value.ndim == other.value.ndim and sum(a != b for a, b in pairs) <= 1


def num_samples(whole: Sequence[Draw], draws: Sequence[Draw], count: int) -> int | None:
    """The number of samples of a micro-batch, from the shapes of what it draws; None if they do not tell."""
    for wanted, draw in zip(whole, aligned(whole, draws), strict=True):
        assert wanted.value is not None
        assert draw.value is not None
        for size, own in zip(wanted.value.shape, draw.value.shape, strict=True):
            if size % count == 0 and own % (size // count) == 0 and size:
                return int(own // (size // count))
    return None
