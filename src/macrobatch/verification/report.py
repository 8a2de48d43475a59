"""The report that `verify` returns, and its text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

WIDTH = 150  # of the text, at most
Certainty = Literal["read", "inferred", "unknown"]
Verdict = Literal["exact", "wrong", "unknown"]


class ParameterError(NamedTuple):
    """The error of one parameter's gradient, relative to the largest gradient of the whole model."""

    name: str
    error: float


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason why the gradient of a training step is wrong, or why that cannot be told.

    Attributes:
        name: the name of the cause. The table in docs/verify.md explains all names.
        evidence: the measurement that shows the cause.
        cure: what to change in the training step, or in what is verified.
        certainty: "read" if the graph of a loss states it, "inferred" if measurements fit no other known cause, and
            "unknown" if it is a reason why the step could not be judged.

    >>> cause = Cause(name="not divided", evidence="the gradient is 4 times the right one.", cure="Divide once.")
    >>> print(cause.name, "->", cause.cure)
    not divided -> Divide once.
    """

    name: str
    evidence: str
    cure: str
    certainty: Certainty = "inferred"


@dataclass(frozen=True, kw_only=True)
class WindowReport:
    """The result for one optimizer step.

    Attributes:
        samples: the number of samples on all ranks; None if unknown.
        micro_batches: the number of micro-batches; on several ranks, that of the rank with the most.
        relative_error: the largest difference in any gradient, divided by the largest gradient of the model.
        factor: how large the step's gradient is, relative to the right one: 1 is right, 2 is twice as large.
    """

    samples: int | None
    micro_batches: int
    relative_error: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `verify`. ``print(report)`` shows it as text.

    Attributes:
        verdict: "exact" if the step's gradients are those of one big batch, "wrong" if they are not, "unknown" if it
            could not be told; then the causes say why.
        max_relative_error: the largest difference in any gradient, divided by the largest gradient of the model;
            infinite if no gradient was compared.
        bound: the largest error that counts as rounding in this precision.
        reference: a text that says what the step was compared with.
        worst: the parameters with the largest errors, each with its ``name`` and ``error``.
        windows: the results of the optimizer steps, each with its number of ``samples`` (None if unknown) and
            ``micro_batches``, its ``relative_error``, and a ``factor``: the size of its gradient relative to the right
            one.
        causes: the reasons for the verdict, the likeliest first. Empty if it is "exact".
        notes: other remarks.

    >>> report = Report(
    ...     verdict="exact", max_relative_error=0.0, bound=2e-6, reference="one big batch", worst=(), windows=()
    ... )
    >>> report.ok, report.to_dict()["ok"]
    (True, True)
    """

    verdict: Verdict
    max_relative_error: float
    bound: float
    reference: str
    worst: tuple[ParameterError, ...]
    windows: tuple[WindowReport, ...]
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the step is exact."""
        return self.verdict == "exact"

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to plain data for JSON.

        Returns:
            A dict of lists, dicts, strings and numbers. Infinite and NaN numbers become None.
        """
        plain = {"verdict": self.verdict, "ok": self.ok, **asdict(self)}
        plain["worst"] = [{"name": name, "error": error} for name, error in self.worst]
        return {key: _json_value(value) for key, value in plain.items()}

    def __str__(self) -> str:
        is_small = self.verdict == "wrong" and self.max_relative_error <= self.bound
        verdict = self.verdict.upper() + ", though not by its size" * is_small
        error = f"error {self.max_relative_error:.2g} of the largest gradient, at most {self.bound:.2g} allowed"
        if not math.isfinite(self.max_relative_error):
            error = "the error is infinite or NaN" if self.windows else "no gradient was compared"
        found = "".join(f"{', ' if number else ': '}{cause.name}" for number, cause in enumerate(self.causes))
        lines = [f"{verdict}: {error}{found}", f"compared with {self.reference}"]
        if len(self.windows) > 1:
            lines.insert(1, f"{len(self.windows)} optimizer steps, each compared with its own samples")
        for number, cause in enumerate(self.causes, start=1):
            lines += ["", f"cause {number}: {cause.name} ({_SURE[cause.certainty]})"]
            for head, text in (("  found: ", cause.evidence), ("  cure:  ", cause.cure)):
                lines += textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if self.windows and (len(self.windows) > 1 or not self.ok):
            rows = [
                (str(i), _or_unknown(w.samples), str(w.micro_batches), f"{w.relative_error:.2g}", f"x {w.factor:.4g}")
                for i, w in enumerate(self.windows, start=1)
            ]
            lines += _table(("window", "samples", "micro-batches", "error", "of the right gradient"), rows)
        if self.worst and not self.ok:
            lines += _table(("parameter", "error"), [(name, f"{error:.2g}") for name, error in self.worst])
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


_SURE = {"read": "read from the loss", "inferred": "inferred", "unknown": "why it is unknown"}


def verdict_of(causes: Sequence[Cause]) -> Verdict:
    """Exact without a cause; wrong, unless all causes only say why it is unknown."""
    if not causes:
        return "exact"
    return "unknown" if all(cause.certainty == "unknown" for cause in causes) else "wrong"


def _json_value(value: Any) -> Any:
    """Convert tuples to lists, and infinite and NaN numbers to None."""
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, dict):
        return {key: _json_value(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return ["", *(f"  {line}".rstrip() for line in (lines[0], "  ".join("-" * w for w in widths), *lines[1:]))]
