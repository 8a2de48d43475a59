"""Where the time of a window goes, for whoever subscribes; it costs nothing where nobody does."""

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
    """The spans of an engine, and those who watch them.

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
        """Whether anybody has subscribed."""
        return bool(self._observers)

    def subscribe(self, observer: Observer) -> None:
        """Call ``observer(span, loss)`` for every span: it returns a context manager, which is entered around it.

        `loss` is what a "backward" starts from, and None for the other spans.
        """
        self._observers += (observer,)

    def of(self, span: Span, loss: Tensor | None = None) -> AbstractContextManager[None]:
        """The context manager to do this span in."""
        return self._watched(span, loss) if self._observers else _NOTHING

    @contextlib.contextmanager
    def _watched(self, span: Span, loss: Tensor | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer(span, loss))
            yield
