"""Losses whose graph `torch.compile` hides: the trainer's own first batch runs eagerly, and shows what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch._loss.weighing import Weight
from macrobatch.transformers.samples import Inputs, Layout
from macrobatch.transformers.trl import predicted_labels

COUNTS: dict[str, Callable[[Inputs], Any]] = {
    "labels, shifted": predicted_labels,
    "labels": lambda inputs: (inputs["labels"] != IGNORED).sum(),
    "elements of the labels": lambda inputs: inputs["labels"].numel(),
    "samples": Layout().count,
}


class CompiledLosses:
    """Counts the items of batches, as the graphs of those that ran eagerly have shown it.

    A batch runs eagerly if those have not shown yet which count is the right one of several that differ in this batch.
    """

    def __init__(self) -> None:
        self._possible = dict(COUNTS)
        self._has_read = False  # whether a batch ran eagerly
        self._items: int | None = None  # of the batch that runs compiled
        self._found: dict[str, int] = {}  # the counts of the batch

    @contextmanager
    def looking(self, inputs: Inputs) -> Iterator[None]:
        """A context for the forward of a batch."""
        self._found, self._items = (
            {name: value for name in self._possible if (value := _count(name, inputs)) is not None},
            None,
        )
        numbers = set(self._found.values())
        if self._has_read and len(numbers) <= 1:
            self._items = next(iter(numbers), None)
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield

    def weight(self, read: Weight) -> Weight:
        """What a batch weighs. `read`: what its graph says, which is nothing if it ran compiled."""
        if self._items is not None:
            return read if read.items is not None else Weight(self._items)
        if read.items is not None:
            self._has_read, items = True, float(read.items)
            self._possible = {name: COUNTS[name] for name, value in self._found.items() if value == items}
        return read


def _count(name: str, inputs: Inputs) -> int | None:
    """A count of a batch; None if the batch does not have what is counted, or nothing of it."""
    try:
        found = COUNTS[name](inputs)
    except (KeyError, AttributeError, IndexError, TypeError):
        return None
    return int(found.item() if isinstance(found, Tensor) else found)
