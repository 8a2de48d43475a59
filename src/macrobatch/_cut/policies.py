"""How to cut a batch: `by_count` and `by_tokens`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from macrobatch._cut.plans import Part, Row, plan_by_count, plan_few_shapes, plan_sequences
from macrobatch._cut.samples import Listed, Samples
from macrobatch.errors import BatchError, UsageError

logger = logging.getLogger("macrobatch")


@dataclass(frozen=True)
class ByCount:
    """What `by_count` returns."""

    size: int

    def __post_init__(self) -> None:
        _check_whole(self.size, "a micro-batch must have a whole number of samples, 1 or more")

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:  # noqa: ARG002 (they are few)
        """The plan for these samples."""
        return [Part(indices) for indices in plan_by_count(samples.count, self.size)]


@dataclass(frozen=True)
class ByTokens:
    """What `by_tokens` returns."""

    budget: int
    length: Callable[[Any], Any] | None = None
    oversize: Literal["warn", "raise"] = "warn"
    _told: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # what was said already

    def __post_init__(self) -> None:
        _check_whole(self.budget, "a token budget must be a whole number, 1 or more")
        if self.length is not None and not callable(self.length):
            raise UsageError(f"length must be a function that tells the lengths of samples: got {self.length!r}.")
        if self.oversize not in ("warn", "raise"):
            raise UsageError(f'oversize must be "warn" or "raise": got {self.oversize!r}.')

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        """The plan for these samples, with widths that are rounded up where few different shapes are wanted."""
        rows = samples.rows(self.length)
        self._judge_oversize([sum(row) for row in rows])
        if "untrimmed" not in self._told and (why := samples.why_untrimmed()) is not None:
            self._told["untrimmed"] = 1
            logger.warning("by_tokens: %s", why)
        if few_shapes:
            return _parts_of_few_shapes(samples, rows, self.budget)
        plan = plan_sequences(rows, self.budget)
        # What was told of listed samples may be the length of something else than what is collated: nothing is trimmed.
        if isinstance(samples, Listed) and self.length is not None:
            return [Part(indices) for indices in plan]
        return [Part(indices, _widest(rows, indices)) for indices in plan]

    def _judge_oversize(self, lengths: Sequence[int]) -> None:
        """Say so where a sample is above the budget: once, and again where a larger one comes."""
        longest = max(lengths, default=0)
        if longest <= self._told.get("oversize", self.budget):
            return
        found = f"sample {lengths.index(longest)} has {longest} tokens, which is above the budget of {self.budget}"
        if self.oversize == "raise":
            raise BatchError(f"{found}. Truncate it, raise the budget, or let it be a micro-batch of its own.")
        self._told["oversize"] = longest
        warnings.warn(
            f"{found}: it is a micro-batch of its own. (Said again only for a larger one.)",
            stacklevel=5,
        )


def _widest(rows: Sequence[Row], indices: Sequence[int]) -> Row:
    return tuple(map(max, zip(*[rows[sample] for sample in indices], strict=True)))


def _parts_of_few_shapes(samples: Samples, rows: Sequence[Row], budget: int) -> list[Part]:
    """Every group of tokens gets the width of the longest, so that shapes do not multiply."""
    groups = max(map(len, rows), default=1)
    plan, widths = plan_few_shapes([max(row) for row in rows], max(budget // groups, 1))
    samples.widen(max(widths, default=0))
    return [Part(indices, samples.widths(width)) for indices, width in zip(plan, widths, strict=True)]


def by_count(n: int) -> ByCount:
    """Micro-batches of `n` samples, in the order they come in. An int says the same.

    >>> import torch
    >>> from macrobatch._cut.samples import samples_of
    >>> batch = samples_of(torch.zeros(5, 3))
    >>> [len(batch.take(part)) for part in by_count(2).parts(batch)]
    [2, 2, 1]
    """
    return ByCount(n)


def by_tokens(
    budget: int, length: Callable[[Any], Any] | None = None, *, oversize: Literal["warn", "raise"] = "warn"
) -> ByTokens:
    """Micro-batches of samples of about the same length, none with more than `budget` tokens, padding included.

    >>> import torch
    >>> from macrobatch._cut.samples import samples_of
    >>> batch = {"input_ids": torch.ones(4, 9), "attention_mask": torch.arange(9) < torch.tensor([[2], [9], [3], [8]])}
    >>> samples = samples_of(batch)
    >>> [tuple(samples.take(part)["input_ids"].shape) for part in by_tokens(18).parts(samples)]
    [(2, 9), (2, 3)]

    Only what is known to be padding is trimmed off: columns at the end that an attention mask hides in all samples of
    the micro-batch, and only from tensors that belong to that mask by their names (`attention_mask`, `input_ids`,
    `labels`, ... of one dict; `chosen_attention_mask`, `chosen_input_ids`, ...). Labels are never cut where they are
    not -100. Where it is not known, nothing is trimmed, and samples are as long as their tensors are wide.

    Args:
        budget: the largest number of samples x longest of a micro-batch; where samples have several sequences (chosen
            and rejected, encoder and decoder), summed over them. A longer sample is alone in its own.
        length: the length of a sample of a list, or, of a batch of tensors, those of all its samples: you say that all
            beyond is padding, and it is trimmed off every tensor of that width. A mask that is not 0 there, or labels
            that are not -100, are an error.
        oversize: what a sample above the budget does: "warn" (once, and again for a larger one) or "raise".
    """
    return ByTokens(budget, length, oversize)


def _check_whole(number: object, what: str) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{what}: got {number!r}.")


@dataclass(frozen=True)
class Cut:
    """How this rank does its part of one window.

    Attributes:
        samples: of its batch.
        parts: its micro-batches.
        turns: how many it takes, with those that only keep other ranks company.
        is_held: whether nothing may travel until all ranks have voted.
        is_empty: whether no rank has any sample.
    """

    samples: Samples
    parts: list[Part]
    turns: int
    is_held: bool
    is_empty: bool

    def part_per_turn(self) -> list[Part | None]:
        """One part per turn; extra turns repeat the last part. None: this rank has no part at all."""
        return [self.parts[min(turn, len(self.parts) - 1)] if self.parts else None for turn in range(self.turns)]

    @property
    def size(self) -> int:
        """The largest number of samples in a micro-batch."""
        return max((len(part.samples) for part in self.parts), default=0)
