"""What cannot be accumulated, or cannot be told from it, and is an error for that."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from macrobatch import Accumulator, MacroStep
from macrobatch.errors import BackendError, BatchError


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_divided_by_frequency_are_an_error(kind):
    model = nn.ModuleDict({"words": kind(10, 3, scale_grad_by_freq=True), "head": nn.Linear(3, 1)})
    for make in (
        lambda: Accumulator(model, sgd(model)),
        lambda: MacroStep(model, sgd(model), lambda model, batch: model["head"](batch).mean()),
    ):
        with pytest.raises(BackendError, match="words has scale_grad_by_freq=True"):
            make()
    model["words"].weight.requires_grad_(False)
    Accumulator(model, sgd(model["head"]))


@dataclass
class Sample:
    ids: Tensor


SAMPLES = {
    "dicts": lambda ids: {"ids": ids},
    "tuples": lambda ids: (ids, ids),
    "objects": Sample,
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_list_that_may_be_of_samples_is_an_error(kind):
    """It was cut along the tokens of each."""
    model = nn.Embedding(20, 1)
    samples = [SAMPLES[kind](torch.randint(20, (16,))) for _ in range(12)]
    train = MacroStep(model, sgd(model), lambda model, batch: model(torch.zeros(2, dtype=torch.long)).mean(), micro=4)
    with pytest.raises(BatchError, match=r"list of 12 entries alike.*collate="):
        train(samples)


def test_parts_of_a_batch_in_a_list_or_tuple():
    """A pair of views, many views in a tuple, columns of a data set."""
    seen = []

    def loss_fn(model: nn.Module, batch: list) -> Tensor:
        parts = [part["x"] if isinstance(part, dict) else part for part in batch]
        seen.append([len(part) for part in parts])
        return sum(model(part).mean() for part in parts)

    views = [{"x": torch.randn(6, 2)} for _ in range(4)]
    model = nn.Linear(2, 1)
    train = MacroStep(model, sgd(model), loss_fn, micro=3)
    for batch in (views[:2], tuple(views), [view["x"] for view in views]):
        train(batch)
    assert seen == [[3] * 2] * 2 + [[3] * 4] * 4
