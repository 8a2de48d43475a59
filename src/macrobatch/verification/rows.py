"""Which samples of a batch went into a call of the model: found by their values.

A loop may slice the batch, shuffle it, load it anew and trim its padding; what the model gets of a sample is then still
the row that one big batch has for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._cut.trees import leaves
from macrobatch.verification.seen import Call


class Rows(NamedTuple):
    """The samples that went into the calls of a window, by their numbers in the batch.

    Attributes:
        calls: each call, with the samples of its rows.
        parts: the samples of each micro-batch. Calls with a common backward are one micro-batch where they see the same
            samples (two towers), and several where they see different ones (losses that are added up first).
    """

    calls: list[tuple[Call, list[int]]]
    parts: list[list[int]]


def rows_of(calls: Sequence[Call], whole: Sequence[Call], count: int, used: set[int]) -> Rows | None:
    """The samples of each call; None where they cannot be told.

    Args:
        calls: those of a window.
        whole: those of one big batch.
        count: how many samples that has.
        used: the samples of earlier windows. Those of this one are added.
    """
    found: list[tuple[Call, list[int]]] = []
    parts: list[list[int]] = []
    for micro in sorted({call.micro for call in calls}):
        own: list[list[int]] = []
        for position, call in enumerate(call for call in calls if call.micro == micro):
            likeliest = sorted(range(len(whole)), key=lambda index: index != position % len(whole))
            rows = next((rows for i in likeliest if (rows := _rows(call, whole[i], count, used)) is not None), None)
            if rows is None:
                return None
            found.append((call, rows))
            if not any(set(rows) == set(other) for other in own):
                own.append(rows)
        parts += own
        used.update(*own)
    return Rows(found, parts)


def _rows(call: Call, whole: Call, count: int, used: set[int]) -> list[int] | None:
    """For each row of what a call got, the sample that has the same in one big batch; new ones before used ones."""
    pairs = _pairs(call, whole, count)
    if not pairs:
        return None
    tables = [torch.stack([_same(everything, row).cpu() for row in own]) for own, everything in pairs]
    known = list(range(len(pairs)))
    if not torch.stack(tables).all(0).any(1).all():
        # A step may give the model other labels. Then the rest tells the samples, if it tells all of them apart.
        known = [index for index, table in enumerate(tables) if table.any(1).all()]
        if not known or _distinct([pairs[i][1] for i in known], count) < _distinct(whole.inputs.values(), count):
            return None
    same = torch.stack([tables[index] for index in known]).all(0)  # (rows, samples)
    found: list[int] = []
    for row in same:
        candidates = [index for index in row.nonzero().flatten().tolist() if index not in found]
        if not candidates:
            return None
        found.append(min(candidates, key=lambda index: (index in used, index)))
    return found


def _pairs(call: Call, whole: Call, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tensors of the call, with those of one big batch in the same place, if they have a row for each sample.

    The same place is the same name, or, of calls without a common name, the same position.
    """
    common = [name for name in call.inputs if name in whole.inputs]
    names = [(name, name) for name in common] or list(zip(call.inputs, whole.inputs, strict=False))
    pairs = [(call.inputs[own], whole.inputs[other]) for own, other in names]
    pairs = [(own, other) for own, other in pairs if _comparable(own, other) and len(other) == count and len(own)]
    return [(own, other) for own, other in pairs if len(own) == len(pairs[0][0])]


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


def lookalikes(whole: Sequence[Call], batch: Any, count: int) -> int:
    """How many samples the model cannot tell from another one, though the batch has something else for them."""
    given = [tensor for call in whole for tensor in call.inputs.values()]
    others = [leaf for _, leaf in leaves(batch, "batch") if isinstance(leaf, Tensor)]
    return _distinct([*given, *others], count) - _distinct(given, count)


def _distinct(tensors: Iterable[Tensor], count: int) -> int:
    """How many different samples there are by these tensors."""
    rows = [tensor.tolist() for tensor in tensors if tensor.ndim and len(tensor) == count]
    return len({str([row[index] for row in rows]) for index in range(count)})
