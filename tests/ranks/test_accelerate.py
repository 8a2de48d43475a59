"""`macrobatch.accelerate` on two real processes: beside Accelerate, and against one process with the whole batch."""

import itertools
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader

from harness import programs, reference
from harness.programs import OURS, THEIRS, Program
from harness.ranks import (
    Collectives,
    Outcome,
    Spiked,
    Tower,
    all_well,
    flags,
    fsdp1,
    full_weights,
    made,
    optimizer_for,
    same_on_all,
    share,
)
from harness.reference import Experts, mean_loss, relative_error
from macrobatch import MacrobatchError
from macrobatch.accelerate import Accelerator, GradientAccumulationPlugin

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
BOTH = (False, True)


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Run this on the ranks, under its name."""

    def alone() -> Outcome:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # without a GPU, Accelerate asks to be told
        with programs.fresh():
            return function()

    SCENARIOS[function.__name__] = alone
    return function


# ----------------------------------------------------------------------------------------- every way to share out data

WAYS = {
    f"{split=} {dispatch=} {each=}": Program(
        batch_size=4, split_batches=split, dispatch_batches=dispatch, sync_each_batch=each
    )
    for split, dispatch, each in itertools.product(BOTH, BOTH, BOTH)
}


def beside(program: Program) -> Outcome:
    """The same program under both."""
    return {"ours": asdict(program.run(OURS)), "theirs": asdict(program.run(THEIRS))}


PARITY = {
    **{f"{name} as theirs": replace(way, exact=False) for name, way in WAYS.items()},
    "shuffled": Program(shuffle=True, exact=False, max_norm=0.2),
    "shuffled, split": Program(shuffle=True, exact=False, split_batches=True, batch_size=4),
    "nested": Program(nested=True, exact=False, batch_size=4),
    "nested, dispatched": Program(nested=True, exact=False, dispatch_batches=True, batch_size=4),
    "broken off": Program(breaks=1, exact=False),
    "dropped": Program(drop_last=True, exact=False, samples=23),
    "dropped, dispatched": Program(drop_last=True, exact=False, samples=23, dispatch_batches=True),
    "unsized": Program(unsized=True, exact=False, samples=23),
    "unsized, split": Program(unsized=True, exact=False, samples=22, batch_size=4, split_batches=True),
    "unsized, not dispatched": Program(unsized=True, exact=False, samples=23, dispatch_batches=False),
    "tiny": Program(samples=1, exact=False),
    "not with the loader": Program(samples=20, steps=3, sync_with_dataloader=False),
    "one cycle": Program(samples=24, one_cycle=11, exact=False),
}
SCENARIOS |= {name: partial(beside, program) for name, program in PARITY.items()}
SCENARIOS |= {
    f"{name}, exact": partial(beside, replace(way, samples=24)) for name, way in WAYS.items() if not way.nested
}
SCENARIOS |= {
    f"{name}, counted": partial(beside_ours, replace(way, samples=24, counts=True))
    for beside_ours in [lambda program: {"ours": asdict(program.run(OURS))}]
    for name, way in WAYS.items()
}


@pytest.mark.parametrize("name", PARITY)
def test_every_step_is_that_of_accelerate(on_two_ranks, name):
    for outcome in all_well(on_two_ranks[name]):
        own, other = outcome["ours"], outcome["theirs"]
        assert own["closed"] == other["closed"]
        assert own["samples"] == other["samples"]
        assert own["losses"] == other["losses"]
        assert own["rates"] == other["rates"]
        assert own["norms"] == other["norms"]
        assert own["in_step"] == other["in_step"]
        assert len(own["weights"]) == len(other["weights"]) > 0
        assert all(map(torch.equal, own["weights"], other["weights"]))


@pytest.mark.parametrize("kind", ["exact", "counted"])
@pytest.mark.parametrize("name", WAYS)
def test_windows_are_those_of_the_big_batch(on_two_ranks, name, kind):
    """Three micro-batches, or six, in windows of two: a short one at the end of each epoch, or none."""
    expected = programs.whole_batches(replace(WAYS[name], samples=24), world=2)
    for outcome in all_well(on_two_ranks[f"{name}, {kind}"]):
        trace = outcome["ours"]
        found = [weights for weights, closed in zip(trace["weights"], trace["closed"], strict=True) if closed]
        assert len(found) == len(expected)
        for own, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(own, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_in_step_when_they_should_be_and_only_then(on_two_ranks, name):
    for outcome in all_well(on_two_ranks[f"{name}, exact"]):
        trace = outcome["ours"]
        assert trace["in_step"] == [closed or WAYS[name].sync_each_batch for closed in trace["closed"]]
        assert trace["closed"] == ([False, True] * 3 if WAYS[name].split_batches else [False, True, True]) * 2


@pytest.mark.parametrize("name", WAYS)
def test_learning_rates_are_those_written_by_hand(on_two_ranks, name):
    for outcome in all_well(on_two_ranks[f"{name}, exact"]):
        rate, expected = 0.1, []
        for closed in outcome["ours"]["closed"]:
            if closed:
                rate *= 0.9 if WAYS[name].split_batches else 0.9**2  # once for each process
            expected.append(rate)
        assert outcome["ours"]["rates"] == pytest.approx(expected, rel=1e-12)


# -------------------------------------------------------------------------------------------- the guides' own examples


@scenario
def tokens_counted() -> Outcome:
    return programs.tokens_counted(OURS, steps=2, batch_size=4) | {
        "passed": programs.items_handed_over(OURS, steps=2, batch_size=4)
    }


def test_tokens_are_counted_as_in_the_guide(on_two_ranks):
    outcomes = all_well(on_two_ranks["tokens_counted"])
    assert [outcome["items"] for outcome in outcomes] == [52, 84]
    for outcome in outcomes:
        assert outcome["total"] == 136
        assert [f"{number:.4f}" for number in outcome["weight"].tolist()] == ["0.2117", "0.3172"]
        assert [f"{number:.4f}" for number in outcome["passed"].tolist()] == ["0.2117", "0.3172"]


# ------------------------------------------------------------------------------------- tokens, replicated and sharded


def accelerator_for(kind: str, **options: Any) -> Any:
    """One that replicates or shards, whatever the device: Accelerate itself shards on GPUs alone."""
    accelerator = Accelerator(cpu=True, **options)
    if kind == "ddp":
        return accelerator
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1 if kind == "fsdp1" else 2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        reshard_after_forward=None if kind == "fsdp1" else kind != "fsdp2, gathered",
        use_orig_params=True,
    )
    return accelerator


def sentences(count: int) -> list[reference.Batch]:
    """In the order in which ranks take turns: rank 0's first, rank 1's first, rank 0's second ..."""
    return [batch for pair in zip(share(0, count), share(1, count), strict=True) for _, batch in pair]


def counted(
    make: Callable[[], nn.Module] = Tower, *, steps: int = 2, count: int = 5, as_tensor: bool = False, **options: Any
) -> Outcome:
    """Windows of tokens; the optimizer is made before the model is prepared, and each step is the gradient itself."""
    each = options.pop("each", False)
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
    accelerator = accelerator_for(options.pop("kind", "ddp"), gradient_accumulation_plugin=plugin, **options)
    model = made(make)
    model = fsdp1(model) if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2 else model
    optimizer = optimizer_for(model)
    loader = DataLoader(sentences(count), batch_size=1, collate_fn=lambda batch: batch[0])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before, weights, norms = None, [full_weights(model)], []
    with Collectives() as collectives:
        for batch in loader:
            with accelerator.accumulate(model):
                items = (batch.y != reference.IGNORED).sum()
                accelerator.backward(mean_loss(model, batch), items=items if as_tensor else int(items))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e6))
                optimizer.step()
                optimizer.zero_grad()
            before = flags(model) if before is None else before
            assert flags(model) == before, "a flag was left as accumulate() had set it"
            if accelerator.sync_gradients:
                weights.append(full_weights(model))
    return {"weights": weights, "collectives": dict(collectives.counts), "norms": norms}


def unsaid(kind: str) -> Outcome:
    """The same without items: they are read from the loss, also in the short last window."""
    accelerator = accelerator_for(kind, gradient_accumulation_steps=4)
    model = fsdp1(made(Tower)) if kind == "fsdp1" else made(Tower)
    loader = DataLoader(sentences(5), batch_size=1, collate_fn=lambda batch: batch[0])
    model, optimizer, loader = accelerator.prepare(model, optimizer_for(model), loader)
    weights = [full_weights(model)]
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            weights.append(full_weights(model))
    return {"weights": weights}


COUNTED = {
    "ddp": partial(counted),
    "ddp, tensors": partial(counted, as_tensor=True),
    "ddp, each": partial(counted, each=True),
    "ddp, unused": partial(
        counted, Experts, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    ),
    "fsdp2": partial(counted, kind="fsdp2"),
    "fsdp2, tensors": partial(counted, kind="fsdp2", as_tensor=True),
    "fsdp2, each": partial(counted, kind="fsdp2", each=True),
    "fsdp2, gathered": partial(counted, kind="fsdp2, gathered", steps=4),
    "fsdp1": partial(counted, kind="fsdp1"),
    "fsdp1, tensors": partial(counted, kind="fsdp1", as_tensor=True),
    "fsdp1, each": partial(counted, kind="fsdp1", each=True),
}
UNSAID = {f"{kind}, unsaid": partial(unsaid, kind) for kind in ("ddp", "fsdp1", "fsdp2")}
for name, function in (COUNTED | UNSAID).items():
    function.__name__ = name
    scenario(function)


def whole_steps(make: Callable[[], nn.Module], steps: int) -> list[dict[str, Any]]:
    """The gradients of the windows, one process with all that both have in them."""
    model, batches, gradients = made(make), sentences(5), []
    for begin in range(0, len(batches), 2 * steps):
        gradient = reference.whole_batch_gradient(model, batches[begin : begin + 2 * steps])
        gradients.append(
            {
                name: torch.zeros_like(dict(model.named_parameters())[name]) if g is None else g
                for name, g in gradient.items()
            }
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= gradients[-1][name]
    return gradients


@pytest.mark.parametrize("name", COUNTED | UNSAID)
def test_gradients_are_those_of_the_big_batch(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    same_on_all(outcomes, "weights")
    make = Experts if "unused" in name else Tower
    steps = 4 if "gathered" in name or name in UNSAID else 2
    expected, weights = whole_steps(make, steps), outcomes[0]["weights"]
    assert len(weights) - 1 == len(expected) == (2 if steps == 4 else 3)
    for before, after, gradient in zip(weights, weights[1:], expected, strict=False):
        found = {parameter: before[parameter] - after[parameter] for parameter in before}
        assert relative_error(found, gradient) <= 1e-12
    norms = [torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradient.values()])) for gradient in expected]
    if name in COUNTED and "fsdp1" not in name:  # torch takes no norm of its float64 shards
        torch.testing.assert_close(outcomes[1]["norms"], norms)


def test_gradients_travel_once_a_window(on_two_ranks):
    """Three windows of five micro-batches; how many parts a model is sharded into depends on Accelerate's version."""
    once, each = (on_two_ranks[name][0]["collectives"]["reduce_scatter_base"] for name in ("fsdp2", "fsdp2, each"))
    assert (once / 3, each / 5) in [(5, 5), (6, 6)]
    once, each = (on_two_ranks[name][0]["collectives"]["allreduce"] for name in ("ddp", "ddp, each"))
    assert each - once == 2  # one bucket, and what else travels does so either way


# ----------------------------------------------------------------------------------------------------- float16


def uneven(rank: int, count: int) -> list[reference.Batch]:
    """One rank has one item in each micro-batch, the other fifteen: they must shrink their losses alike."""
    return [reference.batch(4, seed=10 * rank + i, items=(1, 15)[rank]) for i in range(count)]


def one_rank_overflows(kind: str, each: bool = False) -> Outcome:
    """In the second of three windows, on rank 1 alone."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accelerator = accelerator_for(kind, gradient_accumulation_plugin=plugin)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    model = made(Spiked, torch.float32)
    model, optimizer = accelerator.prepare(model, optimizer_for(model))
    bare, skipped, weights = accelerator.unwrap_model(model), [], [full_weights(model)]
    for turn, batch in enumerate(uneven(accelerator.process_index, 6)):
        bare.spiked = turn == 3 and accelerator.process_index == 1
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), items=batch.items)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped.append(optimizer.step_was_skipped)
            weights.append(full_weights(model))
    return {"skipped": skipped, "scale": accelerator.scaler.get_scale(), "weights": weights}


OVERFLOWS = {
    "ddp, overflow": partial(one_rank_overflows, "ddp"),
    "ddp, overflow, each": partial(one_rank_overflows, "ddp", each=True),
    "fsdp2, overflow": partial(one_rank_overflows, "fsdp2"),
}
for name, function in OVERFLOWS.items():
    function.__name__ = name
    scenario(function)


@pytest.mark.parametrize("name", OVERFLOWS)
def test_all_ranks_skip_together(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    same_on_all(outcomes, "weights", "skipped", "scale")
    for outcome in outcomes:
        assert outcome["skipped"] == [False, True, False]
        assert outcome["scale"] == 512
        first, second, third, fourth = outcome["weights"]
        assert relative_error(second, third) == 0
        assert relative_error(first, second) > 1e-4 < relative_error(third, fourth)
        gradient = whole_steps_of_first_window()
        found = {parameter: first[parameter] - second[parameter] for parameter in first}
        assert relative_error(found, gradient) < 2e-2  # float16


def whole_steps_of_first_window() -> dict[str, Any]:
    return reference.whole_batch_gradient(made(Spiked, torch.float32), uneven(0, 2) + uneven(1, 2))


# ------------------------------------------------------------------------------------------------------------- errors


def refused(function: Callable[[], Any]) -> Outcome:
    """What it raises, as an outcome like any other: ranks that had to end at once would not wait for each other."""
    try:
        function()
    except (MacrobatchError, OSError) as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    return {"kinds": [], "message": "nothing was raised"}


@scenario
def unused_in_the_last() -> Outcome:
    """The expert takes part in the first micro-batch only: DDP would leave its gradient as it is on each rank."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(made(Experts))
    batches = share(accelerator.process_index, 2, routed=[(0, 0), (1, 0)])

    def train() -> None:
        for _, batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))

    return refused(train)


@scenario
def items_of_a_model_that_was_not_prepared() -> Outcome:
    accelerator, model = Accelerator(), made(Tower)

    def count() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, share(0, 1)[0][1]), items=1)

    return refused(count)


REFUSED = {
    "items_of_a_model_that_was_not_prepared": ["2 ranks", "not wrapped"],
    "unused_in_the_last": ["find_unused_parameters=True"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(on_two_ranks, name):
    for outcome in all_well(on_two_ranks[name]):
        assert "MacrobatchError" in outcome["kinds"], outcome["message"]
        for words in REFUSED[name]:
            assert words in outcome["message"]


# ------------------------------------------------------------------------------------------- as programs are written


class Pair(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).double()

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        return self.parts[part](x).square().mean()


@scenario
def disjoint_backwards() -> Outcome:
    """Two losses over disjoint parts of one DDP model, each with its own backward, in a short window."""
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(gradient_accumulation_steps=4, kwargs_handlers=handlers)
    data = torch.randn(12, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    bare = Pair()
    model, loader = accelerator.prepare(bare, DataLoader(data))
    for x in loader:
        with accelerator.accumulate([model]):
            for part in range(2):
                accelerator.backward(model(x, part))
            if accelerator.sync_gradients:
                found = reference.gradients_of(bare)
                model.zero_grad()
    sum(bare(data[8:], part) for part in range(2)).backward()
    return {"error": relative_error(found, reference.gradients_of(bare))}


def test_two_backwards_over_disjoint_parts_of_one_model(on_two_ranks):
    for outcome in all_well(on_two_ranks["disjoint_backwards"]):
        assert outcome["error"] <= 1e-12


def listed(library: Any) -> Outcome:
    """A list of models: Accelerate does not look into it, and sends gradients in every micro-batch."""
    accelerator = library.Accelerator(
        cpu=True, gradient_accumulation_plugin=programs.plugin(library, exact=False, num_steps=2)
    )
    model = made(Tower)
    model, optimizer = accelerator.prepare(model, optimizer_for(model))
    with Collectives() as collectives:
        for _, batch in share(accelerator.process_index, 4):
            with accelerator.accumulate([model]):
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": full_weights(model), "collectives": dict(collectives.counts)}


@scenario
def lists_as_theirs() -> Outcome:
    ours = listed(OURS)
    programs.start_anew()
    return {"ours": ours, "theirs": listed(THEIRS)}


def test_lists_are_bitwise_as_theirs_where_that_is_asked_for(on_two_ranks):
    for outcome in all_well(on_two_ranks["lists_as_theirs"]):
        ours, theirs = outcome["ours"], outcome["theirs"]
        assert relative_error(ours["weights"], theirs["weights"]) == 0
        assert ours["collectives"] == theirs["collectives"]


@scenario
def saved_by_one() -> Outcome:
    """As most programs do it: the main process alone calls save_state."""
    folder = Path(os.environ["RANKS_PIDS"], "saved")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = made(Tower)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _, batch in share(accelerator.process_index, 2):
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch), items=batch.items)
            optimizer.step()
            optimizer.zero_grad()
    before = full_weights(model)
    if accelerator.is_main_process:
        accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(folder))
    return {
        "error": relative_error(full_weights(model), before),
        "loss": accelerator.gather_for_metrics(torch.tensor(2.0 + accelerator.process_index)).tolist(),
    }


def test_the_main_process_alone_saves(on_two_ranks):
    for outcome in all_well(on_two_ranks["saved_by_one"]):
        assert outcome["error"] == 0
        assert outcome["loss"] == [2.0, 3.0]
