"""A step's windows beside what they should have been, and how far off they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from macrobatch.types import Reduction
from macrobatch.verification.bigbatch import BigBatch, Term
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.rows import Rows
from macrobatch.verification.seen import Call, Seen, Window

FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LIKE_ONE_BIG_BATCH = 3.0  # times the error that one big batch has itself in that precision
LIKE_ITSELF = 10.0  # times what it differs from itself in
ODD = 0.7390851332151607  # a number that no power of two is near
MEANINGLESS = 0.3  # no precision excuses more


@dataclass(kw_only=True, eq=False)
class Compared:
    """A window, with what it should have been.

    Attributes:
        rows: the samples of its calls on this rank; None where they cannot be told.
        samples: those of this rank that the window was compared with; None: the whole batch.
        micro_batches: how many it has, on the rank that has most.
        scale: the largest number in the right gradient of the whole model, which errors are shares of.
        bound: what its error may be.
        clipped: the norm that its gradient was clipped to, if it was.
    """

    window: Window
    rows: Rows | None
    samples: list[int] | None
    micro_batches: int
    found: Gradient
    right: Gradient
    scale: float
    bound: float
    clipped: float | None = None
    own_factor: float = 1.0  # that is left when the way its micro-batches are weighed is explained

    @property
    def parts(self) -> list[list[int]] | None:
        """For each micro-batch of this rank, its samples; None where they cannot be told."""
        return None if self.rows is None else self.rows.parts

    @cached_property
    def errors(self) -> dict[str, float]:
        """For each parameter, the difference as a share of the largest gradient of the model."""
        if not math.isfinite(self.scale):  # there is nothing to compare with
            return dict.fromkeys(self.found.parts, math.inf)
        factor = 1.0 if self.clipped is None else self.factor
        return {name: apart / self.scale / factor for name, apart in self.found.distances(self.right, factor).items()}

    @property
    def error(self) -> float:
        return max(self.errors.values(), default=0.0)

    @cached_property
    def factor(self) -> float:
        """What the right gradient has to be multiplied with to come closest."""
        return self.found.fit(self.right)

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound

    @property
    def tolerance(self) -> float:
        """How well an explanation has to fit."""
        return tolerance_for(self.bound)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a step may be off by rounding alone."""

    bound: float
    reference: str
    why_not: str | None  # there is no float64 copy
    autocast: torch.dtype | None

    @staticmethod
    def of(big: BigBatch, seen: Seen) -> Precision:
        dtypes = {p.dtype.to_real() for p in big.model.parameters() if p.requires_grad}
        if seen.autocast is not None:
            dtypes.add(seen.autocast)
        lowest = min({*dtypes, seen.lowest}, key=lambda dtype: dtype.itemsize)
        name = str(lowest).removeprefix("torch.")
        if dtypes == {torch.float64}:
            return Precision(bound=_floor(lowest), reference="one big batch in float64", why_not=None, autocast=None)
        why_not = big.copy()
        if why_not is not None:  # the reference is rounded too
            bound = _floor(lowest) * (5 if lowest == torch.float32 else 1)
            return Precision(bound=bound, reference=f"one big batch in {name}", why_not=why_not, autocast=seen.autocast)
        weights = max(_floor(p.dtype.to_real()) for p in big.model_itself.parameters() if p.requires_grad)
        return Precision(
            bound=max(weights, _floor(lowest) / 4),
            reference=f"one big batch in float64 (the step ran in {name})",
            why_not=None,
            autocast=seen.autocast,
        )

    def bound_for(self, case: Case, window: Compared) -> float:
        """With what one big batch is off itself, in the step's own precision.

        Without a float64 copy that shows by multiplying the loss with a number: exactly, all would be multiplied. (A
        model in float64 may have layers that compute in float32.)
        """
        if case.big.copied:
            with case.big.in_own_precision(self.autocast):
                own, number, times = case.right(window.samples), 1.0, LIKE_ONE_BIG_BATCH
        else:
            own, number, times = case.right(window.samples, ODD), ODD, LIKE_ITSELF
        error = own.only(window.window.held).distance(window.right, number) / (number * window.scale)
        return max(self.bound, min(times * error, MEANINGLESS))


def tolerance_for(bound: float) -> float:
    """How well an explanation has to fit where errors up to the bound are rounding."""
    return max(min(max(10 * bound, 1e-9), 0.05), 1.5 * bound)


def _floor(dtype: torch.dtype) -> float:
    return FLOOR.get(dtype, FLOOR[torch.bfloat16])


@dataclass(eq=False)
class Case:
    """All that is known about a step.

    Attributes:
        again: what it did when it ran once more, where other gradients were left before, and where none were.
        divides: whether sums are made means over samples where the loss counts no items.
        expected: how many optimizer steps it should have taken; None: any number.
        whole: the calls of the model for one big batch.
        run_doubled: what the step does when all gradients that reach its parameters are doubled, if it can be told.
        unrepeatable: how far one big batch is from itself, where that is more than rounding.
        unlinear: how far the gradient of twice its loss is from twice its gradient, where that is more than rounding.
    """

    seen: Seen
    again: tuple[Seen, Seen] | None
    big: BigBatch
    reduction: Reduction
    divides: bool
    expected: int | None
    precision: Precision
    whole: list[Call]
    windows: list[Compared] = field(default_factory=list)
    run_doubled: Callable[[], Seen | None] = lambda: None
    unrepeatable: float = 0.0
    unlinear: float = 0.0

    @cached_property
    def doubled(self) -> Seen | None:
        """What the step does to gradients that are twice as large; None on all ranks where some rank cannot tell."""
        seen = None if self.big.ranks.shards else self.run_doubled()
        unknown = seen is None or len(seen.windows) != len(self.seen.windows)
        return None if self.big.ranks.largest(float(unknown)) else seen

    @property
    def has_wrong_count(self) -> bool:
        """Whether the step took another number of optimizer steps than it should have."""
        return self.expected is not None and len(self.seen.windows) != self.expected

    @cached_property
    def in_step(self) -> bool:
        """Whether all ranks took as many optimizer steps."""
        own = float(len(self.seen.windows) if self.seen.stepped else 0)
        return self.big.ranks.largest(own) == -self.big.ranks.largest(-own)

    @cached_property
    def is_open(self) -> bool:
        """Whether micro-batches came after the last optimizer step."""
        return self.seen.stepped and bool(self.big.ranks.largest(len(self.seen.open)))

    def total_samples(self, window: Compared) -> int | None:
        own = None if window.parts is None else sum(map(len, window.parts))
        if own is None:
            return None
        return int(self.big.ranks.sum(own))

    # ------------------------------------------------------------------------------------------ gradients

    def right(self, samples: list[int] | None, times: float = 1.0) -> Gradient:
        """That of one big batch of these samples (None: all), of all ranks; so many times."""
        parts = [samples] if samples is None or samples else []
        if self.big.ranks.group is None and self.reduction == "mean":
            return self.big.gradient([Term(part, times) for part in parts])
        items = self.big.items(parts)
        total = self.big.ranks.sum(sum(items)) or 1.0
        if self.reduction == "mean":
            return self.big.gradient([Term(part, times * n / total) for part, n in zip(parts, items, strict=True)])
        divisor = total if self.big.counted or self.divides else 1.0
        return self.big.gradient([Term(part, times / divisor) for part in parts])

    def weighted(self, parts: Sequence[Sequence[int]], weights: Sequence[float]) -> Gradient:
        """The mean of the parts' mean losses with these weights, of all ranks."""
        total = self.big.ranks.sum(sum(weights)) or 1.0
        items = self.big.items(parts) if self.reduction == "sum" else [1.0] * len(parts)
        terms = zip(parts, weights, items, strict=True)
        return self.big.gradient([Term(part, weight / total / (n or 1.0)) for part, weight, n in terms if weight])
