"""What changed gradients from one look to the next: one factor for all, or a combination of earlier gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from macrobatch.auditing.samples import ELEMENTS

TINY = 1e-30
ROUNDINGS = 8  # of one element that was multiplied a few times
EXACT = 1e-5  # of sums over many elements


def ratio_of(before: Tensor, after: Tensor, rounding: float) -> float | None:
    """The factor that all gradients were multiplied by; None if there is no such factor.

    >>> rows = torch.tensor([[1.0, 2, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    >>> ratio_of(rows, rows / 4, 1e-7)
    0.25
    """
    if not bool(before.isfinite().all() and after.isfinite().all()):
        return None
    elements, now = before[:, :ELEMENTS], after[:, :ELEMENTS]
    sizes = elements.abs().amax(1, keepdim=True)
    unit = elements / sizes.clamp(min=TINY)  # each leaf counts the same
    total = float((unit * unit).sum())
    if total == 0:
        sums, now_sums = before[:, ELEMENTS], after[:, ELEMENTS]
        if bool(now.any()) or float((sums * sums).sum()) == 0:
            return None
        ratio = float((sums * now_sums).sum() / (sums * sums).sum())
    else:
        ratio = float((unit * now / sizes.clamp(min=TINY)).sum() / total)
    return _snapped(ratio, rounding) if is_close(before * ratio, after, rounding) else None


def _snapped(ratio: float, rounding: float) -> float:
    """1 if it is that up to rounding."""
    return 1.0 if abs(ratio - 1) <= rounding else ratio


def is_close(expected: Tensor, found: Tensor, rounding: float = EXACT / ROUNDINGS) -> bool:
    """Whether all elements agree, relative to the largest one of their leaf."""
    bound = ROUNDINGS * rounding
    elements = (expected - found)[:, :ELEMENTS].abs()
    sizes = torch.maximum(expected[:, :ELEMENTS].abs().amax(1), found[:, :ELEMENTS].abs().amax(1))
    if bool((elements.amax(1) > bound * sizes + TINY).any()):
        return False
    sums = (expected - found)[:, ELEMENTS].abs()
    is_summed = sizes == 0  # only there, sums are all that is known
    return not bool((is_summed & (sums > 1e-3 * found[:, ELEMENTS].abs() + TINY)).any())


def combination(
    before: Tensor, after: Tensor, kept: Sequence[Tensor], rounding: float
) -> tuple[float, list[float]] | None:
    """Coefficients of the gradient before and of earlier ones that give the gradient after; None if none do.

    Equal coefficients of all are preferred, as in a sum or a mean: then few numbers are unknown.
    """
    if not kept:
        return None
    has_before = bool(before.any())
    together = torch.stack(list(kept)).sum(0)
    for earlier, count in (([together], len(kept)), ([kept[-1]], 1), (list(kept), 0)):
        found = _solve([before, *earlier] if has_before else earlier, after, rounding)
        if found is None:
            continue
        own, rest = (found[0], found[1:]) if has_before else (1.0, found)
        if count:
            rest = [0.0] * (len(kept) - count) + rest * count
        return own, rest
    return None


def _solve(vectors: Sequence[Tensor], target: Tensor, rounding: float) -> list[float] | None:
    """The coefficients, if they are determined and leave nothing."""
    sizes = torch.stack([*vectors, target]).abs().amax((0, 2)).clamp(min=TINY)[:, None]
    columns = torch.stack([(vector / sizes)[:, :ELEMENTS].flatten() for vector in vectors], 1)
    goal = (target / sizes)[:, :ELEMENTS].flatten()
    if not bool(columns.isfinite().all() and goal.isfinite().all()):
        return None
    scale = columns.norm(dim=0).clamp(min=TINY)
    inverse = torch.linalg.pinv(columns / scale, rtol=1e-9)
    if len(vectors) > 1:
        values = torch.linalg.svdvals(columns / scale)
        if len(columns) < len(vectors) or float(values.min()) < 1e-6 * float(values.max()):
            return None
    coefficients = (inverse @ goal) / scale
    left = (columns @ coefficients - goal).abs().max()
    if float(left) > max(64 * rounding, 1e-9) * float(goal.abs().max().clamp(min=TINY)):
        return None
    return [round_off(float(c), rounding) for c in coefficients]


def round_off(number: float, rounding: float) -> float:
    """0 and 1 if it is that up to rounding."""
    for whole in (0.0, 1.0):
        if abs(number - whole) <= 64 * rounding:
            return whole
    return number
