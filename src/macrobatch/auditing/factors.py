"""What became of each gradient between its backward and the step: exchanged by ranks, divided or clipped by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from macrobatch.auditing import explaining
from macrobatch.auditing.records import Window

Factors = list[list[list[float | None]]]  # by window, rank and micro-batch


def factors_of(windows: Sequence[Sequence[Window]]) -> Factors:
    """The factor of every micro-batch, and problems in the windows where it is not known.

    A hand-written clipping before the step is left out, as the clipping of torch is: it is not of the accumulation.
    """
    clipped = _clipped_by_hand([window for ranks in windows for window in ranks[:1]])
    found: Factors = []
    for ranks in windows:
        exchanged = _exchanged(ranks)
        found.append([])
        for window, of_rank in zip(ranks, exchanged, strict=True):
            hand = 1.0 if window.divided is None or window.number in clipped else window.divided
            found[-1].append([None if f is None else f * hand for f in of_rank])
    return found


def _clipped_by_hand(windows: Sequence[Window]) -> set[int]:
    """The windows that were surely clipped: by different factors, to the same norm."""
    norms = {w.number: (w.norm, w.divided) for w in windows if w.norm and w.divided is not None and w.divided < 1}
    if len(norms) < 2:
        return set()
    largest = max(norm for norm, _ in norms.values())
    same = {number: d for number, (norm, d) in norms.items() if norm > largest * (1 - 1e-4)}
    divided = list(same.values())
    is_steady = max(divided) - min(divided) <= 1e-6 * max(divided)
    return set(same) if len(same) > 1 and not is_steady else set()


def _exchanged(ranks: Sequence[Window]) -> list[list[float | None]]:
    """The factors of all ranks, with what their exchanges multiplied gradients by."""
    plain = [[micro.factor for micro in window.micros] for window in ranks]
    if ranks[0].is_unsynchronised:  # in the gradient of the first rank, only its own samples count
        return [[factor if rank == 0 else 0.0 for factor in found] for rank, found in enumerate(plain)]
    counts = {len(window.exchanges) for window in ranks}
    if len(ranks) == 1 and counts == {0}:
        return plain
    if len(counts) != 1:
        _add_problem(ranks, "ranks exchanged gradients at different times")
        return plain
    world = len(ranks)
    multipliers = []
    for number in range(counts.pop()):
        multiplier = _multiplier([window.exchanges[number] for window in ranks], ranks)
        if multiplier is None:
            _add_problem(ranks, "ranks exchanged gradients, but not as a sum or a mean of what all ranks had")
            return plain
        multipliers.append(multiplier)
    for window, factors in zip(ranks, plain, strict=True):
        for index, micro in enumerate(window.micros):
            factor = factors[index]
            if micro.exchange is None or factor is None:
                continue
            factor *= multipliers[micro.exchange]
            # A later exchange of plain gradients sums what is the same on all ranks already.
            for later in [] if window.is_sharded else multipliers[micro.exchange + 1 :]:
                factor *= later * world
            factors[index] = factor
    return plain


def _multiplier(exchanges: Sequence[object], ranks: Sequence[Window]) -> float | None:
    """What the sum over ranks was multiplied by."""
    before = [torch.tensor(exchange.before, dtype=torch.float64) for exchange in exchanges]  # type: ignore[attr-defined]
    after = [torch.tensor(exchange.after, dtype=torch.float64) for exchange in exchanges]  # type: ignore[attr-defined]
    if len({tuple(one.shape) for one in [*before, *after]}) != 1:
        return None
    rounding = max(window.rounding for window in ranks)
    if ranks[0].is_sharded:
        joined = torch.stack(after).sum(0)
    elif all(explaining.is_close(after[0], other, rounding) for other in after):
        joined = after[0]
    else:
        return None
    # Terms of different signs cancel, and leave the rounding of larger ones.
    return explaining.ratio_of(torch.stack(before).sum(0), joined, 64 * rounding)


def _add_problem(ranks: Sequence[Window], problem: str) -> None:
    if problem not in ranks[0].problems:
        ranks[0].problems.append(problem)
