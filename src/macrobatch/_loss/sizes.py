"""The numbers of samples in micro-batches, as far as the shapes of their tensors show them."""

from __future__ import annotations

from macrobatch._cut.trees import leaves

Sizes = dict[str, int]  # by the path of a tensor; "batch" for a batch that is a list


def sizes_of(batch: object) -> Sizes:
    """The first dimension of each tensor or array, and the length of a batch that is a list."""
    shapes = ((path, getattr(leaf, "shape", ())) for path, leaf in leaves(batch, "batch"))
    sizes = {path: shape[0] for path, shape in shapes if isinstance(shape, tuple) and shape}
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
