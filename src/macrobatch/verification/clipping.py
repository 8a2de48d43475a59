"""Clipping: no mistake at the end of a window, and one between its micro-batches."""

from __future__ import annotations

import math

from macrobatch.verification.comparison import Case, Compared
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.report import Cause

CLIPPED = "clip per micro-batch"
CLIP_ONCE = "Clip once a window, between its last backward and optimizer.step(): Accumulator(..., max_norm=1.0) does."


# ---------------------------------------------------------------------------------------------- at the end of a window


def find_clipping(case: Case, notes: list[str]) -> None:
    """Clipped gradients are compared up to what clipping does to them."""
    wrong = [window for window in case.windows if window.is_wrong]
    clipped = _clipped_by_norm(case, wrong)
    for window, size in clipped:
        window.clipped = size
        vars(window).pop("errors", None)  # they are smaller now
    if clipped:
        notes.append(
            f"gradients were clipped, to a norm of {clipped[0][1]:.4g}: they were compared up to that factor. Verify "
            "without clipping to see their size too"
        )
    limits = [window.found.largest for window in wrong if window.is_wrong and _is_clamped(case, window)]
    if limits:
        notes.append(
            f"gradients were clipped, each number to {limits[0]:.4g}: larger ones were not compared. Verify without "
            "clipping to see them too"
        )


def _clipped_by_norm(case: Case, wrong: list[Compared]) -> list[tuple[Compared, float]]:
    """The windows whose gradient was made smaller after the last backward, and the norms that they have now."""
    candidates = []
    for window in wrong:
        if not 0 < window.factor < 1:
            continue
        size = _norm(case, window.found)
        fits = window.found.distance(window.right, window.factor) <= window.tolerance * window.found.largest
        if fits and _was_reduced(case, window, size):
            candidates.append((window, size))
    return [(window, size) for window, size in candidates if _is_clipped(case, window, size, candidates)]


def _is_clipped(case: Case, window: Compared, size: float, candidates: list[tuple[Compared, float]]) -> bool:
    """Whether a gradient twice as large becomes the same: a factor would make it twice as large, too."""
    if case.doubled is None:
        return _looks_clipped(case, window, size, candidates)
    doubled = case.doubled.windows[case.windows.index(window)]
    twice = Gradient(doubled.gradients, window.found.group).only(window.window.held)
    return twice.fit(window.found) < 1.5


def _looks_clipped(case: Case, window: Compared, size: float, candidates: list[tuple[Compared, float]]) -> bool:
    """Whether a norm is one that people clip to, or that another window was clipped to, or that was once right."""
    close = max(2e-5, 0.1 * window.bound)
    alike = any(
        abs(other_size / size - 1) < close and abs(other.factor / window.factor - 1) > 1e-3
        for other, other_size in candidates
    )
    rounded = float(f"{size:.{2 if close < 1e-4 else 1}g}")  # nobody clips to 0.9137
    return alike or abs(rounded / size - 1) < close or (_was_right(case, window) and not _is_a_share(window))


def _is_a_share(window: Compared) -> bool:
    """Whether it is the right one divided by a whole number, which clipping would hardly do."""
    divisor = 1 / window.factor
    uncertain = max(window.bound, 1e-9) * divisor
    return (
        abs(divisor - round(divisor)) <= uncertain < 0.01
    )  # where rounding is coarse, any number is close to a whole one


def _was_reduced(case: Case, window: Compared, size: float) -> bool:
    """Whether the gradient became smaller after the last backward, or may have."""
    before = window.window.size_before
    return not case.big.ranks.largest(float(0 < before < 1.001 * size))


def _was_right(case: Case, window: Compared) -> bool:
    """Whether the gradient had the right size when the last backward ended, so that it was made smaller on purpose."""
    apart = window.window.size_before / (_norm(case, window.right) or 1.0) - 1
    return not case.big.ranks.largest(float(abs(apart) > max(window.bound, 1e-6)))


def _is_clamped(case: Case, window: Compared) -> bool:
    """Whether it is the right one but for its largest numbers, and was so when the last backward ended."""
    limit = window.found.largest
    if not 0 < limit < window.right.largest or not _was_right(case, window):
        return False
    clamped = window.right.clamped(limit)
    if window.found.distance(clamped) > window.tolerance * limit:
        return False
    window.right = clamped
    for cached in ("errors", "factor"):
        vars(window).pop(cached, None)
    return True


def _norm(case: Case, gradient: Gradient) -> float:
    square = gradient.dot(gradient)
    return math.sqrt(square if case.big.ranks.shards else square / case.big.ranks.world)


# ---------------------------------------------------------------------------------------------- between micro-batches


def shares_left(window: Compared) -> list[float] | None:
    """What is left in the end of each micro-batch's gradient, if somebody multiplied it in between; None: unknown."""
    seen, held = window.window, window.window.held
    micro_batches = sorted({call.micro for call in seen.calls})
    if window.parts is None or len(window.parts) != len(micro_batches):
        return None
    factors = {sizes.backward: sizes.factor(held) for sizes in seen.between if sizes.is_alike(held)}
    return [math.prod(f for backward, f in factors.items() if backward >= micro) for micro in micro_batches]


def touched_between(case: Case, window: Compared) -> Cause | None:
    """The cause, if a gradient became smaller in mid-window."""
    factors = _factors(window)
    if not case.big.ranks.largest(float(bool(factors))):
        return None
    times = " ".join(f"{factor:.3g}" for factor in factors[:6]) + (" ..." if len(factors) > 6 else "")
    said = (
        f"gradients became smaller after {len(factors)} of the window's first {window.micro_batches - 1} backwards, "
        f"before the next: {times} times what they were."
        if factors
        else "gradients became smaller between the backwards of a window, on another rank than the first."
    )
    if factors and _is_a_division(factors):
        return Cause(
            name="divided inside the window",
            evidence=f"{said} So a micro-batch counts less for each that follows.",
            cure="Divide once: the loss of each micro-batch, or .grad between the last backward and optimizer.step().",
        )
    return Cause(name=CLIPPED, evidence=f"{said} So the first micro-batches count less than the last.", cure=CLIP_ONCE)


def _factors(window: Compared) -> list[float]:
    """What gradients were multiplied with between the backwards of a window, where that made them smaller."""
    factors = [sizes.factor(window.window.held) for sizes in window.window.between]
    return [factor for factor in factors if 0 < factor < 1 - 1e-6]


def _is_a_division(factors: list[float]) -> bool:
    """Whether it was the same whole number each time."""
    divisor = 1 / factors[0]
    return all(abs(factor * round(divisor) - 1) < 1e-5 for factor in factors)


def clipped_by_hooks(case: Case) -> Cause | None:
    """Where every backward clips what it computes: then twice the loss has not twice the gradient."""
    if not case.unlinear:
        return None
    return Cause(
        name=CLIPPED,
        evidence=f"the gradient of twice the loss is {case.unlinear:.2g} away from twice the gradient: something, "
        "perhaps a hook, changes that of each micro-batch by itself.",
        cure=f"{CLIP_ONCE} Look for register_hook().",
    )
