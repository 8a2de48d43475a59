"""DistributedDataParallel on two real ranks: the gradient of the one big batch, with the least communication."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.ranks import (
    PLANS,
    Collectives,
    Outcome,
    Plan,
    Record,
    Tower,
    all_refused,
    all_well,
    breaks,
    breaks_before_the_backward,
    ddp,
    difference,
    flags,
    flags_are_kept,
    full_weights,
    made,
    optimizer_for,
    other_batches,
    refused,
    same_on_all,
    share,
)
from harness.reference import Convolution, Experts, Trainee, mean_loss, relative_error, token_loss, whole_step
from macrobatch import Accumulator, MacrobatchError

SYNCS = ("window", "micro")
FORKS = False  # each rank has its own order of a set of strings, as elsewhere
SCENARIOS: dict[str, Callable[[], Outcome]] = {}


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Run this on the ranks, under its name."""
    SCENARIOS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------- exact, every way

ROUTED = [(rank, number) for rank in (0, 1) for number in (0, 1, 5)]  # window 2 of three never sees the expert

WRAPPED: dict[str, tuple[Plan, dict[str, Any]]] = {
    "bucket views": (PLANS["adamw"], {"gradient_as_bucket_view": True}),
    "bucket views, clipped": (PLANS["clipped"], {"gradient_as_bucket_view": True}),
    "small buckets": (replace(PLANS["short"], make=Tower), {"bucket_cap_mb": 0.0005}),
    "buffers": (replace(PLANS["short"], make=Convolution), {}),
    "unused by all": (replace(PLANS["adamw"], make=Experts), {"find_unused_parameters": True}),
    "unused by one": (
        replace(PLANS["adamw"], make=Experts, routed=[(0, 0), (0, 3), (1, 9)]),
        {"find_unused_parameters": True},
    ),
    "unused in the last": (
        Plan(make=Experts, routed=[(0, 0), (0, 3), (1, 1), (0, 7), (1, 4)]),
        {"find_unused_parameters": True},
    ),
    "unused, bucket views": (
        Plan(make=Experts, routed=[(0, 0), (0, 3), (1, 1), (0, 7), (1, 4)]),
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ),
}

for _sync in SYNCS:
    for _name, _plan in PLANS.items():
        SCENARIOS[f"{_name}-{_sync}"] = partial(_plan.run, ddp, sync=_sync)
    for _name, (_plan, _wrapping) in WRAPPED.items():
        SCENARIOS[f"{_name}-{_sync}"] = partial(_plan.run, ddp, _wrapping, sync=_sync)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", PLANS)
def test_every_window_is_the_one_big_batch(on_two_ranks, name, sync):
    PLANS[name].check(on_two_ranks[f"{name}-{sync}"])


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", WRAPPED)
def test_however_ddp_is_set_up(on_two_ranks, name, sync):
    WRAPPED[name][0].check(on_two_ranks[f"{name}-{sync}"])


# ------------------------------------------------------------------------------------------- loops without a loader

OWN_COUNTS = Plan(counts=((4, 3), (2, 5), (3, 4), (1, 1)), steps=100)


@scenario
def micro_batches_with_last() -> Outcome:
    record = OWN_COUNTS.start(ddp)
    for loader in OWN_COUNTS.loaders(dist.get_rank()):
        for turn, (number, micro) in enumerate(loader):
            with record.acc.micro_batch(last=turn == len(loader) - 1):
                record.fed[-1].append((number, record.acc.is_repeat))
                record.acc.backward(mean_loss(record.model, micro), items=micro.items)
            record.note(record.acc.step())
    return record.outcome()


def test_each_rank_says_which_micro_batch_is_its_last(on_two_ranks):
    OWN_COUNTS.check(on_two_ranks["micro_batches_with_last"])


LOADERS = Plan(counts=((4, 3), (2, 5), (3, 4)), steps=5)
SCENARIOS["loaders"] = partial(LOADERS.run, ddp)


def test_loaders_of_different_lengths(on_two_ranks):
    LOADERS.check(on_two_ranks["loaders"])


NOW = {"window": Plan(counts=((3, 2), (2, 4), (1, 3)), steps=100), "micro": Plan(counts=(3, 2, 4), steps=100)}


def closed_now(sync: str) -> Outcome:
    """The window is closed where nothing had said that it would."""
    record = NOW[sync].start(ddp, sync=sync)
    for loader in NOW[sync].loaders(dist.get_rank()):
        for number, micro in loader:
            with record.acc.micro_batch():
                record.fed[-1].append((number, record.acc.is_repeat))
                record.acc.backward(mean_loss(record.model, micro), items=micro.items)
            assert record.acc.step() is None
        record.note(record.acc.step(now=True))
    return record.outcome()


for _sync in SYNCS:
    SCENARIOS[f"closed_now-{_sync}"] = partial(closed_now, _sync)


@pytest.mark.parametrize("sync", SYNCS)
def test_step_now(on_two_ranks, sync):
    NOW[sync].check(on_two_ranks[f"closed_now-{sync}"])


# ------------------------------------------------------------------------------------------------------- schedules


@scenario
def scheduled() -> Outcome:
    model = ddp(made())
    optimizer = optimizer_for(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    acc = Accumulator(model, optimizer, steps=4, scheduler=scheduler)
    record = Record(acc, model)
    record.epoch(share(dist.get_rank(), 10))
    return {"lr": [result.lr for result in record.results], "epochs": scheduler.last_epoch}


def test_the_schedule_goes_by_steps_not_by_ranks(on_two_ranks):
    for outcome in all_well(on_two_ranks["scheduled"]):
        assert outcome["lr"] == [(1.0,), (0.5,), (0.25,)]
        assert outcome["epochs"] == 3


# ------------------------------------------------------------------------------------------- infinite on one rank


def with_overflow(**options: Any) -> Outcome:
    """In the second of three windows one rank's loss is infinite."""
    record = Plan().start(ddp, **options)
    for number, micro in record.acc.batches(share(dist.get_rank(), 12)):
        record.fed[-1].append((number, False))
        planted = math.inf if (dist.get_rank(), number) == (1, 5) else 1.0
        record.acc.backward(mean_loss(record.model, micro) * planted, items=micro.items)
        record.note(record.acc.step())
    return record.outcome()


@scenario
def overflow_under_a_scaler() -> Outcome:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return with_overflow(scaler=scaler) | {"scale": scaler.get_scale()}


@scenario
def overflow_skipped() -> Outcome:
    return with_overflow(nonfinite="skip")


@scenario
def overflow_raised() -> Outcome:
    return with_overflow()


@pytest.mark.parametrize("name", ["overflow_under_a_scaler", "overflow_skipped"])
def test_all_ranks_skip_together(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    same_on_all(outcomes, "weights", "items")
    for outcome in outcomes:
        assert outcome["skipped"] == [False, True, False]
        assert outcome["step"] == [1, 1, 2]
        assert outcome.get("scale", 2.0**9) == 2.0**9
        assert relative_error(outcome["weights"][2], outcome["weights"][1]) == 0


@pytest.mark.parametrize("name", ["overflow_under_a_scaler", "overflow_skipped"])
def test_the_windows_around_an_overflow_are_exact(on_two_ranks, name):
    model = made()
    whole = Trainee(model, [optimizer_for(model)], [])
    for window in (0, 2):
        whole_step(whole, [b for rank in (0, 1) for _, b in share(rank, 12)[4 * window : 4 * window + 4]], None, COUNT)
    assert relative_error(on_two_ranks[name][0]["weights"][3], full_weights(model)) <= 1e-12


COUNT = Plan().counting


def test_all_ranks_raise_together(on_two_ranks):
    all_refused(on_two_ranks["overflow_raised"], "window 2", "infinite")


@scenario
def counted_on_one_rank() -> Outcome:
    """From the second window on."""
    record = Plan().start(ddp)
    for number, micro in record.acc.batches(share(dist.get_rank(), 12)):
        record.fed[-1].append((number, False))
        items = None if dist.get_rank() == 1 and number >= 4 else micro.items
        record.acc.backward(mean_loss(record.model, micro), items)
        record.note(record.acc.step())
    return record.outcome()


def test_items_on_one_rank_only(on_two_ranks):
    all_refused(on_two_ranks["counted_on_one_rank"], "items must be given on every rank, or on none", "window 2")


def miscounting(nonfinite: str) -> Outcome:
    """In the second window, and on one rank."""
    record = Plan().start(ddp, nonfinite=nonfinite)
    for number, micro in record.acc.batches(share(dist.get_rank(), 12)):
        is_wrong = dist.get_rank() == 1 and number == 4
        record.acc.backward(mean_loss(record.model, micro), torch.tensor(math.nan if is_wrong else float(micro.items)))
        record.acc.step()
    return {}


for policy in ("raise", "skip", "keep"):
    SCENARIOS[f"miscounted-{policy}"] = partial(miscounting, policy)


@pytest.mark.parametrize("policy", ["raise", "skip", "keep"])
def test_a_count_that_is_none_on_one_rank_is_an_error_on_all(on_two_ranks, policy):
    all_refused(on_two_ranks[f"miscounted-{policy}"], "negative or not finite", "window 2")


# ------------------------------------------------------------------------------------------------------- precision


class Weight(nn.Module):
    """Its gradient is what it is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@scenario
def accumulated_in_float32() -> Outcome:
    """Over each rank, and between the two, bfloat16 would lose the smaller part: 1 + 2**-9 is 1 there."""
    model = ddp(Weight())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(model.module.weight.grad.float().clone()))
    acc = Accumulator(model, optimizer, steps=2, reduction="sum", accumulate_dtype=torch.float32)
    fed = ((1.0, 2.0**-9), (-1.0, 0.0))[dist.get_rank()]
    for x in acc.batches([torch.full((4,), value, dtype=torch.bfloat16) for value in fed * 2]):
        acc.backward(model(x), items=1)
        acc.step()
    return {"gradients": gradients, "dtype": str(model.module.weight.dtype)}


def test_gradients_are_summed_over_ranks_in_accumulate_dtype(on_two_ranks):
    for outcome in all_well(on_two_ranks["accumulated_in_float32"]):
        assert [gradient.tolist() for gradient in outcome["gradients"]] == [[2.0**-11] * 4] * 2
        assert outcome["dtype"] == "torch.bfloat16"


# ------------------------------------------------------------------------------------- leaving in the middle, flags

AFTER = Plan(counts=(12,))


def three_windows_after(disturb: Callable[[Record], None]) -> Outcome:
    record = AFTER.start(ddp)
    disturb(record)
    record.undisturbed &= flags(record.model) == record.before
    record.epoch(share(dist.get_rank(), 12))
    return record.outcome()


def discards(record: Record) -> None:
    for turn, micro in enumerate(record.acc.batches(other_batches())):
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        if turn == 2:
            record.acc.discard()
            break
        record.acc.step()


def discards_before_the_backward(record: Record) -> None:
    """After which the batch at hand begins a window: here it is dropped too."""
    for turn, micro in enumerate(record.acc.batches(other_batches())):
        if turn == 2:
            record.acc.discard()
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        if turn == 2:
            break
        record.acc.step()
    record.acc.discard()


def fails(record: Record) -> None:
    """In the forward of a micro-batch whose gradients were not to travel."""
    with contextlib.suppress(ZeroDivisionError):
        for turn, micro in enumerate(record.acc.batches(other_batches())):
            loss = mean_loss(record.model, micro) / (2 - turn if turn < 2 else 0 // 0)
            record.acc.backward(loss, items=micro.items)
            record.acc.step()
    record.acc.discard()


DISTURBANCES = (discards, discards_before_the_backward, breaks, breaks_before_the_backward, fails)
for _disturb in DISTURBANCES:
    SCENARIOS[_disturb.__name__] = partial(three_windows_after, _disturb)


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda disturb: disturb.__name__)
def test_nothing_is_left_behind(on_two_ranks, disturb):
    AFTER.check(on_two_ranks[disturb.__name__])


def test_flags_are_put_back(on_two_ranks):
    flags_are_kept(on_two_ranks)


# --------------------------------------------------------------------------------------------------- communication


@scenario
def counted() -> Outcome:
    """Of three windows the last: DDP puts its buckets together anew after the first."""
    model = ddp(made(Tower), bucket_cap_mb=0.0018)
    acc = Accumulator(model, optimizer_for(model), steps=4)
    counts = {}
    loader = share(dist.get_rank(), 12)
    for number, micro in acc.batches(loader):
        with Collectives() as collectives:
            acc.backward(mean_loss(model, micro), items=micro.items)
            acc.step()
        if number >= 8:
            counts[number - 7] = dict(collectives.counts)
    with Collectives() as plain:
        mean_loss(model, loader[0][1]).backward()
    return {"counts": counts, "buckets": plain.counts["allreduce"]}


def test_what_travels_is_every_bucket_once_a_window_and_one_small_message(on_two_ranks):
    for outcome in all_well(on_two_ranks["counted"]):
        assert outcome["buckets"] == 2
        assert outcome["counts"] == {1: {}, 2: {}, 3: {}, 4: {"allreduce": 2 + 1}}


# -------------------------------------------------------------------------- a parameter that the last one leaves out


@scenario
def left_out_of_the_last() -> Outcome:
    """Rank 1 uses the expert early in its window only, and DDP was not told to look for such parameters."""
    routed = {(rank, number) for rank in (0, 1) for number in range(4)} - {(1, 3)}
    model = ddp(made(Experts))
    acc = Accumulator(model, optimizer_for(model), steps=4)
    before = full_weights(model)
    try:
        for _, micro in acc.batches(share(dist.get_rank(), 4, routed=routed)):
            acc.backward(mean_loss(model, micro), items=micro.items)
            acc.step()
    except MacrobatchError:
        assert relative_error(full_weights(model), before) == 0, "the step was taken"
        raise
    return {}


def test_a_parameter_left_out_of_a_last_micro_batch_is_named(on_two_ranks):
    outcomes = on_two_ranks["left_out_of_the_last"]
    refused(outcomes, 1, "expert.weight", "find_unused_parameters")
    assert "raised" in outcomes[0], "rank 0 took a step that rank 1 did not take"
    assert max(outcome["seconds"] for outcome in outcomes) < 15


@scenario
def ignored() -> Outcome:
    """DDP was told to leave a parameter alone that is trained."""
    plain = made()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["head.bias"])
    model = ddp(plain)
    acc = Accumulator(model, optimizer_for(model), steps=2)
    for _, micro in acc.batches(share(dist.get_rank(), 4)):
        acc.backward(mean_loss(model, micro), items=micro.items)
        acc.step()
    return {}


def test_a_trained_parameter_that_ddp_ignores_is_named(on_two_ranks):
    all_refused(on_two_ranks["ignored"], "head.bias", "told to ignore")


# ------------------------------------------------------------------------------------------------- several models


@scenario
def two_models() -> Outcome:
    """One Accumulator, two models, one norm."""
    first, second = ddp(made()), ddp(made(Tower))
    parameters = [*first.parameters(), *second.parameters()]
    acc = Accumulator([first, second], torch.optim.SGD(parameters, lr=1.0), steps=4, max_norm=0.05)
    weights, norms = [], []
    for _, micro in acc.batches(share(dist.get_rank(), 12)):
        loss = mean_loss(first, micro) + mean_loss(second, micro)
        acc.backward(loss, items=micro.items)
        if result := acc.step():
            norms.append(result.grad_norm)
            weights.append(full_weights(nn.ModuleList([first.module, second.module])))
    return {"weights": weights, "grad_norm": norms}


def test_several_models_with_one_norm(on_two_ranks):
    outcomes = all_well(on_two_ranks["two_models"])
    same_on_all(outcomes, "weights", "grad_norm")
    models = nn.ModuleList([made(), made(Tower)])
    optimizer = torch.optim.SGD(models.parameters(), lr=1.0)
    for index, weights in enumerate(outcomes[0]["weights"]):
        micros = [b for rank in (0, 1) for _, b in share(rank, 12)[4 * index : 4 * index + 4]]
        optimizer.zero_grad()
        losses = [token_loss(model, micro, "sum") for model in models for micro in micros]
        (sum(losses) / sum(micro.items for micro in micros)).backward()
        norm = nn.utils.clip_grad_norm_(models.parameters(), 0.05)
        before = full_weights(models)
        optimizer.step()
        torch.testing.assert_close(outcomes[0]["grad_norm"][index], norm, rtol=1e-12, atol=0)
        assert relative_error(weights, full_weights(models)) <= 1e-12
        assert relative_error(difference(before, weights), difference(before, full_weights(models))) <= 1e-12


@scenario
def side_by_side() -> Outcome:
    """Two Accumulators in one loop, the windows of one inside those of the other; one has a single module."""
    plans = Plan(steps=4), Plan(steps=3, make=Tower)
    records = [plan.start(ddp) for plan in plans]
    own = share(dist.get_rank(), 12)
    loops = [record.acc.batches(own) for record in records]
    for pair in zip(*loops, strict=True):
        for record, (number, micro) in zip(records, pair, strict=True):
            record.micro_step(number, micro)
    return {"first": records[0].outcome(), "second": records[1].outcome()}


def test_two_accumulators_side_by_side(on_two_ranks):
    outcomes = all_well(on_two_ranks["side_by_side"])
    Plan(steps=4).check([outcome["first"] for outcome in outcomes])
    Plan(steps=3, make=Tower).check([outcome["second"] for outcome in outcomes])


# ----------------------------------------------------------------------------------------------------- what it needs


@scenario
def compiled() -> Outcome:
    """torch.compile around DDP, without a compiler behind it."""
    return Plan().run(lambda model: torch.compile(DistributedDataParallel(model), backend="eager"))


def test_compiled(on_two_ranks):
    Plan().check(on_two_ranks["compiled"])
