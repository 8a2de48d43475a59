"""Sharded models on real ranks: FSDP1 and FSDP2 on two, HSDP and data-parallel subgroups on four."""

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import macrobatch
from harness.ranks import (
    Collectives,
    Outcome,
    Plan,
    Record,
    Spiked,
    Tower,
    all_refused,
    all_well,
    breaks,
    breaks_before_the_backward,
    ddp,
    flags,
    flags_are_kept,
    fsdp1,
    fsdp2,
    full_weights,
    hsdp,
    made,
    optimizer_for,
    other_batches,
    same_on_all,
    share,
)
from harness.reference import (
    ROUTED,
    VOCABULARY,
    WIDTH,
    Batch,
    Counting,
    Experts,
    concatenate,
    mean_loss,
    relative_error,
    weights_of,
)
from macrobatch import Accumulator, MacroStep, verify
from macrobatch._ranks import gathering

Wrap = Callable[..., nn.Module]

MODES: dict[str, tuple[Wrap, dict[str, str]]] = {
    "fsdp1-window": (fsdp1, {"sync": "window"}),
    "fsdp1-micro": (fsdp1, {"sync": "micro"}),
    "fsdp2-window-micro": (fsdp2, {"sync": "window", "gather": "micro"}),
    "fsdp2-window-window": (fsdp2, {"sync": "window", "gather": "window"}),
    "fsdp2-micro-micro": (fsdp2, {"sync": "micro", "gather": "micro"}),
    "fsdp2-micro-window": (fsdp2, {"sync": "micro", "gather": "window"}),
}
ON_FOUR: dict[str, tuple[Wrap, dict[str, str]]] = {
    "hsdp-window": (hsdp, {"sync": "window"}),
    "hsdp-micro": (hsdp, {"sync": "micro", "gather": "window"}),
}
FSDP2 = [mode for mode in MODES if mode.startswith("fsdp2")]
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
SCENARIOS_ON_FOUR: dict[str, Callable[[], Outcome]] = {}


def everywhere(name: str, scenario: Callable[..., Outcome], among: Collection[str] = (*MODES, *ON_FOUR)) -> None:
    """Run this on the ranks in every mode: scenario(wrap, **options)."""
    for scenarios, modes in ((SCENARIOS, MODES), (SCENARIOS_ON_FOUR, ON_FOUR)):
        for mode, (wrap, options) in modes.items():
            if mode in among:
                scenarios[f"{name}-{mode}"] = partial(scenario, wrap, **options)


every_mode = pytest.mark.parametrize("mode", [*MODES, *ON_FOUR])


# ------------------------------------------------------------------------------------------------- exact, every way

EXACT = {
    "clipped": Plan(counts=(6, 7), steps=3, counting=Counting("tensor"), max_norm=0.05),
    "adamw": Plan(counts=(7, 5), steps=3, optimizer="AdamW", max_norm=0.05),
    "empty": Plan(counts=(9,), steps=3, empty=[(1, 3), (1, 4), (1, 5), (0, 8)]),
    "carried": Plan(counts=(5, 5), steps=3, remainder="carry", now=True),
    "dropped": Plan(counts=(5, 6, 3), steps=3, remainder="drop", sized=False),
}
for _name, _plan in EXACT.items():
    everywhere(_name, _plan.run)


@every_mode
@pytest.mark.parametrize("name", EXACT)
def test_every_window_is_the_one_big_batch(on_ranks, name, mode):
    outcomes = on_ranks[f"{name}-{mode}"]
    if not (EXACT[name].now and cannot_close_now(outcomes, mode)):
        EXACT[name].check(outcomes)


def cannot_close_now(outcomes: list[Outcome], mode: str) -> bool:
    """Where gradients travel in a backward only, a window that is closed afterwards may be refused."""
    if mode not in ("fsdp1-window", "hsdp-micro") or "raised" not in outcomes[0]:
        return False
    all_refused(outcomes, "now=True")
    return True


def verified(wrap: Wrap, **options: Any) -> Outcome:
    """The gradients themselves: three windows, in the last of which the first rank has nothing left."""
    micros = [micro for _, micro in share(dist.get_rank(), (5, 7, 4, 6)[dist.get_rank()])]

    def step(model: nn.Module, _: Batch) -> None:
        acc = Accumulator(model, optimizer_for(model), steps=3, **options)
        for micro in acc.batches(micros):
            acc.backward(mean_loss(model, micro), items=micro.items)
            acc.step()

    report = verify(
        wrap(made(Tower)), lambda model, batch: (mean_loss(model, batch), batch.items), concatenate(micros), step=step
    )
    return {"ok": report.ok, "windows": len(report.windows), "text": str(report)}


everywhere("verified", verified)


@every_mode
def test_the_gradients_of_every_window(on_ranks, mode):
    for outcome in all_well(on_ranks[f"verified-{mode}"]):
        assert outcome["ok"], outcome["text"]
        assert outcome["windows"] == 3


def looked_at_first(wrap: Wrap, **options: Any) -> Outcome:
    """A forward before the Accumulator is made, without a backward, changes nothing: it leaves parameters gathered."""
    micros, weights = [micro for _, micro in share(dist.get_rank(), 3)], []
    for looks in (False, True):
        model = wrap(made(Tower))
        optimizer = optimizer_for(model)
        if looks:
            with torch.no_grad():
                mean_loss(model, micros[0])
        acc = Accumulator(model, optimizer, steps=3, **options)
        for micro in acc.batches(micros):
            acc.backward(mean_loss(model, micro), items=micro.items)
            acc.step()
        weights.append(full_weights(model))
    return {"same": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])}


everywhere("looked_at_first", looked_at_first, FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
def test_a_forward_before_the_first_window(on_ranks, mode):
    assert all(outcome["same"] for outcome in all_well(on_ranks[f"looked_at_first-{mode}"]))


# ------------------------------------------------------------------------------------------------- gather="auto"

AUTO = Plan(counts=(6, 7), steps=3)
FREE = {"enough": (2**30, 2**30), "too little on one rank": (2**30, 1000)}


def gathered_by_memory(free: tuple[int, int]) -> Outcome:
    """Exact whichever is chosen, and the same is chosen on all ranks."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("macrobatch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    measure = gathering.free_memory
    gathering.free_memory = lambda device: free[dist.get_rank()]
    try:
        measured = measure(torch.device("cpu"))
        return AUTO.run(fsdp2, gather="auto") | {"lines": lines, "measured": measured}
    finally:
        gathering.free_memory = measure
        logger.removeHandler(handler)


SCENARIOS |= {f"auto-{name}": partial(gathered_by_memory, free) for name, free in FREE.items()}


@pytest.mark.parametrize("name", FREE)
def test_weights_stay_gathered_where_every_rank_has_the_memory(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[f"auto-{name}"])
    AUTO.check(outcomes)
    chosen = "window" if name == "enough" else "micro"
    assert [len(outcome["lines"]) for outcome in outcomes] == [1, 0]
    assert outcomes[0]["lines"][0].startswith(f'gather="auto" is gather="{chosen}": the gathered weights take')
    assert all(outcome["measured"] > 2**20 for outcome in outcomes)


def recorded_in_every_micro_batch() -> Outcome:
    model = fsdp2(made(Tower))
    MacroStep(model, optimizer_for(model), mean_loss, micro=1, cuda_graph=True, gather="micro")
    return {}


SCENARIOS["recorded gather"] = recorded_in_every_micro_batch


def test_no_recording_contains_a_gather(on_two_ranks):
    all_refused(on_two_ranks["recorded gather"], 'gather="micro"', "which no recording can contain")


# ------------------------------------------------------------------------------------------------- closed at once

NOW = Plan(counts=(3, 2, 4), steps=100)


def closed_now(wrap: Wrap, **options: Any) -> Outcome:
    """The window is closed where nothing had said that it would."""
    record = NOW.start(wrap, **options)
    for loader in NOW.loaders(dist.get_rank()):
        for number, micro in loader:
            with record.acc.micro_batch():
                record.fed[-1].append((number, record.acc.is_repeat))
                record.acc.backward(mean_loss(record.model, micro), items=micro.items)
            assert record.acc.step() is None
        record.note(record.acc.step(now=True))
    return record.outcome()


everywhere("closed_now", closed_now)


@every_mode
def test_step_now(on_ranks, mode):
    outcomes = on_ranks[f"closed_now-{mode}"]
    if not cannot_close_now(outcomes, mode):
        NOW.check(outcomes)


# ---------------------------------------------------------------------------------- flags that users set themselves


def blocks_stay_gathered(model: nn.Module) -> nn.Module:
    """Every group with another setting than its neighbour."""
    for index, block in enumerate(model.blocks):
        fully_shard(block, reshard_after_forward=index % 2 == 0)
    return fully_shard(model, reshard_after_forward=True)


SET_UP = Plan(make=Tower, counts=(6, 6))
everywhere("set_up", lambda wrap, **options: SET_UP.run(blocks_stay_gathered, **options), FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
def test_what_users_set_on_a_group(on_ranks, mode):
    SET_UP.check(on_ranks[f"set_up-{mode}"])


@every_mode
def test_flags_are_put_back(on_ranks, mode):
    flags_are_kept(on_ranks, mode)


# ----------------------------------------------------------------------------------------- leaving in the middle

AFTER = Plan(counts=(9,), steps=3)


def three_windows_after(disturb: Callable[[Record], None], wrap: Wrap, **options: Any) -> Outcome:
    record = AFTER.start(wrap, **options)
    disturb(record)
    record.undisturbed &= flags(record.model) == record.before
    record.epoch(share(dist.get_rank(), 9))
    return record.outcome()


def discards(record: Record) -> None:
    for turn, micro in enumerate(record.acc.batches(other_batches())):
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        if turn == 1:
            record.acc.discard()
            break
        record.acc.step()


def fails(record: Record) -> None:
    """In a loader, between two micro-batches of a window."""

    def loader() -> Iterator[Batch]:
        for turn, micro in enumerate(other_batches()):
            if turn == 2:
                raise ZeroDivisionError
            yield micro

    with contextlib.suppress(ZeroDivisionError):
        for micro in record.acc.batches(loader()):
            record.acc.backward(mean_loss(record.model, micro), items=micro.items)
            record.acc.step()
    record.acc.discard()


DISTURBANCES = (discards, breaks, breaks_before_the_backward, fails)
DISTURBED = ("fsdp1-window", "fsdp2-window-window", "fsdp2-micro-micro", "hsdp-micro")
everywhere("discards", partial(three_windows_after, discards))
for _disturb in DISTURBANCES[1:]:
    everywhere(_disturb.__name__, partial(three_windows_after, _disturb), DISTURBED)


@every_mode
def test_a_discarded_window_leaves_nothing_behind(on_ranks, mode):
    AFTER.check(on_ranks[f"discards-{mode}"])


@pytest.mark.parametrize("mode", DISTURBED)
@pytest.mark.parametrize("disturb", DISTURBANCES[1:], ids=lambda disturb: disturb.__name__)
def test_nothing_is_left_behind(on_ranks, disturb, mode):
    AFTER.check(on_ranks[f"{disturb.__name__}-{mode}"])


# ------------------------------------------------------------------------------------------------- mixed precision

REDUCE_DTYPES = {"float32": torch.float32, "none": None}
LOW = ("fsdp2-window-micro", "fsdp2-window-window", "fsdp2-micro-micro")


def in_bfloat16(reduce: str, wrap: Wrap, **options: Any) -> Outcome:
    """The same three windows twice: undisturbed, and after windows that were discarded in the middle."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=REDUCE_DTYPES[reduce])
    outcomes = []
    for disturbed in (False, True):
        record = AFTER.start(wrap, {"mp_policy": policy}, **options)
        if disturbed:
            discards(record)
        record.epoch(share(dist.get_rank(), 9))
        outcomes.append(record.outcome())
    return {"undisturbed": outcomes[0], "disturbed": outcomes[1]}


for _reduce in REDUCE_DTYPES:
    everywhere(f"bfloat16-{_reduce}", partial(in_bfloat16, _reduce), LOW)


@pytest.mark.parametrize("reduce", REDUCE_DTYPES)
@pytest.mark.parametrize("mode", LOW)
def test_a_discarded_window_leaves_nothing_in_low_precision_either(on_ranks, reduce, mode):
    outcomes = all_well(on_ranks[f"bfloat16-{reduce}-{mode}"])
    AFTER.check_roughly([outcome["undisturbed"] for outcome in outcomes], 5e-2)
    for outcome in outcomes:
        all_well([outcome["undisturbed"], outcome["disturbed"]])
        same_on_all([outcome["undisturbed"], outcome["disturbed"]], "weights", "loss", "items")


class Weight(nn.Module):
    """Its gradient is what it is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def accumulated_in_float32(policy: MixedPrecisionPolicy, wrap: Wrap, **options: Any) -> Outcome:
    """Over each rank, and between the two, bfloat16 would lose the smaller part: 1 + 2**-9 is 1 there."""
    model = wrap(Weight(), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.full_tensor().float()))
    acc = Accumulator(model, optimizer, steps=2, reduction="sum", accumulate_dtype=torch.float32, **options)
    fed = ((1.0, 2.0**-9), (-1.0, 0.0))[dist.get_rank()]
    for x in acc.batches([torch.full((4,), value, dtype=torch.bfloat16) for value in fed * 2]):
        acc.backward(model(x), items=1)
        acc.step()
    return {"gradients": gradients}


POLICIES = {"wide": MixedPrecisionPolicy(reduce_dtype=torch.float32), "narrow": MixedPrecisionPolicy()}
for _name, _policy in POLICIES.items():
    everywhere(_name, partial(accumulated_in_float32, _policy), FSDP2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", FSDP2)
def test_gradients_are_summed_in_accumulate_dtype(on_ranks, policy, mode):
    """Or, where FSDP2 holds and reduces them in another, there is an error that says how to set it up."""
    outcomes = on_ranks[f"{policy}-{mode}"]
    if "raised" in outcomes[0] and not (policy == "wide" and mode.startswith("fsdp2-window")):
        all_refused(outcomes, "accumulate_dtype", "reduce_dtype")
        return
    for outcome in all_well(outcomes):
        assert [gradient.tolist() for gradient in outcome["gradients"]] == [[2.0**-11] * 4] * 2


# ------------------------------------------------------------------------------------------ infinite in one shard


def spiked(nonfinite: str, wrap: Wrap, **options: Any) -> Outcome:
    """In the second of three windows one element of the gradient is infinite: one rank alone has it in its shard."""
    record = Plan(make=Spiked, steps=3).start(wrap, nonfinite=nonfinite, **options)
    spiky = next(module for module in record.model.modules() if isinstance(module, Spiked))
    for number, micro in record.acc.batches(share(dist.get_rank(), 9)):
        spiky.spiked = number == 4
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        record.note(record.acc.step())
    return record.outcome()


SPIKED = ("fsdp1-micro", "fsdp2-window-micro", "fsdp2-micro-window", "hsdp-window")
everywhere("skip", partial(spiked, "skip"), SPIKED)
everywhere("raise", partial(spiked, "raise"), SPIKED)


@pytest.mark.parametrize("mode", SPIKED)
def test_all_ranks_skip_together(on_ranks, mode):
    outcomes = all_well(on_ranks[f"skip-{mode}"])
    same_on_all(outcomes, "weights", "items", "loss")
    for outcome in outcomes:
        assert outcome["skipped"] == [False, True, False]
        assert outcome["step"] == [1, 1, 2]
        assert relative_error(outcome["weights"][2], outcome["weights"][1]) == 0
        assert all(weight.isfinite().all() for weight in outcome["weights"][3].values())


@pytest.mark.parametrize("mode", SPIKED)
def test_all_ranks_raise_together(on_ranks, mode):
    all_refused(on_ranks[f"raise-{mode}"], "window 2", "infinite")


# --------------------------------------------------------------------------------------------------- communication


def counted(wrap: Wrap, **options: Any) -> Outcome:
    """The second window of four micro-batches, over four groups of parameters."""
    model = wrap(made(Tower))
    acc = Accumulator(model, optimizer_for(model), steps=4, **options)
    for number, micro in acc.batches(share(dist.get_rank(), 8)):
        if number == 4:
            collectives = Collectives()
            collectives.__enter__()
        acc.backward(mean_loss(model, micro), items=micro.items)
        acc.step()
    collectives.__exit__(None, None, None)
    return {"counts": dict(collectives.counts)}


everywhere("counted", counted)

# mode: reduce-scatters, all-gathers (the root stays gathered from its forward to its backward), all-reduced gradients
COUNTS = {
    "fsdp2-window-micro": (4, 4 * (2 * 3 + 1), 0),
    "fsdp2-window-window": (4, 4, 0),
    "fsdp2-micro-micro": (16, 4 * (2 * 3 + 1), 0),
    "fsdp2-micro-window": (16, 4, 0),
    "hsdp-window": (4, 4 * (2 * 3 + 1), 4),
    "hsdp-micro": (16, 4, 4),
}


@pytest.mark.parametrize("mode", COUNTS)
def test_what_travels(on_ranks, mode):
    """Besides the gradients: the loss and items, what was used, and whether any shard of the gradient is infinite."""
    for outcome in all_well(on_ranks[f"counted-{mode}"]):
        counts = outcome["counts"]
        found = counts.pop("reduce_scatter_base"), counts.pop("allgather_base")
        assert found == COUNTS[mode][:2]
        small = sum(counts.values()) - COUNTS[mode][2]
        assert 1 <= small <= 3, counts


def test_fsdp1_reduces_once_a_window(on_two_ranks):
    for sync, per_window in (("window", 1), ("micro", 4)):
        for outcome in all_well(on_two_ranks[f"counted-fsdp1-{sync}"]):
            assert outcome["counts"]["reduce_scatter_base"] == 5 * per_window  # three blocks, the head, the rest


# -------------------------------------------------------------------------- a parameter that the last one leaves out

LEFT_OUT = Plan(make=Experts, routed={(rank, n) for rank in range(4) for n in range(12)} - {(1, 3), (0, 7)})
WHOLE: dict[Wrap, Wrap] = {  # all of the model is one group: what all ranks gather may not depend on their batches
    fsdp1: lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
    fsdp2: fully_shard,
    hsdp: lambda model: fully_shard(model, mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))),
}
SYNC_ONCE = ("fsdp1-window", "fsdp2-window-micro", "fsdp2-window-window", "hsdp-window")
everywhere("left_out", lambda wrap, **options: LEFT_OUT.run(WHOLE[wrap], **options), SYNC_ONCE)


@pytest.mark.parametrize("mode", SYNC_ONCE)
def test_a_parameter_left_out_of_a_last_micro_batch_is_synchronised_or_named(on_ranks, mode):
    outcomes = on_ranks[f"left_out-{mode}"]
    if any("MacrobatchError" in outcome.get("raised", ()) for outcome in outcomes):
        assert any("expert" in outcome.get("message", "") for outcome in outcomes)
        assert max(outcome["seconds"] for outcome in outcomes) < 15
    else:
        LEFT_OUT.check(outcomes)


class Choice(nn.Module):
    """Experts of one shape: the second for samples that begin with ROUTED, the first for others, the third for none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, is_routed = self.embedding(x), x[:, 0] == ROUTED
        for expert, chosen in zip(self.experts, (~is_routed, is_routed), strict=False):
            if chosen.any():
                rows = chosen.nonzero().flatten()
                h = h.index_add(0, rows, torch.tanh(expert(h[rows])))
        return self.head(h)


class Apart(Plan):
    """Each micro-batch reaches one expert only: the second if it is routed."""

    def share(self, rank: int) -> list[tuple[int, Batch]]:
        own = super().share(rank)
        for number, micro in own:
            micro.x[:, 0] = ROUTED if (rank, number) in self.routed else 1
        return own


# Window by window: each rank has an expert of its own; one that only an early micro-batch of one rank reaches; nobody
# reaches the second; a rank has both.
APART = Apart(
    make=Choice,
    optimizer="AdamW",
    max_norm=0.05,
    counts=(14,),
    routed={(rank, n) for rank in (1, 3) for n in range(4)} | {(0, 5), (1, 12)},
)
everywhere("apart", lambda wrap, **options: APART.run(WHOLE[wrap], **options))


@every_mode
def test_ranks_that_use_different_parameters_of_a_group(on_ranks, mode):
    if mode.startswith("fsdp1"):  # it gives zeros to what nobody has used, which AdamW decays
        all_well(on_ranks[f"apart-{mode}"])
    else:
        APART.check(on_ranks[f"apart-{mode}"])


def apart_in_half(wrap: Wrap, **options: Any) -> Outcome:
    """Held gradients are in the dtype that they are reduced in, those of a last micro-batch in the parameters'."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return replace(APART, dtype=torch.float32, optimizer="SGD").run(partial(fully_shard, mp_policy=policy), **options)


everywhere("apart_in_half", apart_in_half, FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
def test_the_same_where_gradients_are_reduced_in_another_dtype(on_ranks, mode):
    replace(APART, optimizer="SGD").check_roughly(on_ranks[f"apart_in_half-{mode}"], 0.03)


def verified_apart(wrap: Wrap, **options: Any) -> Outcome:
    """`verify` itself must not mix gradients up, and must see that a loop by hand does."""

    def by_hand(model: nn.Module, batch: Batch) -> None:
        items = torch.tensor(batch.items)
        dist.all_reduce(items)
        (mean_loss(model, batch) * batch.items * dist.get_world_size() / items).backward()
        optimizer_for(model).step()

    def macro_step(model: nn.Module, batch: Batch) -> None:
        MacroStep(model, optimizer_for(model), loss_fn, micro=2, **options)(batch)

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        return mean_loss(model, batch), batch.items

    batch = concatenate([micro for _, micro in APART.share(dist.get_rank())[:3]])
    reports = [verify(WHOLE[wrap](made(Choice)), loss_fn, batch, step=step) for step in (macro_step, by_hand)]
    return {"ok": [report.ok for report in reports]}


everywhere("verified_apart", verified_apart, FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
def test_verify_where_ranks_use_different_parameters_of_a_group(on_ranks, mode):
    for outcome in all_well(on_ranks[f"verified_apart-{mode}"]):
        assert outcome["ok"] == [True, False]


class Heads(nn.Module):
    """Two heads of one shape; it returns what both say."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [head(self.embedding(x)) for head in self.heads]


def reaches_other_modules(wrap: Wrap, **options: Any) -> Outcome:
    """All ranks call both heads, but the loss of each uses one."""
    model, own = fsdp2(made(Heads)), dist.get_rank()
    before = full_weights(model)
    acc = Accumulator(model, optimizer_for(model), steps=2, **options)
    try:
        for _, micro in acc.batches(share(own, 4)):
            acc.backward(mean_loss(lambda x: model(x)[own], micro), items=micro.items)
            acc.step()
    finally:
        assert relative_error(full_weights(model), before) == 0, "a step was taken"
    return {}


everywhere("calls_other_modules", lambda wrap, **options: APART.run(fsdp2, **options), FSDP2)
everywhere("reaches_other_modules", reaches_other_modules, FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
@pytest.mark.parametrize("what", ["calls", "reaches"])
def test_ranks_that_use_different_modules(on_ranks, mode, what):
    """Each with a group of its own: torch pairs what ranks gather and reduce by its order."""
    all_refused(on_ranks[f"{what}_other_modules-{mode}"], "different modules", "no step was taken", "0 * output.sum()")


class Tasks(nn.Module):
    """Two heads of different sizes; a micro-batch uses one of them, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, size * VOCABULARY) for size in (1, 40))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        hidden = self.embedding(x)
        return self.heads[task](hidden)[..., :VOCABULARY] if task < 2 else hidden.sum(-1, keepdim=True)


def uses_another_head(wrap: Wrap, first: int, second: int) -> Outcome:
    model, own = wrap(made(Tasks)), dist.get_rank()
    acc = Accumulator(model, optimizer_for(model), steps=2)
    for _, micro in acc.batches(share(own, 4)):
        acc.backward(model(micro.x, (first, second)[own]).square().mean())
        acc.step()
    return {}


HEADS = {"other_heads": (0, 1), "a_head_and_none": (1, 2), "none_and_a_head": (2, 0)}
for _name, _heads in HEADS.items():
    SCENARIOS[_name] = partial(uses_another_head, fsdp2, *_heads)


@pytest.mark.parametrize("name", HEADS)
def test_ranks_that_use_other_heads_of_other_sizes(on_two_ranks, name):
    """Plain torch ends in a connection reset here."""
    all_refused(on_two_ranks[name], "different modules", "nothing was gathered", "no step was taken")


PENALISED = Plan(counts=(5,), steps=3)


def penalised(wrap: Wrap, **options: Any) -> Outcome:
    """A penalty on a weight, outside of any forward."""
    record = PENALISED.start(wrap, **options)
    for number, micro in record.acc.batches(PENALISED.share(dist.get_rank())):
        record.fed[-1].append((number, record.acc.is_repeat))
        loss, weight = mean_loss(record.model, micro), record.model.get_submodule("key").weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        record.acc.backward(loss + whole.square().sum(), items=micro.items)
        record.note(record.acc.step())
    return record.outcome()


everywhere("penalised", penalised, FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
def test_a_weight_outside_of_its_forward(on_ranks, mode):
    """Exact where it is whole, refused where the gradient of a shard would be of one rank's loss alone."""
    outcomes = on_ranks[f"penalised-{mode}"]
    if mode.endswith("-micro"):
        all_refused(outcomes, "'key.weight'", "outside of the forward", 'gather="window"')
        return
    model = made()
    optimizer = optimizer_for(model)
    for numbers in ((0, 1, 2), (3, 4)):
        batches = [PENALISED.share(rank)[number][1] for rank in (0, 1) for number in numbers]
        items = sum(micro.items for micro in batches)
        loss = sum(mean_loss(model, micro) * micro.items for micro in batches) / items
        (loss + model.key.weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for outcome in all_well(outcomes):
        assert relative_error(outcome["weights"][-1], weights_of(model)) <= 1e-12


# --------------------------------------------------------------------------------- a model that changes between windows


def before_the_change() -> nn.Module:
    model = made(Tower)
    model.head.bias.requires_grad_(False)
    return model


def change(model: nn.Module, shard: Wrap) -> None:
    """Replace a block by another one, and unfreeze a parameter."""
    torch.manual_seed(1)
    model.blocks[1] = shard(nn.Linear(WIDTH, WIDTH).double())
    model.head.bias.requires_grad_(True)


def batches_of_a_window(rank: int, window: int) -> list[Batch]:
    """Three on the first rank, two on the second."""
    return [micro for _, micro in share(rank, 9)][3 * window :][: 3 - rank]


def changes(wrap: Wrap, **options: Any) -> Outcome:
    model = wrap(before_the_change())
    optimizer = optimizer_for(model)
    acc = Accumulator(model, optimizer, steps=3, **options)
    reductions = []
    for window in range(3):
        if window == 1:
            change(model, fully_shard)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        with Collectives() as collectives:
            for micro in acc.batches(batches_of_a_window(dist.get_rank(), window)):
                acc.backward(mean_loss(model, micro), items=micro.items)
                acc.step()
        reductions.append(collectives.counts["reduce_scatter_base"])
    return {"weights": full_weights(model), "reductions": reductions}


everywhere("changes", changes, FSDP2)


@pytest.mark.parametrize("mode", FSDP2)
def test_a_model_that_changes_between_windows(on_ranks, mode):
    model = before_the_change()
    for window in range(3):
        if window == 1:
            change(model, lambda block: block)
        whole = concatenate([micro for rank in (0, 1) for micro in batches_of_a_window(rank, window)])
        mean_loss(model, whole).backward()
        optimizer_for(model).step()
        model.zero_grad()
    for outcome in all_well(on_ranks[f"changes-{mode}"]):
        assert relative_error(outcome["weights"], weights_of(model)) <= 1e-12
        assert len(set(outcome["reductions"])) == 1, "the new block reduces at other times than the old one"


def unfreezes_what_is_not_sharded() -> Outcome:
    model = before_the_change()
    fully_shard(model, ignored_params={model.head.bias})
    acc = Accumulator(model, optimizer_for(model), steps=2)
    for number, micro in acc.batches(share(dist.get_rank(), 4)):
        acc.backward(mean_loss(model, micro), items=micro.items)
        if acc.step() is not None:
            assert number == 1, "a window after the change"
            model.head.bias.requires_grad_(True)
    return {}


SCENARIOS["unfreezes_what_is_not_sharded"] = unfreezes_what_is_not_sharded


def test_a_parameter_that_is_not_sharded_is_unfrozen(on_two_ranks):
    all_refused(on_two_ranks["unfreezes_what_is_not_sharded"], "'head.bias'", "nothing synchronises its gradient")


# ------------------------------------------------------------------------------------------------ calls of Python

PART = (f"{Path(macrobatch.__file__).parent}/_ranks/", f"{Path(macrobatch.__file__).parent}/_torch/")
READS_LOSSES = "loss_nodes.py"  # this one knows nothing of models; tests/unit/test_calls.py counts its calls


def counts_calls(wrap: Wrap, **options: Any) -> Outcome:
    """The functions of the backend that are called for one micro-batch in the middle of a window."""
    model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10))))
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PART) and not file.endswith(READS_LOSSES):
            calls[frame.f_code.co_qualname] += 1

    acc = Accumulator(model, optimizer_for(model), steps=6, **options)
    for number in acc.batches(range(12)):
        acc.backward(model(torch.ones(1, WIDTH)).square().mean(), items=1)
        acc.step()
        sys.setprofile(count if number == 8 else None)
    return {"calls": calls}


COUNTED = ("fsdp2-window-micro", "fsdp2-window-window")
everywhere("counts_calls", counts_calls, COUNTED)


@pytest.mark.parametrize("mode", COUNTED)
def test_a_micro_batch_makes_few_calls(on_ranks, mode):
    """However many modules and parameters there are: no part of the model is looked for, or asked, one by one."""
    for outcome in all_well(on_ranks[f"counts_calls-{mode}"]):
        calls = outcome["calls"]
        assert calls.pop("_Order.note_forward") == 11, "one for each module that is sharded"
        calls.pop("_backport_unused.<locals>.post_backward", None)  # before torch 2.13, one more for each of them
        assert sum(calls.values()) <= 50, calls


# ------------------------------------------------------------------------------------------------------- subgroups


def in_a_subgroup(wrap: Wrap, how: str, **options: Any) -> Outcome:
    """Four ranks as two data-parallel groups of two, each with its own data."""
    data = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"]
    plan = subgroup_plan(dist.get_rank() // 2)
    wrapping = {"mesh": data} if wrap is fsdp2 else {"process_group": data.get_group()}
    given = {"group": {"process_group": data.get_group()}, "mesh": {"process_group": data}, "nothing": {}}[how]
    return plan.run(wrap, wrapping, **given, **options)


def subgroup_plan(group: int) -> Plan:
    return Plan(first_rank=2 * group, counts=((6, 5), (4, 4)), max_norm=0.05, steps=3)


SUBGROUPS = [(ddp, "group"), (ddp, "mesh"), (ddp, "nothing"), (fsdp1, "group"), (fsdp2, "mesh"), (fsdp2, "nothing")]
for _wrap, _how in SUBGROUPS:
    SCENARIOS_ON_FOUR[f"{_wrap.__name__}-{_how}"] = partial(in_a_subgroup, _wrap, _how)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(("wrap", "how"), SUBGROUPS)
def test_items_are_counted_over_the_data_parallel_group(on_four_ranks, wrap, how, group):
    outcomes = on_four_ranks[f"{wrap.__name__}-{how}"][2 * group : 2 * group + 2]
    if how == "nothing" and "raised" in outcomes[0]:
        all_refused(outcomes, "process_group")  # to be told is fine; to count over all ranks is not
    else:
        subgroup_plan(group).check(outcomes)
