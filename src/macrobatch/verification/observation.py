"""What `step_watcher` observes of a training step: calls of the model, gradients that arrive, optimizer steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from macrobatch.verification.draws import Draw
from macrobatch.verification.gradient import NamedGradients, Ranks
from macrobatch.verification.readings import Reading


class LossTargets(NamedTuple):
    """What a loss trains an output (rows, positions, classes) to give, read from the gradient of that output.

    The gradient of a cross-entropy is negative for one class only: the target.
    """

    is_trained: Tensor  # (rows, positions): where the gradient is not zero
    targets: Tensor  # (rows, positions): the class with the lowest gradient
    num_classes: int


class Arrival(NamedTuple):
    """A gradient that arrived at an output of a call, or at a parameter.

    Attributes:
        backward: the number of the backward.
        largest: its largest absolute value.
        path: which output of the model it belongs to; empty for a parameter.
        targets: the targets of the loss, for an output with three dimensions; otherwise None.
    """

    backward: int
    largest: Tensor
    path: str = ""
    targets: LossTargets | None = None


@dataclass(eq=False)
class Call:
    """One call of the model that builds a graph.

    Attributes:
        inputs: the tensors among the arguments, by their paths.
        number: the position of the call in the step.
        backwards_before: how many backwards came before it.
        moves_before: how often code of the step had changed the weights by hand before it.
        modes: for each module, whether it was in training mode.
        trainable_names: the parameters that required a gradient.
        autocast_dtype: the dtype of autocast, if it was on.
        lowest_dtype: the dtype with the lowest precision in the first layer.
        output_gradients: gradients that arrived at its outputs.
        parameter_gradients: gradients that arrived at a parameter in the next backward, perhaps from another call.
    """

    inputs: dict[str, Tensor]
    number: int = 0
    backwards_before: int = 0
    moves_before: int = 0
    modes: dict[nn.Module, bool] = field(default_factory=dict)
    trainable_names: frozenset[str] = frozenset()
    autocast_dtype: torch.dtype | None = None
    lowest_dtype: torch.dtype = torch.float64
    output_gradients: list[Arrival] = field(default_factory=list)
    parameter_gradients: list[Arrival] = field(default_factory=list)

    @property
    def first_backward(self) -> int:
        """The first backward that reached the call. Calls with the same first backward form one micro-batch."""
        return min(arrival.backward for arrival in self.output_gradients or self.parameter_gradients)

    @property
    def has_weight(self) -> bool:
        """Whether any backward brought it a gradient other than zero."""
        return any(float(arrival.largest) != 0 for arrival in self.output_gradients or self.parameter_gradients)

    def since(self, backward: int) -> Call:
        """The call with only the gradients of that backward and later ones."""
        return dataclasses.replace(
            self,
            output_gradients=[arrival for arrival in self.output_gradients if arrival.backward >= backward],
            parameter_gradients=[arrival for arrival in self.parameter_gradients if arrival.backward >= backward],
        )

    @staticmethod
    def with_backward(calls: Iterable[Call], since: int = 0) -> list[Call]:
        """The calls that a backward reached. A loss may use values that the model computes but does not return."""
        calls = [call.since(since) for call in calls]
        direct = {arrival.backward for call in calls for arrival in call.output_gradients}
        return [
            call
            for call in calls
            if call.output_gradients or any(arrival.backward not in direct for arrival in call.parameter_gradients)
        ]


NamedTensors = dict[str, Tensor]


class NormChange(NamedTuple):
    """The norm of each parameter's gradient at the end of one backward and at the start of the next."""

    backward: int  # the number of the first of the two
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    def factor(self, names: set[str]) -> float:
        """The factor by which the gradient of these parameters changed between the two backwards."""
        before = total_norm(self.before, names)
        return total_norm(self.after, names) / before if before else 1.0

    def is_uniform(self, names: set[str]) -> bool:
        """Whether the factor is the same for each of these parameters."""
        factor = self.factor(names)
        pairs = [(float(norm), float(self.after.get(name, 0.0))) for name, norm in self.before.items() if name in names]
        return all(abs(now - factor * then) <= 1e-4 * factor * then for then, now in pairs)


def total_norm(norms: dict[str, Tensor], names: set[str]) -> float:
    """The norm of the gradient of these parameters, from the norms of its parts."""
    return math.sqrt(sum(float(norm) ** 2 for name, norm in norms.items() if name in names))


@dataclass(eq=False)
class ObservedWindow:
    """The calls of the model before one optimizer step, and the gradients that the optimizer received.

    Attributes:
        names: the parameters that the optimizer holds; without an optimizer, all.
        final_norms: the norm of each parameter's gradient at the end of the last backward.
        norm_changes: how the norms changed between the backwards.
        num_repeated_steps: how often the optimizer stepped again without a backward in between.
        raw: the gradients at the end of the last backward; empty if unknown, as on several ranks.
        readings: for each rank, what the losses of its backwards say; empty if some of them cannot be read.
        weights: the weights at its forwards, if code of the step had changed them by hand.
        has_mixed_weights: whether its forwards had different weights.
        update: what code of the step subtracted from the weights by hand, which closed the window. None on ranks.
        is_cleared: whether ``.grad`` was cleared when that was noticed, so that `gradients` are `raw`.
        is_probe: whether the weights were set back before the next optimizer step.
    """

    calls: list[Call]
    gradients: NamedGradients
    names: set[str]
    final_norms: dict[str, Tensor] = field(default_factory=dict)
    norm_changes: list[NormChange] = field(default_factory=list)
    num_repeated_steps: int = 0
    raw: NamedGradients = field(default_factory=dict)
    readings: list[list[Reading]] = field(default_factory=list)
    weights: NamedTensors | None = None
    has_mixed_weights: bool = False
    update: NamedGradients | None = None
    is_cleared: bool = False
    is_probe: bool = False

    @property
    def norm_before_step(self) -> float:
        """The norm of the gradient before any clipping or division at the end of the window."""
        return total_norm(self.final_norms, self.names)

    @property
    def micro_batches(self) -> int:
        return len({call.first_backward for call in self.calls})


COMMON = ("num_foreign_steps", "has_foreign_gradients", "has_foreign_leftover", "num_dropped", "replaced_names")


@dataclass(eq=False)
class Observation:
    """All that was observed of one step.

    Ranks observe different things, but must take the same path through the search for causes. So `agree` comes first.

    Attributes:
        has_stepped: whether an optimizer that holds a parameter of the model took a step.
        open_calls: the calls after the last optimizer step; no optimizer received their gradients.
        initial_gradients, final_gradients: ``.grad`` when the step began, and when it returned.
        num_backwards: how many backwards reached a parameter.
        num_calls: how many calls of the model built a graph.
        num_foreign_steps: how many steps were taken by optimizers that hold no parameter of the model.
        has_foreign_gradients: whether these had any gradient.
        has_foreign_leftover: whether their backwards left gradients in the model that were not cleared.
        num_dropped: how many backwards of the model alone were cleared away after such a step.
        draws: the random numbers that its forwards drew.
        replaced_names: parameters of which an optimizer still holds the old version, though the step replaced them.
        added_names: parameters that the step added to the model.
        unoptimized_names: parameters that require a gradient but belong to no optimizer that stepped.
        changed_batch_paths: the tensors of the batch that the step changed.
        num_reevaluations: how often an optimizer called its closure again, at other weights.
        has_moved_weights: whether the weights changed without a step of a torch optimizer.
    """

    windows: list[ObservedWindow] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    has_stepped: bool = False
    open_calls: list[Call] = field(default_factory=list)
    initial_gradients: NamedGradients = field(default_factory=dict)
    final_gradients: NamedGradients = field(default_factory=dict)
    num_backwards: int = 0
    num_calls: int = 0
    num_foreign_steps: int = 0
    has_foreign_gradients: bool = False
    has_foreign_leftover: bool = False
    num_dropped: int = 0
    draws: list[Draw] = field(default_factory=list)
    replaced_names: list[str] = field(default_factory=list)
    added_names: list[str] = field(default_factory=list)
    unoptimized_names: list[str] = field(default_factory=list)
    changed_batch_paths: list[str] = field(default_factory=list)
    num_reevaluations: int = 0
    has_moved_weights: bool = False

    def agree(self, ranks: Ranks) -> None:
        """Replace what decides on the path by what all ranks have observed together."""
        own = {name: getattr(self, name) for name in COMMON}
        precision = self.autocast_dtype, self.lowest_dtype
        every = ranks.gather((own, precision, self.trainable_names, [window.readings for window in self.windows]))
        facts, precisions, trainable, readings = zip(*every, strict=True)
        for name in COMMON:
            setattr(self, name, max(other[name] for other in facts))
        self.autocast_dtype = next((dtype for dtype, _ in precisions if dtype is not None), None)
        self.lowest_dtype = min((dtype for _, dtype in precisions), key=lambda dtype: dtype.itemsize)
        self.trainable_names = set().union(*trainable)
        for window, found in zip(self.windows, zip(*readings, strict=False), strict=False):
            window.readings = [own for each in found for own in each] if all(found) else []

    @property
    def modes(self) -> dict[nn.Module, bool]:
        """For each module, whether it was in training mode in the first call."""
        return self.calls[0].modes if self.calls else {}

    @cached_property
    def trainable_names(self) -> set[str]:
        """The parameters that required a gradient in any call."""
        return set().union(*(call.trainable_names for call in self.calls))

    @property
    def partly_trainable_names(self) -> list[str]:
        """The parameters that required a gradient in some calls but not in all."""
        calls = self.calls
        return sorted(name for name in self.trainable_names if any(name not in call.trainable_names for call in calls))

    @cached_property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast in the first call that had it on."""
        return next((call.autocast_dtype for call in self.calls if call.autocast_dtype is not None), None)

    @cached_property
    def lowest_dtype(self) -> torch.dtype:
        """The dtype with the lowest precision in any call."""
        return min((call.lowest_dtype for call in self.calls), key=lambda dtype: dtype.itemsize, default=torch.float64)
