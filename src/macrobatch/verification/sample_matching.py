"""Finds the samples of a batch in the calls of the model, by their values.

A loop may slice the batch, shuffle it, load it again or trim its padding. The model still gets the same row for a
sample as in one big batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._cut.trees import leaves
from macrobatch.verification.observation import Call


class MatchedSamples(NamedTuple):
    """The samples in the calls of a window, by their indices in the batch.

    Attributes:
        calls: each call, with the samples of its rows.
        parts: the samples of each micro-batch. Calls with a common backward are one micro-batch if they get the same
            samples (two towers), and several if they get different ones (a loop that adds up losses first).
    """

    calls: list[tuple[Call, list[int]]]
    parts: list[list[int]]


def match_samples(calls: Sequence[Call], whole: Sequence[Call], count: int, used: set[int]) -> MatchedSamples | None:
    """Find the samples of each call; None if some call has rows that match no sample.

    Args:
        calls: the calls of a window.
        whole: the calls of one big batch.
        count: the number of samples in the batch.
        used: the samples of earlier windows; the function adds the samples of this window.
    """
    found: list[tuple[Call, list[int]]] = []
    parts: list[list[int]] = []
    for micro in sorted({call.first_backward for call in calls}):
        own: list[list[int]] = []
        for position, call in enumerate(call for call in calls if call.first_backward == micro):
            likeliest = sorted(range(len(whole)), key=lambda index: index != position % len(whole))
            rows = next(
                (rows for i in likeliest if (rows := _match_rows(call, whole[i], count, used)) is not None), None
            )
            if rows is None:
                return None
            found.append((call, rows))
            if not any(set(rows) == set(other) for other in own):
                own.append(rows)
        parts += own
        used.update(*own)
    return MatchedSamples(found, parts)


def _match_rows(call: Call, whole: Call, count: int, used: set[int]) -> list[int] | None:
    """Match each row of a call with a sample that has the same row in one big batch; unused samples go first."""
    pairs = _pairs(call, whole, count)
    if not pairs:
        return None
    tables = [torch.stack([_equal_rows(everything, row).cpu() for row in own]) for own, everything in pairs]
    known = list(range(len(pairs)))
    if not torch.stack(tables).all(0).any(1).all():
        # A step may pass other labels to the model. The other inputs are enough if they distinguish all samples.
        known = [index for index, table in enumerate(tables) if table.any(1).all()]
        if not known or _num_distinct([pairs[i][1] for i in known], count) < _num_distinct(
            whole.inputs.values(), count
        ):
            return None
    same = torch.stack([tables[index] for index in known]).all(0)  # (rows, samples)
    found: list[int] = []
    for row in same:
        candidates = [index for index in row.nonzero().flatten().tolist() if index not in found]
        if not candidates:
            return None
        found.append(min(candidates, key=lambda index: (index in used, index)))
    return found


def has_common_rows(call: Call, whole: Call, count: int) -> bool:
    """Whether any row of any tensor of a call is a row of one big batch, or a part of one: sequences may be packed."""
    pairs = _pairs(call, whole, count)
    return not pairs or any(
        _equal_rows(everything, row).any() or _is_part(row.flatten(), everything.flatten().to(row.dtype))
        for own, everything in pairs
        for row in own
    )


def _is_part(row: Tensor, everything: Tensor) -> bool:
    """Whether a row occurs in a longer one."""
    size = row.numel()
    return 0 < size <= everything.numel() and bool((everything.unfold(0, size, 1) == row).all(1).any())


def _pairs(call: Call, whole: Call, count: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a call's tensors and those of one big batch that have a row for each sample.

    Tensors pair up by their names in the arguments, or, if no name is common, by their positions.
    """
    common = [name for name in call.inputs if name in whole.inputs]
    names = [(name, name) for name in common] or list(zip(call.inputs, whole.inputs, strict=False))
    pairs = [(call.inputs[own], whole.inputs[other]) for own, other in names]
    pairs = [(own, other) for own, other in pairs if _is_comparable(own, other) and len(other) == count and len(own)]
    return [(own, other) for own, other in pairs if len(own) == len(pairs[0][0])]


def _is_comparable(own: Tensor, everything: Tensor) -> bool:
    """Whether two tensors have the same shape apart from samples and positions (padding may differ)."""
    return own.ndim == everything.ndim and own.shape[2:] == everything.shape[2:]


def _equal_rows(everything: Tensor, row: Tensor) -> Tensor:
    """For each row of `everything`, whether it equals `row` apart from padding at the end."""
    everything = everything.to(row.device, row.dtype)
    if row.ndim == 0:
        return everything == row
    width = min(everything.shape[1], row.shape[0])
    same = (everything[:, :width] == row[:width]).flatten(1).all(1)
    if everything.shape[1] > width:
        same &= (everything[:, width:] == everything[:, -1:]).flatten(1).all(1)
    if row.shape[0] > width:
        same &= (row[width:] == row[-1:]).all()
    return same


def num_indistinguishable(whole: Sequence[Call], batch: Any, count: int) -> int:
    """The number of samples with the same model inputs as another sample but other values in the batch."""
    given = [tensor for call in whole for tensor in call.inputs.values()]
    others = [leaf for _, leaf in leaves(batch, "batch") if isinstance(leaf, Tensor)]
    return _num_distinct([*given, *others], count) - _num_distinct(given, count)


def _num_distinct(tensors: Iterable[Tensor], count: int) -> int:
    """The number of samples that differ in any of these tensors."""
    rows = [tensor.tolist() for tensor in tensors if tensor.ndim and len(tensor) == count]
    return len({str([row[index] for row in rows]) for index in range(count)})
