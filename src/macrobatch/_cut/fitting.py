"""Micro-batches of the largest size that fits into memory: by number of samples ("auto"), or by tokens."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

from macrobatch._cut.memory import UNLIMITED
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import ByCount, ByTokens, Policy
from macrobatch._cut.samples import Samples, Shape
from macrobatch.errors import UsageError


class Sized(NamedTuple):
    """Micro-batches up to a size."""

    parts: list[Part]
    size: int  # of the largest, in samples or tokens; 1 if each has one sample, so that none can be smaller


class FittingCount:
    """``micro="auto"``: the largest number of samples."""

    unit = "samples"  # what a size counts, for messages

    def shape(self, samples: Samples) -> Shape:
        """The key under which a size that fits is remembered: larger samples need more memory."""
        return samples.shape

    def cut(self, samples: Samples, size: int, *, few_shapes: bool) -> Sized:
        """Micro-batches of `size` samples, in their order."""
        parts = ByCount(size).parts(samples, few_shapes)
        return Sized(parts, max((len(part.samples) for part in parts), default=0))


class FittingTokens:
    """``by_tokens("auto")``: the largest number of tokens, padding included. A longer sample runs alone."""

    unit = "tokens"

    def __init__(self, policy: ByTokens) -> None:
        self._policy = policy

    def shape(self, samples: Samples) -> Shape:
        """The same for all lengths: a token needs about the same memory in any sample."""
        return Shape(f"tokens of {samples.shape.kind}", ())

    def cut(self, samples: Samples, size: int, *, few_shapes: bool) -> Sized:
        """Micro-batches of at most `size` tokens. If smaller ones are cheaper, the returned size is what they need."""
        parts = self._policy.cheapest_parts(samples, UNLIMITED, few_shapes)
        needed = max((self._policy.tokens_of(part, samples) for part in parts), default=0)
        if is_limited := needed > size:
            parts = self._policy.cheapest_parts(samples, size, few_shapes)
        if all(len(part.samples) == 1 for part in parts):
            return Sized(parts, min(len(parts), 1))
        return Sized(parts, size if is_limited else max(needed, 2))


Fitting = FittingCount | FittingTokens  # the ways to cut a batch if the size of micro-batches is found by trying


def checked_micro(micro: object) -> Policy | Fitting:
    """The policy for a value of ``micro=``, or an error."""
    if isinstance(micro, ByTokens) and micro.budget == "auto":
        return FittingTokens(micro)
    if isinstance(micro, Policy):
        return micro
    if micro == "auto":
        return FittingCount()
    if isinstance(micro, Integral) and not isinstance(micro, bool):
        return ByCount(int(micro))
    raise UsageError(f'micro must be a number of samples, by_count(n), by_tokens(budget) or "auto": got {micro!r}.')
