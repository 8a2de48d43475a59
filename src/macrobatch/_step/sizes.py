"""Notices micro-batches of different sizes that weigh the same, because nobody told their items."""

from __future__ import annotations

from macrobatch._cut.trees import leaves
from macrobatch.errors import warn


class SizeWatch:
    """Warns once, when a window without items has micro-batches of different sizes."""

    def __init__(self) -> None:
        self._first: int | None = None  # how many samples the first of the window has that tells
        self._has_warned = False

    def begin_window(self) -> None:
        """The next micro-batch is the first of a window."""
        self._first = None

    def note(self, batch: object) -> None:
        """A micro-batch has had its backward, without items."""
        size = None if self._has_warned else _size_of(batch)
        if size is None:
            return
        if self._first is None:
            self._first = size
        elif size != self._first:
            self._has_warned = True
            warn(
                f"micro-batches of {self._first} and of {size} samples weigh the same, because backward() got no "
                "items: the step is that of a mean of means. Pass what the loss is a mean over, e.g. "
                "acc.backward(loss, items=len(x)); or items=1, if they are meant to weigh the same (told once)."
            )


def _size_of(batch: object) -> int | None:
    """The first dimension of all its tensors; None where they differ, as they may belong to other things than samples.

    >>> from torch import ones
    >>> _size_of({"x": ones(3, 2), "y": ones(3), "z": ones(())}), _size_of((ones(3), ones(2))), _size_of("text")
    (3, None, None)
    """
    shapes = (getattr(leaf, "shape", ()) for _, leaf in leaves(batch, "batch"))  # of tensors, and of arrays
    sizes = {shape[0] for shape in shapes if isinstance(shape, tuple) and shape}
    return sizes.pop() if len(sizes) == 1 else None
