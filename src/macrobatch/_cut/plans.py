"""How many micro-batches, and which samples in each: lengths -> lists of indices, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Plan = Sequence[Sequence[int]]  # for each micro-batch, which samples
Row = tuple[int, ...]  # how long a sample is in each group of tokens


def plan_by_count(samples: int, size: int) -> Plan:
    """So many samples a micro-batch, in their order; the last may have fewer.

    >>> plan_by_count(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(start, min(start + size, samples)) for start in range(0, samples, size)]


def plan_by_tokens(lengths: Sequence[int], budget: int) -> Plan:
    """As few micro-batches as the budget allows, and among such plans one with the least padding.

    No micro-batch has more than `budget` tokens with its padding, number of samples x longest; a sample above the
    budget is alone. The longest come first, so that memory is asked for at once.

    >>> plan_by_tokens([3, 9, 4, 2, 8], budget=18)
    [[1, 4], [0, 2, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda sample: (lengths[sample], sample))
    widths = [max(lengths[sample], 1) for sample in order]  # ascending; an empty sample takes its row all the same
    ends = _fewest(widths, budget) if _work(widths, budget) > SEARCHED else _least_padding(widths, budget)
    cuts = itertools.pairwise([0, *ends])
    return [sorted(order[start:end]) for start, end in cuts][::-1]


def plan_sequences(rows: Sequence[tuple[int, ...]], budget: int) -> Plan:
    """The same for samples that have several sequences each, such as a question and its answer.

    A micro-batch has number of samples x longest tokens in each sequence, and no more than `budget` in all of them
    together. Samples are put in the order of all their tokens, and then cut as `plan_by_tokens` does.

    >>> plan_sequences([(3, 9), (8, 2), (4, 9)], budget=26)
    [[0, 2], [1]]
    """
    if all(len(row) == 1 for row in rows):
        return plan_by_tokens([length for (length,) in rows], budget)
    order = sorted(range(len(rows)), key=lambda sample: (sum(rows[sample]), rows[sample], sample))
    sequences = [tuple(max(length, 1) for length in rows[sample]) for sample in order]
    totals = [sum(row) for row in sequences]
    is_long = STEP_OF_SEVERAL * _work(totals, budget) > SEARCHED
    ends = _filled(sequences, budget) if is_long else _least_padding_of_several(sequences, budget)
    return [sorted(order[start:end]) for start, end in itertools.pairwise([0, *ends])][::-1]


STEP_OF_SEVERAL = 10  # times as long as a step of the search for samples of one sequence
SEARCHED = 500_000  # steps of the search for the least padding that a window is worth: about 50 ms


def _room(width: int, budget: int) -> int:
    """How many samples a micro-batch can hold whose longest has that width."""
    return max(budget // width, 1)


def _work(widths: list[int], budget: int) -> int:
    return sum(min(_room(width, budget), end) for end, width in enumerate(widths, start=1))


def _fewest(widths: list[int], budget: int) -> list[int]:
    """Where the micro-batches end, filled from the longest sample down: no plan has fewer of them."""
    ends, end = [], len(widths)
    while end > 0:
        ends.append(end)
        end -= _room(widths[end - 1], budget)
    return ends[::-1]


def _least_padding(widths: list[int], budget: int) -> list[int]:
    """The same number of them, ended where their padded sizes add up to the least."""
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # for the first n samples: micro-batches, padded size, last start
    for end, width in enumerate(widths, start=1):
        starts = range(max(end - _room(width, budget), 0), end)
        best.append(min((best[s][0] + 1, best[s][1] + (end - s) * width, s) for s in starts))
    return _ends(best)


def _starts(sequences: list[tuple[int, ...]], end: int, budget: int) -> Iterator[tuple[int, int]]:
    """Where a micro-batch that ends there can start, from one sample up, with its padded size."""
    widths = sequences[end - 1]
    for start in range(end - 1, -1, -1):
        widths = tuple(map(max, widths, sequences[start]))
        size = (end - start) * sum(widths)
        if size > budget and start < end - 1:
            return
        yield start, size


def _filled(sequences: list[tuple[int, ...]], budget: int) -> list[int]:
    """Where the micro-batches end, filled from the longest sample down."""
    ends, end = [], len(sequences)
    while end > 0:
        ends.append(end)
        *_, (end, _) = _starts(sequences, end, budget)
    return ends[::-1]


def _least_padding_of_several(sequences: list[tuple[int, ...]], budget: int) -> list[int]:
    """Where they end if they are as few as can be in this order, and their padded sizes add up to the least."""
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # for the first n samples: micro-batches, padded size, last start
    for end in range(1, len(sequences) + 1):
        starts = _starts(sequences, end, budget)
        best.append(min((best[start][0] + 1, best[start][1] + size, start) for start, size in starts))
    return _ends(best)


def _ends(best: list[tuple[int, int, int]]) -> list[int]:
    """Where the micro-batches of the best plan end, by their starts."""
    ends, end = [], len(best) - 1
    while end > 0:
        ends.append(end)
        end = best[end][2]
    return ends[::-1]


def plan_few_shapes(lengths: Sequence[int], budget: int) -> tuple[Plan, list[int]]:
    """Micro-batches of few different shapes, within the budget, with the width of each: for what is done once a shape.

    Widths are rounded up (`rounded_up`), each has as many samples as fit, and what is left over at the end is cut into
    powers of two.

    >>> plan_few_shapes([30, 9, 4, 2, 17, 8, 3], budget=64)
    ([[0, 4], [1, 2, 5, 6], [3]], [32, 16, 16])
    """
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    plan, widths, start = [], [], 0
    while start < len(order):
        longest = lengths[order[start]]
        width = max(longest, min(rounded_up(longest), budget))
        room, left = _room(width, budget), len(order) - start
        size = room if room <= left else 1 << (left.bit_length() - 1)
        plan.append(sorted(order[start : start + size]))
        widths.append(width)
        start += size
    return plan, widths


def rounded_up(length: int) -> int:
    """The next length of few: 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..., four for each doubling.

    >>> [rounded_up(length) for length in (3, 16, 17, 63, 65, 1000)]
    [16, 16, 20, 64, 80, 1024]
    """
    if length <= 16:
        return 16
    step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


class Part(NamedTuple):
    """A micro-batch to be."""

    samples: Sequence[int]
    widths: Row = ()  # of each group of tokens: padding beyond it is trimmed off; (): nothing is

    @property
    def key(self) -> tuple[int, Row]:
        """What is known of its shape beforehand."""
        return len(self.samples), self.widths
