"""Training programs with a known answer, small enough for every test: what `macrobatch.audit` must say of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EQUAL, UNEQUAL = [4] * 8, [4, 1, 3, 2, 2, 5, 1, 4]
CLASSES, WIDTH = 5, 6


@dataclass(frozen=True)
class Answer:
    """What is known of a program."""

    run: Callable[[], object]
    verdict: str
    factor: float | None = None
    causes: tuple[str, ...] = ()


PROGRAMS: dict[str, Answer] = {}


def program(
    verdict: str, factor: float | None = None, *causes: str
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add a program to the catalogue."""

    def add(run: Callable[[], object]) -> Callable[[], object]:
        PROGRAMS[run.__name__] = Answer(run, verdict, factor, causes)
        return run

    return add


right = program("exact", 1.0)
unknown = program("unknown")


def network(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    for size in sizes:
        yield torch.randn(size, WIDTH), torch.randint(0, CLASSES, (size,))


def windows(sizes: list[int], steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    loaded = list(batches(sizes))
    for begin in range(0, len(loaded), steps):
        yield loaded[begin : begin + steps]


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def simple(
    sizes: list[int], steps: int, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], **options: Any
) -> nn.Module:
    """The usual loop by hand: a step after `steps` micro-batches, and at the end."""
    model = network()
    optimizer = options.get("optimizer", sgd)(model)
    for index, (x, y) in enumerate(batches(sizes)):
        loss_of(model, x, y).backward()
        if "each" in options:
            options["each"](model, optimizer)
        if (index + 1) % steps == 0 or index + 1 == len(sizes):
            if "before" in options:
                options["before"](model, optimizer)
            step(optimizer)
    return model


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)
