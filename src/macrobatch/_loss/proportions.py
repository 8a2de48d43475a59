"""Whether two numbers of each micro-batch keep the same proportion over a window, from sums alone.

Numbers a and b of all micro-batches are in proportion exactly if ``sum(a * a) * sum(b * b) == sum(a * b) ** 2``. So
sums are enough, which can be added up over micro-batches, recordings and ranks. On the host they are exact. On a device
they are floats, so whole numbers are compared by their remainders too: those are small enough for exact sums.
"""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from macrobatch._torch.tensors import wide

Number = int | float | Tensor
PRIME = 1_000_003  # sums of 4,000 products of remainders are exact in float64
EXACT = 1e-12  # of squares: numbers may be 1e-6 apart
NUM_SUMS = 8  # on the device, for each kind of pair


class Kind(IntEnum):
    """What is compared."""

    ITEMS = 0  # the items given with what the loss is a mean over. They may all be 1: equal weights, by choice
    PARTS = 1  # the counts of several means that are added up
    EXPRESSION = 2  # a constant with the names of the nodes and their factors, as a number


Pair = tuple[int, Number, Number]  # the kind, plus the number of kinds for each column before


class HostSums(NamedTuple):
    """The sums of pairs (a, b) of numbers of the host; they are exact for whole numbers."""

    aa: int | float = 0
    ab: int | float = 0
    bb: int | float = 0
    others: int = 0  # how many a are not 1

    def plus(self, a: int | float, b: int | float) -> HostSums:
        """With one more pair."""
        if not a:
            return self
        return HostSums(self.aa + a * a, self.ab + a * b, self.bb + b * b, self.others + (a != 1))

    def row(self) -> list[float]:
        """The same numbers as those of `_sums`."""
        squares = self[:3]
        is_whole = all(isinstance(one, int) for one in squares)
        return [*squares, *(one % PRIME if is_whole else 0 for one in squares), self.others, not is_whole]


NOTHING = HostSums()


class Proportions:
    """The sums of all pairs of numbers of a window. A pair whose first number is 0 does not count.

    >>> window = Proportions()
    >>> window.add((Kind.ITEMS, 3, 15))
    >>> window.fits((Kind.ITEMS, 4, 20)), window.fits((Kind.ITEMS, 4, 21))
    (True, False)
    """

    def __init__(self, columns: int = 1) -> None:
        self.last: dict[int, tuple[Number, Number]] = {}
        self._columns = columns
        self._host: dict[int, HostSums] = {}  # of numbers on the host
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._tolerance = 0.0
        self.on_device = False  # whether only the device knows some of them

    def __bool__(self) -> bool:
        """Whether there was a pair."""
        return bool(self.last)

    def fits(self, pair: Pair) -> bool:
        """Whether a pair fits those before, as far as the host knows."""
        kind, a, b = pair
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return True
        aa, ab, bb, others = self._host.get(kind, NOTHING).plus(a, b)
        tolerance = max(self._tolerance, _tolerance_of(a), _tolerance_of(b))
        is_choice = kind % len(Kind) == Kind.ITEMS and not others
        return is_choice or abs(aa * bb - ab * ab) <= tolerance * aa * bb

    def add(self, pair: Pair, device: torch.device | None = None) -> None:
        """Add a pair. If one of them is a tensor, `device` is where both are kept."""
        kind, a, b = pair
        self.last[kind] = a, b
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            self._pending.append((kind, _on(device, a), _on(device, b)))
            self.on_device = True
        else:
            self._host[kind] = self._host.get(kind, NOTHING).plus(a, b)
        self._tolerance = max(self._tolerance, _tolerance_of(a), _tolerance_of(b))

    def merge(self, other: Proportions) -> None:
        """Add what the host knows of other micro-batches."""
        for kind, more in other._host.items():
            self._host[kind] = HostSums(*map(operator.add, self._host.get(kind, NOTHING), more))
        self._tolerance = max(self._tolerance, other._tolerance)
        self.last |= other.last
        self.on_device |= other.on_device

    def fold(self) -> Tensor | None:
        """The sums of what was added on the device since the last call, one row per kind; None if there is nothing."""
        pending, self._pending = self._pending, []
        if not pending:
            return None
        rows = [[(a, b) for other, a, b in pending if other == key] for key in self._keys()]
        nothing = torch.zeros(NUM_SUMS, dtype=pending[0][1].dtype, device=pending[0][1].device)
        return torch.stack([_sums(pairs) if pairs else nothing for pairs in rows])

    def of_host(self, device: torch.device) -> Tensor:
        """The sums of the host, in the same form."""
        if not self._host:
            return nothing_on(device, self._columns)
        rows = [self._host.get(key, NOTHING).row() for key in self._keys()]
        return torch.tensor(rows, dtype=wide(device), device="cpu").to(device, non_blocking=True)

    def _keys(self) -> range:
        return range(self._columns * len(Kind))

    def broken(self, sums: Tensor) -> Tensor:
        """Whether these sums, of all micro-batches and ranks, are not in proportion, for each kind."""
        aa, ab, bb, *small, others, fractions = sums.unbind(1)
        is_far = (aa * bb - ab * ab).abs() > max(self._tolerance, EXACT) * aa * bb
        pp, pq, qq = (one.remainder(PRIME) for one in small)
        differs = (pp * qq - pq * pq).remainder(PRIME) != 0
        return (others > 0) & (is_far | (differs & (fractions == 0)))


def nothing_on(device: torch.device, columns: int = 1) -> Tensor:
    """The sums of no pairs."""
    return torch.zeros(columns * len(Kind), NUM_SUMS, dtype=wide(device), device=device)


def _sums(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    a, b = (torch.stack(numbers) for numbers in zip(*pairs, strict=True))
    b = torch.where(a == 0, 0, b)
    p, q = a.remainder(PRIME), b.remainder(PRIME)
    is_other, is_fraction = (a != 1) & (a != 0), (a != a.round()) | (b != b.round())
    return torch.stack([a * a, a * b, b * b, p * p, p * q, q * q, is_other.to(a), is_fraction.to(a)]).sum(1)


def _on(device: torch.device | None, number: Number) -> Tensor:
    """A scalar on the device, in the dtype of sums. A copy: the caller may reuse its buffer."""
    if not isinstance(number, Tensor):
        assert device is not None
        return torch.full((), number, device=device, dtype=wide(device))
    there = number.device if device is None else device
    return number.detach().reshape(()).to(there, wide(there), non_blocking=True, copy=True)


def _tolerance_of(number: Number) -> float:
    """How far from proportion squares may be: rounded numbers may be, whole ones not."""
    if isinstance(number, int) or (isinstance(number, Tensor) and not number.is_floating_point()):
        return 0.0
    return max(EXACT, (8 * torch.finfo(number.dtype).eps) ** 2) if isinstance(number, Tensor) else EXACT
