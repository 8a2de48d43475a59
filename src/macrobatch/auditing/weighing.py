"""Weighs all windows of an optimizer, from what was seen of them. Pure functions of plain numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from macrobatch.auditing.constants import choose_constants
from macrobatch.auditing.grouping import Group, groupings, together
from macrobatch.auditing.records import Micro, Term, Window
from macrobatch.auditing.weights import Share, TermWeights, Weighed

Key = tuple[str, int, str]  # the group of losses, the place in the loss, the node


def weigh(windows: Sequence[Sequence[Window]], factors: Sequence[Sequence[Sequence[float | None]]]) -> list[Weighed]:
    """Weigh all windows of one optimizer: for each, one record per rank, and the factors of its micro-batches.

    If items do not count once, some backwards may be the parts of one loss, which are added up.
    """
    world = max((len(ranks) for ranks in windows), default=1)

    def grouped(group: Group) -> list[dict[Key, list[Share]]]:
        return [_shares(ranks, of_ranks, group) for ranks, of_ranks in zip(windows, factors, strict=True)]

    best = _weighed(windows, grouped(together), world)
    is_again = any(micro.is_again for ranks in windows for window in ranks for micro in window.micros)
    if is_again or _are_exact(best):
        return best
    for group, is_sure, is_sure_if_divided in groupings(windows):
        shares = grouped(group)
        if not _are_several_losses(shares):
            continue
        found = _weighed(windows, shares, world)
        is_each_single = all(len(term.shares) == len(one.windows) for one in found for term in one.terms)
        is_divided = is_each_single and _is_divided_by_backwards(found)
        if not _are_exact(found):
            best = best if is_each_single else found
        elif not is_divided or is_sure_if_divided or is_sure:
            for one in found:
                one.has_parts = True
            if not is_sure or (is_divided and not is_sure_if_divided):
                found[0].unknown.append(_doubt(windows))
            return found
    return best


def _doubt(windows: Sequence[Sequence[Window]]) -> str:
    lines = {micro.place for ranks in windows for window in ranks for micro in window.micros}
    return (
        f"the backwards at {', '.join(sorted(lines))} are added up, and their losses are alike: right if they are "
        "parts of one loss, wrong if each is a micro-batch"
    )


def _is_divided_by_backwards(weighed: list[Weighed]) -> bool:
    """Whether the losses are divided by the number of all backwards of the window, as micro-batches are."""
    for one in weighed:
        count = sum(len(term.shares) for term in one.terms)
        for term in one.terms:
            divisors = {*(divisor for share in term.shares for divisor in share.divisors), 1 / (term.own or 1.0)}
            if count > 1 and any(abs(divisor - count) < 1e-3 * count for divisor in divisors):
                return True
    return False


def _are_exact(weighed: list[Weighed]) -> bool:
    return all(term.is_exact(one.tolerance) for one in weighed for term in one.terms)


def _are_several_losses(windows: list[dict[Key, list[Share]]]) -> bool:
    """Whether there are several losses, and each window has as many backwards of each.

    A loop that runs its last backward in another line, outside of `no_sync`, has not.
    """
    for shares in windows:
        counts: dict[tuple[int, str], set[int]] = defaultdict(set)
        for (_, index, node), found in shares.items():
            counts[index, node].add(len(found))
        if any(len(found) > 1 for found in counts.values()):
            return False
    return any(len({group for group, _, _ in shares}) > 1 for shares in windows)


def _shares(ranks: Sequence[Window], factors: Sequence[Sequence[float | None]], group: Group) -> dict[Key, list[Share]]:
    """The terms of all micro-batches of a window, by what they are a term of."""
    found: dict[Key, list[Share]] = defaultdict(list)
    for rank, (window, of_rank) in enumerate(zip(ranks, factors, strict=True)):
        cleared: list[tuple[Micro, float | None]] = [(micro, 0.0) for micro in window.left_out]
        for micro, factor in [*cleared, *zip(window.micros, of_rank, strict=True)]:
            for index, term in enumerate(micro.terms):
                share = _share(term, rank, micro, math.nan if factor is None else factor)
                found[group(micro), index, term.node].append(share)
    return found


def _share(term: Term, rank: int, micro: Micro, factor: float) -> Share:
    is_counted = not term.is_regulariser
    return Share(
        rank=rank,
        place=micro.place,
        kind=term.kind if is_counted else "mean",
        count=term.count if is_counted else 1.0,
        multiplier=term.multiplier,
        written=term.written,
        constants=micro.constants,
        scale=micro.loss_scale,
        factor=factor,
        divisors=term.divisors,
        samples=term.samples,
        is_regulariser=term.is_regulariser,
    )


# ---------------------------------------------------------------------------------------------- what is unknown


def _weighed(
    windows: Sequence[Sequence[Window]], shares: Sequence[dict[Key, list[Share]]], world: int
) -> list[Weighed]:
    names = _names(list(dict.fromkeys(key for found in shares for key in found)))
    found = []
    for ranks, of_keys in zip(windows, shares, strict=True):
        counts = [len(window.micros) + len(window.left_out) for window in ranks]
        one = Weighed(windows=list(ranks), unknown=_unknown(ranks))
        one.terms = [TermWeights(name=names[key], shares=of_keys[key]) for key in of_keys]
        one.is_single = counts == [1] and world == 1
        if not one.is_single:
            one.unknown += [said for term in one.terms if (said := _unknown_term(term)) is not None]
            one.terms = [term for term in one.terms if _unknown_term(term) is None]
        found.append(one)
    if found and all(one.is_single for one in found):
        for one in found:
            _weigh_single(one)
        return found
    for one in found:
        is_unread = any(micro.unknown for window in one.windows for micro in (*window.micros, *window.left_out))
        if is_unread or any(math.isnan(share.factor) for term in one.terms for share in term.shares):
            one.terms = []  # the number of its items is not known
    choose_constants(found, world)
    return found


def _unknown(ranks: Sequence[Window]) -> list[str]:
    """What was not seen of a window."""
    is_single = len(ranks) == 1 and len(ranks[0].micros) == 1 and not ranks[0].left_out
    found = [problem for window in ranks for problem in window.problems]
    for window in ranks:
        for micro in window.micros:
            if micro.unknown is not None and not is_single:
                found.append(f"the loss at {micro.place} ends in {micro.unknown}")
            if micro.factor is None and not window.problems:
                found.append(f"what became of the gradient from {micro.place} is not known")
    return list(dict.fromkeys(found))


def _unknown_term(term: TermWeights) -> str | None:
    """Why the weights of a term cannot be known."""
    parts = {share.part for share in term.shares}
    each = f"{parts.pop():.6g}" if len(parts) == 1 else "different factors"
    if any(share.kind == "unknown" for share in term.shares):
        return (
            f"a term of the loss ends in {term.name}, which is not understood; it is multiplied by {each} in each of "
            f"{len(term.shares)} micro-batches"
        )
    if any(share.count is None for share in term.shares):
        return (
            f"{term.name} does not state how many items it has: it is divided by a number that only the program knows"
        )
    return None


def _weigh_single(one: Weighed) -> None:
    """A step after one backward of one process: its loss is that of the whole batch, whatever it is."""
    for term in one.terms:
        term.weights, term.scale = [1.0] * len(term.shares), 1.0
        share = term.shares[0]
        term.own = share.part if share.part else 1.0


def _names(keys: list[Key]) -> dict[Key, str]:
    """A name for each term, after the function that made its node."""
    plain = {key: _short(key[2]) for key in keys}
    repeated = {name for name in plain.values() if list(plain.values()).count(name) > 1}
    numbers: dict[str, Iterator[int]] = {name: itertools.count(1) for name in repeated}
    return {key: f"{name} {next(numbers[name])}" if name in repeated else name for key, name in plain.items()}


def _short(node: str) -> str:
    """The function that made a node: "mse_loss" for "MseLossBackward0"."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", node)).lower()
    return "cross_entropy" if name.startswith("nll_loss") else name
