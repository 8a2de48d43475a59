"""The ways to cut a batch into micro-batches: `by_count` and `by_tokens`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

from macrobatch._cut.memory import UNLIMITED
from macrobatch._cut.plans import (
    FEWEST,
    LengthPerGroup,
    Part,
    plan_by_count,
    plan_few_shapes,
    plan_packed,
    plan_sequences,
)
from macrobatch._cut.samples import SampleList, Samples
from macrobatch.errors import BatchError, UsageError, warn

logger = logging.getLogger("macrobatch")

# For budgets that are found by trying: on a GPU, queueing the kernels of a micro-batch takes as long as a few thousand
# tokens. Replaying recorded ones takes hardly any time, so their micro-batches are small, and have little padding.
MICRO_BATCH_COST = 4_096
RECORDED_TOKENS = 4_096


@runtime_checkable
class Policy(Protocol):
    """A way to cut a batch into micro-batches."""

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        """The micro-batches of these samples, each sample in one of them; `few_shapes` if shapes are recorded."""


def require_each_once(parts: Sequence[Part], count: int) -> None:
    """Raise an error if a user's own policy leaves samples out, or takes some of them twice."""
    taken = sorted(index for part in parts for index in part.samples)
    if taken != list(range(count)):
        raise BatchError(
            f"micro= must put each of the {count} samples exactly once into a micro-batch: its parts() gave {taken}."
        )


@dataclass(frozen=True)
class ByCount:
    """The result of `by_count`."""

    size: int

    def __post_init__(self) -> None:
        _check_whole(self.size, "a micro-batch must have a whole number of samples, 1 or more")

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:  # noqa: ARG002 (there are two shapes)
        """The plan for these samples."""
        return [Part(indices) for indices in plan_by_count(samples.count, self.size)]


@dataclass(frozen=True)
class ByTokens:
    """The result of `by_tokens`."""

    budget: int | Literal["auto"]
    length: Callable[[Any], Any] | None = None
    oversize: Literal["warn", "raise"] = "warn"
    _warnings_given: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # by kind

    def __post_init__(self) -> None:
        if self.budget == "auto":
            self._warnings_given["oversize"] = UNLIMITED  # no warning, because the user has not chosen a budget
        else:
            _check_whole(self.budget, 'a token budget must be a whole number, 1 or more, or "auto"')
        if self.length is not None and not callable(self.length):
            raise UsageError(f"length must be a function that returns the lengths of samples: got {self.length!r}.")
        if self.oversize not in ("warn", "raise"):
            raise UsageError(f'oversize must be "warn" or "raise": got {self.oversize!r}.')
        if self.oversize == "raise" and self.budget == "auto":
            raise UsageError('oversize="raise" needs a budget to be above: with "auto" there is none to begin with.')

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        """The plan for these samples; with `few_shapes`, widths are rounded up."""
        if self.budget == "auto":
            raise UsageError('by_tokens("auto") finds its budget by trying: MacroStep does that, with micro=.')
        return self._parts_within(samples, self.budget, FEWEST, few_shapes)

    def cheapest_parts(self, samples: Samples, limit: int, few_shapes: bool = False) -> list[Part]:
        """The cheapest plan, counting padding and micro-batches, with at most `limit` tokens in a micro-batch."""
        if few_shapes:
            limit = min(limit, RECORDED_TOKENS)
        return self._parts_within(samples, limit, MICRO_BATCH_COST, few_shapes)

    def _parts_within(self, samples: Samples, budget: int, cost: int, few_shapes: bool) -> list[Part]:
        rows = samples.lengths(self.length)
        self._check_oversize([sum(row) for row in rows], budget)
        if "untrimmed" not in self._warnings_given and (why := samples.why_untrimmed()) is not None:
            self._warnings_given["untrimmed"] = 1
            logger.warning("by_tokens: %s", why)
        if few_shapes:  # all groups of tokens have the width of the longest
            groups = max(map(len, rows), default=1)
            plan, widths = plan_few_shapes([max(row) for row in rows], max(budget // groups, 1))
            return list(map(Part, plan, samples.few_widths(widths)))
        plan = plan_sequences(rows, budget, cost)
        # The user's lengths of listed samples need not be those of the collated tensors: nothing is trimmed.
        if isinstance(samples, SampleList) and self.length is not None:
            return [Part(indices) for indices in plan]
        return [Part(indices, _widths_of(rows, indices)) for indices in plan]

    def tokens_of(self, part: Part, samples: Samples) -> int:
        """The tokens of a micro-batch, padding included."""
        return len(part.samples) * sum(_widths_of(samples.lengths(self.length), part.samples))

    def _check_oversize(self, lengths: Sequence[int], budget: int) -> None:
        """Warn or raise if a sample is above the budget; warn again only for a larger one."""
        longest = max(lengths, default=0)
        if longest <= self._warnings_given.get("oversize", budget):
            return
        found = f"sample {lengths.index(longest)} has {longest} tokens, which is above the budget of {budget}"
        if self.oversize == "raise":
            raise BatchError(f'{found}. Truncate it, raise the budget, or pass oversize="warn" to run it alone.')
        self._warnings_given["oversize"] = longest
        warn(f"{found}: it becomes a micro-batch of its own. (This warning comes again only for a larger sample.)")


@dataclass(frozen=True)
class PackedRows(ByTokens):
    """Puts several samples into each row of a micro-batch. `collate` lays them out in the given order."""

    width: int = 1

    def cheapest_parts(self, samples: Samples, limit: int, few_shapes: bool = False) -> list[Part]:
        """A plan with as many rows per micro-batch as `limit` allows, because there is hardly any padding to save."""
        return self._parts_within(samples, limit, FEWEST, few_shapes)

    def _parts_within(self, samples: Samples, budget: int, cost: int, few_shapes: bool) -> list[Part]:  # noqa: ARG002
        """As many rows in each micro-batch as the budget allows; with `few_shapes` a power of two in the last ones."""
        lengths = [sum(row) for row in samples.lengths(self.length)]
        plan = plan_packed(lengths, self.width, max(budget // self.width, 1), few_shapes)
        return [Part([sample for row in rows for sample in row], rows=len(rows)) for rows in plan]

    def tokens_of(self, part: Part, samples: Samples) -> int:  # noqa: ARG002 (rows are alike)
        """The tokens of the rows that these samples fill, as if every row was full."""
        assert part.rows is not None, "a part of another policy"
        return self.width * part.rows


def _widths_of(rows: Sequence[LengthPerGroup], indices: Sequence[int]) -> LengthPerGroup:
    return tuple(map(max, zip(*[rows[sample] for sample in indices], strict=True)))


def by_count(n: int) -> ByCount:
    """Cut a batch into micro-batches of `n` samples, in their order. ``MacroStep(..., micro=n)`` means the same.

    >>> import torch
    >>> from macrobatch import MacroStep, by_count
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> train = MacroStep(model, optimizer, lambda model, batch: model(batch).mean(), micro=by_count(2))
    >>> train(torch.randn(5, 3)).micro_batches      # of 2, 2 and 1 samples
    3

    Args:
        n: the number of samples in a micro-batch, at least 1. The last micro-batch may have fewer.

    Returns:
        A value for ``micro=`` of `MacroStep`.

    Raises:
        UsageError: `n` is not a whole number of at least 1.
    """
    return ByCount(n)


def by_tokens(
    budget: int | Literal["auto"],
    length: Callable[[Any], Any] | None = None,
    *,
    oversize: Literal["warn", "raise"] = "warn",
) -> ByTokens:
    """Cut a batch into micro-batches of samples of similar length, with at most `budget` tokens each.

    Use it for samples of very different lengths, such as texts: there is less padding, so a step is faster.

    >>> import torch
    >>> from macrobatch import MacroStep, by_tokens, causal_lm_loss
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> lengths = torch.tensor([[2], [9], [3], [8]])
    >>> batch = {"input_ids": torch.randint(10, (4, 9)), "attention_mask": torch.arange(9) < lengths}
    >>> train = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(18))
    >>> train(batch).micro_batches                  # two samples, 9 tokens wide, and two that are trimmed to 3
    2

    The micro-batches are trimmed: columns at the end that are padding in all their samples are left out. Only an
    attention mask shows what is padding. The tensors that belong to a mask are found by their names (`attention_mask`,
    `input_ids`, `labels` and so on in the same dict; or `chosen_attention_mask`, `chosen_input_ids` and so on). Labels
    other than -100 are never cut off. If padding is not known, nothing is trimmed, and the length of a sample is the
    width of its tensor.

    Args:
        budget: the largest number of tokens in a micro-batch, including padding: number of samples x longest sample. If
            samples have several sequences (chosen and rejected, encoder and decoder), their tokens are added up. A
            sample that is longer than the budget becomes a micro-batch of its own. "auto" tries which budget is the
            largest that fits into memory, as ``micro="auto"`` does for a number of samples.
        length: a function that returns the lengths of the samples, if masks do not show them. For a batch of tensors,
            it gets the batch and returns the lengths of all samples; for a list of samples, it gets one sample and
            returns its length. All tensors of that width are trimmed to these lengths; if a mask is not 0 or a label is
            not -100 beyond them, it is an error. Default: the lengths come from masks and labels.
        oversize: what to do with a sample that is longer than the budget: "warn" (once, and again only for an even
            longer sample) or "raise" a BatchError.

    Returns:
        A value for ``micro=`` of `MacroStep`.

    Raises:
        UsageError: an argument is invalid. (`MacroStep` raises a BatchError for a batch that cannot be cut this way.)
    """
    return ByTokens(budget, length, oversize)


def _check_whole(number: object, what: str) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{what}: got {number!r}.")


@dataclass(frozen=True)
class Cut:
    """How this rank cuts its share of one window."""

    samples: Samples
    parts: list[Part]
    turns: int  # the micro-batches that this rank runs, including those that only join collectives of others
    is_held: bool  # whether gradients stay on their ranks until all have voted that the window fitted into memory
    is_empty: bool  # whether no rank has a sample
    size: int  # of the largest micro-batch, in samples, or in tokens if `by_tokens("auto")` looks for a budget

    def part_per_turn(self) -> list[Part | None]:
        """One part per turn; extra turns repeat the last part. All are None if this rank has no samples."""
        return [self.parts[min(turn, len(self.parts) - 1)] if self.parts else None for turn in range(self.turns)]
