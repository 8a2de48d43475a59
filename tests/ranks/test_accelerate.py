"""`macrobatch.accelerate` on two real processes: beside Accelerate, and against one process with the whole batch."""

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from harness import programs, reference
from harness.programs import OURS, Program
from harness.ranks import (
    Collectives,
    Outcome,
    Spiked,
    Tower,
    all_well,
    flags,
    full_weights,
    made,
    optimizer_for,
    run,
    same_on_all,
    share,
)
from harness.reference import Experts, mean_loss, relative_error
from macrobatch import MacrobatchError
from macrobatch.accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    get_logger,
)

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
BOTH = (False, True)


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Run this on the ranks, under its name."""

    def alone() -> Outcome:
        with programs.fresh(OURS):
            return function()

    SCENARIOS[function.__name__] = alone
    return function


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, list[Outcome]]:
    return run(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("accelerate"))


# ----------------------------------------------------------------------------------------- every way to share out data

WAYS = {
    f"{split=} {dispatch=} {each=}": Program(
        batch_size=4, split_batches=split, dispatch_batches=dispatch, sync_each_batch=each
    )
    for split, dispatch, each in itertools.product(BOTH, BOTH, BOTH)
}


def beside(program: Program) -> Outcome:
    """The same program under both; theirs only where it is installed."""
    outcome = {"ours": asdict(program.run(OURS))}
    try:
        return outcome | {"theirs": asdict(program.run(programs.theirs()))}
    except ImportError:
        return outcome


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
def test_every_step_is_that_of_accelerate(ran, name):
    pytest.importorskip("accelerate")
    for outcome in all_well(ran[name]):
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
def test_windows_are_those_of_the_big_batch(ran, name, kind):
    """Three micro-batches, or six, in windows of two: a short one at the end of each epoch, or none."""
    expected = programs.whole_batches(replace(WAYS[name], samples=24), world=2)
    for outcome in all_well(ran[f"{name}, {kind}"]):
        trace = outcome["ours"]
        found = [weights for weights, closed in zip(trace["weights"], trace["closed"], strict=True) if closed]
        assert len(found) == len(expected)
        for own, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(own, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_in_step_when_they_should_be_and_only_then(ran, name):
    for outcome in all_well(ran[f"{name}, exact"]):
        trace = outcome["ours"]
        assert trace["in_step"] == [closed or WAYS[name].sync_each_batch for closed in trace["closed"]]
        assert trace["closed"] == ([False, True] * 3 if WAYS[name].split_batches else [False, True, True]) * 2


@pytest.mark.parametrize("name", WAYS)
def test_learning_rates_are_those_written_by_hand(ran, name):
    for outcome in all_well(ran[f"{name}, exact"]):
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
        "handed over": programs.items_handed_over(OURS, steps=2, batch_size=4)
    }


def test_tokens_are_counted_as_in_the_guide(ran):
    outcomes = all_well(ran["tokens_counted"])
    assert [outcome["items"] for outcome in outcomes] == [52, 84]
    for outcome in outcomes:
        assert outcome["total"] == 136
        assert [f"{number:.4f}" for number in outcome["weight"].tolist()] == ["0.2117", "0.3172"]
        assert [f"{number:.4f}" for number in outcome["handed over"].tolist()] == ["0.2117", "0.3172"]


# ------------------------------------------------------------------------------------- tokens, replicated and sharded

GATHERED = FullyShardedDataParallelPlugin(reshard_after_forward=False)  # all in one group, from forward to backward
SHARDING = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Linear"])


def sentences(count: int) -> list[reference.Batch]:
    """In the order in which ranks take turns: rank 0's first, rank 1's first, rank 0's second ..."""
    return [batch for pair in zip(share(0, count), share(1, count), strict=True) for _, batch in pair]


def counted(
    make: Callable[[], nn.Module] = Tower, *, steps: int = 2, count: int = 5, as_tensor: bool = False, **options: Any
) -> Outcome:
    """Windows of tokens; the optimizer is made before the model is prepared, and each step is the gradient itself."""
    each = options.pop("each", False)
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each), **options
    )
    model = made(make)
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
                    accelerator.clip_grad_value_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
            before = flags(model) if before is None else before
            assert flags(model) == before, "a flag was left as accumulate() had set it"
            if accelerator.sync_gradients:
                weights.append(full_weights(model))
    return {"weights": weights, "collectives": dict(collectives.counts), "norms": norms}


def unweighed(**options: Any) -> Outcome:
    """The same without items: every micro-batch weighs the same, also in the short last window."""
    accelerator = Accelerator(gradient_accumulation_steps=4, **options)
    model = made(Tower)
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
    "fsdp2": partial(counted, fsdp_plugin=SHARDING),
    "fsdp2, tensors": partial(counted, fsdp_plugin=SHARDING, as_tensor=True),
    "fsdp2, each": partial(counted, fsdp_plugin=SHARDING, each=True),
    "fsdp2, gathered": partial(counted, fsdp_plugin=GATHERED, steps=4),
    "fsdp2, gathered, each": partial(counted, fsdp_plugin=GATHERED, steps=4, each=True),
}
UNWEIGHED = {"ddp, unweighed": partial(unweighed), "fsdp2, unweighed": partial(unweighed, fsdp_plugin=SHARDING)}
for name, function in (COUNTED | UNWEIGHED).items():
    function.__name__ = name
    scenario(function)


def whole_steps(make: Callable[[], nn.Module], steps: int, counting: reference.Counting) -> list[dict[str, Any]]:
    """The gradients of the windows, one process with all that both have in them."""
    model, batches, gradients = made(make), sentences(5), []
    for begin in range(0, len(batches), 2 * steps):
        gradient = reference.whole_batch_gradient(model, batches[begin : begin + 2 * steps], counting)
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


@pytest.mark.parametrize("name", COUNTED | UNWEIGHED)
def test_gradients_are_those_of_the_big_batch(ran, name):
    outcomes = all_well(ran[name])
    same_on_all(outcomes, "weights")
    make = Experts if "unused" in name else Tower
    counting = reference.Counting("none" if name in UNWEIGHED else "int")
    steps = 4 if "gathered" in name or name in UNWEIGHED else 2
    expected, weights = whole_steps(make, steps, counting), outcomes[0]["weights"]
    assert len(weights) - 1 == len(expected) == (2 if steps == 4 else 3)
    for before, after, gradient in zip(weights, weights[1:], expected, strict=False):
        found = {parameter: before[parameter] - after[parameter] for parameter in before}
        assert relative_error(found, gradient) <= 1e-12
    norms = [torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradient.values()])) for gradient in expected]
    if name in COUNTED:
        torch.testing.assert_close(outcomes[1]["norms"], norms)


def test_gradients_travel_once_a_window(ran):
    """Three windows of five micro-batches; Tower has four Linears, and what is around them."""
    assert [ran[name][0]["collectives"]["reduce_scatter_base"] for name in ("fsdp2", "fsdp2, each")] == [3 * 5, 5 * 5]
    once, each = (ran[name][0]["collectives"]["allreduce"] for name in ("ddp", "ddp, each"))
    assert each - once == 2  # one bucket, and what else travels does so either way


# --------------------------------------------------------------------------------------------------------- by hand


@scenario
def by_hand() -> Outcome:
    """no_sync, its end, and trigger_sync_in_backward, as the guides have them."""
    accelerator = Accelerator()
    model = accelerator.prepare(made(Tower))
    batches = [batch for _, batch in share(accelerator.process_index, 2)]
    seen = {}
    with accelerator.no_sync(model):
        accelerator.backward(mean_loss(model, batches[0]))
    seen["held"] = programs.in_step(model)
    accelerator.backward(mean_loss(model, batches[1]))
    seen["sent"] = programs.in_step(model)
    model.zero_grad()
    with accelerator.no_sync(model):
        first, second = (mean_loss(model, batch) for batch in batches)
    accelerator.backward(first)
    seen["before"] = programs.in_step(model)
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    seen["triggered"] = programs.in_step(model)
    seen["kept"] = (model.require_backward_grad_sync, model.require_forward_param_sync) == before
    return seen


def test_gradients_are_held_and_sent_by_hand(ran):
    for outcome in all_well(ran["by_hand"]):
        assert [outcome[key] for key in ("held", "sent", "before", "triggered")] == [False, True, False, True]
        assert outcome["kept"]


# ------------------------------------------------------------------------------------------------- values of all ranks


@scenario
def gathered() -> Outcome:
    accelerator = Accelerator()
    rank = accelerator.process_index
    loader, seen = accelerator.prepare(DataLoader(torch.arange(9), batch_size=2)), []
    for batch in loader:
        seen.append(accelerator.gather_for_metrics({"n": batch})["n"].tolist())
        seen.append(accelerator.gather_for_metrics([f"s{n}" for n in batch.tolist()]))
    handler = Records()
    logging.getLogger("ranks").addHandler(handler)
    logger = get_logger("ranks")
    logger.warning("main")
    logger.warning("each", main_process_only=False)
    logger.warning("in turn", in_order=True)
    return {
        "number": accelerator.gather(torch.tensor(rank)).tolist(),
        "nested": accelerator.gather([{"a": torch.full((2, 1), rank)}])[0]["a"].tolist(),
        "metrics": seen,
        "logged": handler.messages,
        "type": str(accelerator.distributed_type),
        "main": accelerator.is_main_process,
    }


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_values_are_gathered(ran):
    for rank, outcome in enumerate(all_well(ran["gathered"])):
        assert outcome["number"] == [0, 1]
        assert outcome["nested"] == [[0], [0], [1], [1]]
        numbers = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        assert outcome["metrics"] == [part for ns in numbers for part in (ns, [f"s{n}" for n in ns])]
        assert outcome["logged"] == (["main"] if rank == 0 else []) + ["each", "in turn"]
        assert outcome["type"] == "MULTI_CPU"
        assert outcome["main"] == (rank == 0)


# ----------------------------------------------------------------------------------------------------- float16


def uneven(rank: int, count: int) -> list[reference.Batch]:
    """One rank has one item in each micro-batch, the other fifteen: they must shrink their losses alike."""
    return [reference.batch(4, seed=10 * rank + i, items=(1, 15)[rank]) for i in range(count)]


def one_rank_overflows(each: bool = False, **options: Any) -> Outcome:
    """In the second of three windows, on rank 1 alone."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each),
        **options,
    )
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
    "ddp, overflow": partial(one_rank_overflows),
    "ddp, overflow, each": partial(one_rank_overflows, each=True),
    "fsdp2, overflow": partial(one_rank_overflows, fsdp_plugin=SHARDING),
}
for name, function in OVERFLOWS.items():
    function.__name__ = name
    scenario(function)


@pytest.mark.parametrize("name", OVERFLOWS)
def test_all_ranks_skip_together(ran, name):
    outcomes = all_well(ran[name])
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


# ------------------------------------------------------------------------------------------------------ going on later


def saved(name: str, **options: Any) -> Outcome:
    """Three steps, saved after the first; then the last two again."""
    directory = Path(os.environ["RANKS_PIDS"], name)
    accelerator = Accelerator(**options)
    model = made(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = DataLoader(sentences(3), batch_size=1, collate_fn=lambda batch: batch[0], shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, data)

    def steps() -> list[Any]:
        seen = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append((full_weights(model), scheduler.get_last_lr()))
        return seen

    steps()
    accelerator.save_state(directory)
    first = steps()
    accelerator.load_state(directory)
    files = sorted(file.name for file in directory.iterdir())
    return {"first": first, "again": steps(), "files": files}


for name, options in {"ddp-saved": {}, "fsdp2-saved": {"fsdp_plugin": SHARDING}}.items():
    function = partial(saved, name, **options)
    function.__name__ = name
    scenario(function)


@pytest.mark.parametrize("name", ["ddp-saved", "fsdp2-saved"])
def test_a_run_goes_on_where_it_was_saved(ran, name):
    outcomes = all_well(ran[name])
    for outcome in outcomes:
        assert len(outcome["first"]) == 3
        for (own, rate), (other, other_rate) in zip(outcome["first"], outcome["again"], strict=True):
            assert relative_error(own, other) == 0
            assert rate == other_rate
        assert {file.partition(".")[2] for file in outcome["files"]} == {"json", "safetensors"}
        assert {"process_0.json", "process_1.json", "model.safetensors"} < set(outcome["files"])


# ------------------------------------------------------------------------------------------------------------- errors


def refused(function: Callable[[], Any]) -> Outcome:
    """What it raises, as an outcome like any other: ranks that had to end at once would not wait for each other."""
    try:
        function()
    except (MacrobatchError, OSError) as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    return {"kinds": [], "message": "nothing was raised"}


@scenario
def optimizer_without_its_model() -> Outcome:
    accelerator = Accelerator(fsdp_plugin=SHARDING)
    return refused(lambda: accelerator.prepare(optimizer_for(made(Tower))))


@scenario
def optimizer_of_another_model() -> Outcome:
    accelerator = Accelerator(fsdp_plugin=SHARDING)
    return refused(lambda: accelerator.prepare(made(Tower), optimizer_for(made(Tower))))


@scenario
def unprepared_model() -> Outcome:
    accelerator = Accelerator()
    return refused(lambda: accelerator.accumulate(made(Tower)))


@scenario
def tensor_instead_of_a_model() -> Outcome:
    accelerator = Accelerator()
    return refused(lambda: accelerator.accumulate(torch.zeros(1, requires_grad=True)))


@scenario
def items_without_a_model() -> Outcome:
    accelerator = Accelerator()
    model = accelerator.prepare(made(Tower))

    def count() -> None:
        with accelerator.accumulate():
            accelerator.backward(mean_loss(model, share(0, 1)[0][1]), items=1)

    return refused(count)


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
def unreadable() -> Outcome:
    """Process 0 fails to read what it should dispatch."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Broken(6), batch_size=2))
    return refused(lambda: list(loader))


class Broken(programs.Stream):
    def __iter__(self) -> Any:
        yield from list(super().__iter__())[:5]
        raise OSError("the disk is gone")


REFUSED = {
    "optimizer_without_its_model": ["belongs to no model", "prepare(model, optimizer) together"],
    "optimizer_of_another_model": ["belongs to no model"],
    "unprepared_model": ["2 ranks", "not wrapped"],
    "tensor_instead_of_a_model": ["tensor instead of a module"],
    "items_without_a_model": ["was not given the model"],
    "unused_in_the_last": ["find_unused_parameters=True"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(ran, name):
    for outcome in all_well(ran[name]):
        assert "MacrobatchError" in outcome["kinds"], outcome["message"]
        for words in REFUSED[name]:
            assert words in outcome["message"]


def test_an_error_of_process_0_reaches_all(ran):
    first, second = all_well(ran["unreadable"])
    assert first["kinds"][0] == "OSError"
    assert second["kinds"][0] == "BatchError"
    assert "the disk is gone" in second["message"]
