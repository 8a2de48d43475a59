"""`verify` on steps of every kind: any number of optimizers, and of their steps, on samples of any kind."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from harness.loops import Pair, Step, batch_of, by_hand, causes, layers, loss_fn, numbers, pieces, squares, thirds
from harness.reference import Attention, mean_loss
from macrobatch import MacroStep, verify
from macrobatch.errors import UsageError

# ------------------------------------------------------------------------------------------------- optimizers


def two_paces(divisor: int) -> Step:
    """One optimizer steps after every micro-batch, the other after every third, on a sum of three."""

    def step(model, batch):
        fast, slow = torch.optim.SGD(model[1].parameters(), 0.1), torch.optim.SGD(model[0].parameters(), 0.1)
        for _ in range(2):
            for micro in thirds(batch):
                squares(model, micro).backward()
                fast.step()
                fast.zero_grad()
            for parameter in model[0].parameters():
                parameter.grad /= divisor
            slow.step()
            slow.zero_grad()

    return step


def test_optimizers_that_step_at_different_times():
    report = verify(layers(), squares, numbers(), step=two_paces(3))
    assert report.ok, str(report)
    assert [window.micro_batches for window in report.windows] == [1, 1, 1, 3] * 2
    assert causes(verify(layers(), squares, numbers(), step=two_paces(1))) == ["not divided"]


def test_optimizers_that_step_at_different_times_and_do_not_clear():
    def step(model, batch):
        fast, slow = torch.optim.SGD(model[1].parameters(), 0.1), torch.optim.SGD(model[0].parameters(), 0.1)
        for _ in range(2):
            for micro in thirds(batch):
                (squares(model, micro) / 3).backward()
                for parameter in model[1].parameters():
                    parameter.grad *= 3
                fast.step()
                fast.zero_grad()
            slow.step()

    report = verify(layers(), squares, numbers(), step=step)
    assert causes(report)[0] == "gradients left over"
    assert "the gradient of window 4" in report.causes[0].evidence


def test_optimizers_that_take_turns():
    """Each has the gradients of the other's turns cleared away."""

    def step(model, batch):
        optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
        for index, micro in enumerate(thirds(batch) * 2):
            optimizers[index % 2].zero_grad()
            squares(model, micro).backward()
            optimizers[index % 2].step()

    assert verify(layers(), squares, numbers(), step=step).ok


def test_a_new_optimizer_for_each_window():
    def step(model, batch):
        for micro in thirds(batch):
            optimizer = torch.optim.AdamW(model.parameters())
            squares(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = verify(layers(), squares, numbers(), step=step)
    assert report.ok, str(report)
    assert len(report.windows) == 3


@pytest.mark.parametrize("weight", [1 / 3, 1.0])
def test_a_closure_that_is_called_again_and_again(weight):
    """The first time, the weights are those that everything is compared at."""

    def step(model, batch):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            optimizer.zero_grad()
            losses = [squares(model, micro) * weight for micro in thirds(batch)]
            for loss in losses:
                loss.backward()
            return sum(losses)

        optimizer.step(closure)

    report = verify(layers(), squares, numbers(), step=step)
    assert report.ok == (weight == 1 / 3)
    assert "an optimizer called its closure 3 times more: only the first call was compared" in report.notes


def test_an_optimizer_inside_another():
    """One that wraps another steps once, not twice."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            return self.inner.step(closure)

    def step(times):
        def loop(model, batch):
            optimizer = Outer(torch.optim.AdamW(model.parameters()))
            for micro in thirds(batch):
                (squares(model, micro) / 3).backward()
            for _ in range(times):
                optimizer.step()
            optimizer.zero_grad()

        return loop

    assert verify(layers(), squares, numbers(), step=step(1)).ok
    assert causes(verify(layers(), squares, numbers(), step=step(2))) == ["window closed twice"]


def test_an_optimizer_that_only_calls_others():
    class Several(torch.optim.Optimizer):
        def __init__(self, *others: torch.optim.Optimizer) -> None:
            super().__init__([torch.zeros(())], {})
            self.others = others

        def step(self, closure=None):
            for other in self.others:
                other.step(closure)

    def step(model, batch):
        optimizer = Several(*(torch.optim.SGD(layer.parameters(), 0.1) for layer in model))
        for micro in thirds(batch):
            (squares(model, micro) / 3).backward()
        optimizer.step()

    model = layers()
    report = verify(model, squares, numbers(), step=step, windows=1)
    assert causes(report) == ["gradients left over"]  # which is right: nobody clears them
    assert report.windows[0].relative_error <= 1e-12


def test_an_optimizer_of_parameters_whose_true_gradient_is_zero():
    """Errors are shares of the largest gradient of the whole model, not of what one optimizer holds."""

    def step(model, batch):
        zero = torch.optim.SGD([model.key.bias], 0.1)
        others = torch.optim.SGD([p for name, p in model.named_parameters() if name != "key.bias"], 0.1)
        micro_batches = list(pieces(batch, 5))
        for micro in micro_batches:
            mean_loss(model, micro).backward()
            others.step()
            others.zero_grad()
        model.key.bias.grad /= len(micro_batches)
        zero.step()
        zero.zero_grad()

    report = verify(Attention().double(), loss_fn, batch_of(), step=step)
    assert report.ok, str(report)


def test_gradients_that_no_backward_makes():
    """Those of functions of functions, one sample at a time."""

    def step(model, batch):
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, x, y):
            return F.mse_loss(functional_call(model, weights, (x[None],)), y[None])

        gradients = vmap(grad(loss), (None, 0, 0))(weights, *batch)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)

    assert verify(layers(), squares, numbers(), step=step).ok


def test_a_step_that_forgets_to_switch_gradients_on_again():
    def step(model, batch):
        by_hand()(model, batch)
        torch.set_grad_enabled(False)

    try:
        assert verify(layers(), squares, numbers(), step=step).ok
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_weights_that_change_without_an_optimizer():
    def step(model, batch):
        squares(model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    model = layers()
    before = copy.deepcopy(model.state_dict())
    report = verify(model, squares, numbers(), step=step)
    assert report.ok, str(report)
    assert "no torch.optim.Optimizer stepped" in report.notes[0]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_gradients_from_before_are_not_those_of_a_step():
    """However right they are."""
    model = layers()
    squares(model, numbers()).backward()
    report = verify(model, squares, numbers(), step=lambda model, batch: None)
    assert causes(report) == ["parameters that received nothing"]
    assert "no backward reached a parameter" in report.causes[0].evidence


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.25, 0.8, 0.7135])
def test_making_gradients_smaller_is_not_clipping(dtype, factor):
    """Though it does the same to a right gradient: twice as large, it would not be clipped to the same."""

    def shrink(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad *= factor

    report = verify(layers().to(dtype), squares, numbers(dtype), step=by_hand(last=shrink))
    assert not report.ok
    assert causes(report)[0] in ("constant factor", "divided twice", "short window")


def test_clipping_in_a_step_that_cannot_be_repeated():
    """Then what it looks like has to do."""
    calls = []

    def step(model, batch):
        calls.append(1)
        assert len(calls) == 1
        by_hand(last=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))(model, batch)

    report = verify(layers(), squares, numbers(), step=step)
    assert report.ok, str(report)
    assert "clipped, to a norm of 0.05" in report.notes[0]


def test_clipping_by_value_is_no_mistake():
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.02)

    def clip_and_spoil(model: nn.Module) -> None:
        clip(model)
        model[1].weight.grad *= 0.9

    report = verify(layers(), squares, numbers(), step=by_hand(last=clip))
    assert report.ok, str(report)
    assert "clipped, each number to 0.02" in report.notes[0]
    assert not verify(layers(), squares, numbers(), step=by_hand(last=clip_and_spoil)).ok


# ------------------------------------------------------------------------------------------------- samples


def samples(count: int = 12) -> list[Pair]:
    x, y = numbers()
    return [(x[i], y[i]) for i in range(count)]


def collate(chosen: list[Pair]) -> Pair:
    return torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])


def over_samples(sizes: list[int], *, each: bool = False) -> Step:
    """A mean of means over so many samples each; a step after each of them, or one at the end."""

    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for index, size in enumerate(sizes):
            first = sum(sizes[:index])
            (squares(model, collate(batch[first : first + size])) / (1 if each else len(sizes))).backward()
            if each or index == len(sizes) - 1:
                optimizer.step()
                optimizer.zero_grad()

    return step


def test_a_list_of_samples():
    assert verify(layers(), squares, samples(), collate=collate).ok

    def whole(model, batch):
        MacroStep(model, torch.optim.SGD(model.parameters(), 0.1), squares, micro=5, collate=collate)(batch)

    assert verify(layers(), squares, samples(), step=whole, collate=collate).ok
    assert verify(layers(), squares, samples(), step=over_samples([4, 4, 4]), collate=collate).ok
    report = verify(layers(), squares, samples(), step=over_samples([5, 5, 2], each=True), collate=collate)
    assert report.ok, str(report)
    assert [window.samples for window in report.windows] == [5, 5, 2]
    assert causes(verify(layers(), squares, samples(), step=over_samples([5, 5, 2]), collate=collate)) == [
        "mean of means"
    ]
    with pytest.raises(UsageError, match="collate must be a function"):
        verify(layers(), squares, samples(), collate=3)


def test_a_step_that_changes_its_batch():
    """It is compared with the batch as it was, which is put back."""

    def step(model, batch):
        batch[1].add_(1.0)
        by_hand()(model, batch)

    batch = numbers()
    report = verify(layers(), squares, batch, step=step)
    assert not report.ok
    assert "the step changed the batch that it was given: batch[1]" in report.notes
    torch.testing.assert_close(batch, numbers(), rtol=0, atol=0)


def test_a_batch_that_is_taken_apart():
    """As with ``labels = batch.pop("labels")``, in the step and in the loss."""

    def loss_of(model, batch):
        wanted = batch.pop("y")
        return F.mse_loss(model(batch["x"]), wanted)

    batch = dict(zip("xy", numbers(), strict=True))
    assert verify(layers(), loss_of, batch, step=lambda model, batch: loss_of(model, batch).backward()).ok
    assert verify(layers(), loss_of, batch).ok
    assert list(batch) == ["x", "y"]


def in_this_order(order: list[int]) -> Step:
    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for micro in thirds((batch[0][order], batch[1][order])):
            squares(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_samples_that_look_the_same_to_the_model():
    """In the batch's order they are told apart by it; in another order they cannot be."""
    x, y = numbers()
    alike = x[torch.arange(12) // 6], y
    assert verify(layers(), squares, alike, step=in_this_order(list(range(12)))).ok
    report = verify(layers(), squares, alike, step=in_this_order(list(range(11, -1, -1))))
    assert (report.verdict, causes(report)) == ("unknown", ["samples that look alike"])
    unique = verify(layers(), squares, (x, y), step=in_this_order(list(range(11, -1, -1))))
    assert unique.ok


# ------------------------------------------------------------------------------------------------- several windows


def test_several_optimizer_steps_are_said_aloud():
    report = verify(layers(), squares, numbers(), step=in_this_order(list(range(12))))
    assert report.ok
    assert str(report).splitlines()[1] == "3 optimizer steps, each compared with its own samples"
    assert "nothing was accumulated" in report.notes[0]
    assert "optimizer steps" not in str(verify(layers(), squares, numbers(), step=by_hand()))


def test_the_number_of_optimizer_steps_can_be_demanded():
    step = in_this_order(list(range(12)))
    assert verify(layers(), squares, numbers(), step=step, windows=3).ok
    assert verify(layers(), squares, numbers(), windows=1).ok
    cause = verify(layers(), squares, numbers(), step=step, windows=1).causes[0]
    assert "the step took 3 optimizer steps where 1 was expected" in cause.evidence
    assert "if (index + 1) % steps == 0" in cause.cure
    cause = verify(layers(), squares, numbers(), step=by_hand(), windows=2).causes[0]
    assert "the step took 1 optimizer steps where 2 were expected" in cause.evidence
    for windows in (0, -1, 1.0, True, "1"):
        with pytest.raises(UsageError, match="windows must be a number of optimizer steps"):
            verify(layers(), squares, numbers(), windows=windows)


def test_too_many_optimizer_steps_on_samples_that_cannot_be_told():
    """Which samples went where does not matter then."""

    def step(model, batch):
        in_this_order(list(range(12)))(model, (batch[0] + 1e-3, batch[1]))

    assert causes(verify(layers(), squares, numbers(), step=step, windows=1)) == ["number of optimizer steps"]


def test_a_batch_is_one_window_without_an_optimizer():
    def step(model, batch):
        squares(model, batch).backward()

    assert verify(layers(), squares, numbers(), step=step, windows=1).ok


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("clears", [False, True], ids=["never", "clears"])
def test_a_step_that_never_clears_is_found_though_it_clips_or_scales(scaled, clips, clears):
    """On the same batch, what it left has the same direction, and clipping gives it the same norm."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).pow(2).mean()

    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for part in zip(batch[0].split(4), batch[1].split(4), strict=True):
            scaler.scale(loss_fn(model, part) / 2).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        if clears:
            optimizer.zero_grad()

    report = verify(model, loss_fn, (x, y), step=step)
    assert [cause.name for cause in report.causes] == ([] if clears else ["gradients left over"])
