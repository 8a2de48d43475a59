"""The curves of a report, of one run or of several, from the lines of metrics that a run writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

from macrobatch.train.charts import Chart, Line, Points, moving_average

Row = Mapping[str, Any]


def values(steps: Iterable[Row], name: str) -> Points:
    """The value of a number at each step for which it is known.

    >>> values([{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}, {"step": 3, "loss": 2}], "loss")
    [(1, 2.5), (3, 2.0)]
    """
    found = ((row["step"], row.get(name)) for row in steps)
    return [(step, float(value)) for step, value in found if is_number(value)]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, so that it can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def total(steps: Iterable[Row], name: str) -> float:
    """The sum of a number over the steps for which it is known."""
    return sum(value for _, value in values(steps, name))


def own_numbers(validations: Iterable[Row]) -> list[str]:
    """The names of the numbers in validations besides loss and perplexity: those of the user's own evaluation.

    >>> own_numbers([{"step": 1, "loss": 2.0, "perplexity": 7.4, "accuracy": 0.5}])
    ['accuracy']
    """
    names = dict.fromkeys(name for row in validations for name in row)
    return [name for name in names if name not in ("step", "loss", "perplexity")]


def charts_of_run(steps: Sequence[Row], validations: Sequence[Row]) -> list[Chart]:
    """The charts of one run."""
    losses = values(steps, "loss")
    smooth = moving_average(losses)
    lines = [Line("train", losses, "train faint" if smooth else "train")]
    if smooth:
        lines.append(Line("train, smoothed", smooth, "train"))
    if measured := values(validations, "loss"):
        lines.append(Line("validation", measured, "validation"))
    own = own_numbers(validations)
    charts = [
        Chart("Loss", "nats a token", lines, switch=True),
        Chart("Terms", "the mean of each, which add up to the loss", terms(steps), switch=True),
        Chart("Perplexity", "of the validation", [Line("perplexity", values(validations, "perplexity"), "validation")]),
        *(Chart(name, "of the validation", [Line(name, values(validations, name), "validation")]) for name in own),
        Chart("Gradient norm", "before clipping", [Line("norm", values(steps, "grad_norm"), "train")], may_be_log=True),
        Chart(
            "Throughput", "tokens a second", [Line("tokens/s", values(steps, "tokens_per_second"), "train")], zero=True
        ),
        Chart("Padding", "share of the tokens computed, in %", _padding(steps), zero=True),
        Chart("Learning rate", "", [Line("lr", values(steps, "lr"), "train")], zero=True),
        _memory(values(steps, "memory_bytes")),
    ]
    return _non_empty(charts)


def terms(steps: Sequence[Row]) -> list[Line]:
    """A line with the mean of each term, if the loss has several terms.

    >>> [line.points for line in terms([{"step": 1, "losses": {"policy": 2.0, "kl": None}}])]
    [[(1, 2.0)], []]
    """
    names = dict.fromkeys(name for row in steps for name in row.get("losses") or ())
    rows = {name: [{"step": row["step"], name: (row.get("losses") or {}).get(name)} for row in steps] for name in names}
    return [Line(name, values(rows[name], name), f"run{number % 8}") for number, name in enumerate(names)]


def _padding(steps: Sequence[Row]) -> list[Line]:
    def share(name: str) -> Points:
        both = ((row["step"], row.get("tokens"), row.get(name)) for row in steps)
        return [
            (step, 100 * (1 - tokens / padded))
            for step, tokens, padded in both
            if is_number(tokens) and is_number(padded) and padded > 0
        ]

    lines = [
        Line("in the usual order", share("padded_in_order"), "validation"),
        Line("here", share("padded_tokens"), "train"),
    ]
    return [line for line in lines if line.points]


def _memory(points: Points) -> Chart:
    unit, name = (2**30, "GiB") if max((size for _, size in points), default=0) >= 2**30 else (2**20, "MiB")
    peaks = accumulate((size for _, size in points), max)  # the peak of a process that resumed the run starts from 0
    line = Line("peak", [(step, size / unit) for (step, _), size in zip(points, peaks, strict=True)], "train")
    return Chart("Memory", f"peak so far, {name}", [line], zero=True)


def charts_of_runs(runs: Sequence[tuple[str, Sequence[Row], Sequence[Row]]]) -> list[Chart]:
    """The charts of several runs, each with its name, steps and validations. Each run has its own colour."""

    def lines(name: str, *, smooth: bool = False) -> list[Line]:
        every = [values(steps, name) for _, steps, _ in runs]
        found = [moving_average(points) or points for points in every] if smooth else every
        return [
            Line(run, points, f"run{number}")
            for number, ((run, _, _), points) in enumerate(zip(runs, found, strict=True))
        ]

    def validation_lines(name: str) -> list[Line]:
        return [Line(run, values(rows, name), f"run{number}") for number, (run, _, rows) in enumerate(runs)]

    own = dict.fromkeys(name for _, _, rows in runs for name in own_numbers(rows))
    charts = [
        Chart("Loss", "smoothed, nats a token", lines("loss", smooth=True), switch=True),
        Chart("Validation", "nats a token", validation_lines("loss"), switch=True),
        *(Chart(name, "of the validation", validation_lines(name)) for name in own),
        Chart("Throughput", "smoothed, tokens a second", lines("tokens_per_second", smooth=True), zero=True),
        Chart("Learning rate", "", lines("lr"), zero=True),
        Chart("Gradient norm", "smoothed, before clipping", lines("grad_norm", smooth=True), may_be_log=True),
    ]
    return _non_empty(charts)


def _non_empty(charts: Sequence[Chart]) -> list[Chart]:
    """The charts that have at least one point."""
    return [chart for chart in charts if any(line.points for line in chart.lines)]
