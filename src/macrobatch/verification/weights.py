"""How a step weighed its micro-batches, and what it divided by.

Most mistakes of accumulation are weights: the gradient is a sum over the micro-batches, but one in which they count too
much or too little. So the gradients that known mistakes would give are computed from the very micro-batches that the
step used (families), each up to a factor, and the first that fits is named; then its factor is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from macrobatch._cut.padding import IGNORED
from macrobatch.verification.aims import PADDED, sequences
from macrobatch.verification.clipping import shares_left, touched_between
from macrobatch.verification.comparison import Case, Compared
from macrobatch.verification.gradient import Gradient, projection
from macrobatch.verification.report import Cause

HALF = (torch.bfloat16, torch.float16)


class Family(NamedTuple):
    """A known way to weigh micro-batches; `gradient` has weights that add up to one."""

    name: str | None  # None: the right one
    gradient: Gradient
    evidence: str = ""
    cure: str = ""
    has_factor: bool = True  # whether a factor is a mistake of its own, on top of this one


class Fit(NamedTuple):
    """How well a family explains a gradient."""

    family: Family
    factor: float
    rest: float
    left_over: str | None


def causes_of_window(case: Case, window: Compared) -> list[Cause]:
    """The way its micro-batches were weighed, then the factor."""
    fit = _best_fit(case, window)
    if fit is None:
        return [touched_between(case, window) or _unexplained(case, window)]
    causes = []
    if fit.left_over:
        causes.append(left_over(fit.left_over))
    if fit.family.name is not None:
        causes.append(Cause(name=fit.family.name, evidence=fit.family.evidence, cure=fit.family.cure))
    window.own_factor = fit.factor
    if abs(fit.factor - 1) > max(window.bound, 1e-9) and fit.family.has_factor:
        causes.append(_of_a_factor(case, window, fit.factor))
    return causes or [_rounding(window)]


def _best_fit(case: Case, window: Compared) -> Fit | None:
    fits: list[Fit] = []
    families = list(_families(case, window))
    for left_over, found in [(None, window.found), *_without_left_over(case, window)]:
        for family in families:
            factor = found.fit(family.gradient)
            rest = found.distance(family.gradient, factor) / (found.largest or 1.0)
            if factor and rest <= window.tolerance and (left_over is None or abs(factor - 1) <= window.tolerance):
                fits.append(Fit(family, factor, rest, left_over))
    best = min((fit.rest for fit in fits), default=0.0)
    fits = [fit for fit in fits if fit.rest <= 1.2 * best + 0.05 * window.bound]
    # Of a model with a handful of parameters everything fits up to a factor: what needs none is likelier.
    return next((fit for fit in fits if abs(fit.factor - 1) <= window.tolerance), fits[0] if fits else None)


def _without_left_over(case: Case, window: Compared) -> list[tuple[str, Gradient]]:
    """The gradient without what may have been there before the window began."""
    held, before, what = window.window.held, case.seen.before, "what was in .grad when step was called"
    for number, other in enumerate(case.windows[: case.windows.index(window)], start=1):
        if other.window.held & held:
            before, what = other.window.gradients, f"the gradient of window {number}"
    left = Gradient(before, window.found.group).only(held)
    return [(what, window.found.plus(left, -1.0))] if left.largest else []


def _families(case: Case, window: Compared) -> Iterator[Family]:
    yield Family(None, window.right)
    parts, ranks = window.parts, case.big.ranks
    if ranks.largest(float(parts is None)) or not ranks.largest(float(bool(parts))):
        return
    assert parts is not None
    yield from _families_of_samples(case, window, parts)
    held, count, items = window.window.held, len(parts), case.big.items(parts)
    if window.micro_batches > 1:
        yield Family(
            "mean of means",
            case.weighted(parts, [1.0] * count).only(held),
            _unequal(case, window, parts, items),
            "Back-propagate sums and divide once by all items of the window: Accumulator.backward(loss, items=n).",
        )
    if ranks.world > 1:
        yield Family(
            "mean of means",
            case.weighted(parts, _shares(items)).only(held),
            f"every rank counts the same, but their items differ: {sum(items):g} on the first.",
            "Divide by the items of all ranks, and multiply by the number of ranks, which the wrapper divides by.",
        )
    for before, after in _shifted(case, parts):
        if not ranks.largest(len({n / len(part) for n, part in zip(before, parts, strict=True)}) - 1):
            continue  # as many in every sample: it would be weighed by samples
        yield Family(
            "labels counted before the shift",
            case.weighted(parts, before).only(held),
            f"the micro-batches weigh as if they had {_numbers(before)} items; shifted they have {_numbers(after)}.",
            COUNT_SHIFTED,
        )
    yield from _families_of_padding(case, window, parts)
    if window.micro_batches > 1:
        counted = "items" if case.big.counted else "samples"
        yield Family(
            "items that do not fit the loss",
            case.weighted(parts, items).only(held),
            f"the micro-batches weigh as their {counted} say, {_numbers(items)}, but the loss is no mean over those.",
            "Let loss_fn return the loss and what it is a mean over: loss, (labels != -100).sum() after any shift.",
        )
        samples = [float(len(part)) for part in parts]
        yield Family(
            "items that do not fit the loss",
            case.weighted(parts, samples).only(held),
            f"the micro-batches weigh as their samples do, {_numbers(samples)}, but the loss is no mean over those.",
            "Divide by what the loss is a mean over, of the whole window: Accumulator.backward(loss, items=n).",
        )
    yield from _families_of_clipping(case, window, parts, items)
    if count > 1 and ranks.world == 1:
        yield Family(
            "gradients cleared inside the window",
            case.weighted(parts[-1:], [1.0]).only(held),
            f"only the last of {count} micro-batches counts.",
            "Call zero_grad() once a window, after optimizer.step(), not before every backward.",
            has_factor=False,
        )


def _families_of_padding(case: Case, window: Compared, parts: list[list[int]]) -> Iterator[Family]:
    """Where every position counts as an item."""
    positions = _positions(window)
    unequal = len({number / len(part) for number, part in zip(positions, parts, strict=False)}) > 1
    if len(positions) != len(parts):
        positions = [1.0] * len(parts)
    if not case.big.ranks.largest(float(unequal)):
        return
    yield Family(
        PADDED,
        case.weighted(parts, positions).only(window.window.held),
        f"the micro-batches weigh as if they had {_numbers(positions)} items, which is all of their positions, padding "
        "too.",
        COUNT_LABELS,
    )


def _positions(window: Compared) -> list[float]:
    """How many tokens went into each micro-batch, padding too; fewer numbers where that cannot be told."""
    assert window.rows is not None
    sizes = {}
    for call, samples in window.rows.calls:
        tokens = [x for x in call.inputs.values() if x.ndim == 2 and not x.is_floating_point()]
        sizes[frozenset(samples)] = float(tokens[0].numel()) if tokens else None
    found = [sizes[frozenset(part)] for part in window.rows.parts]
    return [number for number in found if number is not None]


def _families_of_clipping(case: Case, window: Compared, parts: list[list[int]], items: list[float]) -> Iterator[Family]:
    """Where the gradient was made smaller in mid-window."""
    left, cause = shares_left(window), touched_between(case, window)
    if case.big.ranks.largest(float(left is None)) or left is None or cause is None:
        return
    for weights in (items, [1.0] * len(parts)):
        shrunk = [weight * share for weight, share in zip(weights, left, strict=True)]
        yield Family(
            cause.name, case.weighted(parts, shrunk).only(window.window.held), cause.evidence, cause.cure, False
        )


def _unequal(case: Case, window: Compared, parts: list[list[int]], items: list[float]) -> str:
    said = f"all {len(parts)} micro-batches count the same, but "
    if case.big.counted:
        return said + f"their items differ: {_numbers(items)}."
    weights = _true_weights(case, window, parts)
    if weights is None:
        return said + "the loss is a mean over items of which they have different numbers."
    return said + f"one big batch weighs them {' '.join(f'{weight:.3f}' for weight in weights)}."


def _true_weights(case: Case, window: Compared, parts: list[list[int]]) -> list[float] | None:
    """How much each micro-batch counts in one big batch: of a few, in one process, that can be solved for."""
    if case.big.ranks.world > 1 or len(parts) > 8:
        return None
    gradients = [case.weighted([part], [1.0]).only(window.window.held) for part in parts]
    return projection(window.right, gradients)


def _families_of_samples(case: Case, window: Compared, parts: list[list[int]]) -> Iterator[Family]:
    """Where the step did not see each sample of the batch once."""
    assert case.big.samples is not None
    if window.samples is not None:
        return
    everyone, used = case.big.samples.count, [sample for part in parts for sample in part]
    left_out, twice = everyone - len(set(used)), len(used) - len(set(used))
    if case.big.ranks.largest(left_out):
        yield Family(
            "samples left out",
            case.right(sorted(set(used))).only(window.window.held),
            f"{left_out} of {everyone} samples reached no backward.",
            "Look for drop_last=True, a loop that ends too early, or a last micro-batch that is skipped.",
        )
    if case.big.ranks.largest(twice) and case.big.ranks.world == 1:
        yield Family(
            "samples used twice",
            case.weighted(parts, case.big.items(parts)).only(window.window.held),
            f"{twice} samples reached more than one backward.",
            "Look for a sampler or a loader that fills up the last micro-batch.",
        )


def _shares(items: list[float]) -> list[float]:
    return [n / (sum(items) or 1.0) for n in items]


def _shifted(case: Case, parts: list[list[int]]) -> Iterator[tuple[list[float], list[float]]]:
    """For whatever could be labels in the batch, or a mask: how many micro-batches have before and after the shift."""
    for path, leaf in sequences(case):
        if leaf.dtype == torch.bool and "mask" not in path:
            continue
        counts = leaf != 0 if "mask" in path else leaf != IGNORED
        before = [float(counts[part].sum()) for part in parts]
        after = [float(counts[part][:, 1:].sum()) for part in parts]
        if case.big.ranks.largest(sum(before) - sum(after)):
            yield before, after


# ---------------------------------------------------------------------------------------------- factors


def _of_a_factor(case: Case, window: Compared, factor: float) -> Cause:
    """What a factor, the same on all parameters, may come from."""
    close = max(window.tolerance, 1e-6)
    said = f"the gradient is {factor:.4g} times the right one"
    for value, cause in _known_factors(case, window, factor):
        if value and value != 1 and abs(factor / value - 1) <= close:
            name, why, cure = cause
            return Cause(name=name, evidence=f"{said}: {why}.", cure=cure)
    return Cause(
        name="constant factor",
        evidence=f"{said}, on all parameters alike.",
        cure="Look at what the loss is divided by, once for each micro-batch and once for each window.",
    )


DIVIDE = "Divide once: (loss / number_of_micro_batches).backward(), or better by the items of the window."
DIVIDE_LESS = "Divide once: a library's backward() or a mean loss divides already."
COUNT_LABELS = "Count what the loss is a mean over, not positions: (labels != -100).sum(), after any shift."
COUNT_SHIFTED = "Count what the loss is a mean over: (labels[..., 1:] != -100).sum()."
UNSCALE = "scaler.unscale_(optimizer) before looking at gradients, and scaler.step(optimizer) to step."
MULTIPLY = (
    "DDP and FSDP divide by the number of ranks: multiply by it exactly where you divide by the items of all ranks, "
    "and nowhere else."
)

Known = tuple[float, tuple[str, str, str]]  # a factor, and its name, reason and cure


def _known_factors(case: Case, window: Compared, factor: float) -> Iterator[Known]:
    count, ranks = window.micro_batches, case.big.ranks
    longest = max(case.windows, key=lambda other: other.micro_batches)
    if longest.micro_batches > count and abs(longest.own_factor - 1) <= window.tolerance:
        yield _short_window(count, longest.micro_batches)
    for before, after in _shifted(case, window.parts or []):
        total, right = ranks.sum(sum(before)), ranks.sum(sum(after))
        why = f"{right:.0f} labels are left of {total:.0f} when they are shifted"
        yield right / (total or 1.0), ("labels counted before the shift", why, COUNT_SHIFTED)
    yield from _counted_padding(case, window)
    if ranks.world > 1:
        why = f"there are {ranks.world} ranks"
        yield ranks.world, ("world size", why, MULTIPLY)
        yield 1 / ranks.world, ("world size", why, MULTIPLY)
    if count > 1:
        yield count, ("not divided", "the number of its micro-batches", DIVIDE)
        yield 1 / count, ("divided twice", f"1 / {count}, and {count} is the number of micro-batches", DIVIDE_LESS)
    if window.parts is not None:
        items, samples = sum(case.big.items(window.parts)), sum(map(len, window.parts))
        for number, what in ((ranks.sum(items), "items"), (ranks.sum(samples), "samples")):
            yield number, ("not divided", f"the number of its {what}", DIVIDE)
            yield number / (count or 1), ("not divided", f"{what} / micro-batches", DIVIDE)
            yield 1 / (number or 1), ("divided twice", f"1 / {what}", DIVIDE_LESS)
            yield count / (number or 1), ("divided twice", f"micro-batches / {what}", DIVIDE_LESS)
    yield count * ranks.world, ("not divided", "micro-batches x ranks", DIVIDE)
    yield count / ranks.world, ("not divided", "micro-batches / ranks", DIVIDE)
    if factor > 0 and 0 < count < round(count / factor) <= 10_000:
        yield _short_window(count, round(count / factor))
    if factor >= 1024:
        yield 2.0 ** round(math.log2(factor)), ("loss scale", "a power of two, as a GradScaler has", UNSCALE)


def _counted_padding(case: Case, window: Compared) -> Iterator[Known]:
    """All positions counted as items, or all but one a sample."""
    if window.parts is None or not case.big.counted:
        return
    own = sum(case.big.items(window.parts)), sum(map(len, window.parts)), sum(_positions(window))
    items, samples, positions = map(case.big.ranks.sum, own)
    for number in (positions, positions - samples):
        if number > items:
            why = f"{items:.0f} labels count, but it was divided by {number:.0f} positions, padding too"
            yield items / number, (PADDED, why, COUNT_LABELS)


def _short_window(count: int, configured: int) -> Known:
    why = f"divided by {configured}, but the window has {count} micro-batches"
    cure = "Divide by the real number: the last window of an epoch may be short. Accumulator.batches(loader) knows."
    return count / configured, ("short window", why, cure)


# ---------------------------------------------------------------------------------------------- neither


def _rounding(window: Compared) -> Cause:
    return Cause(
        name="sums in too low a precision",
        evidence=f"the gradient is right but for rounding, which is {window.error:.2g} of the largest one; up to "
        f"{window.bound:.2g} would be usual.",
        cure="Sum in float32: Accumulator(..., accumulate_dtype=torch.float32), or keep gradients and buffers in it.",
    )


def _unexplained(case: Case, window: Compared) -> Cause:
    norms = window.found.dot(window.found) * window.right.dot(window.right)
    cosine = window.found.dot(window.right) / math.sqrt(norms or 1.0)
    if not case.big.ranks.largest(float(not _is_rounded(window.found))) and cosine > 0.9:
        return _rounding(window) if abs(window.factor - 1) < 0.25 else _of_a_factor(case, window, window.factor)
    return Cause(
        name="unexplained",
        evidence=f"the gradient is {window.error:.2g} of the largest one away from the right one (cosine {cosine:.4f}, "
        f"factor {window.factor:.4g}), and no known mistake gives it.",
        cure="Does step compute what loss_fn computes, on the same samples? Compare the two on one micro-batch first.",
    )


def _is_rounded(gradient: Gradient) -> bool:
    """Whether its numbers are all such as half precision has."""
    parts = [part for part in gradient.parts.values() if part is not None]
    return any(all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts) for dtype in HALF)


def left_over(what: str) -> Cause:
    return Cause(
        name="gradients left over",
        evidence=f"the gradient holds {what}, besides that of its own window.",
        cure="optimizer.zero_grad() after every optimizer.step(), or before the first backward of a window.",
    )


def _numbers(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers[:8]) + (" ..." if len(numbers) > 8 else "")
