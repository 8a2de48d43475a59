"""The three objectives beside the obvious program of `macrobatch.reference`, in float64."""

import pytest
import torch
from torch import nn

from macrobatch import Accumulator, Encoded, MacroStep
from macrobatch.reference import joint_gradients, mean_gradients, term_gradients

SIZES = (5, 2, 7, 1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [torch.randn(n, 3, dtype=torch.float64) for n in SIZES]


class Kept(torch.optim.SGD):
    """Keeps the gradients that it gets, and changes nothing."""

    def step(self, closure=None):
        self.gradients = tuple(p.grad.clone() for group in self.param_groups for p in group["params"])


def close(found, expected):
    scale = max(gradient.abs().max() for gradient in expected)
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) <= 1e-12 * scale


def error(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["ints", "tensors"])
def test_a_mean(model, batches, kind):
    optimizer = Kept(model.parameters(), lr=1.0)
    acc = Accumulator(model, optimizer, steps=len(batches))
    for x in acc.batches(batches):
        acc.backward(error(model, x).mean(), items=kind(len(x)))
        acc.step()
    close(
        optimizer.gradients,
        mean_gradients(list(model.parameters()), [error(model, x).mean() for x in batches], [len(x) for x in batches]),
    )


def terms(model, x):
    """The second term has other items than the first, and the smallest micro-batch does not have it."""
    found = {"error": (error(model, x).mean(), len(x))}
    if len(x) > 1:
        found["first"] = (model(x)[:-1, 0].exp().mean(), len(x) - 1)
    return found


def test_terms(model, batches):
    optimizer = Kept(model.parameters(), lr=1.0)
    acc = Accumulator(model, optimizer, steps=len(batches), counts=lambda x: {"error": len(x), "first": len(x) - 1})
    for x in acc.batches(batches):
        acc.backward(terms(model, x))
        acc.step()
    close(optimizer.gradients, term_gradients(list(model.parameters()), [terms(model, x) for x in batches]))


def test_a_joint_loss(model, batches):
    def joint(rows):
        return (rows @ rows.T).logsumexp(1).mean()

    optimizer = Kept(model.parameters(), lr=1.0)
    encode = lambda model, x: Encoded(code=model(x))  # noqa: E731
    train = MacroStep(model, optimizer, encode, joint=lambda _, all: joint(all.code), micro=4)
    train(torch.cat(batches))
    close(optimizer.gradients, joint_gradients(list(model.parameters()), [model(x) for x in batches], joint))
