"""Warns of a mean of means: a loss without items, over micro-batches with uneven numbers of labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.trees import children


class LabelWatch:
    """Compares the numbers of labels in micro-batches whose losses are weighted by samples.

    It reads labels on a device only in the first window with several micro-batches, once, at its end; labels on the
    host in every window, until it finds uneven ones.
    """

    def __init__(self) -> None:
        self._has_read_device = False
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the counts of the last window."""
        self._counts: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}  # samples and labels of each micro-batch
        self._has_labels = True  # assumed until the first micro-batch

    def note(self, micro_batch: Any, samples: int) -> None:
        """Count the labels of a micro-batch, without making the host wait."""
        if not self._has_labels:
            return
        for keys, labels in _labels_in(micro_batch, ()):
            if labels.is_cpu or not self._has_read_device:
                self._counts.setdefault(keys, []).append((samples, _numbers_of(labels)))
        self._has_labels = bool(self._counts)

    def uneven(self) -> str | None:
        """The warning at the end of a window, if its labels are not proportional to its samples."""
        for keys, counts in self._counts.items():
            if len(counts) < 2:
                continue
            samples = [count for count, _ in counts]
            stacked = torch.stack([numbers for _, numbers in counts])
            self._has_read_device |= not stacked.is_cpu
            labels = stacked.tolist()
            # The loss may be a mean over either number. If one of them is proportional to the samples, it may be right.
            other = [
                next((i for i in range(1, len(samples)) if not _is_even(i, k, samples, labels)), None) for k in (0, 1)
            ]
            if None not in other:
                return _uneven_message(keys, samples, labels, other[0] or 0)
        return None


def labels_on_host(batch: Any) -> list[tuple[int, int]]:
    """How many labels each tensor of labels in the host's memory has: all, and those after the first position."""
    found = [tuple(_numbers_of(labels).tolist()) for _, labels in _labels_in(batch, ()) if labels.is_cpu]
    return [(every, predicted) for every, predicted in found]


def _numbers_of(labels: Tensor) -> Tensor:
    """Two numbers: all labels that are not -100, and those after the first position, which nothing predicts."""
    has_label = labels != IGNORED
    predicted = has_label[:, 1:] if labels.dim() > 1 else has_label
    return torch.stack([has_label.sum(), predicted.sum()])


def _is_even(i: int, kind: int, samples: list[int], labels: list[list[int]]) -> bool:
    """Whether a micro-batch has as many labels per sample as the first one."""
    return labels[i][kind] * samples[0] == labels[0][kind] * samples[i]


def _labels_in(tree: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    branches = children(tree)
    if branches is not None:
        for key, child in branches:
            yield from _labels_in(child, (*keys, key))
    elif keys[-1:] == ("labels",) and isinstance(tree, Tensor) and tree.dim() > 0 and not tree.is_floating_point():
        yield keys, tree


def _uneven_message(keys: tuple[Any, ...], samples: list[int], labels: list[list[int]], i: int) -> str:
    name = ".".join(map(str, keys))
    return (
        f"loss_fn returned a loss without its items, so micro-batches are weighted by their samples. But {name} has "
        f"{labels[0][0]} labels other than {IGNORED} in one micro-batch of {samples[0]} samples, and {labels[i][0]} in "
        f"another of {samples[i]}. A mean over labels becomes a mean of means, not the mean of the whole batch. Return "
        f"the number of labels too: `return loss, (labels[:, 1:] != {IGNORED}).sum()` if the model predicts the next "
        f"token, `return loss, (labels != {IGNORED}).sum()` if it does not shift labels. If the loss is a mean over "
        "samples, return the number of samples."
    )
