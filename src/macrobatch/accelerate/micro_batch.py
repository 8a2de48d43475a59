"""One micro-batch, which `accumulate()` returns, and one window, which counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from macrobatch.accelerate.prepared import Optimizer
    from macrobatch.accelerate.windows import Windows

Model = nn.Module | Tensor


class MicroBatch:
    """A context manager for the forward, the backwards and the steps of one micro-batch.

    Args:
        windows: all of the Accelerator's.
        models: what `accumulate()` was given: modules and tensors, also in lists and the like.
        advance: moves Accelerate's counter on; returns whether this micro-batch closes its windows.
        hold: returns what keeps the gradients of these models from travelling, where they need not.
    """

    def __init__(
        self,
        windows: Windows,
        models: Iterable[Any],
        advance: Callable[[], bool],
        hold: Callable[[MicroBatch], AbstractContextManager[object] | None],
    ) -> None:
        self.models = _flattened(models)
        self.closes = False
        self.has_items = False  # whether a backward has given items
        self.used: set[int] | None = None  # parameters that closing backwards have reached, where somebody asks
        self.leaves: list[Tensor] = []  # the same, where all are known
        self._windows = windows
        self._advance = advance
        self._hold = hold
        self._held: AbstractContextManager[object] | None = None
        self._outer: MicroBatch | None = None

    def __enter__(self) -> None:
        self.closes = self._advance()
        if (held := self._hold(self)) is not None:
            held.__enter__()
            self._held = held
        self._outer, self._windows.current = self._windows.current, self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._windows.current, self._outer = self._outer, None
        if self._held is not None:
            self._held.__exit__(None, None, None)
        if kind is None:
            self._windows.leave(self)
        self.models, self.leaves = [], []  # windows remember their last micro-batch, and must keep no model alive


class Window:
    """What a gradient holds: that of a prepared optimizer, or of all that no such optimizer holds.

    Attributes:
        micro_batches: how many have had a backward.
        counts: whether they came with items.
        is_closed: whether the last of them has had its backward.
        is_stepped: whether the program has asked for a step since.
        wants_clear: whether it has asked for cleared gradients since, and got none.
        dropped_in: the closing micro-batch in which it asked to clear before the backward.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.optimizer = optimizer
        self.wants_clear = False
        self.begin()

    def begin(self) -> None:
        """A new window."""
        self.micro_batches = 0
        self.counts = self.is_closed = self.is_stepped = False
        self.factor = 1.0  # what the gradient was multiplied with
        self.last: MicroBatch | None = None
        self.dropped_in: MicroBatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether it holds micro-batches and awaits its last."""
        return self.micro_batches > 0 and not self.is_closed

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the optimizer."""
        return [] if self.optimizer is None else self.optimizer.parameters()

    def count(self, micro_batch: MicroBatch) -> None:
        """A backward of that micro-batch was added: its first, or one more."""
        self.micro_batches += micro_batch is not self.last
        self.last = micro_batch
        self.is_closed = micro_batch.closes

    def clear(self) -> None:
        """Clear the gradients themselves."""
        if self.optimizer is not None:
            self.optimizer.optimizer.zero_grad()


def _flattened(models: Iterable[Any]) -> list[Model]:
    found: list[Model] = []
    for one in models:
        if isinstance(one, nn.Module | Tensor):
            found.append(one)
        elif isinstance(one, Iterable) and not isinstance(one, str):
            found += _flattened(one.values() if isinstance(one, dict) else one)
    return found


def parameters_of(owner: object) -> list[Tensor]:
    """Those of a module; a tensor is its own."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [owner] if isinstance(owner, Tensor) else []
