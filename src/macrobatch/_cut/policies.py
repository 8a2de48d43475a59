"""The ways to cut a batch: `by_count` and `by_tokens`."""

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

# Where the budget is only what fits: on a GPU, queueing the kernels of a micro-batch takes as long as a few thousand
# tokens. Replaying recorded ones takes hardly any time, so their micro-batches are small, and have little padding.
MICRO_BATCH_COST = 4_096
RECORDED_TOKENS = 4_096


@runtime_checkable
class Policy(Protocol):
    """How to cut a batch."""

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        """The micro-batches of these samples, each sample in exactly one of them.

        `few_shapes`: they are recorded, shape by shape, so few different ones are wanted.
        """


def require_each_once(parts: Sequence[Part], count: int) -> None:
    """An error if a policy of somebody else's leaves samples out, or takes some twice."""
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
        if self.budget != "auto":
            _check_whole(self.budget, 'a token budget must be a whole number, 1 or more, or "auto"')
        if self.length is not None and not callable(self.length):
            raise UsageError(f"length must be a function that returns the lengths of samples: got {self.length!r}.")
        if self.oversize not in ("warn", "raise"):
            raise UsageError(f'oversize must be "warn" or "raise": got {self.oversize!r}.')
        if self.budget == "auto":
            if self.oversize == "raise":
                raise UsageError(
                    'oversize="raise" needs a budget to be above: with "auto" there is none to begin with.'
                )
            self._warnings_given["oversize"] = UNLIMITED  # nothing is said of a budget that nobody has chosen

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        """The plan for these samples; with `few_shapes`, widths are rounded up."""
        if self.budget == "auto":
            raise UsageError('by_tokens("auto") finds its budget by trying: MacroStep does that, with micro=.')
        return self._parts_within(samples, self.budget, FEWEST, few_shapes)

    def cheapest_parts(self, samples: Samples, limit: int, few_shapes: bool = False) -> list[Part]:
        """The plan with the least padding and the fewest micro-batches, none above a limit that nobody has chosen."""
        if few_shapes:
            limit = min(limit, RECORDED_TOKENS)
        return self._parts_within(samples, limit, MICRO_BATCH_COST, few_shapes)

    def _parts_within(self, samples: Samples, budget: int, cost: int, few_shapes: bool) -> list[Part]:
        rows = samples.lengths(self.length)
        self._check_oversize([sum(row) for row in rows], budget)
        if "untrimmed" not in self._warnings_given and (why := samples.why_untrimmed()) is not None:
            self._warnings_given["untrimmed"] = 1
            logger.warning("by_tokens: %s", why)
        if few_shapes:
            return _parts_of_few_shapes(samples, rows, budget)
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
    """Several samples in each row of a micro-batch, which `collate` lays out in the order in which they come."""

    width: int = 1

    def cheapest_parts(self, samples: Samples, limit: int, few_shapes: bool = False) -> list[Part]:
        """As many rows in each as the limit allows: there is hardly any padding to save."""
        return self._parts_within(samples, limit, FEWEST, few_shapes)

    def _parts_within(self, samples: Samples, budget: int, cost: int, few_shapes: bool) -> list[Part]:  # noqa: ARG002
        """As many rows in each micro-batch as the budget allows; with `few_shapes` a power of two in the last ones."""
        lengths = [sum(row) for row in samples.lengths(self.length)]
        plan = plan_packed(lengths, self.width, max(budget // self.width, 1), few_shapes)
        return [Part([sample for row in rows for sample in row], rows=len(rows)) for rows in plan]

    def tokens_of(self, part: Part, samples: Samples) -> int:  # noqa: ARG002 (rows are alike)
        """The rows that these samples fill, as if each was full."""
        assert part.rows is not None, "a part of another policy"
        return self.width * part.rows


def _widths_of(rows: Sequence[LengthPerGroup], indices: Sequence[int]) -> LengthPerGroup:
    return tuple(map(max, zip(*[rows[sample] for sample in indices], strict=True)))


def _parts_of_few_shapes(samples: Samples, rows: Sequence[LengthPerGroup], budget: int) -> list[Part]:
    """Parts in which every group of tokens has the width of the longest, so that there are few shapes."""
    groups = max(map(len, rows), default=1)
    plan, widths = plan_few_shapes([max(row) for row in rows], max(budget // groups, 1))
    samples.widen(max(widths, default=0))
    return [Part(indices, samples.widths(width)) for indices, width in zip(plan, widths, strict=True)]


def by_count(n: int) -> ByCount:
    """Cut a batch into micro-batches of `n` samples, in their order. ``micro=n`` means the same.

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
    """Cut a batch into micro-batches of samples of similar length, none with more than `budget` tokens.

    >>> import torch
    >>> from macrobatch import MacroStep, by_tokens, causal_lm_loss
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> lengths = torch.tensor([[2], [9], [3], [8]])
    >>> batch = {"input_ids": torch.randint(10, (4, 9)), "attention_mask": torch.arange(9) < lengths}
    >>> train = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(18))
    >>> train(batch).micro_batches                  # two samples, 9 tokens wide, and two that are trimmed to 3
    2

    Only columns that are known to be padding are trimmed: those at the end that an attention mask hides in all samples
    of the micro-batch, in tensors that belong to that mask by name (`attention_mask`, `input_ids`, `labels`, ... of one
    dict; `chosen_attention_mask`, `chosen_input_ids`, ...). Labels other than -100 are never cut. If padding is not
    known, nothing is trimmed, and a sample is as long as its tensor is wide.

    Args:
        budget: the largest number of tokens in a micro-batch, padding included: number of samples x longest sample. If
            samples have several sequences (chosen and rejected, encoder and decoder), it is summed over them. A longer
            sample becomes a micro-batch of its own. "auto": the largest budget that fits into memory, found by trying,
            as ``micro="auto"`` finds a number of samples.
        length: a function that returns the length of a sample of a list, or the lengths of all samples of a batch of
            tensors. All tensors of that width are trimmed to these lengths. A mask that is not 0 beyond them, or a
            label that is not -100, is an error. Default: lengths come from masks and labels.
        oversize: what a sample above the budget causes: "warn" (once, and again for a larger one) or "raise".

    Returns:
        A value for ``micro=`` of `MacroStep`.

    Raises:
        UsageError: an argument is invalid. `MacroStep` raises BatchError for a batch that cannot be cut this way.
    """
    return ByTokens(budget, length, oversize)


def _check_whole(number: object, what: str) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{what}: got {number!r}.")


@dataclass(frozen=True)
class Cut:
    """How this rank cuts its share of one window.

    Attributes:
        samples: its batch.
        parts: its micro-batches.
        turns: the number of micro-steps, including those that only join the collectives of other ranks.
        is_held: whether gradients stay on their ranks until all ranks have voted.
        is_empty: whether no rank has a sample.
        size: that of the largest micro-batch: its samples, or its tokens where those are what is made to fit.
    """

    samples: Samples
    parts: list[Part]
    turns: int
    is_held: bool
    is_empty: bool
    size: int

    def part_per_turn(self) -> list[Part | None]:
        """One part per turn; extra turns repeat the last part. None: this rank has no part at all."""
        return [self.parts[min(turn, len(self.parts) - 1)] if self.parts else None for turn in range(self.turns)]
