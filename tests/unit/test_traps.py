"""The known traps of gradient accumulation, by name: the naive loop falls in, the Accumulator does not."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from harness.host_reads import HostReads
from harness.reference import (
    HOWS,
    OPTIMIZERS,
    Accumulation,
    Attention,
    Batch,
    Counting,
    Experts,
    Tied,
    Trainee,
    accumulate,
    batch,
    batches,
    gradients_of,
    make_optimizer,
    masked_mean,
    mean_loss,
    relative_error,
    same_snapshot,
    same_training,
    snapshot,
    sum_loss,
    train_whole,
    trainee,
    unsized,
    weights_of,
    whole_batch_gradient,
)
from macrobatch import Accumulator, MacrobatchError
from macrobatch.errors import NonFiniteError, UsageError

EXACT = 1e-12
UNEQUAL = [batch(3, seed=1, items=1), batch(3, seed=2, items=12), batch(3, seed=3, items=2), batch(3, seed=4, items=9)]


def naive_gradient(model: nn.Module, window: list[Batch], steps: int) -> dict:
    """The loop that everyone writes: the mean of the micro-batches' means, over the window length as planned."""
    for micro in window:
        (mean_loss(model, micro) / steps).backward()
    return gradients_of(model)


def exact_window(acc: Accumulator, own: Trainee, window: list[Batch] = UNEQUAL) -> None:
    """From the weights as they are: one window through `acc`, and its gradient against the big batch's."""
    expected = whole_batch_gradient_kept(own, window)
    run = Accumulation(own, acc).epoch(window)
    assert len(run.results) == 1
    assert relative_error(run.gradients[-1], expected) <= EXACT


def whole_batch_gradient_kept(own: Trainee, window: list[Batch]) -> dict:
    """The big batch's gradient, with nothing in `.grad` touched."""
    names, parameters = zip(*own.model.named_parameters(), strict=True)
    sums = sum(sum_loss(own.model, micro) for micro in window) / sum(micro.items for micro in window)
    return dict(zip(names, torch.autograd.grad(sums, parameters, allow_unused=True), strict=True))


# ------------------------------------------------------------------------------------------------------- the division


def test_mean_of_means_over_unequal_token_counts():
    expected = whole_batch_gradient(trainee().model, UNEQUAL)
    assert relative_error(naive_gradient(trainee().model, UNEQUAL, 4), expected) > 0.01
    assert relative_error(accumulate(trainee(), UNEQUAL, steps=4).gradients[0], expected) <= EXACT


@pytest.mark.parametrize("wrap", [list, unsized])
def test_a_short_last_window(wrap):
    short = [batch(3, seed=i, items=5) for i in range(2)]  # equal counts: only the scale can be wrong
    expected = whole_batch_gradient(trainee().model, short)
    assert relative_error(naive_gradient(trainee().model, short, 4), expected) == pytest.approx(0.5)
    assert relative_error(accumulate(trainee(), wrap(short), steps=4).gradients[0], expected) <= EXACT


@pytest.mark.parametrize(("items", "total"), [([2**24 + 1, 1], 2**24 + 2), ([2**53, 1], 2**53 + 1)])
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_counting_does_not_round(items, total, kind):
    run = weigh([kind(n) for n in items])
    assert run.items.item() == total


def test_counting_does_not_overflow():
    most = torch.tensor(2**31 - 1, dtype=torch.int32)
    assert weigh([most, most]).items.item() == 2**32 - 2
    small = torch.tensor(200, dtype=torch.uint8)
    assert weigh([small, small]).items.item() == 400


def test_a_bf16_loss_does_not_round_its_items():
    result = weigh([257, 1, 258], dtype=torch.bfloat16)
    assert result.loss.item() == pytest.approx(1.0, rel=1e-12)


def weigh(items: list, dtype: torch.dtype = torch.float32) -> Any:
    """Losses of one, weighed by the items."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=len(items))
    for n in acc.batches(items):
        acc.backward((model.weight / model.weight.detach()).sum(), items=n)
        result = acc.step()
    return result


# ------------------------------------------------------------------------------------------- meddling with gradients


def clip_by_hand(own: Trainee, _: Any) -> None:
    nn.utils.clip_grad_norm_(own.model.parameters(), 1e-3)


def unscale_by_hand(own: Trainee, scaler: Any) -> None:
    scaler.unscale_(own.optimizers[0])


def zero_to_none(own: Trainee, _: Any) -> None:
    own.optimizers[0].zero_grad()


def zero_in_place(own: Trainee, _: Any) -> None:
    own.optimizers[0].zero_grad(set_to_none=False)


def backward_by_hand(own: Trainee, _: Any) -> None:
    mean_loss(own.model, batch(2, seed=99)).backward()


def clip_the_head(own: Trainee, _: Any) -> None:
    nn.utils.clip_grad_norm_(own.model.head.parameters(), 1e-3)


def zero_the_head(own: Trainee, _: Any) -> None:
    own.model.head.zero_grad()


MEDDLING = [clip_by_hand, zero_to_none, zero_in_place, backward_by_hand, clip_the_head, zero_the_head]


@pytest.mark.parametrize("meddle", MEDDLING)
@pytest.mark.parametrize("when", [0, 1, 3], ids=["after the first", "in the middle", "before the step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_meddling_inside_a_window_is_an_error(meddle, when, name):
    own = trainee(Attention, name)
    before = weights_of(own.model)
    with pytest.raises(MacrobatchError, match=r"(?i)grad"):
        meddled_window(own, own.accumulator(steps=4), meddle, when)
    assert relative_error(weights_of(own.model), before) == 0


@pytest.mark.parametrize("when", [0, 1, 3])
def test_unscaling_inside_a_window_is_an_error(when):
    own, scaler = trainee(dtype=torch.float32), torch.amp.GradScaler("cpu")
    before = weights_of(own.model)
    with pytest.raises(MacrobatchError):
        meddled_window(own, own.accumulator(steps=4, scaler=scaler), unscale_by_hand, when, scaler)
    assert relative_error(weights_of(own.model), before) == 0


def test_meddling_is_cured_by_discard():
    own = trainee()
    acc = own.accumulator(steps=4)
    with pytest.raises(MacrobatchError):
        meddled_window(own, acc, zero_to_none, 1)
    acc.discard()
    exact_window(acc, own)


def meddled_window(own: Trainee, acc: Accumulator, meddle: Any, when: int, scaler: Any = None) -> None:
    for turn, micro in enumerate(acc.batches(UNEQUAL)):
        acc.backward(mean_loss(own.model, micro), items=micro.items)
        if turn == when:
            meddle(own, scaler)
        acc.step()


def test_zero_grad_between_windows_is_harmless():
    own, whole = trainee(Attention, "AdamW"), trainee(Attention, "AdamW")
    acc = own.accumulator(steps=4)
    for _ in range(2):
        own.optimizers[0].zero_grad()
        Accumulation(own, acc).epoch(UNEQUAL)
        own.model.zero_grad(set_to_none=False)
    train_whole(whole, [UNEQUAL, UNEQUAL])
    same_training(own, whole)


@pytest.mark.parametrize("between", [False, True], ids=["before the first window", "between windows"])
def test_a_stale_gradient_does_not_leak_in(between):
    own, stale = trainee(Experts), batch(2, seed=9, routed=True)
    acc = own.accumulator(steps=4)
    if between:
        exact_window(acc, own)
    mean_loss(own.model, stale).backward()
    exact_window(acc, own)


# ---------------------------------------------------------------------------------------------------------- GradScaler


def scaled_trainee(name: str = "AdamW", how: str = "plain", **scale: Any) -> tuple[Trainee, torch.amp.GradScaler]:
    return trainee(Attention, name, how, dtype=torch.float32), torch.amp.GradScaler("cpu", **scale)


def train_planted(own: Trainee, acc: Accumulator, windows: list[list[Batch]], planted: dict) -> list:
    """Multiply the loss of micro-batch i by planted[i]; the results, one for each window."""
    run = Accumulation(own, acc)
    micros = [micro for window in windows for micro in window]
    for turn, micro in enumerate(acc.batches(micros)):
        acc.backward(mean_loss(own.model, micro) * planted.get(turn, 1.0), items=micro.items)
        run.note(acc.step())
    return run.results


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "keep"])
@pytest.mark.parametrize("planted", [0, 2, 3])
def test_an_overflow_inside_a_window_skips_it_and_backs_off_once(name, how, max_norm, nonfinite, planted):
    own, scaler = scaled_trainee(name, how)
    acc = own.accumulator(steps=4, scaler=scaler, max_norm=max_norm, nonfinite=nonfinite)
    before = snapshot(own)
    (skipped,) = train_planted(own, acc, [UNEQUAL], {planted: math.inf})
    assert bool(skipped.skipped)
    assert acc.optimizer_step == 0
    assert scaler.get_scale() == 2.0**15
    assert relative_error(weights_of(own.model), before["weights"]) == 0
    assert [scheduler.last_epoch for scheduler in own.schedulers] == [0]
    whole = trainee(Attention, name, how, dtype=torch.float32)
    (taken,) = train_planted(own, acc, [UNEQUAL], {})
    train_whole(whole, [UNEQUAL], max_norm=max_norm)
    assert not bool(taken.skipped)
    assert taken.step == acc.optimizer_step == 1
    same_training(own, whole, 1e-5)


@pytest.mark.parametrize("how", HOWS)
def test_an_overflow_leaves_old_state_alone(how):
    own, scaler = scaled_trainee("AdamW", how)
    acc = own.accumulator(steps=4, scaler=scaler)
    train_planted(own, acc, [UNEQUAL], {})
    before = snapshot(own)
    train_planted(own, acc, [UNEQUAL], {1: math.nan})
    assert same_snapshot(snapshot(own), before)


def test_the_scale_is_constant_inside_a_window():
    own, scaler = scaled_trainee(init_scale=2.0**10, growth_interval=1)
    acc, scales = own.accumulator(steps=4, scaler=scaler), []
    for turn, micro in enumerate(acc.batches(UNEQUAL * 3)):
        scales.append(scaler.get_scale())
        acc.backward(mean_loss(own.model, micro) * (math.inf if turn == 4 else 1.0), items=micro.items)
        acc.step()
    assert scales == [2.0**10] * 4 + [2.0**11] * 4 + [2.0**10] * 4


def test_the_scale_is_constant_though_another_window_updates_it():
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    own, other, whole = (trainee(dtype=torch.float32) for _ in range(3))
    acc, quick = own.accumulator(steps=4, scaler=scaler), other.accumulator(steps=1, scaler=scaler)
    for micro in acc.batches(UNEQUAL):
        acc.backward(mean_loss(own.model, micro), items=micro.items)
        acc.step()
        train_planted(other, quick, [[micro]], {})
    assert scaler.get_scale() > 65536.0
    train_whole(whole, [UNEQUAL])
    same_training(own, whole, 1e-5)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_scaler_changes_nothing_but_the_scale(how, max_norm):
    own, scaler = scaled_trainee("AdamW", how)
    results = train_planted(own, own.accumulator(steps=4, scaler=scaler, max_norm=max_norm), [UNEQUAL, UNEQUAL], {})
    whole = trainee(Attention, "AdamW", how, dtype=torch.float32)
    steps = train_whole(whole, [UNEQUAL, UNEQUAL], max_norm=max_norm)
    for result, step in zip(results, steps, strict=True):
        assert result.loss.item() == pytest.approx(step.loss.item(), rel=1e-5)
        assert max_norm is None or result.grad_norm.item() == pytest.approx(step.grad_norm.item(), rel=1e-5)
    same_training(own, whole, 1e-5)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_over_8192_items_in_fp16_does_not_overflow(how, micro_batches, reduction):
    model, wide, x, y = wide_problem()
    optimizer = make_optimizer(model.parameters(), "SGD", how, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    acc = Accumulator(model, optimizer, steps=micro_batches, scaler=scaler, reduction=reduction)
    loader = list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))
    for a, b in acc.batches(loader):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(a), b, reduction=reduction)
        acc.backward(loss, items=len(b))
        result = acc.step()
    assert not bool(result.skipped)
    F.cross_entropy(wide(x.double()), y).backward()
    found = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    assert relative_error(found, gradients_of(wide)) <= 4 * torch.finfo(torch.float16).eps
    assert result.loss.item() == pytest.approx(F.cross_entropy(wide(x.double()), y).item(), rel=1e-3)


def test_a_sum_over_8192_items_in_fp16_overflows_in_the_naive_loop():
    model, _, x, y = wide_problem()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y, reduction="sum")
    torch.amp.GradScaler("cpu", init_scale=65536.0).scale(loss).backward()
    assert not model.weight.grad.isfinite().all()


@pytest.mark.parametrize("sizes", [(48, 48, 48, 48), (90, 2, 50, 4), (1, 30, 60, 7)])
def test_a_second_window_overflows_no_sooner_than_one_big_batch(sizes):
    """The first one has told how many items a window has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 40))
    windows = [[(torch.randn(n, 16), torch.randint(40, (n,))) for n in order] for order in (sizes[::-1], sizes)]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(x).float(), y)

    def is_safe(scale: float) -> bool:
        x, y = (torch.cat(parts) for parts in zip(*windows[1], strict=True))
        found = torch.autograd.grad(loss_of(x, y) * scale, list(model.parameters()))
        return all(gradient.isfinite().all() for gradient in found)

    largest = next(2.0**power for power in range(30, 0, -1) if is_safe(2.0**power))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=4, scaler=scaler)
    for window in windows:
        for x, y in acc.batches(window):
            acc.backward(loss_of(x, y))
            result = acc.step()
        assert not bool(result.skipped)
        scaler.update(largest)


def wide_problem() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """A linear layer in float32, the same in float64, 8192 samples, and targets that disagree with it."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    wide = nn.Linear(16, 4, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    x = torch.randn(8192, 16)
    return model, wide, x, (model(x) + torch.randn(8192, 4)).argmin(1)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("count", [1, 0], ids=["a loss of zero", "a loss of 0 / 0"])
def test_a_window_of_zero_items_is_no_overflow_and_no_growth(kind, how, count):
    own, scaler = scaled_trainee("AdamW", how, growth_interval=1)
    acc, before = own.accumulator(steps=2, scaler=scaler), snapshot(own)
    for micro in acc.batches([batch(2, seed=1, items=0), batch(2, seed=2, items=0)]):
        acc.backward(masked_mean(own.model, micro, count), items=kind(0))
        result = acc.step()
    assert bool(result.skipped)
    assert scaler.get_scale() == 65536.0
    assert same_snapshot(snapshot(own), before)


# ---------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("scaled", [False, True])
def test_the_scheduler_steps_once_for_each_step_taken(scaled):
    own, scaler = scaled_trainee()
    acc = own.accumulator(steps=2, scaler=scaler if scaled else None, nonfinite="skip")
    results = train_planted(own, acc, [UNEQUAL] * 2 + [UNEQUAL[:1]], {2: math.inf})
    assert [bool(result.skipped) for result in results] == [False, True, False, False, False]
    assert [result.step for result in results if not result.skipped] == [1, 2, 3, 4]
    assert own.schedulers[0].last_epoch == acc.optimizer_step == 4


# --------------------------------------------------------------------------------------------------------- non-finite


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_nonfinite_raise_by_the_next_close_and_names_the_window(how, dtype, max_norm, poison):
    own = trainee(Attention, "AdamW", how, dtype=dtype)
    acc = own.accumulator(steps=4, max_norm=max_norm)
    train_planted(own, acc, [UNEQUAL] * 2, {})
    before = weights_of(own.model)
    with pytest.raises(NonFiniteError, match=r"\b3\b"):
        train_planted(own, acc, [UNEQUAL] * 2, {1: poison})
    if how == "fused":
        assert relative_error(weights_of(own.model), before) == 0


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_nonfinite_skip_leaves_everything_alone(name, how, dtype, max_norm):
    own, whole = (trainee(Attention, name, how, dtype=dtype) for _ in range(2))
    acc = own.accumulator(steps=4, nonfinite="skip", max_norm=max_norm)
    train_planted(own, acc, [UNEQUAL], {})
    before = snapshot(own)
    (result,) = train_planted(own, acc, [UNEQUAL], {2: math.nan})
    assert bool(result.skipped)
    assert same_snapshot(snapshot(own), before)
    train_planted(own, acc, [UNEQUAL], {})
    train_whole(whole, [UNEQUAL, UNEQUAL], max_norm=max_norm)
    same_training(own, whole, EXACT if dtype == torch.float64 else 1e-5)


def test_nonfinite_keep_checks_nothing():
    own = trainee()
    (result,) = train_planted(own, own.accumulator(steps=4, nonfinite="keep"), [UNEQUAL], {2: math.nan})
    assert not bool(result.skipped)
    assert all(weight.isnan().any() for weight in weights_of(own.model).values())


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written to reads NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_momentum_survives_a_skipped_first_window(scaled, dtype):
    own, whole = (trainee(Tied, "SGD", "fused", dtype=dtype) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    acc = own.accumulator(steps=4, nonfinite="skip", scaler=scaler)
    results = train_planted(own, acc, [UNEQUAL] * 3, {0: math.inf})
    assert [bool(result.skipped) for result in results] == [True, False, False]
    train_whole(whole, [UNEQUAL, UNEQUAL])
    same_training(own, whole, EXACT if dtype == torch.float64 else 1e-5)


# -------------------------------------------------------------------------------------------- two windows, one graph


def test_two_accumulators_share_a_graph_with_both_windows_open():
    micros, gan, whole = [m.x for m in batches([3, 1, 2, 4])], adversaries(), adversaries()
    acc_g, acc_d = (Accumulator(part, optimizer, steps=2) for part, optimizer in gan)
    for x in acc_d.batches(micros):
        acc_d.backward(critic_loss(gan, x), items=len(x))
        with acc_g.micro_batch():
            acc_g.backward(forger_loss(gan, x), items=len(x))
        assert (acc_g.step() is None) == (acc_d.step() is None)
    for x in (torch.cat(micros[:2]), torch.cat(micros[2:])):
        adversarial_step(whole, x)
    for (own, _), (expected, _) in zip(gan, whole, strict=True):
        assert relative_error(weights_of(own), weights_of(expected)) <= EXACT


def test_an_accumulator_leaves_other_models_gradients_alone():
    gan, x = adversaries(), batch(3, seed=0).x
    acc = Accumulator(*gan[0])
    with acc.micro_batch():
        acc.backward(forger_loss(gan, x), items=len(x))
    assert all(gradient is None for gradient in gradients_of(gan[1][0]).values())


def adversaries() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """A forger and a critic with an optimizer each."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out)).double() for out in (4, 1)]
    return [(part, make_optimizer(part.parameters(), "AdamW")) for part in parts]


def forger_loss(gan: list, x: torch.Tensor) -> torch.Tensor:
    return F.softplus(-gan[1][0](gan[0][0](x.double()))).mean()


def critic_loss(gan: list, x: torch.Tensor) -> torch.Tensor:
    forged = gan[0][0](x.double())  # not detached: the graph reaches both models
    return (F.softplus(gan[1][0](forged)) + F.softplus(-gan[1][0](x.double()))).mean()


def adversarial_step(gan: list, x: torch.Tensor) -> None:
    losses = [forger_loss(gan, x), critic_loss(gan, x)]
    gradients = [
        torch.autograd.grad(loss, list(part.parameters())) for loss, (part, _) in zip(losses, gan, strict=True)
    ]
    for (part, optimizer), own in zip(gan, gradients, strict=True):
        for p, gradient in zip(part.parameters(), own, strict=True):
            p.grad = gradient
        optimizer.step()


# ------------------------------------------------------------------------------------------ leaving a window half-way


def leave_by_break(own: Trainee, acc: Accumulator) -> Any:
    for micro in acc.batches(UNEQUAL):
        acc.backward(mean_loss(own.model, micro), items=micro.items)
        break


def leave_by_exception(own: Trainee, acc: Accumulator) -> Any:
    def fail_at_the_third() -> None:
        for turn, micro in enumerate(acc.batches(UNEQUAL)):
            if turn == 2:
                raise ZeroDivisionError
            acc.backward(mean_loss(own.model, micro), items=micro.items)
            acc.step()

    with pytest.raises(ZeroDivisionError):
        fail_at_the_third()


def leave_in_the_forward(_: Trainee, acc: Accumulator) -> Any:
    with pytest.raises(ZeroDivisionError), acc.micro_batch():
        raise ZeroDivisionError


def leave_a_named_progress_bar(own: Trainee, acc: Accumulator) -> Any:
    bar = tqdm(acc.batches(UNEQUAL), file=io.StringIO())
    for micro in bar:
        acc.backward(mean_loss(own.model, micro), items=micro.items)
        break
    return bar


LEAVES = [leave_by_break, leave_by_exception, leave_a_named_progress_bar]


@pytest.mark.parametrize("leave", [*LEAVES, leave_in_the_forward])
def test_an_exact_window_after_one_left_and_discarded(leave):
    own = trainee()
    acc = own.accumulator(steps=4)
    kept_alive = leave(own, acc)
    acc.discard()
    exact_window(acc, own)
    del kept_alive


@pytest.mark.parametrize("leave", LEAVES)
def test_a_window_left_open_is_an_error_at_the_next_loader(leave):
    own = trainee()
    acc = own.accumulator(steps=4)
    kept_alive = leave(own, acc)
    before = weights_of(own.model)
    with pytest.raises(UsageError, match=r"discard"):
        Accumulation(own, acc).epoch(UNEQUAL)
    assert relative_error(weights_of(own.model), before) == 0
    del kept_alive


def test_a_window_left_by_break_can_be_closed_as_it_stands():
    own = trainee()
    acc = own.accumulator(steps=4)
    expected = whole_batch_gradient(own.model, UNEQUAL[:1])
    leave_by_break(own, acc)
    run = Accumulation(own, acc)
    run.note(acc.step(now=True))
    assert relative_error(run.gradients[0], expected) <= EXACT
    exact_window(acc, own)


def test_discard_leaves_nothing_behind():
    own = trainee(Experts)
    acc = own.accumulator(steps=4)
    leave_by_break(own, acc)
    acc.discard()
    assert all(gradient is None for gradient in gradients_of(own.model).values())


# ------------------------------------------------------------------------------------------------ what the host reads


@contextmanager
def watched_until_the_step(own: Trainee) -> Iterator[HostReads]:
    """From the first backward (the test says when) to the optimizer's step."""
    reads = HostReads()
    hook = own.optimizers[0].register_step_pre_hook(lambda *_: setattr(reads, "watching", False))
    with reads:
        yield reads
    hook.remove()


def count_reads(own: Trainee, items: str, **options: Any) -> list[str]:
    counting, acc = Counting(items), own.accumulator(steps=4, **options)
    weights = [counting.given(micro, turn) for turn, micro in enumerate(UNEQUAL)]
    with watched_until_the_step(own) as reads:
        for micro, weight in acc.batches(list(zip(UNEQUAL, weights, strict=True))):
            loss = mean_loss(own.model, micro)
            reads.watching = True
            acc.backward(loss, items=weight)
            acc.step()
    assert acc.optimizer_step == 1
    assert not reads.watching
    return reads.reads


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("nonfinite", ["raise", "keep"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_fused_optimizer_is_reached_without_a_read(name, nonfinite, max_norm):
    own = trainee(Attention, name, "fused", dtype=torch.float32)
    assert count_reads(own, "int", nonfinite=nonfinite, max_norm=max_norm) == []


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("items", ["int", "tensor", "none"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "keep"])
@pytest.mark.parametrize("scaled", [False, True])
def test_nothing_is_read_inside_a_window(how, items, nonfinite, scaled):
    own = trainee(Attention, "AdamW", how, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    acc, counting = own.accumulator(steps=4, nonfinite=nonfinite, scaler=scaler), Counting(items)
    weights = [counting.given(micro, turn) for turn, micro in enumerate(UNEQUAL)]
    with HostReads() as reads:
        reads.watching = True
        for micro, weight in acc.batches(list(zip(UNEQUAL, weights, strict=True))):
            acc.backward(mean_loss(own.model, micro), items=weight)
            reads.watching = not acc.is_last
            acc.step()
    assert acc.optimizer_step == 1
    assert reads.reads == []


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, bool, torch.Tensor.tolist, lambda t: t.untyped_storage()[0], float]
)
def test_a_read_is_seen(read):
    with HostReads() as reads:
        read(torch.ones(()))
        assert reads.reads == []
        reads.watching = True
        read(torch.ones(()))
    assert reads.reads
