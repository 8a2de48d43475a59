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
    return [(window, size) for window, size in candidates if _looks_clipped(case, window, size, candidates)]


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
    """What is left of each micro-batch's gradient in the end, if all that was there was made smaller in between."""
    seen, held = window.window, window.window.held
    micro_batches = sorted({call.micro for call in seen.calls})
    if window.parts is None or len(window.parts) != len(micro_batches):
        return None
    factors = {sizes.backward: sizes.factor(held) for sizes in seen.between if sizes.is_alike(held)}
    if all(abs(factor - 1) < 1e-6 for factor in factors.values()) or not all(factors.values()):
        return None
    return [math.prod(f for backward, f in factors.items() if backward >= micro) for micro in micro_batches]


def evidence_of_clipping(window: Compared) -> str:
    """How often gradients were made smaller in mid-window."""
    seen, held = window.window, window.window.held
    smaller = [sizes for sizes in seen.between if sizes.factor(held) < 1 - 1e-6]
    times = " ".join(f"{sizes.factor(held):.3g}" for sizes in smaller[:6]) + (" ..." if len(smaller) > 6 else "")
    alike = "" if all(sizes.is_alike(held) for sizes in smaller) else ", not all parameters alike"
    return (
        f"gradients became smaller after {len(smaller)} of the window's first {window.micro_batches - 1} backwards, "
        f"before the next: {times} times what they were{alike}. So the first micro-batches count less than the last."
    )


def touched_between(case: Case, window: Compared) -> Cause | None:
    """Where no weights explain a gradient: somebody may have made it smaller in mid-window all the same."""
    held = window.window.held
    smaller = any(0 < sizes.factor(held) < 1 - 1e-6 for sizes in window.window.between)
    if not case.big.ranks.largest(float(smaller)):
        return None
    return Cause(name=CLIPPED, evidence=evidence_of_clipping(window), cure=CLIP_ONCE)


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
