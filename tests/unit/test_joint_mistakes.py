"""Losses of the whole batch: what is refused, and what it says."""

import copy

import pytest
import torch
from torch import nn

from harness.joint import (
    CONTRAST,
    batch_of,
    gradient_of,
    sgd,
    step_error,
    step_of,
    towers,
    train_on,
    weights,
)
from harness.reference import relative_error
from macrobatch import Accumulator, Encoded, MacroStep, Sum
from macrobatch.errors import BatchError, UsageError

# ------------------------------------------------------------------------------------------------------ mistakes


def refused(match, loss_fn=CONTRAST.loss_fn, joint=CONTRAST.joint, kind=BatchError, micro=4, **options):
    model, batch = towers(), batch_of(6)
    before = weights(model)
    with pytest.raises(kind, match=match):
        MacroStep(model, sgd(model), loss_fn, joint=joint, micro=micro, **options)(batch)
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    assert all(p.grad is None for p in model.parameters())


def test_joint_without_encoded():
    refused("must return an Encoded.*got Tensor", lambda model, micro: model(micro)[0].sum())
    refused("must return an Encoded.*got tuple", lambda model, micro: (model(micro)[0].sum(), 3))


def test_encoded_without_joint():
    refused("got an Encoded.*joint=", joint=None)
    model = towers()
    acc = Accumulator(model, sgd(model))
    with pytest.raises(BatchError, match=r"got an Encoded.*joint="), acc.micro_batch():
        acc.backward(CONTRAST.loss_fn(model, batch_of(3)))
    with pytest.raises(UsageError, match="MacroStep"):
        Accumulator(model, sgd(model), joint=CONTRAST.joint)


def test_fields_without_a_row_for_each_sample():
    refused(
        r"encoded.image must have one row for each of the 4 samples.*\(6, 4\)", lambda m, b: Encoded(image=m(b)[0].T)
    )
    refused(r"encoded.a\[0\] must have one row.*\(\)", lambda m, b: Encoded(a=[m(b)[0].sum()]))
    refused("encoded.name must be a tensor with one row a sample: got str", lambda m, b: Encoded(name="x"))
    refused("Encoded has no field", lambda m, b: Encoded())
    refused("encoded.x must be the Sum of a tensor or a number: got str", lambda m, b: Encoded(x=Sum("x")))


def test_encodings_that_do_not_look_alike():
    refused(
        r"encoded.image has rows of shape \(4,\).* in the first, and rows of shape \(2,\).* in micro-batch 2",
        lambda m, b: Encoded(image=m(b)[0][:, : len(b["x"])]),
    )
    refused(
        "encoded.b came in micro-batch 2 only",
        lambda m, b: Encoded(a=m(b)[0], **({"b": m(b)[0]} if len(b["x"]) == 2 else {})),
    )
    refused(
        "ordinary loss for every micro-batch, or for none.*one in the first, and none in micro-batch 2",
        lambda m, b: Encoded(m(b)[0].sum() if len(b["x"]) == 4 else None, a=m(b)[0]),
    )


def test_fields_in_another_order():
    def loss_fn(model, micro):
        image, text, _ = model(micro)
        return Encoded(image=image, text=text) if len(image) == 4 else Encoded(text=text, image=image)

    refused(
        r"in the same order.*encoded.image, encoded.text in the first.*encoded.text, encoded.image in micro", loss_fn
    )


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("sparse", lambda rows: rows.to_sparse()),
        ("nested", lambda rows: torch.nested.nested_tensor(list(rows), layout=torch.jagged)),
        ("meta", lambda rows: rows.to("meta")),
    ],
)
def test_fields_that_hold_no_plain_rows(kind, change):
    refused(f"encoded.image must be a dense tensor.*{kind}", lambda m, b: Encoded(image=change(m(b)[0])))
    refused(f"encoded.image must be a dense tensor.*{kind}", lambda m, b: Encoded(image=Sum(change(m(b)[0]))))


def test_encodings_that_joint_changes_in_place():
    def quietly(model, encoded):
        with torch.no_grad():
            encoded.text.mul_(2)
        return CONTRAST.joint(model, encoded)

    refused("joint changes encoded.text in place.*clone", joint=quietly)
    refused("joint changes an encoding in place.*clone", joint=lambda m, e: e.image.mul_(2).sum())


def test_lazy_modules():
    model = nn.LazyLinear(4)
    with pytest.raises(UsageError, match=r"lazy modules.*Call the model once"):
        MacroStep(model, sgd(model), lambda m, b: Encoded(a=m(b)), joint=lambda m, e: e.a.std(), micro=2)


def test_losses_of_joint_that_are_none():
    refused(r"joint must return a scalar: got shape \(6,\)", joint=lambda m, e: e.image.sum(1))
    refused("joint must return the loss.*got float", joint=lambda m, e: 1.0)
    refused("has no graph", joint=lambda m, e: e.image.detach().sum())
    refused("reaches no encoding, of encoded.image, encoded.text", joint=lambda m, e: m.scale.sum())


def test_ordinary_losses_that_are_none():
    refused("ordinary loss.*scalar: got shape", lambda m, b: Encoded(m(b)[0], a=m(b)[0]))
    refused("dict of terms", lambda m, b: Encoded({"a": m(b)[0].sum()}, a=m(b)[0]))
    refused("items, but no loss", lambda m, b: Encoded(None, 3, a=m(b)[0]))
    refused(
        "items for every micro-batch", lambda m, b: Encoded(m(b)[0].sum(), 4 if len(b["x"]) == 4 else None, a=m(b)[0])
    )
    refused(
        "ordinary loss.*has no graph",
        lambda m, b: Encoded(m(b)[0].sum().detach(), 4, a=m(b)[0]),
        lambda m, e: e.a.sum(),
    )
    refused(
        "negative or not finite",
        lambda m, b: Encoded(m(b)[0].sum(), torch.tensor(-1), a=m(b)[0]),
        lambda m, e: e.a.sum(),
    )


def test_encodings_without_a_graph():
    refused("no parameter got a gradient", lambda m, b: Encoded(a=m(b)[0].detach()), lambda m, e: e.a.square().sum())


def test_a_backward_inside_is_an_error():
    """Of the loss itself, or of one that reaches no encoding, in joint or in loss_fn."""

    def twice(model, encoded):
        loss = CONTRAST.joint(model, encoded)
        loss.backward(retain_graph=True)
        return loss

    def beside(model, encoded):
        model.scale.square().sum().backward()
        return CONTRAST.joint(model, encoded)

    def loss_fn(model, micro):
        with torch.enable_grad():
            model(micro)[0].sum().backward()
        return CONTRAST.loss_fn(model, micro)

    refused("a backward\\(\\) ran inside joint", joint=twice, kind=UsageError)
    refused("somebody else's backward\\(\\) has added gradients", joint=beside, kind=UsageError)
    refused("somebody else's backward\\(\\) has added gradients", loss_fn, kind=UsageError)


def test_gradients_may_be_asked_for_inside_joint():
    model, batch = towers(), batch_of(6)

    def joint(model, encoded):
        loss = CONTRAST.joint(model, encoded)
        slope, scale = torch.autograd.grad(encoded.image.square().sum() * model.scale, [encoded.image, model.scale])
        return loss + 0 * slope.sum() + 0 * scale.sum()

    train = train_on(model, joint=joint)
    assert step_error(model, CONTRAST, batch, lambda: train(batch)) <= 1e-12


def test_arguments():
    refused("joint must be a function", joint=3, kind=UsageError)
    refused("counts= cannot go with joint=", kind=UsageError, counts=lambda batch: {"a": 1})


def test_an_exception_leaves_nothing_behind():
    """In joint, and in the second pass; the step after it is as if nothing had been."""
    model, batch, fails = towers(), batch_of(6), []

    def loss_fn(model, micro):
        if torch.is_grad_enabled() and fails == ["second"]:
            raise ValueError("planted")
        return CONTRAST.loss_fn(model, micro)

    def joint(model, encoded):
        if fails == ["joint"]:
            raise ValueError("planted")
        return CONTRAST.joint(model, encoded)

    train = MacroStep(model, sgd(model), loss_fn, joint=joint, micro=4)
    for where in ("joint", "second"):
        fails[:] = [where]
        with pytest.raises(ValueError, match="planted"):
            train(batch)
        assert all(p.grad is None for p in model.parameters())
    fails.clear()
    assert step_error(model, CONTRAST, batch, lambda: train(batch)) <= 1e-12


def test_an_empty_batch_is_skipped():
    model = towers()
    result = train_on(model)({key: rows[:0] for key, rows in batch_of(3).items()})
    assert result.skipped
    assert result.items.item() == 0


@pytest.mark.filterwarnings("error")
def test_no_warning_without_batch_norm():
    train_on(towers())(batch_of(5))


@pytest.mark.filterwarnings("error")
def test_no_warning_about_a_batch_norm_of_the_whole_batch():
    model, batch = towers(), batch_of(6)
    model.norm = nn.BatchNorm1d(6).double()

    def joint(model, encoded):
        return model.norm(encoded.image).pow(3).mean()

    expected = gradient_of(model, joint(model, CONTRAST.loss_fn(model, batch)))
    assert relative_error(step_of(model, lambda: train_on(model, joint=joint)(batch)), expected) <= 1e-12


def test_a_buffer_that_changes_its_size():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            count = len(self.seen)
            self.seen.resize_(count + 1).fill_(count)
            return self.linear(x) * self.seen.sum()

    model, batch = Growing().double(), batch_of(6)
    twin = copy.deepcopy(model)
    rows = torch.cat([twin(part) for part in batch["image"].split(2)])
    expected = gradient_of(twin, rows.T.cov().square().sum())
    train = MacroStep(
        model,
        sgd(model),
        lambda m, b: Encoded(rows=m(b["image"])),
        joint=lambda m, e: e.rows.T.cov().square().sum(),
        micro=2,
    )
    assert relative_error(step_of(model, lambda: train(batch)), expected) <= 1e-12
    assert torch.equal(model.seen, twin.seen)
