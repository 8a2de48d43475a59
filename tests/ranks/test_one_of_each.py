"""One case of each backend on two ranks, in seconds: what `make quick` has of the tests of ranks."""

from functools import partial

import pytest

from harness.ranks import Plan, ddp, fsdp1, fsdp2
from harness.whole_batches import exact, train

PLAN = Plan(counts=((5, 3),), steps=2, max_norm=0.05)
MODES = {
    "ddp": (ddp, {"sync": "window"}),
    "ddp at every micro-batch": (ddp, {"sync": "micro"}),
    "fsdp1": (fsdp1, {}),
    "fsdp2": (fsdp2, {"gather": "window"}),
    "fsdp2 at every micro-batch": (fsdp2, {"sync": "micro"}),
}
FILLED = [(3, 5), (4, 0), (0, 0), (2, 2)]  # for each window: how many samples each rank has
SCENARIOS = {name: partial(PLAN.run, wrap, **options) for name, (wrap, options) in MODES.items()}
SCENARIOS |= {f"whole batches, {wrap.__name__}": partial(train, FILLED, wrap, "auto") for wrap in (ddp, fsdp2)}


@pytest.mark.parametrize("mode", MODES)
def test_as_one_process_with_all_batches(on_two_ranks, mode):
    PLAN.check(on_two_ranks[mode])


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_whole_batches_on_ranks_with_and_without_samples(on_two_ranks, wrap):
    exact(on_two_ranks[f"whole batches, {wrap}"], FILLED)
