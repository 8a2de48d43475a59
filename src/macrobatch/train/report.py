"""`written`: the report of a run, one HTML file that opens offline.

It is made of what lies in the run folder: ``metrics.jsonl``, ``validation.jsonl`` and ``run.json``; so it can be made
anew at any time, also of a run that was killed. The charts are SVG, drawn here; they stretch with the page, therefore
their labels are text beside them. The few lines of ``report.js`` only show the numbers under the pointer.
"""

from __future__ import annotations

import html
import json
import logging
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeGuard

from macrobatch.errors import UsageError
from macrobatch.train.clock import PARTS
from macrobatch.train.record import METRICS, VALIDATION, clock_time, rows

REPORT = "report.html"
RUN = "run.json"
POINTS = 800  # of a line: about one for each pixel of its width
SIZE = 1000  # of a chart, in its own coordinates, both ways

Row = Mapping[str, Any]
Points = list[tuple[int, float]]

logger = logging.getLogger("macrobatch")

# Whatever the page may hold, the browser is told to ask nobody for anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def written(folder: Path) -> Path:
    """Write the report of the run in `folder`, and return its path."""
    steps = rows(folder / METRICS)
    if not steps:
        raise UsageError(f"{folder} holds no steps of a run: {METRICS} is missing or empty. Name the folder of a run.")
    run = _run(folder / RUN)
    page = _page(folder.resolve().name, steps, rows(folder / VALIDATION), run)
    aside = folder / f"{REPORT}.partial"
    with aside.open("w", encoding="utf-8") as file:
        file.write(page)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / REPORT)
    return folder / REPORT


def _run(path: Path) -> dict[str, Any]:
    """What the trainer knew of the run; nothing where that cannot be read."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): the report is without settings and versions", path, error)
        return {}
    return run if isinstance(run, dict) else {}


def _page(name: str, steps: Sequence[Row], validations: Sequence[Row], run: Mapping[str, Any]) -> str:
    charts = _charts(steps, validations)
    data = json.dumps([chart.data() for chart in charts])
    own = Path(__file__)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(name)}</title>
<style>
{own.with_suffix(".css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{html.escape(name)}</h1>
<p>{html.escape(_summary(steps))}</p>
</header>
<main>
{_tiles(steps, validations)}
<section class="charts">
{"".join(chart.html(number) for number, chart in enumerate(charts))}</section>
{_where_time_went(steps)}
{_tables(run)}
</main>
<script type="application/json" id="data">{data}</script>
<script>
{own.with_suffix(".js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


# ---------------------------------------------------------------------------------------------- what the numbers say


def values(steps: Iterable[Row], name: str) -> Points:
    """The steps for which that number is known, each with it.

    >>> values([{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}, {"step": 3, "loss": 2}], "loss")
    [(1, 2.5), (3, 2.0)]
    """
    found = ((row["step"], row.get(name)) for row in steps)
    return [(step, float(value)) for step, value in found if _is_number(value)]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _sum(steps: Iterable[Row], name: str) -> float:
    return sum(value for _, value in values(steps, name))


def _summary(steps: Sequence[Row]) -> str:
    facts = [f"{steps[-1]['step']:,} optimizer steps"]
    if tokens := _sum(steps, "tokens") or _sum(steps, "items"):
        facts.append(f"{short(tokens)} tokens")
    if seconds := _sum(steps, "seconds"):
        facts.append(f"{clock_time(seconds)} {'hours' if seconds >= 3600 else 'minutes'} of training")
    return " · ".join(facts)


def _tiles(steps: Sequence[Row], validations: Sequence[Row]) -> str:
    """The numbers that one looks for first."""
    tiles: list[tuple[str, str, str]] = []
    if losses := values(steps, "loss"):
        recent = statistics.fmean(loss for _, loss in losses[-10:])
        tiles.append(("loss", f"{recent:.3f}", f"last {len(losses[-10:])} steps; from {losses[0][1]:.3f}"))
    if measured := values(validations, "loss"):
        best = min(measured, key=lambda point: point[1])
        tiles.append(("validation loss", f"{measured[-1][1]:.3f}", f"best {best[1]:.3f} at step {best[0]:,}"))
    if speeds := values(steps, "tokens_per_second"):
        tiles.append(("tokens a second", short(statistics.median(speed for _, speed in speeds)), "median of the steps"))
    tiles += _padding_tile(steps)
    if memory := values(steps, "memory_bytes"):
        tiles.append(("peak memory", in_bytes(max(size for _, size in memory)), "of one process"))
    shown = "".join(
        f'<div class="tile"><span>{html.escape(title)}</span><b>{html.escape(figure)}</b>'
        f"<small>{html.escape(note)}</small></div>\n"
        for title, figure, note in tiles
    )
    return f'<section class="tiles">\n{shown}</section>'


def _padding_tile(steps: Sequence[Row]) -> list[tuple[str, str, str]]:
    tokens, padded, in_order = (_sum(steps, name) for name in ("tokens", "padded_tokens", "padded_in_order"))
    if not tokens or padded < tokens:
        return []
    share = f"{1 - tokens / padded:.1%}"
    if in_order <= tokens:
        return [("padding", share, "of the tokens computed")]
    saved = (in_order - padded) / (in_order - tokens)
    return [("padding saved", f"{saved:.1%}", f"{share} left, {1 - tokens / in_order:.1%} in the usual order")]


def _charts(steps: Sequence[Row], validations: Sequence[Row]) -> list[Chart]:
    losses = values(steps, "loss")
    smooth = smoothed(losses)
    lines = [Line("train", losses, "train faint" if smooth else "train")]
    if smooth:
        lines.append(Line("train, smoothed", smooth, "train"))
    if measured := values(validations, "loss"):
        lines.append(Line("validation", measured, "validation"))
    charts = [
        Chart("Loss", "nats a token", lines),
        Chart("Gradient norm", "before clipping", [Line("norm", values(steps, "grad_norm"), "train")], may_be_log=True),
        Chart(
            "Throughput", "tokens a second", [Line("tokens/s", values(steps, "tokens_per_second"), "train")], zero=True
        ),
        Chart("Padding", "share of the tokens computed, in %", _padding(steps), zero=True),
        Chart("Learning rate", "", [Line("lr", values(steps, "lr"), "train")], zero=True),
        _memory(values(steps, "memory_bytes")),
    ]
    return [chart for chart in charts if any(line.points for line in chart.lines)]


def _padding(steps: Sequence[Row]) -> list[Line]:
    def share(name: str) -> Points:
        both = ((row["step"], row.get("tokens"), row.get(name)) for row in steps)
        return [
            (step, 100 * (1 - tokens / padded))
            for step, tokens, padded in both
            if _is_number(tokens) and _is_number(padded) and padded > 0
        ]

    lines = [
        Line("in the usual order", share("padded_in_order"), "validation"),
        Line("here", share("padded_tokens"), "train"),
    ]
    return [line for line in lines if line.points]


def _memory(points: Points) -> Chart:
    unit, name = (2**30, "GiB") if max((size for _, size in points), default=0) >= 2**30 else (2**20, "MiB")
    line = Line("peak", [(step, size / unit) for step, size in points], "train")
    return Chart("Memory", f"peak so far, {name}", [line], zero=True)


def smoothed(points: Points) -> Points:
    """Each with the mean of those around it; nothing where there are too few to need that."""
    if len(points) < 60:
        return []
    sums = [0.0, *accumulate(value for _, value in points)]
    found, reach = [], max(len(points) // 60, 3)
    for index, (step, _) in enumerate(points):
        side = min(reach, index, len(points) - 1 - index)  # as far to the left as to the right: no lag
        found.append((step, (sums[index + side + 1] - sums[index - side]) / (2 * side + 1)))
    return found


# ---------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Line:
    """A line of a chart, and the names of its style."""

    name: str
    points: Points
    style: str


@dataclass(frozen=True)
class Chart:
    """Lines over the steps.

    Attributes:
        title: what is drawn.
        unit: in which unit, or how to read it.
        lines: at least one of them with a point.
        zero: whether the scale begins at zero.
        may_be_log: whether the scale is logarithmic where values differ by orders of magnitude.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    zero: bool = False
    may_be_log: bool = False

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

    def html(self, number: int) -> str:
        """The chart as a part of the page."""
        steps, heights = self.steps, self.heights
        across, up = steps.ticks(whole=True), heights.ticks()
        grid = "".join(f"M0 {SIZE - SIZE * heights.share(tick):.1f}H{SIZE}" for tick in up)
        lines = "".join(f'<path class="line {line.style}" d="{_path(line, steps, heights)}"/>' for line in self.lines)
        labels = "".join(f'<span style="bottom:{heights.share(tick):.2%}">{heights.label(tick)}</span>' for tick in up)
        feet = "".join(
            f'<span style="left:{steps.share(tick):.2%}">{steps.label(tick, whole=True)}</span>' for tick in across
        )
        return (
            f'<figure class="chart" data-chart="{number}">\n'
            f"<figcaption><b>{html.escape(self.title)}</b> <small>{html.escape(self.unit)}</small>{self._legend()}"
            "</figcaption>\n"
            f'<div class="frame"><div class="up">{labels}</div><div class="plot">'
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{html.escape(self.title)} over optimizer steps">'
            f'<path class="grid" d="{grid}"/>{lines}</svg>'
            f'<div class="cursor" hidden></div><output class="readout" hidden></output></div>'
            f'<small class="step">step</small><div class="across">{feet}</div></div>\n</figure>\n'
        )

    def _legend(self) -> str:
        if len(self.lines) < 2:
            return ""
        entries = "".join(f'<li class="{line.style}">{html.escape(line.name)}</li>' for line in self.lines)
        return f'<ul class="legend">{entries}</ul>'

    def data(self) -> dict[str, Any]:
        """What the read-out needs."""
        return {
            "steps": [self.steps.low, self.steps.high],
            "lines": [
                {"name": line.name, "points": [[step, _rounded(value)] for step, value in thinned(line.points)]}
                for line in self.lines
            ],
        }


@dataclass(frozen=True)
class Scale:
    """What lies between the two ends of an axis."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1.

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
            return [tick for tick in candidates if self.low <= tick <= self.high]
        widest = (self.high - self.low) / (3 if whole else 4)
        power = 10.0 ** math.floor(math.log10(widest))
        size = next(factor * power for factor in (10, 5, 2, 1, 0.5) if factor * power <= widest * 1.000001)
        if whole:
            size = max(round(size), 1)
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return [number * size for number in range(first, last + 1)]

    def label(self, tick: float, *, whole: bool = False) -> str:
        """A tick, with as many digits as tell it from the others.

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
        gap = tick if self.log else min((b - a for a, b in pairwise(ticks)), default=abs(tick))
        return f"{tick:,.{max(0, -math.floor(math.log10(gap) + 1e-9))}f}"


def _path(line: Line, steps: Scale, heights: Scale) -> str:
    points = [
        f"{SIZE * steps.share(step):.1f} {SIZE - SIZE * heights.share(value):.1f}"
        for step, value in thinned(line.points)
    ]
    if len(points) == 1:
        points *= 2  # a line of no length is a dot
    return "M" + "L".join(points) if points else ""


def thinned(points: Points, most: int = POINTS) -> Points:
    """About that many points, with every peak and every trough among them, and both ends.

    >>> thinned([(1, 5.0), (2, 9.0), (3, 4.0), (4, 6.0), (5, 6.0), (6, 7.0), (7, 6.5), (8, 5.0)], most=4)
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


# ---------------------------------------------------------------------------------------------- time


def _where_time_went(steps: Sequence[Row]) -> str:
    totals: dict[str, float] = {}
    for row in steps:
        for part, seconds in (row.get("time") or {}).items():
            if _is_number(seconds):
                totals[part] = totals.get(part, 0.0) + seconds
    whole = sum(totals.values())
    if not whole:
        return ""
    bars, lines = "", ""
    extra = [part for part in totals if part not in PARTS]
    for part, seconds in totals.items():
        name, share = html.escape(part), seconds / whole
        number = [*PARTS, *extra].index(part) % 8
        bars += f'<i class="part{number}" style="flex-grow:{share:.4f}" title="{name} {share:.1%}"></i>'
        lines += f'<tr><th><i class="part{number}"></i>{name}</th><td>{seconds:,.1f} s</td><td>{share:.1%}</td></tr>\n'
    return (
        f'<section class="time">\n<h2>Where the time went</h2>\n<div class="stack">{bars}</div>\n'
        f'<table>\n{lines}</table>\n<p class="note">On the first rank. Communication is what it waited for others; '
        "sums that travel during a backward pass cost a step nothing.</p>\n</section>"
    )


# ---------------------------------------------------------------------------------------------- tables


def _tables(run: Mapping[str, Any]) -> str:
    names = {
        "derived": "Derived",
        "versions": "Versions",
        "identity": "What the losses depend on",
        "settings": "Settings",
    }
    shown = ""
    for key, title in names.items():
        facts = flat(run.get(key) or {})
        if facts:
            lines = "".join(
                f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>\n" for name, value in facts
            )
            is_open = "" if key == "identity" else " open"
            shown += f"<details{is_open}><summary>{title}</summary>\n<table>\n{lines}</table></details>\n"
    return f'<section class="tables">\n{shown}</section>' if shown else ""


def flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Names and values of nested settings.

    >>> flat({"lr": 0.001, "model": {"layers": 4}, "data": ["a", "b"], "resume": None})
    [('lr', '0.001'), ('model.layers', '4'), ('data', 'a, b'), ('resume', '-')]
    """
    if not isinstance(tree, Mapping):
        return []
    found = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", _text(value)))
    return found


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


# ---------------------------------------------------------------------------------------------- numbers


def short(number: float) -> str:
    """A number of few digits.

    >>> short(950), short(12_345), short(2_500_000), short(3.0e9)
    ('950', '12.3k', '2.5M', '3B')
    """
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if suffix == 'k' else size):.1f}".removesuffix(".0") + suffix
    return f"{number:,.0f}"


def in_bytes(size: float) -> str:
    """A number of bytes.

    >>> in_bytes(300 * 2**20), in_bytes(5 * 2**30)
    ('300 MiB', '5.00 GiB')
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
