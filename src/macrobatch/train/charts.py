"""Line charts over the steps, as SVG that stretches with the page. The labels are HTML text beside the SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

POINTS = 800  # at most in a line: about one per pixel of its width
DOTS = 30  # a line with at most so many points has a dot at each
SIZE = 1000  # width and height of a chart, in SVG units

Points = list[tuple[int, float]]
Row = Mapping[str, Any]  # a line of metrics


def moving_average(points: Points) -> Points:
    """The moving average of some points; an empty list if there are too few points to smooth.

    The window is symmetric, so that the average does not lag when a loss falls steeply. Only at the end it keeps its
    full width to the left, because a single number would bend the line there.
    """
    if len(points) < 60:
        return []
    sums = [0.0, *accumulate(value for _, value in points)]
    found, reach = [], max(len(points) // 60, 3)
    for index, (step, _) in enumerate(points):
        left = min(reach, index)
        right = min(left, len(points) - 1 - index)
        found.append((step, (sums[index + right + 1] - sums[index - left]) / (left + 1 + right)))
    return found


@dataclass(frozen=True)
class Line:
    """A line of a chart, and the CSS classes of its style."""

    name: str
    points: Points
    style: str


@dataclass(frozen=True)
class Chart:
    """Lines over the steps."""

    title: str
    unit: str
    lines: Sequence[Line]
    zero: bool = False  # whether the scale begins at zero
    may_be_log: bool = False  # whether the scale is logarithmic if values differ by orders of magnitude
    switch: bool = False  # whether the reader can switch to a logarithmic scale

    @property
    def steps(self) -> Scale:
        steps = [step for line in self.lines for step, _ in line.points]
        return Scale(min(steps), max(max(steps), min(steps) + 1))

    @property
    def heights(self) -> Scale:
        found = [value for line in self.lines for _, value in line.points]
        low, high = min(found), max(found)
        if self.may_be_log and low > 0 and high / low > 30:
            return Scale(low / 1.1, high * 1.1, log=True)
        if self.zero:
            low = min(low, 0.0)
        room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        return Scale(low if self.zero else low - room, high + room)

    @property
    def logarithmic(self) -> Scale | None:
        """The logarithmic scale that the reader can switch to; None if there is none."""
        found = [value for line in self.lines for _, value in line.points]
        if not self.switch or min(found) <= 0:
            return None
        return Scale(min(found) / 1.05, max(found) * 1.05, log=True)

    def frame(self, heights: Scale, name: str) -> dict[str, Any]:
        """What the page draws of this chart on a scale: paths of SVG, and labels with their places."""
        steps = self.steps
        up = heights.ticks()
        return {
            "name": name,
            "title": self.title,
            "up": [(f"{heights.share(tick):.2%}", heights.label(tick)) for tick in up],
            "across": [(f"{steps.share(tick):.2%}", steps.label(tick, whole=True)) for tick in steps.ticks(whole=True)],
            "grid": "".join(f"M0 {SIZE - SIZE * heights.share(tick):.1f}H{SIZE}" for tick in up),
            "lines": [(line.style, _path(line, steps, heights)) for line in self.lines],
            "dots": [(one.style, _dots(one, steps, heights)) for one in self.lines if len(one.points) <= DOTS],
        }

    def data(self) -> dict[str, Any]:
        """The numbers that the page shows under the cursor."""
        return {
            "steps": [self.steps.low, self.steps.high],
            "lines": [
                {"name": line.name, "points": [[step, _round(value)] for step, value in thinned_points(line.points)]}
                for line in self.lines
            ],
        }


@dataclass(frozen=True)
class Scale:
    """The range of an axis."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """The position of a value on the axis, from 0 to 1.

        >>> Scale(10, 20).share(12.5), Scale(1, 100, log=True).share(10)
        (0.25, 0.5)
        """
        low, high, value = (
            (math.log(n) for n in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return (value - low) / (high - low)

    def ticks(self, *, whole: bool = False) -> list[float]:
        """Round numbers that divide the axis into a few parts.

        >>> Scale(0, 100).ticks(), Scale(0.5, 40, log=True).ticks()
        ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.5, 1.0, 2.0, 5.0, 10.0, 20.0])
        """
        if self.log:
            lowest, highest = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            factors = (1,) if highest - lowest > 1 else (1, 2, 5)
            candidates = [f * 10.0**power for power in range(lowest - 1, highest + 1) for f in factors]
            found = [tick for tick in candidates if self.low <= tick <= self.high]
            if len(found) > 1:
                return found
        widest = (self.high - self.low) / (3 if whole else 4)
        power = 10.0 ** math.floor(math.log10(widest))
        size = next(factor * power for factor in (10, 5, 2, 1, 0.5) if factor * power <= widest * 1.000001)
        if whole:
            size = max(round(size), 1)
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return [number * size for number in range(first, last + 1)]

    def label(self, tick: float, *, whole: bool = False) -> str:
        """The text of a tick, with enough digits to distinguish it from the other ticks.

        >>> Scale(0, 0.001).label(0.0004), Scale(4, 5).label(4.6), Scale(0, 50_000).label(20_000), Scale(0, 1).label(0)
        ('4e-4', '4.6', '20k', '0')
        """
        ticks = self.ticks(whole=whole)
        largest = max(map(abs, ticks), default=0.0)
        if tick == 0:
            return "0"
        if largest < 0.01:
            digits, _, power = f"{tick:.1e}".partition("e")
            return f"{digits.removesuffix('.0')}e{int(power)}"
        if largest >= 10_000:
            return short(tick)
        are_powers = self.log and all(float(f"{one:.0e}") == one for one in ticks)
        gap = tick if are_powers else min((b - a for a, b in pairwise(ticks)), default=abs(tick))
        return f"{tick:,.{max(0, -math.floor(math.log10(gap) + 1e-9))}f}"


def _path(line: Line, steps: Scale, heights: Scale) -> str:
    points = [
        f"{SIZE * steps.share(step):.1f} {SIZE - SIZE * heights.share(value):.1f}"
        for step, value in thinned_points(line.points)
    ]
    return "M" + "L".join(points) if points else ""


def _dots(line: Line, steps: Scale, heights: Scale) -> str:
    """SVG with a line of zero length per point: with round ends it is a dot, even if the chart is stretched."""
    return "".join(
        f"M{SIZE * steps.share(step):.1f} {SIZE - SIZE * heights.share(value):.1f}h0" for step, value in line.points
    )


def thinned_points(points: Points, most: int = POINTS) -> Points:
    """About `most` of these points: both ends, and the lowest and the highest point of each interval.

    >>> thinned_points([(1, 5.0), (2, 9.0), (3, 4.0), (4, 6.0), (5, 6.0), (6, 7.0), (7, 6.5), (8, 5.0)], most=4)
    [(1, 5.0), (2, 9.0), (3, 4.0), (6, 7.0), (8, 5.0)]
    """
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // most)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        kept.add(min(bucket, key=lambda index: points[index][1]))
        kept.add(max(bucket, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(kept)]


# ---------------------------------------------------------------------------------------------- numbers


def short(number: float) -> str:
    """A number with few digits.

    >>> short(950), short(12_345), short(2_500_000), short(3.0e9)
    ('950', '12.3k', '2.5M', '3B')
    """
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if suffix == 'k' else size):.1f}".removesuffix(".0") + suffix
    return f"{number:,.0f}"


def in_bytes(size: float) -> str:
    """A number of bytes.

    >>> in_bytes(300 * 2**20), in_bytes(5.25 * 2**30)
    ('300 MiB', '5.25 GiB')
    """
    power = min(int(math.log(max(size, 1), 1024)), 4)
    return f"{size / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


def _round(value: float) -> float:
    return float(f"{value:.6g}")


# ----------------------------------------------------------------------------------------------------------- of runs


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
