"""Count the items of the terms of a batch: once per window, even if the window is retried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from macrobatch._cut.policies import Cut
from macrobatch._step.denominators import Counted, Denominators, TermCounter
from macrobatch._step.engine import Engine
from macrobatch.types import Counts


class BatchTerms:
    """Tells an engine the denominators of each window, which is one batch.

    Args:
        counts: the user's function, which returns the number of items of each term in a batch.
        engine: the engine that runs the windows.
    """

    def __init__(self, counts: Counts, engine: Engine) -> None:
        self._engine = engine
        self._counter = TermCounter(counts, engine.backend, lambda: engine.device)
        self.begin_window()

    def begin_window(self) -> None:
        """Begin the window of a new batch."""
        self._counted: Counted | None = None
        self._denominators: Denominators | None = None

    def count(self, batch: Any) -> None:
        """Call `counts` for a batch that has samples; only once per window."""
        if self._counted is None:
            self._counted = self._counter.count(batch)

    def expect(self, cut: Cut) -> None:
        """Tell the engine the denominators of the window. All ranks call this together."""
        if self._denominators is None:
            if not cut.is_empty:
                self._counter.agree_on_names()
            self._denominators = self._counter.total([] if self._counted is None else [self._counted])
        self._engine.expect(self._denominators)

    def denominators(self) -> Denominators:
        """The denominators of the current window."""
        assert self._denominators is not None, "they are known before its first micro-batch"
        return self._denominators


def with_items(terms: Any, samples: Callable[[], int]) -> Any:
    """The terms, where those without items get the number of samples."""
    if not isinstance(terms, Mapping):
        return terms
    return {
        name: term
        if isinstance(term, tuple | list) and len(term) == 2 and term[1] is not None
        else (_loss(term), samples())
        for name, term in terms.items()
    }


def _loss(term: Any) -> Any:
    return term[0] if isinstance(term, tuple | list) and len(term) == 2 else term
