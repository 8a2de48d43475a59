"""What a program sees of a fit: the hooks, beside those of the stock Trainer; checkpoints; copies."""

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from harness import reference
from harness.lightnings import OURS, Loader, Task, fit, quiet
from harness.reference import Counting, relative_error, same_training, trainee, weights_of
from macrobatch import MacroStep
from macrobatch.errors import UsageError
from macrobatch.lightning import ExactStrategy

BATCHES = reference.batches((3, 1, 4, 2, 5, 2, 3))
EQUAL = [reference.batch(3, seed=i, items=8) for i in range(6)]
HOOKS = [
    name
    for name, value in inspect.getmembers(LightningModule, inspect.isfunction)
    if name.startswith(("on_", "optimizer_", "configure_gradient_clipping", "lr_scheduler_step", "clip_gradients"))
    or name in ("backward", "training_step", "validation_step", "setup", "teardown", "transfer_batch_to_device")
]


def shown(value: Any) -> Any:
    """What of an argument can be compared between two runs."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return round(float(value.detach()), 9)
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items() if name in ("loss", "items", "epoch", "global_step")}
    return value if isinstance(value, int | float | str | None) else type(value).__name__


class Diary:
    """Every call of a hook of the module, or of a callback, in order."""

    def __init__(self, module: LightningModule) -> None:
        self.calls: list[Any] = []
        for name in HOOKS:
            setattr(module, name, self.noting(f"module.{name}", getattr(module, name)))
        self.callback = Callback()
        for name in dir(Callback):
            if name.startswith("on_") or name in ("setup", "teardown"):
                setattr(self.callback, name, self.noting(f"callback.{name}", getattr(self.callback, name)))
        assert len(HOOKS) > 30

    def noting(self, name: str, call: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            self.calls.append((name, [shown(one) for one in given if not isinstance(one, Trainer)]))
            return call(*args, **kwargs)

        return note


def calls_of(steps: int, *, is_exact: bool, **options: Any) -> list[Any]:
    task = Task(name="AdamW", counting=Counting("none"))
    diary = Diary(task)
    how = {"strategy": ExactStrategy(steps=steps)} if is_exact else {"accumulate_grad_batches": steps}
    fit(task, EQUAL, val=EQUAL[:1], callbacks=[diary.callback], **how, **options)
    return diary.calls


@pytest.mark.parametrize(
    "options",
    [{"max_epochs": 2}, {"gradient_clip_val": 0.1, "max_steps": 2}, {"precision": "bf16-mixed"}],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, 3])
def test_hooks_are_called_as_often_and_in_the_order_of_the_stock_trainer(steps, options):
    theirs, ours = (calls_of(steps, is_exact=is_exact, **options) for is_exact in (False, True))
    names = {name for name, _ in theirs}
    assert {"module.on_before_backward", "module.on_after_backward", "callback.on_before_zero_grad"} <= names
    if steps > 1:  # we run the backward of longer windows
        theirs = [call for call in theirs if call[0] != "module.backward"]
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    if "precision" not in options:
        assert ours == theirs


class Own(Task):
    """A module with a backward of its own."""

    calls = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        (2 * loss).backward(*args, **kwargs)


class OwnPrecision(Precision):
    calls = 0

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        super().backward(tensor, model, *args, **kwargs)


def test_a_backward_of_the_modules_or_the_plugins_own_runs_where_each_batch_is_a_step():
    theirs, ours, plugin = Own(), Own(), OwnPrecision()
    fit(theirs, BATCHES)
    fit(ours, BATCHES, strategy=ExactStrategy(), plugins=[plugin])
    assert ours.calls == plugin.calls == len(BATCHES)
    assert all(torch.equal(weight, weights_of(ours)[name]) for name, weight in weights_of(theirs).items())
    for steps in (2, {0: 1, 1: 2}):
        with pytest.raises(UsageError, match=r"OwnPrecision has a backward\(\) of its own"):
            fit(Task(), BATCHES, strategy=ExactStrategy(steps=steps), plugins=[OwnPrecision()])


# ------------------------------------------------------------------------------------------------- closures


def ascend(module: Any) -> list[Tensor]:
    """Move the weights by their gradients, as sharpness-aware minimisation does before its second gradient."""
    moves = [0.05 * p.grad for p in module.parameters()]
    with torch.no_grad():
        for parameter, move in zip(module.parameters(), moves, strict=True):
            parameter.add_(move)
    return moves


def return_and_step(module: Any, moves: list[Tensor], optimizer: Any) -> None:
    with torch.no_grad():
        for parameter, move in zip(module.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()


class Twice(Task):
    """Calls its closure again, as sharpness-aware minimisation does."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        moves = ascend(self)
        optimizer_closure()
        return_and_step(self, moves, optimizer)


@pytest.mark.parametrize("options", [{}, {"micro": 2}], ids=str)
def test_a_closure_that_is_called_twice(options):
    task = Twice()
    before = weights_of(task)
    with pytest.raises(UsageError, match=r"Twice\.optimizer_step computes the loss several times.*steps=1.*MacroStep"):
        fit(task, BATCHES, strategy=ExactStrategy(steps=3, **options))
    moved = relative_error(weights_of(task), before)
    assert moved < 0.1  # by the program's own hook, before the second call; no step was taken
    theirs, ours = Twice(), Twice()
    fit(theirs, BATCHES)
    fit(ours, BATCHES, strategy=ExactStrategy(**options))
    if options:
        assert relative_error(weights_of(ours), weights_of(theirs)) <= 1e-12
    else:
        assert all(torch.equal(weight, weights_of(ours)[name]) for name, weight in weights_of(theirs).items())


def test_sharpness_aware_minimisation_with_a_macro_step():
    """The cure that the error names."""

    def loss_fn(net: Any, batch: dict[str, Tensor]) -> Tensor:
        return reference.mean_loss(net, reference.Batch(batch["x"], batch["y"]))

    class Sharp(Task):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def on_train_start(self) -> None:
            self.mean = MacroStep(self.net, None, loss_fn, micro=2)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.mean(batch)
            moves = ascend(self.net)
            self.mean(batch)
            return_and_step(self.net, moves, self.optimizers().optimizer)

    task, whole = Sharp(), trainee()
    fit(task, BATCHES)
    for batch in BATCHES:
        for is_second in (False, True):
            whole.model.zero_grad()
            reference.mean_loss(whole.model, batch).backward()
            if not is_second:
                moves = ascend(whole.model)
        return_and_step(whole.model, moves, whole.optimizers[0])
    assert relative_error(weights_of(task.net), weights_of(whole.model)) <= 1e-12


def test_a_closure_that_is_called_without_a_step():
    """As Lightning's docs show it, for an optimizer that steps in every second batch."""

    class Sometimes(Task):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    theirs, ours = Sometimes(), Sometimes()
    fit(theirs, BATCHES)
    fit(ours, BATCHES, strategy=ExactStrategy())
    assert all(torch.equal(weight, weights_of(ours)[name]) for name, weight in weights_of(theirs).items())
    windows, whole = Sometimes(), trainee()
    fit(windows, BATCHES[:6], strategy=ExactStrategy(steps=2))  # a step at every window's end: batches 1, 3, 5
    reference.train_whole(whole, reference.cut(BATCHES[:6], steps=2))
    same_training(windows.own, whole)


# ------------------------------------------------------------------------------------------------- parts of a fit


class Later(BaseFinetuning):
    """All parameters are frozen until the second epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 0:
            self.make_trainable(module.net)


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 3}, {"steps": 3, "micro": 2}], ids=str)
def test_all_parameters_may_be_frozen_at_first(options):
    task = Task()
    fit(task, BATCHES, strategy=ExactStrategy(**options), callbacks=[Later()], max_epochs=2)
    whole = trainee()
    reference.train_whole(whole, reference.cut(BATCHES, BATCHES, steps=options["steps"]))
    same_training(task.own, whole)


def test_parameters_that_never_train_are_an_error():
    class Never(Later):
        def finetune_function(self, *_: Any) -> None:
            pass

    with pytest.raises(Exception, match="require"):
        fit(Task(), BATCHES, strategy=ExactStrategy(steps=3), callbacks=[Never()])


class Copyable(Loader):
    """No generator can be copied."""

    def __iter__(self) -> Any:
        return iter(self.batches)


class Copying(Callback):
    """Copies all callbacks, one of which holds the Trainer."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of Lightning's own data structures
                self.copies.append(copy.deepcopy([one for one in trainer.callbacks if one is not self]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.copies.append(copy.deepcopy(trainer.strategy))


@pytest.mark.parametrize("options", [{}, {"steps": 3}, {"steps": {0: 1, 1: 3}}, {"steps": 3, "micro": 2}], ids=str)
def test_callbacks_are_copied_in_a_hook(options):
    task, copying = Task(), Copying()
    callbacks = [copying, TQDMProgressBar(refresh_rate=0)]
    fit(
        task,
        BATCHES,
        strategy=ExactStrategy(**options),
        callbacks=callbacks,
        enable_progress_bar=True,
        max_epochs=2,
        load=Copyable,
    )
    assert len(copying.copies) == 3
    (bar,) = [one for one in copying.copies[0] if isinstance(one, TQDMProgressBar)]
    assert bar.trainer is not task.trainer
    assert isinstance(bar.trainer.strategy, ExactStrategy)
    assert bar.trainer.strategy.steps == ExactStrategy(**options).steps
    assert copying.copies[-1].result.step == task.trainer.global_step
    steps = options.get("steps", 1)
    windows = [window for e in (0, 1) for window in reference.cut(BATCHES, steps=steps if e or steps == 3 else 1)]
    if isinstance(steps, dict):
        windows = [*reference.cut(BATCHES, steps=1), *reference.cut(BATCHES, steps=3)]
    whole = trainee()
    reference.train_whole(whole, windows)
    same_training(task.own, whole)


def test_a_strategy_is_pickled_after_a_fit():
    """As with a progress bar, which holds the Trainer."""
    for steps in (1, 3):
        trainer = fit(Task(), BATCHES, strategy=ExactStrategy(steps=steps))
        again = pickle.loads(pickle.dumps(trainer.strategy))
        assert type(again) is type(trainer.strategy)
        assert again.result.step == trainer.global_step


class Reading(Callback):
    """The length of windows, wherever a hook may read it."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()
        for name in dir(Callback):
            if name.startswith("on_") or name in ("setup", "teardown"):
                setattr(self, name, self.read)

    def read(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.lengths.add(trainer.accumulate_grad_batches)


def test_the_length_of_windows_is_read_in_all_hooks_and_afterwards():
    reading, task = Reading(), Task()
    trainer = fit(task, BATCHES, val=BATCHES[:1], strategy=ExactStrategy(steps=3), callbacks=[reading])
    assert reading.lengths == {3}
    assert trainer.accumulate_grad_batches == 3
    with quiet():
        trainer.validate(task, Loader(BATCHES[:1]), verbose=False)
        trainer.fit(task, Loader(BATCHES))  # the length that the first fit has left is no mistake
    assert reading.lengths == {3}
    with quiet():
        trainer = Trainer(**OURS, devices=1, strategy=ExactStrategy(steps=3), max_epochs=2)
        task = Task()
        task.trainer = trainer
        task.train_dataloader = lambda: Loader(BATCHES)
        trainer._data_connector.attach_data(task)
        trainer.strategy.connect(task)
        assert trainer.accumulate_grad_batches == 3
        assert trainer.estimated_stepping_batches == 2 * 3


# ------------------------------------------------------------------------------------------------- checkpoints


def test_a_strategy_that_is_connected_saves_a_checkpoint(tmp_path):
    for attached in (False, True):
        trainer, task = Trainer(**OURS, devices=1, strategy=ExactStrategy(steps=3)), Task()
        if attached:
            task.trainer = trainer
        trainer.strategy.connect(task)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        saved = torch.load(tmp_path / "saved.ckpt")
        assert all(torch.equal(weight, saved["state_dict"][name]) for name, weight in task.state_dict().items())


class Keeping(Callback):
    """The checkpoints that hooks get."""

    def __init__(self) -> None:
        self.saved: list[set[str]] = []
        self.loaded: list[set[str]] = []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.saved.append(set(checkpoint))

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(set(checkpoint))


@pytest.mark.parametrize("steps", [1, 3])
def test_hooks_get_the_checkpoints_of_the_stock_trainer(tmp_path, steps):
    found = []
    for is_exact in (False, True):
        keeping, folder = Keeping(), tmp_path / str(is_exact)
        for options in ({}, {"ckpt_path": folder / "one.ckpt", "max_epochs": 2}):
            how = {"strategy": ExactStrategy(steps=steps)} if is_exact else {"accumulate_grad_batches": steps}
            callbacks = [keeping, ModelCheckpoint(folder, filename="one", every_n_train_steps=1)]
            fit(Task(), BATCHES, callbacks=callbacks, enable_checkpointing=True, **options, **how)
        found.append((keeping.saved, keeping.loaded))
    assert found[0] == found[1]
    assert found[0][1]


def test_a_checkpoint_of_weights_only_is_lightnings(tmp_path):
    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt", weights_only=True)

    fit(Task(), BATCHES, strategy=ExactStrategy(steps=3), callbacks=[Saving()])  # no warning inside a window
    assert "macrobatch" not in torch.load(tmp_path / "2.ckpt")


def test_numbers_of_steps_go_on_in_longer_windows(tmp_path):
    """A fit of one batch a step, which goes on with windows of three."""
    saving = ModelCheckpoint(tmp_path, filename="one")
    fit(Task(), BATCHES, strategy=ExactStrategy(), callbacks=[saving], enable_checkpointing=True)
    task = Task()
    trainer = fit(task, BATCHES, strategy=ExactStrategy(steps=3), ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    assert trainer.strategy.result.step == trainer.global_step == 7 + 3


def test_a_given_strategy_is_stock_in_one_process():
    trainer = fit(Task(), BATCHES, strategy=ExactStrategy(SingleDeviceStrategy("cpu")))
    assert trainer.strategy.result.micro_batches == 1
