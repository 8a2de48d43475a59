"""How many calls into the library a micro-batch takes, and a close: the structure must not cost more than the work.

Calls are those of Python functions in `src/macrobatch`, generators that go on included. The bounds only go down.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import macrobatch
from macrobatch import Accumulator
from macrobatch._checks import steps

SOURCE = str(Path(macrobatch.__file__).parent)
MICRO_BATCH, CLOSE, SHARDED = 35, 60, 150


def calls_of(run):
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            names.append(f"{frame.f_code.co_filename[len(SOURCE) + 1 :]}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


class Loop:
    """A loop in steps: `micro` does the next micro-batch."""

    def __init__(self, model, width=4):
        self.model = model
        self.acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=4)
        self.batches = iter(self.acc.batches([torch.randn(2, width)] * 12))

    def micro(self, times=1):
        for _ in range(times):
            output = self.model(next(self.batches))
            self.acc.backward(nn.functional.mse_loss(output, torch.zeros_like(output)), items=2)
            self.acc.step()


def test_a_steady_micro_batch():
    loop = Loop(nn.Linear(4, 4))
    loop.micro(times=5)
    assert len(found := calls_of(loop.micro)) <= MICRO_BATCH, found


def test_the_step_that_closes_a_window(monkeypatch):
    monkeypatch.setattr(steps, "_guards", {})  # engines of other tests look at each step of an optimizer too
    loop = Loop(nn.Linear(4, 4))
    loop.micro(times=7)
    loop.acc.backward(loop.model(next(loop.batches)).square().mean(), items=2)
    assert len(found := calls_of(loop.acc.step)) <= CLOSE, found


@pytest.mark.filterwarnings("ignore")  # of torch, about one rank
def test_a_micro_batch_under_fully_shard(tmp_path):
    """With ten blocks, each of which has one hook."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    try:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
        for block in model:
            fully_shard(block)
        loop = Loop(fully_shard(model))
        loop.micro(times=5)
        assert len(found := calls_of(loop.micro)) <= SHARDED, found
    finally:
        dist.destroy_process_group()
