"""Losses of the whole batch beside the loops of others, and what `verify` says of them."""

import pytest
import torch
from torch import nn

from harness.joint import (
    CASES,
    CONTRAST,
    batch_of,
    checkpointed_gradient,
    sgd,
    step_of,
    towers,
    train_on,
)
from harness.joint_loops import gradcache, openclip, sentence_transformers
from harness.reference import relative_error
from macrobatch import Encoded, contrastive_loss, verify
from macrobatch.errors import BatchError

# ------------------------------------------------------------------------------------------------------ beside others


def ours(model, batch, *, micro, joint):
    train_on(model, micro=micro, joint=joint)(batch)


def errors_of(loop, dropout):
    """Of the towers, and the factor of the scale, against checkpointing with the same random numbers."""
    model, batch = towers(dropout=dropout), batch_of(16)
    torch.manual_seed(5)
    expected = checkpointed_gradient(model, CONTRAST, batch, 2)
    torch.manual_seed(5)
    found = step_of(model, lambda: loop(model, batch, micro=2, joint=CONTRAST.joint))
    factor = (found.pop("scale") / expected.pop("scale")).item()
    return relative_error(found, expected), factor


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("loop", [ours, gradcache, sentence_transformers])
def test_loops_that_are_right_in_one_process(loop, dropout):
    error, factor = errors_of(loop, dropout)
    assert error <= 1e-12
    assert factor == pytest.approx(1.000, abs=1e-12)


def test_openclip_counts_its_scale_in_every_micro_batch():
    error, factor = errors_of(openclip, 0.0)
    assert error <= 1e-12
    assert factor == pytest.approx(8.000, abs=1e-9)


def test_openclip_does_not_replay_masks():
    error, _ = errors_of(openclip, 0.1)
    assert error > 0.1


def test_verify_names_what_is_wrong():
    model, batch = towers(), batch_of(16)

    def step(loop):
        return lambda model, batch: loop(model, batch, micro=2, joint=CONTRAST.joint)

    report = verify(model, CONTRAST.loss_fn, batch, joint=CONTRAST.joint, step=step(openclip))
    assert [cause.name for cause in report.causes] == ["parameters counted several times"]
    assert "scale 8;" in report.causes[0].evidence.replace(")", "")
    for loop in (gradcache, sentence_transformers, ours):
        assert verify(model, CONTRAST.loss_fn, batch, joint=CONTRAST.joint, step=step(loop)).ok

    def halved(model, batch):
        gradcache(model, batch, micro=2, joint=lambda m, e: CONTRAST.joint(m, e) / 3)

    assert verify(model, CONTRAST.loss_fn, batch, joint=CONTRAST.joint, step=halved).causes[0].name == "constant factor"

    def first_only(model, batch):
        gradcache(model, {key: rows[:8] for key, rows in batch.items()}, micro=2, joint=CONTRAST.joint)

    assert verify(model, CONTRAST.loss_fn, batch, joint=CONTRAST.joint, step=first_only).causes[0].name == "unexplained"


def one_cause(model, joint=CONTRAST.joint, loss_fn=CONTRAST.loss_fn, step=None, **options):
    report = verify(model, loss_fn, batch_of(12), joint=joint, step=step, **options)
    assert len(report.causes) == 1, report
    return report.causes[0]


def loop(parts, seed_of):
    """A step over these parts of the batch: each encodes again, and begins its backward with what `seed_of` says."""

    def step(model, batch):
        optimizer = sgd(model)
        for part in parts:
            micro = {key: rows[part] for key, rows in batch.items()}
            torch.autograd.backward(*seed_of(model, micro, batch, part))
        optimizer.step()
        optimizer.zero_grad()

    return step


THIRDS = [slice(0, 4), slice(4, 8), slice(8, 12)]


@pytest.mark.filterwarnings("ignore:a BatchNorm in training mode")
def test_verify_names_statistics_over_the_batch():
    cause = one_cause(towers(norm=nn.BatchNorm1d), micro=5)
    assert cause.name == "statistics over the batch"
    assert "image.1 (BatchNorm1d)" in cause.evidence


def test_verify_names_randomness():
    own = torch.Generator()

    def joint(model, encoded):
        return CONTRAST.joint(model, encoded) * (1 + torch.rand(len(encoded.image), generator=own)).std()

    assert one_cause(towers(), joint).name == "random numbers that differ"


def test_verify_takes_no_joint_for_wrong_that_draws():
    def joint(model, encoded):
        return CONTRAST.joint(model, encoded) * torch.rand(())

    assert verify(towers(), CONTRAST.loss_fn, batch_of(12), joint=joint, micro=5).ok


def test_verify_names_losses_of_each_micro_batch():
    def seed_of(model, micro, batch, part):
        return (CONTRAST.joint(model, CONTRAST.loss_fn(model, micro)) / 3,)

    cause = one_cause(towers(), step=loop(THIRDS, seed_of))
    assert cause.name == "loss that couples samples"
    assert "joint=" in cause.cure


def test_verify_names_samples_left_out():
    def seed_of(model, micro, batch, part):
        rows = [row.detach().requires_grad_() for row in model(batch)[:2]]
        found = torch.autograd.grad(contrastive_loss(*rows, scale=3.0), rows)
        return model(micro)[:2], [gradient[part] for gradient in found]

    cause = one_cause(
        towers(), lambda m, e: contrastive_loss(e.image, e.text, scale=3.0), step=loop(THIRDS[:2], seed_of)
    )
    assert cause.name == "samples left out"
    assert "4 of 12 samples" in cause.evidence


def test_verify_names_items_that_do_not_fit():
    def loss_fn(model, micro):
        image, text, _ = model(micro)
        return Encoded(image.square().mean(), (micro["label"] == 1).sum(), image=image, text=text)

    with pytest.raises(BatchError, match="not in proportion to what the losses are means over"):
        verify(towers(), loss_fn, batch_of(9), joint=lambda model, encoded: encoded.image.sum() * 0, micro=5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_verify_our_own_step(name, dtype):
    case = CASES[name]
    report = verify(towers(dtype, dropout=0.1), case.loss_fn, batch_of(9, dtype=dtype), joint=case.joint)
    assert report.ok, report


def test_verify_says_to_use_joint():
    model, batch = towers(), batch_of(9)
    report = verify(model, CONTRAST.whole, batch, micro=3)
    assert report.causes[0].name == "loss that couples samples"
    assert "joint=" in report.causes[0].cure
