"""The phases of a window, for whoever measures them, such as a profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Literal

from torch import Tensor

Span = Literal["data", "forward", "backward", "replay", "communication", "update"]
Observer = Callable[[Span, Tensor | None], AbstractContextManager[None]]


class Spans:
    """The phases of a window, and the observers that measure them.

    >>> spans, seen = Spans(), []
    >>> @contextlib.contextmanager
    ... def watch(span, loss):
    ...     seen.append(span)
    ...     yield
    >>> spans.subscribe(watch)
    >>> with spans.of("update"):
    ...     seen
    ['update']
    """

    _NOTHING: ClassVar[AbstractContextManager[None]] = contextlib.nullcontext()

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()

    def subscribe(self, observer: Observer) -> None:
        """Call ``observer(span, loss)`` for every span. It returns a context manager, which is entered around the span.

        `loss` is the loss of a "backward", and None for the other spans.
        """
        self.observers += (observer,)

    def of(self, span: Span, loss: Tensor | None = None) -> AbstractContextManager[None]:
        """The context manager to run this span in."""
        return self._watched(span, loss) if self.observers else self._NOTHING

    @contextlib.contextmanager
    def _watched(self, span: Span, loss: Tensor | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer(span, loss))
            yield
