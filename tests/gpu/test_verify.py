"""`verify` on a GPU: the same answers, in the precisions that are used there."""

import pytest
import torch
from torch import nn

from harness.loops import UNEQUAL, Loop, Statistics, batch_of, by_items, loss_fn, pieces
from harness.reference import WIDTH, Attention, Batch
from macrobatch import Accumulator, verify

pytestmark = pytest.mark.gpu


def on_the_gpu(batch: Batch) -> Batch:
    return Batch(batch.x.cuda(), batch.y.cuda())


@pytest.fixture
def batch() -> Batch:
    return on_the_gpu(batch_of(50, items=UNEQUAL))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Attention().to("cuda", dtype)


def autocast(dtype: torch.dtype):
    def loss(model, batch):
        with torch.autocast("cuda", dtype=dtype):
            return loss_fn(model, batch)

    return loss


def fused(model, batch):
    acc = Accumulator(model, torch.optim.AdamW(model.parameters(), fused=True), steps=4, max_norm=0.05)
    for micro in acc.batches(list(pieces(batch, 5))):
        acc.backward(*loss_fn(model, micro))
        acc.step()


def scaled(model, batch):
    """fp16 with a scaler, whose unscaling a fused optimizer does in its own kernel."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for micro in pieces(batch, 5):
        loss, _ = autocast(torch.float16)(model, micro)
        scaler.scale(loss * by_items([batch], micro)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


RIGHT = Loop(weight=by_items)
STEPS = {
    "float64": (torch.float64, loss_fn, None),
    "float32": (torch.float32, loss_fn, None),
    "bf16": (torch.bfloat16, loss_fn, None),
    "by hand": (torch.float32, loss_fn, RIGHT),
    "fused and clipped": (torch.float32, loss_fn, fused),
    "autocast": (torch.float32, autocast(torch.bfloat16), Loop(weight=by_items, loss=autocast(torch.bfloat16))),
    "autocast in the step alone": (torch.float32, loss_fn, Loop(weight=by_items, loss=autocast(torch.bfloat16))),
    "fp16 with a scaler": (torch.float32, loss_fn, scaled),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_false_alarm(name, batch):
    dtype, loss, step = STEPS[name]
    report = verify(model(dtype), loss, batch, step=step)
    assert report.ok, str(report)


def test_a_mistake_is_named(batch):
    report = verify(model(), loss_fn, batch, step=Loop(weight=lambda window, micro: 1 / 4))
    assert [cause.name for cause in report.causes] == ["mean of means", "short window"]


def test_random_numbers_of_the_device_are_put_back(batch):
    torch.manual_seed(0)
    dropping = Statistics(nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))).cuda()
    before, weights = torch.cuda.get_rng_state(), [p.clone() for p in dropping.parameters()]

    def step(model, batch):
        torch.rand(3, device="cuda")
        RIGHT(model, batch)

    report = verify(dropping, loss_fn, batch, step=step)
    assert report.ok, str(report)
    assert "dropout" in report.notes[0]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(torch.equal(p, weight) for p, weight in zip(dropping.parameters(), weights, strict=True))


@pytest.mark.filterwarnings("ignore")  # torch has several for whoever compiles
def test_compiled(batch):
    compiled = torch.compile(model())
    report = verify(compiled, loss_fn, batch)
    assert report.ok, str(report)
