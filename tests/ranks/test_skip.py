"""A rank that skips micro-batches: the exchange of the window goes on without them, and stays exact over the others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.ranks import Outcome, all_refused, all_well, fsdp1, fsdp2
from macrobatch import Accumulator

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
STEPS = 3
# The micro-batches of each rank that it skips, of two windows of three.
SKIPPED = {
    "first": ({0}, set()),
    "middle": ({1}, {4}),
    "last": ({2}, set()),
    "first of the second": ({3}, set()),
    "last of both": ({2, 5}, {5}),
    "others on each": ({0, 2}, {1}),
    "a whole window": ({0, 1, 2}, set()),
    "a window of both": ({0, 1, 2}, {0, 1, 2}),
}
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "find_unused": ({"find_unused_parameters": True}, {}),
    "bucket views": ({"gradient_as_bucket_view": True}, {}),
    "every micro-batch": ({}, {"sync": "micro"}),
    "clipped": ({}, {"max_norm": 0.1}),
}
PLACES = ("before the forward", "inside the forward", "after the forward")


class Model(nn.Module):
    """Two layers, and a buffer that ranks broadcast in the first forward after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("offset", torch.full((4,), 0.5))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x + self.offset).tanh()
        if self.fails:
            raise MemoryError("planted")
        return self.head(hidden)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batches_of(rank: int, number: int = 2 * STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2 + (i + rank) % 3, 4, generator=generator, dtype=torch.float64) for i in range(number)]


def skip(acc: Accumulator, model: DistributedDataParallel, x: Tensor, place: str) -> None:
    if place == "inside the forward":
        model.module.fails = True
        with pytest.raises(MemoryError):
            model(x)
        model.module.fails = False
    elif place == "after the forward":
        model(x).sum()
    acc.skip()


def trained(skipped: tuple[set[int], set[int]], wrapping: str, place: str, *, shorter: bool = False) -> Outcome:
    rank, (arguments, options) = dist.get_rank(), WRAPPED[wrapping]
    model = DistributedDataParallel(new_model(), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[Tensor | None]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    )
    acc, results = Accumulator(model, optimizer, steps=STEPS, **options), []
    for index, x in enumerate(acc.batches(batches_of(rank, 2 * STEPS - shorter * rank))):
        if index in skipped[rank] and not acc.is_repeat:
            skip(acc, model, x, place)
        else:
            acc.backward(model(x).square().sum(1).mean())
        if result := acc.step():
            results.append((result.micro_batches, result.items.item(), bool(result.skipped)))
    return {"gradients": seen, "results": results, "weights": [p.detach() for p in model.parameters()]}


def check(outcomes: list[Outcome], skipped: tuple[set[int], set[int]], wrapping: str, *, shorter: bool = False) -> None:
    """Compare with the same windows in one process, without what was skipped, in one big batch each."""
    model, steps = new_model(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outcomes = all_well(outcomes)
    for window in range(2):
        turns = range(window * STEPS, (window + 1) * STEPS)
        given = [dict(enumerate(batches_of(rank, 2 * STEPS - shorter * rank))) for rank in (0, 1)]
        batches = [given[rank][i] for rank in (0, 1) for i in turns if i in given[rank] and i not in skipped[rank]]
        for outcome in outcomes:
            assert outcome["results"][window][1:] == (sum(map(len, batches)), not batches)
        if not batches:
            continue
        model(torch.cat(batches)).square().sum(1).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), WRAPPED[wrapping][1].get("max_norm", 1e9))
        for outcome in outcomes if wrapping != "clipped" else ():  # a fused step divides by itself
            for found, parameter in zip(outcome["gradients"][steps], model.parameters(), strict=True):
                assert (found - parameter.grad).abs().max() <= 1e-12 * norm
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    for outcome in outcomes:
        for found, parameter in zip(outcome["weights"], model.parameters(), strict=True):
            assert (found - parameter).abs().max() <= 1e-12


CASES = {f"{name}-{place}": (name, "plain", place, False) for name in SKIPPED for place in PLACES}
CASES |= {f"{name}-{wrapping}": (name, wrapping, PLACES[1], False) for name in SKIPPED for wrapping in WRAPPED}
CASES["uneven"] = ("others on each", "plain", PLACES[1], True)
for _case, (_name, _wrapping, _place, _shorter) in CASES.items():
    SCENARIOS[_case] = partial(trained, SKIPPED[_name], _wrapping, _place, shorter=_shorter)


@pytest.mark.parametrize("case", CASES)
def test_the_window_goes_on_without_them(on_two_ranks, case):
    name, wrapping, _, shorter = CASES[case]
    check(on_two_ranks[case], SKIPPED[name], wrapping, shorter=shorter)


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def several_models() -> Outcome:
    """One flat sum, and buffers that are broadcast before the window."""
    first, second = DistributedDataParallel(new_model()), DistributedDataParallel(nn.Linear(2, 1).double())
    acc = Accumulator([first, second], torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1), steps=2)
    for index, x in enumerate(acc.batches(batches_of(dist.get_rank(), 4))):
        if index in ({1, 2}, {2})[dist.get_rank()]:
            acc.skip()
        else:
            acc.backward(second(first(x)).square().mean())
        result = acc.step()
    return {"items": result.items.item(), "weight": first.module.head.weight.detach()}


def test_several_models(on_two_ranks):
    one, other = all_well(on_two_ranks["several_models"])
    assert one["items"] == other["items"] == sum(len(batches_of(rank, 4)[3]) for rank in (0, 1))
    assert torch.equal(one["weight"], other["weight"])


def _sharded(wrap: Callable[[nn.Module], nn.Module]) -> Outcome:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for _ in acc.batches([torch.ones(3, 4)] * 2):
        acc.skip()
    return {}


SCENARIOS["fsdp1"], SCENARIOS["fsdp2"] = partial(_sharded, fsdp1), partial(_sharded, fsdp2)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_not_where_forwards_are_collective(on_two_ranks, kind):
    all_refused(on_two_ranks[kind], "Call discard() on all ranks")
