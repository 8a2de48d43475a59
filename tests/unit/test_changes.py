"""Weights and buffers that change inside a window: its micro-batches would go through different models."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from macrobatch import Accumulator, MacroStep
from macrobatch._checks.values import MOST, Values
from macrobatch.errors import BatchError, MacrobatchError


def batches(number=2):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=draw) for _ in range(number)]


class Follower(nn.Module):
    """A layer, and a frozen one that forwards, or the program, move."""

    def __init__(self, how="nothing"):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.slow, self.how = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False), how

    @torch.no_grad()
    def follow(self):
        old, new = self.slow.weight, self.layer.weight
        if self.how == "in place":
            old.lerp_(new, 0.1)
        elif self.how == "data in place":
            old.data.lerp_(new.data, 0.1)
        elif self.how == "data":
            old.data = old.data.lerp(new.data, 0.1)
        elif self.how == "replaced":
            self.slow.weight = nn.Parameter(old.lerp(new, 0.1), requires_grad=False)
        elif self.how == "rolled":
            old.data.copy_(old.roll(1, 0))
        elif self.how == "one element":
            old[-1, -1] += 1
        elif self.how == "trained":
            new.mul_(0.99)
        elif self.how == "fused":
            old.grad = torch.ones_like(old)
            torch.optim.AdamW([old], fused=True).step()
            old.grad = None

    def forward(self, x):
        output = (self.layer(x) - self.slow(x)).square().mean()
        self.follow()
        return output


def train(model, steps=2, number=2, **options):
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps, **options)
    for x in acc.batches(batches(number)):
        acc.backward(model(x))
        acc.step()
    return acc


HOW = ["in place", "data in place", "data", "replaced", "rolled", "one element", "trained", "fused"]


@pytest.mark.parametrize("how", HOW)
def test_a_parameter_that_changes_inside_a_window_is_an_error(how):
    model = Follower(how)
    before = model.layer.bias.detach().clone()
    expected = r"inside the open window" if how == "fused" else r"(slow|layer)\.weight.*inside window 1.*after the step"
    with pytest.raises(MacrobatchError, match=expected):
        train(model)
    assert torch.equal(before, model.layer.bias)


@pytest.mark.parametrize("how", HOW)
def test_in_macro_steps_too(how):
    model = Follower(how)
    step = MacroStep(model, None, lambda model, x: (model(x), len(x)), micro=3)
    with pytest.raises(BatchError, match=r"inside window 1"):
        step(torch.cat(batches()))


@pytest.mark.parametrize("how", HOW)
def test_after_a_step_everything_may_change(how):
    model = Follower(how)
    assert train(model, steps=1).optimizer_step == 2  # each window goes through the model once
    model.how = "nothing"
    acc = train(model)
    model.how = how
    model.follow()
    model.how = "nothing"
    if how != "replaced":  # a new parameter needs a new optimizer
        for x in acc.batches(batches()):
            acc.backward(model(x))
            acc.step()
        assert acc.optimizer_step == 2


def test_weights_that_are_swapped_out_and_back_are_the_same():
    model = Follower()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for x in acc.batches(batches()):
        acc.backward(model(x))
        kept = model.layer.weight.detach().clone()
        with torch.no_grad():
            model.layer.weight.zero_()
            model(x)
            model.layer.weight.copy_(kept)
        acc.step()
    assert acc.optimizer_step == 1


def test_weights_that_are_not_numbers_are_the_same():
    model = Follower()
    model.slow.weight.data[0] = torch.nan
    step = MacroStep(model, None, lambda model, x: (model.layer(x).square().mean(), len(x)), micro=2)
    step(torch.cat(batches()))


@pytest.mark.parametrize("layer", [nn.Embedding(5, 3, max_norm=0.1), nn.EmbeddingBag(5, 3, max_norm=0.1)])
def test_embeddings_that_renormalise_their_weights_may(layer):
    step = MacroStep(layer, None, lambda layer, x: (layer(x).square().mean(), len(x)), micro=2)
    step(torch.arange(5).repeat(2, 1)[:, :4].T.contiguous())


def test_lazy_modules_get_their_weights_in_the_first_forward():
    model = nn.LazyLinear(2)
    step = MacroStep(model, None, lambda model, x: (model(x).square().mean(), len(x)), micro=2)
    step(torch.cat(batches()))
    assert model.weight.grad is not None


def test_a_second_accumulator_of_the_same_model_changes_it():
    model = Follower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer, inner = Accumulator(model, optimizer, steps=2), Accumulator(model, optimizer, steps=1)
    with pytest.raises(MacrobatchError):
        for x in outer.batches(batches()):
            for y in inner.batches(batches(1)):
                inner.backward(model(y))
                inner.step()
            outer.backward(model(x))
            outer.step()


# ---------------------------------------------------------------------------------------------------------- buffers


class Queue(nn.Module):
    """A layer with a buffer that forwards read and write."""

    def __init__(self, how="in place", size=6):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = nn.Linear(3, 4), how
        self.register_buffer("queue", torch.randn(4, size))

    def forward(self, x):
        output = self.layer(x)
        found = (output @ self.queue.clone()).square().mean()
        new = output.detach().T
        if self.how == "in place":
            self.queue[:, : len(x)] = new
        elif self.how == "data":
            self.queue.data.mul_(0.9)
        elif self.how == "replaced":
            self.queue = self.queue * 0.9
        elif self.how == "same":
            self.queue = self.queue.clone()
        return found


@pytest.mark.parametrize(
    ("how", "size"), [("in place", 6), *((how, size) for how in ("data", "replaced") for size in (6, 3 * MOST))]
)
def test_a_buffer_that_forwards_change_is_named_once(how, size):
    with pytest.warns(UserWarning, match=r"the buffer 'queue' changes inside a window.*after the step") as told:
        train(Queue(how, size), number=6)
    assert len(told) == 1


@pytest.mark.parametrize("how", ["nothing", "same"])
def test_a_buffer_with_the_same_values_is_not(how):
    train(Queue(how))


def test_one_micro_batch_reads_before_it_writes():
    train(Queue(), steps=1)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Queue()

    def forward(self, x):
        return self.inner(x)


def test_its_name_has_the_path_of_its_module():
    with pytest.warns(UserWarning, match=r"'inner\.queue'"):
        train(Nested())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_running_statistics_are_not_read(norm):
    model = nn.Sequential(nn.Linear(3, 4), norm)
    step = MacroStep(model, None, lambda model, x: (model(x).square().mean(), len(x)), micro=4)
    step(torch.cat(batches()))


# ------------------------------------------------------------------------------------------------------------ hooks


def clamp(gradient):
    return gradient.clamp(-0.1, 0.1)


@pytest.mark.parametrize("hook", [clamp, lambda gradient: gradient.clamp_(-0.1, 0.1)])
def test_a_hook_that_changes_a_gradient_is_told_once(hook):
    model, seen = Follower(), []
    model.layer.bias.register_hook(seen.append)
    model.layer.bias.register_hook(hook)
    with pytest.warns(UserWarning, match=r"'layer.bias'.*of a sum over items.*register_step_pre_hook") as told:
        train(model, number=6)
    assert len(told) == 1
    assert len(seen) == 6


def test_a_hook_that_only_looks_is_not():
    model, seen = Follower(), []
    model.layer.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    train(model, number=6)
    assert len(seen) == 6


def test_what_the_message_says_is_right():
    """A hook of the optimizer clamps the window's gradient, as a hook on the parameter does in one big batch."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 5).double(), torch.randint(3, (12,))
    whole, cut = (nn.Linear(5, 3).double() for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    whole.weight.register_hook(clamp)
    F.cross_entropy(whole(x), y).backward()
    seen, optimizer = [], torch.optim.SGD(cut.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_([cut.weight], 0.1))
    optimizer.register_step_pre_hook(lambda *_: seen.append(cut.weight.grad.clone()))
    acc = Accumulator(cut, optimizer, steps=3)
    for a, b in acc.batches(list(zip(x.split(4), y.split(4), strict=True))):
        acc.backward(F.cross_entropy(cut(a), b))
        acc.step()
    assert (seen[0] - whole.weight.grad).abs().max() <= 1e-12


# ----------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("shape", [(3,), (MOST,), (100, 100), (2, 3, 50, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_values_show_what_has_changed(shape, dtype):
    tensors = [torch.ones(2), torch.ones(shape, dtype=dtype), torch.ones(3, 3, dtype=torch.float64)]
    if len(shape) == 4:
        tensors[1] = tensors[1].to(memory_format=torch.channels_last)
    values = Values()
    values.keep(tensors)
    assert values.changed(tensors) == []
    tensors[1].mul_(2)
    assert [change.first() for change in values.changed(tensors)] == [1]
