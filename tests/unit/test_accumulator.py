"""What an Accumulator does with a loader, from one call to the next. (How exact it is: test_exactness.py.)"""

import copy
import gc
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from macrobatch import Accumulator
from macrobatch.errors import UsageError


class Setup:
    """A model of one weight whose gradient is the input: what happened can be read off it."""

    def __init__(self, **options):
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.acc = Accumulator(self.model, self.optimizer, **options)

    def train(self, loader):
        """Returns the results, by the batches that they came after."""
        return {batch: result for batch in self.acc.batches(loader) if (result := self.one(batch))}

    def one(self, batch):
        self.acc.backward(self.model(torch.full((1, 1), float(batch))).sum())
        return self.acc.step()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


LOADERS = {
    "sized": lambda: range(5),
    "generator": lambda: (i for i in range(5)),
    "DataLoader": lambda: DataLoader(range(5), batch_size=None),
    "DataLoader without length": lambda: DataLoader(Stream(), batch_size=None),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_pass_that_is_over_cannot_be_made_again(kind):
    """A second loop over it would train on nothing."""
    setup = Setup(steps=5)
    batches = setup.acc.batches(LOADERS[kind]())
    for batch in batches:
        setup.one(batch)
        if batch == 2:
            break
    assert [setup.one(batch) is None for batch in batches] == [True, False]  # goes on where it was left
    with pytest.raises(UsageError, match=r"is over: call acc.batches\(loader\) again for each epoch"):
        list(batches)
    assert next(batches, "none") == "none"


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("remainder", "closing"), [("step", [1, 3, 4]), ("drop", [1, 3]), ("carry", [1, 3])])
def test_which_batches_close_a_window(kind, remainder, closing):
    setup = Setup(steps=2, remainder=remainder)
    assert list(setup.train(LOADERS[kind]())) == closing
    assert [*setup.train(LOADERS[kind]())][:1] == [0 if remainder == "carry" else 1]


@pytest.mark.parametrize(("kind", "ahead"), [("sized", 0), ("generator", 1)])
def test_how_far_a_loader_is_read_ahead(kind, ahead):
    read = []

    class Recorded(list):
        def __iter__(self):
            for batch in super().__iter__():
                read.append(batch)
                yield batch

    setup = Setup(steps=2)
    loader = Recorded(range(5)) if kind == "sized" else iter(Recorded(range(5)))
    for batch in setup.acc.batches(loader):
        assert read == list(range(min(batch + ahead, 4) + 1))
        setup.one(batch)


def test_dropped_batches_of_a_sized_loader_are_not_even_computed():
    setup, seen = Setup(steps=2, remainder="drop"), []
    for batch in setup.acc.batches(range(5)):
        seen.append(batch)
        setup.one(batch)
    assert seen == [0, 1, 2, 3]


def test_carry_then_now():
    setup = Setup(steps=4, remainder="carry")
    assert list(setup.train(range(3))) == []
    assert setup.train(range(3))[0].micro_batches == 4
    result = setup.acc.step(now=True)
    assert (result.micro_batches, result.step) == (2, 2)
    assert setup.acc.step(now=True) is None


def test_a_ramp_asks_once_a_window():
    asked = []

    def ramp(step):
        asked.append(step)
        return step + 1

    results = Setup(steps=ramp).train(range(6))
    assert [result.micro_batches for result in results.values()] == [1, 2, 3]
    assert asked == [0, 1, 2]


def test_is_last():
    setup, seen = Setup(steps=2), []
    assert not setup.acc.is_last
    for batch in setup.acc.batches(range(3)):
        before = setup.acc.is_last
        setup.one(batch)
        seen.append((before, setup.acc.is_last, setup.acc.is_repeat))
    assert seen == [(False, False, False), (True, True, False), (True, True, False)]
    assert not setup.acc.is_last


def test_micro_batch_says_which_is_last():
    setup = Setup(steps=2)
    closed = []
    for last in (False, False, False, True, None, None):
        with setup.acc.micro_batch(last=last):
            setup.acc.backward(setup.model(torch.ones(1, 1)).sum())
        closed.append(setup.acc.step() is not None)
    assert closed == [False, False, False, True, False, True]


def test_step_may_be_left_out_in_mid_window():
    setup = Setup(steps=3)
    for _ in setup.acc.batches(range(6)):
        setup.acc.backward(setup.model(torch.ones(1, 1)).sum())
        if setup.acc.is_last:
            assert setup.acc.step().micro_batches == 3


@pytest.mark.parametrize(
    ("when", "where", "expected"),
    [
        ("before", 1, {3: 3, 6: 3}),
        ("before", 2, {4: 3, 6: 2}),  # it would have closed the window
        ("before", 6, {2: 3, 5: 3, 6: 1}),
        ("after", 1, {4: 3, 6: 2}),
    ],
)
def test_discard_begins_a_new_window(when, where, expected):
    setup, closed = Setup(steps=3), {}
    for batch in setup.acc.batches(range(7)):
        if batch == where and when == "before":
            setup.acc.discard()
        if result := setup.one(batch):
            closed[batch] = result.micro_batches
        if batch == where and when == "after":
            setup.acc.discard()
    assert closed == expected


def test_discard_clears_the_gradients():
    setup = Setup(steps=2)
    with setup.acc.micro_batch():
        setup.acc.backward(setup.model(torch.ones(1, 1)).sum())
    setup.acc.discard()
    assert setup.model.weight.grad is None
    setup.acc.discard()  # of nothing: nothing


def test_state_goes_through_json():
    first, second = Setup(steps=lambda step: step + 1), Setup(steps=lambda step: step + 1)
    first.train(range(3))
    second.acc.load_state_dict(json.loads(json.dumps(first.acc.state_dict())))
    assert second.acc.optimizer_step == 2
    assert [r.micro_batches for r in second.train(range(3)).values()] == [3]


def test_result_is_frozen_and_says_the_rate_of_its_own_step():
    setup = Setup()
    setup.acc = Accumulator(
        setup.model, setup.optimizer, scheduler=torch.optim.lr_scheduler.StepLR(setup.optimizer, 1, gamma=0.5)
    )
    results = list(setup.train(range(3)).values())
    assert [result.lr for result in results] == [(1.0,), (0.5,), (0.25,)]
    with pytest.raises(AttributeError):
        results[0].step = 7


def test_a_rate_kept_in_a_tensor_is_copied():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    acc = Accumulator(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    rates = []
    for _ in acc.batches(range(2)):
        acc.backward(model(torch.ones(1, 1)).sum())
        rates.append(acc.step().lr[0])
    assert [rate.item() for rate in rates] == [0.5, 0.25]


def test_parameters_may_be_frozen_and_thawed_between_windows():
    setup = Setup()
    other = nn.Linear(1, 1)
    setup.acc = Accumulator([setup.model, other], [setup.optimizer, torch.optim.SGD(other.parameters(), lr=1.0)])
    before = copy.deepcopy(other.state_dict())
    for batch, frozen in enumerate((True, False)):
        other.requires_grad_(not frozen)
        with setup.acc.micro_batch():
            setup.acc.backward(other(setup.model(torch.ones(1, 1))).sum())
        setup.acc.step()
        assert torch.equal(other.bias, before["bias"]) == (batch == 0)


@pytest.mark.parametrize("from_window", [1, 2])
def test_reentrant_checkpointing(from_window):
    """Its parameters are found only during the backward: confining the backward would silently leave them out."""
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.ModuleList([inner, outer])
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(3, 2, requires_grad=True)
    for window in (1, 2):
        run = inner if window < from_window else lambda x: checkpoint(inner, x, use_reentrant=True)
        with acc.micro_batch():
            acc.backward(outer(run(x)).mean(), items=3)
            assert inner.weight.grad is not None
        acc.step()


def test_an_abandoned_generator_does_no_harm_when_it_is_collected():
    setup = Setup(steps=2)
    kept = setup.acc.batches(range(4))
    setup.one(next(kept))
    setup.acc.discard()
    results = {}
    for batch in setup.acc.batches(range(4)):
        if batch == 1:
            del kept
            gc.collect()
        if result := setup.one(batch):
            results[batch] = result.micro_batches
    assert results == {1: 2, 3: 2}


def test_accumulators_live_side_by_side():
    first, second = Setup(steps=2), Setup(steps=3)
    closed = []
    for a, b in zip(first.acc.batches(range(6)), second.acc.batches(range(6)), strict=True):
        closed.append((first.one(a) is not None, second.one(b) is not None))
    assert [sum(each) for each in zip(*closed, strict=True)] == [3, 2]


def test_a_carried_window_that_goes_on_is_an_open_one():
    model = nn.Linear(2, 1)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4, remainder="carry")
    for x in acc.batches([torch.ones(1, 2)]):
        acc.backward(model(x).mean(), items=1)
        acc.step()
    batches = iter(acc.batches([torch.ones(1, 2)] * 2))  # carried: it may go on
    acc.backward(model(next(batches)).mean(), items=1)
    acc.step()
    with pytest.raises(UsageError, match="over an open window"):
        acc.batches([torch.ones(1, 2)])
