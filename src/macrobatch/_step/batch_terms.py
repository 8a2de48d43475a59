"""The terms of whole batches: counted once a window, however often that is tried."""

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
        counts: of a batch.
        engine: which does the windows.
    """

    def __init__(self, counts: Counts, engine: Engine) -> None:
        self._engine = engine
        self._counter = TermCounter(counts, engine.backend, lambda: engine.device)
        self.begin_window()

    def begin_window(self) -> None:
        """A batch comes."""
        self._counted: Counted | None = None
        self._denominators: Denominators | None = None

    def count(self, batch: Any) -> None:
        """Ask for the counts of a batch that has samples, once."""
        if self._counted is None:
            self._counted = self._counter.count(batch)

    def expect(self, cut: Cut) -> None:
        """Tell the engine what the window is divided by. All ranks call this together."""
        if self._denominators is None:
            if not cut.is_empty:
                self._counter.agree_on_names()
            self._denominators = self._counter.total([] if self._counted is None else [self._counted])
        self._engine.expect(self._denominators)

    def denominators(self) -> Denominators:
        """Those of the current window."""
        assert self._denominators is not None, "they are known before its first micro-batch"
        return self._denominators


def with_items(terms: Any, samples: Callable[[], int]) -> Any:
    """The same terms; those without items are means over the samples, whose number is asked for then."""
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
