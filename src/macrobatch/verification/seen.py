"""What was seen of a training step: calls of the model, gradients that came back, optimizer steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from macrobatch.verification.gradient import Named


class Aim(NamedTuple):
    """What a loss wants of an output (rows, positions, classes), read off the gradient that comes back.

    The gradient of a cross-entropy is negative for one class alone, the target.
    """

    trained: Tensor  # (rows, positions): where it is not zero
    targets: Tensor  # (rows, positions): the class with the lowest gradient
    classes: int


class Arrival(NamedTuple):
    """A gradient that came back through an output of a call, or that reached a parameter.

    Attributes:
        backward: the number of the backward.
        largest: its largest |number|.
        path: which output of the model it is, if it is one.
        aim: of an output of three dimensions.
    """

    backward: int
    largest: Tensor
    path: str = ""
    aim: Aim | None = None


@dataclass(eq=False)
class Call:
    """One call of the model, with a graph.

    Attributes:
        inputs: the tensors that went in, by their path in the arguments.
        number: which call it is.
        after: how many backwards came before it.
        modes: for each module, whether it was in training mode.
        learning: the parameters that required a gradient.
        autocast: the dtype that autocast had on.
        lowest: the dtype of the lowest precision that the first layer computed in.
        arrived: gradients that came back through what it returned.
        nearby: those that reached a parameter in the next backward, perhaps through something else.
    """

    inputs: dict[str, Tensor]
    number: int = 0
    after: int = 0
    modes: dict[nn.Module, bool] = field(default_factory=dict)
    learning: frozenset[str] = frozenset()
    autocast: torch.dtype | None = None
    lowest: torch.dtype = torch.float64
    arrived: list[Arrival] = field(default_factory=list)
    nearby: list[Arrival] = field(default_factory=list)

    @property
    def micro(self) -> int:
        """The first backward that reached it: calls with the same one are of one micro-batch."""
        return min(arrival.backward for arrival in self.arrived or self.nearby)

    @property
    def counts(self) -> bool:
        """Whether a backward went through it that was not weighed with zero."""
        return any(float(arrival.largest) != 0 for arrival in self.arrived or self.nearby)

    def since(self, backward: int) -> Call:
        """The call, as seen by that backward and later ones."""
        return dataclasses.replace(
            self,
            arrived=[arrival for arrival in self.arrived if arrival.backward >= backward],
            nearby=[arrival for arrival in self.nearby if arrival.backward >= backward],
        )


def trained(calls: Iterable[Call], since: int = 0) -> list[Call]:
    """The calls that backwards went through. Losses may use what a model computes without returning it."""
    calls = [call.since(since) for call in calls]
    direct = {arrival.backward for call in calls for arrival in call.arrived}
    return [call for call in calls if call.arrived or any(arrival.backward not in direct for arrival in call.nearby)]


class Sizes(NamedTuple):
    """The norm of each parameter's gradient when a backward began, and when the one before it had ended."""

    backward: int  # the one before
    ended: dict[str, Tensor]
    began: dict[str, Tensor]

    def factor(self, held: set[str]) -> float:
        """What somebody multiplied the gradient of these parameters with in between."""
        ended = norm(self.ended, held)
        return norm(self.began, held) / ended if ended else 1.0

    def is_alike(self, held: set[str]) -> bool:
        """Whether it was the same factor for all of them."""
        factor = self.factor(held)
        pairs = [(float(size), float(self.began.get(name, 0.0))) for name, size in self.ended.items() if name in held]
        return all(abs(now - factor * before) <= 1e-4 * factor * before for before, now in pairs)


def norm(sizes: dict[str, Tensor], held: set[str]) -> float:
    """That of a gradient, from those of its parts."""
    return math.sqrt(sum(float(size) ** 2 for name, size in sizes.items() if name in held))


@dataclass(eq=False)
class Window:
    """What led to one optimizer step: the calls of the model, and the gradients that the optimizer was handed.

    Attributes:
        held: the parameters that the optimizer holds, by name; of a step without an optimizer, all.
        sizes: for each parameter, the norm of its gradient when the last backward ended.
        between: the same between its backwards.
        repeats: how often the optimizer stepped again without a backward in between.
    """

    calls: list[Call]
    gradients: Named
    held: set[str]
    sizes: dict[str, Tensor] = field(default_factory=dict)
    between: list[Sizes] = field(default_factory=list)
    repeats: int = 0

    @property
    def size_before(self) -> float:
        """The norm of the gradient before anybody clipped or divided it."""
        return norm(self.sizes, self.held)

    @property
    def micro_batches(self) -> int:
        return len({call.micro for call in self.calls})


@dataclass(eq=False)
class Seen:
    """What a step did.

    Attributes:
        stepped: whether an optimizer stepped that holds a parameter of the model.
        open: the calls after the last optimizer step, whose gradients no optimizer has seen.
        before, left: the gradients that it found when it began, and left when it returned.
        backwards: how many reached a parameter.
        strangers: how often an optimizer stepped that holds no parameter of the model.
        replaced: parameters that an optimizer holds as they were before the step gave the model others.
        added: parameters that the model did not have before.
        unheld: parameters that require a gradient, and that no optimizer holds which stepped.
        changed: the tensors of the batch that it changed, by their paths.
        evaluations: how often an optimizer called its closure again, with other weights.
        moved: whether the weights changed without an optimizer of torch.
    """

    windows: list[Window] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stepped: bool = False
    open: list[Call] = field(default_factory=list)
    before: Named = field(default_factory=dict)
    left: Named = field(default_factory=dict)
    backwards: int = 0
    strangers: int = 0
    replaced: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    unheld: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    evaluations: int = 0
    moved: bool = False

    @property
    def modes(self) -> dict[nn.Module, bool]:
        """For each module, whether it was in training mode when the model was first called for training."""
        return self.calls[0].modes if self.calls else {}

    @property
    def learning(self) -> set[str]:
        """The parameters that required a gradient in any call."""
        return set().union(*(call.learning for call in self.calls))

    @property
    def changing(self) -> list[str]:
        """Those that did so in some calls only."""
        return sorted(name for name in self.learning if any(name not in call.learning for call in self.calls))

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype that autocast had on in any call."""
        return next((call.autocast for call in self.calls if call.autocast is not None), None)

    @property
    def lowest(self) -> torch.dtype:
        """The lowest precision of any call."""
        return min((call.lowest for call in self.calls), key=lambda dtype: dtype.itemsize, default=torch.float64)
