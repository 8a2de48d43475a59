"""The weight of each item: its coefficient in the gradient that the optimizer got, times the items of the window.

These are the items of all ranks. A weight of 1 is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from macrobatch.auditing.records import Window

TOLERANCE = 2e-5


@dataclass(frozen=True, kw_only=True)
class Share:
    """One term of one micro-batch."""

    rank: int
    place: str
    kind: str
    count: float | None
    multiplier: float  # the constants that multiply it
    written: float  # those in the loss itself
    constants: tuple[float, ...]  # the numbers whose products these are, and those of other terms
    scale: float  # of a GradScaler
    factor: float  # what became of the gradient
    divisors: tuple[float, ...]
    samples: int | None  # the first dimension of what it adds up, if that is known
    is_regulariser: bool = False  # the same in each micro-batch

    @property
    def constant(self) -> float:
        """The constants that the program has multiplied it by."""
        return self.multiplier / self.scale

    @property
    def part(self) -> float:
        """What all items of it count together, if they are a mean; else its coefficient."""
        return self.multiplier * self.factor / math.prod(self.divisors)

    @property
    def coefficient(self) -> float | None:
        """What one item of it counts."""
        if self.kind == "sum":
            return self.part
        return self.part / self.count if self.count else None


@dataclass(kw_only=True)
class TermWeights:
    """The weights of one term in one window."""

    name: str
    shares: list[Share]
    own: float = 1.0  # the constant factor that belongs to the loss
    weights: list[float | None] = field(default_factory=list)
    scale: float | None = None

    @property
    def items(self) -> list[float | None]:
        return [share.count for share in self.shares]

    @property
    def num_items(self) -> float:
        return sum(share.count or 0.0 for share in self.shares)

    @property
    def micro_batches(self) -> int:
        """Those of the rank that has most."""
        return max(Counter(share.rank for share in self.shares).values(), default=0)

    def weigh(self) -> None:
        """Compute the weights and their mean."""
        total = self.num_items
        weights = (None if (c := s.coefficient) is None else c * total / self.own for s in self.shares)
        self.weights = [None if w is None or math.isnan(w) else w for w in weights]
        if all(share.is_regulariser for share in self.shares) and None not in self.weights:
            mean = math.fsum(w for w in self.weights if w is not None) / max(len(self.weights), 1)
            self.weights = [mean] * len(self.weights)  # only what they add up to matters
        known = [(w, s.count) for w, s in zip(self.weights, self.shares, strict=True) if w is not None and s.count]
        self.scale = sum(w * n for w, n in known) / total if total else None

    def is_exact(self, tolerance: float) -> bool:
        """Whether each item counts once."""
        return all(w is None or abs(w - 1) <= tolerance for w in self.weights)

    def is_even(self, tolerance: float) -> bool:
        """Whether all items count the same."""
        known = [w for w in self.weights if w is not None]
        return not known or max(known) - min(known) <= tolerance * max(map(abs, known))


@dataclass(kw_only=True)
class Weighed:
    """One window with the weights of its terms."""

    windows: list[Window]  # of all ranks
    terms: list[TermWeights] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    is_single: bool = False  # one backward on one rank: nothing is accumulated
    has_parts: bool = False  # whether some backwards were taken for the parts of one loss

    @property
    def tolerance(self) -> float:
        """Two micro-batches that differ by less count the same."""
        is_measured = any(share.factor != 1 for term in self.terms for share in term.shares)
        return max(TOLERANCE, 2 * max(w.rounding for w in self.windows) if is_measured else 0.0)
