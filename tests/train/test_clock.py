"""Where the time went. No test asserts how long anything took: only what it is counted as, and that it adds up."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness import ranks
from harness.gpu import no_host_reads
from macrobatch import MacroStep
from macrobatch.train.clock import PARTS, Clock

CPU = torch.device("cpu")
NAP = 0.2  # seconds that something sleeps at least: all that is asserted are such lower bounds


class Sleepy(nn.Module):
    """Sleeps in its forward, and as long as it is told in its backward."""

    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, x):
        time.sleep(self.forward_seconds)
        y = self.linear(x)
        y.register_hook(lambda _: time.sleep(self.backward_seconds))
        return y


def loss_fn(model, batch):
    return model(batch).square().mean()


def watched(model, clock, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(getattr(model, "update_seconds", 0)))
    train = MacroStep(model, optimizer, loss_fn, micro=2, **options)
    clock.watch(train)
    return train


def slow_update():
    model = Sleepy()
    model.update_seconds = NAP
    return model


def slow_collate(samples):
    time.sleep(NAP)
    return torch.stack(samples)


@pytest.mark.parametrize(
    ("model", "collate", "part"),
    [
        (Sleepy(forward=NAP), None, "forward"),
        (Sleepy(backward=NAP), None, "backward"),
        (slow_update(), None, "update"),
        (Sleepy(), slow_collate, "data"),
    ],
    ids=["forward", "backward", "update", "data"],
)
def test_time_is_counted_where_it_was_spent(model, collate, part):
    clock = Clock(CPU)
    train = watched(model, clock, collate=collate)
    samples = torch.randn(3, 4)
    clock.lap()
    train(samples if collate is None else list(samples))
    lap = clock.lap()
    parts = lap.parts()
    assert parts[part] >= NAP
    assert sum(parts.values()) == pytest.approx(lap.seconds, abs=1e-9)


def test_a_lap_has_only_its_own_time():
    clock = Clock(CPU)
    with clock.part("data"):
        time.sleep(NAP)
    first, second = clock.lap(), clock.lap()
    assert first.parts()["data"] >= NAP
    assert second.parts()["data"] == 0
    assert list(first.parts()) == list(PARTS)


def test_a_lap_may_end_inside_a_part():
    clock = Clock(CPU)
    with clock.part("saving"):
        time.sleep(NAP)
        first = clock.lap()
        time.sleep(NAP)
    second = clock.lap()
    assert min(first.parts()["saving"], second.parts()["saving"]) >= NAP


def test_what_is_done_aside_is_not_in_the_seconds_of_a_step():
    clock = Clock(CPU)
    with clock.aside("validation"):
        time.sleep(NAP)
    lap = clock.lap()
    assert lap.parts()["validation"] >= NAP
    assert lap.seconds <= sum(lap.parts().values()) - NAP
    with clock.part("saving"):
        time.sleep(NAP)
    assert clock.lap().seconds >= NAP


def test_an_inner_part_takes_its_time_from_the_outer():
    clock = Clock(CPU)
    with clock.part("data"), clock.part("communication"):
        time.sleep(NAP)
    lap = clock.lap()
    assert lap.parts()["communication"] >= NAP
    assert lap.parts()["data"] <= lap.seconds - NAP


def test_an_error_leaves_no_part_open():
    class Failing(Sleepy):
        def forward(self, x):
            raise ValueError("no")

    clock = Clock(CPU)
    train = watched(Failing(), clock)
    with pytest.raises(ValueError, match="no"):
        train(torch.randn(3, 4))
    clock.lap()
    time.sleep(NAP)
    assert clock.lap().parts()["other"] >= NAP


def test_a_watched_step_computes_the_same():
    def trained(watch):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro=2, max_norm=1.0)
        if watch:
            Clock(CPU).watch(train)
        for _ in range(3):
            train(torch.randn(5, 4))
        return model.weight

    assert torch.equal(trained(True), trained(False))


# ------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_on_a_gpu_nobody_waits_for_the_clock():
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train = MacroStep(model, optimizer, loss_fn, micro=64)
    clock, batch = Clock(device), torch.randn(256, 512, device=device)
    clock.watch(train)
    for _ in range(3):
        train(batch)
    clock.lap()
    with no_host_reads():
        train(batch)
        lap = clock.lap()
    parts = lap.parts()
    assert min(parts[name] for name in ("forward", "backward", "update")) > 0
    assert parts["communication"] < 1e-3  # two events with nothing in between


# ------------------------------------------------------------------------------------------------------ on two ranks


def waiting(wrap, *, slow_backward=0.0, slow_forward=0.0, samples=3):
    """The parts of a window in which rank 1 is slow somewhere."""
    is_slow = dist.get_rank() == 1
    torch.manual_seed(0)
    model = Sleepy(slow_forward * is_slow, slow_backward * is_slow)
    clock = Clock(CPU)
    train = watched(wrap(model), clock)
    train(torch.randn(samples, 4))  # the first one connects the ranks
    clock.lap()
    train(torch.randn(samples, 4))
    return clock.lap().parts()


def sharded(model):
    fully_shard(model.linear)
    return fully_shard(model)


def agreeing():
    """Rank 1 comes late to a window."""
    clock = Clock(CPU)
    train = watched(DistributedDataParallel(Sleepy()), clock)
    train(torch.randn(3, 4))
    clock.lap()
    with clock.part("data"):
        time.sleep(NAP * dist.get_rank())
    train(torch.randn(3, 4))
    return clock.lap().parts()


SCENARIOS = {
    "ddp": lambda: waiting(DistributedDataParallel, slow_backward=NAP),
    "ddp, forward": lambda: waiting(DistributedDataParallel, slow_forward=NAP),
    "fsdp": lambda: waiting(sharded, slow_backward=NAP),
    "late": agreeing,
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return ranks.run(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("clock"))


@pytest.mark.parametrize(
    ("scenario", "of_the_slow"),
    [("ddp", "backward"), ("ddp, forward", "forward"), ("fsdp", "backward"), ("late", "data")],
)
def test_a_rank_that_waits_for_another_communicates(on_two_ranks, scenario, of_the_slow):
    quick, slow = ranks.all_well(on_two_ranks[scenario])
    quick, slow = ({name: outcome[name] for name in PARTS} for outcome in (quick, slow))
    assert quick["communication"] >= NAP / 4  # it may have come late itself
    assert slow[of_the_slow] >= NAP
