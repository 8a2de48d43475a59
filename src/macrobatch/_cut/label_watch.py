"""A mean of means, noticed: losses without items, of micro-batches with uneven numbers of labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.trees import children


class Count(NamedTuple):
    """How many labels a micro-batch has.

    Attributes:
        samples: that it has.
        labels: two numbers: all that are not -100, and those beyond the first position, which nothing can predict.
    """

    samples: int
    labels: Tensor


class LabelWatch:
    """Compares the labels of micro-batches, for losses that are weighed by samples.

    Labels on a device are looked at in the first window with several micro-batches alone, and read once, at its end;
    those on the host in every window, until they are uneven.
    """

    def __init__(self) -> None:
        self._has_read_device = False
        self.begin_window()

    def begin_window(self) -> None:
        """Forget what was noted of a window."""
        self._counts: dict[tuple[Any, ...], list[Count]] = {}
        self._has_labels = True  # until its first micro-batch says otherwise

    def note(self, micro_batch: Any, samples: int) -> None:
        """Count the labels of a micro-batch, which no host waits for."""
        if self._has_labels:
            self._count(micro_batch, samples)
            self._has_labels = bool(self._counts)

    def _count(self, micro_batch: Any, samples: int) -> None:
        for keys, labels in _labels_in(micro_batch, ()):
            if labels.is_cpu or not self._has_read_device:
                has_label = labels != IGNORED
                predicted = has_label[:, 1:] if labels.dim() > 1 else has_label
                numbers = torch.stack([has_label.sum(), predicted.sum()])
                self._counts.setdefault(keys, []).append(Count(samples, numbers))

    def uneven(self) -> str | None:
        """At the end of a window: what a user should know, if samples are no measure of its labels."""
        for keys, counts in self._counts.items():
            if len(counts) < 2:
                continue
            self._has_read_device |= not counts[0].labels.is_cpu
            labels = torch.stack([count.labels for count in counts]).tolist()
            samples = [count.samples for count in counts]
            # The loss may be over either number; where samples measure one of them, all may be well.
            other = [
                next((i for i in range(1, len(samples)) if not _same(i, k, samples, labels)), None) for k in (0, 1)
            ]
            if None not in other:
                return _message(keys, samples, labels, other[0] or 0)
        return None


def _same(i: int, kind: int, samples: list[int], labels: list[list[int]]) -> bool:
    """Whether a micro-batch has as many labels for each sample as the first one."""
    return labels[i][kind] * samples[0] == labels[0][kind] * samples[i]


def _labels_in(tree: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    branches = children(tree)
    if branches is not None:
        for key, child in branches:
            yield from _labels_in(child, (*keys, key))
    elif keys[-1:] == ("labels",) and isinstance(tree, Tensor) and tree.dim() > 0 and not tree.is_floating_point():
        yield keys, tree


def _message(keys: tuple[Any, ...], samples: list[int], labels: list[list[int]], i: int) -> str:
    name = ".".join(map(str, keys))
    return (
        f"loss_fn returned a loss without its items, so that micro-batches are weighed by their samples; but {name} "
        f"has {labels[0][0]} labels other than {IGNORED} in {samples[0]} samples, and {labels[i][0]} in {samples[i]}. "
        "A mean over labels is then a mean of means, not the mean of the whole batch. Return the number of labels too: "
        f"`return loss, (labels[:, 1:] != {IGNORED}).sum()` where the model predicts the next token, "
        f"`return loss, (labels != {IGNORED}).sum()` where it does not shift them. If the loss is a mean over samples, "
        "return their number."
    )
