"""Compares the windows of a step with one big batch, and knows which error rounding may cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from macrobatch.types import Reduction
from macrobatch.verification.bigbatch import BigBatch, Weighted
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.observation import Call, Observation, ObservedWindow
from macrobatch.verification.sample_matching import MatchedSamples
from macrobatch.verification.whole_loss import WholeLoss

FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BIG_BATCH_FACTOR = 3.0  # allowed: this times the error of one big batch in the step's precision
SCALING_FACTOR = 10.0  # allowed without a float64 copy: this times the error of scaling the loss by ODD
ODD = 0.7390851332151607  # not close to a power of two
MAX_BOUND = 0.3  # a larger error is wrong in every precision


@dataclass(kw_only=True, eq=False)
class Comparison:
    """A window of the step, and the gradient that it should have.

    Attributes:
        matches: the samples of its calls on this rank; None if they are unknown.
        samples: the samples of this rank in the expected gradient; None: the whole batch.
        micro_batches: their number on the rank that has most.
        scale: the largest absolute value in the expected gradient of the whole model; errors are relative to it.
        bound: the largest error that counts as rounding.
        clipped_norm: the norm that its gradient was clipped to, if it was.
    """

    observed: ObservedWindow
    matches: MatchedSamples | None
    samples: list[int] | None
    micro_batches: int
    actual: Gradient
    expected: Gradient
    scale: float
    bound: float
    clipped_norm: float | None = None
    doubt: str = ""  # why the gradient cannot be judged: it was changed after the last backward
    remaining_factor: float = 1.0  # its gradient divided by that of the hypothesis that fits best

    @property
    def parts(self) -> list[list[int]] | None:
        """The samples of each micro-batch on this rank; None if they are unknown."""
        return None if self.matches is None else self.matches.parts

    @cached_property
    def errors(self) -> dict[str, float]:
        """For each parameter, the largest difference relative to `scale`."""
        if not math.isfinite(self.scale):  # the expected gradient is not finite
            return dict.fromkeys(self.actual.parts, math.inf)
        factor = 1.0 if self.clipped_norm is None else self.factor
        return {
            name: apart / self.scale / factor for name, apart in self.actual.distances(self.expected, factor).items()
        }

    @property
    def error(self) -> float:
        return max(self.errors.values(), default=0.0)

    @cached_property
    def factor(self) -> float:
        """The factor that brings the expected gradient closest to the actual one."""
        return self.actual.fit(self.expected)

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound

    @property
    def tolerance(self) -> float:
        """The largest relative error of an explanation that fits."""
        return tolerance_for(self.bound)


class Hypothesis(NamedTuple):
    """A known way to weight micro-batches; the weights in `gradient` add up to 1."""

    name: str | None  # None: the right weights
    gradient: Gradient
    evidence: str = ""
    cure: str = ""
    allows_factor: bool = True  # whether a factor is a separate mistake


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The error that rounding may cause, and the reference it is measured against."""

    bound: float
    reference: str
    why_not: str | None = None  # the reason why there is no float64 copy
    autocast_dtype: torch.dtype | None = None

    @staticmethod
    def of(big: BigBatch, observation: Observation) -> Precision:
        dtypes = {p.dtype.to_real() for p in big.model.parameters() if p.requires_grad}
        if observation.autocast_dtype is not None:
            dtypes.add(observation.autocast_dtype)
        lowest = min({*dtypes, observation.lowest_dtype}, key=lambda dtype: dtype.itemsize)
        name = str(lowest).removeprefix("torch.")
        if dtypes == {torch.float64}:
            return Precision(bound=_smallest_bound(lowest), reference="one big batch in float64")
        why_not = big.copy()
        if why_not is not None:  # the reference is rounded too
            bound = _smallest_bound(lowest) * (5 if lowest == torch.float32 else 1)
            autocast, reference = observation.autocast_dtype, f"one big batch in {name}"
            return Precision(bound=bound, reference=reference, why_not=why_not, autocast_dtype=autocast)
        weights = max(_smallest_bound(p.dtype.to_real()) for p in big.trained_model.parameters() if p.requires_grad)
        return Precision(
            bound=max(weights, _smallest_bound(lowest) / 4),
            reference=f"one big batch in float64 (the step ran in {name})",
            autocast_dtype=observation.autocast_dtype,
        )

    def bound_for(self, case: Case, window: Comparison) -> float:
        """The bound for a window, from the error of one big batch in the step's own precision.

        Without a float64 copy, that error is estimated by multiplying the loss by a number: without rounding, the
        gradient would be multiplied exactly. (A model in float64 may have layers that compute in float32.)
        """
        if case.big.is_float64_copy:
            with case.big.in_own_precision(self.autocast_dtype):
                own, number, times = case.expected_gradient(window.samples), 1.0, BIG_BATCH_FACTOR
        else:
            own, number, times = case.expected_gradient(window.samples, ODD), ODD, SCALING_FACTOR
        error = own.only(window.observed.names).distance(window.expected, number) / (number * window.scale)
        return max(self.bound, min(times * error, MAX_BOUND))


def tolerance_for(bound: float) -> float:
    """The largest relative error of an explanation that fits, if errors up to `bound` are rounding."""
    return max(min(max(10 * bound, 1e-9), 0.05), 1.5 * bound)


def _smallest_bound(dtype: torch.dtype) -> float:
    return FLOOR.get(dtype, FLOOR[torch.bfloat16])


@dataclass(eq=False)
class Case:
    """All that is known about a step.

    Attributes:
        reruns: two more runs of the step: with other gradients in ``.grad`` at its start, and with none.
        divides_by_samples: whether a summed loss without items is divided by the number of samples.
        expected_windows: how many optimizer steps the step should take; None: any number.
        big_batch_calls: the calls of the model for one big batch.
        is_batch_unused: whether the model got no row of the batch.
        has_another_loss: asks whether the loss of the whole batch was another one after the step.
        has_foreign_leftover: whether a window contains the backward of another optimizer's step.
        unrepeatable: why one big batch cannot repeat the random numbers of the step, if it draws any.
        run_doubled: runs the step again with doubled gradients; returns None if that is impossible.
        repeat_error: the difference between two runs of one big batch; 0 if it is rounding.
        whole_loss: the loss, if it is a loss of the whole batch (``joint=``). Then parts of the batch tell little.
        scaling_error: the error of the gradient of twice the loss against twice the gradient; 0 if it is rounding.
    """

    observation: Observation
    reruns: tuple[Observation, Observation] | None
    big: BigBatch
    reduction: Reduction
    divides_by_samples: bool
    expected_windows: int | None
    precision: Precision
    big_batch_calls: list[Call]
    windows: list[Comparison] = field(default_factory=list)
    is_batch_unused: bool = False
    has_another_loss: Callable[[], bool] = lambda: False
    has_foreign_leftover: bool = False
    unrepeatable: str = ""
    run_doubled: Callable[[], Observation | None] = lambda: None
    repeat_error: float = 0.0
    scaling_error: float = 0.0
    whole_loss: WholeLoss | None = None

    @cached_property
    def doubled_observation(self) -> Observation | None:
        """The step with doubled gradients; None on all ranks if any rank cannot run it again."""
        observation = None if self.big.ranks.is_sharded else self.run_doubled()
        unknown = observation is None or len(observation.windows) != len(self.observation.windows)
        return None if self.big.ranks.largest(float(unknown)) else observation

    @property
    def has_wrong_count(self) -> bool:
        """Whether the number of optimizer steps is not the expected one."""
        taken = sum(not window.is_probe for window in self.observation.windows)
        return self.expected_windows is not None and taken != self.expected_windows

    @cached_property
    def has_equal_step_counts(self) -> bool:
        """Whether all ranks took the same number of optimizer steps."""
        own = float(len(self.observation.windows) if self.observation.has_stepped else 0)
        return self.big.ranks.largest(own) == -self.big.ranks.largest(-own)

    @cached_property
    def is_open(self) -> bool:
        """Whether micro-batches came after the last optimizer step."""
        return self.observation.has_stepped and bool(self.big.ranks.largest(len(self.observation.open_calls)))

    def focus(self, window: ObservedWindow) -> None:
        """Compute with the weights that a window had from now on."""
        self.big.weights = window.weights

    def total_samples(self, window: Comparison) -> int | None:
        own = None if window.parts is None else sum(map(len, window.parts))
        if own is None:
            return None
        return int(self.big.ranks.sum(own))

    # ------------------------------------------------------------------------------------------ gradients

    def spread(self, window: Comparison) -> float:
        """How far the ranks' versions of a gradient are apart, relative to the largest gradient."""
        if self.big.ranks.group is None or self.big.ranks.is_sharded:
            return 0.0
        return window.actual.spread() / (window.expected.largest or 1.0)

    def expected_gradient(self, samples: list[int] | None, times: float = 1.0) -> Gradient:
        """The gradient of `times` the loss of one big batch of these samples (None: all), on all ranks."""
        parts = [samples] if samples is None or samples else []
        if self.big.terms:
            return self.big.gradient(
                [Weighted(part, w) for part, w in zip(parts, self.shares(parts, times), strict=True)]
            )
        if self.big.ranks.group is None and self.reduction == "mean":
            return self.big.gradient([Weighted(part, times) for part in parts])
        items = self.big.items(parts)
        total = self.big.ranks.sum(sum(items)) or 1.0
        if self.reduction == "mean":
            return self.big.gradient([Weighted(part, times * n / total) for part, n in zip(parts, items, strict=True)])
        divides = self.reduction == "sum" and (self.big.has_items or self.divides_by_samples)
        divisor = total if divides else 1.0
        return self.big.gradient([Weighted(part, times / divisor) for part in parts])

    def shares(self, parts: Sequence[Sequence[int] | None], times: float = 1.0) -> list[dict[str, float]]:
        """The right weights of the parts' terms: their shares of the items of all parts on all ranks."""
        items = self.big.items_of_terms(parts)
        totals = {name: self.big.ranks.sum(sum(own[name] for own in items)) or 1.0 for name in self.big.terms}
        return [{name: times * own[name] / totals[name] for name in own} for own in items]

    def weighted_gradient(self, parts: Sequence[Sequence[int]], weights: Sequence[float]) -> Gradient:
        """The gradient of the weighted mean of the parts' mean losses, on all ranks."""
        total = self.big.ranks.sum(sum(weights)) or 1.0
        items = [1.0] * len(parts) if self.reduction == "mean" else self.big.items(parts)
        terms = zip(parts, weights, items, strict=True)
        return self.big.gradient([Weighted(part, weight / total / (n or 1.0)) for part, weight, n in terms if weight])
