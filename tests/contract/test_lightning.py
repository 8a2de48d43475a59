"""What `macrobatch.lightning` relies on in Lightning."""

import importlib
import inspect

import pytest
import torchmetrics
from lightning.pytorch import Callback, Trainer

from harness import reference
from harness.lightnings import OURS, Task, Unsized, fit, quiet
from macrobatch.lightning import ExactStrategy
from macrobatch.lightning.choosing import TOLD
from macrobatch.lightning.rehearsal import LEFT_OUT

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OVERRIDDEN = [name for name, value in vars(ExactStrategy).items() if inspect.isfunction(value) and name[:2] != "__"]
OWN = {"_check", "_is_at_last_batch", "_is_at_first_batch", "_is_stock", "_computed_again"}
OWN |= {"_windows_for", "_begin_windows", "_forget_fit", "_require_no_own_backward"}
NAMES = [name for name in OVERRIDDEN if name not in OWN]


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_our_own_are_none_of_lightnings(package):
    strategies = importlib.import_module(f"{package}.strategies")
    for kind in (strategies.SingleDeviceStrategy, strategies.DDPStrategy, strategies.ModelParallelStrategy):
        assert not [name for name in (*OWN, "_longest", "_package") if hasattr(kind, name)]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_overridden_takes_the_same_arguments(package, name):
    strategies = importlib.import_module(f"{package}.strategies")
    kind = strategies.Strategy if hasattr(strategies.Strategy, name) else strategies.DDPStrategy
    theirs = list(inspect.signature(getattr(kind, name)).parameters.values())
    ours = inspect.signature(getattr(ExactStrategy, name)).parameters
    rest = [p for p in ours.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = [p.name for p in ours.values() if p not in rest]
    assert [p.name for p in theirs][: len(named)] == named
    assert len(rest) == 2 or len(named) == len(theirs)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_that_are_looked_up(package):
    strategies = importlib.import_module(f"{package}.strategies")
    assert {"ddp", "ddp_fork"} <= set(strategies.StrategyRegistry.available_strategies())
    assert all(hasattr(strategies, name) for name in ("SingleDeviceStrategy", "ModelParallelStrategy"))
    assert hasattr(strategies.Strategy, "handles_gradient_accumulation")
    assert hasattr(importlib.import_module(f"{package}.plugins.precision").Precision, "backward")
    callbacks = importlib.import_module(f"{package}.callbacks")
    assert callbacks.GradientAccumulationScheduler({1: 2}).scheduling == {0: 1, 1: 2}
    module = importlib.import_module(package).LightningModule
    assert hasattr(module, "backward")
    assert {"name", "value", "batch_size", "reduce_fx"} <= inspect.signature(module.log).parameters.keys()
    assert isinstance(callbacks.StochasticWeightAveraging.swa_end, property)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_parts_of_a_trainer_that_a_rehearsal_replaces(package):
    with quiet():
        trainer = importlib.import_module(package).Trainer(**OURS)
    parts = {"state", "_logger_connector", "_loggers", "profiler", "callbacks", "limit_val_batches", "fit_loop"}
    assert parts | {"num_sanity_val_steps", "gradient_clip_val"} <= vars(trainer).keys()
    assert trainer._accelerator_connector.strategy is trainer.strategy
    assert not trainer.fit_loop._data_source.is_module()
    assert trainer.fit_loop._data_source.instance is None
    assert {"_data_fetcher", "epoch_loop"} <= vars(trainer.fit_loop).keys()
    steps = ("setup_data", "skip", "reset", "on_run_start", "on_advance_start")
    assert all(hasattr(type(trainer.fit_loop), name) for name in steps)
    assert hasattr(trainer.fit_loop.epoch_loop, "_build_kwargs")
    assert {"min_steps", "max_steps"} <= inspect.signature(type(trainer.fit_loop.epoch_loop)).parameters.keys()
    module = importlib.import_module(package).LightningModule
    assert all(hasattr(module, name) for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"))
    assert all(hasattr(importlib.import_module(f"{package}.callbacks"), name) for name in LEFT_OUT)
    assert hasattr(importlib.import_module(f"{package}.loggers.logger"), "DummyLogger")
    assert hasattr(importlib.import_module(f"{package}.profilers"), "PassThroughProfiler")
    assert hasattr(importlib.import_module(f"{package}.utilities.warnings"), "PossibleUserWarning")


def test_a_metric_is_updated_through_its_own_attributes():
    """So that a recording can refuse it before it has counted."""
    metric = torchmetrics.SumMetric()
    vars(metric).update(update=None, forward=None)
    for count in (metric, metric.update):
        with pytest.raises(TypeError, match="NoneType"):
            count(1.0)


def test_a_trainer_tells_all_before_it_asks_for_the_launcher():
    told, strategy = {}, ExactStrategy("auto", steps=2)
    kind = type(strategy)

    def configure(self):
        told.update({name: getattr(self, name) for name in ("accelerator", "precision_plugin", *TOLD)})
        kind._configure_launcher(self)

    strategy.__class__ = type("Asked", (kind,), {"_configure_launcher": configure})
    with quiet():
        Trainer(**OURS, strategy=strategy, devices=2, num_nodes=3, sync_batchnorm=True)
    assert told["num_nodes"] == 3
    assert len(told["parallel_devices"]) == 2
    assert all(told[name] is not None for name in told)


class Asking(Callback):
    """Whether the Trainer's own answer is that which we compute from its public names."""

    def __init__(self):
        self.answers = []

    def on_before_backward(self, trainer, module, loss):
        ours = not trainer.strategy._is_at_last_batch()
        self.answers.append((ours, trainer.fit_loop._should_accumulate()))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(
    "options", [{}, {"limit_train_batches": 5}, {"limit_train_batches": 0.7}, {"load": Unsized}], ids=str
)
def test_where_windows_close(steps, options):
    asking = Asking()
    fit(
        Task(),
        reference.batches([1] * 7),
        strategy=ExactStrategy(steps=steps),
        callbacks=[asking],
        max_epochs=2,
        **options,
    )
    assert asking.answers
    assert all(ours == theirs for ours, theirs in asking.answers)
