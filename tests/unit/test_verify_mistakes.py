"""Planted mistakes: each is found, and the first cause that is named is the right one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness import reference
from harness.loops import (
    UNEQUAL,
    batch_of,
    loss_fn,
    sequences,
)
from harness.reference import Attention, mean_loss
from judged.mistakes import MISTAKES
from judged.wrong_steps import (
    TWENTY_UNEQUAL,
    counted_before_the_shift,
    counting_positions,
    per_position,
)
from macrobatch import verify
from macrobatch.errors import BatchError


@pytest.mark.filterwarnings("ignore:a hook of the parameter")  # the library's own check tells of it too
@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_found_and_named(name):
    mistake = MISTAKES[name]
    report = mistake.verified()
    assert not report.ok
    assert tuple(cause.name for cause in report.causes) == mistake.causes, str(report)
    assert all(cause.evidence and cause.cure for cause in report.causes)


@pytest.mark.parametrize(
    ("step", "batch", "make"),
    [(counted_before_the_shift, TWENTY_UNEQUAL, Attention), (counting_positions, sequences(), per_position)],
)
def test_items_that_the_library_refuses_itself(step, batch, make):
    with pytest.raises(BatchError, match="not in proportion to what the losses are means over"):
        step(make().double(), batch)


def test_evidence_has_the_numbers():
    evidence = {
        name: MISTAKES[name].verified().causes[0].evidence
        for name in ("mean of means", "mean of means, loss alone", "short last window", "BatchNorm", "never closed")
    }
    assert "38 24 30 26" in evidence["mean of means"]  # its items
    assert "0.322 0.203 0.254 0.220" in evidence["mean of means, loss alone"]  # 38 / 118 and so on, without being told
    assert "The losses of the window are means over 38 24 30 26 items" in evidence["mean of means, loss alone"]
    assert "divided by 4, but the window has 2" in evidence["short last window"]
    assert "norm (BatchNorm1d)" in evidence["BatchNorm"]
    assert evidence["never closed"].startswith("2 micro-batches")


def test_a_model_of_one_number_is_told_apart_by_its_factor():
    """Every gradient fits every other up to a factor there."""
    model, batch = nn.Linear(1, 1, bias=False).double(), (torch.rand(10, 1).double(), torch.rand(10, 1).double())

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def step(model, batch):
        for x, y in zip(*(tensor.split(4) for tensor in batch), strict=True):
            (loss_of(model, (x, y)) / 3).backward()

    assert verify(model, loss_of, batch, step=step).causes[0].name == "mean of means"


def test_the_windows_are_told_apart():
    """Only the last one is wrong."""
    mistake = MISTAKES["short last window"]
    windows = verify(mistake.model(), loss_fn, mistake.batch, step=mistake.step).windows
    assert [window.samples for window in windows] == [20, 20, 10]
    assert [window.micro_batches for window in windows] == [4, 4, 2]
    assert [window.relative_error > 1e-12 for window in windows] == [False, False, True]
    assert windows[2].factor == pytest.approx(0.5)


def test_reference_is_that_of_the_test_vocabulary():
    """What verify takes for right is what the tests take for right."""
    found = {}

    def step(model, batch):
        model.zero_grad()
        mean_loss(model, batch).backward()
        found.update(reference.gradients_of(model))

    model = MISTAKES["mean of means"].model()
    assert verify(model, loss_fn, batch_of(items=UNEQUAL), step=step).max_relative_error == 0
    expected = reference.whole_batch_gradient(model, [batch_of(items=UNEQUAL)])
    assert reference.relative_error(found, expected) <= 1e-15
