"""Warn if micro-batches of different sizes have the same weight, because no items were passed."""

from __future__ import annotations

import operator

from macrobatch._cut.label_watch import labels_on_host
from macrobatch._cut.trees import leaves
from macrobatch.errors import warn

Sizes = dict[str, int]  # by the path of a tensor; "batch" for a batch that is a list


class SizeWatch:
    """Warns once, when a window without items has micro-batches of different sizes."""

    def __init__(self) -> None:
        self._first: tuple[Sizes, list[tuple[int, int]]] | None = None  # sizes and labels of the first micro-batch
        self._has_warned = False

    def begin_window(self) -> None:
        """Begin a window: the next micro-batch is its first one."""
        self._first = None

    def note(self, batch: object) -> None:
        """Note a micro-batch that had its backward without items."""
        if self._has_warned:
            return
        sizes, labels = _sizes_of(batch), labels_on_host(batch)
        if self._first is None:
            self._first = sizes, labels
        elif (changed := _changed(self._first[0], sizes)) is not None:
            self._warn(changed, "samples", "len(x)")
        elif len(labels) == 1 == len(self._first[1]) and all(map(operator.ne, labels[0], self._first[1][0])):
            self._warn((self._first[1][0][0], labels[0][0]), "labels", "(labels != -100).sum()")

    def _warn(self, sizes: tuple[int, int], what: str, items: str) -> None:
        self._has_warned = True
        warn(
            f"micro-batches of {sizes[0]} and of {sizes[1]} {what} weigh the same, because backward() got no items: "
            "the step is that of a mean of means. Pass what the loss is a mean over, e.g. "
            f"acc.backward(loss, items={items}); or items=1, if they are meant to weigh the same (told once)."
        )


def _sizes_of(batch: object) -> Sizes:
    """The first dimension of each tensor or array, and the length of a batch that is a list."""
    shapes = ((path, getattr(leaf, "shape", ())) for path, leaf in leaves(batch, "batch"))
    sizes = {path: shape[0] for path, shape in shapes if isinstance(shape, tuple) and shape}
    return sizes | ({"batch": len(batch)} if isinstance(batch, list) else {})


def _changed(before: Sizes, now: Sizes) -> tuple[int, int] | None:
    """The numbers of samples of two micro-batches, if they surely differ; None otherwise.

    Lists of samples are a sure sign, and so are several tensors, or all, that changed from one size to another. One
    tensor of several may hold other things than samples, such as the nodes of a graph.

    >>> _changed({"x": 4, "y": 4, "weights": 10}, {"x": 2, "y": 2, "weights": 10})
    (4, 2)
    >>> _changed({"nodes": 9, "y": 4}, {"nodes": 7, "y": 4})
    """
    if before.get("batch", 0) != now.get("batch", 0):
        return before.get("batch", 0), now.get("batch", 0)
    common = [(before[path], now[path]) for path in before.keys() & now.keys() - {"batch"}]
    changed = [pair for pair in common if pair[0] != pair[1]]
    is_certain = len(set(changed)) == 1 and (len(changed) > 1 or changed == common)
    return changed[0] if is_certain else None
