"""Micro-batches of the largest size that fits into memory: by number of samples ("auto"), or by tokens."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple, Protocol

from macrobatch._cut.memory import UNLIMITED
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import ByCount, ByTokens, Policy
from macrobatch._cut.samples import Samples, Shape
from macrobatch.errors import UsageError


class Sized(NamedTuple):
    """Micro-batches that keep to a size.

    Attributes:
        parts: the micro-batches.
        size: that of the largest, as the size that fits is counted; 1: each has one sample, and none can be smaller.
    """

    parts: list[Part]
    size: int


class Fitting(Protocol):
    """How to cut a batch, where the size of micro-batches is found by trying."""

    unit: str
    """What a size is a number of, for messages."""

    def shape(self, samples: Samples) -> Shape:
        """What a size that fits is remembered for."""

    def cut(self, samples: Samples, size: int, *, few_shapes: bool) -> Sized:
        """Micro-batches of at most that size."""


class FittingCount:
    """``micro="auto"``: the largest number of samples."""

    unit = "samples"

    def shape(self, samples: Samples) -> Shape:
        """That of a sample: larger ones need more memory each."""
        return samples.shape

    def cut(self, samples: Samples, size: int, *, few_shapes: bool) -> Sized:
        """Micro-batches of that many samples, in their order."""
        parts = ByCount(size).parts(samples, few_shapes)
        return Sized(parts, max((len(part.samples) for part in parts), default=0))


class FittingTokens:
    """``by_tokens("auto")``: the largest number of tokens, padding included.

    A sample that is longer than what fits of others is still a micro-batch of its own.
    """

    unit = "tokens"

    def __init__(self, policy: ByTokens) -> None:
        self._policy = policy

    def shape(self, samples: Samples) -> Shape:
        """One for all lengths: tokens need about the same memory, whatever samples they are of."""
        return Shape(f"tokens of {samples.shape.kind}", ())

    def cut(self, samples: Samples, size: int, *, few_shapes: bool) -> Sized:
        """Micro-batches of at most that many tokens; where fewer cost less, the size is what they need."""
        parts = self._policy.cheapest_parts(samples, UNLIMITED, few_shapes)
        needed = max((self._policy.tokens_of(part, samples) for part in parts), default=0)
        if is_limited := needed > size:
            parts = self._policy.cheapest_parts(samples, size, few_shapes)
        if all(len(part.samples) == 1 for part in parts):
            return Sized(parts, min(len(parts), 1))
        return Sized(parts, size if is_limited else max(needed, 2))


def checked_micro(micro: object) -> Policy | FittingCount | FittingTokens:
    """What ``micro=`` stands for."""
    if isinstance(micro, ByTokens) and micro.budget == "auto":
        return FittingTokens(micro)
    if isinstance(micro, Policy):
        return micro
    if micro == "auto":
        return FittingCount()
    if isinstance(micro, Integral) and not isinstance(micro, bool):
        return ByCount(int(micro))
    raise UsageError(f'micro must be a number of samples, by_count(n), by_tokens(budget) or "auto": got {micro!r}.')
