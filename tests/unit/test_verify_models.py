"""`verify` on models and steps of every kind: what is wrong is found, what is right is not, and all is put back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from harness.loops import (
    UNEQUAL,
    Loop,
    Statistics,
    batch_of,
    by_hand,
    by_items,
    causes,
    layers,
    loss_fn,
    numbers,
    pieces,
    spoil,
    squares,
    thirds,
)
from harness.reference import WIDTH, Attention, Tied, mean_loss
from macrobatch import Accumulator, verify
from macrobatch.errors import UsageError

# ------------------------------------------------------------------------------------------------- which is which


class Child(nn.Module):
    """A weight of its own, and a child that is called as wrappers call theirs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.randn(3, 3)), name
        setattr(self, name, nn.Linear(3, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(torch.tanh(x @ self.weight))


class Deeper(nn.Module):
    """Both names stand below another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = Child(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
WRAPPED = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("make", [Child, Deeper])
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parameters_are_told_apart(make, name, dtype):
    """Spoiling any one of them is found, and blamed on it."""
    model = make(name).to(dtype)
    assert verify(model, squares, numbers(dtype), step=by_hand()).ok
    for place in dict(model.named_parameters()):
        step = by_hand(last=lambda model, place=place: spoil(model.get_parameter(place)))
        report = verify(model, squares, numbers(dtype), step=step)
        assert not report.ok
        assert report.worst[0].name == place


@pytest.mark.parametrize("how", WRAPPED)
def test_wrappers_change_no_names(how):
    model = WRAPPED[how](Child("module").double())
    assert verify(model, squares, numbers(), step=by_hand()).ok
    report = verify(model, squares, numbers(), step=by_hand(last=lambda model: spoil(next(iter(model.parameters())))))
    assert report.worst[0].name == "weight"
    assert {worst.name for worst in report.worst} == {"weight", "module.weight"}


def test_wrapped_children_change_no_names():
    model = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), checkpoint_wrapper(nn.Linear(3, 1))).double()
    report = verify(model, squares, numbers(), step=by_hand(last=lambda model: spoil(model[1].weight)))
    assert report.worst[0].name == "1.weight"
    assert "0.weight" in {worst.name for worst in report.worst}


def test_shared_parameters():
    step = Loop(weight=by_items)
    assert verify(Tied().double(), loss_fn, batch_of(items=UNEQUAL), step=step).ok

    def spoiled(model, batch):
        for micro in pieces(batch, 5):
            (mean_loss(model, micro) * by_items([batch], micro)).backward()
        spoil(model.head.weight)

    report = verify(Tied().double(), loss_fn, batch_of(items=UNEQUAL), step=spoiled)
    assert (report.ok, report.worst[0].name) == (False, "embedding.weight")


def test_buffers_called_like_parameters():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)
            self.register_buffer("weight", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.weight)

    assert verify(Scaled().double(), squares, numbers(), step=by_hand()).ok


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_complex_parameters(dtype):
    """Both parts of a number count, in the precision that they have."""

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(self.weight.dtype) @ self.weight).abs()

    def turn(model: nn.Module) -> None:
        model.weight.grad.imag *= 1.001

    report = verify(Waves(), squares, numbers(dtype.to_real()), step=by_hand())
    assert report.ok, str(report)
    assert report.bound <= 2e-6
    assert not verify(Waves(), squares, numbers(dtype.to_real()), step=by_hand(last=turn)).ok


def test_parameters_that_nothing_uses():
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.spare = nn.Parameter(torch.ones(2))

    def fill(model: nn.Module) -> None:
        model.spare.grad = torch.ones(2).double()

    assert verify(Spare().double(), squares, numbers(), step=by_hand()).ok
    assert verify(Spare().double(), squares, numbers(), step=by_hand(last=fill)).worst[0].name == "spare"


# ----------------------------------------------------------------------------------------------- parameters that change


def thawed(model: nn.Module) -> None:
    model.requires_grad_(True)


def test_what_a_step_thaws_is_compared():
    model = layers()
    model[0].requires_grad_(False)
    assert verify(model, squares, numbers(), step=by_hand(first=thawed)).ok
    report = verify(model, squares, numbers(), step=by_hand(first=thawed, last=lambda model: spoil(model[0].weight)))
    assert (report.ok, report.worst[0].name) == (False, "0.weight")
    assert not model[0].weight.requires_grad


def test_what_a_step_freezes_in_mid_window_is_mentioned():
    def step(model, batch):
        for index, micro in enumerate(thirds(batch)):
            model[0].requires_grad_(index == 0)
            (squares(model, micro) / 3).backward()

    report = verify(layers(), squares, numbers(), step=step)
    assert not report.ok
    assert "0.bias, 0.weight learned in some micro-batches and were frozen in others" in report.notes


def replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def test_what_a_step_replaces_is_compared_and_put_back():
    model = layers()
    before = model[0].weight
    assert verify(model, squares, numbers(), step=by_hand(first=replaced)).ok
    assert model[0].weight is before
    report = verify(model, squares, numbers(), step=by_hand(first=replaced, last=lambda model: spoil(model[0].weight)))
    assert (report.ok, report.worst[0].name) == (False, "0.weight")


def test_an_optimizer_of_what_was_replaced():
    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        replaced(model)
        squares(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    report = verify(layers(), squares, numbers(), step=step)
    assert causes(report)[0] == "parameters that received nothing"
    assert "the old 0.weight" in report.causes[0].evidence


def test_new_parameters_are_mentioned():
    def step(model, batch):
        model[1] = nn.Sequential(model[1], nn.Linear(1, 1).double())
        by_hand()(model, batch)

    model = layers()
    report = verify(model, squares, numbers(), step=step)
    assert any("new parameters, 1.0.weight" in note for note in report.notes)
    assert isinstance(model[1], nn.Linear)


def test_parameters_that_are_not_there_yet():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Parameter(torch.ones(3, 4, dtype=x.dtype))
            return self.last(x @ self.late)

    with pytest.raises(UsageError, match="parameters of the model have no shape yet"):
        verify(nn.LazyLinear(1), squares, numbers(torch.float32))
    with pytest.raises(UsageError, match="created new parameters: late"):
        verify(Late(), squares, numbers(torch.float32), step=by_hand())


def test_parameters_outside_of_the_model_are_put_back():
    """A head that only the loss knows: it is trained with the model, and every window begins with the same weights."""
    head = nn.Linear(3, 1).double()
    before, gradient = copy.deepcopy(head.state_dict()), torch.ones(1, 3).double()
    head.weight.grad = gradient

    def loss_of(model, batch):
        return F.mse_loss(head(model(batch[0])), batch[1])

    def step(model, batch):
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 0.1)
        for micro in thirds(batch):
            loss_of(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = verify(nn.Linear(3, 3).double(), loss_of, numbers(), step=step)
    assert report.ok, str(report)
    assert any("trains 2 tensors outside of the model: they were not compared" in note for note in report.notes)
    torch.testing.assert_close(head.state_dict(), before, rtol=0, atol=0)
    assert head.weight.grad is gradient
    assert gradient.eq(1).all()
    assert head.bias.grad is None


def test_tensors_that_a_loss_makes_are_none_of_the_model():
    """As with a penalty on the gradient of its inputs."""

    def loss_of(model, batch):
        x = batch[0].clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.mse_loss(y, batch[1]) + slope.square().sum(1).mean()

    def step(model, batch):
        for micro in thirds(batch):
            (loss_of(model, micro) / 3).backward()

    report = verify(nn.Sequential(layers()[0], nn.Tanh(), layers()[1]), loss_of, numbers(), step=step)
    assert (report.ok, report.notes) == (True, ())


# ------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hooks_on_parameters_belong_to_the_gradient(dtype):
    """Those of a frozen row, for instance; a copy of the model in float64 has them too."""
    model, mask = layers().to(dtype), torch.tensor([[1.0], [0.0], [1.0]])
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    report = verify(model, squares, numbers(dtype), step=by_hand())
    assert report.ok, str(report)
    assert report.max_relative_error < 1e-6
    assert not verify(model, squares, numbers(dtype), step=by_hand(last=lambda model: spoil(model[1].weight))).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_optimizers_in_hooks_that_were_there_before(dtype):
    """They step in the backward of a step, and not in that of one big batch."""
    model = layers().to(dtype)
    optimizers = {parameter: torch.optim.AdamW([parameter], 0.1) for parameter in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    before = copy.deepcopy(model.state_dict())
    report = verify(model, squares, numbers(dtype), step=lambda model, batch: squares(model, batch).backward())
    assert report.ok, str(report)
    assert report.max_relative_error < 1e-6
    wrong = verify(model, squares, numbers(dtype), step=lambda model, batch: (squares(model, batch) * 1.1).backward())
    assert not wrong.ok
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(optimizer.state for optimizer in optimizers.values())
    squares(model, numbers(dtype)).backward()
    assert all(optimizer.state for optimizer in optimizers.values())  # the hooks are there still


# ------------------------------------------------------------------------------------------------- side effects


class Busy(nn.Module):
    """Counts, remembers, and draws from a generator of its own, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.calls, self.sizes, self.shapes = 0, [], {}
        self.total = torch.zeros(())
        self.draw = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.shapes[len(x)] = x.shape
        self.total += len(x)
        self.last = x
        torch.rand(3, generator=self.draw)
        return self.inner(x)


@pytest.mark.parametrize("raises", [False, True])
def test_side_effects_of_a_forward_are_put_back(raises):
    def step(model, batch):
        model.register_forward_hook(lambda *_: None)
        model.added = nn.Linear(1, 1)
        by_hand()(model, batch)
        if raises:
            raise KeyError("in the step")

    model = Busy().double()
    state = model.draw.get_state()
    if raises:
        with pytest.raises(KeyError, match="in the step"):
            verify(model, squares, numbers(), step=step)
    else:
        assert verify(model, squares, numbers(), step=step).ok
    assert (model.calls, model.sizes, model.shapes, model.total.item()) == (0, [], {}, 0)
    assert torch.equal(model.draw.get_state(), state)
    assert not hasattr(model, "last")
    assert not hasattr(model, "added")
    assert not model._forward_hooks


class Noisy(nn.Module):
    """A little noise, from a generator; that of the model, or one that nobody can find."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.inner, draw = layers(), torch.Generator().manual_seed(0)
        self.noise = lambda x: 1 + 0.02 * torch.randn(x.shape, generator=draw).to(x.dtype)
        if own:
            self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.noise(x))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_noise_excuses_nothing(own, factor):
    """One big batch that is not the same twice is no measure of what rounding may do: it repeats the step's noise."""

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad *= factor

    report = verify(Noisy(own=own), squares, numbers(), step=by_hand(last=scale))
    assert causes(report) == ([] if factor == 1.0 else ["constant factor"]), str(report)


def test_a_forward_that_depends_on_how_often_it_was_called():
    class Alternating(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * (self.calls % 2))

    assert not verify(Alternating(3, 1).double(), squares, numbers(), step=by_hand()).ok
    assert not verify(Alternating(3, 1), squares, numbers(torch.float32), step=by_hand()).ok


def test_the_mode_is_that_of_the_calls_that_train():
    """Not that of an evaluation before."""

    def step(model, batch):
        model.eval()
        model(batch.x)
        model.train()
        mean_loss(model, batch).backward()

    assert verify(Statistics(nn.BatchNorm1d(WIDTH)).double(), loss_fn, batch_of(items=UNEQUAL), step=step).ok


# ------------------------------------------------------------------------------------------------- precision


def test_a_reference_that_is_not_finite():
    """NaN equals nothing, and must not look like no error at all."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.root = nn.Linear(3, 1), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + 0 * torch.sqrt(self.root)

    report = verify(Root().double(), squares, numbers(), step=by_hand(last=lambda model: spoil(model.first.weight)))
    assert causes(report) == ["not finite"]
    assert "one big batch itself gives root" in report.causes[0].evidence


def test_a_model_that_is_not_finite_in_float64():
    """As those whose masks are the lowest number of a dtype, and are cast down."""

    class Narrow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            lowest = torch.full_like(x[:1, :1], torch.finfo(x.dtype).min).float()
            return super().forward(x) + torch.nan_to_num(lowest * 0, nan=float("nan")).to(x.dtype)

    report = verify(Narrow(3, 1), squares, numbers(torch.float32), step=by_hand())
    assert report.ok, str(report)
    assert "not finite in float64" in report.notes[0]


def test_accumulating_under_autocast():
    def step(weight):
        def loop(model, batch):
            acc = Accumulator(model, torch.optim.AdamW(model.parameters()), steps=4)
            for micro in acc.batches(list(pieces(batch, 5))):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss, items = loss_fn(model, micro)
                acc.backward(loss * weight, items)
                acc.step()

        return loop

    assert verify(Attention(), loss_fn, batch_of(50, items=UNEQUAL), step=step(1.0)).ok
    assert not verify(Attention(), loss_fn, batch_of(50, items=UNEQUAL), step=step(1.1)).ok


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile hides that of its own, if it can
@pytest.mark.parametrize("where", ["in place", "in the step"])
def test_compiled(where):
    def step(model, batch):
        Loop(weight=by_items)(torch.compile(model, backend="eager") if where == "in the step" else model, batch)

    model = Attention()
    if where == "in place":
        model.compile(backend="eager")
    report = verify(model, loss_fn, batch_of(50, items=UNEQUAL), step=step)
    assert report.ok, str(report)
    assert len(report.windows) == 3
