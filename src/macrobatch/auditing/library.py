"""Windows of this library, which report themselves."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from macrobatch.auditing.places import place
from macrobatch.auditing.reading import terms_of
from macrobatch.auditing.records import Micro, Term

if TYPE_CHECKING:
    from macrobatch._engine.engine import Engine
    from macrobatch._engine.window import Window as LibraryWindow

Report = Callable[["Engine", list[Micro]], None]


class Library:
    """Turns what the windows of this library report into micro-batches of the audit."""

    def __init__(self, begin: Callable[[], None], end: Report) -> None:
        self._begin, self._end = begin, end
        self._journals: weakref.WeakKeyDictionary[LibraryWindow, list[tuple[Micro, Sequence[Any]]]] = (
            weakref.WeakKeyDictionary()
        )

    def micro_batch(
        self, window: LibraryWindow, losses: Sequence[Tensor | None], items: Sequence[int | float | Tensor]
    ) -> None:
        """Note a micro-batch."""
        copies = tuple(n.detach().clone() if isinstance(n, Tensor) else n for n in items)
        micro = Micro(place=place(3), as_counted=True)
        if not window.divides:  # its losses are only added up: the program has scaled them itself
            micro.terms, micro.unknown = terms_of(losses, [torch.ones(())])
        self._journals.setdefault(window, []).append((micro, copies))

    @contextlib.contextmanager
    def closing(self, engine: Engine, window: LibraryWindow) -> Iterator[None]:
        """Note a window that closes."""
        self._begin()
        micros: list[Micro] = []
        try:
            yield
            micros = self._micros(engine, window)
        finally:
            self._end(engine, micros)

    def _micros(self, engine: Engine, window: LibraryWindow) -> list[Micro]:
        """One record for each micro-batch; one for all, where recordings or retries have hidden them."""
        journal = self._journals.pop(window, [])
        if window.is_empty:
            return []
        early = window.denominators
        names = ("",) if early is None else early.names
        totals = [float(window.items())] if early is None else [float(n) for n in early.total]
        where = journal[-1][0].place if journal else place(5)
        is_whole = len(journal) == window.micro_batches
        if not window.divides:
            unseen = Micro(place=where, unknown="a total of recorded micro-batches")
            return [micro for micro, _ in journal] if is_whole else [unseen]
        if window.source == "alike":
            node = engine.unread or "something that was not read, and no items were given"
            unknown = f"{node}: all micro-batches weigh alike, or by their samples"
            return [replace(micro, unknown=unknown) for micro, _ in journal] or [Micro(place=where, unknown=unknown)]
        if not is_whole or any(len(items) != len(names) for _, items in journal):
            journal = [(Micro(place=where, as_counted=True), tuple(totals))]
        for micro, items in journal:
            micro.terms = tuple(
                Term(node=name, kind="sum", count=float(n), multiplier=1.0, divisors=(total,))
                for name, n, total in zip(names, items, totals, strict=True)
                if total
            )
        return [micro for micro, _ in journal]
