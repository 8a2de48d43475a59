"""Losses of the whole batch compute each micro-batch twice: what must be the same both times, and what is put back."""

import pytest
import torch
from torch import nn

from harness.joint import batch_of, gradient_of, sgd, step_of, towers, weights
from harness.reference import relative_error
from macrobatch import Encoded, MacroStep, Sum
from macrobatch.errors import BatchError

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def squares(model, encoded):
    return encoded.image.square().sum()


# ------------------------------------------------------------------------------------------------------ compared


class Changing:
    """A generator of one's own, from which every forward draws other numbers."""

    def __init__(self):
        self.own = torch.Generator().manual_seed(0)

    def keep(self, like):
        """A mask of dropout."""
        return torch.rand(like.shape, generator=self.own).to(like) > 0.5


def outcome(loss_fn, dtype=torch.float64, joint=squares, micro=4):
    """Whether the step was taken, or refused since the passes differ."""
    model, batch = towers(dtype), batch_of(6, dtype=dtype)
    before, said = weights(model), ""
    train = MacroStep(model, sgd(model), loss_fn, joint=joint, micro=micro)
    try:
        train(batch)
    except BatchError as error:
        said = str(error)
    if not said:
        return "taken"
    assert "not the same in the two passes of window 1; its step was not taken" in said
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    return "refused"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", [None, -1e9, -torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("differs", [False, True])
def test_entries_that_mask_hide_no_difference(dtype, entry, differs):
    """Three of four entries are masked; they are the same in both passes."""
    changing = Changing()

    def loss_fn(model, micro):
        image = model(micro)[0]
        changed = image * changing.keep(image) if differs else image
        if entry is None:
            return Encoded(image=changed)
        return Encoded(image=torch.cat([changed, torch.full_like(image, entry).repeat(1, 3)], 1))

    def joint(model, encoded):
        return encoded.image[:, :6].square().sum()

    assert outcome(loss_fn, dtype, joint) == ("refused" if differs else "taken")


@pytest.mark.parametrize(
    "values", [(torch.nan, 0.0), (0.0, torch.inf), (torch.inf, -torch.inf), (torch.inf, torch.nan)]
)
def test_infinite_entries_that_differ(values):
    def loss_fn(model, micro):
        image = model(micro)[0]
        entry = torch.full_like(image[:, :1], values[torch.is_grad_enabled()])
        return Encoded(image=torch.cat([image, entry], 1))

    assert outcome(loss_fn, joint=lambda m, e: e.image[:, :6].square().sum()) == "refused"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64])
@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: Sum(rows.sum(0))])
def test_whole_numbers_are_compared_exactly(dtype, wrap):
    def loss_fn(model, micro):
        image = model(micro)[0]
        other = torch.zeros(image.shape, dtype=dtype)
        other[0, 0] = torch.is_grad_enabled()
        return Encoded(image=image, other=wrap(other))

    assert outcome(loss_fn) == "refused"


def rounded(size, dtype=torch.float64):
    """Encodings that differ by this much between the passes; half of them by luck not at all."""

    def loss_fn(model, micro):
        image = model(micro)[0]
        apart = size * torch.linspace(-1, 1, image.numel(), dtype=torch.float64).reshape(image.shape)
        apart[::2] = 0
        return Encoded(image=image + apart.to(image) * torch.is_grad_enabled())

    return loss_fn


def test_rounding_is_no_difference():
    assert outcome(rounded(1e-12)) == "taken"
    assert outcome(rounded(3e-3), torch.float32) == "taken"  # as of bfloat16: nothing tells that it was not used
    assert outcome(rounded(3e-3), torch.bfloat16) == "taken"


def test_more_than_rounding():
    assert outcome(rounded(1e-7)) == "refused"
    assert outcome(rounded(0.1), torch.float32) == "refused"
    assert outcome(rounded(0.1), torch.bfloat16) == "refused"


def test_wide_encodings_of_a_narrow_model_have_its_rounding():
    def loss_fn(model, micro):
        encoded = rounded(3e-3)(model, micro)
        return Encoded(image=encoded.image.double())

    assert outcome(loss_fn, torch.float32) == "taken"


def test_a_lone_remainder_of_rounding_is_measured_by_its_neighbours():
    """What is left of a sum that cancels may change by more than its own size."""

    def loss_fn(model, micro):
        image = model(micro)[0]
        left = image[:, :1] * 0 + (2e-3 if torch.is_grad_enabled() else -1e-3)
        return Encoded(image=torch.cat([image, left], 1))

    assert outcome(loss_fn, torch.float32) == "taken"


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_items_of_the_ordinary_loss_are_compared(as_tensor):
    def loss_fn(model, micro):
        image = model(micro)[0]
        items = 2 + torch.is_grad_enabled()
        return Encoded(image.square().mean(), torch.tensor(items) if as_tensor else items, image=image)

    assert outcome(loss_fn) == "refused"


def test_the_ordinary_loss_is_compared():
    changing = Changing()

    def loss_fn(model, micro):
        image = model(micro)[0]
        return Encoded((image * changing.keep(image)).square().mean(), image=image)

    assert outcome(loss_fn) == "refused"


# ------------------------------------------------------------------------------------------------------ frozen towers


class Momentum(nn.Module):
    """A tower, and one that follows it without being trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.slow = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)

    @torch.no_grad()
    def follow(self, how):
        for slow, p in zip(self.slow.parameters(), self.tower.parameters(), strict=True):
            if how == "in place":
                slow.lerp_(p, 1e-3)
            elif how == "data in place":
                slow.data.mul_(0.999).add_(p.data, alpha=0.001)
            elif how == "data":
                slow.data = slow.data * 0.999 + p.data * 0.001


@pytest.mark.parametrize("how", ["in place", "data in place", "data"])
@pytest.mark.parametrize("where", ["loss_fn", "joint"])
def test_a_frozen_parameter_that_changes_inside_the_window(how, where):
    model, batch = Momentum(), batch_of(6, dtype=torch.float32)
    before = model.tower.weight.detach().clone()

    def loss_fn(model, micro):
        if where == "loss_fn":
            model.follow(how)
        return Encoded(image=model.tower(micro["image"]), other=model.slow(micro["image"]))

    def joint(model, encoded):
        if where == "joint":
            model.follow(how)
        return (encoded.image * encoded.other).sum()

    train = MacroStep(model, sgd(model), loss_fn, joint=joint, micro=4)
    with pytest.raises(BatchError, match=r"slow.weight.*is not trained.*after the step"):
        train(batch)
    assert torch.equal(before, model.tower.weight)


def test_frozen_parameters_may_change_between_windows():
    model, batch = Momentum(), batch_of(6, dtype=torch.float32)

    def loss_fn(model, micro):
        return Encoded(image=model.tower(micro["image"]), other=model.slow(micro["image"]))

    train = MacroStep(model, sgd(model), loss_fn, joint=lambda m, e: (e.image * e.other).sum(), micro=4)
    for how in ("in place", "data in place", "data"):
        train(batch)
        model.follow(how)
    assert not train(batch).skipped


# ----------------------------------------------------------------------------------------------------- kept from before


class Prompted(nn.Module):
    """Computes something from its weights once a batch, and keeps it."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.prompt, self.how = nn.Linear(3, 4), nn.Linear(4, 4), how
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            weight = self.prompt.weight
            self.kept = weight.sum(0) if self.how == "linear" else weight.square().sum(0)
        return torch.tanh(self.tower(x) * self.kept)


def test_what_the_first_forward_keeps_has_its_graph():
    model, batch = Prompted("linear").double(), batch_of(6)

    def joint(model, encoded):
        return encoded.rows.T.cov().square().sum()

    expected = gradient_of(model, joint(model, Encoded(rows=model(batch["image"]))))
    model.kept = None
    train = MacroStep(model, sgd(model), lambda m, b: Encoded(rows=m(b["image"])), joint=joint, micro=2)
    assert relative_error(step_of(model, lambda: train(batch)), expected) <= 1e-12


def test_what_the_first_forward_keeps_and_one_backward_uses_up():
    """As without joint=: torch refuses the second backward. Without a graph, the weights would silently get none."""
    model, batch = Prompted("square").double(), batch_of(6)
    train = MacroStep(
        model, sgd(model), lambda m, b: Encoded(rows=m(b["image"])), joint=lambda m, e: e.rows.std(), micro=2
    )
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        train(batch)


def test_gradients_inside_loss_fn_need_a_graph():
    model, batch = towers(), batch_of(6)

    def loss_fn(model, micro):
        x = micro["image"].clone().requires_grad_()
        energy = model.image(x).sum(1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return Encoded(energy=energy, force=force)

    def with_graph(model, micro):
        with torch.enable_grad():
            return loss_fn(model, micro)

    def joint(model, encoded):
        return encoded.energy.std() + encoded.force.var()

    with pytest.raises(BatchError, match=r"torch.enable_grad\(\)"):
        MacroStep(model, sgd(model), loss_fn, joint=joint, micro=2)(batch)
    expected = gradient_of(model, joint(model, loss_fn(model, batch)))
    train = MacroStep(model, sgd(model), with_graph, joint=joint, micro=2)
    assert relative_error(step_of(model, lambda: train(batch)), expected) <= 1e-12


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_layers_that_compute_otherwise_without_a_graph():
    """The fast path of encoders in eval mode leaves zeros where there is padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(5) >= torch.tensor([5, 3, 4, 2, 5, 1])[:, None]
    batch = {"x": torch.randn(6, 5, 8), "padding": padding}

    def loss_fn(model, micro):
        return Encoded(rows=model(micro["x"], src_key_padding_mask=micro["padding"]))

    def with_graph(model, micro):
        with torch.enable_grad():
            return loss_fn(model, micro)

    def joint(model, encoded):
        return encoded.rows.std()

    with pytest.raises(BatchError, match=r"without a graph.*TransformerEncoder.*torch.enable_grad\(\)"):
        MacroStep(model, sgd(model), loss_fn, joint=joint, micro=3)(batch)
    expected = gradient_of(model, joint(model, loss_fn(model, batch)))
    train = MacroStep(model, sgd(model), with_graph, joint=joint, micro=3)
    assert relative_error(step_of(model, lambda: train(batch)), expected) <= 1e-4
