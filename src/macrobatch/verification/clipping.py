"""Recognises clipping, which is right at the end of a window and wrong between its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from macrobatch.verification.catalogue import CLIP_ONCE, cause, number_list
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.report import Cause

# ---------------------------------------------------------------------------------------------- at the end of a window


def allow_clipping(case: Case, notes: list[str]) -> None:
    """Find windows whose gradients were clipped at the end, and compare them up to that clipping."""
    wrong = [window for window in case.windows if window.is_wrong]
    clipped = _windows_clipped_by_norm(case, wrong)
    for window, size in clipped:
        window.clipped_norm = size
        vars(window).pop("errors", None)  # the cache holds errors without clipping
    if clipped:
        notes.append(
            f"gradients were clipped, to a norm of {clipped[0][1]:.4g}: only their direction was compared. Verify "
            "without clipping to compare their size too"
        )
    limits = [window.actual.largest for window in wrong if window.is_wrong and _is_clamped(case, window)]
    if limits:
        notes.append(
            f"gradients were clipped, each number to {limits[0]:.4g}: larger numbers were not compared. Verify without "
            "clipping to compare them too"
        )
    changed = [window for window in wrong if window.is_wrong and is_changed_as_known(case, window)]
    if changed:
        notes.append(
            "gradients were changed after the last backward, by centring them, or by clipping values and then the "
            "norm: they were compared with one big batch after the same change"
        )
    in_parts = [
        window for window in wrong if window.is_wrong and any(_is_clipped_in_parts(case, window, by) for by in PARTS)
    ]
    if in_parts:
        notes.append(
            "gradients were clipped, each parameter's, each group's or each row's by itself: of those only the "
            "direction was compared. Verify without clipping to compare their size too"
        )


def scaled_clipping_cause(case: Case) -> Cause | None:
    """The cause, if a gradient was clipped before it was unscaled: then the limit is not that of the real gradient."""
    for window in case.windows:
        if window.clipped_norm is None:
            continue
        times = window.observed.norm_before_step / (_gradient_norm(case, window.expected) or 1.0)
        power = 2.0 ** round(math.log2(times)) if 0 < times < math.inf else 1.0  # scalers multiply by powers of 2
        times = power if abs(times / power - 1) < 0.05 else times
        limit = window.clipped_norm * times
        is_scaled = times > 1.5 and _is_round(limit) and not _is_round(window.clipped_norm)
        if not case.big.ranks.largest(float(not is_scaled)):
            return cause(
                "clipped while scaled",
                f"the gradient was clipped to a norm of {limit:.4g} while it was {times:.6g} times too large, "
                f"and divided afterwards: that leaves a norm of {window.clipped_norm:.4g}.",
            )
    return None


def _is_round(limit: float, close: float = 2e-5) -> bool:
    """Whether a limit has so few digits that somebody may have chosen it: nobody clips to 0.9137."""
    return abs(float(f"{limit:.{2 if close < 1e-4 else 1}g}") / limit - 1) < close


def _windows_clipped_by_norm(case: Case, wrong: list[Comparison]) -> list[tuple[Comparison, float]]:
    """The windows whose gradient shrank after the last backward, with their norms now."""
    candidates = []
    for window in wrong:
        if not window.factor > 0 or (window.factor >= 1 and not _was_right(window)):
            continue
        size = _gradient_norm(case, window.actual)
        fits = window.actual.distance(window.expected, window.factor) <= window.tolerance * window.actual.largest
        if fits and (window.factor >= 1 or _has_shrunk(case, window, size)):
            candidates.append((window, size))
    return [(window, size) for window, size in candidates if _is_clipped(case, window, size, candidates)]


def _was_right(window: Comparison) -> bool:
    """Whether the gradient was the expected one at the end of the last backward."""
    raw = Gradient(window.observed.raw)
    return bool(window.observed.raw) and raw.distance(window.expected) <= window.bound * window.scale


def is_clipped_in_another_direction(case: Case, window: Comparison) -> bool:
    """Whether a gradient that is wrong in other ways was also clipped at the end: then its size says nothing."""
    size = _gradient_norm(case, window.actual)
    return (
        case.doubled_observation is not None and _has_shrunk(case, window, size) and _is_clipped(case, window, size, [])
    )


def _is_clipped(case: Case, window: Comparison, size: float, candidates: list[tuple[Comparison, float]]) -> bool:
    """Whether a doubled gradient gives the same result. A constant factor would double the result too."""
    twice = _doubled(case, window)
    if twice is None:
        return window.factor < 1 and _looks_clipped(case, window, size, candidates)
    return _is_unchanged(case, window, twice, window.actual)


def _doubled(case: Case, window: Comparison) -> Gradient | None:
    """What the step made of a doubled gradient; None if it could not be called again."""
    if case.doubled_observation is None:
        return None
    doubled = case.doubled_observation.windows[case.windows.index(window)]
    return Gradient(doubled.gradients, window.actual.group).only(window.observed.names)


def _is_unchanged(case: Case, window: Comparison, twice: Gradient, once: Gradient) -> bool:
    """Whether they have the same size, except for the 1e-6 that torch adds to the norm that it divides by."""
    close = max(1e-3, window.tolerance, 2e-6 / (_gradient_norm(case, once) or 1.0))
    return abs(twice.fit(once) - 1) < close


def _looks_clipped(case: Case, window: Comparison, size: float, candidates: list[tuple[Comparison, float]]) -> bool:
    """Whether a norm is a round number, or that of another window, or the gradient had the expected norm before."""
    close = max(2e-5, 0.1 * window.bound)
    alike = any(
        abs(other_size / size - 1) < close and abs(other.factor / window.factor - 1) > 1e-3
        for other, other_size in candidates
    )
    if alike or _is_round(size, close):
        return True
    return _had_expected_norm(case, window) and not _is_whole_fraction(window)


def _is_whole_fraction(window: Comparison) -> bool:
    """Whether the gradient is the expected one divided by a whole number, which clipping would hardly give."""
    divisor = 1 / window.factor
    uncertain = max(window.bound, 1e-9) * divisor
    return abs(divisor - round(divisor)) <= uncertain < 0.01  # with coarse rounding, any number is close to a whole one


def _has_shrunk(case: Case, window: Comparison, size: float, by: float = 1e-3) -> bool:
    """Whether the gradient shrank after the last backward, or may have."""
    before = window.observed.norm_before_step
    return not case.big.ranks.largest(float(0 < before < (1 + by) * size))


def _had_expected_norm(case: Case, window: Comparison) -> bool:
    """Whether the gradient had the expected norm at the end of the last backward."""
    apart = window.observed.norm_before_step / (_gradient_norm(case, window.expected) or 1.0) - 1
    return not case.big.ranks.largest(float(abs(apart) > max(window.bound, 1e-6)))


def _is_clamped(case: Case, window: Comparison) -> bool:
    """Whether the gradient is the expected one with its numbers clamped; if so, expect the clamped one from now on."""
    limit = window.actual.largest
    if not 0 < limit < window.expected.largest or not _had_expected_norm(case, window):
        return False
    clamped = window.expected.clamp(limit)
    if window.actual.distance(clamped) > window.tolerance * limit:
        return False
    _expect(window, clamped)
    return True


def _is_clipped_in_parts(case: Case, window: Comparison, by: str) -> bool:
    """Whether parameters, groups or rows were clipped by their own norms; if so, expect the clipped ones from now on.

    Each gradient is as expected, or it is smaller in the same direction; then a doubled gradient gives the same result.
    And it was larger when the last backward ended. (If a loss is divided by the norm of its gradient, it is another
    loss.)
    """
    if not _has_shrunk(case, window, _gradient_norm(case, window.actual), by=window.tolerance):
        return False
    twice, norms = _doubled(case, window), _norms_by_name(case, window.actual)
    clipped = _clipped_parts(window, by, twice, window.expected.sizes(), norms)
    if case.big.ranks.largest(float(clipped is None)) or clipped is None:
        return False
    names = set().union(*case.big.ranks.gather(set(clipped)))
    if case.spread(window) > window.tolerance:  # only some ranks clip
        return False
    if not names or (twice is None and not _have_one_norm(case, window, [norms[name] for name in names])):
        return False
    expected = Gradient({**window.expected.parts, **clipped}, window.expected.group)
    if window.actual.distance(expected) > window.tolerance * window.actual.largest:
        return False
    _expect(window, expected)
    return True


def _clipped_parts(
    window: Comparison, by: str, twice: Gradient | None, sizes: dict[str, float], norms: dict[str, float]
) -> dict[str, Tensor] | None:
    """This rank's part of the expected gradients that were clipped, as clipped; None if something else was done."""
    raw = Gradient(window.observed.raw).only(window.observed.names)
    # Where parameters or rows belong to single micro-batches, clipping each micro-batch looks the same at the end.
    was_right = raw.distance(window.expected, raw.fit(window.expected)) <= window.tolerance * raw.largest
    if _shrink_factors(window) or (raw.parts and not was_right) or (twice is None and by != PARTS[0]):
        return None
    clipped: dict[str, Tensor] = {}
    for name, part in window.expected.parts.items():
        own = window.actual.parts.get(name)
        if part is None or own is None or sizes[name] <= window.tolerance * window.scale:
            continue
        factors = _factors(own, part, by)
        is_noise = part.abs().double() <= window.tolerance * window.scale
        is_clipped = (factors - 1).abs() > window.tolerance
        if (is_clipped & ~(factors > 0) & ~is_noise).any() or (is_clipped & (factors > 1) & ~is_noise).any():
            return None
        if twice is not None and is_clipped.any():
            second = twice.parts.get(name)
            again = factors if second is None else _factors(second, part, by)
            close = max(1e-3, window.tolerance, 2e-6 / (norms[name] or 1.0))
            if (is_clipped & ~is_noise & ((again / factors - 1).abs() >= close)).any():
                return None
        if is_clipped.any():
            clipped[name] = factors.where(is_clipped, 1.0) * part.double()
    return clipped


PARTS = ("parameters", "rows", "columns")


def _factors(actual: Tensor, expected: Tensor, by: str) -> Tensor:
    """For each number of a gradient, the factor of its part: the whole parameter, a row or a column."""
    one, other = actual.double(), expected.to(actual.device).double()
    dimensions = list(range(one.ndim))
    if one.ndim > 1 and by != PARTS[0]:
        dimensions = dimensions[1:] if by == "rows" else dimensions[:-1]
    if not dimensions:
        return torch.ones_like(one)
    square = (other * other).sum(dimensions, keepdim=True)
    factor = (one * other).sum(dimensions, keepdim=True) / square.where(square > 0, 1.0)
    return factor.where(square > 0, 1.0).expand_as(one)


def is_changed_as_known(case: Case, window: Comparison) -> bool:
    """Whether the gradient was centred, or clipped by value and then by norm; if so, expect the changed one."""
    raw = Gradient(window.observed.raw).only(window.observed.names)
    close = window.tolerance * window.actual.largest
    if case.big.ranks.world_size > 1 or not raw.parts or window.actual.distance(raw, window.actual.fit(raw)) <= close:
        return False
    for changed in _known_changes(window):
        factor = window.actual.fit(changed)
        if window.actual.distance(changed, factor) > close or not factor > 0:
            continue
        scaled = Gradient(dict(changed.parts)).plus(changed, factor - 1)
        if abs(factor - 1) <= window.tolerance or (factor < 1 and _has_one_norm(case, window)):
            _expect(window, scaled)
            return True
    return False


def _has_one_norm(case: Case, window: Comparison) -> bool:
    """Whether a doubled gradient ends with the same norm, as after clipping by norm."""
    twice = _doubled(case, window)
    return twice is not None and abs(_gradient_norm(case, twice) / _gradient_norm(case, window.actual) - 1) < 1e-3


def _known_changes(window: Comparison) -> Iterator[Gradient]:
    """What the expected gradient becomes by changes that are usual after the last backward."""
    yield _changed(
        window, lambda part: part - part.mean(list(range(1, part.ndim)), keepdim=True) if part.ndim > 1 else part
    )
    yield _changed(
        window, lambda part: part - part.mean(list(range(1, part.ndim)), keepdim=True) if part.ndim > 3 else part
    )
    # Clipped by value, then by norm: the numbers below the limit have one factor, and the others one size.
    ratios = [
        (own.double() / part.double()).flatten()[part.flatten().abs().double() > window.tolerance * window.scale]
        for name, part in window.expected.parts.items()
        if part is not None and (own := window.actual.parts.get(name)) is not None
    ]
    factor = float(torch.cat(ratios).max()) if ratios and sum(ratio.numel() for ratio in ratios) else 0.0
    if 0 < factor < 1 + window.tolerance and window.actual.largest < factor * window.expected.largest:
        yield window.expected.clamp(window.actual.largest / factor)


def _changed(window: Comparison, change: Callable[[Tensor], Tensor]) -> Gradient:
    return Gradient(
        {name: None if part is None else change(part.double()) for name, part in window.expected.parts.items()}
    )


def _have_one_norm(case: Case, window: Comparison, norms: list[float]) -> bool:
    """Whether several parameters have the same norm, and the gradient had the expected norm before."""
    return len(norms) > 1 and min(norms) > (1 - 1e-3) * max(norms) and _had_expected_norm(case, window)


def _expect(window: Comparison, gradient: Gradient) -> None:
    """Compare with another gradient from now on."""
    window.expected = gradient
    for cached in ("errors", "factor"):
        vars(window).pop(cached, None)


def _gradient_norm(case: Case, gradient: Gradient) -> float:
    return math.hypot(*_norms_by_name(case, gradient).values())


def _norms_by_name(case: Case, gradient: Gradient) -> dict[str, float]:
    copies = 1 if case.big.ranks.is_sharded else case.big.ranks.world_size
    return {name: math.sqrt(square / copies) for name, square in gradient.squares().items()}


# ---------------------------------------------------------------------------------------------- between micro-batches


def remaining_shares(window: Comparison) -> list[float] | None:
    """The share of each micro-batch's gradient that is left after changes between backwards; None: unknown."""
    observed, names = window.observed, window.observed.names
    micro_batches = sorted({call.first_backward for call in observed.calls})
    if window.parts is None or len(window.parts) != len(micro_batches):
        return None
    factors = {change.backward: change.factor(names) for change in observed.norm_changes if change.is_uniform(names)}
    return [math.prod(f for backward, f in factors.items() if backward >= micro) for micro in micro_batches]


def mid_window_cause(case: Case, window: Comparison) -> Cause | None:
    """The cause, if gradients shrank between the backwards of a window."""
    factors = next(filter(None, case.big.ranks.gather(_shrink_factors(window))), None)
    if factors is None:
        return None
    said = (
        f"gradients became smaller after {len(factors)} of the window's first {window.micro_batches - 1} backwards: "
        f"{number_list(factors, '.3g')} times what they were."
    )
    if _is_division(factors):
        return cause("divided inside the window", f"{said} So each micro-batch counts less than the next one.")
    return cause("clip per micro-batch", f"{said} So the first micro-batches count less than the last.")


def _shrink_factors(window: Comparison) -> list[float]:
    """The factors below 1 by which gradients changed between the backwards of a window."""
    factors = [change.factor(window.observed.names) for change in window.observed.norm_changes]
    return [factor for factor in factors if 0 < factor < 1 - 1e-6]


def _is_division(factors: list[float]) -> bool:
    """Whether each factor is 1 divided by the same whole number."""
    divisor = 1 / factors[0]
    return all(abs(factor * round(divisor) - 1) < 1e-5 for factor in factors)


def hook_clipping_cause(case: Case, _wrong: Sequence[Comparison]) -> Cause | None:
    """The cause, if every backward clips its gradient: then twice the loss does not have twice the gradient."""
    if not case.scaling_error:
        return None
    return cause(
        "clip per micro-batch",
        f"the gradient of twice the loss is {case.scaling_error:.2g} away from twice the gradient: something, perhaps "
        "a hook, clips the gradient of each micro-batch.",
        f"{CLIP_ONCE} Look for `register_hook()`.",
    )
