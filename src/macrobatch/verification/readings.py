"""What the losses of a step say about themselves: how much each micro-batch weighs, and what it is a mean over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from macrobatch._loss.anatomy import Anatomy, anatomy_of
from macrobatch._loss.reading import Part
from macrobatch.verification.catalogue import number_list

if TYPE_CHECKING:
    from macrobatch.verification.comparison import Comparison


class Reading(NamedTuple):
    """What the loss of one backward says.

    Attributes:
        backward: the number of the backward.
        items: the items of its mean, or of its sum.
        weight: what that mean is multiplied by, or what a sum is divided by, with its sign.
        divisors: the constants that divide it.
        quotient: what a sum that knows its own count was divided by.
    """

    backward: int
    items: float
    weight: float
    divisors: tuple[float, ...]
    quotient: float | None


def read(backward: int, losses: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> Reading | None:
    """What the loss of a backward says, or None if it has several terms or cannot be read. The host waits for it."""
    if len(losses) != 1 or losses[0].numel() != 1 or losses[0].is_meta:
        return None
    anatomy: Anatomy = anatomy_of(losses[0])
    parts: list[Part] = [part for part in anatomy.parts if not part.leaf_only]
    if len(parts) != 1 or parts[0].count is None or (parts[0].kind == "sum" and anatomy.quotient is None):
        return None
    (part,) = parts
    quotient = None if anatomy.quotient is None else float(anatomy.quotient)
    items = float(part.count)  # type: ignore[arg-type]
    weight = float(part.factor) * (1.0 if seeds[0] is None else float(seeds[0]))
    if quotient is not None:  # as a mean over its own count
        weight *= items / (quotient or 1.0)
    return Reading(backward, items, weight, part.divisors, quotient)


def unequal_means(window: Comparison) -> str | None:
    """Evidence that every micro-batch, of a rank or of all, weighs the same, but they have different items."""
    for found in [*window.observed.readings, _readings(window)]:
        if len(found) < 2 or not _is_same([one.weight for one in found]) or _is_same([one.items for one in found]):
            continue
        counts = number_list([one.items for one in found])
        return f"the losses of the window are means over {counts} items, and each of these means weighs the same."
    return None


def repeated_division(window: Comparison, factor: float) -> str | None:
    """Evidence that each loss is divided twice by one number, which explains the factor of the gradient."""
    found = _readings(window)
    for number in found[0].divisors if found else ():
        if number > 1 and all(one.divisors.count(number) > 1 for one in found) and states(window, factor):
            return f"each loss is divided by {number:g} and again by {number:g}."
    return None


def states(window: Comparison, factor: float) -> bool:
    """Whether the losses themselves say that the gradient, a mean over the ranks, has this factor."""
    weight = sum(one.weight for one in _readings(window)) / (len(window.observed.readings) or 1)
    return bool(weight) and bool(factor) and abs(weight / factor - 1) < 1e-3


def counts_before_shift(window: Comparison) -> bool:
    """Whether each loss is a sum that was divided by another number than its own labels."""
    return bool(found := _readings(window)) and all(one.quotient not in (None, one.items) for one in found)


def _readings(window: Comparison) -> list[Reading]:
    """Those of all ranks."""
    return [one for own in window.observed.readings for one in own]


def _is_same(numbers: Sequence[float]) -> bool:
    return max(numbers) - min(numbers) <= 1e-6 * max(map(abs, numbers))
