"""The causes of wrong weights, and other mistakes inside a window, each with what shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from macrobatch.auditing.cures import CURES
from macrobatch.auditing.weights import TOLERANCE, TermWeights, Weighed

NEAR = 2e-3  # how near a scale must be to the number that a cause predicts
INSIDE = (  # what explains wrong weights, so that no other cause is looked for
    "clip per micro-batch",
    "gradients cleared inside the window",
    "samples left out",
    "samples used twice",
    "divided inside the window",
    "gradients not synchronised",
)


@dataclass(frozen=True)
class Cause:
    """One mistake, what shows it, and what to do."""

    name: str
    evidence: str
    cure: str


def causes_of(weighed: list[Weighed], world: int) -> list[Cause]:
    """The causes for all windows of one optimizer, in the order of the table of cures."""
    found: dict[str, str] = {}
    usual: dict[str, int] = {}
    for one in weighed:
        for term in one.terms:
            usual[term.name] = max(usual.get(term.name, 1), term.micro_batches)
    for one in weighed:
        of_window = dict(_events(one))
        for term in one.terms:
            if not term.is_exact(one.tolerance):
                for name, evidence in _of_weights(one, term, usual[term.name], world):
                    if not any(inside in of_window for inside in INSIDE):
                        of_window[name] = evidence
        found = of_window | found
    return [Cause(name, found[name], cure) for name, cure in CURES.items() if name in found]


def _where(one: Weighed) -> str:
    window = one.windows[0]
    return f"window {window.number + 1} of {window.optimizer}"


def _events(one: Weighed) -> Iterator[tuple[str, str]]:
    """What happened in a window that should not."""
    where = _where(one)
    for window in one.windows:
        if any(math.isnan(factor) or factor < 1 for factor in window.clip_factors):
            least = min((factor for factor in window.clip_factors if factor < 1), default=None)
            how = "by value" if least is None else f"to {least:.3g} of their size"
            yield "clip per micro-batch", f"gradients were clipped between the backwards of {where}, {how}."
        if window.left_out:
            has_rest = any(other.micros for other in one.windows)
            is_whole = has_rest and all(_is_exact_without_left_out(term, one.tolerance) for term in one.terms)
            yield (
                "samples left out" if is_whole and one.terms else "gradients cleared inside the window",
                f"in {where}, the gradients of {len(window.left_out)} backwards were cleared before the step.",
            )
        if any(micro.is_again for micro in window.micros):
            yield "samples used twice", f"in {where}, one loss had a second backward."
        if window.has_left_over:
            yield "gradients left over", f"{where} began with the gradients of the one before, which were not cleared."
        if window.was_clipped_scaled:
            yield "clipped while scaled", f"in {where}, gradients were clipped before the GradScaler had divided them."
        if window.num_after:
            yield "samples left out", f"{window.num_after} backwards after {where}, the last one, reached no step."
        if window.is_repeated:
            yield "window closed twice", f"in {where}, the optimizer stepped again without a backward in between."
        if window.scheduler_steps and len(window.micros) > 1:
            yield (
                "scheduler per micro-batch",
                f"a scheduler was stepped {window.scheduler_steps} times between the backwards of {where}.",
            )
        if window.is_unsynchronised:
            yield "gradients not synchronised", f"in {where}, each rank stepped with its own gradients."


def _is_exact_without_left_out(term: TermWeights, tolerance: float) -> bool:
    """Whether those micro-batches that were not cleared are a window of their own."""
    kept = [share for share in term.shares if share.factor != 0]
    rest = TermWeights(name=term.name, shares=kept, own=term.own)
    rest.weigh()
    return bool(kept) and rest.is_exact(tolerance)


def _of_weights(one: Weighed, term: TermWeights, usual: int, world: int) -> Iterator[tuple[str, str]]:
    """The causes of weights that differ from 1."""
    where = _where(one)
    if not term.is_even(one.tolerance):
        shares = [s.part * ((s.count or 0.0) if s.kind == "sum" else 1.0) for s in term.shares if s.count]
        counts = " ".join(f"{s.count:g}" for s in term.shares[:8] if s.count is not None)
        if max(shares) - min(shares) <= 1e-4 * max(map(abs, shares)):
            yield (
                "mean of means",
                f"in {where}, all micro-batches count the same, but have different numbers of items: {counts}.",
            )
        elif len({round(s.factor, 6) for s in term.shares}) > 1:
            yield "divided inside the window", f"in {where}, gradients were multiplied between backwards."
            return
        else:
            yield (
                "items that do not fit the loss",
                f"in {where}, micro-batches are weighed by other numbers than their items: {counts}.",
            )
    if term.scale is not None and abs(term.scale - 1) > max(one.tolerance, TOLERANCE):
        yield _of_scale(term, term.scale, usual, world, where)


def _of_scale(term: TermWeights, scale: float, usual: int, world: int, where: str) -> tuple[str, str]:
    """The cause of a wrong scale."""
    said = f"in {where}, items count {scale:.4g} times as much as they should ({term.name})"
    count = term.micro_batches
    divisors = [divisor for share in term.shares for divisor in share.divisors]
    is_divided = any(abs(divisor - usual) < 0.5 for divisor in divisors)

    def is_near(number: float) -> bool:
        return number != 0 and abs(scale / number - 1) < NEAR

    by_ranks = world > 1 and any(is_near(number) for number in (world, 1 / world, world**2))
    more = next((d for d in divisors if d > count and is_near(count / d) and abs(d - round(d)) < 1e-6), None)
    if count < usual and is_near(count / usual):
        return "short window", f"{said}: it has {count} micro-batches, and others have {usual}."
    if by_ranks and (is_divided or term.shares[0].kind == "sum"):
        return "world size", f"{said}: there are {world} ranks."
    if count > 1 and is_near(count):
        return "not divided", f"{said}: its {count} micro-batches are added up."
    if usual > 1 and (is_near(1 / usual) or is_near(1 / count)):
        return "divided twice", f"{said}: it was divided by the number of micro-batches once too often."
    if by_ranks:
        return "world size", f"{said}: there are {world} ranks."
    if term.shares[0].kind == "mean" and more is not None:
        return "short window", f"{said}: it has {count} micro-batches, but was divided by {more:g}."
    if all(share.scale != 1 and is_near(share.scale) for share in term.shares):
        return "constant factor", f"{said}: that is the loss scale of the GradScaler. Step with scaler.step(optimizer)."
    if all(is_near(share.factor) for share in term.shares):
        return "constant factor", f"{said}: gradients were multiplied by that before the step."
    divisors = divisors or [abs(term.own / s.part) for s in term.shares if s.part and term.shares[0].kind == "sum"]
    if term.shares[0].kind == "sum" and max(divisors, default=1.0) <= world * (1 + NEAR):
        return "not divided", f"{said}: sums over {term.num_items:g} items are added up, and divided by nothing."
    if term.shares[0].kind == "sum":
        return (
            "items that do not fit the loss",
            f"{said}: a sum over {term.num_items:g} items was divided by "
            f"{', '.join(sorted({f'{divisor:.4g}' for divisor in divisors}))}. Were labels counted before the shift?",
        )
    return "constant factor", f"{said}."
