"""What is computed between the model and a reduction: whether it mixes samples, and whether there is data at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from macrobatch._torch.loss_nodes import (
    ALONG_DIMENSIONS,
    ELEMENTWISE,
    EXPANSION,
    JOINTS,
    LEAF,
    LOSSES,
    OF_ALL_ELEMENTS,
    UNDERSTOOD,
    WITH_DATA,
    Edge,
    Node,
    is_along_samples,
    is_parameter,
    name_of,
    reduction_of,
    sizes_after,
)

MOST_NODES_BELOW = 32  # below one reduction


class Below(NamedTuple):
    """What is computed between the model and a reduction."""

    mixing: str | None  # the name of a node that mixes samples, or may do so
    leaf_only: bool  # whether there are parameters only, and no data


_MODEL_ONLY = Below(None, leaf_only=False)


def look_below(edges: tuple[Edge, ...], *, has_sizes: bool) -> Below:
    """Look at the nodes below these edges, down to the model. `has_sizes`: what is there is no scalar.

    The first dimension is taken for that of the samples.
    """
    for node, _ in edges:
        if not has_sizes or (node is not None and name_of(node) in UNDERSTOOD):
            break
    else:
        return _MODEL_ONLY  # the usual case
    mixing, leaf_only, may_be_scalar, pending = None, True, not has_sizes, list(edges)
    for node, output in pending:  # this list grows
        if node is None:
            leaf_only = False
            continue
        name = name_of(node)
        mixes = _MIXES.get(name)
        if mixes is None:  # the model begins here. A scalar of it depends on all samples
            leaf_only = False
            is_mixed = may_be_scalar and not sizes_after(node, output)
        elif name == LEAF:
            leaf_only, is_mixed = leaf_only and is_parameter(node), False
        else:
            leaf_only, is_mixed = leaf_only and name not in WITH_DATA, mixes(node, output)
            sources = node.next_functions
            may_be_scalar = may_be_scalar or len(sources) > 1 or name == EXPANSION  # it was broadcast
            pending += [edge for edge in sources if edge not in pending]
        if is_mixed and mixing is None:
            mixing = name
        if len(pending) > MOST_NODES_BELOW:
            return Below(mixing, leaf_only=False)
    return Below(mixing, leaf_only)


# Whether a node mixes samples, by its name: one for each of `UNDERSTOOD`. All others are nodes of the model.
_MIXES: dict[str, Callable[[Node, int], bool]] = {
    name: mixes
    for names, mixes in (
        ({LEAF} | ELEMENTWISE, lambda _node, _output: False),
        (LOSSES, lambda node, _output: reduction_of(node) != 0),
        (OF_ALL_ELEMENTS, lambda _node, _output: True),
        (ALONG_DIMENSIONS, lambda node, _output: is_along_samples(node)),
        # A vector of scalars, each of which may be a mean of its own.
        (JOINTS, lambda node, output: len(sizes_after(node, output)) < 2),
    )
    for name in names
}
