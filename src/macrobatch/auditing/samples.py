"""Some elements of every gradient, as one small matrix: a row for each leaf.

A row holds elements that are spread over the gradient, and in its last column the sum over the first half, but only
where all the elements are zero: an embedding has gradients in a few rows only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from macrobatch._ranks.collectives import local_tensor

ELEMENTS = 8
COLUMNS = ELEMENTS + 1


class Sample:
    """Elements of the gradients of some leaves at one moment. Most are only compared with the one before."""

    __slots__ = ("_matrix", "numbers", "rows", "sums")

    def __init__(self, numbers: tuple[int, ...], rows: Tensor | None, sums: dict[int, float]) -> None:
        self.numbers, self.rows, self.sums = numbers, rows, sums
        self._matrix: Tensor | None = None

    def matrix(self, count: int) -> Tensor:
        """A row for each of `count` leaves, in float64; zeros where there is no gradient."""
        if self._matrix is None or len(self._matrix) != count:
            matrix = zeros(count)
            if self.rows is not None:
                matrix[list(self.numbers), :ELEMENTS] = self.rows.cpu().double()
            for number, total in self.sums.items():
                matrix[number, ELEMENTS] = total
            self._matrix = matrix
        return self._matrix

    def same(self, other: Sample) -> bool:
        """Whether they have the same bits. If not, their matrices may still be the same."""
        if self.numbers != other.numbers or self.sums != other.sums:
            return False
        if self.rows is None or other.rows is None:
            return self.rows is other.rows
        return self.rows.dtype == other.rows.dtype and torch.equal(self.rows, other.rows)


NOTHING = Sample((), None, {})


class Leaves:
    """The leaves whose gradients are watched, each with a number. None of them is kept alive."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._leaves: list[weakref.ref[Tensor]] = []
        self._needs_sum: set[int] = set()
        self.sharded: set[int] = set()  # those of which each rank holds a part

    def __len__(self) -> int:
        return len(self._leaves)

    def number_of(self, leaf: Tensor) -> int:
        """The number of a leaf. A new one gets the next number."""
        number = self._numbers.get(id(leaf))
        if number is None or self._leaves[number]() is not leaf:  # a new tensor may have the id of an old one
            number = self._numbers[id(leaf)] = len(self._leaves)
            self._leaves.append(weakref.ref(leaf))
        return number

    def numbers_of(self, leaves: Iterable[Tensor]) -> list[int]:
        """The numbers of several leaves."""
        return [self.number_of(leaf) for leaf in leaves]

    def known(self, leaves: Iterable[Tensor]) -> list[int]:
        """The numbers of those leaves that have one."""
        found = ((self._numbers.get(id(leaf)), leaf) for leaf in leaves)
        return [number for number, leaf in found if number is not None and self._leaves[number]() is leaf]

    def items(self, numbers: Iterable[int]) -> list[tuple[Tensor, int]]:
        """The leaves with these numbers that are still alive."""
        found = ((self._leaves[number](), number) for number in sorted(numbers))
        return [(leaf, number) for leaf, number in found if leaf is not None]

    def sample(self, *, is_after_backward: bool = False) -> Sample:
        """Elements of all gradients as they are now."""
        numbers, gradients = [], []
        for number, reference in enumerate(self._leaves):
            leaf = reference()
            if leaf is not None and (gradient := leaf.grad) is not None:
                numbers.append(number)
                gradients.append(gradient)
        if not gradients:
            return NOTHING
        rows = _joined([row_of(gradient) for gradient in gradients])
        if is_after_backward and not bool(rows[:, 0].all()):
            nonzero = rows.any(1).tolist()
            for index, number in enumerate(numbers):
                if not nonzero[index] and gradients[index].numel() > ELEMENTS and number not in self.sharded:
                    self._needs_sum.add(number)
        sums = {}
        if self._needs_sum:
            found = zip(numbers, gradients, strict=True)
            sums = {number: half_sum(gradient) for number, gradient in found if number in self._needs_sum}
        return Sample(tuple(numbers), rows, sums)

    def elements(self, numbers: Iterable[int], *, of_gradients: bool) -> list[float]:
        """An element of each of these leaves, or of their gradients."""
        found = []
        for leaf, _ in self.items(numbers):
            tensor = leaf.grad if of_gradients else leaf
            found.append(float(row_of(tensor.detach())[0]) if tensor is not None else 0.0)
        return found

    def forget_sums(self) -> None:
        """Between windows: no longer sum what had zeros only."""
        self._needs_sum.clear()

    def sample_of(self, gradients: Iterable[tuple[int, Tensor | None]]) -> Tensor:
        """The matrix for gradients that are held elsewhere, by the numbers of their leaves."""
        samples = zeros(len(self._leaves))
        for number, gradient in gradients:
            if gradient is not None:
                samples[number, :ELEMENTS] = row_of(gradient.detach()).double().cpu()
                if number in self._needs_sum:
                    samples[number, ELEMENTS] = half_sum(gradient)
        return samples


def zeros(count: int) -> Tensor:
    """The matrix of as many leaves without gradients."""
    return torch.zeros(count, COLUMNS, dtype=torch.float64, device="cpu")


def row_of(gradient: Tensor) -> Tensor:
    """Elements that are spread over a gradient; the same ones for the same size."""
    if type(gradient) is not Tensor and isinstance(gradient, DTensor):
        return _row_of_part(gradient)
    if gradient.is_sparse:
        return torch.zeros(ELEMENTS, dtype=gradient.dtype, device=gradient.device)
    count = gradient.numel()
    if count >= ELEMENTS and gradient.is_contiguous():
        return gradient.as_strided((ELEMENTS,), (count // ELEMENTS,))
    if count == 0:
        return torch.zeros(ELEMENTS, dtype=gradient.dtype, device=gradient.device)
    step = max(count // ELEMENTS, 1)
    return gradient.take(torch.arange(ELEMENTS, device=gradient.device).mul_(step).clamp_(max=count - 1))


def _row_of_part(gradient: DTensor) -> Tensor:
    """The elements of the whole gradient that this rank holds; zeros for the others, and in all copies but one."""
    local, mesh = local_tensor(gradient).reshape(-1), gradient.device_mesh
    row = torch.zeros(ELEMENTS, dtype=local.dtype, device=local.device)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return row
    begin, rows = 0, gradient.shape[0] if gradient.dim() else 1
    for dimension, placement in enumerate(gradient.placements):
        if placement.is_shard(0):
            begin = min(coordinate[dimension] * -(-rows // mesh.size(dimension)), rows)
        elif placement.is_replicate():
            if coordinate[dimension]:
                return row
        else:  # cut along another dimension, or terms of a sum: where its elements are is not known here
            return row.fill_(torch.nan)
    count = gradient.numel()
    first = begin * (count // max(rows, 1))
    for index in range(ELEMENTS):
        place = min(index * max(count // ELEMENTS, 1), count - 1) - first
        if 0 <= place < local.numel():
            row[index] = local[place]
    return row


def half_sum(gradient: Tensor) -> float:
    """The sum over the first half. Sums over everything may cancel, as those of a softmax do."""
    if gradient.is_sparse:
        return float(torch.sparse.sum(gradient.detach()))
    return float(gradient.detach().reshape(-1)[: max(gradient.numel() // 2, 1)].sum(dtype=torch.float64))


def _joined(rows: list[Tensor]) -> Tensor:
    """All rows as one matrix. Most often they are on one device, and one copy is enough."""
    try:
        return torch.stack(rows)
    except RuntimeError:
        return torch.stack([row.cpu().double() for row in rows])
