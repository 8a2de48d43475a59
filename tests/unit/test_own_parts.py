"""A backend and a cut of one's own, as CONTRIBUTING.md says how to write them: small ones, and exact all the same."""

import copy
from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from harness import reference
from harness.reference import BY_COUNT, Trainee, mean_loss, relative_error, trainee, weights_of
from macrobatch import MacroStep
from macrobatch._assembly import checks_of_engines
from macrobatch._cut.plans import Part, plan_by_count
from macrobatch._cut.samples import Samples
from macrobatch._engine.closing import LeaveMean, TakeStep
from macrobatch._engine.engine import Engine
from macrobatch._engine.store import GradientStore
from macrobatch._engine.totals import MicroPlan
from macrobatch._ranks.backend import Abilities, Local
from macrobatch._terms.mean import Mean
from macrobatch.errors import BatchError

BATCHES = [reference.batch(size, seed=size) for size in (3, 1, 4, 2, 5, 2)]


# --------------------------------------------------------------------------------------------------------- a backend


class Averaging(Local):
    """As a reducer that averages over some ranks, whose other ranks have nothing to add."""

    abilities = Abilities(can_record=False)
    ranks = 4

    def __init__(self, model: nn.Module) -> None:
        self._model, self._was_training = model, model.training
        self.calls: list[str] = []

    @property
    def average(self) -> float:  # type: ignore[override]
        return self.ranks

    def begin(self, last: bool) -> None:
        self.calls.append("begin last" if last else "begin")
        self._was_training = self._model.training
        self._model.train()  # a flag that a backend needs during the micro-batch

    def end(self) -> None:
        self._model.train(self._was_training)

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        self.calls.append("finish")
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad /= self.ranks


def engine_on(own: Trainee, backend: Local, max_norm: float | None) -> Engine:
    closing = TakeStep(
        own.optimizers, own.schedulers, scaler=None, max_norm=max_norm, nonfinite="raise", counts_on_host=False
    )
    return Engine([own.model], own.optimizers, backend, closing, Mean("mean", None, backend), steps=3)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_backend_of_ones_own(max_norm):
    own, whole = trainee(), trainee()
    backend = Averaging(own.model)
    engine = engine_on(own, backend, max_norm)
    for micro in BATCHES:
        with engine.micro_batch(MicroPlan()):
            assert own.model.training
            engine.backward(mean_loss(own.model, micro), micro.items)
        assert not own.model.training  # as it was
        engine.close()
    for window in (BATCHES[:3], BATCHES[3:]):
        reference.whole_step(whole, window, max_norm, BY_COUNT)
    assert relative_error(weights_of(own.model), weights_of(whole.model)) <= 1e-12
    assert backend.calls == ["begin", "begin", "begin last", "finish"] * 2


# ---------------------------------------------------------------------------------------------------------- a store


class InFloat64(GradientStore):
    """Adds the gradients of micro-batches in float64."""

    def begin(self) -> None:
        super().begin()
        self.sums: dict[int, torch.Tensor] = {}

    def absorb(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                known = self.sums.get(id(parameter), torch.zeros_like(parameter, dtype=torch.float64))
                self.sums[id(parameter)] = known + parameter.grad
                parameter.grad = None
        self.left = self.now()

    def exist(self) -> bool:
        return bool(self.sums)

    def settle(self) -> None:
        for parameter in self.parameters:
            if id(parameter) in self.sums:
                parameter.grad = self.sums[id(parameter)].to(parameter.dtype)


def test_a_store_of_ones_own():
    """Sixty-four micro-batches in float32: sums in float64 are closer to the truth."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    batches = [torch.randn(3, 16) for _ in range(64)]
    precise = copy.deepcopy(model).double()
    nn.functional.softplus(precise(torch.cat(batches).double())).mean().backward()
    errors = {}
    for store in (GradientStore, InFloat64):
        mean, checks = Mean("mean", None, Local()), checks_of_engines()
        engine = Engine([model], [], Local(), LeaveMean([]), mean, steps=64, store=store, checks=checks)
        for x in batches:
            with engine.micro_batch(MicroPlan()):
                engine.backward(nn.functional.softplus(model(x)).mean(), len(x))
            engine.close()
        errors[store] = (model.weight.grad - precise.weight.grad).abs().max().item()
        model.zero_grad()
    assert errors[InFloat64] <= errors[GradientStore]
    assert errors[InFloat64] <= 1e-7


# ------------------------------------------------------------------------------------------------------------- a cut


@dataclass(frozen=True)
class EvenThenOdd:
    """The samples at even places first, then the others."""

    size: int

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        places = [*range(0, samples.count, 2), *range(1, samples.count, 2)]
        return [Part([places[i] for i in indices]) for indices in plan_by_count(samples.count, self.size)]


def test_a_cut_of_ones_own():
    own, whole, batch = trainee(), trainee(), reference.batch(7, seed=0)
    seen = []

    def loss_fn(model, micro):
        seen.append(micro["x"])
        part = reference.Batch(micro["x"], micro["y"])
        return mean_loss(model, part), part.items

    step = MacroStep(own.model, own.optimizers, loss_fn, micro=EvenThenOdd(3), scheduler=own.schedulers)
    result = step({"x": batch.x, "y": batch.y})
    reference.whole_step(whole, [batch], None, BY_COUNT)
    assert relative_error(weights_of(own.model), weights_of(whole.model)) <= 1e-12
    assert result.micro_batches == 3
    assert [x.tolist() for x in seen] == [batch.x[places].tolist() for places in ([0, 2, 4], [6, 1, 3], [5])]


@pytest.mark.parametrize(
    "places", [[[0, 1], [1, 2]], [[0, 1]], [[0, 1, 2], [3]]], ids=["twice", "left out", "too many"]
)
def test_a_cut_that_loses_samples_is_refused(places):
    class Wrong:
        def parts(self, samples, few_shapes=False):
            return [Part(indices) for indices in places]

    own = trainee()
    step = MacroStep(own.model, own.optimizers, lambda model, x: mean_loss(model, x), micro=Wrong())
    before = {name: value.clone() for name, value in weights_of(own.model).items()}
    with pytest.raises(BatchError, match="each of the 3 samples exactly once"):
        step(torch.zeros(3, 4))
    assert relative_error(weights_of(own.model), before) == 0
