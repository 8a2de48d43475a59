"""Which samples make which batch: each sample once an epoch, whatever the ranks; resumed anywhere as if nothing was."""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macrobatch.errors import UsageError
from macrobatch.train.stream import Mixture, Stream, share

quickly = settings(max_examples=150, deadline=None, derandomize=True, database=None)

some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
seeds = st.integers(0, 2**40)
sizes = st.fixed_dictionaries({"batch_size": st.integers(1, 12)}) | st.fixed_dictionaries(
    {"batch_tokens": st.integers(1, 120)}
)
ramps = st.sampled_from([None, lambda step: min(0.25 + 0.1 * step, 1.0), lambda step: 1.0 if step % 2 else 0.01])


def run_of(stream: Stream, steps: int = 10_000, start: int = 0) -> list[list[int]]:
    """Its batches from a step on, until the end or for so many."""
    batches = []
    for step in range(start, start + steps):
        batch = stream.next(step)
        if not batch:
            break
        batches.append(batch)
    return batches


# ----------------------------------------------------------------------------------------------------- a mixture


@quickly
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.data(), seeds)
def test_a_mixture_takes_its_shares_and_no_sample_twice_before_all_others(sizes, data, seed):
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)))
    bounds = [0, *itertools.accumulate(sizes)]
    members = [list(range(first, last)) for first, last in itertools.pairwise(bounds)]
    mixture = Mixture(members, weights)
    total = sum(sizes)
    assert sum(mixture.counts) == total
    for count, weight in zip(mixture.counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1
    seen = Counter()
    for epoch in range(3):
        drawn = mixture.draw(epoch, seed)
        counted = Counter(drawn)
        assert [sum(counted[sample] for sample in part) for part in members] == mixture.counts
        seen.update(drawn)
        for part in members:
            assert max(seen[sample] for sample in part) - min(seen[sample] for sample in part) <= 1


def test_a_mixture_goes_on_where_it_was():
    lengths, mixture = [3] * 20, Mixture([list(range(15)), list(range(15, 20))], [1, 1])
    whole = run_of(Stream(lengths, seed=5, batch_size=3, epochs=3, mixture=mixture))
    for start in range(len(whole)):
        first = Stream(lengths, seed=5, batch_size=3, epochs=3, mixture=mixture)
        for step in range(start):
            first.next(step)
        again = Stream(lengths, seed=5, batch_size=3, epochs=3, mixture=mixture)
        again.load_state_dict(first.state_dict())
        assert run_of(again, start=start) == whole[start:]
    assert Stream(lengths, seed=5, batch_size=3, mixture=mixture).extent(3) == (len(whole), len(whole[-1]))


def tokens_of(batch: list[int], lengths: list[int]) -> int:
    return sum(lengths[sample] for sample in batch)


# --------------------------------------------------------------------------------------------------------- batches


@quickly
@given(lengths=some_lengths, seed=seeds, size=sizes, ramp=ramps, epochs=st.integers(1, 4))
def test_every_epoch_has_every_sample_once(lengths, seed, size, ramp, epochs):
    batches = run_of(Stream(lengths, seed=seed, ramp=ramp, epochs=epochs, **size))
    flat = [sample for batch in batches for sample in batch]
    for epoch in range(epochs):
        part = flat[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(part) == list(range(len(lengths)))
    assert len(flat) == epochs * len(lengths)


@quickly
@given(lengths=some_lengths, seed=seeds, batch_size=st.integers(1, 50), epochs=st.integers(1, 4))
def test_only_the_very_last_batch_may_be_short(lengths, seed, batch_size, epochs):
    batches = run_of(Stream(lengths, seed=seed, batch_size=batch_size, epochs=epochs))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


@quickly
@given(lengths=some_lengths, seed=seeds, budget=st.integers(1, 120))
def test_a_batch_by_tokens_is_as_full_as_the_budget_allows(lengths, seed, budget):
    batches = run_of(Stream(lengths, seed=seed, batch_tokens=budget, epochs=2))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert tokens_of(batch, lengths) <= budget or len(batch) == 1
        if following is not None:
            assert tokens_of(batch, lengths) + lengths[following[0]] > budget


@quickly
@given(lengths=some_lengths, seed=seeds, size=sizes, ramp=ramps, epochs=st.integers(1, 4))
def test_the_number_of_steps_is_the_number_of_batches(lengths, seed, size, ramp, epochs):
    stream = Stream(lengths, seed=seed, ramp=ramp, **size)
    batches = run_of(Stream(lengths, seed=seed, ramp=ramp, epochs=epochs, **size))
    assert stream.extent(epochs) == (len(batches), len(batches[-1]))
    assert stream.state_dict()["position"] == 0, "to count is not to take"


def test_a_ramp_takes_a_part_of_the_batch():
    stream = Stream([1] * 100, seed=0, batch_size=10, ramp=lambda step: (step + 1) / 4 if step < 4 else 1.0)
    assert [len(stream.next(step)) for step in range(5)] == [2, 5, 8, 10, 10]
    by_tokens = Stream([1] * 100, seed=0, batch_tokens=20, ramp=lambda step: 0.5 if step == 0 else 1.0)
    assert [len(by_tokens.next(step)) for step in range(2)] == [10, 20]


def test_a_ramp_never_makes_an_empty_batch():
    assert len(Stream([1, 1], seed=0, batch_size=4, ramp=lambda step: 1e-9).next(0)) == 1


def test_epochs_differ_and_so_do_seeds():
    orders = {
        (seed, epoch): tuple(batch)
        for seed in (0, 1, 10)
        for epoch, batch in enumerate(run_of(Stream([1] * 50, seed=seed, batch_size=50, epochs=3)))
    }
    assert len(orders) == 9
    assert len(set(orders.values())) == 9


def test_at_the_end_it_stays_at_the_end():
    stream = Stream([1, 1, 1], seed=0, batch_size=2, epochs=1)
    assert [len(stream.next(step)) for step in range(5)] == [2, 1, 0, 0, 0]
    assert [len(batch) for batch in run_of(Stream([1, 1, 1], seed=0, batch_size=2), steps=100)] == [2] * 100


def test_the_order_is_the_same_in_every_process():
    """Nor may it change from a version to the next: whoever resumes would train on other batches."""
    program = (
        "from macrobatch.train.stream import Stream; s = Stream([1] * 8, seed=7, batch_size=8);"
        "print([s.next(0), s.next(1)])"
    )
    expected = [[4, 6, 1, 7, 5, 2, 0, 3], [7, 0, 2, 4, 5, 6, 1, 3]]
    here = Stream([1] * 8, seed=7, batch_size=8)
    assert [here.next(0), here.next(1)] == expected
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == str(expected), result.stderr


# ---------------------------------------------------------------------------------------------------------- resuming


@quickly
@given(lengths=some_lengths, seed=seeds, size=sizes, ramp=ramps, epochs=st.none() | st.integers(1, 3), data=st.data())
def test_resumed_at_every_step_it_goes_on_as_the_undisturbed_one(lengths, seed, size, ramp, epochs, data):
    def fresh() -> Stream:
        return Stream(lengths, seed=seed, ramp=ramp, epochs=epochs, **size)

    whole = run_of(fresh(), steps=25)
    stream = fresh()
    for step in range(len(whole) + 1):
        state = stream.state_dict()
        resumed = fresh()
        for other in range(data.draw(st.integers(0, 3))):  # it need not stand at its beginning
            resumed.next(other)
        resumed.load_state_dict(state)
        assert run_of(resumed, steps=25 - step, start=step) == whole[step:]
        assert stream.state_dict() == state
        stream.next(step)


def test_the_state_is_plain_numbers():
    stream = Stream([3, 4, 5], seed=9, batch_size=2)
    stream.next(0)
    stream.next(1)
    assert stream.state_dict() == {"epoch": 1, "position": 1, "seed": 9, "num_samples": 3}
    assert stream.epoch == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "not what a stream's state_dict returned"),
        ({"epoch": 0, "position": 1.0, "seed": 0, "num_samples": 3}, "not what a stream's state_dict returned"),
        ({"epoch": 0, "position": True, "seed": 0, "num_samples": 3}, "not what a stream's state_dict returned"),
        ({"epoch": 0, "position": 4, "seed": 0, "num_samples": 3}, "past the end of the 3 samples"),
        ({"epoch": -1, "position": 0, "seed": 0, "num_samples": 3}, "past the end of the 3 samples"),
        ({"epoch": 0, "position": -1, "seed": 0, "num_samples": 3}, "past the end of the 3 samples"),
        ({"epoch": 0, "position": 0, "seed": 1, "num_samples": 3}, "has seed 1, this run 0"),
        ({"epoch": 0, "position": 0, "seed": 0, "num_samples": 4}, "has num_samples 4, this run 3"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state, message):
    stream = Stream([1, 2, 3], seed=0, batch_size=2)
    stream.next(0)
    before = stream.state_dict()
    with pytest.raises(UsageError, match=message):
        stream.load_state_dict(state)
    assert stream.state_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "not both: got"),
        ({"batch_size": 2, "batch_tokens": 2}, "not both: got"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more: got 0"),
        ({"batch_size": True}, "batch_size must be"),
        ({"batch_size": 2.0}, "batch_size must be"),
        ({"batch_tokens": -1}, "batch_tokens must be"),
        ({"batch_size": 1, "epochs": 0}, "epochs must be"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Stream([1, 2], seed=0, **options)


def test_no_samples_are_refused():
    with pytest.raises(UsageError, match="no sample"):
        Stream([], seed=0, batch_size=1)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_a_ramp_outside_of_its_range_is_refused(fraction):
    stream = Stream([1, 2], seed=0, batch_size=1, ramp=lambda step: fraction)
    with pytest.raises(UsageError, match="at step 3 it returned"):
        stream.next(3)


def test_a_number_of_epochs_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="epochs must be"):
        Stream([1], seed=0, batch_size=1).extent(0)


# ------------------------------------------------------------------------------------------------------------ ranks

batches_of_samples = some_lengths.flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.lists(st.integers(0, len(lengths) - 1), max_size=40))
)


@quickly
@given(drawn=batches_of_samples, world_size=st.integers(1, 9))
def test_ranks_share_a_batch_without_losing_or_doubling_a_sample(drawn, world_size):
    lengths, batch = drawn
    parts = [share(batch, lengths, rank, world_size) for rank in range(world_size)]
    assert Counter(sample for part in parts for sample in part) == Counter(batch)
    assert all(parts) or len(batch) < world_size


@quickly
@given(drawn=batches_of_samples, world_size=st.integers(1, 9))
def test_ranks_have_about_equally_many_tokens(drawn, world_size):
    lengths, batch = drawn
    loads = [tokens_of(share(batch, lengths, rank, world_size), lengths) for rank in range(world_size)]
    longest = max((lengths[sample] for sample in batch), default=0)
    assert max(loads) - min(loads) <= longest


@quickly
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), world_size=st.integers(1, 3))
def test_the_longest_rank_is_near_the_shortest_possible(lengths, world_size):
    """Longest first is at most 4/3 - 1/(3 ranks) of the best of all ways to deal (Graham, 1969)."""
    batch = list(range(len(lengths)))
    best = min(
        max(sum(length for length, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in owners)
        for owners in itertools.product(range(world_size), repeat=len(lengths))
    )
    longest = max(tokens_of(share(batch, lengths, rank, world_size), lengths) for rank in range(world_size))
    assert 3 * world_size * longest <= (4 * world_size - 1) * best


@quickly
@given(drawn=batches_of_samples, world_size=st.integers(1, 9))
def test_a_rank_keeps_the_order_of_the_batch(drawn, world_size):
    lengths, batch = drawn
    for rank in range(world_size):
        remaining = iter(batch)
        assert all(sample in remaining for sample in share(batch, lengths, rank, world_size))


def test_one_rank_has_the_batch():
    assert share([3, 1, 3], [1, 2, 3, 4], 0, 1) == [3, 1, 3]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_not_there_is_refused(rank, world_size):
    with pytest.raises(UsageError, match="rank must be one of"):
        share([0], [1], rank, world_size)
