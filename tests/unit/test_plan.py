"""Every plan holds each sample once and keeps its budget: compared with the obvious ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from macrobatch._cut.plans import FEWEST, plan_by_count, plan_by_tokens, plan_few_shapes, plan_sequences, rounded_up

quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)
at_length = settings(quickly, max_examples=300)

some_lengths = st.lists(st.integers(1, 12), max_size=40)
few_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=7)
budgets = st.integers(1, 40)

Lengths = Sequence[int]


# -------------------------------------------------------------------------------------------------- the obvious plans


def padded(lengths: Lengths, plan: Sequence[Sequence[int]]) -> int:
    """What all micro-batches of a plan take together, with their padding."""
    return sum(len(part) * max(lengths[sample] for sample in part) for part in plan)


def keeps(lengths: Lengths, part: Sequence[int], budget: int) -> bool:
    return len(part) == 1 or padded(lengths, [part]) <= budget


def partitions(samples: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put samples into micro-batches."""
    if not samples:
        yield []
        return
    first, *others = samples
    for partition in partitions(others):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def best(lengths: Lengths, budget: int) -> tuple[int, int]:
    """The fewest micro-batches that keep the budget, and the least that so few can take: by trying all plans."""
    plans = partitions(list(range(len(lengths))))
    return min((len(p), padded(lengths, p)) for p in plans if all(keeps(lengths, part, budget) for part in p))


def greedy(lengths: Lengths, budget: int) -> list[list[int]]:
    """From the shortest on: each sample into the open micro-batch, or a new one where it is too much."""
    plan: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda sample: lengths[sample]):
        if plan and keeps(lengths, [*plan[-1], sample], budget):
            plan[-1].append(sample)
        else:
            plan.append([sample])
    return plan


def check_plan(lengths: Lengths, budget: int, cost: int = FEWEST) -> Sequence[Sequence[int]]:
    """A plan that holds each sample once, and keeps the budget."""
    plan = plan_by_tokens(lengths, budget, cost)
    assert sorted(sample for part in plan for sample in part) == list(range(len(lengths)))
    assert all(part and keeps(lengths, part, budget) for part in plan)
    return plan


# -------------------------------------------------------------------------------------------------------------- plans


@quickly
@given(st.integers(0, 50), st.integers(1, 60))
def test_by_count_is_the_batch_in_its_order(samples, size):
    plan = plan_by_count(samples, size)
    assert [sample for part in plan for sample in part] == list(range(samples))
    assert all(len(part) == size for part in plan[:-1])
    assert len(plan) == -(-samples // size)


@at_length
@given(few_lengths, budgets)
def test_no_plan_has_fewer_micro_batches_nor_as_few_with_less_padding(lengths, budget):
    plan = check_plan(lengths, budget)
    assert (len(plan), padded(lengths, plan)) == best(lengths, budget)


@at_length
@given(some_lengths, budgets)
def test_as_few_as_the_greedy_plan_and_no_more_padding(lengths, budget):
    plan, obvious = check_plan(lengths, budget), greedy(lengths, budget)
    assert len(plan) == len(obvious)
    assert padded(lengths, plan) <= padded(lengths, obvious)


@quickly
@given(few_lengths, budgets)
def test_where_a_search_would_take_too_long_still_the_fewest(lengths, budget):
    with mock.patch("macrobatch._cut.plans.MAX_SEARCH_STEPS", 0):
        assert len(check_plan(lengths, budget)) == best(lengths, budget)[0]


def test_a_large_window_is_planned_without_a_search():
    lengths = torch.randint(1, 65, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    with mock.patch("macrobatch._cut.plans._tight_ends", side_effect=AssertionError("this takes minutes")):
        assert len(check_plan(lengths, 8192)) == len(greedy(lengths, 8192))


@quickly
@given(some_lengths, budgets, st.randoms(use_true_random=False))
def test_a_plan_is_a_function_of_the_lengths_alone(lengths, budget, shuffler):
    plan = plan_by_tokens(lengths, budget)
    assert plan_by_tokens(tuple(lengths), budget) == plan

    def seen(lengths: Lengths) -> list[list[int]]:
        return [sorted(lengths[sample] for sample in part) for part in plan_by_tokens(lengths, budget)]

    shuffled = shuffler.sample(lengths, len(lengths))
    assert seen(shuffled) == seen(lengths)


@quickly
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 6))
def test_samples_of_no_length_are_there_too(lengths, budget):
    check_plan(lengths, budget)


@quickly
@given(some_lengths, budgets)
def test_the_longest_come_first(lengths, budget):
    longest = [max(lengths[sample] for sample in part) for part in plan_by_tokens(lengths, budget)]
    assert all(a >= b for a, b in pairwise(longest))


# ------------------------------------------------------------------------------------------- what a micro-batch costs


def total(lengths: Lengths, plan: Sequence[Sequence[int]], cost: int) -> int:
    return padded(lengths, plan) + cost * len(plan)


@at_length
@given(few_lengths, budgets, st.integers(0, 30))
def test_no_plan_costs_less(lengths, budget, cost):
    plan = check_plan(lengths, budget, cost)
    plans = partitions(list(range(len(lengths))))
    allowed = [p for p in plans if all(keeps(lengths, part, budget) for part in p)]
    assert total(lengths, plan, cost) == min(total(lengths, p, cost) for p in allowed)


def test_of_many_samples_a_plan_that_costs_little_more():
    """Found in steps of several samples; the fewest micro-batches would have all samples in one."""
    lengths = torch.randn(4_000, generator=torch.Generator().manual_seed(0)).mul(0.8).add(4.6).exp().int().tolist()
    with mock.patch("macrobatch._cut.plans.MAX_SEARCH_STEPS", 10**9):
        best = check_plan(lengths, 10**9, 4_096)
    found = check_plan(lengths, 10**9, 4_096)
    assert total(lengths, found, 4_096) <= 1.01 * total(lengths, best, 4_096)
    assert padded(lengths, found) < 1.3 * sum(lengths) < padded(lengths, check_plan(lengths, 10**9)) / 5


@quickly
@given(some_lengths, budgets, st.integers(0, 30))
def test_a_coarse_search_keeps_the_budget(lengths, budget, cost):
    with mock.patch("macrobatch._cut.plans.MAX_SEARCH_STEPS", 20):
        check_plan(lengths, budget, cost)


# --------------------------------------------------------------------------------------- samples of several sequences


Rows = Sequence[tuple[int, ...]]
several = st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 12)] * n), max_size=20))


def padded_rows(rows: Rows, part: Sequence[int]) -> int:
    """What a micro-batch takes: in every sequence so many samples x longest."""
    return len(part) * sum(max(1, *(rows[sample][i] for sample in part)) for i in range(len(rows[0])))


def check_rows(rows: Rows, budget: int) -> Sequence[Sequence[int]]:
    plan = plan_sequences(rows, budget)
    assert sorted(sample for part in plan for sample in part) == list(range(len(rows)))
    assert all(part and (len(part) == 1 or padded_rows(rows, part) <= budget) for part in plan)
    return plan


@at_length
@given(several, budgets)
def test_no_cut_of_the_sorted_samples_is_shorter_nor_as_short_with_less_padding(rows, budget):
    plan = check_rows(rows, budget)
    order = sorted(range(len(rows)), key=lambda s: (sum(rows[s]), rows[s], s))
    best = [(0, 0)]  # for the first n: micro-batches, and what they take
    for end in range(1, len(rows) + 1):
        cuts = [(start, order[start:end]) for start in range(end)]
        sizes = [(start, padded_rows(rows, part), len(part)) for start, part in cuts]
        best.append(min((best[s][0] + 1, best[s][1] + size) for s, size, n in sizes if n == 1 or size <= budget))
    if len(next(iter(rows), ())) > 1:
        assert (len(plan), sum(padded_rows(rows, part) for part in plan)) == best[-1]


@quickly
@given(some_lengths, budgets)
def test_samples_of_one_sequence_are_planned_by_their_lengths(lengths, budget):
    assert plan_sequences([(length,) for length in lengths], budget) == plan_by_tokens(lengths, budget)


@quickly
@given(several, budgets)
def test_where_a_search_of_several_would_take_too_long(rows, budget):
    with mock.patch("macrobatch._cut.plans.MAX_SEARCH_STEPS", 0):
        check_rows(rows, budget)


def test_a_large_window_of_several_is_planned_without_a_search():
    rows = [tuple(row) for row in torch.randint(1, 65, (20_000, 2)).tolist()]
    with mock.patch("macrobatch._cut.plans._tight_ends_of_several", side_effect=AssertionError("this takes minutes")):
        check_rows(rows, 8192)


# ---------------------------------------------------------------------------------------------------------- few shapes


@at_length
@given(st.lists(st.integers(0, 5000), max_size=200), st.integers(1, 9000))
def test_few_shapes_keep_the_budget_and_every_sample(lengths, budget):
    plan, widths = plan_few_shapes(lengths, budget)
    assert sorted(sample for part in plan for sample in part) == list(range(len(lengths)))
    for part, width in zip(plan, widths, strict=True):
        assert width >= max(lengths[sample] for sample in part)
        assert len(part) == 1 or len(part) * width <= budget
        assert width <= max(16, 1.25 * max(lengths[sample] for sample in part))


@at_length
@given(st.integers(1, 10**6))
def test_lengths_are_rounded_up_to_four_for_each_doubling(length):
    rounded = rounded_up(length)
    assert length <= rounded
    assert rounded == rounded_up(rounded)
    assert length <= 16 or rounded < 1.25 * length
    assert len({rounded_up(each) for each in range(1025, 2049)}) == 4


def test_few_shapes_are_few():
    """Over many windows of random lengths: no more than a few for each width, where each cut has its own otherwise."""
    generator = torch.Generator().manual_seed(0)
    few, many = set(), set()
    for _ in range(50):
        lengths = torch.empty(128).log_normal_(5.0, 0.8, generator=generator).clamp(8, 2048).long().tolist()
        few |= {(len(part), width) for part, width in zip(*plan_few_shapes(lengths, 4096), strict=True)}
        many |= {(len(part), max(lengths[s] for s in part)) for part in plan_by_tokens(lengths, 4096)}
    assert len(few) < 64 < len(many)
