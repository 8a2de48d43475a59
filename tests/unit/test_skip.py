"""`skip`: a batch adds nothing to its window, and its turn counts."""

import math
import re

import pytest
import torch
from torch import nn

from macrobatch import Accumulator
from macrobatch.errors import BatchError, UsageError

SIZES = (5, 2, 7, 4, 1, 3)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("planted")


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in SIZES]


class Setup:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.acc = Accumulator(self.model, self.optimizer, **options)

    def loss(self, x):
        return self.model(x).square().mean()

    def train(self, skipped, loader=None):
        results = []
        for index, x in enumerate(self.acc.batches(batches() if loader is None else loader)):
            if index in skipped:
                self.acc.skip()
            else:
                self.acc.backward(self.loss(x))
            results.append(self.acc.step())
        return [result for result in results if result]


def trained_without(skipped, steps):
    """The weights after the same windows in plain torch, without what is skipped."""
    setup, rest = Setup(), batches()
    for start in range(0, len(rest), steps):
        if window := [rest[i] for i in range(start, min(start + steps, len(rest))) if i not in skipped]:
            setup.loss(torch.cat(window)).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
    return setup.model.weight


@pytest.mark.parametrize("skipped", [{0}, {1}, {2}, {0, 2}, {5}, {0, 1, 2}, {3, 4, 5}, set(range(6)), {2, 3}])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_the_window_is_exact_over_the_others(skipped, steps, sized):
    setup = Setup(steps=steps)
    results = setup.train(skipped, batches() if sized else iter(batches()))
    assert (setup.model.weight - trained_without(skipped, steps)).abs().max() < 1e-15
    for number, result in enumerate(results):
        turns = range(number * steps, min((number + 1) * steps, len(SIZES)))
        kept = [i for i in turns if i not in skipped]
        assert result.micro_batches == len(kept)
        assert result.items == sum(SIZES[i] for i in kept) * 2
        assert result.skipped == (not kept)


def test_a_window_in_which_everything_was_skipped_takes_no_step():
    setup = Setup()
    scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 1, 0.5)
    setup.acc = Accumulator(setup.model, setup.optimizer, steps=3, max_norm=1.0, scheduler=scheduler)
    before = setup.model.weight.clone()
    (first, second) = setup.train({0, 1, 2})
    assert (first.skipped, first.step, first.lr) == (True, 0, (0.1,))
    assert math.isnan(first.loss)
    assert (second.skipped, second.step, second.lr) == (False, 1, (0.1,))
    assert scheduler.last_epoch == setup.acc.optimizer_step == 1
    assert not torch.equal(before, setup.model.weight)


def test_after_an_exception_in_the_forward_or_in_the_first_backward():
    setup = Setup(steps=2)
    for index, x in enumerate(setup.acc.batches(batches()[:4])):
        try:
            if index == 0:
                setup.acc.backward(Fails.apply(setup.model(x)).square().mean())
            elif index == 3:
                raise MemoryError
            else:
                setup.acc.backward(setup.loss(x))
        except MemoryError:
            setup.acc.skip()
        setup.acc.step()
    expected = Setup()
    for i in (1, 2):
        expected.loss(batches()[i]).backward()
        expected.optimizer.step()
        expected.optimizer.zero_grad()
    torch.testing.assert_close(setup.model.weight, expected.model.weight, rtol=0, atol=1e-15)  # n * mean / n may round


def test_a_later_backward_that_failed_half_way_needs_discard():
    setup = Setup(steps=3)
    for index, x in enumerate(setup.acc.batches(batches()[:3])):
        if index != 1:
            setup.acc.backward(setup.loss(x))
        else:
            with pytest.raises(MemoryError):
                setup.acc.backward(Fails.apply(setup.model(x)).square().mean())
            with pytest.raises(UsageError, match=r"a backward failed half-way.*discard\(\)"):
                setup.acc.skip()
            setup.acc.discard()
            setup.acc.skip()
        result = setup.acc.step()
    assert (result.micro_batches, result.items.item()) == (1, 14)


def test_in_a_loop_without_a_loader():
    setup = Setup(steps=2)
    with setup.acc.micro_batch():
        setup.acc.skip()
    assert setup.acc.step() is None
    with setup.acc.micro_batch():
        setup.acc.backward(setup.loss(batches()[0]))
    assert setup.acc.step().micro_batches == 1


def test_a_turn_that_is_carried():
    """Of windows of four, the second has two micro-batches of the first epoch and two of the next."""
    setup = Setup(steps=4, remainder="carry")
    assert [result.micro_batches for result in setup.train({0, 4, 5})] == [3]
    assert [result.micro_batches for result in setup.train({0})] == [1, 4]


def test_a_scaler_does_not_hear_of_an_empty_window():
    setup = Setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    setup.acc = Accumulator(setup.model, setup.optimizer, steps=2, scaler=scaler)
    results = setup.train({0, 1})
    assert [result.skipped for result in results] == [True, False, False]
    assert scaler.get_scale() == 16.0  # of two windows


def test_no_state_inside_a_window_of_which_everything_was_skipped():
    setup = Setup(steps=2)
    for _ in setup.acc.batches(batches()[:2]):
        setup.acc.skip()
        with pytest.raises(UsageError, match=r"state_dict\(\) inside a window"):
            setup.acc.state_dict()
        setup.acc.step()
    assert setup.acc.state_dict()["optimizer_step"] == 0


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("never begun", r"skip\(\) outside of a micro-batch"),
        ("after its backward", r"skip\(\) of a micro-batch that has had its backward\(\)"),
        ("twice", r"skip\(\) of a micro-batch that has had its backward\(\) or skip\(\)"),
    ],
)
def test_out_of_order(when, message):
    setup = Setup(steps=2)
    if when == "never begun":
        with pytest.raises(UsageError, match=message):
            setup.acc.skip()
        return
    for x in setup.acc.batches(batches()[:1]):
        if when == "twice":
            setup.acc.skip()
        else:
            setup.acc.backward(setup.loss(x))
        with pytest.raises(UsageError, match=message):
            setup.acc.skip()
        setup.acc.step(now=True)


def test_a_batch_left_without_its_backward_is_told_of_it():
    setup = Setup(steps=2)
    with pytest.raises(UsageError, match=re.escape("call acc.skip() in place of backward()")):
        for _ in setup.acc.batches(batches()):
            continue


def test_terms_have_counted_the_batch_before():
    setup = Setup(steps=2, counts=lambda x: {"loss": len(x)})
    with pytest.raises(UsageError, match=r"skip\(\) cannot go with counts=.*discard\(\)"):
        for _ in setup.acc.batches(batches()):
            setup.acc.skip()


def test_items_of_a_skipped_batch_do_not_mix():
    """Given items and a batch without any are one window."""
    setup = Setup(steps=3)
    for index, x in enumerate(setup.acc.batches(batches()[:3])):
        if index == 1:
            setup.acc.skip()
        else:
            setup.acc.backward(setup.loss(x), items=len(x))
        result = setup.acc.step()
    assert result.items == 12
    with pytest.raises(BatchError, match="items must be given for every micro-batch"):
        for index, x in enumerate(setup.acc.batches(batches()[:3])):
            setup.acc.backward(setup.loss(x), items=len(x) if index else None)
            setup.acc.step()
