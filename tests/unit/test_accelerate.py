"""`macrobatch.accelerate` in one process: the loops of Accelerate, and where ours is exact and theirs is not."""

import copy
import json
import logging
import pickle
import pickletools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import macrobatch.accelerate
from harness import programs, reference
from harness.programs import OURS, Program, line_fitted, regression, tokens_counted, whole_batches
from harness.reference import relative_error
from macrobatch import MacrobatchError
from macrobatch.accelerate import (
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
    checkpoints,
    get_logger,
    set_seed,
    sharding,
)
from macrobatch.errors import BackendError, BatchError, UsageError


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """Every test finds the process as at its start."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # also where there is a GPU
    programs.start_anew(OURS)
    yield
    programs.start_anew(OURS)


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("accelerate")
    return programs.theirs()


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
def test_every_step_is_that_of_accelerate(theirs, program):
    same_trace(program.run(OURS), program.run(theirs))


def same_trace(own, other):
    assert own.closed == other.closed
    assert own.samples == other.samples
    assert own.losses == other.losses
    assert own.rates == other.rates
    assert own.norms == other.norms
    assert all(map(torch.equal, own.weights, other.weights))
    assert len(own.weights) == len(other.weights) > 0


@pytest.mark.parametrize("adjust", [False, True])
def test_adjusted_schedulers_count_every_micro_batch(adjust):
    plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=adjust)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer = trained(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.scheduler._step_count == 1 + (6 if adjust else 2)
    assert scheduler.get_last_lr() == [0.1 * 0.25]


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


def test_their_short_windows_are_not(theirs):
    program = Program(steps=4)
    assert (program.run(theirs).weights[-1] - whole_batches(program)[-1]).abs().max() > 1e-3


def token_loop(accelerator, own, micro_batches, items):
    """Windows of tokens: the gradients handed to the optimizer."""
    model, optimizer, scheduler = accelerator.prepare(own.model, own.optimizers[0], own.schedulers[0])
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(reference.gradients_of(own.model)))
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


def test_gradients_in_a_window_are_those_of_accelerate(theirs):
    def gradients(library):
        with programs.fresh(library):
            accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=3)
            model = accelerator.prepare(programs.network())
            seen = []
            for x, y in DataLoader(regression(4)):
                with accelerator.accumulate(model):
                    accelerator.backward(F.mse_loss(model(x), y))
                    seen.append(model[0].weight.grad.clone())
            return seen

    assert all(map(torch.equal, gradients(OURS), gradients(theirs)))


def test_anything_else_is_returned_as_it_is():
    accelerator = Accelerator()
    tensor, text = torch.ones(2), "text"
    assert accelerator.prepare(tensor) is tensor
    assert accelerator.prepare(tensor, text) == (tensor, text)


def test_prepared_objects_are_what_they_were():
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = (
        bare := nn.Linear(2, 1),
        torch.optim.SGD(bare.parameters(), lr=0.5),
        DataLoader(torch.ones(3, 2), batch_size=2),
        None,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler, loader, model, optimizer = accelerator.prepare(scheduler, loader, model, optimizer)
    assert model is bare
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 2
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scheduler.optimizers == [optimizer]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # takes it for an optimizer
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare(optimizer) is optimizer
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model


def test_nested_loaders_and_loaders_broken_off():
    accelerator = Accelerator()
    outer, inner = accelerator.prepare(DataLoader(range(3)), DataLoader(range(2)))
    state, seen = accelerator.gradient_state, []
    assert not state.in_dataloader
    for _ in outer:
        seen += [(state.active_dataloader is inner, state.end_of_dataloader) for _ in inner]
        seen.append((state.active_dataloader is outer, state.end_of_dataloader))
    assert seen == [(True, False), (True, True), (True, False)] * 2 + [(True, False), (True, True), (True, True)]
    assert state.active_dataloader is None
    for _ in outer:
        kept = iter(inner)  # what a progress bar keeps alive
        next(kept)
        next(kept)
        break
    assert state.active_dataloader is inner
    assert state.end_of_dataloader
    for index, _ in enumerate(inner):
        assert state.end_of_dataloader == (index == 1)
        kept.close()  # the old iteration ends after the new one has begun
        assert state.active_dataloader is inner
    assert state.active_dataloader is None
    assert state.remainder == -1
    kept = iter(inner)
    next(kept)  # never ends
    assert len(list(inner)) == 2
    assert state.active_dataloader is None


def test_a_loader_broken_off_leaves_its_micro_batches_to_the_next():
    program = Program(samples=8, breaks=1, steps=2)
    assert program.run(OURS).closed == [False, True, False, True, True]


def test_the_state_of_the_process():
    accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="bf16")
    assert GradientState() is accelerator.gradient_state
    assert GradientState().plugin_kwargs["num_steps"] == 3
    assert AcceleratorState() is accelerator.state
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert accelerator.device.type in ("cpu", "cuda")
    assert accelerator.state.mixed_precision == accelerator.mixed_precision == "bf16"
    accelerator.sync_gradients = False
    assert not accelerator.gradient_state.sync_gradients
    GradientState._reset_state()
    assert GradientState().sync_gradients
    assert GradientState().num_steps == 1
    accelerator.wait_for_everyone()
    accelerator.end_training()


def test_a_window_left_open_does_not_stop_the_next_accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    micro_step(accelerator, *trained(accelerator))
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_the_environment_overrides_the_argument_but_not_the_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 5
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3


def test_gathering_in_one_process():
    accelerator = Accelerator()
    values = {"a": [torch.ones(2)]}
    assert accelerator.gather(values) is values
    loader, seen = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2)), []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        seen += accelerator.gather_for_metrics([f"s{n}" for n in batch])
    assert seen == [0, 1, "s0", "s1", 2, 3, "s2", "s3", 4, "s4"]


def test_loggers_seeds_and_prints(caplog, capsys):
    logger = get_logger("facade", log_level="INFO")
    with caplog.at_level(logging.INFO):
        logger.info("for one")
        logger.warning("for all %d", 2, main_process_only=False)
        logger.warning("one by one", in_order=True)
        logger.debug("not at all")
    assert [record.getMessage() for record in caplog.records] == ["for one", "for all 2", "one by one"]
    assert {record.funcName for record in caplog.records} == {"test_loggers_seeds_and_prints"}

    def drawn():
        set_seed(3)
        return random.random(), torch.rand(1).item()

    assert drawn() == drawn()
    Accelerator().print("one", "two", sep="-")
    assert capsys.readouterr().out == "one-two\n"


def test_skip_first_batches():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))
    rest = accelerator.skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in rest] == [[4, 5], [6]]
    assert len(rest) == 2
    assert rest.remainder == 1
    stream = accelerator.prepare(DataLoader(programs.Stream(3)))
    assert len(list(accelerator.skip_first_batches(stream, 2))) == 1


def test_samplers_and_datasets_are_told_the_epoch():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4))
    loader = accelerator.prepare(DataLoader(torch.arange(9), shuffle=True))
    epochs = [[int(n) for n in loader] for _ in range(2)]
    loader.set_epoch(0)
    assert [int(n) for n in loader] == epochs[0] != epochs[1]


# ------------------------------------------------------------------------------------------------- sharing out, purely

SIZES = [(n, size, world) for n in (0, 1, 2, 3, 5, 8, 9, 12, 17) for size in (2, 4) for world in (2, 4)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_batches_are_shared_out_as_by_accelerate(theirs, split, even, drop_last):
    from accelerate.data_loader import BatchSamplerShard

    compared = 0
    for n, size, world in SIZES:
        for rank in range(world):
            sampler = torch.utils.data.BatchSampler(range(n), size, drop_last)
            share = sharding.Share(rank=rank, world=world, split=split, even=even)
            if split and size % world:
                with pytest.raises(UsageError, match="multiple"):
                    sharding.BatchSamplerShard(sampler, share)
                continue
            own, other = (
                sharding.BatchSamplerShard(sampler, share),
                BatchSamplerShard(sampler, world, rank, split, even),
            )
            assert list(own) == list(other), (n, size, world, rank)
            assert len(own) == len(list(own)), (n, size, world, rank)
            compared += len(list(own))
    assert compared > 50


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_batches_of_any_size_are_shared_out_as_by_accelerate(theirs, even, drop_last):
    from accelerate.data_loader import BatchSamplerShard

    class Sampler(list):
        """Batches of different sizes; it has no batch_size."""

    for n in range(8):
        for rank in range(3):
            sampler = Sampler([list(range(k, 2 * k + 1)) for k in range(n)])
            sampler.drop_last = drop_last
            own = sharding.BatchSamplerShard(sampler, sharding.Share(rank=rank, world=3, even=even))
            assert list(own) == list(BatchSamplerShard(sampler, 3, rank, even_batches=even)), (n, rank)
            assert len(own) == len(list(own))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_streams_are_shared_out_as_by_accelerate(theirs, split, drop_last):
    from accelerate.data_loader import IterableDatasetShard

    class Sized(list):
        pass

    for n, size, world in SIZES:
        if split and size % world:
            continue
        for rank in range(world):
            share = sharding.Share(rank=rank, world=world, split=split)
            own = sharding.IterableDatasetShard(Sized(range(n)), size, share, drop_last=drop_last)
            other = IterableDatasetShard(range(n), size, drop_last, world, rank, split)
            assert list(own) == list(other), (n, size, world, rank)
            assert len(own) == len(list(own))


# --------------------------------------------------------------------------------------------------- mixed precision


class Seen(nn.Module):
    """Notes in which dtype it computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        out = self.layer(x)
        self.dtype = out.dtype
        return {"out": out}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_models_compute_in_mixed_precision_and_hand_out_float32(precision, dtype):
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = accelerator.prepare(Seen())
    assert model(torch.ones(1, 2))["out"].dtype == torch.float32
    assert model.dtype == dtype
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layer.weight.zero_()
    assert model(torch.ones(1, 2))["out"] != twin(torch.ones(1, 2))["out"]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare(torch.ones(1, 2))["out"].dtype == torch.float32
    assert bare.dtype == torch.float32


def test_bf16_is_that_of_accelerate(theirs):
    def run(library):
        with programs.fresh(library):
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

    assert all(map(torch.equal, run(OURS), run(theirs)))


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("counts", [False, True])
def test_an_overflow_skips_step_and_schedule_and_halves_the_scale(how, counts):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=2)
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
                accelerator.clip_grad_norm_(model.parameters(), 100.0)  # unscales no second time
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
    handlers = [GradScalerKwargs(init_scale=4.0, growth_interval=1)]
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=handlers)
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
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(4096, 2) / 1024).mean(), items=4096)
            optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 1 / 1024), rtol=1e-2, atol=0)


def test_items_under_a_scaler_underflow_no_sooner_than_means():
    """A gradient of 1e-9 is zero in float16, unless it is scaled up: in every micro-batch of the window."""
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=2)
    model, _ = trained(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum() * 1e-9, items=1)
    accelerator.unscale_gradients()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 1e-9), rtol=1e-2, atol=0)


# ------------------------------------------------------------------------------------------------------- going on later


def a_run(accelerator, directory=None, *, resumed=False):
    """Two epochs with dropout and shuffling, saved after the first; or only the second, from what was saved."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 7])
    data = DataLoader(regression(12), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    if resumed:
        accelerator.load_state(directory)
    losses = []
    for epoch in range(int(resumed), 2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0 and directory is not None and not resumed:
            assert accelerator.save_state(directory) == str(directory)
    return losses, scheduler.get_last_lr()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_run_goes_on_where_it_was_saved(tmp_path, precision):
    set_seed(1)
    whole, rate = a_run(Accelerator(gradient_accumulation_steps=4, mixed_precision=precision, cpu=True), tmp_path)
    programs.start_anew(OURS)
    set_seed(2)
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision=precision, cpu=True)
    rest, rate_after = a_run(accelerator, tmp_path, resumed=True)
    assert rest == whole[6:]
    assert rate_after == rate


def test_loaders_go_on_in_the_same_epoch(tmp_path):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(torch.arange(9), shuffle=True))
    first = torch.cat(list(loader))
    accelerator.save_state(tmp_path)
    second, _ = torch.cat(list(loader)), torch.cat(list(loader))
    accelerator.load_state(tmp_path)
    again = torch.cat(list(loader))
    assert torch.equal(again, second)
    assert not torch.equal(again, first)


def test_no_pickle_is_written_and_safetensors_reads_it(tmp_path):
    a_run(Accelerator(gradient_accumulation_steps=4), tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert {"model.safetensors", "optimizer.json", "optimizer.safetensors", "scheduler.json"} < set(names)
    assert {name.partition(".")[2] for name in names} == {"json", "safetensors"}
    for file in tmp_path.iterdir():
        with pytest.raises(ValueError):  # noqa: PT011
            list(pickletools.genops(file.read_bytes()))
    safetensors = pytest.importorskip("safetensors.torch")
    for file in tmp_path.glob("*.safetensors"):
        found, own = safetensors.load_file(file), checkpoints.load_tensors(file)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], own[name]) for name in own)
    safetensors.save_file({"a": torch.eye(2, dtype=torch.bfloat16)}, tmp_path / "other.safetensors")
    assert torch.equal(checkpoints.load_tensors(tmp_path / "other.safetensors")["a"], torch.eye(2).bfloat16())


def test_tensors_of_every_kind_survive(tmp_path):
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(2, 3, dtype=torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "across": torch.arange(6.0).reshape(2, 3).T,
    }
    checkpoints.save_tensors(tensors, tmp_path / "file")
    found = checkpoints.load_tensors(tmp_path / "file")
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_tied_weights_are_saved_once(tmp_path):
    accelerator = Accelerator()
    model, _ = accelerator.prepare(tied := reference.Tied(), torch.optim.SGD(tied.parameters(), lr=0.1))
    accelerator.save_state(tmp_path)
    assert "head.weight" not in checkpoints.load_tensors(tmp_path / "model.safetensors")
    before = reference.weights_of(model)
    with torch.no_grad():
        model.head.weight.zero_()
    accelerator.load_state(tmp_path)
    assert relative_error(reference.weights_of(model), before) == 0


class Custom:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_custom_objects_are_saved(tmp_path):
    accelerator = Accelerator()
    state = {"n": 1, 2: (3.5, [None, True]), "t": torch.ones(2), "!": "sign", "inf": float("inf")}
    accelerator.register_for_checkpointing(one := Custom(dict(state)))
    accelerator.save_state(tmp_path)
    one.state = None
    accelerator.load_state(tmp_path)
    assert repr(one.state) == repr(state)
    with pytest.raises(UsageError, match="state_dict"):
        accelerator.register_for_checkpointing(object())
    accelerator.register_for_checkpointing(Custom({"deep": [{"er": Custom(1)}]}))
    with pytest.raises(UsageError, match=r"state.deep.0.er is a Custom, which cannot be saved without pickle"):
        accelerator.save_state(tmp_path)


def test_what_cannot_be_loaded(tmp_path):
    accelerator = Accelerator()
    trained(accelerator)
    with pytest.raises(UsageError, match="holds no training"):
        accelerator.load_state(tmp_path)
    accelerator.save_state(tmp_path)
    trained(accelerator)
    with pytest.raises(UsageError, match="Prepare the same objects"):
        accelerator.load_state(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:20],
        b"",
        pickle.dumps({"a": torch.ones(2)}),
        whole.replace(b"[1, 2]", b"[9, 9]"),
    ):
        file.write_bytes(damaged)
        with pytest.raises((MacrobatchError, ValueError)):
            checkpoints.load_tensors(file)


def test_saving_inside_a_window_warns(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with pytest.warns(RuntimeWarning, match="gradients of 1 micro-batches are not saved"):
        accelerator.save_state(tmp_path)
    micro_step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path)
    assert json.loads((tmp_path / "training.json").read_text())["step"] == 2
    micro_step(accelerator, model, optimizer)
    accelerator.load_state(tmp_path)
    assert model.weight.grad is None, "gradients of the run before would be added to"
    micro_step(accelerator, model, optimizer)
    assert not accelerator.sync_gradients
    assert model.weight.grad.tolist() == [[0.5, 0.5]]


# ------------------------------------------------------------------------------------------------- what is an error


def test_both_steps_and_plugin():
    plugin = GradientAccumulationPlugin(num_steps=2)
    with pytest.raises(UsageError, match="both given"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "2", True])
def test_bad_numbers_of_steps(steps):
    with pytest.raises(UsageError, match="num_steps"):
        GradientAccumulationPlugin(num_steps=steps)
    accelerator = Accelerator()
    with pytest.raises(UsageError, match="num_steps"):
        accelerator.gradient_accumulation_steps = steps


def test_missing_names_say_what_to_use_instead():
    accelerator = Accelerator()
    with pytest.raises(UsageError, match=r"Accelerator.log has no part in gradient accumulation.*SummaryWriter"):
        accelerator.log({"loss": 1})
    with pytest.raises(UsageError, match="Accumulator, whose batches"):
        accelerator.join_uneven_inputs([])
    assert not hasattr(accelerator, "init_trackers")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        accelerator.nonsense  # noqa: B018
    with pytest.raises(UsageError, match=r"deepspeed_plugin=.*FullyShardedDataParallelPlugin"):
        Accelerator(deepspeed_plugin=object())
    with pytest.raises(UsageError, match="no argument 'nonsense'"):
        Accelerator(nonsense=1)
    Accelerator(log_with=None)
    with pytest.raises(ImportError, match="torchrun"):
        from macrobatch.accelerate import notebook_launcher  # noqa: F401
    with pytest.raises(UsageError, match="micro='auto'"):
        from macrobatch.accelerate.utils import find_executable_batch_size  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from macrobatch.accelerate import nonsense  # noqa: F401


def test_every_public_name_of_their_accelerator_is_here_or_explained(theirs):
    accelerator = Accelerator()
    explained = macrobatch.accelerate.missing.ATTRIBUTES
    others = {
        # parallelism and precisions that are no part of it
        *("tensor_parallel_rank", "pipeline_parallel_rank", "context_parallel_rank", "data_parallel_rank"),
        *("data_parallel_shard_rank", "is_composable_parallelism_enabled", "parallelism_config", "torch_device_mesh"),
        *("fp8_backend", "multi_device", "deepspeed_ulysses_dl_adapter", "should_save_model", "verify_device_map"),
        *("non_blocking", "use_seedable_sampler", "use_stateful_dataloader", "save_iteration"),
    }
    names = {name for name in dir(theirs.Accelerator) if not name.startswith("_")}
    assert names - set(dir(accelerator)) - set(explained) == others


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of no, bf16, fp16"),
        ({"kwargs_handlers": [object()]}, "kwargs_handlers takes"),
        ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, "both given"),
        ({"gradient_accumulation_plugin": 2}, "import GradientAccumulationPlugin from macrobatch.accelerate"),
        ({"dataloader_config": {}}, "import DataLoaderConfiguration"),
        ({"fsdp_plugin": "fsdp"}, "import FullyShardedDataParallelPlugin"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(UsageError, match=words):
        Accelerator(**options)


def test_bad_plugins():
    with pytest.raises(UsageError, match="fsdp_version must be 2"):
        FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(UsageError, match="auto_wrap_policy must be a function"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")


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


def test_gradients_cleared_before_the_last_backward():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with pytest.raises(UsageError, match="the 1 before it have added would be lost"), accelerator.accumulate(model):
        optimizer.zero_grad()
    accelerator = Accelerator()
    model, optimizer = trained(accelerator)
    with accelerator.accumulate(model):
        optimizer.zero_grad()  # nothing was added before


def test_clipping_inside_a_window_under_a_scaler():
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16", cpu=True)
    model, optimizer = trained(accelerator)
    micro_step(accelerator, model, optimizer)
    with pytest.raises(UsageError, match="would unscale gradients"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_device_placement_for_each_object():
    accelerator = Accelerator()
    with pytest.raises(UsageError, match="1 entries for 2 objects"):
        accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])
    loader = accelerator.prepare(DataLoader(range(2)), device_placement=[False])
    assert loader.device is None


def test_fully_sharded_models_of_the_old_kind_are_refused():
    from macrobatch._ranks.fsdp1 import FSDP1

    with pytest.raises(BackendError, match="fully_shard"):
        FSDP1.accumulated_gradients(None, [])


def test_a_tensor_dataset_of_tuples_is_moved():
    loader = Accelerator().prepare(DataLoader(TensorDataset(torch.ones(2), torch.zeros(2)), batch_size=2))
    ((ones, zeros),) = loader
    assert ones.device == loader.device
    assert zeros.tolist() == [0, 0]
