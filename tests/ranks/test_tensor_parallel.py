"""Tensor parallelism on real ranks: alone on two, with DDP, FSDP2 and HSDP around it on four.

The ranks of one tensor-parallel group share a model and its data, so that a plan knows them as one rank.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from harness.ranks import (
    Outcome,
    Plan,
    Record,
    all_refused,
    all_well,
    bare,
    fsdp2,
    full_weights,
    made,
    optimizer_for,
    refused,
    same_on_all,
    share,
)
from harness.reference import VOCABULARY, WIDTH, Counting, concatenate, mean_loss, relative_error
from macrobatch import Accumulator, MacroStep
from macrobatch._ranks.placements import layout_of, spread_over

Wrap = Callable[..., nn.Module]
TENSOR = 2  # ranks that share a model
TURN = itertools.count()


class Feedforward(nn.Module):
    """A block of a transformer without its attention. The vocabulary has an odd number of words: shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(h + self.down(torch.tanh(self.up(self.norm(h)))))


def mesh(*shape: int) -> Any:
    """All ranks: those along the last dimension share a model, those along the others have data of their own.

    Its dimensions are named anew each time: torch keeps meshes by their names and shapes, with groups that are gone.
    """
    turn = next(TURN)
    names = tuple(f"{name}-{turn}" for name in ("copies", "data", "tensor")[-len(shape) :])
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def along(whole: Any, *names: str) -> Any:
    """Some dimensions of a mesh."""
    return whole[tuple(name for name in whole.mesh_dim_names if name.partition("-")[0] in names)]


def data_ranks() -> Any:
    """The ranks that have data of their own."""
    return along(mesh(dist.get_world_size() // TENSOR, TENSOR), "data")


def split(model: nn.Module, tensor: Any, **head: Any) -> nn.Module:
    """The norm stays as it is, the same on all ranks; the bias of `down` is a DTensor and the same on all."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(**(head or {"output_layouts": Replicate()})),
    }
    return parallelize_module(model, tensor, plan)


def split_sequences(model: nn.Module, tensor: Any) -> nn.Module:
    """All parameters are DTensors; the gradient of the norm arrives as partial sums over parts of a sequence."""
    part = Shard(1)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=part),
        "down": RowwiseParallel(output_layouts=part),
        "head": ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
    }
    return parallelize_module(model, tensor, plan)


def alone(how: Wrap, model: nn.Module) -> nn.Module:
    return how(model, along(mesh(1, TENSOR), "tensor"))


def in_fsdp(how: Wrap, model: nn.Module) -> nn.Module:
    both = mesh(2, TENSOR)
    return fsdp2(how(model, along(both, "tensor")), mesh=along(both, "data"))


def in_hsdp(how: Wrap, model: nn.Module) -> nn.Module:
    """Of three dimensions, though one has a single rank only."""
    all_three = mesh(2, 1, TENSOR)
    return fsdp2(how(model, along(all_three, "tensor")), mesh=along(all_three, "copies", "data"))


ON_TWO: dict[str, tuple[Wrap, dict[str, Any]]] = {
    "alone": (partial(alone, split), {}),
    "sequences": (partial(alone, split_sequences), {}),
}
ON_FOUR: dict[str, tuple[Wrap, dict[str, Any]]] = {
    "fsdp-window-micro": (partial(in_fsdp, split), {}),
    "fsdp-window-window": (partial(in_fsdp, split_sequences), {"gather": "window"}),
    "fsdp-micro-micro": (partial(in_fsdp, split_sequences), {"sync": "micro"}),
    "fsdp-micro-window": (partial(in_fsdp, split), {"sync": "micro", "gather": "window"}),
    "hsdp": (partial(in_hsdp, split_sequences), {}),
}
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
SCENARIOS_ON_FOUR: dict[str, Callable[[], Outcome]] = {}


def everywhere(name: str, scenario: Callable[..., Outcome], among: Collection[str] = (*ON_TWO, *ON_FOUR)) -> None:
    """Run this on the ranks in every mode: scenario(wrap, **options)."""
    for scenarios, modes in ((SCENARIOS, ON_TWO), (SCENARIOS_ON_FOUR, ON_FOUR)):
        for mode, (wrap, options) in modes.items():
            if mode in among:
                scenarios[f"{name}-{mode}"] = partial(scenario, wrap, **options)


# ------------------------------------------------------------------------------------------------- exact, every way


def exact(plan: Plan, wrap: Wrap, **options: Any) -> Outcome:
    return plan.run(wrap, rank=dist.get_rank() // TENSOR, process_group=data_ranks(), **options)


def check(plan: Plan, outcomes: list[Outcome]) -> None:
    """All ranks of the mesh have the same, to the last bit; and that is what one process does."""
    all_well(outcomes)
    same_on_all(outcomes, "loss", "items", "grad_norm", "weights", "skipped", "step")
    plan.check(outcomes[::TENSOR])


ALL_DTENSORS = ("sequences", "fsdp-window-window")  # foreach and fused optimizers of torch take no mixture
EXACT: dict[str, tuple[Plan, Collection[str]]] = {
    "clipped": (
        Plan(make=Feedforward, counts=(4,), steps=2, counting=Counting("tensor"), max_norm=0.05),
        (*ON_TWO, *ON_FOUR),
    ),
    "adamw": (Plan(make=Feedforward, counts=(3,), steps=2, optimizer="AdamW"), ("alone", "fsdp-window-micro")),
    "empty": (Plan(make=Feedforward, counts=(4,), steps=2, empty=[(0, 1), (1, 2)]), ("sequences", "fsdp-micro-micro")),
    "uneven": (Plan(make=Feedforward, counts=((4, 1),), steps=2, max_norm=0.05), ("fsdp-window-window",)),
    "carried": (Plan(make=Feedforward, counts=(3,), steps=2, remainder="carry", now=True), ALL_DTENSORS),
    "sgd-foreach": (Plan(make=Feedforward, counts=(4,), steps=2, optimizer="SGD-foreach"), ALL_DTENSORS),
    "adamw-foreach": (
        Plan(make=Feedforward, counts=(4,), steps=2, optimizer="AdamW-foreach", max_norm=0.05),
        ("sequences",),
    ),
    "adamw-fused": (
        Plan(make=Feedforward, counts=(4,), steps=2, optimizer="AdamW-fused", max_norm=0.05),
        ALL_DTENSORS,
    ),
}
for _name, (_plan, _modes) in EXACT.items():
    everywhere(_name, partial(exact, _plan), _modes)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, modes) in EXACT.items() for mode in modes])
def test_every_window_is_the_one_big_batch(on_ranks, name, mode):
    check(EXACT[name][0], on_ranks[f"{name}-{mode}"])


FOLDED = Plan(make=Feedforward, dtype=torch.float32, counts=(4,), steps=2, optimizer="AdamW-fused", max_norm=0.05)
everywhere("folded", partial(exact, FOLDED), ALL_DTENSORS)


@pytest.mark.parametrize("mode", ALL_DTENSORS)
def test_a_fused_optimizer_divides_and_clips(on_ranks, mode):
    outcomes = all_well(on_ranks[f"folded-{mode}"])
    same_on_all(outcomes, "loss", "items", "grad_norm", "weights")
    FOLDED.check_roughly(outcomes[::TENSOR], 1e-4)


# ----------------------------------------------------------------------------------------------------- whole batches

HANDED_OVER = Plan(make=Feedforward, counts=((4, 2),), steps=2, max_norm=0.05)


def handed_over(wrap: Wrap, **options: Any) -> Outcome:
    """The second data-parallel rank has nothing in the last window."""
    model, rank = wrap(made(Feedforward)), dist.get_rank() // TENSOR
    train = MacroStep(
        model,
        optimizer_for(model),
        lambda model, batch: (mean_loss(model, batch), batch.items),
        micro=2,
        max_norm=HANDED_OVER.max_norm,
        process_group=data_ranks(),
        **options,
    )
    record, own = Record(train, model), HANDED_OVER.share(rank)
    for window in HANDED_OVER.windows(dist.get_world_size() // TENSOR):
        record.fed[-1] = [(number, False) for number in window[rank]]
        record.note(train(concatenate([own[n][1] for n in window[rank]]) if window[rank] else None))
    return record.outcome()


MACRO = ("alone", "sequences", "fsdp-window-window")
everywhere("handed_over", handed_over, MACRO)


@pytest.mark.parametrize("mode", MACRO)
def test_whole_batches(on_ranks, mode):
    check(HANDED_OVER, on_ranks[f"handed_over-{mode}"])


# ------------------------------------------------------------------------------------------ infinite in one shard


def spiked(nonfinite: str, max_norm: float | None, wrap: Wrap, **options: Any) -> Outcome:
    """In the second of three windows the gradient of one bias is infinite, in the last rank's part of it alone."""
    record = Plan(make=Feedforward, steps=2, max_norm=max_norm).start(
        wrap, nonfinite=nonfinite, process_group=data_ranks(), **options
    )
    numbers: list[int] = []

    def spike(gradient: Tensor) -> Tensor:
        return gradient * (math.inf if numbers[-1] in (2, 3) else 1)

    if dist.get_rank() == dist.get_world_size() - 1:
        record.model.up.register_forward_pre_hook(lambda up, _: up.bias.register_hook(spike) and None)
    for number, micro in record.acc.batches(share(dist.get_rank() // TENSOR, 6)):
        numbers.append(number)
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        record.note(record.acc.step())
    return record.outcome()


everywhere("raise", partial(spiked, "raise", None), ["alone"])
everywhere("skip", partial(spiked, "skip", None), ["alone"])
everywhere("skip", partial(spiked, "skip", 1.0), ["fsdp-window-micro"])


@pytest.mark.parametrize("mode", ["alone", "fsdp-window-micro"])
def test_all_ranks_skip_together(on_ranks, mode):
    outcomes = all_well(on_ranks[f"skip-{mode}"])
    same_on_all(outcomes, "weights", "items", "loss", "grad_norm")
    for outcome in outcomes:
        assert outcome["skipped"] == [False, True, False]
        assert relative_error(outcome["weights"][2], outcome["weights"][1]) == 0
        assert relative_error(outcome["weights"][3], outcome["weights"][2]) > 0


def test_all_ranks_raise_together(on_two_ranks):
    all_refused(on_two_ranks["raise-alone"], "window 2", "infinite")


# ------------------------------------------------------------------------------------------ losses that are DTensors


def logits_in_parts(wrap: Wrap) -> Outcome:
    """Each rank has the logits of its own words, and the loss is a DTensor."""
    with loss_parallel():
        return exact(IN_PARTS, partial(wrap, partial(split, use_local_output=False)))


def batch_in_parts(reduction: str, as_tensor: bool) -> Outcome:
    """One program on a batch in parts: a loss is the sum, or the mean, of what the ranks hold; so are the items."""
    tensor = along(mesh(1, TENSOR), "tensor")
    model = distribute_module(made(partial(nn.Linear, 3, 2)), tensor)
    acc = Accumulator(
        model, optimizer_for(model), steps=2, reduction=reduction, max_norm=0.5, process_group=data_ranks()
    )
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 2, dtype=torch.float64)
    losses = []
    for part in acc.batches([slice(0, 4), slice(4, 10)]):
        own = distribute_tensor(x[part], tensor, [Shard(0)])
        errors = (model(own) - distribute_tensor(y[part], tensor, [Shard(0)])).pow(2).sum(1)
        losses.append(errors.mean() if reduction == "mean" else errors.sum())
        acc.backward(losses[-1], items=torch.ones_like(errors).sum() if as_tensor else len(x[part]))
        result = acc.step()
    whole = made(partial(nn.Linear, 3, 2))
    loss = (whole(x) - y).pow(2).sum(1).mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer_for(whole).step()
    return {
        "partial": [str(loss.placements[0]).startswith("P") for loss in losses],
        "error": relative_error(full_weights(model), full_weights(whole)),
        "off": [(result.loss - loss).item(), (result.grad_norm - norm).item(), result.items.item() - 10],
    }


IN_PARTS = Plan(make=Feedforward, counts=(5,), steps=2, counting=Counting("mixed"), max_norm=0.05)
SCENARIOS["logits_in_parts-alone"] = partial(logits_in_parts, alone)
SCENARIOS_ON_FOUR["logits_in_parts-fsdp-window-micro"] = partial(logits_in_parts, in_fsdp)
BATCHES = list(itertools.product(("mean", "sum"), (False, True)))
for _reduction, _as_tensor in BATCHES:
    SCENARIOS[f"{_reduction}-{_as_tensor}"] = partial(batch_in_parts, _reduction, _as_tensor)


@pytest.mark.parametrize("mode", ["alone", "fsdp-window-micro"])
def test_a_loss_of_logits_in_parts(on_ranks, mode):
    check(IN_PARTS, on_ranks[f"logits_in_parts-{mode}"])


@pytest.mark.parametrize(("reduction", "as_tensor"), BATCHES)
def test_a_loss_of_a_batch_in_parts(on_two_ranks, reduction, as_tensor):
    for outcome in all_well(on_two_ranks[f"{reduction}-{as_tensor}"]):
        assert outcome["partial"] == [True, True]
        assert outcome["error"] <= 1e-12
        assert max(map(abs, outcome["off"])) <= 1e-12  # loss, norm, items


# ----------------------------------------------------------------------------------------------------- inside DDP

INSIDE_DDP = {
    "clipped": Plan(make=Feedforward, counts=(4,), steps=2, max_norm=0.05),
    "uneven": Plan(make=Feedforward, counts=((4, 1),), steps=2, optimizer="AdamW", max_norm=0.05),
}
CUT = {"embedding.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0, "head.bias": 0}


class InDDP(Record):
    """DDP puts plain parameters, the local parts, in the place of DTensors, and its first forward removes them."""

    def __init__(self, plan: Plan) -> None:
        both = mesh(2, TENSOR)
        model = split(made(Feedforward), along(both, "tensor"))
        model = DistributedDataParallel(model, device_mesh=along(both, "data"))
        self.named = {bare(name): parameter for name, parameter in model.named_parameters()}
        optimizer = optimizer_for(model, plan.optimizer)
        super().__init__(Accumulator(model, optimizer, steps=plan.steps, max_norm=plan.max_norm), model)

    def weights_now(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}


def in_ddp(plan: Plan) -> Outcome:
    record = InDDP(plan)
    for loader in plan.loaders(dist.get_rank() // TENSOR):
        record.epoch(loader)
    return record.outcome()


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of one rank, with the weights whose parts all ranks of its tensor-parallel group have."""
    joined = []
    for parts in zip(*(outcome["weights"] for outcome in outcomes), strict=True):
        cut = {name: torch.cat([part[name] for part in parts], dim) for name, dim in CUT.items()}
        joined.append(parts[0] | cut)
    return outcomes[0] | {"weights": joined}


for _name, _plan in INSIDE_DDP.items():
    SCENARIOS_ON_FOUR[f"{_name}-ddp"] = partial(in_ddp, _plan)


@pytest.mark.parametrize("name", INSIDE_DDP)
def test_inside_ddp(on_four_ranks, name):
    outcomes = all_well(on_four_ranks[f"{name}-ddp"])
    same_on_all(outcomes, "loss", "items", "grad_norm", "skipped", "step")
    INSIDE_DDP[name].check([joined(outcomes[:2]), joined(outcomes[2:])])


# -------------------------------------------------------------------------------------------------- wrong calls


def refuses(make: Callable[[], nn.Module], **options: Any) -> Outcome:
    model = make()
    Accumulator(model, optimizer_for(model), **options)
    return {}


def given(name: str) -> Any:
    return along(mesh(dist.get_world_size() // TENSOR, TENSOR), name)


def chosen_by_memory() -> Outcome:
    model = alone(split, made(Feedforward))
    MacroStep(model, optimizer_for(model), mean_loss, process_group=data_ranks())
    return {}


def in_fsdp1() -> nn.Module:
    both = mesh(2, TENSOR)
    return FullyShardedDataParallel(
        split(made(Feedforward), along(both, "tensor")),
        device_mesh=along(both, "data"),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def spread(ranks: Sequence[int], placement: Any) -> Outcome:
    """Of a parameter on some ranks only, or whose ranks hold terms of a sum."""
    parameter = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", ranks), [placement], run_check=False)
    return {"shards": len(spread_over(*layout_of(parameter), "weight").shards)}


SCENARIOS["elsewhere"] = partial(spread, [0], Shard(0))


def test_a_parameter_that_a_rank_has_no_part_of(on_two_ranks):
    assert on_two_ranks["elsewhere"][0]["shards"] == 0
    refused(on_two_ranks["elsewhere"], 1, "'weight'", "rank 1", "none of them")


REFUSED = {
    "terms": (partial(spread, [0, 1], Partial()), ("'weight'", "Partial", "Replicate")),
    "fsdp1-on-four": (lambda: refuses(in_fsdp1), ("FullyShardedDataParallel", "fully_shard", "DTensors")),
    "auto": (chosen_by_memory, ('"auto" cuts by the memory of one rank', "shares a model", "number")),
    "no_group": (lambda: refuses(lambda: alone(split, made(Feedforward))), ("DTensor", 'process_group=mesh["dp"]')),
    "no_group-on-four": (
        lambda: refuses(lambda: split(made(Feedforward), given("tensor"))),
        ("4 ranks", "DTensor", 'process_group=mesh["dp"]', "fully_shard"),
    ),
    "its_own_ranks": (
        lambda: refuses(lambda: alone(split, made(Feedforward)), process_group=given("tensor")),
        ("ranks [0, 1]", "DTensor", "share a model"),
    ),
    "not_those_that_average-on-four": (
        lambda: refuses(lambda: in_fsdp(split, made(Feedforward)), process_group=given("tensor")),
        ("process_group", "averages"),
    ),
}
for _name, (_scenario, _) in REFUSED.items():
    (SCENARIOS_ON_FOUR if _name.endswith("four") else SCENARIOS)[f"refused-{_name}"] = _scenario


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_calls_say_what_to_do(request, name):
    on_ranks = request.getfixturevalue("on_four_ranks" if name.endswith("four") else "on_two_ranks")
    all_refused(on_ranks[f"refused-{name}"], *REFUSED[name][1])
