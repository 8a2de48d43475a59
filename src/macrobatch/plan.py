"""How many micro-batches, and which samples in each: lengths -> lists of indices, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Plan = Sequence[Sequence[int]]  # for each micro-batch, which samples


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
    ends, end = [], len(widths)
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
