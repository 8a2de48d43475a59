"""`ExactStrategy(cuda_graph=True)`: the micro-steps of Lightning's windows, recorded with what they log."""

import re
import warnings

import pytest
import torchmetrics

from harness import recorded
from harness.lightnings import Given, Words, fit, log_words, sentences, train_words
from harness.reference import relative_error, weights_of
from macrobatch import by_tokens
from macrobatch.lightning import ExactStrategy

DATA = sentences((3, 7), (2, 12), (4, 5), (3, 9), (1, 12), (2, 4))
WINDOWS = [DATA[:4], DATA[4:]] * 3
HERE = {"accelerator": "gpu" if recorded.DEVICE == "cuda" else "cpu", "max_epochs": 3}


class Counted(Words):
    """Counts the calls of its training_step, and those that are recorded."""

    def __init__(self):
        super().__init__()
        self.calls, self.recorded = 0, 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.recorded += recorded.is_recording()
        return super().training_step(batch, batch_idx)


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, recorded.said(caught)


@pytest.mark.parametrize("micro", [None, 2, by_tokens(24)], ids=str)
def test_micro_steps_with_what_they_log(tmp_path, captures, micro):
    module, (steps, whole) = Counted(), train_words(WINDOWS)
    strategy = ExactStrategy(steps=4, micro=micro, cuda_graph=True)
    (rows, _), warned = said(lambda: log_words(tmp_path, module, DATA, strategy=strategy, **HERE))
    assert relative_error(weights_of(module), weights_of(whole)) <= 1e-10
    assert warned == []
    assert module.recorded > 0
    if recorded.DEVICE == "cuda":
        assert module.calls - module.recorded <= 2  # of 18: the others are replayed
    assert [row["loss_step"] for row in rows if "loss_step" in row] == pytest.approx([loss for loss, _ in steps])


def test_a_module_that_logs_nothing(captures):
    class Silent(Counted):
        def log(self, *_, **__):
            pass

    module = Silent()
    strategy = ExactStrategy(steps=4, micro=3, cuda_graph=True)
    _, warned = said(lambda: fit(module, DATA, strategy=strategy, load=Given, **HERE))
    assert relative_error(weights_of(module), weights_of(train_words(WINDOWS)[1])) <= 1e-10
    assert warned == []
    assert module.recorded > 0


class LogsHost(Counted):
    def training_step(self, batch, batch_idx):
        self.log("rate", 0.1)
        return super().training_step(batch, batch_idx)


class Updates(Counted):
    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        self.seen.update(1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.total = self.seen.compute().item()


@pytest.mark.parametrize(("make", "why"), [(LogsHost, r"'rate'.*value of the host"), (Updates, "updates a metric")])
def test_what_cannot_be_recorded_runs_as_it_is(captures, make, why):
    module = make()
    strategy = ExactStrategy(steps=4, micro=3, cuda_graph=True)
    trainer, warned = said(lambda: fit(module, DATA, strategy=strategy, load=Given, **HERE))
    assert len(warned) == 1
    assert re.search(why, warned[0])
    assert relative_error(weights_of(module), weights_of(train_words(WINDOWS)[1])) <= 1e-10
    if make is Updates:
        assert module.total == 3 * (4 + 1)  # micro-batches of the two windows, in each epoch
    else:
        assert trainer.callback_metrics["rate"].item() == pytest.approx(0.1)


def test_without_a_device_that_records():
    module = Words()
    strategy = ExactStrategy(steps=4, cuda_graph=True)
    _, warned = said(lambda: fit(module, DATA, strategy=strategy, load=Given))
    assert len(warned) == 1
    assert "the model is on cpu" in warned[0]
    assert relative_error(weights_of(module), weights_of(train_words(WINDOWS[:2])[1])) <= 1e-10
