"""Which rows of a trainer's batch belong to which sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from macrobatch._cut.joining import joined

Inputs = dict[str, Any]
HALVES = ("chosen", "rejected")
BOUNDS = "cu_seq_lens"  # bounds of the samples in one long row: one more than there are samples


@dataclass(frozen=True)
class Layout:
    """Samples are the rows of all tensors; or pairs, with the chosen ones in the first half of the rows, then the
    rejected.

    Attributes:
        has_pairs: whether samples are pairs.
    """

    has_pairs: bool = False

    def count(self, inputs: Mapping[str, Any]) -> int:
        """The number of samples in a batch."""
        rows = _rows(inputs)
        return rows // 2 if self.has_pairs else rows

    def select(self, inputs: Inputs, samples: Sequence[int]) -> Inputs:
        """The batch of some samples."""
        rows, count = _rows(inputs), self.count(inputs)
        return {key: _select(value, list(samples), rows, count) for key, value in inputs.items()}

    def as_rows(self, inputs: Inputs) -> Inputs:
        """The batch with one row per sample in every tensor, so that it can be cut."""
        if not self.has_pairs:
            return inputs
        rows, count = _rows(inputs), self.count(inputs)
        halves = {key: value for key, value in inputs.items() if _length(value) == rows}
        return {
            HALVES[0]: {key: value[:count] for key, value in halves.items()},
            HALVES[1]: {key: value[count:] for key, value in halves.items()},
            "both": {key: value for key, value in inputs.items() if key not in halves},
        }

    def as_inputs(self, rows: Inputs, padding: Mapping[str, int]) -> Inputs:
        """The batch of a trainer again, from the result of `as_rows`."""
        if not self.has_pairs:
            return dict(rows)
        return {**joined([rows[half] for half in HALVES], padding), **rows["both"]}


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else -1


def _rows(inputs: Mapping[str, Any]) -> int:
    return max((_length(value) for name, value in inputs.items() if not name.startswith(BOUNDS)), default=0)


def _select(value: Any, samples: list[int], rows: int, count: int) -> Any:
    if _length(value) == count:
        return value[samples]
    if _length(value) == rows:
        return value[samples + [count + sample for sample in samples]]
    return value
