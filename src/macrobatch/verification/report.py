"""The report that `verify` returns, and its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

RETURN_ITEMS = (
    "Let loss_fn return what it divides by: return loss, (labels != -100).sum(), after any shift. A sum needs "
    'reduction="sum". A loss that is neither, such as a maximum, needs joint=.'
)


class ParameterError(NamedTuple):
    """The error of one parameter's gradient, relative to the largest gradient of the whole model."""

    name: str
    error: float


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason why the gradient of a training step is wrong, as `verify` has found it.

    Attributes:
        name: the name of the cause. The table in docs/verify.md explains all names.
        evidence: the measurement that shows the cause.
        cure: what to change in the training step.

    >>> cause = Cause(name="not divided", evidence="the gradient is 4 times the right one.", cure="Divide once.")
    >>> print(cause.name, "->", cause.cure)
    not divided -> Divide once.
    """

    name: str
    evidence: str
    cure: str


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
        ok: whether the step's gradients are those of one big batch.
        max_relative_error: the largest difference in any gradient, divided by the largest gradient of the model.
        bound: the largest error that counts as rounding in this precision.
        reference: a text that says what the step was compared with.
        worst: the parameters with the largest errors, each with its ``name`` and ``error``.
        windows: the results of the optimizer steps, each with its number of ``samples`` (None if unknown) and
            ``micro_batches``, its ``relative_error``, and a ``factor``: the size of its gradient relative to the right
            one.
        causes: the reasons why the step is wrong, the likeliest first. Empty if it is right.
        notes: other remarks.

    >>> report = Report(ok=True, max_relative_error=0.0, bound=2e-6, reference="one big batch", worst=(), windows=())
    >>> report.to_dict()["ok"]
    True
    """

    ok: bool
    max_relative_error: float
    bound: float
    reference: str
    worst: tuple[ParameterError, ...]
    windows: tuple[WindowReport, ...]
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def _is_small(self) -> bool:
        return self.max_relative_error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to plain data for JSON.

        Returns:
            A dict of lists, dicts, strings and numbers. Infinite and NaN numbers become None.
        """
        plain = asdict(self) | {"worst": [{"name": name, "error": error} for name, error in self.worst]}
        return {key: _json_value(value) for key, value in plain.items()}

    def __str__(self) -> str:
        verdict = "EXACT" if self.ok else "WRONG, though not by its size" if self._is_small else "WRONG"
        lines = [
            f"{verdict}: error {self.max_relative_error:.2g} of the largest gradient, at most {self.bound:.2g} allowed",
            f"compared with {self.reference}",
        ]
        if len(self.windows) > 1:
            lines.insert(1, f"{len(self.windows)} optimizer steps, each compared with its own samples")
        if len(self.windows) > 1 or not self.ok:
            rows = [
                (str(i), _or_unknown(w.samples), str(w.micro_batches), f"{w.relative_error:.2g}", f"x {w.factor:.4g}")
                for i, w in enumerate(self.windows, start=1)
            ]
            lines += _table(("window", "samples", "micro-batches", "error", "of the right gradient"), rows)
        if self.worst and not self.ok:
            lines += _table(("parameter", "error"), [(name, f"{error:.2g}") for name, error in self.worst])
        for number, cause in enumerate(self.causes, start=1):
            lines += ["", f"cause {number}: {cause.name}", f"  found: {cause.evidence}", f"  cure:  {cause.cure}"]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


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
