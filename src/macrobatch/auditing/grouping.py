"""Which backwards of a window are micro-batches of one loss, and which are losses that are added up.

Two losses differ for sure if their graphs do: other functions, other signs, other parameters. Otherwise two backwards
may be two losses (the real and the made samples of a GAN), or two micro-batches of one. Their lines and targets show
that they may be two losses; only lines that compare with constants of their own show it for sure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from macrobatch.auditing.records import Micro, Window

Group = Callable[[Micro], str]


def together(_: Micro) -> str:
    """All backwards are micro-batches of one loss."""
    return ""


def groupings(windows: Sequence[Sequence[Window]]) -> Iterator[tuple[Group, bool, bool]]:
    """Finer and finer ways to tell losses apart, and whether they differ for sure.

    The last entry: whether they do even if each is divided by the number of backwards.
    """
    micros = [micro for ranks in windows for window in ranks for micro in (*window.left_out, *window.micros)]
    lines = {_line(micro) for micro in micros}
    by_line, by_target = len(lines) > 1, _targets(micros)

    def by_graph(micro: Micro) -> str:
        return f"{micro.expression} {micro.reach}"

    yield by_graph, not _may_be_routed(micros), False
    if by_line:
        are_constants = _compare_with_constants(micros, by_graph)
        yield lambda micro: f"{by_graph(micro)} {_line(micro)}", are_constants, are_constants
    yield lambda micro: f"{by_graph(micro)} {_line(micro)} {by_target(micro)}", False, False
    if not by_line and any(window.is_adversary for ranks in windows for window in ranks):
        turns = {id(m): turn for ranks in windows for w in ranks for turn, m in enumerate((*w.left_out, *w.micros))}
        yield lambda micro: f"{by_graph(micro)} {turns[id(micro)]}", False, False


def _line(micro: Micro) -> str:
    return f"{micro.place} {micro.caller}"


def _may_be_routed(micros: list[Micro]) -> bool:
    """Whether one loss may reach other parameters in each micro-batch, as one of experts does.

    Heads of several tasks have lines of their own, or targets in common.
    """
    reaches: dict[str, set[str]] = defaultdict(set)
    repeats: dict[str, set[int]] = defaultdict(set)
    for micro in micros:
        loss = f"{micro.expression} {_line(micro)}"
        reaches[loss].add(micro.reach)
        repeats[loss].add(micro.repeats)
    return any(len(found) > len(repeats[loss]) for loss, found in reaches.items())


def _compare_with_constants(micros: list[Micro], by_graph: Group) -> bool:
    """Whether all backwards of a line have the same constant as their target, and those of other lines others."""
    constants: dict[tuple[str, str], set[float | None]] = defaultdict(set)
    for micro in micros:
        low, high = micro.target or (None, 0.0)
        constants[by_graph(micro), _line(micro)].add(low if low == high else None)
    if any(None in found or len(found) > 1 for found in constants.values()):
        return False
    return len({(graph, *found) for (graph, _), found in constants.items()}) == len(constants)


def _targets(micros: list[Micro]) -> Group:
    """A number for targets whose ranges have no common part, and for the turn of those that are used again."""
    ends: list[float] = []  # the largest element of each group of ranges that overlap
    for low, high in sorted(micro.target for micro in micros if micro.target is not None):
        if ends and low <= ends[-1]:
            ends[-1] = max(ends[-1], high)
        else:
            ends.append(high)

    def group(micro: Micro) -> str:
        number = -1 if micro.target is None else sum(end < micro.target[0] for end in ends)
        return f"{number} {micro.repeats}"

    return group
