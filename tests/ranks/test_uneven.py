"""Ranks whose loaders differ in length: everybody takes part in every window, nothing is lost, nothing hangs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.ranks import (
    Noisy,
    Outcome,
    Plan,
    Record,
    all_refused,
    all_well,
    ddp,
    flags,
    flags_are_kept,
    fresh,
    fsdp1,
    fsdp2,
    made,
    optimizer_for,
    relative_error,
    same_on_all,
    share,
)
from harness.reference import Attention, Convolution, Counting, mean_loss, unsized
from macrobatch import Accumulator

Wrap = Callable[..., nn.Module]

MODES: dict[str, tuple[Wrap, dict[str, str]]] = {
    "ddp-window": (ddp, {"sync": "window"}),
    "ddp-micro": (ddp, {"sync": "micro"}),
    "fsdp1-window": (fsdp1, {"sync": "window"}),
    "fsdp2-window": (fsdp2, {"sync": "window", "gather": "window"}),
    "fsdp2-micro": (fsdp2, {"sync": "micro", "gather": "micro"}),
}
BACKENDS = ("ddp-window", "fsdp1-window", "fsdp2-window", "fsdp2-micro")
SCENARIOS: dict[str, Callable[[], Outcome]] = {}


def everywhere(name: str, scenario: Callable[..., Outcome]) -> None:
    """Run this on the ranks in every mode: scenario(wrap, **options)."""
    for mode, (wrap, options) in MODES.items():
        SCENARIOS[f"{name}-{mode}"] = partial(scenario, wrap, **options)


every_mode = pytest.mark.parametrize("mode", MODES)


# ------------------------------------------------------------------------------------------------------- exactness

# Rank 1 stops in the middle of a window, and has nothing for one or two whole windows; then rank 0 does; then both
# have as many.
COUNTS = ((8, 2), (1, 7), (4, 4))


class Twice(Attention):
    """Every layer is called twice for one loss."""

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return super().forward(*batch) + super().forward(*batch)


PLANS = {
    "step": Plan(counts=COUNTS, steps=3, max_norm=0.05),
    "drop": Plan(counts=COUNTS, steps=3, remainder="drop", counting=Counting("tensor")),
    "carry": Plan(counts=(*COUNTS, (2, 1)), steps=3, remainder="carry"),
    "unsized-step": Plan(counts=COUNTS, steps=3, sized=False, optimizer="AdamW"),
    "unsized-drop": Plan(counts=COUNTS, steps=3, remainder="drop", sized=False),
    "one-each": Plan(counts=((4, 1), (2, 3)), steps=1),
    "called-twice": Plan(counts=((3, 1), (6, 4), (2, 3)), steps=3, make=Twice),
    "uncounted": Plan(counts=((5, 3),), steps=2, counting=Counting("read")),
}
for _name, _plan in PLANS.items():
    everywhere(_name, _plan.run)


@every_mode
@pytest.mark.parametrize("name", PLANS)
def test_every_window_is_the_one_big_batch(on_two_ranks, name, mode):
    """The one over the batches that are new, wherever the ranks have ended their windows."""
    PLANS[name].check_numbers(on_two_ranks[f"{name}-{mode}"])


@every_mode
@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_lost_and_nothing_comes_twice(on_two_ranks, name, mode):
    plan = PLANS[name]
    for rank, outcome in enumerate(all_well(on_two_ranks[f"{name}-{mode}"])):
        numbers = [number for window in fresh(outcome) for number in window]
        if plan.remainder == "drop":
            assert numbers == [number for window in plan.windows(2) for number in window[rank]]
        else:
            assert numbers == list(range(sum(plan.counts_of(rank))))


@every_mode
@pytest.mark.parametrize("name", PLANS)
def test_windows_are_cut_as_on_the_rank_with_the_most(on_two_ranks, name, mode):
    PLANS[name].check(on_two_ranks[f"{name}-{mode}"])


UNSIZED_CARRY = Plan(counts=(*COUNTS, (2, 1)), steps=3, remainder="carry", sized=False)
everywhere("unsized-carry", UNSIZED_CARRY.run)


@every_mode
def test_an_unsized_window_is_carried_over_or_refused(on_two_ranks, mode):
    """Which ranks have how many micro-batches in the open window is not known to all of them."""
    outcomes = on_two_ranks[f"unsized-carry-{mode}"]
    if "raised" in outcomes[0]:
        all_refused(outcomes, "carry", "length")
        return
    UNSIZED_CARRY.check_numbers(outcomes)
    for rank, outcome in enumerate(outcomes):
        numbers = [number for window in fresh(outcome) for number in window]
        assert numbers == list(range(sum(UNSIZED_CARRY.counts_of(rank))))


@every_mode
def test_the_rank_that_ran_out_is_told_so(on_two_ranks, mode):
    """Its last batch comes again; a rank that has batches left never sees a repeated one."""
    first, second = all_well(on_two_ranks[f"step-{mode}"])
    repeats = [[[n for n, again in window if again] for window in outcome["fed"][:-1]] for outcome in (first, second)]
    assert [sum(map(len, windows)) for windows in (repeats[0][:3], repeats[1][3:6])] == [0, 0]
    assert all(number == 1 for window in repeats[1][:3] for number in window)
    assert all(number == 8 for window in repeats[0][3:6] for number in window)
    assert all(repeats[1][1:3])  # nothing new in windows 2 and 3
    assert all(repeats[0][4:6])
    assert repeats[0][6:] == repeats[1][6:] == [[], []]


# ------------------------------------------------------------------------------------ what a repeated batch must not do


def with_infinite_repeats(wrap: Wrap, **options: Any) -> Outcome:
    record = INFINITE.start(wrap, **options)
    for number, micro in record.acc.batches(share(dist.get_rank(), INFINITE.counts_of(dist.get_rank())[0])):
        record.fed[-1].append((number, record.acc.is_repeat))
        planted = math.inf if record.acc.is_repeat else 1.0
        record.acc.backward(mean_loss(record.model, micro) * planted, items=micro.items)
        record.note(record.acc.step())
    return record.outcome()


INFINITE = Plan(counts=((8, 2),), steps=3, max_norm=0.05)
everywhere("infinite", with_infinite_repeats)


@every_mode
def test_a_repeated_batch_weighs_nothing_even_where_it_overflows(on_two_ranks, mode):
    INFINITE.check(on_two_ranks[f"infinite-{mode}"])


def noisy(short: int, is_sized: bool, wrap: Wrap, **options: Any) -> Outcome:
    """Rank `short` runs out. What its last own batch left of RNG and buffers is there in the end."""
    torch.manual_seed(0)
    model = wrap(Noisy().double())
    acc = Accumulator(model, optimizer_for(model), steps=3, **options)
    own = share(dist.get_rank(), 2 if dist.get_rank() == short else 8)
    torch.manual_seed(1 + dist.get_rank())
    repeats, states = 0, []
    for _, micro in acc.batches(own if is_sized else unsized(own)):
        acc.backward(mean_loss(model, micro), items=micro.items)
        acc.step()
        repeats += acc.is_repeat
        if not acc.is_repeat:
            states.append(state_of(model))
    return {"repeats": repeats, "own": states[-1], "final": state_of(model), "changed": different(*states[:2])}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()} | {"rng": torch.get_rng_state()}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


for _short in (0, 1):
    for _sized in (True, False):
        for _mode in BACKENDS:
            _wrap, _options = MODES[_mode]
            _own_buffers = {"broadcast_buffers": False} if _wrap is ddp and _short == 1 else {}
            SCENARIOS[f"noisy-{_short}-{_sized}-{_mode}"] = partial(
                noisy, _short, _sized, partial(_wrap, **_own_buffers), **_options
            )


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("mode", BACKENDS)
def test_rng_and_buffers_are_put_back_after_a_repeated_batch(on_two_ranks, short, sized, mode):
    outcome = all_well(on_two_ranks[f"noisy-{short}-{sized}-{mode}"])[short]
    assert outcome["repeats"] > 0
    assert len(outcome["changed"]) == 4  # mean, variance, count and RNG: a forward does change them
    assert different(outcome["own"], outcome["final"]) == []


def left_alone(wrap: Wrap, **options: Any) -> Outcome:
    """A loop that leaves while only the other rank has batches left, and another one after it."""
    record = Plan(counts=((8, 2),), steps=3).start(wrap, **options)
    loop = record.acc.batches(share(dist.get_rank(), (8, 2)[dist.get_rank()]))
    for _, micro in loop:
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        if (result := record.acc.step()) and result.step == 2:
            break
    kept = flags(record.model) == record.before
    record.epoch(share(dist.get_rank(), 4))
    return {"flags kept": kept, "steps": record.acc.optimizer_step, "repeat": record.acc.is_repeat}


everywhere("left_alone", left_alone)


@every_mode
def test_leaving_early_leaves_nothing_behind(on_two_ranks, mode):
    for outcome in all_well(on_two_ranks[f"left_alone-{mode}"]):
        assert outcome["flags kept"]
        assert outcome["steps"] == 4
        assert not outcome["repeat"]


@every_mode
def test_flags_are_put_back(on_two_ranks, mode):
    flags_are_kept(on_two_ranks, mode)


# ------------------------------------------------------------------------------------------------------- refusals


def empty(which: tuple[int, ...], is_sized: bool, wrap: Wrap, **options: Any) -> Outcome:
    model = wrap(made())
    acc = Accumulator(model, optimizer_for(model), steps=3, **options)
    own = share(dist.get_rank(), 0 if dist.get_rank() in which else 5)
    return {"batches": fed_to(Record(acc, model), own if is_sized else unsized(own))}


def fed_to(record: Record, loader: Any) -> int:
    record.epoch(loader)
    return sum(map(len, record.fed))


for _sized in (True, False):
    for _mode in BACKENDS:
        _wrap, _options = MODES[_mode]
        SCENARIOS[f"empty-{_sized}-{_mode}"] = partial(empty, (1,), _sized, _wrap, **_options)
        SCENARIOS[f"all-empty-{_sized}-{_mode}"] = partial(empty, (0, 1), _sized, _wrap, **_options)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("mode", BACKENDS)
def test_a_loader_that_is_empty_from_the_start_is_an_error_on_all_ranks(on_two_ranks, sized, mode):
    outcomes = on_two_ranks[f"empty-{sized}-{mode}"]
    all_refused(outcomes, "empty")
    assert max(outcome["seconds"] for outcome in outcomes) < 5


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("mode", BACKENDS)
def test_loaders_that_are_all_empty_do_not_hang(on_two_ranks, sized, mode):
    """As in one process, that is an epoch of nothing; to call it an error is fine too."""
    outcomes = on_two_ranks[f"all-empty-{sized}-{mode}"]
    if "raised" in outcomes[0]:
        all_refused(outcomes, "empty")
    else:
        assert [outcome["batches"] for outcome in all_well(outcomes)] == [0, 0]


def one_is_sized(wrap: Wrap, **options: Any) -> Outcome:
    """A list on one rank, a generator on the other."""
    plan = Plan(counts=((5, 2),), steps=3)
    record = plan.start(wrap, **options)
    own = share(dist.get_rank(), plan.counts_of(dist.get_rank())[0])
    record.epoch(own if dist.get_rank() == 0 else unsized(own))
    return record.outcome()


everywhere("one_is_sized", one_is_sized)


@every_mode
def test_a_length_on_one_rank_only(on_two_ranks, mode):
    """Exact, or an error on all ranks."""
    outcomes = on_two_ranks[f"one_is_sized-{mode}"]
    if "raised" in outcomes[0]:
        all_refused(outcomes)
    else:
        Plan(counts=((5, 2),), steps=3).check_numbers(outcomes)


def synchronised_norm(counts: tuple[int, int], wrap: Wrap, **options: Any) -> Outcome:
    """A repeated batch would change the statistics that the other rank normalises with."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(made(Convolution)).train()
    model = wrap(model)
    acc = Accumulator(model, optimizer_for(model), steps=3, **options)
    if counts[0] == counts[1]:
        model.eval()  # it trains on GPUs only
    return {"batches": fed_to(Record(acc, model), share(dist.get_rank(), counts[dist.get_rank()]))}


SCENARIOS["synchronised-uneven"] = partial(synchronised_norm, (5, 2), fsdp2)
SCENARIOS["synchronised-even"] = partial(synchronised_norm, (4, 4), fsdp2)


def test_synchronised_batch_norm_refuses_repeated_batches(on_two_ranks):
    all_refused(on_two_ranks["synchronised-uneven"], "SyncBatchNorm")


def test_synchronised_batch_norm_with_even_loaders(on_two_ranks):
    assert [outcome["batches"] for outcome in all_well(on_two_ranks["synchronised-even"])] == [4, 4]


# ---------------------------------------------------------------------------------------------- ramps, and scalers


def ramp(wrap: Wrap, **options: Any) -> Outcome:
    """Windows of 1, 2, 3, ... micro-batches."""
    return RAMP.run(wrap, steps=lambda step: step + 1, **options)


RAMP = Plan(counts=((10, 4),), steps=0)
everywhere("ramp", ramp)


@every_mode
def test_a_ramp_of_steps(on_two_ranks, mode):
    outcomes = on_two_ranks[f"ramp-{mode}"]
    RAMP.check_numbers(outcomes)
    assert fresh(outcomes[0]) == [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert fresh(outcomes[1]) == [[0], [1, 2], [3], []]


def scaled(wrap: Wrap, **options: Any) -> Outcome:
    """A rank that has run out divides by what the others multiplied with."""
    return SCALED.run(wrap, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), **options)


SCALED = Plan(counts=((8, 2),), steps=2, empty=[(1, 0), (1, 1)])
everywhere("scaled", scaled)


@every_mode
def test_a_scaler(on_two_ranks, mode):
    SCALED.check(on_two_ranks[f"scaled-{mode}"])


@pytest.mark.parametrize("name", ["step-ddp-window", "infinite-ddp-window"])
def test_results_are_the_same_on_every_rank(on_two_ranks, name):
    first, second = all_well(on_two_ranks[name])
    same_on_all([first, second], "loss", "items", "grad_norm", "step", "skipped")
    assert relative_error(first["weights"][-1], second["weights"][-1]) == 0
