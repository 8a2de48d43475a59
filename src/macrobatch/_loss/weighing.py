"""What a micro-batch weighs: the items that the program gives, or what the graph of its loss says it is a mean over."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._loss.anatomy import Anatomy, anatomy_of, plain_mean
from macrobatch._loss.proportions import Kind, Number, Pair
from macrobatch._loss.reading import NOTHING_KNOWN, Known, Part
from macrobatch._torch.loss_nodes import SUMS, Node, is_sum_of_losses
from macrobatch._torch.tensors import number_on_host, rounding_of
from macrobatch.errors import BatchError, MacrobatchError, UsageError, warn


class Weight(NamedTuple):
    """What a micro-batch weighs."""

    items: Number | None  # None if they were neither given nor read
    pairs: tuple[Pair, ...] = ()
    unread: str | None = None  # the name of the node that was not understood, if there are no items
    node: str = ""  # what was read
    shape: tuple[int, ...] | None = None  # of the tensor whose size the items are, if they are
    scale: Number | None = None  # what makes the loss a mean over these items, if it is divided by another number


def weigh(
    loss: Tensor,
    items: Number | None,
    *,
    is_mean: bool,
    steps: int | None,
    on_host: bool,
    known: Known = NOTHING_KNOWN,
) -> Weight:
    """Read what a loss is a mean over, and compare it with the items given, if there are any.

    `steps`: the micro-batches of a window, if dividing by them is a mistake. `on_host`: read numbers in host memory.
    """
    if is_mean and (part := plain_mean(loss)) is not None:  # most of them
        return _of_mean(part, items, on_host)
    anatomy = anatomy_of(loss, known)
    if not is_mean:
        return Weight(_items_of_sum(anatomy, items, steps, on_host))
    parts, owns, divisors = _as_means(anatomy.parts, items, known, on_host)
    terms = [part for part in parts if not part.leaf_only]  # regularisers are the same in each micro-batch
    sums = [part for part in terms if part.kind == "sum"]
    if sums:
        return _sums(sums, items, loss.grad_fn, is_beside_means=len(sums) < len(terms))
    unread = _unread(anatomy, terms)
    if unread is not None:
        return Weight(items, unread=unread if items is None else None)
    first = terms[0]
    if steps is not None and steps > 1 and steps in anatomy.divisors:
        _refuse_steps(steps, [part for part in terms if not part.is_rest])
    if len(parts) == 1 and not divisors:
        return _of_mean(first, items, on_host, owns[0] if owns else None)
    counts = [_known(part.count, on_host) for part in terms]
    if len(parts) == 1:  # with a pair of equal numbers, only equal numbers are in proportion
        return Weight(counts[0], ((Kind.PARTS, -1, -1), (Kind.PARTS, -counts[0], -divisors[0])), node=first.node)
    if items is None:
        pairs = _pairs(parts, parts, [*counts, *owns, *divisors])
        return Weight(counts[0], pairs, None, first.node, first.shape if first.from_shape else None)
    if len(terms) > 1 and len({(part.node, part.factor) for part in terms}) == 1:
        number = _known(items, on_host)
        if isinstance(number, Tensor) or number == len(terms):
            return Weight(items)  # a loop over samples: what the whole is a mean over, only the program knows
    # With items, only a penalty must be the same in each micro-batch: in mixup, factors are drawn for each.
    pairs = _pairs(parts, [part for part in parts if part.leaf_only], [*counts, *owns])
    return Weight(items, (*pairs, (Kind.ITEMS, items, _divisor(first, counts[0]))))


def _as_means(
    parts: Sequence[Part], items: Number | None, known: Known, on_host: bool
) -> tuple[list[Part], list[Number], list[Number]]:
    """The parts, with the means that divisors have made of sums.

    Also returns the sums' own counts where known divisors replace them; and divisors that only the device can compare
    with these counts.
    """
    found, owns, divisors = [], list[Number](), list[Number]()
    for part in parts:
        own, divisor = part.count, part.quotient
        if divisor is None or part.leaf_only:
            found.append(part)
            continue
        is_known = any(divisor is one for one in known.divisors)
        if is_known:
            owns.append(_known(own, on_host))
        elif items is None:
            _compare(part, divisor, divisors, on_host)
        count: Any = divisor if is_known or items is not None else own
        found.append(part._replace(kind="mean", count=count))
    return found, owns, divisors


def _compare(part: Part, divisor: float | Tensor, divisors: list[Number], on_host: bool) -> None:
    """Raise an error if a sum was divided by another number than its own count. Keep what only the device knows."""
    count, number = _known(part.count, on_host), _known(divisor, on_host)
    if isinstance(count, Tensor) or isinstance(number, Tensor):
        divisors.append(number)
    elif count:  # of no labels at all, the mean is written with clamp(min=1)
        assert part.count is not None
        is_whole = isinstance(count, int) and isinstance(number, int)
        if not math.isclose(count, number, rel_tol=0 if is_whole else rounding_of(part.count)):
            raise other_divisor(f"{number:g}, but sums over {count:g}")


def _of_mean(part: Part, items: Number | None, on_host: bool, own: Number | None = None) -> Weight:
    """What a single mean weighs. `own`: the own count of a sum that a known divisor has made a mean."""
    count = part.count if type(part.count) is int else _known(part.count, on_host)
    factor = part.factor
    if items is not None:
        return Weight(items, ((Kind.ITEMS, items, _divisor(part, count)),))
    pairs: tuple[Pair, ...] = ()  # for an infinite factor, the gradient tells
    if isinstance(factor, Tensor):
        pairs = ((Kind.EXPRESSION, -1, factor),)
    elif math.isfinite(factor):
        pairs = ((Kind.EXPRESSION, -1, _number_of(((part.node, factor),))),)
    if own is not None and (isinstance(own, Tensor) or isinstance(count, Tensor) or own != count):
        return Weight(own, pairs, None, part.node, scale=_ratio(count, own))
    return Weight(count, pairs, None, part.node, part.shape if part.from_shape else None)


def _ratio(count: Number, own: Number) -> Number:
    """How many times its own count a sum was divided by; 1 if it has no items, and no weight."""
    if isinstance(own, Tensor):
        none = own == 0
        return torch.where(none, torch.ones_like(own), count / own.masked_fill(none, 1))
    return count / own if own else 1


def _refuse_steps(steps: int, means: Sequence[Part]) -> None:
    """Raise an error for means that were divided by the number of micro-batches.

    But ``(a + b) / 2`` is the mean of two terms, and ``(3 * a + b) / 4`` a weighted one: their factors add up to 1.
    """
    if len(means) > 1 and (len(means) == steps or math.isclose(sum(part.factor for part in means), 1)):
        return
    raise UsageError(
        f"this loss is a mean that was divided by {steps}, as in a loop that accumulates by hand (/ steps). The "
        "window is divided once, when it closes: leave the division out. (A factor of your own is fine: write "
        f"{1 / steps:g} * loss.)"
    )


def _divisor(part: Part, count: Number) -> Number:
    """What the sum behind a mean was divided by in all, as in ``(l * mask).mean() / mask.mean()``."""
    factor = part.factor
    if not part.divisors or (not isinstance(factor, Tensor) and (not factor or not math.isfinite(factor))):
        return count
    return count / (factor.double() if isinstance(factor, Tensor) else factor)


def items_read(loss: Tensor, *, is_mean: bool) -> float | None:
    """The items that a loss states. The host waits for them. None if it states none."""
    try:
        items = weigh(loss, None, is_mean=is_mean, steps=None, on_host=True).items
    except MacrobatchError:
        return None
    return None if items is None else float(items)


def _unread(anatomy: Anatomy, parts: Sequence[Part]) -> str | None:
    """The name of a node that keeps a loss from being read as a mean; None if it is one, or several added up."""
    if not parts:
        return anatomy.unknown or anatomy.parts[0].node
    for part in anatomy.parts:
        if len(anatomy.parts) > 1 and isinstance(part.factor, Tensor):
            return part.node
    return None


def _pairs(parts: Sequence[Part], fixed: Sequence[Part], counts: Sequence[Number]) -> tuple[Pair, ...]:
    """Counts must keep their proportion, and the `fixed` parts must be the same in each micro-batch.

    `parts`: with those of parameters alone, which have no counts here.
    """
    if not all(math.isfinite(part.factor) for part in parts):
        return ()  # the gradient tells
    expression = Kind.EXPRESSION, -1, _number_of(tuple((part.node, part.factor, *part.slices) for part in fixed))
    if len(counts) == 1:
        return (expression,)
    mixed: Number = 0  # all other counts as one number
    for index, count in enumerate(counts[1:]):
        mixed = mixed + pow(641, index, 1009) * (count.double() if isinstance(count, Tensor) else count)
    return (Kind.PARTS, -counts[0], mixed), expression  # never 1, which would mean equal weights by choice


@functools.lru_cache(maxsize=1024)
def _number_of(expression: tuple[tuple[Any, ...], ...]) -> int:
    """The same number for the same expression, on all ranks."""
    return zlib.crc32(repr(expression).encode())


def _known(count: Number | None, on_host: bool) -> Number:
    """A count as a number if the host has it; as a whole one if it is."""
    assert count is not None, "a mean has a count"
    if not isinstance(count, Tensor) or not on_host or (number := number_on_host(count)) is None:
        return count
    return int(number) if number == number // 1 else float(number)


# ---------------------------------------------------------------------------------------------- sums


def _sums(parts: Sequence[Part], items: Number | None, root: Node, *, is_beside_means: bool = False) -> Weight:
    if items is not None:
        first, is_whole = parts[0], not isinstance(items, Tensor) and items > 1 and items == int(items)
        is_plain_sum = len(parts) == 1 and first.factor == 1 and (first.node not in SUMS or is_sum_of_losses(root))
        if is_plain_sum and is_whole:
            raise BatchError(
                f"this loss is a sum of losses ({first.node}), but was given as a mean over {items} items, so it would "
                'count that many times. Make the Accumulator or MacroStep with reduction="sum", or the loss a mean.'
            )
        return Weight(items, node=parts[0].node)
    if len(parts) == 1 and type(parts[0].count) is int:
        return Weight(1, node=parts[0].node)  # the sum of one number is its mean
    if is_beside_means:
        raise BatchError(
            f"the loss adds a sum ({parts[0].node}) to a mean.",
            "If the sum is a penalty on parameters, the same in each micro-batch, pass items= with each loss. If it is "
            "over samples, divide it by their number, or pass both terms by name with counts=.",
            code="sum beside mean",
        )
    raise BatchError(
        f"this loss is a sum ({parts[0].node}), not a mean over its items.",
        'If the window\'s loss is the mean over all items, make the Accumulator or MacroStep with reduction="sum" and '
        "pass items=, the number that the loss sums over. If it is the sum of these losses, divided by nothing: "
        'reduction="total".',
        code="sum",
    )


def _items_of_sum(anatomy: Anatomy, items: Number | None, steps: int | None, on_host: bool) -> Number:
    """The items of a sum: as given, or its own count if it has one."""
    parts = [part for part in anatomy.parts if not part.leaf_only]
    penalties = [part for part in anatomy.parts if part.leaf_only]
    own = parts[0].count if parts and items is None else items
    number = None if own is None else _known(own, on_host)
    if parts and steps != 1 and isinstance(number, int) and any(part.factor != number for part in penalties):
        warn(
            f"the loss adds a term of parameters alone ({penalties[0].node}) to a sum over items. It counts once in "
            "every micro-batch, so what it weighs depends on how the batch is cut. Multiply it by the items, or make "
            "the loss a mean and leave reduction= out: then it rides along."
        )
    is_mean = len(parts) == 1 and parts[0].kind == "mean"
    if items is not None:
        if is_mean and type(items) is int and items > 1 and _is_mean_over(parts[0], items, on_host):
            raise BatchError(
                f'reduction="sum", but this loss ({parts[0].node}) is a mean over the {items} items given: leave '
                "reduction= out, and it is weighed by them."
            )
        return items
    if len(parts) == 1 and parts[0].kind == "sum" and parts[0].count is not None and parts[0].quotient is None:
        return _known(parts[0].count, on_host)
    node = parts[0].node if parts else anatomy.unknown
    if is_mean:
        raise BatchError(
            f'reduction="sum", but this loss ({node}) is a mean: leave reduction= out, and what it is a mean over is '
            "read from it. (Or pass items=, if it is the sum over one item.)"
        )
    raise BatchError(
        f'reduction="sum" without items: this loss ({node}) does not say how many items it sums over. Pass items=, the '
        'number of them, with each loss; or use reduction="total", if the window\'s loss is the sum of these losses, '
        "divided by nothing."
    )


def _is_mean_over(part: Part, items: int, on_host: bool) -> bool:
    """Whether a part is surely the plain mean over that many items."""
    count = _known(part.count, on_host)
    return not isinstance(part.factor, Tensor) and part.factor == 1 and not isinstance(count, Tensor) and count == items


# ---------------------------------------------------------------------------------------------- errors


def other_divisor(what: str) -> BatchError:
    """A sum that was divided by another number than its own count."""
    return BatchError(
        f"this loss divides a sum over labels by {what}: it is no mean over its own micro-batch.",
        "If it was divided by the count of the whole window, the losses of a window only have to be added up: use "
        'reduction="total", which divides by nothing. If it is a mean over something else, such as samples, pass their '
        "number as items=.",
        code="another divisor",
    )


def out_of_proportion(
    kind: Kind, numbers: tuple[Number, Number] | None, before: tuple[Number, Number] | None, window: int | None = None
) -> BatchError:
    """Numbers that do not keep their proportion in a window. `numbers` and those `before`: of two micro-batches."""
    where = "" if window is None else f" in window {window}; its step was not taken"
    if kind is Kind.ITEMS:
        shown = [f"{_text(items)} for a mean over {_text(count)}" for items, count in filter(None, (before, numbers))]
        return BatchError(
            f"the items given are not in proportion to what the losses are means over{where} "
            f"({', then '.join(shown)}).",
            "Count what the loss averages, after any shift of labels and without ignored ones; or leave items= out, "
            "and it is read from the loss. items=1 in every micro-batch gives all the same weight.",
            code="items out of proportion",
        )
    if kind is Kind.EXPRESSION:
        return BatchError(
            f"the losses of a window are not the same expression{where}: their nodes or constant factors differ from "
            "one micro-batch to the next, so no count read from them is right for all.",
            "Pass items= with each loss, or several terms by name with counts=. (A mean times its number of items is a "
            "sum, not a mean.)",
            code="another expression",
        )
    return BatchError(
        f"the loss adds up several means, whose counts do not keep the same proportion{where}; or it divides a sum "
        "over labels by another number than its own count.",
        "Pass several terms by name, with counts=, which gives each its own denominator. For a sum divided by the "
        'count of the whole window, use reduction="total".',
        code="several means",
    )


def _text(number: Number) -> str:
    return "a number on the device" if isinstance(number, Tensor) else f"{number:g}"
