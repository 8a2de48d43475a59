"""Programs that nobody had thought of: each is exact, or gets an error that says what to do before anything changed.

A program trains `model` on the parts of X and Y; `big` is its twin, trained on all of them at once in plain torch.
"""

import contextlib
import copy
import functools
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from tqdm import tqdm

from harness.reference import Reentrant, relative_error, weights_of
from macrobatch import Accumulator, MacrobatchError, MacroStep
from macrobatch._border.arguments import items_on_host
from macrobatch._engine.backward import Backward
from macrobatch.errors import BackendError, BatchError, NonFiniteError, UsageError

EXACT = 1e-12
SAMPLES = 16


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return tuple(torch.randn(SAMPLES, width, generator=draw, dtype=torch.float64).to(dtype) for width in (3, 1))


def parts(size: int = 4, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(tensor.split(size) for tensor in data(dtype)), strict=True))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).pow(2).mean()


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make().double()
    return model, copy.deepcopy(model)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def accumulate(acc: Accumulator, model: nn.Module, micro_batches: list, loss: Any = loss_of, items: Any = len) -> Any:
    for x, y in acc.batches(micro_batches):
        acc.backward(loss(model, x, y), items=items(x))
        result = acc.step()
    return result


def whole_step(
    big: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = loss_of, dtype: Any = torch.float64
) -> None:
    loss(big, *data(dtype)).backward()
    optimizer.step()


def same_weights(model: nn.Module, big: nn.Module, tolerance: float = EXACT) -> None:
    assert relative_error(weights_of(model), weights_of(big)) <= tolerance


# ------------------------------------------------------------------------------------------------ memory that is shared


class Offsets(nn.Module):
    """Parameters that reach the loss through views: torch may take the very memory of the seed as their gradients."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.offsets = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.net, x, y) + sum(offset.view(()) for offset in self.offsets)


def offset_loss(model: Offsets, x: Tensor, y: Tensor) -> Tensor:
    return model.loss(x, y)


@pytest.mark.parametrize("shapes", [[(1,)], [(1,), (1, 1)], [(), (1,), (1, 1)]], ids=["one", "two", "three"])
@pytest.mark.parametrize("size", [4, 16], ids=["cut", "whole"])
@pytest.mark.parametrize("items", ["int", "tensor"])
def test_parameters_that_reach_the_loss_through_views(shapes, size, items):
    model, big = twins(lambda: Offsets(*shapes))
    count = size if items == "int" else torch.tensor(float(size), dtype=torch.float64)
    acc = Accumulator(model, sgd(model), steps=99, max_norm=1e9)
    result = accumulate(acc, model, parts(size), offset_loss, items=lambda _: count)
    whole_step(big, sgd(big), offset_loss)
    same_weights(model, big)
    assert (int(count), result.items.item()) == (size, SAMPLES)


def test_items_in_the_hosts_memory_are_numbers_at_once():
    """A mean over none of them is excused, as with an int; and the same tensor may be filled anew for each batch."""
    model, big = twins(lambda: nn.Linear(3, 1))
    count, acc = torch.zeros((), dtype=torch.int64), Accumulator(model, sgd(model), steps=5)
    batches = [*parts(4), tuple(part[:0] for part in data())]
    result = accumulate(acc, model, batches, items=lambda x: count.fill_(len(x)))
    whole_step(big, sgd(big))
    same_weights(model, big)
    assert result.items.item() == SAMPLES


@pytest.mark.parametrize("form", [float, lambda items: torch.tensor(items, dtype=torch.float64)])
def test_fractions_of_items_under_a_scaler(form):
    """What the scaler multiplies with is in float32, and a third of an item is not."""
    model, big = twins(lambda: nn.Linear(3, 1))
    acc = Accumulator(model, sgd(model), steps=4, scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    accumulate(acc, model, parts(4), items=lambda x: form(len(x) / 3))
    whole_step(big, sgd(big))
    same_weights(model, big)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_what_the_host_reads_of_a_tensor(dtype):
    assert items_on_host(torch.tensor([[7]], dtype=dtype)) == 7
    assert items_on_host(torch.arange(9, dtype=dtype)[4]) == 4
    negative = torch.tensor(-1, dtype=dtype)
    assert items_on_host(negative) is negative  # for the close, where all ranks get to know


@pytest.mark.parametrize(
    "left",
    [
        torch.tensor(3, dtype=torch.int16),
        torch.tensor(math.nan),
        torch._neg_view(torch.tensor(-3.0)),
        nn.Parameter(torch.ones(())),
    ],
    ids=["another dtype", "nan", "negated", "parameter"],
)
def test_what_the_host_leaves_to_the_device(left):
    assert items_on_host(left) is left


def test_the_same_in_a_macro_step():
    model, big = twins(lambda: Offsets((1,), (1,)))
    MacroStep(model, sgd(model), lambda m, b: m.loss(*b), micro=4)(data())
    whole_step(big, sgd(big), offset_loss)
    same_weights(model, big)


def test_a_sum_under_a_scaler_does_not_write_to_its_factor():
    model, big = twins(lambda: Offsets((1,), (1,)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = Accumulator(model, sgd(model), steps=4, scaler=scaler, reduction="sum")
    accumulate(acc, model, parts(), lambda m, x, y: offset_loss(m, x, y) * len(x))
    whole_step(big, sgd(big), offset_loss)
    same_weights(model, big)


def test_larger_parameters_whose_gradients_are_views_of_one():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (x * (self.left.view(-1) + self.right.view(-1))).sum(1, keepdim=True)

    model, big = twins(Sum)
    accumulate(Accumulator(model, sgd(model), steps=4, max_norm=0.1), model, parts())
    loss_of(big, *data()).backward()
    for parameter in big.parameters():
        parameter.grad = parameter.grad.clone()  # clipping in place would scale what they share twice
    nn.utils.clip_grad_norm_(big.parameters(), 0.1)
    sgd(big).step()
    same_weights(model, big)


# -------------------------------------------------------------------------------- what this very graph reaches


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1))


@pytest.mark.parametrize("at", [1, 3], ids=["in the middle", "in the last"])
@pytest.mark.parametrize("thaws", [True, False], ids=["thawed", "frozen"])
def test_a_parameter_frozen_or_thawed_inside_a_window(at, thaws):
    model, big = twins(layers)
    for each in (model, big):
        each[1].requires_grad_(not thaws)
    acc = Accumulator(model, sgd(model), steps=4, max_norm=0.1)
    for turn, (x, y) in enumerate(acc.batches(parts())):
        if turn == at:
            model[1].requires_grad_(thaws)
        acc.backward(loss_of(model, x, y), items=len(x))
        result = acc.step()
    for turn, (x, y) in enumerate(parts()):
        if turn == at:
            big[1].requires_grad_(thaws)
        (loss_of(big, x, y) * len(x) / SAMPLES).backward()
    norm = nn.utils.clip_grad_norm_(big.parameters(), 0.1)
    sgd(big).step()
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=EXACT)
    same_weights(model, big)


def test_a_thawed_parameter_is_accumulated_in_the_wider_dtype():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).bfloat16()
    model[0].requires_grad_(False)
    acc = Accumulator(model, sgd(model), steps=2, accumulate_dtype=torch.float32)
    for turn, (x, y) in enumerate(acc.batches(parts(8, torch.bfloat16))):
        if turn == 1:
            model[0].requires_grad_(True)
        acc.backward(loss_of(model, x, y).float(), items=8)
        assert model[0].weight.grad is None or model[0].weight.grad.dtype == torch.float32
        acc.step()


def through(own: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    return own(other.requires_grad_(True)(x))


@pytest.mark.parametrize("at", [0, 1], ids=["before the first", "before the second"])
def test_a_parameter_that_joins_inside_a_window(at):
    """Model and optimizer get a new layer in the body of the loop."""

    def grow(each: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        each.append(nn.Linear(1, 1).double())
        optimizer.add_param_group({"params": list(each[-1].parameters())})

    model, big = twins(layers)
    optimizers = [sgd(model), sgd(big)]
    acc = Accumulator(model, optimizers[0], steps=4, max_norm=0.1)
    for turn, (x, y) in enumerate(acc.batches(parts())):
        if turn == at:
            grow(model, optimizers[0])
        acc.backward(loss_of(model, x, y), items=len(x))
        result = acc.step()
    for turn, (x, y) in enumerate(parts()):
        if turn == at:
            grow(big, optimizers[1])
        (loss_of(big, x, y) * len(x) / SAMPLES).backward()
    norm = nn.utils.clip_grad_norm_(big.parameters(), 0.1)
    optimizers[1].step()
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=EXACT)
    same_weights(model, big)


@pytest.mark.parametrize("at", [0, 1])
def test_a_parameter_replaced_in_the_model_alone_is_an_error(at):
    model = layers().double()
    before, acc = weights_of(model[0]), Accumulator(model, sgd(model), steps=2)
    with pytest.raises(BackendError, match="belongs to no given model"):
        for turn, (x, y) in enumerate(acc.batches(parts(8))):
            if turn == at:
                model[2] = nn.Linear(8, 1).double()
            acc.backward(loss_of(model, x, y), items=len(x))
            acc.step()
    assert relative_error(weights_of(model[0]), before) == 0


def scale(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def clear(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("hook", [scale, clear])
@pytest.mark.parametrize("steps", [1, 2])
def test_hooks_that_change_gradients_while_they_are_added_up(hook, steps):
    model = layers().double()
    model[2].weight.register_post_accumulate_grad_hook(hook)
    before, acc = weights_of(model), Accumulator(model, sgd(model), steps=steps)
    with pytest.raises(UsageError, match=r"2\.weight.*register_step_pre_hook"):
        accumulate(acc, model, parts(8))
    assert relative_error(weights_of(model), before) == 0
    acc.discard()
    assert list(model[2].weight._post_accumulate_grad_hooks.values()) == [hook]


def test_hooks_that_only_look():
    (model, big), seen = twins(layers), []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    accumulate(Accumulator(model, sgd(model), steps=4), model, parts())
    whole_step(big, sgd(big))
    same_weights(model, big)
    assert len(seen) == 4


# For the first micro-batch of a window: it has as many nodes as the second, but does not reach the other model.
BEFORE = {
    "detached": lambda own, other, x: own(other(x).detach()),
    "itself": lambda own, other, x: own(own(x)),
    "frozen": lambda own, other, x: own(other.requires_grad_(False)(x)),
}


@pytest.mark.parametrize("before", BEFORE)
def test_another_model_that_only_a_later_graph_reaches(before):
    own, other = nn.Linear(3, 3), nn.Linear(3, 3)
    acc = Accumulator(own, sgd(own), steps=2)
    for (x, _), run in zip(acc.batches(parts(8, torch.float32)), (BEFORE[before], through), strict=True):
        acc.backward(run(own, other, x).pow(2).mean(), items=8)
        acc.step()
    assert other.weight.grad is None


@pytest.fixture
def overlapping(monkeypatch):
    """Graphs are walked while their backwards run, as on a GPU."""
    walked = []

    def overlaps(_: Backward, loss: Tensor) -> bool:
        walked.append(loss)
        return True

    monkeypatch.setattr(Backward, "overlaps", overlaps)
    return walked


@pytest.mark.parametrize("before", BEFORE)
def test_another_model_that_a_walk_finds_too_late_is_an_error(overlapping, before):
    own, other = nn.Linear(3, 3), nn.Linear(3, 3)
    weights = weights_of(own)
    acc = Accumulator(own, sgd(own), steps=2)
    with pytest.raises(UsageError, match=r"2 parameters of another model.*shape \(3,.*zero_grad"):
        for (x, _), run in zip(acc.batches(parts(8, torch.float32)), (BEFORE[before], through), strict=True):
            acc.backward(run(own, other, x).pow(2).mean(), items=8)
            acc.step()
    assert len(overlapping) == 1, "the second graph was walked beside its backward"
    with pytest.raises(UsageError, match="discard"):
        acc.step()
    assert relative_error(weights_of(own), weights) == 0
    acc.discard()


def test_a_parameter_thawed_under_an_overlapping_walk(overlapping):
    test_a_parameter_frozen_or_thawed_inside_a_window(2, True)
    assert len(overlapping) == 2  # what is out of the ordinary once is walked beforehand


def test_overlapping_walks_are_exact(overlapping):
    model, big = twins(layers)
    accumulate(Accumulator(model, sgd(model), steps=4), model, parts())
    whole_step(big, sgd(big))
    same_weights(model, big)
    assert len(overlapping) == 3


def test_a_loss_of_others_alone_changes_nothing():
    own, other = nn.Linear(3, 1), nn.Linear(3, 1)
    acc = Accumulator(own, sgd(own))
    with pytest.raises(BatchError, match="reached no parameter"), acc.micro_batch():
        acc.backward(other(torch.ones(2, 3)).mean(), items=2)
    assert other.weight.grad is None
    acc.discard()


class Adapted(nn.Module):
    """A frozen model with an adapter inside a checkpoint; its hidden state requires a gradient, and is a leaf."""

    def __init__(self, norm_learns: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8).requires_grad_(norm_learns)
        self.head = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x).requires_grad_(True)
        hidden = Reentrant.apply(lambda h: h + torch.tanh(self.adapter(h)), hidden)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("norm_learns", [True, False])
def test_somebody_elses_reentrant_checkpointing(norm_learns):
    model, big = twins(lambda: Adapted(norm_learns))
    accumulate(Accumulator(model, sgd(model), steps=4), model, parts())
    whole_step(big, sgd(big))
    same_weights(model, big)


@pytest.mark.parametrize("left", [None, 3.0], ids=["no gradient", "a gradient of its own"])
def test_another_model_beside_a_reentrant_checkpoint_keeps_its_gradients(left):
    model, other = Adapted(norm_learns=True).double(), nn.Linear(3, 3).double()
    other.weight.grad = None if left is None else torch.full_like(other.weight, left)
    acc = Accumulator(model, sgd(model))
    with acc.micro_batch():
        acc.backward(loss_of(model, data()[0], data()[1]) + other(data()[0]).mean(), items=SAMPLES)
    acc.step()
    assert other.bias.grad is None
    assert other.weight.grad is None if left is None else bool((other.weight.grad == left).all())


# ------------------------------------------------------------------------------------------ other people's optimizers


def clip_values(model: nn.Module) -> Callable[..., None]:
    return lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.05)


def hook_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return optimizer.register_step_pre_hook(clip_values(model)).remove


def hook_before_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return register_optimizer_step_pre_hook(clip_values(model)).remove


def replaced_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    own = optimizer.step

    @functools.wraps(own)
    def step(*arguments: Any, **options: Any) -> Any:
        clip_values(model)()
        return own(*arguments, **options)

    optimizer.step = step
    return lambda: None


@pytest.mark.parametrize("meddle", [hook_before, hook_before_all, replaced_step])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_what_runs_before_a_step_sees_the_mean(meddle, fused):
    model, big = twins(lambda: nn.Linear(3, 1))
    model, big = model.float(), big.float()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3, fused=fused) for m in (model, big)]
    remove = meddle(model, optimizers[0])
    accumulate(Accumulator(model, optimizers[0], steps=4), model, parts(4, torch.float32))
    remove()
    remove = meddle(big, optimizers[1])
    whole_step(big, optimizers[1], dtype=torch.float32)
    remove()
    same_weights(model, big, 1e-6)


@pytest.mark.parametrize("where", ["optimizer", "everywhere"])
def test_what_runs_after_a_step_sees_the_mean(where):
    model, big = twins(lambda: nn.Linear(3, 1))
    model, big, seen = model.float(), big.float(), []
    optimizer = sgd(model, fused=True)
    register = optimizer.register_step_post_hook if where == "optimizer" else register_optimizer_step_post_hook
    handle = register(lambda *_: seen.append(model.weight.grad.clone()))
    accumulate(Accumulator(model, optimizer, steps=4), model, parts(4, torch.float32))
    handle.remove()
    loss_of(big, *data(torch.float32)).backward()
    assert relative_error({"weight": seen[0]}, {"weight": big.weight.grad}) < 1e-6


def test_a_scheduler_around_step_does_not_keep_a_fused_optimizer_from_folding():
    model = nn.Linear(3, 1)
    optimizer = sgd(model, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    kept = []
    accumulator = Accumulator(model, optimizer, steps=4, scheduler=scheduler, nonfinite="keep")
    close = accumulator._engine.closing._queue
    accumulator._engine.closing._queue = lambda scale, found: (kept.append(scale), close(scale, found))
    accumulate(accumulator, model, parts(4, torch.float32))
    assert kept[0] is not None


def test_two_fused_optimizers_on_one_parameter():
    model, big = twins(lambda: nn.Linear(3, 1))
    model, big = model.float(), big.float()
    accumulate(
        Accumulator(model, [sgd(model, fused=True), sgd(model, fused=True)], steps=4), model, parts(4, torch.float32)
    )
    whole_step(big, sgd(big), dtype=torch.float32)
    sgd(big).step()
    same_weights(model, big, 1e-6)


@pytest.mark.parametrize("what", ["model", "optimizer", "scheduler"])
def test_nothing_is_listed_twice(what):
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    lists = {"model": [model], "optimizer": [optimizer], "scheduler": [scheduler]}
    lists[what] *= 2
    with pytest.raises(UsageError, match="twice"):
        Accumulator(**lists)


# ----------------------------------------------------------------------------------------- calls that do not belong


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("when", ["after each step", "before the last step", "before the first backward"])
def test_a_stray_optimizer_step(when, fused):
    model = nn.Linear(3, 1)
    before, optimizer = weights_of(model), sgd(model, fused=fused)
    acc = Accumulator(model, optimizer, steps=2)
    with pytest.raises(UsageError, match=r"SGD.step\(\) was called inside the open window.*discard"):
        for x, y in acc.batches(parts(8, torch.float32)):
            if when == "before the first backward" and acc.is_last:
                optimizer.step()
            acc.backward(loss_of(model, x, y), items=len(x))
            if when == "before the last step" and acc.is_last:
                optimizer.step()
            acc.step()
            if when == "after each step":
                optimizer.step()
    assert relative_error(weights_of(model), before) == 0
    acc.discard()
    assert accumulate(acc, model, parts(8, torch.float32)).step == 1


def test_an_optimizer_may_be_used_by_hand_between_windows():
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    acc = Accumulator(model, optimizer, steps=2)
    accumulate(acc, model, parts(8, torch.float32))
    loss_of(model, *data(torch.float32)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert accumulate(acc, model, parts(8, torch.float32)).step == 2


def test_an_accumulator_that_is_gone_leaves_its_optimizer_alone():
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    acc = Accumulator(model, optimizer, steps=2)
    with acc.micro_batch():
        acc.backward(model(torch.ones(2, 3)).mean(), items=2)
    del acc
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks


def test_steps_that_hooks_take_inside_the_backward():
    model = nn.Linear(3, 1)
    before, optimizers = weights_of(model), {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    acc = Accumulator(model, list(optimizers.values()))
    with pytest.raises(UsageError, match="out of hooks"), acc.micro_batch():
        acc.backward(model(torch.ones(2, 3)).mean(), items=2)
    assert relative_error(weights_of(model), before) == 0
    acc.discard()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_backward_by_hand_before_the_first_of_a_window(steps):
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=steps)
    with pytest.raises(UsageError, match=r"acc\.backward\(loss\) instead of loss\.backward\(\)"), acc.micro_batch():
        model.weight.pow(2).sum().backward()
        acc.backward(model(torch.ones(2, 3)).mean(), items=2)
    acc.discard()


@pytest.mark.parametrize("which", [0, 1, 25, 40])
@pytest.mark.parametrize("call", [1, 2])
def test_a_loss_function_that_runs_a_backward_itself(which, call):
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(40)), nn.Linear(3, 1))
    before, calls = weights_of(model), itertools.count(1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) == call:
            model[which].weight.pow(2).sum().backward()
        return loss_of(model, *batch)

    with pytest.raises(UsageError, match="seen at parameter"):
        MacroStep(model, sgd(model), loss_fn, micro=4)(data(torch.float32))
    assert relative_error(weights_of(model), before) == 0


def test_loss_backward_by_habit_is_told_so():
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model))
    with pytest.raises(UsageError, match=r"loss\.backward\(\) does not count it"), acc.micro_batch():
        model(torch.ones(2, 3)).mean().backward()
        acc.step()


# ------------------------------------------------------------------------------------------------------------ loaders


def seen_by(acc: Accumulator, model: nn.Module, loader: Any, until: int | None = None) -> list:
    seen = []
    for batch in acc.batches(loader):
        seen.append(int(batch))
        acc.backward(model(torch.ones(1, 3)).mean())
        if acc.step() and len(seen) == until:
            break
    return seen


def test_a_stream_that_is_left_and_gone_on_with_loses_nothing():
    model, stream = nn.Linear(3, 1), iter(range(11))
    acc = Accumulator(model, sgd(model), steps=2)
    rounds = [seen_by(acc, model, stream, 4) for _ in range(3)]
    assert rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize(("remainder", "total"), [("step", 5), ("carry", 5), ("drop", 4)])
def test_a_progress_bar_knows_the_total(remainder, total):
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=2, remainder=remainder)
    with tqdm(acc.batches(range(5)), file=io.StringIO()) as bar:
        assert bar.total == total
        for _ in bar:
            acc.backward(model(torch.ones(1, 3)).mean())
            acc.step()
        assert bar.n == total
    acc.discard()
    assert tqdm(acc.batches(iter(range(5))), file=io.StringIO()).total is None


def test_a_stream_kept_alive_by_somebody_loses_nothing():
    model, stream = nn.Linear(3, 1), iter(range(6))
    acc = Accumulator(model, sgd(model), steps=2)
    kept = acc.batches(stream)
    for _ in range(2):
        assert next(kept) is not None
        acc.backward(model(torch.ones(1, 3)).mean())
        acc.step()
    assert seen_by(acc, model, stream) == [2, 3, 4, 5]


def test_an_iterable_that_begins_anew_does():
    class Anew:
        def __iter__(self) -> Any:
            return iter(range(3))

    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=2)
    assert [seen_by(acc, model, Anew(), 2), seen_by(acc, model, Anew())] == [[0, 1], [0, 1, 2]]


def refilled_tensor() -> Any:
    buffer = torch.zeros(1)
    return (buffer.fill_(number) for number in range(5))


def refilled_views() -> Any:
    buffer = torch.zeros(2)
    return ({"x": buffer.add_(1)[:1]} for _ in range(5))


def refilled_array() -> Any:
    buffer = numpy.zeros(1)
    for number in range(5):
        buffer[:] = number
        yield torch.from_numpy(buffer)


def refilled_dict() -> Any:
    batch = {}
    for number in range(5):
        batch["x"] = torch.full((1,), float(number))
        yield batch


@pytest.mark.parametrize("loader", [refilled_tensor, refilled_views, refilled_array, refilled_dict])
def test_a_loader_that_fills_one_buffer_anew(loader):
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=2)
    with pytest.raises(BatchError, match="same memory"):
        next(iter(acc.batches(loader())))


@pytest.mark.parametrize("batch", [torch.ones(1), numpy.ones(1), torch.tensor([math.nan])])
def test_the_same_batch_over_and_over_is_fine(batch):
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=2)
    for _, given in zip(range(4), acc.batches(itertools.repeat(batch)), strict=False):
        assert given is batch
        acc.backward(model(torch.ones(1, 3)).mean())
        acc.step()
    assert acc.optimizer_step == 2


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, TypeError])
def test_a_length_that_nobody_knows(error):
    class Unknown(list):
        def __len__(self) -> int:
            raise error("unknown")

    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=2)
    assert seen_by(acc, model, Unknown(range(3))) == [0, 1, 2]


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("remainder", ["step", "drop", "carry"])
def test_the_last_batch_of_an_epoch_tried_again(sized, remainder):
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=2, remainder=remainder)
    closed = []
    for batch in acc.batches(range(4) if sized else iter(range(4))):
        if batch == 3:
            acc.discard()  # as after an exception
        acc.backward(model(torch.ones(1, 3)).mean(), items=1)
        if result := acc.step():
            closed.append((batch, result.micro_batches))
    assert closed == ([(1, 2), (3, 1)] if remainder == "step" else [(1, 2)])
    assert (acc.step(now=True) is None) == (remainder != "carry")


@pytest.mark.parametrize("last", [True, False, None])
def test_a_micro_batch_tried_again_is_what_it_was_said_to_be(last):
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model), steps=1 if last is False else 2)
    with acc.micro_batch(last=last):
        acc.discard()
        acc.backward(model(torch.ones(2, 3)).mean(), items=2)
    assert acc.is_last == bool(last)


# --------------------------------------------------------------------------------------------------- dtypes, overflows


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


DEFAULTS = [torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_another_default_dtype(default_dtype, default, fused, max_norm, own):
    model = nn.Linear(3, 1).to(own)
    big = copy.deepcopy(model)
    default_dtype(default)
    optimizer = sgd(model, fused=fused)
    acc = Accumulator(model, optimizer, steps=2, max_norm=max_norm)
    float_loss = lambda m, x, y: (m(x) - y).float().pow(2).mean()  # noqa: E731
    accumulate(acc, model, parts(8, own), float_loss)
    default_dtype(torch.float32)
    float_loss(big, *data(own)).backward()
    nn.utils.clip_grad_norm_(big.parameters(), max_norm or math.inf)
    sgd(big).step()
    same_weights(model, big, 1e-6 if own == torch.float32 else 2e-2)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_nan_under_another_default_dtype(default_dtype, default, max_norm):
    model = nn.Linear(3, 1)
    default_dtype(default)
    acc = Accumulator(model, sgd(model), max_norm=max_norm)
    with pytest.raises(NonFiniteError):
        with acc.micro_batch():
            acc.backward(model(torch.ones(2, 3, dtype=torch.float32)).mean() * math.nan, items=2)
        acc.step()


@pytest.mark.parametrize("scaled", [False, True])
def test_half_precision_parameters_whose_sums_would_overflow(scaled):
    model = nn.Linear(3, 1).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scaled else None
    acc = Accumulator(model, sgd(model), steps=2, scaler=scaler, max_norm=math.inf)
    for window in range(2):
        for _ in range(2):
            with acc.micro_batch():
                acc.backward(model(torch.ones(4, 3).half()).float().mean() * 2, items=100_000 * (1 + window))
            result = acc.step()
        assert result.skipped is False
        assert result.grad_norm.item() == pytest.approx(4.0, rel=1e-3)


def test_a_loss_that_was_scaled_already():
    model, scaler = nn.Linear(3, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = Accumulator(model, sgd(model), steps=2, scaler=scaler)
    for turn in range(2):
        with acc.micro_batch():
            loss = loss_of(model, *data(torch.float32)) * torch.tensor(2.0)  # a product of another kind
            with pytest.raises(UsageError, match="already") if turn else contextlib.nullcontext():
                acc.backward(scaler.scale(loss) if turn else loss, items=4)
            if turn:
                acc.backward(loss, items=4)


def test_a_window_after_a_refused_one_is_not_skipped():
    model, scaler = nn.Linear(3, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = Accumulator(model, sgd(model), scaler=scaler)
    outcomes: list[Any] = []
    for items in (math.inf, 16.0, 16.0):
        with acc.micro_batch():
            acc.backward(loss_of(model, *data(torch.float32)), items=torch.tensor(items))
        try:
            outcomes.append(bool(acc.step().skipped))
        except MacrobatchError as error:
            outcomes.append(type(error))
    assert outcomes == [BatchError, False, False]
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("max_norm", ["1", True, 0, -1.0, math.nan])
def test_a_norm_that_is_no_number(max_norm):
    model = nn.Linear(3, 1)
    with pytest.raises(UsageError, match="max_norm"):
        Accumulator(model, sgd(model), max_norm=max_norm)


def test_a_resumed_scaler_multiplies_as_before():
    """The power of two by which sums are pre-scaled comes from the window before."""

    def windows(acc: Accumulator, model: nn.Module, number: int) -> list[Tensor]:
        seen = []
        for _ in range(number):
            with acc.micro_batch():
                acc.backward(loss_of(model, *data(torch.float32)), items=1000)
            seen.append(model.weight.grad.clone())
            acc.step()
        return seen

    model, scaler = nn.Linear(3, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), scaler=scaler)
    with acc.micro_batch():
        acc.backward(loss_of(model, *data(torch.float32)), items=7)
    acc.step()
    state = acc.state_dict()
    resumed = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), scaler=scaler)
    resumed.load_state_dict(state)
    assert torch.equal(windows(resumed, model, 1)[0], windows(acc, model, 1)[0])


def test_parameters_no_optimizer_steps_count_in_the_norm_and_are_cleared():
    model, big = twins(layers)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    result = accumulate(Accumulator(model, optimizer, steps=4, max_norm=math.inf), model, parts())
    loss_of(big, *data()).backward()
    norm = nn.utils.clip_grad_norm_(big.parameters(), math.inf)
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_train_after_all():
    model = nn.Linear(3, 1)
    acc = Accumulator(model, sgd(model))
    model.requires_grad_(False)
    with pytest.raises(BatchError, match="no graph"), acc.micro_batch():
        acc.backward(model(torch.ones(2, 3)).mean(), items=2)
    acc.discard()
    with pytest.raises(BackendError, match="nothing to train"):
        Accumulator(model, sgd(model))
