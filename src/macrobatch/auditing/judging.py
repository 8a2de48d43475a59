"""The verdict on a program: exact, wrong with its causes, or unknown with what was not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from macrobatch.auditing.causes import Cause, causes_of
from macrobatch.auditing.factors import factors_of
from macrobatch.auditing.records import Window
from macrobatch.auditing.weighing import weigh
from macrobatch.auditing.weights import Weighed

Verdict = Literal["exact", "wrong", "unknown"]
FAILED = "the program failed"


@dataclass(kw_only=True)
class Judgement:
    """Everything that is said of a program."""

    verdict: Verdict
    factor: float | None
    causes: list[Cause] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # of backwards and losses
    steps: int = 1  # the micro-batches of its longest window, on one rank


def judge(ranks: Sequence[Sequence[Window]], unseen: Sequence[str] = (), *, world: int = 1) -> Judgement:
    """The verdict on the windows that each rank has seen."""
    problems, causes, notes = list(unseen), dict[str, Cause](), list[str]()
    shown: list[tuple[int, dict[str, Any]]] = []
    factors: list[float] = []
    if len(ranks) < world:
        problems.append(f"only {len(ranks)} of {world} ranks have told what they saw")
    for optimizer in dict.fromkeys(window.optimizer for windows in ranks for window in windows):
        of_ranks = [[window for window in windows if window.optimizer == optimizer] for windows in ranks]
        if len({len(windows) for windows in of_ranks}) != 1:
            problems.append(f"ranks took different numbers of steps with {optimizer}")
        joint = [list(windows) for windows in zip(*of_ranks, strict=False)]
        if len(ranks) > 1:
            joint = _with_exchanges(joint)
        weighed = weigh(joint, factors_of(joint))
        if len(ranks) < world:
            weighed = [_without_weights(one) for one in weighed]
        for one in weighed:
            problems += one.unknown
        for cause in causes_of(weighed, len(ranks)):
            causes.setdefault(cause.name, cause)
        notes += _notes(weighed)
        factors += [s for one in weighed for s in _scales(one)]
        order = {id(window): place for place, window in enumerate(ranks[0])}
        shown += [(order.get(id(one.windows[0]), 0), _shown(optimizer, one)) for one in weighed]
    shown.sort(key=lambda pair: pair[0])
    problems = list(dict.fromkeys(problems))
    if not shown and not problems:
        problems = ["no optimizer step was seen"]
    factor = max(factors, key=lambda s: abs(math.log(s)) if s > 0 else math.inf) if factors else None
    if any(problem.startswith(FAILED) for problem in problems):
        causes = {}  # what it did until then may not be what it was meant to do
    verdict: Verdict = "wrong" if causes else "unknown" if problems else "exact"
    return Judgement(
        verdict=verdict,
        factor=factor,
        causes=list(causes.values()),
        unseen=problems,
        notes=list(dict.fromkeys(notes)),
        windows=[window for _, window in shown],
        places=_places(ranks),
        steps=max((len(w.micros) + len(w.left_out) for w in ranks[0]), default=1) if ranks else 1,
    )


def _without_weights(one: Weighed) -> Weighed:
    """A window of which other ranks are not known."""
    return Weighed(windows=one.windows, terms=[], unknown=one.unknown)


def _with_exchanges(joint: list[list[Window]]) -> list[list[Window]]:
    """The windows of all ranks, if they have exchanged gradients; of the first, if all have the same gradients anyway.

    Otherwise each rank has trained alone: a mistake if they began with the same parameters.
    """
    local = [ranks for ranks in joint if any(m.exchange is None and not m.as_counted for w in ranks for m in w.micros)]
    if not local:
        return joint
    if all(_are_alike([window.gradient for window in ranks]) for ranks in local):
        return [ranks[:1] for ranks in joint]
    began_alike = _are_alike([window.parameters for window in joint[0]])
    for ranks in local:
        if began_alike:
            ranks[0].is_unsynchronised = True
        else:
            ranks[0].problems.append("each rank has trained a model of its own, or they exchanged no gradients")
    return joint


def _are_alike(samples: list[list[float] | None]) -> bool:
    """Whether all ranks have the same numbers."""
    return None not in samples and all(sample == samples[0] for sample in samples)


def _scales(one: Weighed) -> list[float]:
    if one.is_single and not one.terms:
        return [1.0]
    return [term.scale for term in one.terms if term.scale is not None and math.isfinite(term.scale)]


def _shown(optimizer: str, one: Weighed) -> dict[str, Any]:
    """A window as in the JSON."""
    shown: dict[str, Any] = {"optimizer": optimizer}
    micro_batches = sum(len(w.micros) + len(w.left_out) for w in one.windows)
    if one.terms:
        first = one.terms[0]
        shown |= {"items": _whole(first.items), "weights": first.weights, "scale": first.scale}
    elif one.is_single:
        shown |= {"items": [None], "weights": [1.0], "scale": 1.0}
    else:
        shown |= {"items": [None] * micro_batches, "weights": [None] * micro_batches, "scale": None}
    if len(one.terms) > 1:
        shown["terms"] = {
            term.name: {"items": _whole(term.items), "weights": term.weights, "scale": term.scale} for term in one.terms
        }
    return shown


def _whole(items: list[float | None]) -> list[float | None]:
    return [int(n) if n is not None and n == n // 1 else n for n in items]


def _places(ranks: Sequence[Sequence[Window]]) -> list[str]:
    found: dict[str, None] = {}
    for windows in ranks[:1]:
        for window in windows:
            for micro in window.micros:
                loss = "" if micro.loss_place is None else f", of the loss at {micro.loss_place}"
                found.setdefault(f"backward at {micro.place}{loss}")
    return list(found)


def _notes(weighed: list[Weighed]) -> list[str]:
    """What was taken for granted."""
    lines = {micro.place for one in weighed if one.has_parts for window in one.windows for micro in window.micros}
    by_line = [f"the backwards at {', '.join(sorted(lines))} are taken for the parts of one loss."] if lines else []
    return by_line + [
        f"{term.name} is multiplied by {term.own:.6g}, which is taken for a part of the loss."
        for one in weighed
        for term in one.terms
        if abs(term.own - 1) > 1e-6 and not one.is_single
    ]
