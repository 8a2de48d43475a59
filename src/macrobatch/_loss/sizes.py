"""The numbers of samples in micro-batches, as far as the shapes of their tensors show them."""

from __future__ import annotations

from typing import Any

from macrobatch._cut.trees import leaves
from macrobatch.errors import BatchError

Sizes = dict[str, int]  # by the path of a tensor; "batch" for a batch that is a list
Shapes = dict[str, tuple[int, ...]]  # by the path of a tensor


def shapes_of(batch: Any) -> list[Any] | None:
    """The shapes of the tensors in a flat batch; None if it is not one. If they did not change, no size did."""
    kind = type(batch)
    values = batch if kind is tuple or kind is list else batch.values() if kind is dict else (batch,)
    try:
        return [value.shape for value in values]
    except AttributeError:
        return None


def shapes_by_path(batch: object) -> Shapes:
    """The shape of each tensor or array that has dimensions."""
    shapes = ((path, getattr(leaf, "shape", ())) for path, leaf in leaves(batch, "batch"))
    return {path: tuple(shape) for path, shape in shapes if isinstance(shape, tuple) and shape}


def sizes_of(batch: object) -> Sizes:
    """The first dimension of each tensor or array, and the length of a batch that is a list."""
    sizes = {path: shape[0] for path, shape in shapes_by_path(batch).items()}
    return sizes | ({"batch": len(batch)} if isinstance(batch, list) else {})


def changed_sizes(before: Sizes, now: Sizes) -> tuple[int, int] | None:
    """The numbers of samples of two micro-batches, if they surely differ; None otherwise.

    Lists of samples are a sure sign, and so are several tensors, or all, that changed from one size to another. One
    tensor of several may hold other things than samples, such as the nodes of a graph.

    >>> changed_sizes({"x": 4, "y": 4, "weights": 10}, {"x": 2, "y": 2, "weights": 10})
    (4, 2)
    >>> changed_sizes({"nodes": 9, "y": 4}, {"nodes": 7, "y": 4})
    """
    if before.get("batch", 0) != now.get("batch", 0):
        return before.get("batch", 0), now.get("batch", 0)
    common = [(before[path], now[path]) for path in before.keys() & now.keys() - {"batch"}]
    changed = [pair for pair in common if pair[0] != pair[1]]
    is_certain = len(set(changed)) == 1 and (len(changed) > 1 or changed == common)
    return changed[0] if is_certain else None


class FirstSizes:
    """The sizes of the first micro-batch of a window whose count comes from a shape, to compare the others with it."""

    __slots__ = ("_count", "_shapes", "_sizes")

    def __init__(self) -> None:
        self._count: tuple[object, tuple[int, ...]] | None = None

    def compare(self, node: str, count: object, shape: tuple[int, ...], batch: object, samples: int | None) -> None:
        """Raise an error if a count from a shape, and that shape, stay the same though the number of samples changes.

        `samples`: their number. None: the batch shows it.
        """
        shapes = shapes_of(batch) if samples is None else [samples]
        if self._count is None:
            self._count, self._shapes, self._sizes = (count, shape), shapes, _sizes_of(batch, samples)
        elif self._count != (count, shape) or (shapes is not None and shapes == self._shapes):
            return
        elif (changed := changed_sizes(self._sizes, _sizes_of(batch, samples))) is not None:
            raise BatchError(
                f"the loss ({node}) is a mean over {count} elements in each micro-batch, but one has {changed[0]} "
                f"samples and another {changed[1]}: what it is a mean over cannot be read.",
                "Pass the number of items with each loss, items=.",
                code="steady count",
            )


def _sizes_of(batch: object, samples: int | None) -> Sizes:
    return sizes_of(batch) if samples is None else {"batch": samples}
