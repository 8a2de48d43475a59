"""Plans micro-batches: pure functions from the lengths of samples to lists of their indices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Plan = Sequence[Sequence[int]]  # the samples of each micro-batch
LengthPerGroup = tuple[int, ...]  # the length of a sample in each group of tokens

FEWEST = 1 << 40  # the cost of a micro-batch for a plan with the fewest: no padding can cost as much
COST_OF_SEVERAL = 10  # of a search step with several sequences, relative to one with a single sequence
MAX_SEARCH_STEPS = 500_000  # of the search for the least padding: about 50 ms


class Part(NamedTuple):
    """A planned micro-batch."""

    samples: Sequence[int]
    widths: LengthPerGroup = ()  # to which the groups of tokens are trimmed; empty: nothing is trimmed
    rows: int | None = None  # the number of rows that samples share; None: each has its own

    @property
    def key(self) -> tuple[int, LengthPerGroup]:
        """The part of its shape that is known before it is taken."""
        return len(self.samples) if self.rows is None else self.rows, self.widths


def plan_by_count(samples: int, size: int) -> Plan:
    """Micro-batches of `size` samples, in their order; the last may have fewer."""
    return [range(start, min(start + size, samples)) for start in range(0, samples, size)]


def plan_by_tokens(lengths: Sequence[int], budget: int, cost: int = FEWEST) -> Plan:
    """The cheapest plan in which no micro-batch has more than `budget` tokens: number of samples x longest.

    `cost` is that of a micro-batch besides its tokens, in tokens; by default a plan has the fewest micro-batches, and
    among these the least padding. A sample above the budget is alone. The longest samples come first, so that a lack
    of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    widths = [max(lengths[sample], 1) for sample in order]  # ascending; an empty sample takes a row too
    return _cut_at(order, _ends(widths, budget, cost))


def plan_sequences(rows: Sequence[tuple[int, ...]], budget: int, cost: int = FEWEST) -> Plan:
    """The same for samples with several sequences, such as a question and its answer: their tokens are added up.

    Only cuts of the samples in the order of their total number of tokens are considered.
    """
    if all(len(row) == 1 for row in rows):
        return plan_by_tokens([length for (length,) in rows], budget, cost)
    order = sorted(range(len(rows)), key=lambda sample: (sum(rows[sample]), rows[sample]))
    sequences = [tuple(max(length, 1) for length in rows[sample]) for sample in order]
    if COST_OF_SEVERAL * _search_steps([sum(row) for row in sequences], budget) > MAX_SEARCH_STEPS:
        ends = _ends_from(len(sequences), lambda end: list(_starts(sequences, end, budget))[-1][0])
    else:
        ends = _tight_ends_of_several(sequences, budget, cost)
    return _cut_at(order, ends)


def _cut_at(order: list[int], ends: list[int]) -> Plan:
    """The plan for samples in ascending order that are cut at these ends; the longest come first."""
    return [sorted(order[start:end]) for start, end in itertools.pairwise([0, *ends])][::-1]


def _max_samples(width: int, budget: int) -> int:
    """The largest number of samples in a micro-batch of that width."""
    return max(budget // width, 1)


def _search_steps(widths: list[int], budget: int) -> int:
    return sum(min(_max_samples(width, budget), end) for end, width in enumerate(widths, start=1))


def _ends(widths: list[int], budget: int, cost: int) -> list[int]:
    """The ends of the micro-batches of the best plan, or of a good one if a search would take long."""
    if not widths:
        return []
    steps, stride = _search_steps(widths, budget), 1
    if cost < FEWEST:
        while steps > MAX_SEARCH_STEPS * stride**2:
            stride *= 2
    if steps > MAX_SEARCH_STEPS * stride**2 or stride > _max_samples(widths[-1], budget):
        # Filled from the longest sample down: no plan has fewer micro-batches.
        return _ends_from(len(widths), lambda end: end - _max_samples(widths[end - 1], budget))
    return _tight_ends(widths, budget, cost, stride)


def _tight_ends(widths: list[int], budget: int, cost: int, stride: int) -> list[int]:
    """The ends of the micro-batches with the smallest sum of padded sizes and costs, at multiples of `stride`."""
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # for the first n samples: the sum, and where the last part starts
    for end in itertools.chain(range(stride, len(widths), stride), [len(widths)]):
        width = widths[end - 1]
        first = max(end - _max_samples(width, budget), 0)
        starts = range(-(-first // stride) * stride, end, stride)
        best[end] = min((best[s][0] + cost + (end - s) * width, s) for s in starts)
    return _ends_from(len(widths), lambda end: best[end][1])


def _tight_ends_of_several(sequences: list[tuple[int, ...]], budget: int, cost: int) -> list[int]:
    """The same for samples with several sequences."""
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for end in range(1, len(sequences) + 1):
        best[end] = min((best[start][0] + cost + size, start) for start, size in _starts(sequences, end, budget))
    return _ends_from(len(sequences), lambda end: best[end][1])


def _starts(sequences: list[tuple[int, ...]], end: int, budget: int) -> Iterator[tuple[int, int]]:
    """The possible starts of a micro-batch with this end, from one sample up, each with its padded size."""
    widths = sequences[end - 1]
    for start in range(end - 1, -1, -1):
        widths = tuple(map(max, widths, sequences[start]))
        size = (end - start) * sum(widths)
        if size > budget and start < end - 1:
            return
        yield start, size


def _ends_from(end: int, start_of: Callable[[int], int]) -> list[int]:
    """The ends of all micro-batches, from the end of the last one and a function from an end to its start."""
    ends = []
    while end > 0:
        ends.append(end)
        end = start_of(end)
    return ends[::-1]


# ---------------------------------------------------------------------------------------------- few shapes


def plan_few_shapes(lengths: Sequence[int], budget: int) -> tuple[Plan, list[int]]:
    """Micro-batches of few different shapes within the budget, and their widths, if each shape costs extra work."""
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    plan, widths, start = [], [], 0
    while start < len(order):
        longest = lengths[order[start]]
        width = max(longest, min(rounded_up(longest), budget))
        size = _power_of_two_at_the_end(_max_samples(width, budget), len(order) - start)
        plan.append(sorted(order[start : start + size]))
        widths.append(width)
        start += size
    return plan, widths


def rounded_up(length: int) -> int:
    """The next of these lengths: 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..., four for each doubling."""
    if length <= 16:
        return 16
    step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def _power_of_two_at_the_end(room: int, left: int) -> int:
    """As many as there is room for. If fewer are left, a power of two, so that there are few different numbers."""
    return room if room <= left else 1 << (left.bit_length() - 1)


# ---------------------------------------------------------------------------------------------- rows that samples share


def plan_packed(lengths: Sequence[int], width: int, most: int, few_shapes: bool) -> list[Plan]:
    """Micro-batches of at most `most` rows, which samples share: for each row, its samples."""
    rows, plan, start = plan_rows(lengths, width), list[Plan](), 0
    while start < len(rows):
        left = len(rows) - start
        count = _power_of_two_at_the_end(most, left) if few_shapes else min(most, left)
        plan.append(rows[start : start + count])
        start += count
    return plan


def plan_rows(lengths: Sequence[int], width: int) -> Plan:
    """Put samples into few rows of `width` tokens: the longest first, each into the first row with enough room.

    No sample that begins a row would have fitted into the row before it. So code that fills rows with samples in this
    order gets the same rows.
    """
    rows: list[list[int]] = []
    rooms = FirstRoom(len(lengths), width)
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        row = rooms.place(max(lengths[sample], 1))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
    return rows


class FirstRoom:
    """Finds the first of many rows with enough room, by a tree over the rows. Each node has the most room below it."""

    def __init__(self, count: int, width: int) -> None:
        self._first_leaf = 1 << max(count - 1, 0).bit_length()
        self._rooms = [width] * (2 * self._first_leaf)

    def place(self, size: int) -> int:
        """The row for `size` tokens. A size larger than a row gets an empty row, if there is one."""
        node = 1
        size = min(size, self._rooms[1])
        while node < self._first_leaf:
            node = 2 * node if self._rooms[2 * node] >= size else 2 * node + 1
        place = node - self._first_leaf
        self._rooms[node] -= size
        while node > 1:
            node //= 2
            self._rooms[node] = max(self._rooms[2 * node], self._rooms[2 * node + 1])
        return place
