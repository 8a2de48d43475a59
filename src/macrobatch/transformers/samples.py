"""Where the samples are in the batches of a trainer; and several batches as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from macrobatch.errors import BatchError

Inputs = dict[str, Any]
HALVES = ("chosen", "rejected")


@dataclass(frozen=True)
class Layout:
    """Samples are rows of all tensors; or pairs, the chosen ones in the first half of the rows, then the rejected.

    Attributes:
        has_pairs: whether they are pairs.
    """

    has_pairs: bool = False

    def count(self, inputs: Mapping[str, Any]) -> int:
        """How many samples a batch has."""
        rows = _rows(inputs)
        return rows // 2 if self.has_pairs else rows

    def select(self, inputs: Inputs, samples: Sequence[int]) -> Inputs:
        """The batch of some samples."""
        rows, count = _rows(inputs), self.count(inputs)
        return {key: _select(value, list(samples), rows, count) for key, value in inputs.items()}

    def at_least_two(self, inputs: Inputs) -> Inputs:
        """The batch, or where it has one sample, with that twice."""
        return self.select(inputs, [0, 0]) if self.count(inputs) == 1 else dict(inputs)

    def as_rows(self, inputs: Inputs) -> Inputs:
        """The batch with one row for each sample in every tensor, to be cut."""
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
        """What `as_rows` has taken apart."""
        if not self.has_pairs:
            return dict(rows)
        return {**joined([rows[half] for half in HALVES], padding), **rows["both"]}


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else -1


def _rows(inputs: Mapping[str, Any]) -> int:
    return max((_length(value) for value in inputs.values()), default=0)


def _select(value: Any, samples: list[int], rows: int, count: int) -> Any:
    if _length(value) == count:
        return value[samples]
    if _length(value) == rows:
        return value[samples + [count + sample for sample in samples]]
    return value


def joined(batches: Sequence[Inputs], padding: Mapping[str, int]) -> Inputs:
    """One batch of several, padded to the widest of them, at the side at which they are padded.

    Raises:
        BatchError: they are of different kinds.
    """
    first = batches[0]
    for batch in batches[1:]:
        if batch.keys() != first.keys():
            raise BatchError(f"the batches of a window have different keys: {sorted(first)} and {sorted(batch)}.")
    at_left = any(_is_padded_at_left(batch) for batch in batches)
    return {key: _join(key, [batch[key] for batch in batches], padding.get(key, 0), at_left) for key in first}


def _join(key: str, values: list[Any], pad: int, at_left: bool) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        if all(isinstance(value, list) for value in values):
            return [entry for value in values for entry in value]
        if all(value == values[0] for value in values[1:]):
            return values[0]
        raise BatchError(f"the batches of a window cannot be made one: {key!r} is {values[0]!r} and {values[-1]!r}.")
    if not values[0].dim():
        if all(torch.equal(value, values[0]) for value in values[1:]):
            return values[0]
        raise BatchError(f"the batches of a window cannot be made one: {key!r} is one number, another in each.")
    if len({value.shape[2:] for value in values}) > 1 or len({value.dim() for value in values}) > 1:
        raise BatchError(
            f"the batches of a window cannot be made one: {key!r} has the shapes {[tuple(v.shape) for v in values]}. "
            "Only the second dimension, that of the tokens, can be padded. Leave micro= out, or pad to one size."
        )
    if values[0].dim() == 1:
        return torch.cat(values)
    width = max(value.shape[1] for value in values)
    return torch.cat([_padded(value, width - value.shape[1], pad, at_left) for value in values])


def _padded(value: Tensor, more: int, pad: int, at_left: bool) -> Tensor:
    if not more:
        return value
    columns = value.new_full((len(value), more, *value.shape[2:]), pad)
    return torch.cat([columns, value] if at_left else [value, columns], 1)


def _is_padded_at_left(batch: Inputs) -> bool:
    """Whether the tokens of some row begin after its first column."""
    mask = batch.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > 0 and bool((mask[:, 0] == 0).any())
