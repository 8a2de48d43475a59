"""What is computed between the model and a reduction: whether it mixes samples, and whether there is data at all."""

from __future__ import annotations

from collections.abc import Callable

from macrobatch._torch.loss_nodes import (
    ALONG_DIMENSIONS,
    ELEMENTWISE,
    EXPANSION,
    JOINTS,
    LEAF,
    LOSSES,
    OF_ALL_ELEMENTS,
    OF_INPUTS,
    SLICES,
    UNDERSTOOD,
    Edge,
    Node,
    is_along_samples,
    is_parameter,
    name_of,
    place_of,
    reduction_of,
    sizes_after,
)

MOST_NODES_BELOW = 32  # below one reduction


def mixing_below(edges: tuple[Edge, ...], *, has_sizes: bool) -> str | None:
    """The name of a node below these edges, down to the model, that mixes samples, or may do so.

    The first dimension is taken for that of the samples. `has_sizes`: what is there is no scalar.
    """
    for node, _ in edges:
        if not has_sizes or (node is not None and name_of(node) in UNDERSTOOD):
            break
    else:
        return None  # the usual case
    may_be_scalar, pending = not has_sizes, [edge for edge in edges if edge[0] is not None]
    for node, output in pending:  # this list grows
        name = name_of(node)
        mixes = _MIXES.get(name)
        if mixes is None:  # the model begins here. A scalar of it depends on all samples
            is_mixed = may_be_scalar and not sizes_after(node, output)
        else:
            is_mixed, sources = mixes(node, output), node.next_functions
            may_be_scalar = may_be_scalar or len(sources) > 1 or name == EXPANSION  # it was broadcast
            pending += [edge for edge in sources if edge[0] is not None and edge not in pending]
        if is_mixed:
            return name
        if len(pending) > MOST_NODES_BELOW:
            return None
    return None


def slices_of_parameters(root: Node) -> tuple[tuple[int, ...], ...] | None:
    """Which slices of parameters are below a node, if there is nothing else: no data, and no constant. Else None."""
    found: list[tuple[int, ...]] = []
    pending: list[Node] = [root]
    for node in pending:  # this list grows
        name = LEAF if node is None else name_of(node)
        if name == LEAF:
            if node is None or not is_parameter(node):
                return None
        elif name not in OF_INPUTS or len(pending) > MOST_NODES_BELOW:
            return None
        else:
            if name in SLICES:
                found.append(place_of(node))
            pending += [source for source, _ in node.next_functions if source is None or source not in pending]
    return tuple(found)


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
