"""`macrobatch.lightning` in one process: against one big batch, and beside Lightning's own accumulation."""

import ast
import copy
import pickle
import warnings
from pathlib import Path

import lightning.pytorch.strategies as strategies
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

import macrobatch
from harness import reference
from harness.lightnings import OURS, Loader, Task, Unsized, fit, quiet
from harness.reference import Convolution, Counting, Trainee, relative_error, same_training, trainee, weights_of
from macrobatch import Accumulator
from macrobatch.accelerate import words as accelerate_words
from macrobatch.errors import BackendError, BatchError, MacrobatchError, UsageError
from macrobatch.lightning import ExactStrategy
from macrobatch.lightning.words import CURES
from macrobatch.transformers import words as transformers_words

SIZES = (3, 1, 4, 2, 5, 2, 3)  # of 7 batches: the last window of 4 is short
BATCHES = reference.batches(SIZES)
EQUAL = [reference.batch(3, seed=i, items=8) for i in range(8)]


def train_whole(windows, name="SGD", counting=reference.BY_COUNT, max_norm=None, make=reference.Attention):
    whole = trainee(make, name)
    steps = reference.train_whole(whole, windows, max_norm=max_norm, counting=counting)
    return whole, steps


# ------------------------------------------------------------------------------------------------- one big batch


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("items", ["int", "tensor", "read"])
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_are_those_of_one_big_batch(steps, items, max_norm):
    task, counting = Task(name="AdamW", counting=Counting(items)), Counting(items)
    trainer = fit(task, BATCHES, strategy=ExactStrategy(steps=steps), max_epochs=3, gradient_clip_val=max_norm)
    windows = reference.cut(BATCHES, BATCHES, BATCHES, steps=steps)
    whole, taken = train_whole(windows, "AdamW", counting, max_norm)
    same_training(task.own, whole)
    assert trainer.global_step == len(windows)
    torch.testing.assert_close(trainer.strategy.result.loss, taken[-1].loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", reference.MODELS)
def test_any_model(make):
    task = Task(make)
    fit(task, BATCHES, strategy=ExactStrategy(steps=3), max_epochs=2)
    same_training(task.own, train_whole(reference.cut(BATCHES, BATCHES, steps=3), make=make)[0])


def test_a_loader_of_unknown_length():
    task = Task()
    fit(task, BATCHES, strategy=ExactStrategy(steps=4), max_epochs=2, load=Unsized)
    same_training(task.own, train_whole(reference.cut(BATCHES, BATCHES, steps=4))[0])


def test_clipping_by_value_and_by_the_module_itself():
    class Clipping(Task):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.seen = relative_error(reference.gradients_of(self.net), self.expected)
            self.clip_gradients(optimizer, 0.01, "value")

    task = Clipping()
    (window,) = reference.cut(BATCHES[:4], steps=4)
    task.expected = reference.whole_batch_gradient(trainee().model, window)
    fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4))
    assert task.seen <= 1e-12  # it sees the mean
    whole = trainee()
    reference.whole_loss(whole.model, window).backward()
    nn.utils.clip_grad_value_(whole.model.parameters(), 0.01)
    whole.optimizers[0].step()
    assert relative_error(weights_of(task.net), weights_of(whole.model)) <= 1e-12


def test_windows_without_items_take_no_step():
    empty = [reference.batch(2, seed=i, items=0) for i in range(2)]
    for items in ("int", "tensor"):
        counting = Counting(items)
        task = Task(name="AdamW", counting=counting)
        fit(task, [*BATCHES[:2], *empty, *BATCHES[2:4]], strategy=ExactStrategy(steps=2))
        whole, _ = train_whole([BATCHES[:2], BATCHES[2:4]], "AdamW")
        whole.schedulers[0].step()  # Lightning counts it as a step, and moves the schedule on
        assert relative_error(weights_of(task.net), weights_of(whole.model)) > 1e-12  # the schedule has moved
        unscheduled, reference_run = Unscheduled(name="AdamW", counting=counting), trainee(name="AdamW")
        fit(unscheduled, [*BATCHES[:2], *empty, *BATCHES[2:4]], strategy=ExactStrategy(steps=2))
        reference_run.schedulers.clear()
        reference.train_whole(reference_run, [BATCHES[:2], BATCHES[2:4]])
        assert relative_error(weights_of(unscheduled.net), weights_of(reference_run.model)) <= 1e-12


class Unscheduled(Task):
    def configure_optimizers(self):
        return self.own.optimizers[0]


@pytest.mark.parametrize("how", reference.HOWS)
def test_optimizers_of_any_make(how):
    task = Task(name="AdamW", how=how)
    fit(task, BATCHES, strategy=ExactStrategy(steps=4))
    same_training(task.own, train_whole(reference.cut(BATCHES, steps=4), "AdamW")[0])


def test_gradients_that_are_cleared_in_other_ways():
    class Zeroing(Task):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    class Elsewhere(Task):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx % 3 == 2:
                self.zero_grad()

    for make in (Zeroing, Elsewhere):
        task = make()
        fit(task, BATCHES, strategy=ExactStrategy(steps=3))
        same_training(task.own, train_whole(reference.cut(BATCHES, steps=3))[0])


@pytest.mark.parametrize("options", [{}, {"micro": 2}], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_that_a_hook_keeps_are_cleared_with_a_warning(factor, options):
    class Keeping(Task):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            for parameter in self.parameters():
                if parameter.grad is not None and factor != 1:
                    parameter.grad.mul_(factor)

    task = Keeping()
    with pytest.warns(UserWarning, match=r"Keeping\.optimizer_zero_grad keeps .* make steps= larger") as caught:
        fit(task, BATCHES, strategy=ExactStrategy(steps=3, **options))
    assert len([one for one in caught if "optimizer_zero_grad" in str(one.message)]) == 1
    same_training(task.own, train_whole(reference.cut(BATCHES, steps=3))[0])


def test_one_that_computes_the_loss_several_times():
    class Searching(Task):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    theirs, ours = Searching(), Searching()
    fit(theirs, BATCHES[:3])
    fit(ours, BATCHES[:3], strategy=ExactStrategy(steps=1))
    assert relative_error(weights_of(ours.net), weights_of(theirs.net)) <= 1e-12
    with pytest.raises(UsageError, match="LBFGS computes the loss several times"):
        fit(Searching(), BATCHES[:3], strategy=ExactStrategy(steps=3))


def test_a_step_without_loss_adds_nothing():
    class Leaving(Task):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (1, 3) else super().training_step(batch, batch_idx)

    task = Leaving()
    fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4))
    same_training(task.own, train_whole([[BATCHES[0], BATCHES[2]]])[0])


# ------------------------------------------------------------------------------------------------- precision


class Scaled(Callback):
    def on_train_batch_end(self, trainer, *_):
        self.scale = trainer.precision_plugin.scaler.get_scale()


@pytest.mark.parametrize("how", ["plain", "fused"])
def test_a_scaler(how):
    """Exact but for float16, and the same whatever a power of two scales."""
    found = {}
    for scale in (2.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        task = Task(how=how, dtype=torch.float32)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        clip = None if how == "fused" else 0.05  # which Lightning refuses with fused ones
        fit(task, BATCHES, strategy=ExactStrategy(steps=4), plugins=plugin, gradient_clip_val=clip)
        found[scale] = weights_of(task.net)
    whole, _ = train_whole(reference.cut(BATCHES, steps=4), max_norm=clip)
    moved = {k: v - weights_of(trainee().model)[k] for k, v in weights_of(whole.model).items()}
    for weights in found.values():
        own = {k: v - weights_of(trainee(dtype=torch.float32).model)[k] for k, v in weights.items()}
        assert relative_error(own, moved) <= 0.05


def test_an_overflow_skips_the_window():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    task = Task(dtype=torch.float32)
    before = weights_of(task.net)
    fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4), plugins=MixedPrecision("16-mixed", "cpu", scaler))
    assert relative_error(weights_of(task.net), before) == 0
    assert scaler.get_scale() == 2.0**39


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.05), ("32-true", 1e-4), ("64-true", 1e-12)])
def test_precisions(precision, tolerance):
    task = Task(dtype=torch.float32)
    fit(task, BATCHES, strategy=ExactStrategy(steps=4), precision=precision)
    whole = trainee(dtype=torch.float32)
    whole.model.double()
    reference.train_whole(whole, reference.cut(BATCHES, steps=4))
    start = {k: v.double() for k, v in weights_of(trainee(dtype=torch.float32).model).items()}
    found = {k: v.double() - start[k] for k, v in weights_of(task.net).items()}
    expected = {k: v - start[k] for k, v in weights_of(whole.model).items()}
    assert relative_error(found, expected) <= tolerance


class Seen(Callback):
    """The gradients that are there when a window is about to clear them."""

    def __init__(self):
        self.gradients = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.gradients.append(reference.gradients_of(module.net))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_gradients_summed_in_a_wider_dtype(precision, steps):
    runs = []
    for dtype in (None, torch.float64 if precision == "32-true" else torch.float32):
        task, seen = Task(dtype=torch.float32), Seen()
        strategy = ExactStrategy(steps=steps, accumulate_dtype=dtype)
        fit(task, BATCHES, strategy=strategy, precision=precision, callbacks=[seen])
        assert all(p.grad_dtype == p.grad.dtype == p.dtype for p in task.parameters())
        runs.append((weights_of(task.net), seen.gradients))
    (narrow, seen_narrow), (wide, seen_wide) = runs
    tolerance = 1e-5 if precision == "32-true" else 3e-2
    assert relative_error(wide, narrow) <= tolerance
    assert len(seen_wide) == len(reference.cut(BATCHES, steps=steps))
    for some, others in zip(seen_wide, seen_narrow, strict=True):
        assert relative_error(some, others) <= tolerance


# ------------------------------------------------------------------------------------------------- as before


class Diary(Callback):
    """Every hook that is called, with what it shows."""

    def __init__(self, steps):
        self.lines, self.steps = [], steps

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("on_") and callable(found):
            return lambda trainer, module, *args, **kwargs: self.note(name, trainer, module, args, kwargs)
        return found

    def note(self, name, trainer, module, args, kwargs):
        shown = [float(a.detach()) if isinstance(a, torch.Tensor) and a.numel() == 1 else None for a in args]
        outputs = kwargs.get("outputs", args[0] if args and name == "on_train_batch_end" else None)
        if isinstance(outputs, dict) and "loss" in outputs:
            shown.append(float(outputs["loss"]))
        size = sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None)
        has_whole = name in ("on_before_optimizer_step", "on_before_zero_grad") or self.steps == 1
        lr = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0
        self.lines.append((name, trainer.global_step, shown, size if has_whole else None, lr))


def hooks_of(strategy, steps, **options):
    diary, task = Diary(steps), Task(name="AdamW", counting=Counting("none"))
    fit(task, EQUAL, val=EQUAL[:2], strategy=strategy, callbacks=[diary], **options)
    return diary.lines, task


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2},
        {"max_steps": 3, "max_epochs": 4},
        {"max_epochs": 2, "val_check_interval": 3},
        {"max_epochs": 2, "gradient_clip_val": 0.05},
        {"max_epochs": 2, "limit_train_batches": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, 4])
def test_callbacks_see_what_they_saw(steps, options):
    """The same hooks in the same order, with the same losses, steps, learning rates and gradients."""
    theirs, task = hooks_of("auto", steps, accumulate_grad_batches=steps, **options)
    ours, own = hooks_of(ExactStrategy(steps=steps), steps, **options)
    assert [line[:2] for line in ours] == [line[:2] for line in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our[2] == their[2], our
        assert (our[3] or 0) == pytest.approx(their[3] or 0, rel=1e-9), our
        assert our[4] == their[4], our
    assert relative_error(weights_of(own.net), weights_of(task.net)) <= 1e-12


@pytest.mark.parametrize("log_every", [1, 2])
def test_loggers_log_what_they_logged(tmp_path, log_every):
    logged = []
    for name, options in (
        ("theirs", {"accumulate_grad_batches": 2}),
        ("ours", {"strategy": ExactStrategy(steps=2)}),
    ):
        logger = CSVLogger(tmp_path, name=name)
        task = Task(counting=Counting("none"))
        trainer = fit(task, EQUAL, val=EQUAL[:2], logger=logger, log_every_n_steps=log_every, max_epochs=2, **options)
        logger.save()
        logged.append(((tmp_path / name / "version_0" / "metrics.csv").read_text(), trainer.callback_metrics))
    rows = [[line.split(",") for line in text.splitlines()] for text, _ in logged]
    assert rows[0][0] == rows[1][0]
    assert len(rows[0]) == len(rows[1])
    for theirs, ours in zip(rows[0][1:], rows[1][1:], strict=True):
        assert [float(x or 0) for x in ours] == pytest.approx([float(x or 0) for x in theirs], abs=1e-6)
    assert logged[0][1].keys() == logged[1][1].keys()


def test_estimated_steps_are_those_of_windows():
    class Asking(Task):
        def setup(self, stage):
            self.early = self.trainer.estimated_stepping_batches

        def configure_optimizers(self):
            self.late = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    task = Asking()
    trainer = fit(task, BATCHES, strategy=ExactStrategy(steps=4), max_epochs=3)
    assert task.early == task.late == trainer.global_step == 6
    for schedule, expected in (({0: 4, 1: 2}, 2 + 4 + 4), ({0: 2, 2: 4}, 4 + 4 + 2), ({1: 4}, 7 + 2 + 2)):
        task = Asking()
        trainer = fit(task, BATCHES, strategy=ExactStrategy(steps=schedule), max_epochs=3)
        assert task.early == task.late == trainer.global_step == expected
        assert type(trainer) is Trainer
    task = Asking()
    fit(task, BATCHES, strategy=ExactStrategy(steps={0: 4, 1: 2}), max_epochs=3, max_steps=5)
    assert task.late == 5
    task = Asking()
    fit(task, BATCHES, strategy=ExactStrategy(steps={0: 4, 1: 2}), max_steps=3, load=Unsized)
    assert task.late == 3


def test_a_schedule():
    """Epochs with windows of different lengths, as Lightning's callback has them."""
    task = Task(counting=Counting("none"))
    fit(task, EQUAL, callbacks=[GradientAccumulationScheduler({1: 4, 2: 2})], max_epochs=4)
    own = Task(counting=Counting("none"))
    trainer = fit(own, EQUAL, strategy=ExactStrategy(steps={1: 4, 2: 2}), max_epochs=4)
    assert trainer.global_step == 8 + 2 + 4 + 4
    assert relative_error(weights_of(own.net), weights_of(task.net)) <= 1e-12
    assert not trainer.callbacks
    assert trainer.accumulate_grad_batches == 2  # as Lightning's callback leaves it


class Clearing(Callback):
    """In its last epoch, Lightning's averaging steps once more with the gradients that it finds: an accident."""

    def on_train_epoch_start(self, trainer, module):
        module.zero_grad()


def test_a_callback_that_wants_forwards_alone():
    found = []
    for options in (
        {"accumulate_grad_batches": 4, "callbacks": [Clearing()]},
        {"strategy": ExactStrategy(steps=4), "callbacks": []},
    ):
        task = Unscheduled(Convolution, counting=Counting("none"))
        task.net.train()
        options["callbacks"].append(StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1))
        fit(task, EQUAL, max_epochs=4, **options)
        found.append(weights_of(task.net) | dict(task.net.named_buffers()))
    assert relative_error(found[1], found[0]) <= 1e-12


def test_stopping_inside_a_window_drops_it():
    class Stopping(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 4

    task = Task()
    trainer = fit(task, BATCHES, strategy=ExactStrategy(steps=3), callbacks=[Stopping()])
    assert trainer.global_step == 1
    same_training(task.own, train_whole([BATCHES[:3]])[0])
    assert all(p.grad is None for p in task.parameters())


def test_leaving_an_epoch_inside_a_window_drops_it():
    class Leaving(Unscheduled):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    task, whole = Leaving(), trainee()
    fit(task, BATCHES, strategy=ExactStrategy(steps=3), max_epochs=2)
    whole.schedulers.clear()
    reference.train_whole(whole, [BATCHES[:3], BATCHES[:3]])
    same_training(Trainee(task.net, task.own.optimizers, []), whole)


def test_a_trainer_fits_again():
    task = Task()
    trainer = fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4))
    trainer.fit_loop.max_epochs = 2
    with quiet():
        trainer.fit(task, Loader(BATCHES[:4]))
        assert trainer.validate(task, Loader(BATCHES[:2]), verbose=False)
    same_training(task.own, train_whole([BATCHES[:4], BATCHES[:4]])[0])


# ------------------------------------------------------------------------------------------------- checkpoints


class CutError(Exception):
    pass


class Breaking(Callback):
    def __init__(self, after):
        self.after = after

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.after:
            raise CutError


@pytest.mark.parametrize("steps", [2, {0: 3, 1: 2}])
@pytest.mark.parametrize("fp16", [False, True])
def test_resumes_inside_an_epoch_bitwise(tmp_path, steps, fp16):
    def start(**options):
        dtype = torch.float32 if fp16 else torch.float64
        task = Task(name="AdamW", dtype=dtype)
        plugins = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)) if fp16 else None
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options["callbacks"] = [saving, *options.get("callbacks", [])]
        strategy = ExactStrategy(steps=steps)
        fit(task, BATCHES, strategy=strategy, max_epochs=2, plugins=plugins, enable_checkpointing=True, **options)
        assert strategy.result.step == (8 if steps == 2 else 7)
        return task

    whole = start()
    step = {2: 6, 3: 4}[steps if steps == 2 else 3]  # inside the second epoch
    with pytest.raises(CutError):
        start(callbacks=[Breaking(step)])
    resumed = start(ckpt_path=tmp_path / f"step={step}.ckpt")
    for name, weight in weights_of(whole.net).items():
        assert torch.equal(weight, weights_of(resumed.net)[name]), name


def test_a_checkpoint_inside_a_window_warns(tmp_path):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                with pytest.warns(UserWarning, match="the gradients of its first 3 micro-batches are not saved"):
                    trainer.save_checkpoint(tmp_path / "inside.ckpt")

    fit(Task(), BATCHES[:4], strategy=ExactStrategy(steps=4), callbacks=[Saving()])
    resumed = Task()
    fit(resumed, BATCHES[:4], strategy=ExactStrategy(steps=4), ckpt_path=tmp_path / "inside.ckpt")
    same_training(resumed.own, train_whole([BATCHES[3:4]])[0])


# ------------------------------------------------------------------------------------------------- strategies


def test_strategies_are_found_by_name():
    assert isinstance(ExactStrategy("ddp", steps=2), DDPStrategy)
    assert isinstance(ExactStrategy("DDP_find_unused_parameters_true"), DDPStrategy)
    trainer = fit(Task(), BATCHES[:2], strategy=ExactStrategy(SingleDeviceStrategy("cpu"), steps=2))
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert trainer.global_step == 1


def test_a_name_is_decided_when_the_devices_are_known():
    for devices, name, kind in ((1, "auto", SingleDeviceStrategy), (2, "auto", DDPStrategy)):
        trainer = Trainer(accelerator="cpu", devices=devices, strategy=ExactStrategy(name, steps=3), logger=False)
        assert isinstance(trainer.strategy, kind)
        assert isinstance(trainer.strategy, ExactStrategy)
        assert trainer.world_size == devices
    trainer = Trainer(accelerator="cpu", devices=2, strategy=ExactStrategy("fsdp2", steps=3), logger=False)
    assert isinstance(trainer.strategy, ModelParallelStrategy)


def test_a_strategy_can_be_copied_and_pickled():
    strategy = ExactStrategy(DDPStrategy(find_unused_parameters=True), steps={0: 2})
    for again in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy)), ExactStrategy(strategy, steps=2)):
        assert type(again) is type(strategy)


def test_the_other_package():
    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.own = trainee()
            self.net = self.own.model

        training_step, configure_optimizers = Task.training_step, Task.configure_optimizers
        counting = reference.BY_COUNT

    other = Other()
    strategy = ExactStrategy(pytorch_lightning.strategies.SingleDeviceStrategy("cpu"), steps=4)
    with quiet():
        pytorch_lightning.Trainer(**OURS, strategy=strategy, max_epochs=1).fit(other, Loader(BATCHES))
    same_training(other.own, train_whole(reference.cut(BATCHES, steps=4))[0])


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ("deepspeed_stage_2", "DeepSpeed"),
        ("fsdp", "first generation of FSDP"),
        ("xla", "XLA"),
    ],
)
def test_strategies_whose_gradients_are_out_of_reach(strategy, what, monkeypatch):
    kind = strategies.StrategyRegistry[strategy]["strategy"]
    made = object.__new__(kind)  # most need something that is not installed
    monkeypatch.setattr(strategies.StrategyRegistry, "get", lambda name: made)
    with pytest.raises(BackendError, match=what):
        ExactStrategy(strategy, steps=2)


@pytest.mark.parametrize("strategy", ["dpd", 3, nn.Linear(1, 1)])
def test_what_is_no_strategy(strategy):
    with pytest.raises(UsageError, match="strategy"):
        ExactStrategy(strategy, steps=2)


@pytest.mark.parametrize("steps", [0, -1, 2.0, "4", {}, {"1": 2}, {-1: 2}, {0: 0}, True])
def test_what_is_no_number_of_steps(steps):
    with pytest.raises(UsageError, match="steps"):
        ExactStrategy("auto", steps=steps)


def test_numbers_of_numpy_are_numbers():
    assert ExactStrategy(steps=np.int64(4)).steps == 4
    assert ExactStrategy(steps={np.int64(0): np.int32(4)}).steps == {0: 4}


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_what_is_no_switch(value):
    with pytest.raises(UsageError, match="cuda_graph must be True or False"):
        ExactStrategy(cuda_graph=value)


def refuses(match, module=None, kind=UsageError, steps=2, batches=BATCHES, **options):
    with pytest.raises(kind, match=match):
        fit(module or Task(), batches, strategy=ExactStrategy(steps=steps), **options)


def test_somebody_else_accumulates():
    refuses(r"accumulate_grad_batches=4\) beside ExactStrategy.*steps=4", accumulate_grad_batches=4)
    refuses(r"GradientAccumulationScheduler beside.*\{0: 3\}", callbacks=[GradientAccumulationScheduler({0: 3})])

    class Bringing(Task):
        def configure_callbacks(self):
            return [GradientAccumulationScheduler({0: 3})]

    refuses("GradientAccumulationScheduler beside", Bringing())


class Manual(Task):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        output = super().training_step(batch, batch_idx)
        self.manual_backward(output["loss"])
        optimizer.step()


def test_manual_optimization():
    refuses("automatic_optimization=False.*Accumulator", Manual())
    task, whole = Manual(), trainee()
    whole.schedulers.clear()
    fit(task, BATCHES, strategy=ExactStrategy(steps=1))  # Lightning's own
    reference.train_whole(whole, [[b] for b in BATCHES])
    assert relative_error(weights_of(task.net), weights_of(whole.model)) <= 1e-12


def test_a_module_that_fetches_its_batches():
    class Fetching(Task):
        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            micro = reference.Batch(batch["x"], batch["y"])
            return {"loss": reference.mean_loss(self.net, micro), "items": self.counting.given(micro, 0)}

    refuses(r"Fetching\.training_step takes a dataloader_iter.*steps=1", Fetching())
    task = Fetching()
    fit(task, BATCHES, strategy=ExactStrategy(steps=1))
    same_training(task.own, train_whole(reference.cut(BATCHES, steps=1))[0])


def test_a_backward_of_the_modules_own():
    class Own(Task):
        def backward(self, loss):
            loss.backward()

    refuses(r"Own has a backward\(\) of its own", Own())


def test_other_entries_of_the_output_are_left_to_the_program():
    class Others(Task):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return {"loss": output["loss"], "n_items": output["items"], "item": "anything"}

    task = Others()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*item")
        fit(task, BATCHES, strategy=ExactStrategy(steps=4))
    same_training(task.own, train_whole(reference.cut(BATCHES, steps=4))[0])  # read from the loss


def test_items_by_turns():
    class Forgetful(Task):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return output if batch_idx else output["loss"]

    refuses("items must be given for every micro-batch", Forgetful(), BatchError)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end"])
def test_gradients_changed_inside_a_window(hook):
    class Meddling(Callback):
        pass

    def meddle(self, trainer, module, *_):
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)

    setattr(Meddling, hook, meddle)
    refuses("gradients of the open window were changed", callbacks=[Meddling()])


class Changing(Task):
    def on_after_backward(self):
        self.net.head.bias.grad.mul_(2)


class Dropping(Task):
    def on_after_backward(self):
        self.zero_grad()


class Backpropagating(Task):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        output["loss"].backward(retain_graph=True)
        return output


class Stepping(Task):
    def training_step(self, batch, batch_idx):
        self.optimizers().step()
        return super().training_step(batch, batch_idx)


class Vectorial(Task):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"].expand(3)


class Foreign(Task):
    def training_step(self, batch, batch_idx):
        return nn.Linear(1, 1)(torch.ones(1)).sum()


@pytest.mark.parametrize("make", [Changing, Dropping, Backpropagating, Stepping, Vectorial, Foreign])
def test_errors_speak_of_what_a_program_of_lightning_has(make):
    with pytest.raises(MacrobatchError) as raised:
        fit(make(), BATCHES, strategy=ExactStrategy(steps=2))
    for word in ("acc.", "step()", "discard", "max_norm", "Accumulator", "reduction="):
        assert word not in str(raised.value).replace("optimizer_step()", "")


def codes():
    """The codes of errors in the source."""
    trees = [ast.parse(file.read_text()) for file in Path(macrobatch.__file__).parent.rglob("*.py")]
    words = [word for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords]
    return {word.value.value for word in words if word.arg == "code" and isinstance(word.value, ast.Constant)}


def test_every_error_that_asks_for_another_cure_has_one():
    assert codes() == CURES.keys()
    assert codes() >= accelerate_words.CURES.keys() | transformers_words.CURES.keys()


@pytest.mark.parametrize("cures", [CURES, accelerate_words.CURES, transformers_words.CURES])
def test_no_cure_names_what_the_program_does_not_have(cures):
    for cure in cures.values():
        for word in ("acc.", " step()", "discard", "max_norm=", "Accumulator", "reduction=", "counts="):
            assert word not in cure.replace("MacroStep(..., counts=...)", "")


def test_after_a_mistake_the_trainer_is_as_before():
    class Failing(Task):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise CutError
            return super().training_step(batch, batch_idx)

    task, strategy = Failing(), ExactStrategy(steps=3)
    seen = []

    class Holding(Callback):
        def setup(self, trainer, module, stage):
            seen.append(trainer)

    with pytest.raises(CutError):
        fit(task, BATCHES, strategy=strategy, callbacks=[Holding()])
    assert seen[0].accumulate_grad_batches == 3  # what hooks of the end of a fit read
    assert all(p.grad is None for p in task.parameters())


# ------------------------------------------------------------------------------------------------- several optimizers


class Pair(LightningModule):
    """Two optimizers, each with an Accumulator of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def configure_optimizers(self):
        return [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-5) for m in (self.first, self.second)]

    def on_train_start(self):
        optimizers = [optimizer.optimizer for optimizer in self.optimizers()]
        self.accumulators = [
            Accumulator(model, optimizer, steps=2)
            for model, optimizer in zip((self.first, self.second), optimizers, strict=True)
        ]

    def training_step(self, batch, batch_idx):
        for model, acc in zip((self.first, self.second), self.accumulators, strict=True):
            with acc.micro_batch(last=True if self.trainer.is_last_batch else None):
                acc.backward((model(batch) ** 2).mean(), items=len(batch))
            acc.step()


def test_several_optimizers_by_accumulators():
    data = [torch.randn(n, 2, dtype=torch.float64) for n in (3, 1, 2, 4, 2)]
    pair, whole = Pair(), Pair()
    with quiet():
        Trainer(**OURS, max_epochs=1).fit(pair, DataLoader(data, batch_size=None))
    for model, optimizer in zip((whole.first, whole.second), whole.configure_optimizers(), strict=True):
        for window in (data[:2], data[2:4], data[4:]):
            optimizer.zero_grad()
            (model(torch.cat(window)) ** 2).mean().backward()
            optimizer.step()
    assert relative_error(weights_of(pair), weights_of(whole)) <= 1e-12
