"""Draws the figures of the documentation from results/gpu.json and results/gpu_sweep.json.

    python benchmarks/figures.py                                        # into docs/figures
    python benchmarks/figures.py --results FOLDER --out FOLDER

A loop whose gradient did not agree with the reference is hatched, with a note.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import days_of

# One colour per loop, in every figure: ours are blue, dark with graphs; a loop by hand and the big batch are grey.
# Compiled loops are darker, grouped ones lighter.
COLOURS = {
    "Macrobatch, compiled, cuda_graph": "#08306b",
    "Macrobatch, cuda_graph": "#1f6fb4",
    "Macrobatch, compiled": "#6aaed6",
    "Macrobatch": "#9ecae1",
    "hand-written, compiled": "#525252",
    "hand-written": "#969696",
    "hand-written, grouped, compiled": "#737373",
    "hand-written, grouped": "#bdbdbd",
    "Accelerate, compiled": "#a63603",
    "Accelerate": "#e6550d",
    "Accelerate, grouped, compiled": "#d94801",
    "Accelerate, grouped": "#fdae6b",
    "Lightning Fabric": "#756bb1",
    "one big batch, compiled": "#252525",
    "one big batch": "#000000",
}
MARKERS = dict(zip(COLOURS, "PsXoDv^<>*hHdp8", strict=True))
DOTS_PER_INCH = 150
TIMES = "times Accelerate, or times compiled Accelerate"

Row = dict[str, Any]
Case = dict[str, Any]


def rows_of(case: Case) -> list[Row]:
    return [row for row in case["rows"] if row["per_second"] is not None and not row["error"]]


def by_micro_batch_size(cases: list[Case], caption: str) -> Any:
    """Tokens per second and memory, one line per loop. The big batch is a single point, drawn as a horizontal line."""
    figure, panels = _blank(1, 2, (10, 4.4))
    for panel, key, label in (
        (panels[0], "per_second", "tokens a second"),
        (panels[1], "reserved_gib", "reserved memory at most, GiB"),
    ):
        for name in reversed(COLOURS):  # ours last, so that they are on top
            points = [(case["micro_batch"], row) for case in cases for row in rows_of(case) if row["name"] == name]
            points = [(size, row) for size, row in points if row[key] is not None]
            if name == "one big batch":
                for _, row in points:
                    panel.axhline(row[key], color=COLOURS[name], linewidth=1, linestyle="--", label=name)
            elif points:
                sizes, figures = zip(*((size, row[key]) for size, row in points), strict=True)
                panel.plot(sizes, figures, color=COLOURS[name], marker=MARKERS[name], markersize=5, label=name)
                for size, row in points:
                    if row["agrees"] is False:
                        panel.annotate("gradient wrong", (size, row[key]), color="red", fontsize=7)
        panel.set_xscale("log", base=2)
        panel.set_xticks([case["micro_batch"] for case in cases], [str(case["micro_batch"]) for case in cases])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("samples in a micro-batch")
        panel.set_title(label, fontsize=10, loc="left")
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.yaxis.set_major_formatter("{x:,g}")
    model, _, size = cases[0]["name"].partition(",")
    title = f"{model}, windows of {cases[0]['size_of_a_window']:,} tokens in samples of {size.split(' x ')[1]}"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    figure.supxlabel(caption, fontsize=7, color="#555555", x=0.01, ha="left")
    return figure


def bars(cases: list[Case], titles: list[str], caption: str) -> Any:
    """Tokens per second of every loop, one panel per case. Each bar has its ratio to Accelerate."""
    names = [name for name in COLOURS if any(row["name"] == name for case in cases for row in rows_of(case))]
    figure, panels = _blank(1, len(cases), (4.2 + 2.8 * len(cases), 0.9 + 0.32 * len(names)), sharey=True)
    for panel, case, title in zip(panels, cases, titles, strict=True):
        rows = {row["name"]: row for row in rows_of(case)}
        for position, name in enumerate(names):
            if name in rows:
                _bar(panel, position, rows[name])
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.margins(x=0.32)  # room for the text behind a bar
        panel.set_xlim(left=0)
        panel.set_title(title, fontsize=9, loc="left")
        panel.xaxis.set_major_formatter(_thousands)
        panel.tick_params(axis="x", labelsize=8)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.set_xlabel("tokens a second, thousands", fontsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel(caption, fontsize=7, color="#555555", x=0.01, ha="left")
    return figure


def _bar(panel: Any, position: int, row: Row) -> None:
    speed, (lower, upper), is_wrong = row["per_second"], row["quartiles"], row["agrees"] is False
    panel.barh(position, speed, color=COLOURS[row["name"]], height=0.72, hatch="xx" if is_wrong else None)
    panel.plot([lower, upper], [position, position], color="black", linewidth=1)
    ratio = "" if row["over_accelerate"] is None else f"{row['over_accelerate']:.1f}x"
    if ratio and row["name"].endswith(("compiled", "compiled, cuda_graph")):
        ratio += " compiled"  # Accelerate's
    words = f"{ratio} gradient wrong" if is_wrong else ratio
    panel.annotate(
        words,
        (max(speed, upper), position),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="red" if is_wrong else "black",
    )


def _thousands(value: float, _: object) -> str:
    return f"{value / 1000:g}"


def _blank(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", dpi=DOTS_PER_INCH)
    panels = figure.subplots(rows, columns, squeeze=False, **options)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """The figures by the names of their files, only for sections that were measured."""

    def measured(cases: Sequence[Case]) -> str:
        machine = f"{result['processor']}, {days_of({**result, 'cases': cases})}"
        versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        return f"{machine}; {result['precision']}, {result['optimizer']}.\n{versions}"

    sections: dict[str, list[Case]] = {}
    for case in result["cases"]:
        if rows_of(case):
            sections.setdefault(case["section"], []).append(case)
    drawn = {}
    if cases := sections.get("sweep"):
        drawn["micro_batch_size"] = by_micro_batch_size(cases, measured(cases))
    if cases := sections.get("fixed"):
        titles = [case["name"] for case in cases]
        sizes = f"Micro-batch x tokens x micro-batches a window; behind a bar: {TIMES}."
        drawn["fixed"] = bars(cases, titles, f"{sizes}\n{measured(cases)}")
    if cases := sections.get("variable"):
        titles = [f"{case['name']}, log-normal lengths" for case in cases]
        sizes = f"At most {cases[0]['largest_micro_batch']:,} tokens a micro-batch with its padding; real tokens count."
        drawn["variable_lengths"] = bars(cases, titles, f"{sizes}\nBehind a bar: {TIMES}.\n{measured(cases)}")
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        help="a folder with gpu.json, and gpu_sweep.json (default: results)",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="a folder (default: docs/figures)")
    arguments = parser.parse_args()
    source = arguments.results / "gpu.json"
    if not source.is_file():
        print(f"There is no {source} to draw: `macrobatch bench gpu` makes it.", file=sys.stderr)
        return 2
    try:
        drawn = figures_of(json.loads(source.read_text()))
        if (swept := source.with_name("gpu_sweep.json")).is_file():
            drawn |= figures_of(json.loads(swept.read_text()))
    except ImportError as missing:
        print(f"{missing}. It comes with an extra: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        path = arguments.out / f"{name}.png"
        figure.savefig(path, metadata={"Software": None})  # so that equal figures give equal files
        print(f"Written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
