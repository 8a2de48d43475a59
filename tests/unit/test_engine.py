"""The engine below `Accumulator` and `MacroStep`: other ways to close a window, and observers of its spans."""

import contextlib

import pytest
import torch
from torch import nn

from macrobatch import Accumulator, MacroStep
from macrobatch._assembly import checks_of_engines
from macrobatch._engine.closing import Closing, LeaveMean, result_of
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import MicroPlan
from macrobatch._ranks.backend import Local
from macrobatch._terms.mean import Mean
from macrobatch.errors import UsageError

SIZES = (5, 2, 7, 4)
MEAN = Mean("mean", None, Local())


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def micro_batches():
    torch.manual_seed(1)
    return [(torch.randn(n, 3).double(), torch.randn(n, 1).double()) for n in SIZES]


def mean_gradients():
    """Of one big batch."""
    model, _ = model_and_optimizer()
    x, y = (torch.cat(column) for column in zip(*micro_batches(), strict=True))
    nn.functional.mse_loss(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def accumulate(engine, model, items=len):
    for x, y in micro_batches():
        with engine.micro_batch(MicroPlan()):
            engine.backward(nn.functional.mse_loss(model(x), y), items(x))
        result = engine.close()
    return result


def close_to(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("items", [len, lambda x: torch.tensor(len(x))], ids=["ints", "tensors"])
def test_a_program_that_steps_by_itself_finds_the_mean(items):
    model, optimizer = model_and_optimizer()
    engine = Engine([model], [optimizer], Local(), LeaveMean([optimizer]), MEAN, steps=len(SIZES))
    result = accumulate(engine, model, items)
    close_to([p.grad for p in model.parameters()], mean_gradients())
    assert (result.step, result.micro_batches, result.items.item()) == (1, len(SIZES), sum(SIZES))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    close_to(list(model.parameters()), [p - 0.1 * g for p, g in zip(before, mean_gradients(), strict=True)])
    optimizer.zero_grad()
    assert accumulate(engine, model, items).step == 2


def test_a_program_that_steps_by_itself_must_wait_for_the_close():
    model, optimizer = model_and_optimizer()
    engine = Engine([model], [optimizer], Local(), LeaveMean([optimizer]), MEAN, steps=2, checks=checks_of_engines())
    x, y = micro_batches()[0]
    with engine.micro_batch(MicroPlan()):
        engine.backward(nn.functional.mse_loss(model(x), y), len(x))
    with pytest.raises(UsageError, match="inside the open window"):
        optimizer.step()


def test_the_mean_that_is_left_keeps_the_scale_of_a_scaler():
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mean = Mean("mean", scaler, Local())
    engine = Engine([model], [optimizer], Local(), LeaveMean([optimizer], scaler), mean, steps=len(SIZES))
    accumulate(engine, model)
    close_to([p.grad / 1024 for p in model.parameters()], mean_gradients())


class Collect(Closing):
    """A policy of one's own: hands the mean gradients over, and steps nothing."""

    def close(self, window, store, flags, *, average, shared):
        store.gather()
        store.divide(window.divisor(average))
        self.means = [p.grad.clone() for p in store.parameters]
        self._taken += 1
        return result_of(window, step=self._taken, lr=(), skipped=False)


def test_a_closing_policy_of_ones_own():
    model, optimizer = model_and_optimizer()
    closing = Collect()
    accumulate(Engine([model], [optimizer], Local(), closing, MEAN, steps=len(SIZES)), model)
    close_to(closing.means, mean_gradients())
    assert all(p.grad is None for p in model.parameters())


def test_an_observer_sees_each_span_once_and_in_order():
    model, optimizer = model_and_optimizer()
    train = MacroStep(model, optimizer, lambda model, batch: model(batch).square().mean(), micro=2)
    seen = []

    @contextlib.contextmanager
    def watch(span, loss):
        seen.append(span)
        assert (loss is not None) == (span == "backward")
        yield

    train.observe(watch)
    train(torch.randn(3, 3).double())
    turn = ["data", "forward", "backward"]
    assert seen == ["communication", *turn, *turn, "communication", "update"]


def test_what_an_observer_raises_is_not_lost():
    model, optimizer = model_and_optimizer()
    acc = Accumulator(model, optimizer)
    train = MacroStep(model, optimizer, lambda model, batch: model(batch).square().mean(), micro=2)

    @contextlib.contextmanager
    def watch(span, loss):
        if span == "backward":
            raise ValueError("an observer's own")
        yield

    train.observe(watch)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="own"):
        train(torch.randn(3, 3).double())
    close_to(list(model.parameters()), before)
    assert acc.optimizer_step == train.optimizer_step == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_loss_whose_sign_is_not_in_its_memory(dtype):
    """The imaginary part of a conjugate is a view with a note that it is negative."""
    model = nn.Linear(2, 1, bias=False, dtype=dtype)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with acc.micro_batch():
        loss = model(torch.ones(1, 2, dtype=dtype)).conj().imag[0, 0]
        assert loss.is_neg()
        acc.backward(loss, items=1)
    torch.testing.assert_close(acc.step().loss.item(), loss.item())


def test_a_parameter_with_a_hook_may_be_frozen_inside_a_window():
    model, optimizer = model_and_optimizer()
    first = model[0].weight
    first.register_post_accumulate_grad_hook(lambda parameter: None)
    acc = Accumulator(model, optimizer, steps=2)
    for index, (x, y) in enumerate(acc.batches(micro_batches()[:2])):
        first.requires_grad_(index == 0)
        acc.backward(nn.functional.mse_loss(model(x), y), items=len(x))
        result = acc.step()
    assert result.micro_batches == 2
