"""Optimizers that were not passed but hold parameters of a window: an error, where torch would say nothing."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from harness import ROOT, environment
from harness.reference import relative_error, weights_of
from macrobatch import Accumulator, MacroStep
from macrobatch._torch.optimizers import has_hooks
from macrobatch.errors import UsageError

INSIDE = r"SGD.step\(\) was called inside the open window, by an optimizer that was not passed"
AFTER = r"SGD.step\(\) would do nothing"


def make() -> tuple[nn.Sequential, torch.optim.SGD, torch.optim.SGD]:
    """A model, and an optimizer for each of its halves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    body, head = (torch.optim.SGD(half.parameters(), lr=0.1) for half in (model[0], model[2]))
    return model, body, head


def parts() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, width, generator=draw, dtype=torch.float64) for width in (3, 1)) for n in (4, 2)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def accumulate(acc: Accumulator, model: nn.Module) -> None:
    for batch in acc.batches(parts()):
        acc.backward(loss_of(model, batch), items=len(batch[0]))
        acc.step()


def test_a_step_inside_the_window_is_an_error():
    model, body, head = make()
    before, acc = weights_of(model), Accumulator(model, body, steps=2)
    with pytest.raises(UsageError, match=INSIDE):
        for batch in acc.batches(parts()):
            acc.backward(loss_of(model, batch), items=len(batch[0]))
            head.step()
            acc.step()
    assert relative_error(weights_of(model), before) == 0
    acc.discard()
    accumulate(acc, model)
    assert acc.optimizer_step == 1


def test_a_step_after_the_window_that_would_do_nothing_is_an_error():
    model, body, head = make()
    acc = Accumulator(model, body, steps=2)
    accumulate(acc, model)
    with pytest.raises(UsageError, match=AFTER):
        head.step()
    train = MacroStep(model, body, lambda model, batch: loss_of(model, batch), micro=2)
    train(parts()[0])
    with pytest.raises(UsageError, match=AFTER):
        head.step()


def test_steps_inside_the_backward_are_an_error():
    """As by those who free each gradient at once, with an optimizer for each parameter."""
    model, body, _ = make()
    weight = model[2].weight
    own = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: own.step())
    with pytest.raises(UsageError, match="SGD"):
        accumulate(Accumulator(model, body, steps=2), model)


def test_both_handed_over_are_exact():
    model, body, head = make()
    whole, *optimizers = make()
    accumulate(Accumulator(model, [body, head], steps=2), model)
    loss_of(whole, tuple(map(torch.cat, zip(*parts(), strict=True)))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert relative_error(weights_of(model), weights_of(whole)) < 1e-14


def test_steps_with_gradients_of_their_own_pass_between_windows():
    """Two phases of training, or two accumulators in turns."""
    model, body, head = make()
    acc, other = Accumulator(model, body, steps=2), Accumulator(model, head, steps=2)
    for _ in range(2):
        accumulate(acc, model)
        accumulate(other, model)
        loss_of(model, parts()[0]).backward()
        head.step()
        model.zero_grad()
    assert acc.optimizer_step == other.optimizer_step == 2


def test_optimizers_of_other_models_are_left_alone():
    model, body, _ = make()
    other, *_, theirs = make()
    acc = Accumulator(model, body, steps=2)
    for batch in acc.batches(parts()):
        acc.backward(loss_of(model, batch), items=len(batch[0]))
        theirs.step()  # without gradients, too
        loss_of(other, batch).backward()
        theirs.step()
        acc.step()
    assert acc.optimizer_step == 1


def test_an_optimizer_that_was_not_used_in_any_window_is_left_alone():
    """Some step once before all, to please a scheduler."""
    model, body, head = make()
    acc = Accumulator(model, body, steps=2)
    head.step()
    accumulate(acc, model)


class Around(torch.optim.Optimizer):
    """Leaves the step to another one, as sharded and look-ahead optimizers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
        self.inner = inner

    def step(self, closure: None = None) -> None:
        self.inner.step(closure)


def test_an_optimizer_inside_one_that_was_handed_over_may_step_with_it_only():
    model, body, head = make()
    acc = Accumulator(model, [Around(body), head], steps=2)
    before = weights_of(model)
    accumulate(acc, model)
    assert relative_error(weights_of(model), before) > 0
    with pytest.raises(UsageError, match=INSIDE):
        for batch in acc.batches(parts()):
            acc.backward(loss_of(model, batch), items=len(batch[0]))
            body.step()


def test_an_accumulator_that_is_gone_leaves_others_alone():
    model, body, head = make()
    acc = Accumulator(model, body, steps=2)
    accumulate(acc, model)
    del acc
    gc.collect()
    head.step()


def test_watching_all_optimizers_keeps_none_from_folding():
    model, body, head = make()
    _acc = Accumulator(model, body)
    assert not has_hooks(body)
    assert not has_hooks(head)


def step_compiled():
    model, body, head = make()
    other, *_, theirs = make()
    acc, before = Accumulator(model, body, steps=2), weights_of(other)
    loss_of(other, parts()[0]).backward()
    accumulate(acc, model)
    torch.compile(theirs.step, backend="eager")()
    assert relative_error(weights_of(other), before) > 0
    with pytest.raises(UsageError, match=AFTER):
        torch.compile(head.step, backend="eager")()


def test_a_compiled_step_is_watched_too():
    """In a process of its own: what other tests have compiled before changes how torch sees gradients."""
    program = "from tests.unit.test_other_optimizers import step_compiled; step_compiled()"
    environ = environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{environment()['PYTHONPATH']}"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200, env=environ)
