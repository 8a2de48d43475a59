"""Which samples of a batch went into a call of the model: found by their values.

A loop may slice the batch, shuffle it, load it anew and trim its padding; what the model gets of a sample is then still
the row that one big batch has for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from macrobatch.verification.witness import Call


def micro_batches_of(calls: Sequence[Call], whole: Sequence[Call], count: int) -> list[list[int]] | None:
    """The samples of each micro-batch, by their numbers in the batch; None where they cannot be told.

    Calls with a common backward are one micro-batch where they see the same samples (two towers), and several where
    they see different ones (losses that are added up first).

    Args:
        calls: those of a step.
        whole: those of one big batch.
        count: how many samples that has.
    """
    parts: list[list[int]] = []
    used: set[int] = set()
    for micro in sorted({call.micro for call in calls}):
        own: list[list[int]] = []
        for position, call in enumerate(call for call in calls if call.micro == micro):
            likeliest = sorted(range(len(whole)), key=lambda index: index != position % len(whole))
            rows = next((found for i in likeliest if (found := _rows(call, whole[i], count, used)) is not None), None)
            if rows is None:
                return None
            if not any(set(rows) == set(other) for other in own):
                own.append(rows)
        parts += own
        used.update(*own)
    return parts


def _rows(call: Call, whole: Call, count: int, used: set[int]) -> list[int] | None:
    """For each row of what a call got, the sample that has the same in one big batch; new ones before used ones."""
    pairs = _pairs(call, whole, count)
    if not pairs:
        return None
    found: list[int] = []
    for row in range(len(pairs[0][0])):
        same = torch.stack([_same(everything, own[row]) for own, everything in pairs]).all(0)
        candidates = [index for index in same.nonzero().flatten().tolist() if index not in found]
        if not candidates:
            return None
        found.append(min(candidates, key=lambda index: (index in used, index)))
    return found


def _pairs(call: Call, whole: Call, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tensors of the call, with those of one big batch that stand in the same place and have a row for each sample."""
    names = zip(call.inputs, call.inputs if call.inputs.keys() == whole.inputs.keys() else whole.inputs, strict=False)
    pairs = [(call.inputs[own], whole.inputs[other]) for own, other in names]
    pairs = [
        (own, everything) for own, everything in pairs if _comparable(own, everything) and len(everything) == count
    ]
    return [(own, everything) for own, everything in pairs if len(own) == len(pairs[0][0])]


def _comparable(own: Tensor, everything: Tensor) -> bool:
    """Of the same shape but for the samples, and the positions, which may be padded."""
    return own.ndim == everything.ndim and own.shape[2:] == everything.shape[2:]


def _same(everything: Tensor, row: Tensor) -> Tensor:
    """Which rows are this one, but for padding at its end."""
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
