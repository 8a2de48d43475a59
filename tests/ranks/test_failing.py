"""What cannot work is said at once, on every rank; and a rank that fails takes the job with it, in seconds.

Run as a program by torchrun, this file is a training in which rank 1 fails.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness.ranks import (
    Outcome,
    Plan,
    Tower,
    all_refused,
    be_a_rank,
    connect,
    ddp,
    disconnect,
    fsdp1,
    fsdp2,
    made,
    optimizer_for,
    share,
    torchrun,
)
from harness.reference import mean_loss
from macrobatch import Accumulator

SCENARIOS: dict[str, Callable[[], Outcome]] = {}


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Run this on the ranks, under its name."""
    SCENARIOS[function.__name__] = function
    return function


def train(acc: Accumulator, model: nn.Module, count: int = 8) -> Outcome:
    for _, micro in acc.batches(share(dist.get_rank(), count)):
        acc.backward(mean_loss(model, micro), items=micro.items)
        acc.step()
    return {"steps": acc.optimizer_step}


# ---------------------------------------------------------------------------------------- models that do not fit


def pair(first: Callable[..., nn.Module], second: Callable[..., nn.Module]) -> Outcome:
    models = first(made()), second(made(Tower))
    Accumulator(models, [optimizer_for(model) for model in models], steps=2)
    return {}


@scenario
def ddp_and_fsdp2() -> Outcome:
    return pair(ddp, fsdp2)


@scenario
def fsdp1_and_fsdp2() -> Outcome:
    return pair(fsdp1, fsdp2)


@scenario
def ddp_and_plain() -> Outcome:
    return pair(ddp, lambda model: model)


@scenario
def plain() -> Outcome:
    model = made()
    return train(Accumulator(model, optimizer_for(model), steps=2), model)


@scenario
def gathered_ddp() -> Outcome:
    model = ddp(made())
    return train(Accumulator(model, optimizer_for(model), steps=2, gather="window"), model)


@scenario
def gathered_fsdp1() -> Outcome:
    model = fsdp1(made())
    return train(Accumulator(model, optimizer_for(model), steps=2, gather="window"), model)


@scenario
def process_group_of_another_kind() -> Outcome:
    model = ddp(made())
    return train(Accumulator(model, optimizer_for(model), steps=2, process_group="data"), model)


@scenario
def optimizer_from_before() -> Outcome:
    """It holds the parameters that fully_shard has replaced since, and would step into the void."""
    model = made()
    optimizer = optimizer_for(model)
    return train(Accumulator(fsdp2(model), optimizer, steps=2), model)


@scenario
def left_out_of_fully_shard() -> Outcome:
    """Each rank would step this one by its own gradient."""
    model = made()
    fully_shard(model, ignored_params={model.head.bias})
    return train(Accumulator(model, optimizer_for(model), steps=2), model)


REFUSED = {
    "ddp_and_fsdp2": ("DistributedDataParallel",),
    "fsdp1_and_fsdp2": ("FullyShardedDataParallel",),
    "ddp_and_plain": ("DistributedDataParallel",),
    "plain": ("2 ranks",),
    "gathered_ddp": ("gather", "FSDP2"),
    "gathered_fsdp1": ("gather", "FSDP2"),
    "process_group_of_another_kind": ("process_group",),
    "optimizer_from_before": ("optimizer",),
    "left_out_of_fully_shard": ("head.bias", "fully_shard", "synchronise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(on_two_ranks, name):
    all_refused(on_two_ranks[name], *REFUSED[name])


# ----------------------------------------------------------------------------------------- wrapped at the wrong time


def made_before_the_ranks() -> tuple[nn.Module, Accumulator]:
    """An Accumulator from a time when there was one process, for all that it could see."""
    disconnect()
    model = made()
    acc = Accumulator(model, optimizer_for(model), steps=2)
    connect(Path(os.environ["RANKS_PIDS"], f"again-{os.environ['TORCHELASTIC_RUN_ID']}-{made_before_the_ranks.calls}"))
    made_before_the_ranks.calls += 1
    return model, acc


made_before_the_ranks.calls = 0


@scenario
def sharded_afterwards() -> Outcome:
    model, acc = made_before_the_ranks()
    fully_shard(model)
    return train(acc, model)


@scenario
def wrapped_in_ddp_afterwards() -> Outcome:
    model, acc = made_before_the_ranks()
    return train(acc, ddp(model))


@pytest.mark.parametrize("name", ["sharded_afterwards", "wrapped_in_ddp_afterwards"])
def test_a_model_wrapped_after_the_accumulator_was_made(on_two_ranks, name):
    all_refused(on_two_ranks[name])
    assert any(word in on_two_ranks[name][0]["message"] for word in ("after", "since", "before", "first"))


# ----------------------------------------------------------------------------------------------------- static graphs


@scenario
def static_graph() -> Outcome:
    model = ddp(made(), static_graph=True)
    return train(Accumulator(model, optimizer_for(model), steps=2), model)


STATIC = Plan(counts=(9,), steps=0)


@scenario
def static_graph_synchronised_first() -> Outcome:
    return STATIC.run(ddp, {"static_graph": True}, steps=lambda step: 1 if step == 0 else 4)


def test_a_static_graph_that_accumulates_in_its_first_iteration(on_two_ranks):
    all_refused(on_two_ranks["static_graph"], "static_graph")


def test_a_static_graph_that_does_not(on_two_ranks):
    STATIC.check_numbers(on_two_ranks["static_graph_synchronised_first"])
    assert len(on_two_ranks["static_graph_synchronised_first"][0]["loss"]) == 3


# ------------------------------------------------------------------------------------------- a rank that fails alone


class BadDataError(Exception):
    pass


def failing(how: str) -> None:
    """Two ranks with the time-outs that torch gives them. Rank 1 fails in the middle of the second window."""
    be_a_rank()
    dist.init_process_group("gloo")
    model = {"ddp": ddp, "fsdp2": fsdp2}[how](made())
    acc = Accumulator(model, optimizer_for(model), steps=4)
    for number, micro in acc.batches(share(dist.get_rank(), 8)):
        if dist.get_rank() == 1 and number == 5:
            Path("failed").write_text(str(time.time()))
            raise BadDataError("the sixth record of rank 1 is broken")
        acc.backward(mean_loss(model, micro), items=micro.items)
        acc.step()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_rank_that_raises_ends_the_job_with_its_error_on_screen(tmp_path, how):
    launch = torchrun(2, __file__, how, directory=tmp_path, seconds=90)
    assert launch.exit_code != 0
    assert "BadDataError: the sixth record of rank 1 is broken" in launch.output
    assert time.time() - float((tmp_path / "failed").read_text()) < 15
    assert launch.seconds < 60  # with all that starting takes


if __name__ == "__main__":
    failing(sys.argv[1])
