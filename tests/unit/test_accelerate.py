"""`macrobatch.accelerate` in one process: the loops of Accelerate, and where ours is exact and theirs is not."""

import copy
import gc
import importlib
import pickle
import subprocess
import sys
import weakref

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import macrobatch.accelerate
from harness import programs, reference
from harness.programs import OURS, THEIRS, Program, line_fitted, regression, tokens_counted, whole_batches
from harness.reference import relative_error
from macrobatch import verify
from macrobatch.accelerate import Accelerator, GradientAccumulationPlugin
from macrobatch.errors import BatchError, UsageError


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """Every test finds the process as at its start."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # also where there is a GPU
    with programs.fresh():
        yield


# -------------------------------------------------------------------------------------------- the guides' own examples


def test_a_line_is_fitted_as_in_the_guide():
    assert [f"{weight:.5f}" for weight in line_fitted(OURS)] == ["2.04000", "2.04000"]


def test_tokens_are_counted_as_in_the_guide():
    found = tokens_counted(OURS, steps=1, batch_size=8)
    assert (found["items"], found["total"]) == (36, 36)
    assert figures(found["initial"]) == ["-0.0075", "0.5364"]
    assert figures(found["weight"]) == ["0.0953", "0.4337"]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_items_give_the_same_without_pre_loading(steps):
    assert figures(programs.items_handed_over(OURS, steps=steps, batch_size=8 // steps)) == ["0.0953", "0.4337"]


def figures(weight):
    return [f"{number:.4f}" for number in weight.tolist()]


# --------------------------------------------------------------------------------------- side by side with Accelerate

ALIKE = {
    "whole windows": Program(samples=24),
    "a short window, as theirs": Program(exact=False),
    "a short batch": Program(samples=21, exact=False),
    "dropped": Program(samples=21, drop_last=True),
    "shuffled": Program(shuffle=True, exact=False),
    "clipped": Program(samples=24, max_norm=0.3),
    "broken off": Program(breaks=3, samples=24, exact=False),
    "broken off, short": Program(breaks=3, exact=False, steps=4),
    "nested": Program(nested=True, exact=False),
    "unsized": Program(unsized=True, exact=False),
    "not with the loader": Program(samples=10, steps=3, sync_with_dataloader=False),
    "one cycle": Program(samples=24, one_cycle=24),
    "one cycle, too short": Program(samples=24, one_cycle=7),
    "one cycle, far too short": Program(samples=24, one_cycle=3, steps=1),
    "no accumulation": Program(steps=1, samples=8),
}


@pytest.mark.parametrize("program", ALIKE.values(), ids=ALIKE)
def test_every_step_is_that_of_accelerate(program):
    same_trace(program.run(OURS), program.run(THEIRS))


def same_trace(own, other):
    assert own.closed == other.closed
    assert own.samples == other.samples
    assert own.losses == other.losses
    assert own.rates == other.rates
    assert own.norms == other.norms
    assert all(map(torch.equal, own.weights, other.weights))
    assert len(own.weights) == len(other.weights) > 0


# ------------------------------------------------------------------------------------------------ better than theirs


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("unsized", [False, True])
def test_short_windows_are_exact(steps, unsized):
    program = Program(steps=steps, unsized=unsized)
    trace = program.run(OURS)
    windows = [weights for weights, closed in zip(trace.weights, trace.closed, strict=True) if closed]
    expected = whole_batches(program)
    assert len(windows) == len(expected)
    for found, whole in zip(windows, expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def test_their_short_windows_are_not():
    program = Program(steps=4)
    assert (program.run(THEIRS).weights[-1] - whole_batches(program)[-1]).abs().max() > 1e-3


def token_loop(accelerator, own, micro_batches, items):
    """Windows of tokens: the gradients handed to the optimizer."""
    model, optimizer, scheduler = accelerator.prepare(own.model, own.optimizers[0], own.schedulers[0])
    gradients = []
    own.optimizers[0].register_step_pre_hook(lambda *_: gradients.append(reference.gradients_of(own.model)))
    loader = accelerator.prepare(DataLoader(micro_batches, batch_size=None))
    for turn, micro in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(items.loss(model, micro, turn), items=items.given(micro, turn))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("items", ["int", "tensor", "mixed"])
@pytest.mark.parametrize("make", reference.MODELS)
def test_items_give_the_gradient_of_the_big_batch(make, items):
    micro_batches = reference.batches([2, 1, 3, 1, 2, 2, 4])
    own, whole = reference.trainee(make), reference.trainee(make)
    found = token_loop(Accelerator(gradient_accumulation_steps=3), own, micro_batches, reference.Counting(items))
    windows = reference.cut(micro_batches, steps=3)
    assert len(found) == len(windows) == 3
    for gradients, step in zip(found, reference.train_whole(whole, windows), strict=True):
        assert relative_error(gradients, step.gradients) <= 1e-12


def test_a_micro_batch_without_items_counts_for_nothing():
    micro_batches = [reference.batch(2, seed=1), reference.batch(2, seed=2, items=0), reference.batch(1, seed=3)]
    own, whole = reference.trainee(), reference.trainee()
    (found,) = token_loop(Accelerator(gradient_accumulation_steps=3), own, micro_batches, reference.BY_COUNT)
    assert relative_error(found, reference.whole_batch_gradient(whole.model, micro_batches)) <= 1e-12


@pytest.mark.parametrize("items", ["int", "tensor"])
def test_a_window_without_items_takes_no_step(items):
    empty = [reference.batch(2, seed=seed, items=0) for seed in (1, 2)]
    own = reference.trainee(how="foreach")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    before = reference.weights_of(own.model)
    assert token_loop(accelerator, own, empty, reference.Counting(items)) == []
    assert relative_error(reference.weights_of(own.model), before) == 0
    assert accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("skipped", [1, 3])
def test_a_micro_batch_without_a_backward_changes_no_clipping(skipped):
    """Also the last of a window, where the program itself says that it is complete."""
    accelerator, data = Accelerator(gradient_accumulation_steps=4), regression(8)
    model = nn.Linear(programs.WIDTH, 1, dtype=torch.float64)
    whole = copy.deepcopy(model)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(data, 2)
    )
    for index, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            if index != skipped:
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    parts = (enumerate(tensor.split(2)) for tensor in data.tensors)
    x, y = (torch.cat([rows for index, rows in part if index != skipped]) for part in parts)
    F.mse_loss(whole(x), y).backward()
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item(), rel=1e-12)
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    assert relative_error(reference.weights_of(model), reference.weights_of(whole)) <= 1e-12


def test_a_window_with_items_needs_its_last_backward():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(programs.WIDTH, 1, dtype=torch.float64)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(regression(4), 2)
    )
    batches = iter(loader)
    with accelerator.accumulate(model):
        accelerator.backward(model(next(batches)[0]).mean(), items=2)
    next(batches)
    with accelerator.accumulate(model), pytest.raises(UsageError, match=r"its backward too: backward\(loss, items=0\)"):
        optimizer.step()


def test_what_is_stepped_together_is_scaled_together():
    """A second model that `accumulate` was not told of, but whose parameters the optimizer has too."""
    first, second, whole = nn.Linear(2, 2).double(), nn.Linear(2, 1).double(), None
    whole = copy.deepcopy(nn.Sequential(first, second))
    accelerator = Accelerator(gradient_accumulation_steps=5)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    x = torch.randn(3, 1, 2, dtype=torch.float64)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, DataLoader(x, batch_size=None))
    for micro in loader:
        with accelerator.accumulate(first):
            accelerator.backward(second(first(micro)).square().mean())
    whole(x).square().mean().backward()
    for own, expected in zip(nn.Sequential(first, second).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=1e-12)


def test_two_models_have_two_windows():
    """Each with its own optimizer and its own `accumulate`, which the counter counts: neither scales the other's."""
    draw = torch.randn(3, 2, 1, dtype=torch.float64)
    models = [nn.Linear(1, 1, bias=False).double() for _ in range(2)]
    starts = [model.weight.detach().clone() for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    accelerator = Accelerator(gradient_accumulation_steps=4)
    left, right, *optimizers, loader = accelerator.prepare(*models, *optimizers, DataLoader(draw, batch_size=None))
    for x in loader:
        for model, optimizer in zip((left, right), optimizers, strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
    means = draw.mean((1, 2))
    found = [start - model.weight for start, model in zip(starts, models, strict=True)]
    # The fourth micro-batch, right's second, closes right's window; then the loader ends, and all windows with it.
    torch.testing.assert_close(found[0].item(), means.mean().item(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1].item(), (means[:2].mean() + means[2]).item(), rtol=0, atol=1e-12)


def test_steps_changed_inside_a_window():
    model = nn.Linear(1, 1, bias=False).double()
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    closed = []
    for number in range(1, 4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), float(number), dtype=torch.float64)).sum())
            closed.append(accelerator.sync_gradients)
        accelerator.gradient_accumulation_steps = 3
    assert closed == [False, False, True]
    torch.testing.assert_close(model.weight.grad.item(), 2.0, rtol=0, atol=1e-12)
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 3


# ------------------------------------------------------------------------------- however programs call accumulate()

ARGUMENTS = {
    "itself": lambda model: (model,),
    "a list": lambda model: ([model],),
    "a generator": lambda model: ((one for one in [model]),),
    "a dict": lambda model: ({"unet": model},),
    "its layers": lambda model: tuple(model.children()),
    "its parameters": lambda model: (list(model.parameters()),),
    "a new wrapper": lambda model: (nn.Sequential(model),),
    "nothing": lambda model: (),
    "another model": lambda model: (nn.Linear(1, 1),),
}


@pytest.mark.parametrize("given", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("optimizers", [0, 1, 2])
def test_short_windows_are_exact_whatever_is_handed_over(given, optimizers):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    prepared = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model[:optimizers]]
    model, loader, *prepared = accelerator.prepare(
        model, DataLoader(data := draws(7, 1, 2), batch_size=None), *prepared
    )
    found = []
    for x in loader:
        with accelerator.accumulate(*given(model)):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                found.append(reference.gradients_of(model))
                model.zero_grad()
    for gradients, window in zip(found, (data[:4], data[4:]), strict=True):
        model(window).square().mean().backward()
        assert relative_error(gradients, reference.gradients_of(model)) <= 1e-12
        model.zero_grad()


def draws(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("given", ["itself", "a list", "a generator", "its layers", "a new wrapper", "nothing"])
def test_items_are_counted_whatever_is_handed_over(given):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    data = [draws(size, 2) for size in (1, 3, 2, 5, 1, 4)]
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=None))
    found = []
    for x in loader:
        with accelerator.accumulate(*ARGUMENTS[given](model)):
            accelerator.backward(model(x).square().mean(), items=len(x))
            if accelerator.sync_gradients:
                found.append(reference.gradients_of(model))
    for gradients, window in zip(found, (data[:4], data[4:]), strict=True):
        model.zero_grad()
        model(torch.cat(window)).square().mean().backward()
        assert relative_error(gradients, reference.gradients_of(model)) <= 1e-12


def test_nothing_is_kept_of_what_was_handed_over():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    wrappers = []
    for _ in range(4):
        wrapper = nn.Sequential(model)
        wrappers.append(weakref.ref(wrapper))
        with accelerator.accumulate(wrapper):
            accelerator.backward(wrapper(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    del wrapper
    gc.collect()
    assert sum(wrapper() is not None for wrapper in wrappers) == 0


def test_free_memory_frees():
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer, items=1)
    kept = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("parts", [1, 2])
def test_several_backwards_in_one_micro_batch(parts):
    """They are one micro-batch; also where they train two optimizers."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).double()
    held = [model.parameters()] if parts == 1 else [part.parameters() for part in model]
    optimizers = [torch.optim.SGD(parameters, lr=0.0) for parameters in held]
    model, loader, *_ = accelerator.prepare(model, DataLoader(data := draws(6, 1, 2), batch_size=None), *optimizers)
    for x in loader:
        with accelerator.accumulate(model):
            for part in model:
                accelerator.backward(part(x).square().mean())
                accelerator.backward(part(x).mean())
            if accelerator.sync_gradients:
                found = reference.gradients_of(model)
                model.zero_grad()
    sum(part(data[4:]).square().mean() + part(data[4:]).mean() for part in model).backward()
    assert relative_error(found, reference.gradients_of(model)) <= 1e-12


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_gradients_cleared_before_the_backward(steps, counts, set_to_none):
    """Eleven public programs do that; Accelerate then drops all micro-batches but the last."""
    model = nn.Linear(2, 1).double()
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    whole, data = copy.deepcopy(model), draws(7, 2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=None))
    items = {"items": 2} if counts else {}
    for micro in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad(set_to_none)
            accelerator.backward(model(micro).square().mean(), **items)
            optimizer.step()
    for begin in range(0, 7, steps):
        whole.zero_grad()
        whole(data[begin : begin + steps]).square().mean().backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.1 * parameter.grad
    assert relative_error(reference.weights_of(model), reference.weights_of(whole)) <= 1e-12


def test_gradients_cleared_instead_of_a_backward():
    """A program that drops a window, e.g. because its loss is not finite."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with accelerator.accumulate(model):
        optimizer.zero_grad()
    assert model.weight.grad is None
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_losses_that_are_back_propagated_without_the_accelerator():
    """Their gradients are the program's own: nothing divides, or clears them."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            model(torch.ones(1, 2)).sum().backward()
            before = model.weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    assert before.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("prepares", ["the loader", "nothing more after free_memory()"])
def test_whole_windows_of_what_was_not_prepared(prepares):
    """Windows come one after the other, also where no prepared optimizer says when one is over."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if prepares != "the loader":
        accelerator.prepare(model, optimizer)
        accelerator.free_memory()
    data = draws(5, 1, 2)
    found = []
    for x in accelerator.prepare(DataLoader(data, batch_size=None)):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                found.append(reference.gradients_of(model))
                optimizer.zero_grad()
    for gradients, window in zip(found, (data[:2], data[2:4], data[4:]), strict=True):
        model.zero_grad()
        model(window).square().mean().backward()
        assert relative_error(gradients, reference.gradients_of(model)) <= 1e-12


def test_optimizers_that_share_parameters():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Linear(2, 1).double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2)]
    model, *_ = accelerator.prepare(model, *optimizers)
    data = draws(2, 1, 2)
    for x in accelerator.prepare(DataLoader(data, batch_size=None)):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
    found = reference.gradients_of(model)
    model.zero_grad()
    model(data).square().mean().backward()
    assert relative_error(found, reference.gradients_of(model)) <= 1e-12


def test_a_step_that_the_program_forces():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer = trained(accelerator)
    before = model.weight.detach().clone()
    for turn in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), 1.0 + turn)).sum())
            accelerator.sync_gradients = turn == 1
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), 0.15))  # 0.1 times the mean of 1 and 2
    assert model.weight.grad is None
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum(), items=1)
        accelerator.sync_gradients = True
        with pytest.raises(UsageError, match="undivided sums"):
            optimizer.step()


@pytest.mark.parametrize("counts", [False, True])
def test_gradients_cleared_after_a_micro_batch_that_failed(counts):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    items = {"items": 1} if counts else {}
    micro_step(accelerator, model, optimizer, **items)
    with pytest.raises(ValueError, match="bad batch"), accelerator.accumulate(model):
        raise ValueError("bad batch")
    optimizer.zero_grad()
    assert model.weight.grad is None
    for size in (1.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), size)).sum(), **items)
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_gradients_cleared_of_one_model_leave_those_of_another():
    """Two windows that count items are open, and the program drops one."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    pairs = [trained(accelerator) for _ in range(2)]
    for model, _ in pairs:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum(), items=1)
    (first, first_optimizer), (second, _) = pairs
    accelerator.sync_gradients = True
    first_optimizer.zero_grad()
    for size in (2.0, 3.0):  # the second of them, the fourth of all, closes
        with accelerator.accumulate(second):
            accelerator.backward(second(torch.full((1, 2), size)).sum(), items=1)
    assert first.weight.grad is None
    assert second.weight.grad.tolist() == [[2.0, 2.0]]


def test_a_backward_that_fails_half_way_without_items():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with pytest.raises(RuntimeError, match="no gradient"), accelerator.accumulate(model):
        accelerator.backward(Failing.apply(model(torch.ones(1, 2))).sum() + model(torch.ones(1, 2)).sum())
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), 3.0)).sum())
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


def test_a_window_that_was_not_stepped_is_not_scaled_again():
    """The program lets gradients of a complete window stand, and adds a short one, as Accelerate does."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, _, loader = trained(accelerator, DataLoader(torch.ones(3, 1, 2), batch_size=None))
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
    assert model.weight.grad.tolist() == [[1.5, 1.5]]


def test_an_optimizer_prepared_by_another_accelerator():
    first, second = Accelerator(gradient_accumulation_steps=2), Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(first)
    model, optimizer = second.prepare(model, optimizer)
    for size in (1.0, 3.0):
        with second.accumulate(model):
            optimizer.zero_grad()
            second.backward(model(torch.full((1, 2), size)).sum())
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_what_accumulate_returned_entered_twice():
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    micro_batch = accelerator.accumulate(model)
    with micro_batch:
        accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(UsageError, match="entered twice"), micro_batch:
        pass


def test_accelerators_are_pickled():
    assert type(pickle.loads(pickle.dumps(Accelerator()))) is Accelerator


def test_clipping_in_every_micro_batch_clips_the_whole():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, _ = trained(accelerator)
    norms = []
    for size in (4.0, -3.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[size, 0.0]])).sum() - size * model.bias.sum())
            norms.append(accelerator.clip_grad_norm_([model.weight], 1.0).item())
            accelerator.clip_grad_value_([model.weight], 1.0)
    assert norms == [2.0, 0.5]
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.5, 0.0]]))


@pytest.mark.parametrize("how", ["argument", "plugin", "environment", "their plugin"])
def test_short_windows_as_theirs(how, monkeypatch):
    options = {"gradient_accumulation_steps": 4}
    if how == "argument":
        options["exact_remainder"] = False
    elif how == "plugin":
        options = {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4, exact_remainder=False)}
    elif how == "environment":
        monkeypatch.setenv("MACROBATCH_EXACT_REMAINDER", "0")
    else:
        options = {"gradient_accumulation_plugin": accelerate.utils.GradientAccumulationPlugin(num_steps=4)}
    accelerator = Accelerator(**options)
    model, _, loader = trained(accelerator, DataLoader(torch.ones(2, 1, 2), batch_size=None))
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
    assert model.weight.grad.tolist() == ([[1.0, 1.0]] if how == "their plugin" else [[0.5, 0.5]])


@pytest.mark.parametrize("make", [Accelerator, lambda: half()])
def test_prepared_optimizers_are_pickled_and_copied(make):
    accelerator = make()
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert other.state_dict() == optimizer.state_dict()
        assert type(other.scaler) is type(accelerator.scaler)
        other.zero_grad()
        if other.scaler is None:
            other.step()


def test_verify_finds_the_loop_exact():
    model = reference.trainee().model

    def loop(model, batch):
        programs.start_anew()
        accelerator = Accelerator(gradient_accumulation_steps=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader([(x[None], y[None]) for x, y in zip(*batch, strict=True)], batch_size=None)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                items = (y != reference.IGNORED).sum()
                accelerator.backward(reference.mean_loss(model, reference.Batch(x, y)), items=items)
                optimizer.step()
                optimizer.zero_grad()

    batch = reference.batch(4, seed=1)
    report = verify(
        model,
        lambda model, b: (reference.mean_loss(model, reference.Batch(*b)), (b[1] != reference.IGNORED).sum()),
        (batch.x, batch.y),
        step=loop,
    )
    assert report.ok, str(report)


# ------------------------------------------------------------------------------------------ everything else is theirs


def test_every_name_is_theirs():
    assert issubclass(Accelerator, accelerate.Accelerator)
    for name in (name for name in dir(accelerate) if not name.startswith("_")):
        if name not in ("Accelerator", "accelerator", "utils"):
            assert getattr(macrobatch.accelerate, name) is getattr(accelerate, name), name
    assert macrobatch.accelerate.__version__ == accelerate.__version__
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from macrobatch.accelerate import nonsense  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        macrobatch.accelerate.utils.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "module", ["state", "logging", "tracking", "utils.dataclasses", "local_sgd", "commands.launch", "optimizer"]
)
def test_every_sub_module_is_theirs(module):
    own = importlib.import_module(f"macrobatch.accelerate.{module}")
    assert own is sys.modules[f"accelerate.{module}"]
    assert own.__spec__.name == f"accelerate.{module}"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"macrobatch.accelerate.{module}.nonsense")


def test_without_accelerate_it_says_what_to_install():
    program = "import sys; sys.modules['accelerate'] = None\nimport macrobatch\nimport macrobatch.accelerate"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "pip install 'macrobatch[accelerate]'" in ended.stderr


# ---------------------------------------------------------------------------------------------------- how it behaves


def trained(accelerator, *objects):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator.prepare(model, optimizer, *objects)


def micro_step(accelerator, model, optimizer, x=None, **options):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2) if x is None else x).sum(), **options)
        optimizer.step()
        optimizer.zero_grad()


def test_outside_of_accumulate_losses_are_divided_all_the_same():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, _ = trained(accelerator)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[0.25, 0.25]]
    assert accelerator.sync_gradients


def test_backward_takes_the_options_of_torch():
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    loss = model(torch.ones(1, 2)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss, inputs=[model.weight])
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    assert model.bias.grad.tolist() == [1.0]


def test_gradients_in_a_window_are_those_of_accelerate():
    def gradients(library):
        with programs.fresh():
            accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=3)
            model = accelerator.prepare(programs.network())
            seen = []
            for x, y in DataLoader(regression(4)):
                with accelerator.accumulate(model):
                    accelerator.backward(F.mse_loss(model(x), y))
                    seen.append(model[0].weight.grad.clone())
            return seen

    assert all(map(torch.equal, gradients(OURS), gradients(THEIRS)))


def test_a_loader_broken_off_leaves_its_micro_batches_to_the_next():
    program = Program(samples=8, breaks=1, steps=2)
    assert program.run(OURS).closed == [False, True, False, True, True]


def test_bf16_is_that_of_accelerate():
    def run(library):
        with programs.fresh():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = accelerator.prepare(
                model, optimizer, DataLoader(torch.randn(8, 3), batch_size=2)
            )
            for x in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            return list(model.parameters())

    assert all(map(torch.equal, run(OURS), run(THEIRS)))


def half(scaler=None, **options):
    """With a scaler, which Accelerate does not have on a CPU; losses pass through float16."""
    accelerator = Accelerator(cpu=True, **options)
    accelerator.scaler = scaler or torch.amp.GradScaler("cpu")
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("counts", [False, True])
def test_an_overflow_skips_step_and_schedule_and_halves_the_scale(how, counts):
    accelerator = half(gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **{how: True})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    weights, skipped = [model.weight.detach().clone()], []
    for size in (1.0, 1.0, 1.0, 1e30, 1.0, 1.0):
        with accelerator.accumulate(model):
            loss = model(torch.full((1, 2), 0.5)).sum() * size
            accelerator.backward(loss, **({"items": 3} if counts else {}))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            weights.append(model.weight.detach().clone())
            skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, True, False]
    assert torch.equal(weights[1], weights[2])
    torch.testing.assert_close(weights[0] - weights[1], torch.full((1, 2), 0.05), rtol=1e-3, atol=0)
    torch.testing.assert_close(weights[2] - weights[3], torch.full((1, 2), 0.025), rtol=1e-3, atol=0)
    assert scheduler.get_last_lr() == [0.1 * 0.25]
    assert accelerator.scaler.get_scale() == 32768


def test_two_optimizers_share_one_scale():
    """Theirs moves the scale between the two steps, so that the second is unscaled by another."""
    accelerator = half(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1))
    models = [nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    before = [model.weight.detach().clone() for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    with accelerator.accumulate(*models):
        accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
        first.step()
        second.step()
    for model, start in zip(models, before, strict=True):
        torch.testing.assert_close(start - model.weight, torch.ones(1, 2), rtol=1e-3, atol=0)
    assert accelerator.scaler.get_scale() == 8.0


def test_items_under_a_scaler_overflow_no_sooner_than_means():
    """4096 items at a scale of 65536 are beyond float16, unless they are shrunk."""
    accelerator = half(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(4096, 2) / 1024).mean(), items=4096)
            optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 1 / 1024), rtol=1e-2, atol=0)


def test_items_under_a_scaler_underflow_no_sooner_than_means():
    """A gradient of 1e-9 is zero in float16, unless it is scaled up: in every micro-batch of the window."""
    accelerator = half(gradient_accumulation_steps=2)
    model, _ = trained(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum() * 1e-9, items=1)
    accelerator.unscale_gradients()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 1e-9), rtol=1e-2, atol=0)


def test_saving_inside_a_window_warns(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with pytest.warns(UserWarning, match="gradients of its 1 micro-batches are not saved"):
        accelerator.save_state(tmp_path / "inside")
    micro_step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "between")
    micro_step(accelerator, model, optimizer)
    accelerator.load_state(tmp_path / "between")
    assert model.weight.grad is None, "gradients of the run before would be added to"
    micro_step(accelerator, model, optimizer)
    assert model.weight.grad.tolist() == [[0.5, 0.5]]


# ------------------------------------------------------------------------------------------------- what is an error


def test_items_at_the_wrong_moment():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    with pytest.raises(UsageError, match="outside of accumulate"):
        accelerator.backward(model(torch.ones(1, 2)).sum(), items=2)
    micro_step(accelerator, model, optimizer, items=2)
    with pytest.raises(UsageError, match="undivided sums"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(BatchError, match="earlier in this one they were given"):
        micro_step(accelerator, model, optimizer)


def test_a_second_backward_with_items():
    accelerator = Accelerator()
    model, _ = trained(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum(), items=1)
        with pytest.raises(UsageError, match="a second backward"):
            accelerator.backward(model(torch.ones(1, 2)).sum(), items=1)


@pytest.mark.parametrize("items", [-1, float("nan"), "3", torch.ones(2)])
def test_bad_items(items):
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    with pytest.raises(BatchError, match="items must be"):
        micro_step(accelerator, model, optimizer, items=items)


def test_bad_items_on_the_device():
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    with pytest.raises(BatchError, match="negative or not finite"):
        micro_step(accelerator, model, optimizer, items=torch.tensor(-2))


@pytest.mark.parametrize("loss", [1.0, torch.ones(()), torch.ones(2, requires_grad=True)])
def test_bad_losses(loss):
    with pytest.raises(BatchError, match="the loss"):
        Accelerator().backward(loss)


def test_clipping_inside_a_window_under_a_scaler():
    accelerator = half(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with pytest.raises(UsageError, match="would unscale gradients"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_items_with_other_options():
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    with pytest.raises(UsageError, match="takes no other options: got retain_graph"):
        micro_step(accelerator, model, optimizer, items=1, retain_graph=True)


def test_items_for_a_model_that_was_not_given():
    accelerator = Accelerator()
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    first, second, _ = accelerator.prepare(*models, optimizer)
    with pytest.raises(UsageError, match="Hand that model to accumulate"), accelerator.accumulate(first):
        accelerator.backward(second(first(torch.ones(1, 2))).sum(), items=1)
    with accelerator.accumulate(first, second):
        accelerator.backward(second(first(torch.ones(1, 2))).sum(), items=1)


def test_other_models_in_the_same_window():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(nn.Linear(2, 1), nn.Linear(2, 1))
    with accelerator.accumulate(first, second):
        accelerator.backward((first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum(), items=1)
    with pytest.raises(UsageError, match="the same models"), accelerator.accumulate(first):
        accelerator.backward(first(torch.ones(1, 2)).sum(), items=1)


def test_items_for_a_tensor():
    accelerator = Accelerator()
    weight = torch.zeros(1, requires_grad=True)
    with pytest.raises(UsageError, match=r"parameter of an nn\.Module"), accelerator.accumulate(weight):
        accelerator.backward(weight.sum(), items=1)


def test_a_backward_that_fails_half_way_drops_its_window():
    """What the next ones accumulate is exact again."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer, items=1)
    with pytest.raises(RuntimeError, match="no gradient"), accelerator.accumulate(model):
        accelerator.backward(Failing.apply(model(torch.ones(1, 2))).sum(), items=1)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), 3.0)).sum(), items=1)
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no gradient")


def test_a_step_of_the_optimizer_that_was_prepared_inside_a_window():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    plain = nn.Linear(3, 1)
    raw = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(plain, raw, DataLoader(torch.randn(12, 3), batch_size=4))
    before = plain.weight.clone()
    with pytest.raises(UsageError, match=r"inside the open window.*that prepare\(\) returned"):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean(), items=len(x))
                raw.step()
    assert torch.equal(plain.weight, before)
    optimizer.zero_grad()
