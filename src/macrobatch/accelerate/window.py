"""One window: what the gradients of a prepared optimizer contain."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from macrobatch._checks.steps import StepGuard
from macrobatch._engine.closing import LeaveMean
from macrobatch._loss.proportions import Number
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.tensors import version_of
from macrobatch.accelerate.micro_batch import MicroBatch
from macrobatch.accelerate.prepared import Optimizer
from macrobatch.accelerate.weights import Weights
from macrobatch.errors import BatchError

CALL_PREPARED = (
    "its last micro-batch: call step() of the optimizer that prepare() returned, which leaves out the steps in between."
)
Marks = list[tuple[int, int]]


class Window:
    """The contents of the gradients of a prepared optimizer, or of all parameters without a prepared optimizer.

    Attributes:
        micro_batches: the number of micro-batches with a backward.
        closing: counts the items that the program gives; None: it gives none.
        weights: the items that were read; None: every micro-batch has the same weight.
        is_scaled: whether the program has scaled a loss itself, so that nothing may be corrected.
        mixes: whether this or an earlier window of the optimizer had losses that were read, and others that were not.
            From then on every micro-batch has the same weight.
        is_closed: whether the last micro-batch has had its backward.
        is_stepped, is_cleared: whether the program has called `step` or `zero_grad` since then.
        carries: whether the gradients also contain what no micro-batch of this window has added.
        factor: the factor that was applied to the gradient since its last backward.
        due: the factor that makes a gradient the mean over the items that were read.
        is_mean: whether that was applied.
        dropped_in: the closing micro-batch in which the program called `zero_grad` before the backward.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)  # which refers to all windows itself
        self.carries = self.mixes = False
        self._zeroed: Marks = []  # of gradients that the program has set to zero with the prepared optimizer
        self.begin()
        if optimizer is not None:
            StepGuard(optimizer.optimizer, self.counts, CALL_PREPARED)

    def begin(self) -> None:
        """Begin a new window."""
        self.micro_batches = 0
        self.closing: LeaveMean | None = None
        self.weights: Weights | None = None if self.mixes else Weights()
        self.is_scaled = False
        self.doubt: Tensor | None = None  # whether the device found that counts are out of proportion
        self.is_closed = self.is_stepped = self.is_cleared = False
        self.factor: Number = 1.0
        self.due: float | Tensor | None = None
        self.is_mean = False
        self.last: MicroBatch | None = None
        self._seen: Tensor | None = None  # one of its gradients after the last backward
        self._version = -1
        self.dropped_in: MicroBatch | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The prepared optimizer, if it has one that still exists."""
        return None if self._optimizer is None else self._optimizer()

    @property
    def is_open(self) -> bool:
        """Whether it has micro-batches, but not its last one."""
        return self.micro_batches > 0 and not self.is_closed

    @property
    def has_weights(self) -> bool:
        """Whether it has micro-batches whose items were read."""
        return self.weights is not None and not self.weights.is_empty

    def counts(self) -> bool:
        """Whether its gradients are undivided sums, because it counts items."""
        return self.closing is not None and self.is_open

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        optimizer = self.optimizer
        return [] if optimizer is None else optimizer.parameters()

    def prepare(self, micro_batch: MicroBatch | None, counts: bool, marks: Marks | None = None) -> None:
        """Prepare for a backward, or for one that is over, with the `marks` from before it."""
        if self.is_closed and self.last is not micro_batch:
            is_left = not (self.is_stepped or self.is_cleared)
            self.begin()
            self.carries = self._has_gradients(marks, is_left=is_left)
        elif not self.micro_batches:
            self.carries = self._has_gradients(marks, is_left=False)
        self.dropped_in = None
        if self.micro_batches and (self.closing is not None) != counts:
            raise BatchError(
                "items must be given for every micro-batch of a window, or for none: earlier in this one they were "
                f"{'not' if counts else 'given'}. Without them, they are read from the loss, or every micro-batch "
                "weighs the same."
            )

    def _has_gradients(self, marks: Marks | None, *, is_left: bool) -> bool:
        """Whether there are gradients already, other than zeros. `is_left`: those of an earlier window."""
        now = marks_of(self.parameters) if marks is None else marks
        present = [mark for mark in now if mark[0]]
        if not present or is_left:
            return bool(present)
        zeroed = set(self._zeroed)
        if zeroed.issuperset(present):
            return False
        if marks is not None:  # the backward that is over has changed them, and nobody can tell any more
            return False
        # A program that clears them without the prepared optimizer may have left zeros. The host reads that.
        gradients = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
        return any(bool(gradient.any()) for gradient in gradients)

    def count(self, micro_batch: MicroBatch) -> None:
        """Count a backward of a micro-batch: its first, or one more."""
        self.micro_batches += micro_batch is not self.last
        self.last = micro_batch
        self.is_closed = micro_batch.closes
        gradients = () if self.is_closed else (p.grad for p in self.parameters)
        self._seen = next((gradient for gradient in gradients if gradient is not None), None)
        self._version = -1 if self._seen is None else version_of(self._seen)

    def was_cleared(self) -> bool:
        """Whether the program has cleared what was accumulated, e.g. with ``model.zero_grad()``.

        The host reads gradients only if the program has replaced them or written to them.
        """
        if self._seen is None:
            return False
        parameters = self.parameters
        if version_of(self._seen) == self._version and any(p.grad is self._seen for p in parameters):
            return False
        return not any(bool(gradient.any()) for gradient in gradients_of(parameters).values())

    def note_zeros(self) -> None:
        """Note that the program has cleared the gradients."""
        self._zeroed = marks_of(self.parameters)

    def clear(self) -> None:
        """Clear the gradients of the optimizer."""
        if (optimizer := self.optimizer) is not None:
            optimizer.optimizer.zero_grad()


def marks_of(parameters: Iterable[Tensor]) -> Marks:
    """Identity and version of each gradient, which change when a backward adds to it."""
    gradients = (p.grad for p in parameters)
    return [(0, 0) if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]


def gradients_of(parameters: Iterable[Tensor], but: Sequence[int] | set[int] = ()) -> dict[int, Tensor]:
    """This process's part of each gradient, by the id of its parameter."""
    return {id(p): local_tensor(p.grad) for p in parameters if p.grad is not None and id(p) not in but}
