"""Checks of weights: means of means, because a program gives no items."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.trees import children
from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._loss.sizes import Shapes, Sizes, changed_sizes, shapes_by_path, sizes_of
from macrobatch.errors import warn


class LabelCount(NamedTuple):
    """The number of samples and labels in a micro-batch.

    `labels` has two numbers: all labels that are not -100, and those after the first position, which nothing predicts.
    """

    samples: int
    labels: Tensor


class SampleWeights(Check):
    """Compares the micro-batches of a window whose losses are weighed by samples. `MacroStep` tells it each.

    It reads labels on a device only in the first window with several micro-batches, once, at its end; labels on the
    host in every window, until it has warned.
    """

    name = "weighed by samples"
    sentence = "A loss that cannot be read comes without items, and micro-batches differ in size or labels (a warning)."
    cost = "without items, the shapes and a count of the labels of each micro-batch; one read from the device"
    shows = "loss_fn returned a loss without its items"
    program = """
        def loss_fn(model, batch):
            losses = nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
            return losses.sum() / (batch["labels"] != -100).sum()

        model = nn.Linear(2, 3)
        labels = torch.tensor([1, 2, 1, -100])
        train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro=2)
        train({"x": torch.ones(4, 2), "labels": labels})
        """

    def __init__(self) -> None:
        self._has_read_device = False
        self.begin()

    def begin(self) -> None:
        """Forget the micro-batches of the last window."""
        self._counts: dict[tuple[Any, ...], list[LabelCount]] = {}
        self._has_labels = True  # assumed until the first micro-batch
        self._first: Shapes | None = None
        self._other: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None  # a path, and two shapes of it

    def note(self, micro_batch: Any, samples: int) -> None:
        """Note the shapes of a micro-batch, and count its labels, without making the host wait."""
        if self._other is None:
            self._compare_shapes({**shapes_by_path(micro_batch), "": (samples,)})
        if self._has_labels:
            self._count(micro_batch, samples)
            self._has_labels = bool(self._counts)

    def _compare_shapes(self, shapes: Shapes) -> None:
        if self._first is None:
            self._first = shapes
        for path in sorted(self._first.keys() & shapes.keys()):
            if self._first[path] != shapes[path]:
                self._other = path, self._first[path], shapes[path]

    def _count(self, micro_batch: Any, samples: int) -> None:
        for keys, labels in _labels_in(micro_batch, ()):
            if labels.is_cpu or not self._has_read_device:
                self._counts.setdefault(keys, []).append(LabelCount(samples, _numbers_of(labels)))

    def warn(self, unread: str) -> bool:
        """At the end of a window: warn if its micro-batches differ. `unread`: the node that was not understood."""
        found = self._uneven_labels()
        if found is None and not self._counts and self._other is not None:  # labels in proportion are a good sign
            found = _sizes_message(*self._other)
        if found is None:
            return False
        warn(f"{found} (What the loss is a mean over could not be read from it: {unread} was not understood.)")
        return True

    def _uneven_labels(self) -> str | None:
        """The warning if labels are not proportional to samples."""
        for keys, counts in self._counts.items():
            if len(counts) < 2:
                continue
            self._has_read_device |= not counts[0].labels.is_cpu
            labels = torch.stack([count.labels for count in counts]).tolist()
            samples = [count.samples for count in counts]
            # The loss may be a mean over either number. If one of them is proportional to the samples, it may be right.
            other = [
                next((i for i in range(1, len(samples)) if not _is_even(i, k, samples, labels)), None) for k in (0, 1)
            ]
            if None not in other:
                return _uneven_message(keys, samples, labels, other[0] or 0)
        return None


def _sizes_message(path: str, first: tuple[int, ...], other: tuple[int, ...]) -> str:
    what = f"{path} has the shapes {first} and {other}" if path else f"there are {first[0]} and {other[0]} samples"
    return (
        "loss_fn returned a loss without its items, so micro-batches are weighed by their samples. But they differ in "
        f"size ({what}), and only a mean over samples is exact then. Return what the loss is a mean over: `return "
        "loss, items` (the number of samples, if it is that), or several terms with counts= (told once)."
    )


def labels_on_host(batch: Any) -> list[tuple[int, int]]:
    """How many labels each tensor of labels in the host's memory has: all, and those after the first position."""
    found = [tuple(_numbers_of(labels).tolist()) for _, labels in _labels_in(batch, ()) if labels.is_cpu]
    return [(every, predicted) for every, predicted in found]


def _numbers_of(labels: Tensor) -> Tensor:
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


# ---------------------------------------------------------------------------------------------- in a loop


class EqualWeights(Check):
    """Compares the sizes of the micro-batches of a window. `_loop` tells it each batch that had no items."""

    name = "equal weights"
    sentence = "Micro-batches of different sizes weigh the same: no items were given, or can be read (a warning)."
    cost = "without items, a look at the shapes of each micro-batch"
    shows = "weigh the same, because backward() got no items"
    program = """
        for batch in acc.batches([torch.ones(4, 2), torch.ones(2, 2)]):
            acc.backward(model(batch).square().sum() / len(batch))
            acc.step()
        """

    def __init__(self) -> None:
        self._first: tuple[Sizes, list[tuple[int, int]]] | None = None  # sizes and labels of the first micro-batch
        self._has_warned = False

    def window_begin(self, engine: Engine) -> None:
        self._first = None

    def note(self, batch: object, unread: str) -> None:
        """Note a micro-batch that had its backward without items, which could not be read because of a node."""
        if self._has_warned:
            return
        sizes, labels = sizes_of(batch), labels_on_host(batch)
        if self._first is None:
            self._first = sizes, labels
        elif (changed := changed_sizes(self._first[0], sizes)) is not None:
            self._warn(changed, "samples", "len(x)", unread)
        elif len(labels) == 1 == len(self._first[1]) and all(map(operator.ne, labels[0], self._first[1][0])):
            self._warn((self._first[1][0][0], labels[0][0]), "labels", "(labels != -100).sum()", unread)

    def _warn(self, sizes: tuple[int, int], what: str, items: str, unread: str) -> None:
        self._has_warned = True
        warn(
            f"micro-batches of {sizes[0]} and of {sizes[1]} {what} weigh the same, because backward() got no items, "
            f"and the loss does not say what it is a mean over ({unread} was not understood): the step is that of a "
            f"mean of means. Pass it, e.g. acc.backward(loss, items={items}), or several terms with counts=; or "
            "items=1, if they are meant to weigh the same (told once)."
        )
