"""The usual micro-step, written flat, does what `Engine.backward` does: the same bits, and the same errors."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from macrobatch import Accumulator
from macrobatch._engine.usual import UsualStep
from macrobatch.errors import MacrobatchError


class Program:
    """A training of random micro-batches. `run` returns all that a program can see of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.other = nn.Linear(3, 2), nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def micro_batch(self, kind, samples):
        """The loss of a micro-batch, and its items."""
        output, target = self.model(torch.ones(samples, 3) / samples), torch.zeros(samples, 2)
        loss = F.mse_loss(output, target)
        match kind:
            case "read":
                return loss, None
            case "given":
                return loss, samples
            case "a tensor":
                return loss, torch.tensor(samples)
            case "elements":
                return loss, 2 * samples
            case "alike":
                return loss, 1
            case "nothing":
                return loss, 0
            case "miscounted":
                return loss, samples + 1
            case "halved":
                return 0.5 * loss, None
            case "by hand":
                return (output - target).square().mean(), None
            case "divided":
                return loss / 4, None
            case "entropy":
                return F.cross_entropy(output, target[:, 0].long()), samples
            case "infinite":
                return F.mse_loss(output * torch.inf, target), samples
            case "through another":
                return F.mse_loss(self.other(output), target), None
            case "of another":
                return F.mse_loss(self.other(target), target), None
            case "detached":
                return loss.detach(), None
            case "smooth":
                return F.smooth_l1_loss(output, target), None

    def run(self, steps, micro_batches):
        acc, seen = Accumulator(self.model, self.optimizer, steps=steps), []
        batches = [torch.ones(samples, 1) for _, samples in micro_batches]
        try:
            for (kind, samples), _ in zip(micro_batches, acc.batches(batches), strict=True):
                if kind == "frozen":
                    self.model.bias.requires_grad_(not self.model.bias.requires_grad)
                    kind = "read"
                elif kind == "touched" and self.model.weight.grad is not None:
                    self.model.weight.grad *= 2
                    kind = "read"
                acc.backward(*self.micro_batch(kind.replace("touched", "read"), samples))
                if result := acc.step():
                    seen.append((result.step, result.micro_batches, result.loss.item(), result.items.item()))
        except MacrobatchError as error:
            seen.append((type(error), re.sub(r"\d+ for a mean over \d+", "items", str(error))))
        parameters = [*self.model.parameters(), *self.other.parameters()]
        seen += [p.tolist() for p in parameters]
        return seen, [None if p.grad is None else p.grad.tolist() for p in parameters]


USUAL = ["read", "given", "a tensor"]
KINDS = [*USUAL, "elements", "alike", "nothing", "miscounted", "halved", "divided", "entropy", "infinite", "detached"]
KINDS += ["smooth", "frozen", "touched", "by hand", "through another", "of another"]
MICRO_BATCHES = st.lists(st.tuples(st.sampled_from(USUAL + KINDS), st.integers(1, 3)), max_size=9)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.sampled_from(KINDS), MICRO_BATCHES)
def test_both_ways_are_the_same(steps, usual, others):
    """Most micro-batches of a program are alike, so one kind is more frequent."""
    micro_batches = [pair for other in others for pair in ((usual, 2), other, (usual, 3))]
    fast = Program().run(steps, micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UsualStep, "may_serve", lambda engine: False)
        assert repr(fast) == repr(Program().run(steps, micro_batches))  # As text, since nan is not nan.


@pytest.mark.parametrize("kind", USUAL)
def test_all_but_the_first_take_the_short_way(monkeypatch, kind):
    taken, run = [], UsualStep.run
    monkeypatch.setattr(UsualStep, "run", lambda *given, **named: taken.append(run(*given, **named)) or taken[-1])
    Program().run(4, [(kind, 2 + index % 3) for index in range(10)])
    assert taken == [False] + [True] * 9


@pytest.mark.parametrize(
    ("where", "planted"),
    [
        ("macrobatch._engine.usual.ends_in", lambda loss, leaves: True),
        ("macrobatch._loss.steady.Steady.items_of", lambda self, loss, items, *others, **named: self._items),
        ("macrobatch._engine.totals.Totals.add_usual", lambda self, loss, items: None),
    ],
)
def test_a_planted_bug_is_seen(monkeypatch, where, planted):
    monkeypatch.setattr(where, planted)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        test_both_ways_are_the_same()
