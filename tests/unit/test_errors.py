"""Every mistake that the contract names: raised by the call that is wrong, with a message that says what to do."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch import nn

from macrobatch import Accumulator, MacroStep, errors
from macrobatch.errors import BackendError, BatchError, MacrobatchError, UsageError


@pytest.fixture
def model():
    return nn.Linear(3, 1)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def make(model, optimizer):
    return lambda **options: Accumulator(model, optimizer, **options)


@pytest.fixture
def loss(model):
    return lambda: model(torch.ones(2, 3)).mean()


def test_the_tree_is_drawn_as_it_is():
    drawn = re.findall(r"^    [├└]── (\w+)", errors.__doc__, re.M)
    assert drawn == [kind.__name__ for kind in MacrobatchError.__subclasses__() if kind.__module__ == errors.__name__]


# ---------------------------------------------------------------------------------------------- losses and items


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda loss: loss.item(), "must be a tensor: got float"),
        (lambda loss: loss * torch.ones(3), r"must be a scalar: got shape \(3,\).*reduction=\"sum\""),
        (lambda loss: loss.detach(), "has no graph.*detached"),
        (lambda loss: loss.to(torch.complex64), "must be a real number: got dtype torch.complex64"),
        (lambda loss: torch.ones((), requires_grad=True) * 2, "reached no parameter of the given models"),
    ],
)
def test_loss(make, loss, spoil, message):
    acc = make()
    with acc.micro_batch():
        with pytest.raises(BatchError, match=message):
            acc.backward(spoil(loss()))
        acc.backward(loss())  # nothing is lost: the right call still works


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (-1, "finite and not negative: got -1"),
        (math.nan, "finite and not negative: got nan"),
        (math.inf, "finite and not negative: got inf"),
        (1e-310, "between 1e-30 and .*got 1e-310"),
        (1e300, "between 1e-30 and .*got 1e[+]300"),
        (2**53 + 1, r"between 1e-30 and 2\*\*53: got 9007199254740993"),
        (2**5000, "between 1e-30 and"),
        (torch.ones((), device="meta"), "in a dense tensor: got one on the device 'meta'"),
        (torch.ones(1).to_sparse(), "in a dense tensor: got one of layout torch.sparse_coo"),
        (True, "must be a number.*got True"),
        ("3", "must be a number.*got '3'"),
        (torch.ones(2), r"one number: got a tensor of shape \(2,\).*\(labels != -100\).sum\(\)"),
        (torch.tensor(True), "one number: got a tensor of shape .* torch.bool"),
        (torch.ones((), requires_grad=True), "a tensor with a graph, which looks like a second loss"),
        (torch.tensor(256.0, dtype=torch.bfloat16), r"exact: got .* dtype torch.bfloat16.*\(mask != 0\).sum\(\)"),
        (torch.tensor(2048.0, dtype=torch.float16), "must be exact: got a tensor that has dtype torch.float16"),
    ],
)
def test_items(make, loss, items, message):
    acc = make()
    with acc.micro_batch():
        with pytest.raises(BatchError, match=message):
            acc.backward(loss(), items=items)
        acc.backward(loss(), items=2)


def test_a_backward_in_inference_mode(make, loss):
    acc = make()
    with acc.micro_batch():
        found = loss()
        with torch.inference_mode(), pytest.raises(UsageError, match="outside of that block"):
            acc.backward(found)
        acc.backward(found)


@pytest.mark.parametrize(("first", "then"), [(None, 2), (2, None), (torch.tensor(2), None)])
def test_items_mixed_with_none(make, loss, first, then):
    acc = make(steps=2)
    with acc.micro_batch():
        acc.backward(loss(), items=first)
    with acc.micro_batch():
        with pytest.raises(BatchError, match="for every micro-batch of a window, or for none: earlier in window 1"):
            acc.backward(loss(), items=then)
        acc.backward(loss(), items=first)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, 1e300, 1e-310])
@pytest.mark.parametrize("fused", [False, True])
def test_items_that_only_the_device_knows(model, loss, bad, fused):
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), steps=2, nonfinite="keep")
    before = [p.clone() for p in model.parameters()]
    for items in (torch.tensor(0.0 if 0 < bad < 1 else 5.0), torch.tensor(float(bad), dtype=torch.float64)):
        with acc.micro_batch():
            acc.backward(loss(), items=items)
    with pytest.raises(BatchError, match="window 1 were negative or not finite; its step was not taken"):
        acc.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert acc.optimizer_step == 0


# ---------------------------------------------------------------------------------------------- the order of calls


def test_second_backward(make, loss):
    acc = make()
    with acc.micro_batch():
        acc.backward(loss())
        with pytest.raises(UsageError, match=r"second backward\(\) in one micro-batch.*Add the losses up"):
            acc.backward(loss())
    assert acc.step().micro_batches == 1


def test_backward_outside_of_a_micro_batch(make, loss):
    with pytest.raises(UsageError, match=r"outside of a micro-batch.*acc.batches\(loader\)"):
        make().backward(loss())


def test_step_without_backward(make):
    with pytest.raises(UsageError, match="no window is open"):
        make().step()


def test_step_before_backward(make):
    acc = make()
    with pytest.raises(UsageError, match=r"step\(\) before backward\(\)"), acc.micro_batch():
        acc.step()


def test_micro_batch_without_backward(make, loss):
    acc = make()
    with pytest.raises(UsageError, match=r"ended without its backward\(\)"), acc.micro_batch():
        pass
    with acc.micro_batch():
        acc.backward(loss())


def test_batch_without_backward(make):
    with pytest.raises(UsageError, match=r"left without its backward\(\).*acc\.skip\(\)"):
        list(make().batches([1, 2]))


def test_last_batch_without_backward(make, loss):
    acc, seen = make(steps=2), []
    with pytest.raises(UsageError, match=r"left without its backward\(\)"):
        for batch in acc.batches([1, 2]):
            seen.append(batch)
            if batch == 1:
                acc.backward(loss())
    assert seen == [1, 2]


@pytest.mark.parametrize("batches", [1, 2])
def test_window_closed_without_step(make, loss, batches):
    acc = make()
    with pytest.raises(UsageError, match=r"window 1 is complete, but step\(\) was not called"):
        for _ in acc.batches(range(batches)):
            acc.backward(loss())


@pytest.mark.parametrize("remainder", ["step", "drop", "carry"])
def test_batches_over_an_open_window(make, loss, remainder):
    acc = make(steps=3, remainder=remainder)
    for _ in acc.batches(range(9)):
        acc.backward(loss())
        break
    with pytest.raises(
        UsageError, match=r"1 micro-batches of window 1 have had no step.*step\(now=True\).*discard\(\)"
    ):
        acc.batches(range(9))
    acc.discard()
    acc.batches(range(9))


def test_break_before_the_first_backward_leaves_nothing_open(make, loss):
    acc = make()
    for _ in acc.batches(range(3)):
        break
    for _ in acc.batches(range(1)):
        acc.backward(loss())
        assert acc.step().step == 1


def test_batches_that_is_over(make, loss):
    acc = make()
    old, new = acc.batches(range(3)), acc.batches(range(3))
    with pytest.raises(UsageError, match=r"this batches\(\) is over"):
        next(old)
    next(new)
    acc.backward(loss())


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_state_inside_a_window(make, loss, call):
    acc = make(steps=2)
    state = acc.state_dict()
    with acc.micro_batch():
        acc.backward(loss())
    with pytest.raises(UsageError, match=rf"{call}\(\) inside a window: 1 micro-batches of window 1"):
        acc.state_dict() if call == "state_dict" else acc.load_state_dict(state)


@pytest.mark.parametrize(
    "state", [{}, {"optimizer_step": 1}, {"optimizer_step": -1, "windows": 0}, {"optimizer_step": "1", "windows": 0}]
)
def test_foreign_state(make, state):
    with pytest.raises(UsageError, match=r"a count for each of .*optimizer_step.*windows.*: got"):
        make().load_state_dict(state)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("planted")


def test_backward_that_fails_half_way(make, model, loss):
    acc = make(steps=2)
    failing = lambda: model.bias.mean() + Fails.apply(model.weight).mean()  # noqa: E731  (the bias comes first)
    with pytest.raises(RuntimeError, match="planted"), acc.micro_batch():
        acc.backward(failing(), items=1)
    assert all(p.grad is None for p in model.parameters())  # nothing accumulated yet: as if it had not been
    with acc.micro_batch():
        acc.backward(loss(), items=1)
    with pytest.raises(RuntimeError, match="planted"), acc.micro_batch():
        acc.backward(failing(), items=1)
    with pytest.raises(UsageError, match=r"a backward failed half-way in window 1.*discard\(\)"):
        acc.step(now=True)
    acc.discard()
    for _ in range(2):
        with acc.micro_batch():
            acc.backward(loss(), items=1)
    assert acc.step().micro_batches == 2


def test_a_batch_whose_backward_failed_is_left_out(make, model, loss):
    """As the error says."""
    acc = make(steps=2)
    for index, _ in enumerate(acc.batches(range(5))):
        if index != 1:
            acc.backward(loss(), items=1)
            acc.step()
            continue
        with pytest.raises(RuntimeError, match="planted"):
            acc.backward(model.bias.sum() + Fails.apply(model.weight).sum(), items=1)
        with pytest.raises(UsageError, match=r"with discard\(\); the batch under way.*or skip\(\)"):
            acc.step()
        acc.discard()
        acc.skip()
        acc.step()
    assert acc.optimizer_step == 2  # of one, beside the one left out; of the last two


def summed(model, batch):
    return model(batch).sum()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["copied", "pickled"])
def test_what_belongs_to_a_model_cannot_be(make, model, copied):
    for one in (make(steps=2), MacroStep(model, None, summed, micro=1)):
        with pytest.raises(UsageError, match=r"cannot be copied or pickled.*save its state_dict\(\)"):
            copied(one)


# ---------------------------------------------------------------------------------------------- loaders


class Claims:
    def __init__(self, length, batches):
        self.length, self.batches = length, batches

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.batches))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Claims(3, 2), "its length is 3, but yielded 2 batches"),
        (Claims(3, 4), "its length is 3, but yields more"),
        ([], "the loader is empty"),
        (iter([]), "the loader is empty"),
    ],
)
def test_loader(make, loss, loader, message):
    acc = make(steps=2)
    with pytest.raises(BatchError, match=message):
        for _ in acc.batches(loader):
            acc.backward(loss())
            acc.step()


def test_loader_that_ends_early_loses_nothing(make, loss):
    acc = make(steps=3)
    with pytest.raises(BatchError):
        for _ in acc.batches(Claims(3, 2)):
            acc.backward(loss())
            assert acc.step() is None
    assert acc.step(now=True).micro_batches == 2


# ---------------------------------------------------------------------------------------------- making one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of micro-batches, 1 or more: got 0"),
        ({"steps": 2.0}, "got 2.0"),
        ({"steps": True}, "got True"),
        ({"max_norm": 0.0}, "max_norm must be positive"),
        ({"max_norm": math.nan}, "max_norm must be positive"),
        ({"reduction": "avg"}, r"reduction must be one of \('mean', 'sum', 'total'\): got 'avg'"),
        ({"remainder": "keep"}, "remainder must be one of .*got 'keep'"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of .*got 'ignore'"),
        ({"sync": "never"}, "sync must be .*got 'never'"),
        ({"gather": "never"}, "gather must be .*got 'never'"),
        ({"gather": "window"}, "FSDP2 gathered; no given model"),
        ({"process_group": object()}, "process_group was given, but"),
        ({"scaler": 2.0}, "must be a torch.amp.GradScaler: got float"),
        ({"accumulate_dtype": torch.int64}, "must be a floating-point dtype .*got torch.int64"),
        ({"scheduler": "cosine"}, "scheduler must be a learning-rate scheduler, or a list of such: got 'cosine'"),
    ],
)
def test_options(make, options, message):
    with pytest.raises(MacrobatchError, match=message):
        make(**options)


@pytest.mark.parametrize("length", [0, 2.0, None])
def test_ramp_that_is_no_number(make, length):
    acc = make(steps=lambda step: length)
    with pytest.raises(UsageError, match=r"steps\(optimizer_step\) must be a whole number"), acc.micro_batch():
        pass


def test_model_and_optimizer_of_another_kind(model, optimizer):
    with pytest.raises(UsageError, match="model must be of type Module, or a list of such: got dict"):
        Accumulator([model, {}], optimizer)
    with pytest.raises(UsageError, match=r"optimizer must be of type Optimizer.*got list"):
        Accumulator(model, [[optimizer]])
    with pytest.raises(UsageError, match="optimizer is an empty list"):
        Accumulator(model, [])


def test_optimizer_of_another_model(model, optimizer):
    other = torch.optim.SGD([*model.parameters(), *nn.Linear(5, 7).parameters()], lr=0.1)
    with pytest.raises(BackendError, match=r"holds a parameter of shape \(7, 5\).*no given model"):
        Accumulator(model, [optimizer, other])


def test_parameters_added_to_the_optimizer_later(make, optimizer, loss):
    acc = make()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    with pytest.raises(BackendError, match=r"shape \(4,\)"), acc.micro_batch():
        acc.backward(loss())


def test_nothing_to_train(model, optimizer):
    model.requires_grad_(False)
    with pytest.raises(BackendError, match="nothing to train"):
        Accumulator(model, optimizer)


def test_scheduler_of_another_optimizer(make, model):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="StepLR belongs to an optimizer that was not given"):
        make(scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


def test_scheduler_that_wants_a_metric(make, optimizer):
    with pytest.raises(UsageError, match="ReduceLROnPlateau wants a metric"):
        make(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_lbfgs(model):
    with pytest.raises(BackendError, match="LBFGS evaluates the loss several times"):
        Accumulator(model, torch.optim.LBFGS(model.parameters()))


def test_flags_that_are_none(make, loss):
    acc = make()
    with pytest.raises(UsageError, match="last must be True or False: got 'no'"), acc.micro_batch(last="no"):
        pass
    with acc.micro_batch():
        acc.backward(loss())
    with pytest.raises(UsageError, match="now must be True or False: got 'yes'"):
        acc.step(now="yes")
    assert acc.step() is not None


def test_no_optimizer(model):
    with pytest.raises(UsageError, match=r"needs the optimizer that it steps with.*MacroStep\(model, None, loss_fn\)"):
        Accumulator(model, None)


def test_an_optimizer_without_a_learning_rate(model, loss):
    class Fixed(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= parameter.grad

    acc = Accumulator(model, Fixed(model.parameters()))
    with acc.micro_batch():
        acc.backward(loss())
    result = acc.step()
    assert (result.step, acc.optimizer_step) == (1, 1)
    assert math.isnan(result.lr[0])


def test_a_step_that_fails_is_named(recwarn):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise OSError("full")

    model = nn.Linear(2, 1)
    acc = Accumulator(model, Fails(model.parameters(), lr=0.1), steps=1)
    batches = iter(acc.batches([torch.ones(1, 2)] * 2))
    acc.backward(model(next(batches)).mean(), items=1)
    with pytest.raises(OSError, match="full"):
        acc.step()
    for again in (acc.step, lambda: next(batches)):
        with pytest.raises(UsageError, match=r"step\(\) failed half-way in window 1.*discard"):
            again()
