"""What `verify` found: a record, and how it prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class ParameterError(NamedTuple):
    """How far off the gradient of one parameter is, as a share of the largest gradient of the whole model."""

    name: str
    error: float


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a gradient is wrong.

    Attributes:
        name: what to look it up by.
        evidence: what was measured.
        cure: what to write instead.
    """

    name: str
    evidence: str
    cure: str


@dataclass(frozen=True, kw_only=True)
class WindowReport:
    """One optimizer step of the step that was verified.

    Attributes:
        samples: how many went into it, on all ranks; None where they could not be told.
        micro_batches: how many, on the rank that has most.
        relative_error: largest difference / largest gradient of the model.
        factor: what the right gradient would have to be multiplied with to come closest.
    """

    samples: int | None
    micro_batches: int
    relative_error: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` found.

    Attributes:
        ok: whether the step's gradients are those of one big batch.
        max_relative_error: the largest difference in any parameter's gradient, over the largest gradient of the model.
        bound: what that may be in this precision.
        reference: what it was compared with.
        worst: the parameters that are furthest off.
        windows: one for each optimizer step.
        causes: why it is wrong, the likeliest first.
        notes: what else one should know.
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
        """All of it as JSON has it; what is not finite is None."""
        plain = asdict(self) | {"worst": [{"name": name, "error": error} for name, error in self.worst]}
        return {key: _plain(value) for key, value in plain.items()}

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


def _plain(value: Any) -> Any:
    """Lists for tuples, and None for numbers that JSON does not have."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return ["", *(f"  {line}".rstrip() for line in (lines[0], "  ".join("-" * w for w in widths), *lines[1:]))]
