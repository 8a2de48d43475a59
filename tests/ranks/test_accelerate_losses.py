"""What `macrobatch.accelerate` makes of losses on two processes, which differ in their numbers of items."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from harness import programs, reference
from harness.loss_programs import READ, UNREAD, Loss, big_gradient, hinge, tokens
from harness.programs import OURS, THEIRS
from harness.ranks import Outcome, Tower, all_well, fsdp1, full_weights, made, optimizer_for
from harness.reference import Batch, relative_error
from macrobatch import MacrobatchError

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
STEPS = 3
SIZES = [[3, 1, 2, 4, 2], [1, 4, 1, 5, 3]]  # of each rank's micro-batches: the second window is short
EQUAL = [[2] * 6, [2] * 6]


def rank() -> int:
    return int(os.environ["RANK"])


def scenario(name: str, function: Callable[[], Outcome]) -> None:
    """Run this on the ranks, under its name."""

    def alone() -> Outcome:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        with programs.fresh():
            return function()

    SCENARIOS[name] = alone


# ---------------------------------------------------------------------------------------------------------- a program


def batches_of(sizes: list[list[int]]) -> list[list[Batch]]:
    """The micro-batches of each rank."""
    return [reference.batches(own, seed=index + 1) for index, own in enumerate(sizes)]


def accelerator_for(library: Any, kind: str = "ddp", *, each: bool = False, **options: Any) -> Any:
    """One that replicates or shards, whatever the device: Accelerate itself shards on GPUs alone."""
    exact = options.pop("exact", True)
    plugin = programs.plugin(library, exact=exact, num_steps=options.pop("steps", STEPS), sync_each_batch=each)
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **options)
    if kind != "ddp":
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1 if kind == "fsdp1" else 2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            use_orig_params=True,
        )
    return accelerator


def step_all(
    accelerator: Any,
    loss_of: Loss,
    sizes: list[list[int]] = SIZES,
    *,
    kind: str = "ddp",
    given: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: [model],
    losses: int = 1,
    options_of: Callable[[Batch], dict[str, Any]] = lambda batch: {},
) -> Outcome:
    """The gradient of each step of a program, and how often it was warned."""
    model = made(Tower)
    if kind == "fsdp1":
        model = fsdp1(model)
    interleaved = [batch for turn in zip(*batches_of(sizes), strict=True) for batch in turn]
    loader = torch.utils.data.DataLoader(interleaved, batch_size=1, collate_fn=lambda batch: batch[0])
    model, optimizer, loader = accelerator.prepare(model, optimizer_for(model), loader)
    weights = [full_weights(model)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            with accelerator.accumulate(*given(model)):
                for _ in range(losses):
                    accelerator.backward(loss_of(model, batch), **options_of(batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights.append(full_weights(model))
    said = [str(one.message) for one in caught if "every micro-batch of a window" in str(one.message)]
    steps = [{n: old[n] - new[n] for n in old} for old, new in itertools.pairwise(weights)]
    return {"steps": steps, "weights": weights, "warned": said}


def refused(function: Callable[[], Any]) -> Outcome:
    """What it raises, as an outcome like any other: ranks that had to end at once would not wait for each other."""
    try:
        function()
    except (MacrobatchError, RuntimeError) as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    return {"kinds": [], "message": "nothing was raised"}


def whole_steps(loss_of: Loss, sizes: list[list[int]] = SIZES, steps: int = STEPS) -> list[dict[str, Any]]:
    """The gradients of the windows of both ranks, in one process."""
    model, both, found = made(Tower), batches_of(sizes), []
    for begin in range(0, len(both[0]), steps):
        window = [batch for own in both for batch in own[begin : begin + steps]]
        gradient = big_gradient(model, window, loss_of)
        found.append({n: torch.zeros_like(p) if (g := gradient[n]) is None else g for n, p in model.named_parameters()})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= found[-1][name]
    return found


# -------------------------------------------------------------------------------------------------------- what is read

KINDS = {
    "ddp": {},
    "ddp, each": {"each": True},
    "ddp, bucket views": {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
    "ddp, unused": {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
    "ddp, static graph": {
        "each": True,
        "kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)],
    },
    "ddp, alone": {"steps": 1},
    "fsdp1": {"kind": "fsdp1"},
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, each": {"kind": "fsdp2", "each": True},
    "fsdp2, alone": {"kind": "fsdp2", "steps": 1},
}


def weighed(name: str, loss_of: Loss) -> Outcome:
    options = dict(KINDS[name])
    kind = str(options.get("kind", "ddp"))
    return step_all(accelerator_for(OURS, **options), loss_of, kind=kind)  # type: ignore[arg-type]


def weighed_on_device() -> Outcome:
    """As on a GPU, where the host does not know how many labels there are."""
    with mock.patch("macrobatch._loss.weighing.number_on_host", return_value=None):
        return weighed("ddp", tokens)


scenario("ddp, on the device: tokens", weighed_on_device)
CORE = ["cross-entropy with padding", "mse", "label smoothing", "mixup", "a penalty"]
for _kind in KINDS:
    scenario(f"{_kind}: tokens", partial(weighed, _kind, tokens))
for _loss in CORE:
    scenario(f"ddp: {_loss}", partial(weighed, "ddp", READ[_loss]))


@pytest.mark.parametrize(
    "name", ["ddp, on the device: tokens", *(f"{kind}: tokens" for kind in KINDS), *(f"ddp: {loss}" for loss in CORE)]
)
def test_windows_of_both_ranks_are_those_of_one_big_batch(on_two_ranks, name):
    kind, _, loss = name.partition(": ")
    steps = 1 if "alone" in kind else STEPS
    expected = whole_steps(READ.get(loss, tokens), steps=steps)
    for outcome in all_well(on_two_ranks[name]):
        assert outcome["warned"] == []
        assert len(outcome["steps"]) == len(expected)
        for found, whole in zip(outcome["steps"], expected, strict=True):
            assert relative_error(found, whole) <= 1e-12


# ---------------------------------------------------------------------------------------- what is as under Accelerate


def recipe(sizes: list[list[int]], steps: int = STEPS) -> Loss:
    """The sum over labels, divided by those of the whole window on both ranks."""
    both, totals = batches_of(sizes), {}
    for index in range(len(both[0])):
        begin = index - index % steps
        total = sum(batch.items for own in both for batch in own[begin : begin + steps])
        totals |= {tuple(own[index].y.flatten().tolist()): total for own in both}
    return lambda model, batch: (
        tokens(model, batch, reduction="sum") * steps * 2 / totals[tuple(batch.y.flatten().tolist())]
    )


def by_turns(*losses: Loss) -> Loss:
    turn = iter(losses * 20)
    return lambda model, batch: next(turn)(model, batch)


def on_rank(where: int, this: Loss, that: Loss) -> Loss:
    return lambda model, batch: (this if rank() == where else that)(model, batch)


custom, by_hand = UNREAD["a custom function"].loss, UNREAD["a mean by hand"].loss
AS_THEIRS: dict[str, tuple[Callable[[], Loss], list[list[int]], dict[str, Any], int]] = {
    # the loss, the sizes, the options, and how many warnings there are on both ranks together
    "the recipe": (lambda: recipe(SIZES), SIZES, {}, 0),
    "unread": (lambda: custom, [size * 3 for size in EQUAL[:2]], {}, 2),
    "unread, unequal": (lambda: by_hand, [[3, 1, 2, 4, 2, 1], [1, 4, 1, 5, 3, 2]], {}, 2),
    "unread on one rank": (lambda: on_rank(1, custom, tokens), [[2, 2, 2], [2, 2, 2]], {"steps": 1}, 2),
    "unread on one rank, held": (lambda: on_rank(1, custom, hinge), EQUAL, {}, 2),
    "unread on one rank in the middle": (lambda: on_rank(1, by_turns(hinge, custom, hinge), hinge), EQUAL, {}, 2),
    "unread in the last": (lambda: by_turns(hinge, hinge, custom), EQUAL, {}, 2),
    "several backwards": (lambda: tokens, [[3, 1, 2], [1, 4, 1]], {"losses": 2}, 2),
    "no models": (lambda: tokens, [[3, 1, 2], [1, 4, 1]], {"given": lambda model: []}, 2),
    "fsdp2, unread on one rank": (lambda: on_rank(1, custom, tokens), [[3, 1, 2], [1, 4, 1]], {"kind": "fsdp2"}, 2),
    "fsdp2, unread in the middle": (lambda: by_turns(hinge, custom, hinge), EQUAL, {"kind": "fsdp2"}, 2),
    "ddp, each, unread in the middle": (lambda: by_turns(hinge, custom, hinge), EQUAL, {"each": True}, 2),
}


def beside(name: str) -> Outcome:
    make, sizes, options, _ = AS_THEIRS[name]
    outcome = {}
    for which, library in (("ours", OURS), ("theirs", THEIRS)):
        programs.start_anew()
        more = {key: options[key] for key in ("losses", "given") if key in options}
        made_with = {key: value for key, value in options.items() if key not in more}
        kind = made_with.get("kind", "ddp")
        outcome[which] = step_all(accelerator_for(library, **made_with), make(), sizes, kind=kind, **more)
    return outcome


for _name in AS_THEIRS:
    scenario(_name, partial(beside, _name))


@pytest.mark.parametrize("name", AS_THEIRS)
def test_what_cannot_be_weighed_is_as_under_accelerate(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    _, sizes, options, num_warnings = AS_THEIRS[name]
    for outcome in outcomes:
        ours, theirs = outcome["ours"], outcome["theirs"]
        assert len(ours["steps"]) == len(theirs["steps"]) == -(-len(sizes[0]) // options.get("steps", STEPS))
        for found, other in zip(ours["weights"], theirs["weights"], strict=True):
            assert relative_error(found, other) == 0
    assert sum(len(outcome["ours"]["warned"]) for outcome in outcomes) == num_warnings


def test_the_recipe_is_one_big_batch(on_two_ranks):
    for outcome in all_well(on_two_ranks["the recipe"]):
        for found, whole in zip(outcome["ours"]["steps"], whole_steps(tokens), strict=True):
            assert relative_error(found, whole) <= 1e-12


# ------------------------------------------------------------------------------------------------- what is an error


def mixing(kind: str, loss_of: Loss, **options: Any) -> Outcome:
    return refused(lambda: step_all(accelerator_for(OURS, kind, **options), loss_of, kind=kind))


def some_items(kind: str, *, where: int, scaled: bool = False, **options: Any) -> Outcome:
    """One rank gives items, the other does not."""

    def train() -> None:
        accelerator = accelerator_for(OURS, kind, **options)
        if scaled:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step_all(
            accelerator,
            tokens,
            kind=kind,
            options_of=lambda batch: {"items": batch.items} if rank() == where else {},
        )

    return refused(train)


def static_graph(options_of: Callable[[Batch], dict[str, Any]]) -> Outcome:
    handlers = [DistributedDataParallelKwargs(static_graph=True)]
    return refused(lambda: step_all(accelerator_for(OURS, kwargs_handlers=handlers), tokens, options_of=options_of))


REFUSED = {
    "unread after unequal ones": (partial(mixing, "ddp", by_turns(tokens, tokens, custom)), "CustomBackward"),
    "unread on one rank after unequal ones": (
        partial(mixing, "ddp", on_rank(1, by_turns(tokens, tokens, custom), tokens)),
        "cannot be weighed anew",
    ),
    "unread on one rank in the last": (
        partial(mixing, "ddp", on_rank(0, by_turns(tokens, tokens, custom), tokens)),
        "cannot be weighed anew",
    ),
    **{
        f"items on rank {where} only, {kind}": (partial(some_items, kind, where=where), "on some processes only")
        for where in (0, 1)
        for kind in ("ddp", "fsdp1", "fsdp2")
    },
    "items on one rank only, fp16": (partial(some_items, "ddp", where=0, scaled=True), "on some processes only"),
    "items on the other rank only, fp16": (partial(some_items, "ddp", where=1, scaled=True), "on some processes only"),
    "items on one rank only, fsdp2, fp16": (partial(some_items, "fsdp2", where=0, scaled=True), "some processes only"),
    "items on one rank only, alone": (partial(some_items, "ddp", where=1, steps=1), "on some processes only"),
    "a static graph": (partial(static_graph, lambda batch: {}), "Leave static_graph out"),
    "a static graph with items": (
        partial(static_graph, lambda batch: {"items": batch.items}),
        "Leave static_graph out",
    ),
}
for _name, (_function, _) in REFUSED.items():
    scenario(_name, _function)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_an_error_on_all_ranks(on_two_ranks, name):
    for outcome in all_well(on_two_ranks[name]):
        assert "MacrobatchError" in outcome["kinds"], outcome["message"]
        assert REFUSED[name][1] in outcome["message"]


# -------------------------------------------------------------------------------------------- as programs are written


def local() -> Outcome:
    """Under LocalSGD each rank trains for itself, and weights are averaged now and then."""
    accelerator = accelerator_for(OURS)
    model = made(Tower)
    model, _ = accelerator.prepare(model, optimizer_for(model))
    own = batches_of(SIZES)[rank()][:STEPS]
    expected = big_gradient(made(Tower), own, tokens)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=100, enabled=True):
        for batch in own:
            with accelerator.accumulate(model):
                accelerator.backward(tokens(model, batch))
        found = reference.gradients_of(accelerator.unwrap_model(model))
    return {"error": relative_error(found, expected)}


scenario("local", local)


def test_ranks_that_train_for_themselves(on_two_ranks):
    for outcome in all_well(on_two_ranks["local"]):
        assert outcome["error"] <= 1e-12


def skips_first() -> Outcome:
    """One rank leaves out a micro-batch inside a window, as under Accelerate it may, and all talk in between."""
    accelerator = accelerator_for(OURS)
    model = made(Tower)
    model, _ = accelerator.prepare(model, optimizer_for(model))
    both = [own[:STEPS] for own in batches_of(SIZES)]
    for index, batch in enumerate(both[rank()]):
        with accelerator.accumulate(model):
            loss = tokens(model, batch)
            if not (index == 0 and rank() == 1):
                accelerator.backward(loss)
            accelerator.gather(loss.detach())
    found = reference.gradients_of(accelerator.unwrap_model(model))
    return {"error": relative_error(found, big_gradient(made(Tower), both[0] + both[1][1:], tokens))}


scenario("skips_first", skips_first)


def test_a_rank_that_leaves_out_a_micro_batch(on_two_ranks):
    for outcome in all_well(on_two_ranks["skips_first"]):
        assert outcome["error"] <= 1e-12


def overflows() -> Outcome:
    """Under a scaler, with very different numbers of items on the ranks."""
    accelerator = accelerator_for(OURS)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return step_all(accelerator, tokens)


scenario("scaled", overflows)


def test_scaled_losses_are_weighed(on_two_ranks):
    outcomes = all_well(on_two_ranks["scaled"])
    for outcome in outcomes:
        for found, whole in zip(outcome["steps"], whole_steps(tokens), strict=True):
            assert relative_error(found, whole) < 2e-2  # float16
    assert relative_error(outcomes[0]["weights"][-1], outcomes[1]["weights"][-1]) == 0
