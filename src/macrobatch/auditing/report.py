"""The report of an audit: what users read, print and save."""

from __future__ import annotations

import json
import sys
from typing import Any

from macrobatch.auditing.causes import Cause
from macrobatch.auditing.cures import library_cure
from macrobatch.auditing.judging import Judgement, judge
from macrobatch.auditing.page import page
from macrobatch.auditing.watcher import Watcher

BAR = 12  # characters of a bar of weight 1


class AuditedWindow:
    """One window, as in the JSON: `window.weights` is `window["weights"]`.

    Attributes:
        optimizer: the name of the optimizer that stepped.
        items: the items of each micro-batch, those of the first rank first; None where they are not known.
        weights: the weight of one item in each of them.
        scale: the mean weight.
        terms: for a loss of several terms, the items, weights and scale of each, by name; else empty.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self.optimizer: str = found["optimizer"]
        self.items: list[float | None] = found["items"]
        self.weights: list[float | None] = found["weights"]
        self.scale: float | None = found["scale"]
        self.terms: dict[str, dict[str, Any]] = found.get("terms", {})

    def __getitem__(self, name: str) -> Any:
        if name not in vars(self):
            raise KeyError(f"an audited window has no {name!r}. It has: {', '.join(vars(self))}.")
        return vars(self)[name]

    def __repr__(self) -> str:
        return f"AuditedWindow({vars(self)})"


class AuditReport:
    """What `macrobatch.audit` has seen so far. All attributes can be read at any time, also inside the context.

    Attributes:
        verdict: "exact", "wrong" or "unknown".
        factor: the scale of a window that differs most from 1; None if no weight is known.
        causes: the names of the mistakes that were found.
        windows: one entry per optimizer step, with `optimizer`, `items`, `weights`, `scale`, and `terms` if there are
            several.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._final: Judgement | None = None
        self._seen: tuple[int, int, int, bool] | None = None
        self._last: Judgement | None = None

    @property
    def judgement(self) -> Judgement:
        """All that is known."""
        if self._final is not None:
            return self._final
        watcher = self._watcher
        seen = len(watcher.windows), len(watcher.failures), watcher.num_backwards, watcher.has_ended
        if self._last is None or seen != self._seen:
            self._last = judge([watcher.windows], watcher.failures, world=watcher.world_size)
            self._seen = seen
        return self._last

    def finish(self, judgement: Judgement) -> None:
        """Set what all ranks together have seen."""
        self._final = judgement

    @property
    def verdict(self) -> str:
        return self.judgement.verdict

    @property
    def ok(self) -> bool:
        """Whether the program is exact."""
        return self.verdict == "exact"

    @property
    def factor(self) -> float | None:
        return self.judgement.factor

    @property
    def causes(self) -> list[str]:
        return [cause.name for cause in self.judgement.causes]

    @property
    def explanations(self) -> list[Cause]:
        """The causes with their evidence and cures."""
        return list(self.judgement.causes)

    @property
    def windows(self) -> list[AuditedWindow]:
        return [AuditedWindow(window) for window in self.judgement.windows]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers and words, for JSON."""
        found = self.judgement
        return {
            "verdict": found.verdict,
            "factor": found.factor,
            "causes": [cause.name for cause in found.causes],
            "evidence": [cause.evidence for cause in found.causes],
            "unseen": found.unseen,
            "notes": found.notes,
            "places": found.places,
            "windows": found.windows,
        }

    def to_json(self) -> str:
        """The report as JSON. Numbers that are not finite become null."""
        return json.dumps(_finite(self.to_dict()), indent=2)

    def to_html(self) -> str:
        """The report as one page that opens offline, with a plot of the weight of every item."""
        return page(self.judgement, _headline(self.judgement), _library_cure(self.judgement))

    def __str__(self) -> str:
        return "\n".join(_lines(self.judgement))

    __repr__ = __str__


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


# ---------------------------------------------------------------------------------------------- as text


def _lines(found: Judgement) -> list[str]:
    lines = [_headline(found)]
    lines += found.places[:6]
    if found.windows:
        lines += ["", *_table(found.windows)]
    for number, cause in enumerate(found.causes, start=1):
        lines += ["", f"cause {number}: {cause.name}", f"  seen: {cause.evidence}", f"  by hand: {cause.cure}"]
    if cure := _library_cure(found):
        lines += ["  with macrobatch:", *("    " + line for line in cure.splitlines())]
    if found.unseen:
        lines += ["", "not seen:", *(f"  - {problem}" for problem in found.unseen[:8])]
        lines += [f"  try: {advice}" for advice in _advice(found.unseen)]
    lines += [f"note: {note}" for note in found.notes[:4]]
    return lines


def _library_cure(found: Judgement) -> str:
    return library_cure(sys.modules, [cause.name for cause in found.causes], found.steps)


def _headline(found: Judgement) -> str:
    count = f"{len(found.windows)} window{'' if len(found.windows) == 1 else 's'}"
    if found.verdict == "exact":
        return f"exact: in {count}, every item counted once."
    if found.verdict == "unknown":
        return f"unknown: {count} seen, but not all of what was in them."
    said = (
        ""
        if found.factor is None or abs(found.factor - 1) < 1e-4
        else f", up to {found.factor:.4g} times too much"
        if found.factor > 1
        else f", down to {found.factor:.4g} of what they should"
    )
    return f"wrong: in {count}, items did not count as they should{said} ({', '.join(c.name for c in found.causes)})."


def _advice(unseen: list[str]) -> list[str]:
    text = " ".join(unseen)
    found = []
    if "Compiled" in text:
        found.append("--no-compile, which runs the program without torch.compile")
    if "not understood" in text or "does not state" in text:
        found.append("macrobatch.verify, which compares the gradients of your step with those of one big batch")
    if "no optimizer step" in text:
        found.append("more --windows, or start the ranks of the program with torchrun ... -m macrobatch audit")
    if "reentrant" in text:
        found.append("checkpoint(..., use_reentrant=False)")
    if "ranks have told" in text:
        found.append("torchrun ... -m macrobatch audit on every rank, with a folder that all nodes share for --json")
    return found


def _table(windows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'window':>6}  {'optimizer':<12}{'micro':>5}{'items':>10}{'scale':>9}  weights of one item (▄ is 1)"]
    shown = windows if len(windows) <= 24 else [*windows[:12], *windows[-12:]]
    for number, window in enumerate(windows, start=1):
        if not any(window is one for one in shown):
            continue
        weights = [w for w in window["weights"] if w is not None]
        items = [n for n in window["items"] if n is not None]
        scale = "?" if window["scale"] is None else f"{window['scale']:.4f}"
        total = f"{sum(items):g}" if items else "?"
        lines.append(
            f"{number:>6}  {window['optimizer']:<12}{len(window['weights']):>5}{total:>10}{scale:>9}  {bars(weights)}"
        )
        for name, term in window.get("terms", {}).items():
            said = "?" if term["scale"] is None else f"{term['scale']:.4f}"
            lines.append(f"{'':>8}{name:<27}{said:>7}  {bars([w for w in term['weights'] if w is not None])}")
    return lines


def bars(weights: list[float]) -> str:
    """Weights as one character each, from 0 to 2 and more: "▄" is 1.

    >>> bars([0.0, 0.5, 1.0, 1.5, 2.0])
    '▁▂▄▆█'
    """
    steps = "▁▁▂▃▄▅▆▇█"
    drawn = "".join(steps[max(0, min(8, round(4 * weight)))] for weight in weights[:32])
    return drawn + ("…" if len(weights) > 32 else "")
