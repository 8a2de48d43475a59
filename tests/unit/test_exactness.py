"""For every cut of a batch: the gradient, the weights and the optimizer's state are those of the one big batch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.reference import (
    HOWS,
    MODELS,
    OPTIMIZERS,
    Accumulation,
    Attention,
    Batch,
    Convolution,
    Counting,
    Experts,
    Tied,
    Trainee,
    accumulate,
    batch,
    batches,
    concatenate,
    cut,
    gradients_of,
    make_optimizer,
    mean_loss,
    relative_error,
    same_training,
    sum_loss,
    token_loss,
    train_whole,
    trainee,
    unsized,
    whole_batch_gradient,
)
from macrobatch import Accumulator

EXACT = 1e-12
quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)
at_length = settings(quickly, max_examples=300)
pytestmark = pytest.mark.filterwarnings("ignore:micro-batches of", "ignore:this epoch took no step")

countings = st.builds(
    Counting, st.sampled_from(["int", "tensor", "host tensor", "mixed", "read"]), st.sampled_from(["mean", "sum"])
)
setups = st.tuples(st.sampled_from(MODELS), st.sampled_from(OPTIMIZERS), st.sampled_from(HOWS))
clips = st.sampled_from([None, 0.05, 1e3])  # no clipping; always clipped; asked for and never needed
remainders = st.sampled_from(["step", "drop", "carry"])


@st.composite
def micro_batches(draw: st.DrawFn, most: int = 8) -> list[Batch]:
    """Of 1 to 3 samples, with any number of items (often none), some of them sent to the expert."""
    shapes = st.tuples(st.integers(1, 3), st.sampled_from([None, None, None, 0, 1]), st.booleans())
    seed = draw(st.integers(0, 9))
    drawn = draw(st.lists(shapes, min_size=1, max_size=most))
    return [batch(n, seed=100 * seed + i, items=items, routed=r) for i, (n, items, r) in enumerate(drawn)]


@st.composite
def ramps(draw: st.DrawFn) -> int | Callable[[int], int]:
    """A window length, or one for each optimizer step."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    return draw(st.sampled_from([lengths[0], lambda step: lengths[step % len(lengths)]]))


def compare(run: Accumulation, whole: Trainee, windows: list[list[Batch]], max_norm: float | None = None) -> None:
    """Each result, and where one can look, each gradient, against the big batch of its window."""
    steps = train_whole(whole, windows, max_norm=max_norm, counting=run.counting)
    assert [bool(result.skipped) for result in run.results] == [step is None for step in steps]
    assert [result.micro_batches for result in run.results] == [len(window) for window in windows]
    taken = [(r, s) for r, s in zip(run.results, steps, strict=True) if s is not None]
    assert [r.step for r, _ in taken] == list(range(1, len(taken) + 1))
    for result, step in taken:
        assert result.items.item() == step.items
        assert result.loss.item() == pytest.approx(step.loss.item(), rel=EXACT)
        assert (result.grad_norm is None) == (max_norm is None)
        assert max_norm is None or result.grad_norm.item() == pytest.approx(step.grad_norm.item(), rel=EXACT)
    assert all(result.loss.isnan() for result in run.results if result.skipped)
    if not run.own.optimizers[-1].defaults["fused"]:
        assert len(run.gradients) == len(taken)
        for found, (_, step) in zip(run.gradients, taken, strict=True):
            assert relative_error(found, step.gradients) <= EXACT
    assert all(gradient is None for gradient in gradients_of(run.own.model).values())
    assert run.acc.optimizer_step == len(taken)
    same_training(run.own, whole, EXACT)


# ------------------------------------------------------------------------------------------------------ for every cut


@at_length
@given(micro_batches(), ramps(), setups, countings, clips)
def test_any_cut_trains_as_the_whole_batch(micros, steps, setup, counting, max_norm):
    run = accumulate(trainee(*setup), micros, counting=counting, steps=steps, max_norm=max_norm)
    compare(run, trainee(*setup), cut(micros, steps=steps, counting=counting), max_norm)


@at_length
@given(micro_batches(most=6), micro_batches(most=6), ramps(), remainders, st.booleans(), countings, clips)
def test_any_remainder_over_any_loader(first, second, steps, remainder, sized, counting, max_norm):
    wrap = list if sized else unsized
    setup = (Experts, "AdamW", "foreach")
    options = {"steps": steps, "max_norm": max_norm, "remainder": remainder, "counting": counting}
    run = accumulate(trainee(*setup), wrap(first), wrap(second), **options)
    run.note(run.acc.step(now=True))
    compare(run, trainee(*setup), cut(first, second, steps=steps, remainder=remainder, counting=counting), max_norm)


@pytest.mark.parametrize("wrap", [list, unsized])
def test_a_dropped_window_is_not_even_begun_where_its_loader_has_a_length(wrap):
    own, seen = trainee(), []
    run = Accumulation(own, own.accumulator(steps=3, remainder="drop"))
    for micro in run.acc.batches(wrap(batches([1] * 5))):
        seen.append(micro)
        run.backward(micro)
        run.note(run.acc.step())
    assert len(seen) == 3 if wrap is list else len(seen) > 3
    assert len(run.results) == 1
    assert run.acc.step(now=True) is None


@quickly
@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 4), st.sampled_from(HOWS), clips)
def test_any_window_without_a_loader(sizes, steps, how, max_norm):
    own, micros = trainee(Attention, "AdamW", how), batches(sizes)
    run = Accumulation(own, own.accumulator(steps=steps, max_norm=max_norm))
    for micro in micros:
        with run.acc.micro_batch():
            run.backward(micro)
        run.note(run.acc.step())
    run.note(run.acc.step(now=True))
    compare(run, trainee(Attention, "AdamW", how), cut(micros, steps=steps), max_norm)


@quickly
@given(micro_batches(), setups, st.sampled_from([None, 0.05]))
@example([batch(3, seed=i) for i in range(64)], (Attention, "SGD", "fused"), None)
@example([batch(3, seed=i) for i in range(64)], (Tied, "SGD", "plain"), 0.05)
def test_float32_errs_like_the_whole_batch(micros, setup, max_norm):
    model, _, how = setup
    if not sum(b.items for b in micros):
        return
    truth = first_gradient(trainee(model, "SGD", "plain"), micros, max_norm)
    big = first_gradient(trainee(model, "SGD", "plain", dtype=torch.float32), micros, max_norm)
    own = trainee(model, "SGD", how, dtype=torch.float32)
    accumulate(own, micros, steps=len(micros), max_norm=max_norm)
    allowed = max(3 * relative_error(big, truth), 4 * torch.finfo(torch.float32).eps)
    assert relative_error(momentum(own), truth) <= allowed


def first_gradient(whole: Trainee, window: list[Batch], max_norm: float | None) -> dict:
    train_whole(whole, [window], max_norm=max_norm)
    return momentum(whole)


def momentum(own: Trainee) -> dict:
    """After one step the momentum is the gradient as the optimizer used it, fused or not."""
    state = own.optimizers[0].state
    return {name: state[p]["momentum_buffer"] if p in state else None for name, p in own.model.named_parameters()}


@quickly
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 3), st.sampled_from(HOWS))
def test_an_expert_ages_only_with_the_windows_that_use_it(routes, steps, how):
    micros = [batch(2, seed=i, routed=routed) for i, routed in enumerate(routes)]
    own, whole = trainee(Experts, "AdamW", how), trainee(Experts, "AdamW", how)
    windows = cut(micros, steps=steps)
    compare(accumulate(own, micros, steps=steps), whole, windows)
    age = own.optimizers[0].state.get(own.model.expert.weight, {}).get("step", 0)
    assert age == sum(any(b.x[0, 0] == 0 for b in window) for window in windows)


def test_a_micro_batch_without_items_gives_zero_and_not_none():
    micros = [batch(2, seed=1), batch(2, seed=2, items=0, routed=True)]
    run = accumulate(trainee(Experts), micros, steps=2)
    assert torch.equal(run.gradients[0]["expert.weight"], torch.zeros(8, 8, dtype=torch.float64))
    compare(run, trainee(Experts), [micros])


@pytest.mark.parametrize("items", ["int", "tensor", "host tensor"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_window_without_items_takes_no_step(items, reduction):
    micros = [batch(2, seed=1, items=0), batch(2, seed=2, items=0), batch(2, seed=3), batch(2, seed=4)]
    run = accumulate(trainee(Tied, "AdamW"), micros, counting=Counting(items, reduction), steps=2)
    assert [bool(result.skipped) for result in run.results] == [True, False]
    compare(run, trainee(Tied, "AdamW"), [micros[:2], micros[2:]])


def test_fractional_items_are_weights_of_a_loss_that_does_not_say_its_own():
    first, second = batches([2, 3])
    own, model = trainee(), trainee().model
    run = Accumulation(own, own.accumulator(steps=2))
    for micro, items in run.acc.batches([(first, torch.tensor(0.25)), (second, torch.tensor(0.5))]):
        run.acc.backward(token_loss(own.model, micro, "none").sum() / micro.items, items=items)
        run.note(run.acc.step())
    ((mean_loss(model, first) + 2 * mean_loss(model, second)) / 3).backward()
    assert relative_error(run.gradients[0], gradients_of(model)) <= EXACT
    assert run.results[0].items.item() == 0.75


@pytest.mark.parametrize("as_given", [float, lambda n: torch.tensor(n, dtype=torch.float32)])
def test_fractional_items_in_proportion_to_what_the_loss_says(as_given):
    micros = batches([2, 3])
    run = accumulate_by_hand(trainee(), [(micro, as_given(micro.items / 7)) for micro in micros])
    model = trainee().model
    token_loss(model, concatenate(micros), "mean").backward()
    assert relative_error(run.gradients[0], gradients_of(model)) <= 1e-7


def test_items_may_come_in_a_buffer_that_is_filled_anew():
    micros, buffer = batches([1, 3, 2]), torch.zeros((), dtype=torch.int64)
    own = trainee()
    run = Accumulation(own, own.accumulator(steps=3))
    for micro in run.acc.batches(micros):
        run.acc.backward(mean_loss(own.model, micro), items=buffer.fill_(micro.items))
        run.note(run.acc.step())
    compare(run, trainee(), [micros])


def accumulate_by_hand(own: Trainee, weighed: list) -> Accumulation:
    run = Accumulation(own, own.accumulator(steps=len(weighed)))
    for micro, items in run.acc.batches(weighed):
        run.acc.backward(mean_loss(own.model, micro), items=items)
        run.note(run.acc.step())
    return run


# ------------------------------------------------------------------------------------------- what surrounds the model


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_several_models_optimizers_and_schedulers(how, max_norm):
    micros = batches([3, 1, 2, 2, 1])
    own, whole = two_part_trainee(how), two_part_trainee(how)
    acc = Accumulator(list(own.model), own.optimizers, scheduler=own.schedulers, steps=2, max_norm=max_norm)
    run = Accumulation(own, acc).epoch(micros)
    assert [len(result.lr) for result in run.results] == [3, 3, 3]
    compare(run, whole, cut(micros, steps=2), max_norm)


def two_part_trainee(how: str) -> Trainee:
    """An encoder and a head, each with an optimizer and a schedule of its own; three parameter groups."""
    torch.manual_seed(0)
    encoder, head = nn.Embedding(11, 8).double(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 11)).double()
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(head, (0.1, 0.01), strict=True)]
    adamw, sgd = make_optimizer(encoder.parameters(), "AdamW", how), make_optimizer(groups, "SGD", how)
    schedules = torch.optim.lr_scheduler
    schedulers = [schedules.ExponentialLR(adamw, 0.5), schedules.StepLR(sgd, 1, 0.9)]
    return Trainee(nn.Sequential(encoder, head), [adamw, sgd], schedulers)


def test_one_model_and_one_optimizer_need_no_lists():
    own, micros = trainee(), batches([1, 2])
    run = Accumulation(own, Accumulator(own.model, own.optimizers[0], scheduler=own.schedulers[0], steps=2))
    compare(run.epoch(micros), trainee(), [micros])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo's own, at graph breaks
@pytest.mark.parametrize("make", MODELS)
def test_a_compiled_model(make):
    own, micros = trainee(make), batches([2, 2, 2, 2])
    compiled = torch.compile(own.model, backend="aot_eager")
    acc = Accumulator(compiled, own.optimizers, scheduler=own.schedulers, steps=2)
    run = Accumulation(own, acc)
    for micro in acc.batches(micros):
        acc.backward(mean_loss(compiled, micro), items=micro.items)
        run.note(acc.step())
    compare(run, trainee(make), [micros[:2], micros[2:]])


@pytest.mark.parametrize("how", HOWS)
def test_autocast_errs_like_the_whole_batch(how):
    micros, narrow = batches([1, 3, 2, 3]), torch.autocast("cpu", torch.bfloat16)
    truth = whole_batch_gradient(trainee().model, micros)
    own, whole = (trainee(Attention, "SGD", h, dtype=torch.float32) for h in (how, "plain"))
    with narrow:
        accumulate(own, micros, steps=4)
        big = whole_batch_gradient(whole.model, micros)
    assert relative_error(big, truth) > 1e-4, "autocast did nothing"
    assert relative_error(momentum(own), truth) <= max(3 * relative_error(big, truth), torch.finfo(torch.bfloat16).eps)


class Checkpointed(Attention):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        mix = lambda h: self.value(torch.tanh(self.query(h)))  # noqa: E731
        return self.head(checkpoint(mix, hidden, use_reentrant=self.reentrant))


class ReentrantlyCheckpointed(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("make", [Checkpointed, ReentrantlyCheckpointed])
def test_a_checkpointed_model(make):
    micros = batches([1, 3, 2, 2])
    compare(accumulate(trainee(make, "AdamW"), micros, steps=2), trainee(make, "AdamW"), cut(micros, steps=2))


def test_a_frozen_parameter_stays_as_it_is():
    own, micros = trainee(), batches([2, 2])
    before = own.model.embedding.weight.detach().clone()
    own.model.embedding.weight.requires_grad_(False)
    run = accumulate(own, micros, steps=2)
    assert run.gradients[0]["embedding.weight"] is None
    assert torch.equal(own.model.embedding.weight, before)


def test_a_parameter_that_no_optimizer_holds_still_counts_in_the_norm():
    own, whole, micros = trainee(), trainee(), batches([2, 1, 3])
    for which in (own, whole):
        which.optimizers[0].param_groups[0]["params"] = list(which.model.head.parameters())
    compare(accumulate(own, micros, steps=3, max_norm=0.05), whole, [micros], 0.05)


def test_the_learning_rate_reported_is_the_one_used():
    own = trainee()
    run = accumulate(own, batches([2, 2, 2]), steps=1)
    assert [result.lr for result in run.results] == [pytest.approx((0.02 * 0.9**step,)) for step in range(3)]


# ------------------------------------------------------------------------------------------------- accumulate_dtype


def micro_gradient_sum(model: nn.Module, micros: list[Batch]) -> dict:
    """The micro-batches' own gradients, as low-precision torch computes them, summed in float32."""
    parameters = dict(model.named_parameters())
    rows = [torch.autograd.grad(sum_loss(model, micro), list(parameters.values())) for micro in micros]
    return {
        name: sum(g.float() for g in column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", [Attention, Convolution])  # a tied use would sum in bf16 here, in float32 there
def test_bf16_gradients_sum_in_float32(make, name, how):
    micros, own = batches([2] * 64), trainee(make, name, how, dtype=torch.bfloat16)
    expected = micro_gradient_sum(own.model, micros)
    batchwise = accumulate_dtype_window(own, micros, torch.float32)
    assert relative_error(batchwise, expected) <= 1e-6
    same_training(own, stepped_with(trainee(make, name, how, dtype=torch.bfloat16), expected, micros), 2**-8)


def accumulate_dtype_window(own: Trainee, micros: list[Batch], dtype: torch.dtype | None) -> dict:
    """The undivided sum as it stands before the step, which is then taken."""
    seen: dict = {}
    acc = own.accumulator(steps=len(micros), reduction="sum", accumulate_dtype=dtype)
    for micro in acc.batches(micros):
        acc.backward(sum_loss(own.model, micro), items=micro.items)
        if acc.is_last:
            seen = gradients_of(own.model)
        acc.step()
    assert acc.optimizer_step == 1
    return seen


def stepped_with(whole: Trainee, summed: dict, micros: list[Batch]) -> Trainee:
    """Divide in float32, cast, step: what the optimizer should have done."""
    for name, p in whole.model.named_parameters():
        p.grad = (summed[name] / sum(b.items for b in micros)).to(p.dtype)
    for stepped in (*whole.optimizers, *whole.schedulers):
        stepped.step()
    return whole


def test_bf16_gradients_summed_in_bf16_are_worse():
    micros, own = batches([2] * 64), trainee(dtype=torch.bfloat16)
    expected = micro_gradient_sum(own.model, micros)
    assert relative_error(accumulate_dtype_window(own, micros, None), expected) > 1e-3


@pytest.mark.parametrize("stepped", [True, False], ids=["step", "discard"])
def test_accumulate_dtype_leaves_the_parameters_as_they_were(stepped):
    own = trainee(Experts, dtype=torch.bfloat16)
    acc = own.accumulator(steps=2, accumulate_dtype=torch.float32)
    with acc.micro_batch():
        acc.backward(mean_loss(own.model, batch(2, seed=1)))  # the expert gets no gradient
    assert own.model.head.weight.grad.dtype == torch.float32
    assert (acc.step(now=True) if stepped else acc.discard()) or not stepped
    mean_loss(own.model, batch(2, seed=2, routed=True)).backward()
    assert {p.grad.dtype for p in own.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_accumulating_float32_in_float64(max_norm):
    micros, own, whole = batches([2, 1, 3, 1]), *(trainee(Tied, "AdamW", dtype=torch.float32) for _ in range(2))
    run = accumulate(own, micros, steps=2, max_norm=max_norm, accumulate_dtype=torch.float64)
    train_whole(whole, [micros[:2], micros[2:]], max_norm=max_norm)
    assert {g.dtype for g in run.gradients[0].values()} == {torch.float32}
    same_training(own, whole, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulate_dtype_after_the_model_has_got_another_dtype(dtype):
    """What dtype its gradients may have is not left as it was when a parameter was narrower."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 1).bfloat16(), torch.randn(4, 3)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate_dtype=dtype)
    with acc.micro_batch():
        acc.backward(model(x.bfloat16()).float().mean())
    acc.step()
    model.double()
    plain = torch.nn.Linear(3, 1).double()
    plain.load_state_dict(model.state_dict())
    plain(x.double()).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    with acc.micro_batch():
        acc.backward(model(x.double()).square().mean())
    acc.step()
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= 1e-15
