"""`verify` of a Trainer or a module of Lightning as it stands."""

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from harness import reference
from harness.lightnings import OURS, Loader, Task, fit, quiet
from harness.reference import Counting, gradients_of, relative_error, trainee, weights_of
from macrobatch import by_count, verify
from macrobatch.errors import UsageError
from macrobatch.lightning import ExactStrategy

BATCHES = reference.batches((3, 1, 4, 2, 5, 2, 3))
EQUAL = [reference.batch(3, seed=i, items=8) for i in range(4)]


class Owning(Task):
    """A module with its data."""

    data = BATCHES

    def train_dataloader(self):
        return Loader(self.data)


def attached(module=None, **options):
    module = module or Owning()
    with quiet():
        module.trainer = Trainer(**OURS, devices=1, max_epochs=1, **options)
    return module


def causes(report):
    return [cause.name for cause in report.causes]


def test_the_stock_trainer_with_means_over_tokens():
    report = verify(attached(accumulate_grad_batches=4))
    assert not report.ok
    assert causes(report) == ["mean of means"]
    assert "9 4 11 8" in str(report)


def test_the_stock_trainer_in_a_short_window():
    report = verify(attached(accumulate_grad_batches=9))
    assert causes(report) == ["mean of means", "short window"]


def test_the_stock_trainer_where_it_is_right():
    module = Owning(counting=Counting("none"))
    module.data = EQUAL
    assert verify(attached(module, accumulate_grad_batches=4)).ok
    assert verify(attached()).ok  # windows of one batch


@pytest.mark.parametrize("options", [{}, {"micro": 3}, {"micro": by_count(2)}, {"micro": "auto"}, {"cuda_graph": True}])
@pytest.mark.parametrize("steps", [4, 9, {0: 3, 1: 1}], ids=str)
def test_exactly(steps, options):
    assert verify(attached(strategy=ExactStrategy(steps=steps, **options))).ok


def test_exactly_but_without_items():
    report = verify(attached(Owning(counting=Counting("none")), strategy=ExactStrategy(steps=4)))
    assert causes(report) == ["mean of means"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_in_the_precision_of_the_trainer(precision):
    module = Owning(dtype=torch.float32)
    with quiet():
        module.trainer = Trainer(**OURS, devices=1, precision=precision, strategy=ExactStrategy(steps=4))
    assert verify(module).ok
    module.trainer = Trainer(**OURS, devices=1, precision=precision, accumulate_grad_batches=4)
    assert not verify(module).ok


def test_after_a_fit_and_without_a_trace():
    task = Task()
    trainer = fit(task, BATCHES, accumulate_grad_batches=4)
    weights, gradients, metrics = weights_of(task), gradients_of(task), dict(trainer.callback_metrics)
    random = torch.get_rng_state()
    assert causes(verify(trainer)) == causes(verify(task)) == ["mean of means"]
    assert relative_error(weights_of(task), weights) == 0
    assert relative_error(gradients_of(task), gradients) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.callback_metrics == metrics
    assert "log" not in vars(task)
    assert verify(fit(Task(), BATCHES, strategy=ExactStrategy(steps=4))).ok


def test_the_data_of_a_data_module():
    class Data(LightningDataModule):
        def train_dataloader(self):
            return Loader(BATCHES)

    with quiet():
        trainer = Trainer(**OURS, devices=1, max_epochs=1, accumulate_grad_batches=4)
        trainer.fit(Task(), datamodule=Data())
    assert causes(verify(trainer)) == ["mean of means"]


def test_the_other_package():
    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = trainee().model

        training_step, train_dataloader = Task.training_step, Owning.train_dataloader
        counting, data = reference.BY_COUNT, BATCHES

    other = Other()
    with quiet():
        other.trainer = pytorch_lightning.Trainer(**OURS, accumulate_grad_batches=4)
    assert causes(verify(other)) == ["mean of means"]


# ------------------------------------------------------------------------------------------------- what is missing


def refuses(given, match):
    with pytest.raises(UsageError, match=match):
        verify(given)


def test_what_is_missing():
    with quiet():
        refuses(Trainer(**OURS), r"has no module yet.*after trainer\.fit\(module\).*module\.trainer = trainer")
    refuses(Owning(), r"Owning has no Trainer.*module\.trainer = trainer")
    refuses(attached(Task()), r"Task has no training data: define its train_dataloader\(\)")


def test_what_cannot_be_verified():
    class Manual(Owning):
        automatic_optimization = False

    class Several(Owning):
        def train_dataloader(self):
            return {"a": Loader(BATCHES), "b": Loader(BATCHES)}

    class Nothing(Owning):
        def training_step(self, batch, batch_idx):
            return None

    refuses(attached(Manual()), "automatic_optimization=False")
    refuses(attached(Several()), "several loaders")

    class Empty(Owning):
        def train_dataloader(self):
            return DataLoader([])

    refuses(attached(Nothing()), "returned no loss")
    refuses(attached(Empty()), "has no batch")
