"""Finds out how a step weighted its micro-batches, and what it divided by.

Most mistakes of accumulation are wrong weights: the gradient is a sum over the micro-batches, but some count too much
or too little. So each known mistake is a `Hypothesis`: the gradient that it would give for the same micro-batches,
up to a factor. The first hypothesis that fits names the cause; then the factor is explained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from macrobatch._cut.padding import IGNORED
from macrobatch.verification.catalogue import CAUSES, RETURN_ITEMS, cause, doubtful_update, number_list
from macrobatch.verification.clipping import is_clipped_in_another_direction, mid_window_cause, remaining_shares
from macrobatch.verification.comparison import Case, Comparison, Hypothesis
from macrobatch.verification.gradient import Gradient, projection
from macrobatch.verification.label_causes import sequence_leaves_of_ranks
from macrobatch.verification.readings import counts_before_shift, repeated_division, states, unequal_means
from macrobatch.verification.report import Cause, Certainty
from macrobatch.verification.term_causes import term_hypotheses

HALF = (torch.bfloat16, torch.float16)


class Fit(NamedTuple):
    """A hypothesis that explains a gradient: its factor, the relative error, and old gradients that were subtracted."""

    hypothesis: Hypothesis
    factor: float
    error: float
    leftover: str | None


def causes_of_window(case: Case, window: Comparison) -> list[Cause]:
    """The causes of a wrong window: how its micro-batches were weighted, then the factor."""
    case.focus(window.observed)
    fit, means = _best_fit(case, window), unequal_means(window)
    if fit is None:
        return [_cause_without_fit(case, window, means)]
    if window.observed.is_probe and fit.hypothesis.name is None:
        return []  # how far it went is not what is trained
    if window.observed.update is not None and fit.hypothesis.name is None:
        return [doubtful_update("they are right but for a factor, which what is subtracted may contain")]
    clipped = mid_window_cause(case, window)
    if clipped is not None and fit.hypothesis.name is None and not fit.leftover:
        return [clipped]  # in a model with few parameters, everything fits up to a factor
    causes = []
    if fit.leftover:
        probed = any(other.observed.is_probe and other.observed.names & window.observed.names for other in case.windows)
        causes.append(leftover_cause(fit.leftover, "unknown" if probed else "inferred"))
    if fit.hypothesis.name is not None:
        is_read = fit.hypothesis.name == "mean of means" and means is not None
        is_read |= fit.hypothesis.name == "labels counted before the shift" and counts_before_shift(window)
        causes.append(
            cause(
                fit.hypothesis.name,
                f"{fit.hypothesis.evidence} {means[0].upper()}{means[1:]}"
                if is_read and means
                else fit.hypothesis.evidence,
                fit.hypothesis.cure,
                certainty="read" if is_read else "inferred",
            )
        )
    window.remaining_factor = fit.factor
    has_factor = abs(fit.factor - 1) > max(window.bound, 1e-9) and fit.hypothesis.allows_factor
    if has_factor and not (causes and is_clipped_in_another_direction(case, window)):
        causes.append(_factor_cause(case, window, fit.factor))
    return causes or [_rounding_cause(window)]


def _cause_without_fit(case: Case, window: Comparison, means: str | None) -> Cause:
    """The cause of a gradient that no hypothesis gives."""
    if (clipped := mid_window_cause(case, window)) is not None:
        return clipped
    if means:
        return cause("mean of means", means, certainty="read")
    found = _unexplained_cause(case, window)
    return (_changed_later_cause(case, window) or found) if found.name == "unexplained" else found


def _changed_later_cause(case: Case, window: Comparison) -> Cause | None:
    """The cause, if the step changed its gradient after the last backward, in a way that is no known mistake."""
    if not window.observed.raw or case.big.ranks.world_size > 1:
        return None
    raw = Gradient(window.observed.raw).only(window.observed.names)
    if window.actual.distance(raw, window.actual.fit(raw)) <= window.tolerance * window.actual.largest:
        return None  # by a factor only
    changed, window.actual = window.actual, raw
    fit, window.actual = _best_fit(case, window), changed
    if fit is None:
        return None
    if fit.hypothesis.name not in (None, "gradients cleared inside the window"):
        evidence = f"before its last change, which came after the last backward, {fit.hypothesis.evidence}"
        return cause(fit.hypothesis.name, evidence, fit.hypothesis.cure)
    return cause(
        "unexplained",
        "the gradient is right at the end of the last backward. Then the step changes it, in a way that verify does "
        f"not know: by up to {window.error:.2g} of the largest gradient.",
        "If the change is what you want, verify the step without it.",
        "unknown",
    )


def _best_fit(case: Case, window: Comparison) -> Fit | None:
    fits: list[Fit] = []
    hypotheses = list(_hypotheses(case, window))
    for leftover, found in [(None, window.actual), *_gradients_without_leftovers(case, window)]:
        for hypothesis in hypotheses:
            factor = found.fit(hypothesis.gradient)
            error = found.distance(hypothesis.gradient, factor) / (found.largest or 1.0)
            if factor and error <= window.tolerance and (leftover is None or abs(factor - 1) <= window.tolerance):
                fits.append(Fit(hypothesis, factor, error, leftover))
    best = min((fit.error for fit in fits), default=0.0)
    fits = [fit for fit in fits if fit.error <= 1.2 * best + 0.05 * window.bound]
    # In a model with a handful of parameters everything fits up to a factor: a factor of 1 is likelier.
    return next((fit for fit in fits if abs(fit.factor - 1) <= window.tolerance), fits[0] if fits else None)


def _gradients_without_leftovers(case: Case, window: Comparison) -> list[tuple[str, Gradient]]:
    """The gradient of a window minus gradients that may have been in ``.grad`` before it began."""
    held, before = window.observed.names, case.observation.initial_gradients
    what = "what was in .grad when step was called"
    for number, other in enumerate(case.windows[: case.windows.index(window)], start=1):
        if other.observed.names & held:
            before, what = other.observed.gradients, f"the gradient of window {number}"
    left = Gradient(before, window.actual.group).only(held)
    return [(what, window.actual.plus(left, -1.0))] if left.largest else []


def _hypotheses(case: Case, window: Comparison) -> Iterator[Hypothesis]:
    yield Hypothesis(None, window.expected)
    parts, ranks = window.parts, case.big.ranks
    if ranks.largest(float(parts is None)) or not ranks.largest(float(bool(parts))):
        return
    assert parts is not None
    yield from _sample_hypotheses(case, window, parts)
    yield from term_hypotheses(case, window, parts)
    count, items, samples = len(parts), case.big.items(parts), [float(len(part)) for part in parts]

    def weighted(weights: Sequence[float]) -> Gradient:
        return case.weighted_gradient(parts, weights).only(window.observed.names)

    if window.micro_batches > 1:
        if (same := _same_count(case, items)) is not None:
            said = f"all micro-batches have {same:g} items by loss_fn, but the loss is not a mean over those."
            yield Hypothesis("items that do not fit the loss", weighted([1.0] * count), said, RETURN_ITEMS)
        else:
            said = _inequality_evidence(case, window, parts, items)
            yield Hypothesis("mean of means", weighted([1.0] * count), said)
        if -ranks.largest(-count) < window.micro_batches:  # on some rank
            said = "every rank takes the mean of its micro-batches' means, and counts the same. But micro-batches have "
            said += f"different numbers of items: {number_list(items)} on the first rank."
            yield Hypothesis("mean of means", weighted([1 / (count or 1)] * count), said)
    if ranks.world_size > 1:
        yield Hypothesis(
            "mean of means",
            weighted([n / (sum(items) or 1.0) for n in items]),
            f"every rank counts the same, but ranks have different numbers of items: {sum(items):g} on the first.",
            "Divide by the items of all ranks, and multiply by the number of ranks, because the wrapper divides by it.",
        )
    for before, after in _label_counts(case, parts):
        if ranks.largest(len({n / size for n, size in zip(before, samples, strict=True)})) < 2:
            continue  # equally many in every sample: the same as weighting by samples
        if weighted(after).distance(window.expected) > window.tolerance * window.expected.largest:
            continue  # the loss is not a mean over the labels after the shift
        said = f"the micro-batches count as if they had {number_list(before)} items, not {number_list(after)}."
        yield Hypothesis("labels counted before the shift", weighted(before), said)
    yield from _padding_hypotheses(case, window, parts)
    if window.micro_batches > 1:
        counted = "items" if case.big.has_items else "samples"
        for what, weights, cure in (
            (counted, items, RETURN_ITEMS),
            ("samples", samples, CAUSES["mean of means"].cure),
        ):
            said = (
                f"micro-batches are weighted by {what}, {number_list(weights)}, but the loss is not a mean over those."
            )
            yield Hypothesis("items that do not fit the loss", weighted(weights), said, cure)
    yield from _clipping_hypotheses(case, window, parts, items)
    if count > 1 and ranks.world_size == 1:
        said, last = f"only the last of {count} micro-batches counts.", [0.0] * (count - 1) + [1.0]
        yield Hypothesis("gradients cleared inside the window", weighted(last), said, allows_factor=False)


def _padding_hypotheses(case: Case, window: Comparison, parts: list[list[int]]) -> Iterator[Hypothesis]:
    """The hypothesis that every position counts as an item."""
    positions = _positions(window)
    unequal = len({number / len(part) for number, part in zip(positions, parts, strict=False)}) > 1
    if len(positions) != len(parts):
        positions = [1.0] * len(parts)
    if not case.big.ranks.largest(float(unequal)):
        return
    yield Hypothesis(
        "trained on padding",
        case.weighted_gradient(parts, positions).only(window.observed.names),
        f"the micro-batches count as if they had {number_list(positions)} items: all positions, padding included.",
    )


def _positions(window: Comparison) -> list[float]:
    """The number of positions in each micro-batch, padding included; a shorter list if some are unknown."""
    assert window.matches is not None
    sizes = {}
    for call, samples in window.matches.calls:
        tokens = [x for x in call.inputs.values() if x.ndim == 2 and not x.is_floating_point()]
        sizes[frozenset(samples)] = float(tokens[0].numel()) if tokens else None
    found = [sizes[frozenset(part)] for part in window.matches.parts]
    return [number for number in found if number is not None]


def _clipping_hypotheses(
    case: Case, window: Comparison, parts: list[list[int]], items: list[float]
) -> Iterator[Hypothesis]:
    """The hypotheses that the gradient shrank between backwards."""
    left, clip = remaining_shares(window), mid_window_cause(case, window)
    if case.big.ranks.largest(float(left is None)) or left is None or clip is None:
        return
    for weights in (items, [1.0] * len(parts)):
        shrunk = [weight * share for weight, share in zip(weights, left, strict=True)]
        yield Hypothesis(
            clip.name,
            case.weighted_gradient(parts, shrunk).only(window.observed.names),
            clip.evidence,
            clip.cure,
            False,
        )


def _same_count(case: Case, items: list[float]) -> float | None:
    """The items of each micro-batch, where loss_fn counts them and all have as many, on all ranks; else None.

    All ranks take part in each question, also one that has no micro-batch.
    """
    ranks = case.big.ranks
    counts = ranks.largest(float(case.big.has_items))
    most = ranks.largest(max(items, default=-math.inf))
    least = -ranks.largest(max((-number for number in items), default=-math.inf))
    return most if counts and most == least else None


def _inequality_evidence(case: Case, window: Comparison, parts: list[list[int]], items: list[float]) -> str:
    said = f"all {len(parts)} micro-batches count the same, but "
    if case.big.has_items:
        return said + f"they have different numbers of items: {number_list(items)}."
    weights = _true_weights(case, window, parts)
    if weights is None or abs(sum(weights) - 1) > 1e-3:  # gradients of few parameters are not independent
        return said + "they have different numbers of items."
    return said + f"their weights in one big batch are {' '.join(f'{weight:.3f}' for weight in weights)}."


def _true_weights(case: Case, window: Comparison, parts: list[list[int]]) -> list[float] | None:
    """The weight of each micro-batch in one big batch; only computed for a few micro-batches in one process."""
    if case.big.ranks.world_size > 1 or len(parts) > 8:
        return None
    gradients = [case.weighted_gradient([part], [1.0]).only(window.observed.names) for part in parts]
    return projection(window.expected, gradients)


def _sample_hypotheses(case: Case, window: Comparison, parts: list[list[int]]) -> Iterator[Hypothesis]:
    """The hypotheses that the step did not use each sample of the batch once."""
    assert case.big.samples is not None
    if window.samples is not None:
        return
    total, used = case.big.samples.count, [sample for part in parts for sample in part]
    left_out, twice = total - len(set(used)), len(used) - len(set(used))
    if case.big.ranks.largest(left_out):
        yield Hypothesis(
            "samples left out",
            case.expected_gradient(sorted(set(used))).only(window.observed.names),
            f"{left_out} of {total} samples reached no backward.",
        )
    if case.big.ranks.largest(twice) and case.big.ranks.world_size == 1:
        yield Hypothesis(
            "samples used twice",
            case.weighted_gradient(parts, case.big.items(parts)).only(window.observed.names),
            f"{twice} samples reached more than one backward.",
        )


def _label_counts(case: Case, parts: list[list[int]]) -> Iterator[tuple[list[float], list[float]]]:
    """For each leaf that may hold labels or a mask: the counts of all micro-batches before and after the shift."""
    for path, leaf in sequence_leaves_of_ranks(case):
        counts = leaf != 0 if "mask" in path else leaf != IGNORED
        before = [float(counts[part].sum()) for part in parts]
        after = [float(counts[part][:, 1:].sum()) for part in parts]
        if case.big.ranks.largest(sum(before) - sum(after)):
            yield before, after


# ---------------------------------------------------------------------------------------------- factors


def _factor_cause(case: Case, window: Comparison, factor: float) -> Cause:
    """The cause of a factor that is the same for all parameters."""
    close = max(window.tolerance, 1e-6)
    said = f"the gradient is {factor:.4g} times the right one"
    if (divided := repeated_division(window, factor)) is not None:
        return cause("divided twice", f"{said}: {divided}", certainty="read")
    for value, (name, why) in _known_factors(case, window, factor):
        if value and value != 1 and abs(factor / value - 1) <= close:
            is_read = name in ("not divided", "divided twice", "short window") and states(window, factor)
            return cause(name, f"{said}: {why}.", certainty="read" if is_read else "inferred")
    return cause("constant factor", f"{said}, on all parameters alike.")


KnownFactor = tuple[float, tuple[str, str]]  # a factor, and its name and reason


def _known_factors(case: Case, window: Comparison, factor: float) -> Iterator[KnownFactor]:
    count, ranks = window.micro_batches, case.big.ranks
    longest = max(case.windows, key=lambda other: other.micro_batches)
    if longest.micro_batches > count and abs(longest.remaining_factor - 1) <= window.tolerance:
        yield _short_window_factor(count, longest.micro_batches)
    for before, after in _label_counts(case, window.parts or []):
        total, right = ranks.sum(sum(before)), ranks.sum(sum(after))
        why = f"{right:.0f} of {total:.0f} labels are left after the shift"
        yield right / (total or 1.0), ("labels counted before the shift", why)
    yield from _padding_factors(case, window)
    if ranks.world_size > 1:
        why = f"there are {ranks.world_size} ranks"
        yield ranks.world_size, ("world size", why)
        yield 1 / ranks.world_size, ("world size", why)
    if count > 1:
        yield count, ("not divided", "the number of micro-batches")
        yield 1 / count, ("divided twice", f"1 / {count}, and {count} is the number of micro-batches")
    if window.parts is not None:
        items, samples = sum(case.big.items(window.parts)), sum(map(len, window.parts))
        for number, what in ((ranks.sum(items), "items"), (ranks.sum(samples), "samples")):
            yield number, ("not divided", f"the number of {what}")
            yield number / (count or 1), ("not divided", f"{what} / micro-batches")
            yield 1 / (number or 1), ("divided twice", f"1 / {what}")
            yield count / (number or 1), ("divided twice", f"micro-batches / {what}")
    yield count * ranks.world_size, ("not divided", "micro-batches x ranks")
    yield count / ranks.world_size, ("not divided", "micro-batches / ranks")
    if factor > 0 and 0 < count < round(count / factor) <= 10_000:
        yield _short_window_factor(count, round(count / factor))
    if factor >= 1024:
        yield 2.0 ** round(math.log2(factor)), ("loss scale", "a power of two, as a GradScaler has")


def _padding_factors(case: Case, window: Comparison) -> Iterator[KnownFactor]:
    """The factors of a step that counts all positions as items, or all but one per sample."""
    if window.parts is None or not case.big.ranks.largest(float(case.big.has_items)):
        return
    own = sum(case.big.items(window.parts)), sum(map(len, window.parts)), sum(_positions(window))
    items, samples, positions = map(case.big.ranks.sum, own)
    for number in (positions, positions - samples):
        if number > items:
            why = f"{items:.0f} labels count, but it was divided by {number:.0f} positions, padding included"
            yield items / number, ("trained on padding", why)


def _short_window_factor(count: int, configured: int) -> KnownFactor:
    why = f"divided by {configured}, but the window has {count} micro-batches"
    return count / configured, ("short window", why)


# ---------------------------------------------------------------------------------------------- other causes


def _rounding_cause(window: Comparison) -> Cause:
    return cause(
        "sums in too low a precision",
        f"the gradient is right except for rounding: its error is {window.error:.2g} of the largest gradient, and up "
        f"to {window.bound:.2g} would be usual.",
    )


def _unexplained_cause(case: Case, window: Comparison) -> Cause:
    norms = window.actual.dot(window.actual) * window.expected.dot(window.expected)
    cosine = window.actual.dot(window.expected) / math.sqrt(norms or 1.0)
    if not case.big.ranks.largest(float(not _is_half_precision(window.actual))) and cosine > 0.9:
        return _rounding_cause(window) if abs(window.factor - 1) < 0.25 else _factor_cause(case, window, window.factor)
    return cause(
        "unexplained",
        f"the error is {window.error:.2g} of the largest gradient (cosine {cosine:.4f}, factor {window.factor:.4g}), "
        "and no known mistake gives this gradient.",
    )


def _is_half_precision(gradient: Gradient) -> bool:
    """Whether half precision can represent all numbers of a gradient."""
    parts = [part for part in gradient.parts.values() if part is not None]
    return any(all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts) for dtype in HALF)


def leftover_cause(what: str, certainty: Certainty = "inferred") -> Cause:
    said = f"the gradient contains {what}, in addition to the gradient of its own window."
    if certainty == "unknown":
        said += " In between, the step moved the weights itself: adversarial training adds both, and SAM must not."
    return cause("gradients left over", said, certainty=certainty)
