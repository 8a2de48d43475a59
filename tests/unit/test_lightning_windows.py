"""`ExactStrategy(micro=...)`: the batches of a window kept, then run together, in one process."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from harness import reference
from harness.lightnings import Given, Task, Unsized, Words, fit, log_words, sentences, train_words
from harness.reference import Convolution, Counting, relative_error, same_training, trainee, weights_of
from macrobatch import by_count, by_tokens
from macrobatch.errors import BatchError, UsageError
from macrobatch.lightning import ExactStrategy

SIZES = (3, 1, 4, 2, 5, 2, 3)  # of 7 batches: the last window of 4 is short
BATCHES = reference.batches(SIZES)
CUTS = [1, 3, by_count(100), "auto"]


def train_whole(windows, name="SGD", max_norm=None, make=reference.Attention):
    whole = trainee(make, name)
    return whole, reference.train_whole(whole, windows, max_norm=max_norm)


# ------------------------------------------------------------------------------------------------- one big batch


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("items", ["int", "tensor"])
@pytest.mark.parametrize("micro", CUTS, ids=str)
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_are_those_of_one_big_batch(steps, micro, items, max_norm):
    task = Task(name="AdamW", counting=Counting(items))
    strategy = ExactStrategy(steps=steps, micro=micro)
    trainer = fit(task, BATCHES, strategy=strategy, max_epochs=2, gradient_clip_val=max_norm)
    windows = reference.cut(BATCHES, BATCHES, steps=steps)
    whole, taken = train_whole(windows, "AdamW", max_norm)
    same_training(task.own, whole)
    assert trainer.global_step == len(windows)
    torch.testing.assert_close(trainer.strategy.result.loss, taken[-1].loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", reference.MODELS)
def test_any_model(make):
    task = Task(make)
    fit(task, BATCHES, strategy=ExactStrategy(steps=3, micro=2), max_epochs=2)
    same_training(task.own, train_whole(reference.cut(BATCHES, BATCHES, steps=3), make=make)[0])


class Squared(Task):
    """A loss that is a mean over samples, of batches that are pairs."""

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) ** 2).mean()


class Pairs(Unsized):
    def __init__(self, batches):
        super().__init__(batches)
        self.batches = [[b["x"], b["y"]] for b in self.batches]


def test_without_items_samples_weigh_the_same():
    task, whole = Squared(), trainee()
    fit(task, BATCHES, strategy=ExactStrategy(steps=4, micro=2), load=Pairs)
    for window in reference.cut(BATCHES, steps=4):
        whole.optimizers[0].zero_grad()
        (whole.model(reference.concatenate(window).x) ** 2).mean().backward()
        whole.optimizers[0].step()
        whole.schedulers[0].step()
    same_training(task.own, whole)


def test_a_schedule_and_a_window_that_the_loop_leaves():
    class Leaving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 4

    task = Task()
    trainer = fit(
        task, BATCHES, strategy=ExactStrategy(steps={0: 2, 1: 3}, micro=2), max_epochs=2, callbacks=[Leaving()]
    )
    same_training(task.own, train_whole([*reference.cut(BATCHES, steps=2), BATCHES[:3]])[0])
    assert trainer.strategy.result.step == 5
    assert all(p.grad is None for p in task.parameters())


def test_gradients_that_are_cleared_in_other_ways():
    class Zeroing(Task):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    for steps in (1, 3):
        task = Zeroing()
        fit(task, BATCHES, strategy=ExactStrategy(steps=steps, micro=2))
        same_training(task.own, train_whole(reference.cut(BATCHES, steps=steps))[0])


def test_windows_without_items_take_no_step():
    class Unscheduled(Task):
        def configure_optimizers(self):
            return self.own.optimizers[0]

    empty = [reference.batch(2, seed=i, items=0) for i in range(2)]
    for items in ("int", "tensor"):
        task, whole = Unscheduled(name="AdamW", counting=Counting(items)), trainee(name="AdamW")
        fit(task, [*BATCHES[:2], *empty, *BATCHES[2:4]], strategy=ExactStrategy(steps=2, micro=3))
        whole.schedulers.clear()
        reference.train_whole(whole, [BATCHES[:2], BATCHES[2:4]])
        assert relative_error(weights_of(task.net), weights_of(whole.model)) <= 1e-12


def test_one_that_computes_the_loss_several_times():
    class Searching(Task):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    theirs, ours = Searching(), Searching()
    fit(theirs, BATCHES[:3])
    fit(ours, BATCHES[:3], strategy=ExactStrategy(steps=1, micro=2))
    assert relative_error(weights_of(ours.net), weights_of(theirs.net)) <= 1e-12
    with pytest.raises(UsageError, match="LBFGS computes the loss several times"):
        fit(Searching(), BATCHES[:3], strategy=ExactStrategy(steps=3, micro=2))


def test_a_callback_that_wants_forwards_alone():
    found = []
    for micro in (None, 100):
        task = Task(Convolution)
        task.net.train()
        averaging = StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)
        fit(task, BATCHES, max_epochs=4, strategy=ExactStrategy(steps=1, micro=micro), callbacks=[averaging])
        found.append(weights_of(task.net) | dict(task.net.named_buffers()))
    assert relative_error(found[1], found[0]) <= 1e-12


def test_an_overflow_skips_the_window():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    task = Task(dtype=torch.float32)
    before = weights_of(task.net)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4, micro=3), plugins=plugin)
    assert relative_error(weights_of(task.net), before) == 0
    assert scaler.get_scale() == 2.0**39


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_precisions(precision):
    found = []
    for micro in (None, 2):
        task = Task(dtype=torch.float32)
        options = {"precision": precision}
        if precision == "16-mixed":
            options = {"plugins": MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))}
        fit(task, BATCHES, strategy=ExactStrategy(steps=4, micro=micro), **options)
        start = weights_of(trainee(dtype=torch.float32).model)
        found.append({name: weight - start[name] for name, weight in weights_of(task.net).items()})
    assert 0 < relative_error(*found) <= (1e-12 if precision == "64-true" else 0.05)


def test_what_gradients_are_summed_in():
    """Sums of many small gradients beside a large one are lost in bfloat16."""
    found = {}
    for dtype in (None, torch.float32):
        for micro in (None, 1):
            task = Task(dtype=torch.bfloat16)
            strategy = ExactStrategy(steps=7, micro=micro, accumulate_dtype=dtype)
            fit(task, BATCHES, strategy=strategy)
            found[dtype, micro] = weights_of(task.net)
    assert relative_error(found[None, None], found[torch.float32, None]) > 0
    assert relative_error(found[None, 1], found[torch.float32, 1]) > 0


# ------------------------------------------------------------------------------------------------- tokens


DATA = sentences((3, 7), (2, 12), (4, 5), (3, 9), (1, 12), (2, 4))
WINDOWS = [DATA[:4], DATA[4:]]


@pytest.mark.parametrize("micro", [by_tokens(24), 3, "auto"], ids=str)
def test_batches_of_different_widths(micro):
    module, (steps, whole) = Words(), train_words(WINDOWS)
    trainer = fit(module, DATA, strategy=ExactStrategy(steps=4, micro=micro), load=Given)
    assert relative_error(weights_of(module), weights_of(whole)) <= 1e-10
    assert trainer.strategy.result.loss.item() == pytest.approx(steps[-1][0], rel=1e-12)


def test_what_batches_are_padded_with():
    class Padded(Words):
        def __init__(self):
            super().__init__()
            self.net.config = SimpleNamespace(pad_token_id=9)

        def training_step(self, batch, batch_idx):
            hidden = batch["attention_mask"] == 0
            assert (batch["input_ids"][hidden] == 9).all()
            assert (batch["labels"][hidden] == -100).all()
            return super().training_step(batch, batch_idx)

    fit(Padded(), DATA, strategy=ExactStrategy(steps=4, micro=100), load=Given)


def test_a_field_that_nobody_knows_how_to_pad():
    class Tokens(Words):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

    data = [(torch.ones(2, width, dtype=torch.long), torch.ones(2)) for width in (3, 4)]
    with pytest.raises(BatchError, match=r"batch\[0\] has the shapes .* not known by its name"):
        fit(Tokens(), data, strategy=ExactStrategy(steps=2, micro=2), load=Given)


# ------------------------------------------------------------------------------------------------- as before


class Diary(Callback):
    def __init__(self):
        self.lines, self.losses = [], []

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("on_") and callable(found):
            return lambda trainer, *args, **kwargs: self.note(name, trainer, args)
        return found

    def note(self, name, trainer, args):
        lr = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0
        self.lines.append((name, trainer.global_step, lr))
        if name == "on_train_batch_end":
            self.losses.append(float(args[1]["loss"]))


@pytest.mark.parametrize("steps", [1, 3])
def test_hooks_come_as_before_and_losses_add_up_to_the_windows(steps):
    """The same hooks in the same order; the losses of a window's batches, 0 but for the last, are its mean."""
    theirs, ours = Diary(), Diary()
    options = {"val": BATCHES[:2], "max_epochs": 2, "val_check_interval": 4}
    fit(Task(), BATCHES, accumulate_grad_batches=steps, callbacks=[theirs], **options)
    fit(Task(), BATCHES, strategy=ExactStrategy(steps=steps, micro=2), callbacks=[ours], **options)
    assert ours.lines == theirs.lines
    _, taken = train_whole(reference.cut(BATCHES, BATCHES, steps=steps))
    assert [loss for loss in ours.losses if loss] == pytest.approx([step.loss.item() for step in taken])
    assert [bool(loss) for loss in ours.losses[:3]] == [steps == 1, steps == 1, True]


@pytest.mark.parametrize("is_stated", [True, False])
def test_what_training_step_logs_is_the_windows(tmp_path, is_stated):
    """One value a step, the mean over its items; and the epoch's, over all of them."""

    class Still(Words):
        rate = 0.0

        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return output if is_stated else output["loss"]

    steps, _ = train_words(WINDOWS, 0.0)
    strategy = ExactStrategy(steps=4, micro=by_tokens(24))
    rows, trainer = log_words(tmp_path, Still(), DATA, strategy=strategy, max_epochs=2)
    assert [row["loss_step"] for row in rows if "loss_step" in row] == pytest.approx([loss for loss, _ in steps] * 2)
    mean = sum(loss * items for loss, items in steps) / sum(items for _, items in steps)
    assert [row["loss_epoch"] for row in rows if "loss_epoch" in row] == pytest.approx([mean] * 2)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(mean)


def test_other_things_that_are_logged():
    class Many(Task):
        def __init__(self):
            super().__init__(counting=Counting("tensor"))
            self.right = torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            size = len(batch["x"])
            self.log_dict({"largest": float(size), "most": torch.tensor(size)}, reduce_fx="max")
            self.log("samples", float(size), False, reduce_fx=torch.sum, on_step=True)
            self.log("by_samples", torch.tensor(size), batch_size=size)
            self.right.update(torch.tensor(float(size)))
            self.log("right", self.right, on_step=False, on_epoch=True)
            return output

    task = Many()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs to be floating")
        trainer = fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4, micro=4))
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    whole, taken = train_whole([BATCHES[:4]])  # 10 samples: 4, 4, 2
    assert found["loss"] == pytest.approx(taken[0].loss.item())
    assert found["samples"] == 10
    assert found["largest"] == found["most"] == 4
    assert found["by_samples"] == pytest.approx((16 + 16 + 4) / 10)
    assert found["right"] == pytest.approx(10 / 3)
    assert "log" not in vars(task)
    same_training(task.own, whole)


def test_a_log_of_the_modules_own():
    class Prefixed(Task):
        def log(self, name, value, *args, **options):
            super().log(f"train/{name}", value, *args, **options)

    task = Prefixed()
    trainer = fit(task, BATCHES[:4], strategy=ExactStrategy(steps=4, micro=4))
    _, taken = train_whole([BATCHES[:4]])
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {
        "train/loss": pytest.approx(taken[0].loss.item())
    }


def test_what_cannot_be_logged_is_lightnings_error():
    class Vector(Task):
        def training_step(self, batch, batch_idx):
            self.log("vector", torch.ones(2))
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="single element"):
        fit(Vector(), BATCHES[:2], strategy=ExactStrategy(steps=2, micro=2))


@pytest.mark.parametrize("micro", [2, "auto"])
def test_resumes_inside_an_epoch_bitwise(tmp_path, micro):
    def start(**options):
        task = Task(name="AdamW")
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        strategy = ExactStrategy(steps=2, micro=micro)
        fit(task, BATCHES, strategy=strategy, max_epochs=2, callbacks=[saving], enable_checkpointing=True, **options)
        assert strategy.result.step == 8
        return weights_of(task.net)

    once, again = start(), start(ckpt_path=tmp_path / "step=6.ckpt")
    assert all(torch.equal(weight, again[name]) for name, weight in once.items())


def test_a_checkpoint_inside_a_window_warns(tmp_path):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                with pytest.warns(UserWarning, match="the gradients of its first 3 micro-batches are not saved"):
                    trainer.save_checkpoint(tmp_path / "inside.ckpt")

    fit(Task(), BATCHES[:4], strategy=ExactStrategy(steps=4, micro=2), callbacks=[Saving()])
    resumed = Task()
    fit(resumed, BATCHES[:4], strategy=ExactStrategy(steps=4, micro=2), ckpt_path=tmp_path / "inside.ckpt")
    same_training(resumed.own, train_whole([BATCHES[3:4]])[0])


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("micro", [0, -1, 2.5, "all", True])
def test_what_is_no_way_to_cut(micro):
    with pytest.raises(UsageError, match=r"micro|at least 1"):
        ExactStrategy(steps=2, micro=micro)


def refuses(match, module, kind=UsageError, **options):
    with pytest.raises(kind, match=match):
        fit(module, BATCHES[:2], strategy=ExactStrategy(steps=2, micro=2), **options)
    assert all(p.grad is None for p in module.parameters())
    assert "log" not in vars(module)


def test_what_cannot_be_kept_or_has_no_loss():
    class Iterating(Task):
        def training_step(self, dataloader_iter):
            return None

    class Leaving(Task):
        def training_step(self, batch, batch_idx):
            return None

    class Negative(Task):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) | {"items": torch.tensor(-1)}

    class Manual(Task):
        automatic_optimization = False

    refuses(r"training_step takes a dataloader_iter.*steps=1", Iterating())
    refuses("returned no loss for a micro-batch", Leaving())
    with pytest.raises(UsageError, match=r"automatic_optimization=False.*Accumulator"):
        fit(Manual(), BATCHES[:2], strategy=ExactStrategy(micro=2))
    with pytest.raises(BatchError, match="negative or not finite"):
        fit(Negative(), BATCHES[:2], strategy=ExactStrategy(steps=2, micro=2))


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"steps": 2, "micro": 2}], ids=str)
def test_a_module_without_a_training_step_is_an_error_of_lightning(options):
    module = Task()
    module.training_step = None
    with pytest.raises(MisconfigurationException, match=r"No `training_step\(\)` method"):
        fit(module, BATCHES[:2], strategy=ExactStrategy(**options))
