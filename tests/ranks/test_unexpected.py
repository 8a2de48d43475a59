"""Programs on two ranks that nobody had thought of: each is exact, or gets an error that says what to do.

Scenarios compare with `whole`: one process that trains on the shares of both ranks at once.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from harness.ranks import Outcome, all_refused, all_well, ddp, fsdp1, fsdp2, full_weights
from harness.reference import Reentrant, relative_error
from macrobatch import Accumulator, MacroStep

EXACT = 1e-12
SCENARIOS: dict[str, Callable[[], Outcome]] = {}


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    SCENARIOS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------------- vocabulary


def shares(micro_batches: int = 2) -> list[list[Tensor]]:
    """For each rank its micro-batches of 4 samples."""
    draw = torch.Generator().manual_seed(3)
    return [[torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in range(micro_batches)] for _ in range(2)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def window(acc: Accumulator, model: nn.Module) -> Any:
    for x in acc.batches(shares()[dist.get_rank()]):
        acc.backward(loss_of(model, x), items=len(x))
        result = acc.step()
    return result


def whole_step(whole: nn.Module, optimizer: torch.optim.Optimizer, each: Sequence[Tensor] | None = None) -> None:
    optimizer.zero_grad()
    loss_of(whole, torch.cat(each or [x for share in shares() for x in share])).backward()
    optimizer.step()


def error(model: nn.Module, whole: nn.Module) -> float:
    return relative_error(full_weights(model), full_weights(whole))


# ---------------------------------------------------------------------------------- a repeated batch is nothing at all


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(2)).double()

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


UNEVEN = [[0] * 4, [1]]  # for each rank, which expert its batches reach: the second runs out after its first


def repeats(loader: str, **options: Any) -> Outcome:
    model, whole = (Experts() for _ in range(2))
    wrapped = ddp(model, find_unused_parameters=True)
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    optimizer, other = adamw(model.parameters()), adamw(whole.parameters())
    acc = Accumulator(wrapped, optimizer, steps=1, **options)
    x = shares()[0][0]
    mine = UNEVEN[dist.get_rank()]
    for expert in acc.batches(mine if loader == "sized" else iter(mine)):
        acc.backward(wrapped(x, expert).pow(2).mean(), items=len(x))
        acc.step()
    for number in range(4):
        other.zero_grad()
        used = [share[number] for share in UNEVEN if number < len(share)]
        (sum(whole(x, expert).pow(2).sum() for expert in used) / (len(used) * len(x))).backward()
        other.step()
    steps = [[optimizer.state[p]["step"] for p in m.parameters()] for m in (model,)]
    return {"error": error(model, whole), "steps": [int(step) for step in steps[0]]}


for loader in ("sized", "unsized"):
    for sync in ("window", "micro"):
        SCENARIOS[f"repeats-{loader}-{sync}"] = partial(repeats, loader, sync=sync)


@pytest.mark.parametrize("sync", ["window", "micro"])
@pytest.mark.parametrize("loader", ["sized", "unsized"])
def test_a_parameter_that_only_a_repeat_uses_is_left_alone(on_two_ranks, loader, sync):
    for outcome in all_well(on_two_ranks[f"repeats-{loader}-{sync}"]):
        assert outcome["error"] <= EXACT
        assert outcome["steps"] == [4, 4, 1, 1]


@scenario
def macro_step_repeats() -> Outcome:
    """With sync="micro" every rank takes as many turns as the one with the most samples."""
    model, whole = (Experts() for _ in range(2))
    wrapped, x = ddp(model, find_unused_parameters=True), torch.cat(shares(4)[0])
    train = MacroStep(
        wrapped,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        lambda m, batch: m(batch["x"], int(batch["expert"][0])).pow(2).mean(),
        micro=4,
        sync="micro",
    )
    counts = [(16, 4), (16, 0)]  # in the second window rank 1 has nothing, and repeats what it had
    for share in counts:
        samples = share[dist.get_rank()]
        train({"x": x[:samples], "expert": torch.full((samples,), dist.get_rank())} if samples else None)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for first, second in counts:
        optimizer.zero_grad()
        loss = whole(x[:first], 0).pow(2).sum() + (whole(x[:second], 1).pow(2).sum() if second else 0)
        (loss / (first + second)).backward()
        optimizer.step()
    return {"error": error(model, whole)}


def test_a_macro_step_with_repeats(on_two_ranks):
    assert all(outcome["error"] <= EXACT for outcome in all_well(on_two_ranks["macro_step_repeats"]))


# ------------------------------------------------------------------------------------------- meddling in every backend


def clip(optimizer: Any, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zero(optimizer: Any, model: nn.Module) -> None:
    optimizer.zero_grad()


def zero_in_place(optimizer: Any, model: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=False)


def stray_step(optimizer: Any, model: nn.Module) -> None:
    optimizer.step()


WRAPS = {
    "ddp": ddp,
    "ddp-views": partial(ddp, gradient_as_bucket_view=True),
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp1-orig": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": fully_shard,
}
MEDDLING = {"clip": clip, "zero": zero, "zero in place": zero_in_place, "stray step": stray_step}


def meddles(wrap: str, sync: str, what: str, when: int) -> Outcome:
    """Ends with the error; or, where what was done did nothing, with how far off the weights are."""
    whole = net()
    model = WRAPS[wrap](copy.deepcopy(whole))
    optimizer = sgd(model)
    acc = Accumulator(model, optimizer, steps=2, sync=sync)
    for turn, x in enumerate(acc.batches(shares()[dist.get_rank()])):
        acc.backward(loss_of(model, x), items=len(x))
        if turn == when:
            MEDDLING[what](optimizer, model)
        acc.step()
    whole_step(whole, sgd(whole))
    own = model.module if hasattr(model, "module") else model
    with FullyShardedDataParallel.summon_full_params(model) if wrap.startswith("fsdp1") else torch.no_grad():
        return {"error": error(own, whole)}


for wrap in WRAPS:
    for sync in ("window", "micro"):
        for what in MEDDLING:
            for when in (0, 1):
                SCENARIOS[f"meddles-{wrap}-{sync}-{what}-{when}"] = partial(meddles, wrap, sync, what, when)


@pytest.mark.parametrize("when", [0, 1], ids=["in the middle", "before the step"])
@pytest.mark.parametrize("what", MEDDLING)
@pytest.mark.parametrize("sync", ["window", "micro"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_meddling_is_an_error_or_does_nothing(on_two_ranks, wrap, sync, what, when):
    """Under sharding with sync="window", what is held back in the middle of a window is out of an optimizer's reach."""
    outcomes = on_two_ranks[f"meddles-{wrap}-{sync}-{what}-{when}"]
    out_of_reach = wrap.startswith("fsdp") and sync == "window" and when == 0 and what != "stray step"
    if out_of_reach and "raised" not in outcomes[0]:
        assert all(outcome["error"] <= EXACT for outcome in all_well(outcomes))
    else:
        all_refused(outcomes, "open window" if what == "stray step" else "undivided sums")


# ---------------------------------------------------------------------------------------- what is frozen, or was


def changed(frozen: Sequence[int], thawed: Sequence[int], **options: Any) -> Outcome:
    """Some layers are frozen when DDP is made, others when the window begins."""
    whole, model = net(), net()
    for layer in frozen:
        model[layer].requires_grad_(False)
    wrapped = ddp(model)
    acc = Accumulator(wrapped, sgd(model), steps=2, **options)
    for each in (model, whole):
        for layer in range(3):
            each[layer].requires_grad_(layer not in thawed)
    window(acc, wrapped)
    window(acc, wrapped)
    optimizer = sgd(whole)
    whole_step(whole, optimizer)
    whole_step(whole, optimizer)
    return {"error": error(model, whole)}


SCENARIOS["thawed"] = partial(changed, [1], [])
SCENARIOS["frozen"] = partial(changed, [], [1])
SCENARIOS["swapped"] = partial(changed, [1], [2])
SCENARIOS["thawed-micro"] = partial(changed, [1], [], sync="micro")


@pytest.mark.parametrize("name", ["thawed", "frozen", "swapped"])
def test_parameters_frozen_or_thawed_after_ddp_was_made(on_two_ranks, name):
    assert all(outcome["error"] <= EXACT for outcome in all_well(on_two_ranks[name]))


def test_a_thawed_parameter_cannot_travel_with_every_micro_batch(on_two_ranks):
    all_refused(on_two_ranks["thawed-micro"], "frozen or unfrozen after", 'sync="window"')


def teaches(wrap: Callable[[nn.Module], nn.Module], first: bool) -> Outcome:
    whole, teacher = net(), nn.Linear(3, 1).double().requires_grad_(False)
    model = wrap(net())
    acc = Accumulator([teacher, model] if first else [model, teacher], sgd(model), steps=2)
    window(acc, model)
    whole_step(whole, sgd(whole))
    return {"error": error(model.module if hasattr(model, "module") else model, whole)}


for name, wrap in {"ddp": ddp, "fsdp2": fully_shard}.items():
    for first in (True, False):
        SCENARIOS[f"teaches-{name}-{first}"] = partial(teaches, wrap, first)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_frozen_teacher_in_the_list(on_two_ranks, wrap, first):
    assert all(outcome["error"] <= EXACT for outcome in all_well(on_two_ranks[f"teaches-{wrap}-{first}"]))


# --------------------------------------------------------------------------------------------- what a graph hides


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.hidden, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.double()
        self.uses_hidden = True

    def forward(self, x: Tensor) -> Tensor:
        run = self.hidden if self.uses_hidden else torch.neg
        return self.last(Reentrant.apply(lambda h: torch.tanh(run(h)), self.first(x)))


@scenario
def checkpoints() -> Outcome:
    model, whole = Checkpointed(), Checkpointed()
    wrapped = ddp(model)
    acc = Accumulator(wrapped, sgd(model), steps=2)
    window(acc, wrapped)
    window(acc, wrapped)
    optimizer = sgd(whole)
    whole_step(whole, optimizer)
    whole_step(whole, optimizer)
    return {"error": error(model, whole)}


def test_somebody_elses_checkpointing_under_ddp(on_two_ranks):
    assert all(outcome["error"] <= EXACT for outcome in all_well(on_two_ranks["checkpoints"]))


@scenario
def hides_what_it_leaves_out() -> Outcome:
    model = Checkpointed()
    wrapped = ddp(model)
    acc = Accumulator(wrapped, sgd(model), steps=2)
    for x in acc.batches(shares()[dist.get_rank()]):
        model.uses_hidden = not acc.is_last
        acc.backward(loss_of(wrapped, x), items=len(x))
        acc.step()
    return {}


def test_a_hidden_parameter_that_is_not_synchronised_is_named(on_two_ranks):
    all_refused(on_two_ranks["hides_what_it_leaves_out"], "hidden.weight", "not synchronised")


# ---------------------------------------------------------------------------------------------- float16 on the way


def narrow(wrap: str) -> Outcome:
    model: Any = nn.Linear(3, 2)
    if wrap == "fsdp2":
        model = fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    else:
        model = ddp(model)
        if wrap == "hook":
            model.register_comm_hook(None, fp16_compress_hook)
        else:
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, max_norm=math.inf)
    norms = []
    for number in range(4):
        with acc.micro_batch():
            acc.backward(model(torch.ones(4, 3)).sum() / 4, items=100_000 * (1 + number))
        if result := acc.step():
            norms.append(result.grad_norm.item())
    return {"norms": norms}


for wrap in ("hook", "built-in", "fsdp2"):
    SCENARIOS[f"narrow-{wrap}"] = partial(narrow, wrap)


@pytest.mark.parametrize("wrap", ["hook", "built-in", "fsdp2"])
def test_gradients_that_travel_in_float16(on_two_ranks, wrap):
    for outcome in all_well(on_two_ranks[f"narrow-{wrap}"]):
        assert outcome["norms"] == pytest.approx([math.sqrt(8)] * 2, rel=1e-3)


# ------------------------------------------------------------------------------------------------------------- the rest


@scenario
def fractions() -> Outcome:
    model = ddp(net())
    acc = Accumulator(model, sgd(model))
    items = []
    for x in acc.batches([shares()[0][0]] * (3 if dist.get_rank() == 0 else 1)):
        acc.backward(loss_of(model, x).clamp(max=1e9), items=2.5 if dist.get_rank() == 0 else 4)  # not to be read
        items.append(acc.step().items.item())
    return {"items": items}


def test_fractions_of_items_are_not_cut_off(on_two_ranks):
    assert [outcome["items"] for outcome in all_well(on_two_ranks["fractions"])] == [[6.5, 2.5, 2.5]] * 2


@scenario
def divides_otherwise() -> Outcome:
    whole, model = net(), fully_shard(net())
    acc = Accumulator(model, sgd(model), steps=2, max_norm=math.inf)
    model.set_gradient_divide_factor(1.0)
    norm = window(acc, model).grad_norm.item()
    loss_of(whole, torch.cat([x for share in shares() for x in share])).backward()
    return {"apart": abs(norm - nn.utils.clip_grad_norm_(whole.parameters(), math.inf).item())}


def test_a_divide_factor_set_later(on_two_ranks):
    assert all(outcome["apart"] <= EXACT for outcome in all_well(on_two_ranks["divides_otherwise"]))


@scenario
def divides_in_parts() -> Outcome:
    model = net()
    fully_shard(model[0])
    model = fully_shard(model)
    acc = Accumulator(model, sgd(model), steps=2)
    model.set_gradient_divide_factor(1.0)  # of the root alone
    window(acc, model)
    return {}


def test_a_divide_factor_of_one_part(on_two_ranks):
    all_refused(on_two_ranks["divides_in_parts"], "different factors", "inside")


def bypasses(how: str) -> Outcome:
    model = ddp(net())
    acc = Accumulator(model, sgd(model), steps=2)
    around = {"no_sync around the loop": model.no_sync}.get(how, contextlib.nullcontext)
    with around():
        for x in acc.batches(shares()[dist.get_rank()]):
            if how == "no_sync around a forward":
                with model.no_sync():
                    loss = loss_of(model, x)
            else:
                loss = loss_of(model.module if how == "module" else model, x)
            acc.backward(loss, items=len(x))
            acc.step()
    return {}


BYPASSES = ("no_sync around the loop", "no_sync around a forward", "module")
SCENARIOS |= {f"bypasses-{how}": partial(bypasses, how) for how in BYPASSES}


@pytest.mark.parametrize("how", BYPASSES)
def test_a_forward_that_nothing_synchronises(on_two_ranks, how):
    all_refused(on_two_ranks[f"bypasses-{how}"], "did not go through", "no_sync")


@scenario
def switches_reducing_off() -> Outcome:
    model = fully_shard(net())
    acc = Accumulator(model, sgd(model), steps=2)
    for x in acc.batches(shares()[dist.get_rank()]):
        model.set_requires_gradient_sync(False)
        acc.backward(loss_of(model, x), items=len(x))
        acc.step()
    return {}


def test_reducing_that_is_switched_off(on_two_ranks):
    all_refused(on_two_ranks["switches_reducing_off"], "reduced no gradients", "set_requires_gradient_sync")


@scenario
def nan_in_views() -> Outcome:
    model = ddp(net(), gradient_as_bucket_view=True)
    acc = Accumulator(model, sgd(model), steps=2, sync="micro", nonfinite="skip")
    for turn, x in enumerate(acc.batches(shares()[dist.get_rank()])):
        acc.backward(loss_of(model, x) * (1.0 if turn else math.nan), items=len(x))
        result = acc.step()
    return {"skipped": bool(result.skipped)}


def test_a_nan_is_not_taken_for_meddling(on_two_ranks):
    assert all(outcome["skipped"] for outcome in all_well(on_two_ranks["nan_in_views"]))


def partly_frozen(sync: str) -> Outcome:
    whole, inner = net(), net()
    for each in (whole, inner):
        each[1].requires_grad_(False)
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, sync=sync, max_norm=math.inf)
    norm = window(acc, model).grad_norm.item()
    loss_of(whole, torch.cat([x for share in shares() for x in share])).backward()
    return {"apart": abs(norm - nn.utils.clip_grad_norm_(whole.parameters(), math.inf).item())}


SCENARIOS |= {f"partly-frozen-{sync}": partial(partly_frozen, sync) for sync in ("window", "micro")}


@pytest.mark.parametrize("sync", ["window", "micro"])
def test_fsdp1_with_frozen_parameters(on_two_ranks, sync):
    assert all(outcome["apart"] <= EXACT for outcome in all_well(on_two_ranks[f"partly-frozen-{sync}"]))


@scenario
def joins() -> Outcome:
    model = ddp(net())
    acc = Accumulator(model, sgd(model), steps=2)
    with Join([model]):
        window(acc, model)
    return {}


def test_join_around_the_loop(on_two_ranks):
    all_refused(on_two_ranks["joins"], "Join", "Leave it out")


def fails_in_the_forward(wrap: Callable[[nn.Module], nn.Module]) -> Outcome:
    whole, inner = net(), net()
    model = wrap(inner)
    acc = Accumulator(model, sgd(model), steps=2)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = inner[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        window(acc, model)
    hook.remove()
    acc.discard()
    window(acc, model)
    whole_step(whole, sgd(whole))
    return {"error": error(model.module if hasattr(model, "module") else model, whole)}


SCENARIOS["fails-fsdp1"] = partial(fails_in_the_forward, fsdp1)
SCENARIOS["fails-ddp"] = partial(fails_in_the_forward, ddp)
SCENARIOS["fails-fsdp2"] = partial(fails_in_the_forward, fsdp2)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_an_exception_in_the_forward(on_two_ranks, wrap):
    assert all(outcome["error"] <= EXACT for outcome in all_well(on_two_ranks[f"fails-{wrap}"]))


def test_an_exception_in_the_forward_of_fsdp1(on_two_ranks):
    all_refused(on_two_ranks["fails-fsdp1"], "left by an exception", "checkpoint")


@scenario
def another_default() -> Outcome:
    torch.set_default_dtype(torch.bfloat16)
    try:
        whole, model = net(), ddp(net())
        acc = Accumulator(model, sgd(model), steps=2)
        window(acc, model)
        whole_step(whole, sgd(whole))
        return {"error": error(model.module, whole)}
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_default_dtype(on_two_ranks):
    assert all(outcome["error"] <= EXACT for outcome in all_well(on_two_ranks["another_default"]))
