"""`verify` of a Trainer or a module of Lightning as it stands."""

import threading

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from harness import reference
from harness.lightnings import OURS, Loader, Task, fit, quiet
from harness.reference import Counting, gradients_of, relative_error, trainee, weights_of
from macrobatch import by_count, verify
from macrobatch.errors import UsageError
from macrobatch.lightning import ExactStrategy

BATCHES = reference.batches((3, 1, 4, 2, 5, 2, 3))
EQUAL = [reference.batch(3, seed=i, items=8) for i in range(4)]


@pytest.fixture(autouse=True)
def quietly():
    with quiet():
        yield


class Owning(Task):
    """A module with its data."""

    data = BATCHES

    def train_dataloader(self):
        return Loader(self.data)


def attached(module=None, **options):
    module = module or Owning()
    module.trainer = Trainer(**OURS | {"devices": 1, "max_epochs": 1} | options)
    return module


def causes(report):
    return [cause.name for cause in report.causes]


def test_the_stock_trainer_with_means_over_tokens():
    report = verify(attached(accumulate_grad_batches=4))
    assert not report.ok
    assert causes(report) == ["mean of means"]
    assert "9 4 11 8" in str(report)


class MeanOverPositions(LightningModule):
    """Padded positions count, too: the loss of a sample depends on the width of its batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).double()

    def training_step(self, batch, _):
        tokens = batch["input_ids"]
        each = nn.functional.cross_entropy(self.net(tokens).transpose(1, 2), tokens, reduction="none", ignore_index=0)
        return each.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        texts = [torch.randint(1, 50, (2 + 7 * n % 12,)) for n in range(16)]
        return DataLoader(texts, batch_size=4, collate_fn=padded)


def padded(texts):
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


def test_a_loss_that_depends_on_padding():
    """Each batch is run in its own width, as in a fit."""
    assert not verify(attached(MeanOverPositions(), strategy=ExactStrategy(steps=4))).ok
    assert verify(attached(MeanOverPositions(), strategy=ExactStrategy(steps=4, micro=4))).ok


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


def test_exactly_without_items():
    assert verify(attached(Owning(counting=Counting("none")), strategy=ExactStrategy(steps=4))).ok


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_in_the_precision_of_the_trainer(precision):
    module = Owning(dtype=torch.float32)
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

    trainer = Trainer(**OURS, devices=1, max_epochs=1, accumulate_grad_batches=4)
    trainer.fit(Task(), datamodule=Data())
    assert causes(verify(trainer)) == ["mean of means"]


def test_the_other_package():
    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = trainee().model

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        training_step, train_dataloader = Task.training_step, Owning.train_dataloader
        counting, data = reference.BY_COUNT, BATCHES

    other = Other()
    other.trainer = pytorch_lightning.Trainer(**OURS, accumulate_grad_batches=4)
    assert causes(verify(other)) == ["mean of means"]


# ------------------------------------------------------------------------------------------------- as the Trainer does


class Even(Owning):
    """Batches of equally many items, so that the stock Trainer is right."""

    data = EQUAL
    scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.counting.loss(self.net, reference.Batch(batch["x"], batch["y"]), batch_idx) * self.scale


def multiply(module, factor):
    for parameter in module.parameters():
        parameter.grad.mul_(factor)


class ClearsAfterBackward(Even):
    def on_after_backward(self):
        self.zero_grad()


class ClearsBeforeBatches(Even):
    def on_train_batch_start(self, batch, batch_idx):
        self.zero_grad()


class ClearsInside(Even):
    def training_step(self, batch, batch_idx):
        self.zero_grad()
        return super().training_step(batch, batch_idx)


class DividesBeforeStep(Even):
    def on_before_optimizer_step(self, optimizer):
        multiply(self, 0.25)


class DividesInClipping(Even):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        multiply(self, 0.25)


class DividesInBackward(Even):
    def backward(self, loss):
        (loss / 4).backward()


class DoublesInStep(Even):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        closure()
        multiply(self, 2.0)
        optimizer.step()


class ClipsEachBatch(Callback):
    def on_after_backward(self, trainer, module):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


WRONG = {
    ClearsAfterBackward: "parameters that received nothing",
    ClearsBeforeBatches: "gradients cleared inside the window",
    ClearsInside: "gradients cleared inside the window",
    DividesBeforeStep: "divided twice",
    DividesInClipping: "divided twice",
    DividesInBackward: "divided twice",
    DoublesInStep: "constant factor",
}


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_hooks_that_spoil_the_gradient(make):
    assert causes(verify(attached(make(), accumulate_grad_batches=4))) == [WRONG[make]]
    assert causes(verify(fit(make(), EQUAL, accumulate_grad_batches=4))) == [WRONG[make]]


def test_callbacks_and_limits_of_the_trainer():
    report = verify(attached(Even(), accumulate_grad_batches=4, callbacks=[ClipsEachBatch()]))
    assert causes(report) == ["clip per micro-batch"]
    assert not verify(attached(Even(), accumulate_grad_batches=4, limit_train_batches=3)).ok
    assert verify(attached(Even(), accumulate_grad_batches=2, limit_train_batches=3)).ok
    assert verify(attached(Even(), accumulate_grad_batches=1, callbacks=[GradientAccumulationScheduler({0: 4})])).ok


@pytest.mark.parametrize("how", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"])
def test_what_the_trainer_clips_is_compared_before(how):
    report = verify(attached(Even(), accumulate_grad_batches=4, gradient_clip_val=1e-3, **how))
    assert report.ok
    assert report.notes == ("gradients were compared before they are clipped (gradient_clip_val=0.001)",)
    assert not verify(attached(Even(), accumulate_grad_batches=5, gradient_clip_val=1e-3, **how)).ok


class Made(Owning):
    """Everything comes with the hooks of a fit."""

    def __init__(self):
        super().__init__()
        self.later, self.net = self.net, None

    def setup(self, stage):
        self.factor = 2.0

    def configure_model(self):
        if self.net is None:
            self.net = self.later.double()

    def on_train_start(self):
        self.factor *= 2

    def on_train_epoch_start(self):
        self.factor *= 2

    def on_train_batch_start(self, batch, batch_idx):
        self.batch_factor = self.factor

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output | {"loss": output["loss"] * self.batch_factor}


class MadeData(LightningDataModule):
    def setup(self, stage):
        self.data = BATCHES

    def train_dataloader(self):
        return Loader(self.data)


def test_what_the_hooks_of_a_fit_make():
    module = attached(Made(), accumulate_grad_batches=4)
    assert causes(verify(module)) == ["mean of means"]
    assert module.net is None
    assert not hasattr(module, "factor")
    assert verify(attached(Made(), strategy=ExactStrategy(steps=4))).ok
    module = attached(Task(), strategy=ExactStrategy(steps=4))
    module.trainer.datamodule = MadeData()
    assert verify(module).ok
    assert not hasattr(module.trainer.datamodule, "data")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_the_reference_is_a_float64_copy(precision):
    for options in ({"strategy": ExactStrategy(steps=4)}, {"accumulate_grad_batches": 4}):
        module = Even(dtype=torch.float32)
        report = verify(attached(module, precision=precision, **options))
        assert report.ok
        assert report.notes == ()
        assert report.reference.startswith("one big batch in float64")
        assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


class Witness(Callback):
    """Counts what it sees, and holds something that cannot be copied."""

    def __init__(self, held=None):
        self.seen, self.held = 0, held

    def on_train_batch_end(self, trainer, module, *_):
        self.seen += 1


def test_the_trainer_is_left_as_it_was(tmp_path):
    witness, logger = Witness(), CSVLogger(tmp_path)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=1)
    options = {"callbacks": [witness, checkpoint], "logger": logger, "enable_checkpointing": True}
    module = attached(Even(), accumulate_grad_batches=4, **options)
    module.trainer.limit_val_batches = 3
    before = dict(vars(module.trainer))
    strategy = module.trainer.strategy
    assert verify(module).ok
    assert vars(module.trainer) == before
    assert module.trainer.strategy is strategy
    assert module.trainer.strategy.lightning_module is None
    assert witness.seen == module.trainer.global_step == 0
    assert list(tmp_path.iterdir()) == []
    assert verify(attached(Even(), callbacks=[Witness(held=threading.Lock())])).ok


def test_one_of_several_devices():
    for options in ({"strategy": "ddp"}, {"strategy": ExactStrategy("ddp")}):
        report = verify(attached(Even(), devices=2, **options))
        assert report.ok
        assert any("one of its 2 ranks" in note for note in report.notes)


def test_two_optimizers_are_lightnings_error():
    class Two(Even):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        verify(attached(Two()))


# ------------------------------------------------------------------------------------------------- what is missing


def refuses(given, match):
    with pytest.raises(UsageError, match=match):
        verify(given)


def test_what_is_missing():
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

    class Fetching(Owning):
        def training_step(self, dataloader_iter):
            return None

    class Lazy(Owning):
        def __init__(self):
            super().__init__()
            self.lazy = torch.nn.LazyLinear(1)

    refuses(attached(Lazy()), "Lazy have no shape yet")
    refuses(attached(Owning(), limit_train_batches=0), "no batch to train on")
    refuses(attached(Fetching()), "takes a dataloader_iter")
    refuses(attached(Manual()), "automatic_optimization=False")
    refuses(attached(Several()), "several loaders")

    class Empty(Owning):
        def train_dataloader(self):
            return DataLoader([])

    refuses(attached(Nothing()), "returned no loss")
    refuses(attached(Empty()), "has no batch")
