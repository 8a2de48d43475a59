"""Several DDP models in one list: whatever was accumulated travels, whoever used it last, in one order on all ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.ranks import Outcome, all_refused, all_well
from macrobatch import Accumulator

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
WIDTH = 4
# The tasks of the micro-batches of each rank: 0 and 1 use the encoder and a head, 2 the encoder only.
TASKS = {
    "another head last": ([0, 1, 0, 1], [0, 1, 1, 1]),
    "other orders": ([0, 1, 0, 1], [1, 0, 1, 0]),
    "a head that a rank never uses": ([0, 0, 0, 1], [0, 2, 2, 2]),
    "a head that nobody uses": ([0, 0, 2, 0], [0, 2, 0, 2]),
    "a loader that is shorter": ([0, 1, 1, 0], [1, 2, 0]),
}
WRAPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "bucket views": {"gradient_as_bucket_view": True},
}


class Encoder(nn.Module):
    """A layer, and a buffer that ranks broadcast in the first forward after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.offset).tanh()


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Encoder().double(), nn.Linear(WIDTH, 2).double(), nn.Linear(WIDTH, 2).double()]


def batches_of(rank: int, tasks: Sequence[int]) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(rank)
    rows = [2 + (index + rank) % 3 for index in range(len(tasks))]
    data = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in rows]
    return list(zip(data, tasks, strict=True))


def loss_of(models: Sequence[nn.Module], x: Tensor, task: int) -> Tensor:
    hidden = models[0](x)
    return (hidden if task == 2 else models[1 + task](hidden)).square().sum(1).mean()


def gradients(models: Sequence[nn.Module]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for model in models for p in model.parameters()]


def trained(
    tasks: tuple[list[int], list[int]], wrapping: dict[str, Any], *, terms: bool = False, **options: Any
) -> Outcome:
    """Two epochs of windows of two; the gradients before each step."""
    models = [DistributedDataParallel(part, **wrapping) for part in parts()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    seen: list[list[Tensor | None]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(models)))
    if terms:
        options["counts"] = lambda batch: {"loss": len(batch[0])}
    acc = Accumulator(models, optimizer, steps=2, **options)
    for _ in range(2):
        for x, task in acc.batches(batches_of(dist.get_rank(), tasks[dist.get_rank()])):
            loss = loss_of(models, x, task)
            acc.backward({"loss": (loss, len(x))} if terms else loss)
            acc.step()
    return {"gradients": seen}


def expected(tasks: tuple[list[int], list[int]]) -> list[list[Tensor | None]]:
    """The same in one process, in one big batch a step."""
    models = parts()
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    seen = []
    for _ in range(2):
        for start in (0, 2):
            window = [b for rank in (0, 1) for b in batches_of(rank, tasks[rank])[start : start + 2]]
            total = sum(loss_of(models, x, task) * len(x) for x, task in window)
            (total / sum(len(x) for x, _ in window)).backward()
            seen.append(gradients(models))
            optimizer.step()
            optimizer.zero_grad()
    return seen


CASES = {f"{name}-{wrapping}": (name, wrapping, {}) for name in TASKS for wrapping in WRAPPED}
CASES["counts"] = ("other orders", "plain", {"terms": True})
CASES["every micro-batch"] = ("other orders", "plain", {"sync": "micro"})
for _case, (_name, _wrapping, _options) in CASES.items():
    SCENARIOS[_case] = partial(trained, TASKS[_name], WRAPPED[_wrapping], **_options)


@pytest.mark.parametrize("case", CASES)
def test_whatever_was_accumulated_travels(on_two_ranks, case):
    wanted = expected(TASKS[CASES[case][0]])
    for outcome in all_well(on_two_ranks[case]):
        assert len(outcome["gradients"]) == len(wanted) == 4
        for found, truth in zip(outcome["gradients"], wanted, strict=True):
            largest = max(gradient.abs().max() for gradient in truth if gradient is not None)
            for gradient, true in zip(found, truth, strict=True):
                assert (gradient is None) == (true is None)
                assert true is None or (gradient - true).abs().max() <= 1e-12 * largest


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def static_graph() -> Outcome:
    return trained(TASKS["other orders"], {"static_graph": True})


def test_static_graph_never_learns_its_graph_here(on_two_ranks):
    all_refused(on_two_ranks["static_graph"], "Leave static_graph out.")


@scenario
def other_ranks() -> Outcome:
    groups = [dist.new_group([rank]) for rank in (0, 1)]
    first, second, _ = parts()
    models = [DistributedDataParallel(first), DistributedDataParallel(second, process_group=groups[dist.get_rank()])]
    parameters = [p for model in models for p in model.parameters()]
    Accumulator(models, torch.optim.SGD(parameters, lr=0.1), steps=2)
    return {}


def test_models_over_other_ranks(on_two_ranks):
    all_refused(on_two_ranks["other_ranks"], "model 1 over", "wrap them alike")


@scenario
def one_model_not_called() -> Outcome:
    """The last micro-batch of one rank trains a tensor of its own only: nothing would send what was accumulated."""
    model = DistributedDataParallel(parts()[0], find_unused_parameters=True)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    other = torch.ones(1, dtype=torch.float64, requires_grad=True)
    for index, (x, _) in enumerate(acc.batches(batches_of(dist.get_rank(), [2, 2]))):
        acc.backward(model(x).square().mean() if index == 0 else other.square().mean())
        acc.step()
    return {}


def test_one_model_that_the_last_micro_batch_does_not_call(on_two_ranks):
    all_refused(
        on_two_ranks["one_model_not_called"], "did not go through DistributedDataParallel", "in every micro-batch"
    )


def consistency(**options: Any) -> Outcome:
    """A target without a graph, from the same model, between the forward and the backward."""
    model = DistributedDataParallel(parts()[0], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[Tensor | None]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients([model])))
    acc = Accumulator(model, optimizer, steps=2)
    for x, _ in acc.batches(batches_of(dist.get_rank(), [2, 2])):
        out = model(x)
        with torch.no_grad():
            target = model(x + 0.1)
        acc.backward((out - target).square().sum(1).mean(), items=len(x))
        acc.step()
    return {"gradients": seen}


TARGETS: dict[str, dict[str, Any]] = {"target": {}, "target, find_unused": {"find_unused_parameters": True}}
for _case, _options in TARGETS.items():
    SCENARIOS[_case] = partial(consistency, **_options)


@pytest.mark.parametrize("case", TARGETS)
def test_a_forward_without_a_graph_before_the_backward(on_two_ranks, case):
    model = parts()[0]
    window = [x for rank in (0, 1) for x, _ in batches_of(rank, [2, 2])]
    targets = [model(x + 0.1).detach() for x in window]
    total = sum((model(x) - target).square().sum() for x, target in zip(window, targets, strict=True))
    (total / sum(map(len, window))).backward()
    for outcome in all_well(on_two_ranks[case]):
        for found, parameter in zip(outcome["gradients"][0], model.parameters(), strict=True):
            assert (found - parameter.grad).abs().max() <= 1e-12
