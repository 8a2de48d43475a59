"""The phases ("spans") of a window, for observers that measure their time. They cost nothing without an observer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

from torch import Tensor

Span = Literal["data", "forward", "backward", "replay", "communication", "update"]
Observer = Callable[[Span, Tensor | None], AbstractContextManager[None]]

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Spans:
    """The spans of an engine, and their observers.

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

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()

    @property
    def are_watched(self) -> bool:
        """Whether there is an observer."""
        return bool(self._observers)

    def subscribe(self, observer: Observer) -> None:
        """Call ``observer(span, loss)`` for every span. It returns a context manager, which is entered around the span.

        `loss` is the loss of a "backward", and None for the other spans.
        """
        self._observers += (observer,)

    def of(self, span: Span, loss: Tensor | None = None) -> AbstractContextManager[None]:
        """The context manager to run this span in."""
        return self._watched(span, loss) if self._observers else _NOTHING

    @contextlib.contextmanager
    def _watched(self, span: Span, loss: Tensor | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer(span, loss))
            yield
