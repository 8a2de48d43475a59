"""What `accumulate()` returns: one micro-batch, and the models that it trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from macrobatch.errors import UsageError

if TYPE_CHECKING:
    from macrobatch.accelerate.windows import Windows

Model = nn.Module | Tensor


class MicroBatch:
    """A context manager for the forward, the backwards and the steps of one micro-batch. Also a decorator.

    Args:
        windows: the windows of the `Accelerator`.
        models: the arguments of `accumulate()`: modules and tensors, also in lists and dicts.
        advance: advances Accelerate's counter, and returns whether this micro-batch closes its windows.
        hold: returns a context in which processes do not exchange the gradients of these models; None if they should.
    """

    def __init__(
        self,
        windows: Windows,
        models: Sequence[Any],
        advance: Callable[[], bool],
        hold: Callable[[MicroBatch], AbstractContextManager[object] | None],
    ) -> None:
        self.given, self.models = models, flattened(models)
        self.closes = False
        self.has_items = False  # whether a backward had items
        self.used: set[int] | None = None  # ids of the parameters that the closing backwards reach, if needed
        self.leaves: list[Tensor] = []  # these parameters themselves, if all are known
        self._windows = windows
        self._calls: tuple[Callable[[], bool], Callable[[MicroBatch], Any]] | None = advance, hold
        self._held: AbstractContextManager[object] | None = None
        self._outer: MicroBatch | None = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function: each call of it is one micro-batch."""
        if self._calls is None:
            raise _entered_twice()
        make = functools.partial(MicroBatch, self._windows, self.given, *self._calls)

        @functools.wraps(function)
        def micro_step(*arguments: Any, **options: Any) -> Any:
            with make():
                return function(*arguments, **options)

        return micro_step

    def __enter__(self) -> None:
        if self._calls is None:
            raise _entered_twice()
        (advance, hold), self._calls = (
            self._calls,
            None,
        )  # so that windows do not keep the `Accelerator`
        self.closes = advance()
        if (held := hold(self)) is not None:
            held.__enter__()
            self._held = held
        self._outer, self._windows.current = self._windows.current, self
        self._windows.latest = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._windows.current, self._outer = self._outer, None
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)
        if kind is None:
            self._windows.leave(self)
        self.given, self.models, self.leaves = (), [], []  # so that a window's last micro-batch keeps no model alive


def _entered_twice() -> UsageError:
    return UsageError("what accumulate() returned was entered twice: call accumulate() for every micro-batch.")


def flattened(models: Iterable[Any]) -> list[Model]:
    """All modules and tensors, also those in lists and dicts."""
    found: list[Model] = []
    for one in models:
        if isinstance(one, nn.Module | Tensor):
            found.append(one)
        elif isinstance(one, Iterable) and not isinstance(one, str):
            found += flattened(one.values() if isinstance(one, dict) else one)
    return found


def parameters_of(owner: object) -> list[Tensor]:
    """The parameters of a module; a tensor is its own parameter."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [owner] if isinstance(owner, Tensor) else []
