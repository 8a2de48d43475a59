"""`write_report` writes the report of a run, one HTML file that opens offline.

It uses only files of the run folder: ``metrics.jsonl``, ``validation.jsonl`` and ``run.json``. So it can be written
again at any time, also for a run that was killed. ``report.html.jinja`` is the page; ``report.js`` only shows the
numbers under the pointer. The charts are our own SVG, because the script of a plotting library is 1 to 5 MB per page.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from macrobatch.errors import UsageError, counted
from macrobatch.train.charts import (
    Row,
    charts_of_run,
    charts_of_runs,
    in_bytes,
    is_number,
    own_numbers,
    short,
    total,
    values,
)
from macrobatch.train.clock import PARTS
from macrobatch.train.files import replace_whole, rows
from macrobatch.train.record import METRICS, VALIDATION, clock_time
from macrobatch.train.settings import Settings, flag_of

REPORT = "report.html"
RUN = "run.json"
MOST = 8  # runs in one report, because there are 8 colours

logger = logging.getLogger("macrobatch")


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    name: str
    steps: Sequence[Row]
    validations: Sequence[Row]
    facts: Mapping[str, Any]  # run.json

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read a run folder. Refuses a folder without any step."""
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}. Name the folder of a run.")
        steps = rows(folder / METRICS)
        if not steps:
            raise UsageError(
                f"{folder} holds no steps of a run: {METRICS} is missing or empty. Name the folder of a run."
            )
        return cls(folder.resolve().name, steps, rows(folder / VALIDATION), _facts(folder / RUN))


def _check_out(out: Path) -> Path:
    """The path of a report, if it may be written there: its folder exists, and it overwrites only another page."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder. Name a file in it, e.g. {out / REPORT}.")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}.")
    if out.exists() and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"--out {out} exists and is not an HTML page, so it is not overwritten. Name a file that ends in .html."
        )
    return out


def write_report(*folders: Path, out: Path | None = None) -> Path:
    """Write the report of one run, or of several runs for comparison, and return its path.

    The default is report.html in the folder of one run, or beside the folder of the first of several.
    """
    if len(folders) > MOST:
        raise UsageError(f"a report compares at most {MOST} runs: got {len(folders)}.")
    runs = [Run.read(folder) for folder in folders]
    home = folders[0] if len(folders) == 1 else folders[0].resolve().parent
    path = home / REPORT if out is None else _check_out(out)
    content = _content_of_run(runs[0]) if len(runs) == 1 else _content_of_runs(runs)
    names = [run.name for run in runs]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("report.html.jinja")
    data = [chart.data() for chart in content["charts"]]
    replace_whole(path, template.render(content, title=" · ".join(names), names=names, data=data) + "\n")
    return path


def _facts(path: Path) -> dict[str, Any]:
    """The content of run.json; empty if it cannot be read."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): the report is without settings and versions", path, error)
        return {}
    return facts if isinstance(facts, dict) else {}


def _content_of_run(run: Run) -> dict[str, Any]:
    sample = run.facts.get("sample")
    return {
        "header": [_summary(run.steps), *_history(run)],
        "tiles": _tiles(run.steps, run.validations),
        "charts": charts_of_run(run.steps, run.validations),
        "sample": sample if isinstance(sample, str) else "",
        "time": _time(run.steps),
        "tables": _tables(run.facts),
    }


def _content_of_runs(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "header": [f"{len(runs)} runs"],
        "comparison": _comparison(runs),
        "charts": charts_of_runs([(run.name, run.steps, run.validations) for run in runs]),
    }


# ----------------------------------------------------------------------------------------------------------- summary


def _summary(steps: Sequence[Row]) -> str:
    facts = [counted(steps[-1]["step"], "optimizer step")]
    if tokens := total(steps, "tokens") or total(steps, "items"):
        facts.append(f"{short(tokens)} tokens")
    if seconds := total(steps, "seconds"):
        facts.append(f"{clock_time(seconds)} {'hours' if seconds >= 3600 else 'minutes'} of training")
    return " · ".join(facts)


def _history(run: Run) -> list[str]:
    """How the run ended, when it began, and with which command."""
    said = [_ending(run)]
    said += [f"begun {run.facts['date']}" if isinstance(run.facts.get("date"), str) else ""]
    said += [f"$ {run.facts['command']}" if isinstance(run.facts.get("command"), str) else ""]
    return [line for line in said if line]


def _ending(run: Run) -> str:
    """How the run ended: finished, stopped early, or interrupted."""
    identity = run.facts.get("identity")
    steps = identity.get("steps") if isinstance(identity, Mapping) else None
    taken, status = run.steps[-1]["step"], run.facts.get("status")
    if not isinstance(steps, int):
        return ""
    if taken >= steps:
        return "finished"
    if status == 0:
        why = run.facts.get("stopped") or "validations got no better"
        return f"stopped early, after {taken:,} of {steps:,} steps: {why}"
    by = ""
    if isinstance(status, int) and status - 128 in set(signal.Signals):
        by = f" by {signal.Signals(status - 128).name}"
    return f"interrupted{by} after {taken:,} of {steps:,} steps"


def _tiles(steps: Sequence[Row], validations: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The most important numbers."""
    tiles: list[tuple[str, str, str]] = []
    if losses := values(steps, "loss"):
        recent = statistics.fmean(loss for _, loss in losses[-10:])
        tiles.append(("loss", f"{recent:.3f}", f"last {len(losses[-10:])} steps; from {losses[0][1]:.3f}"))
    if measured := values(validations, "loss"):
        best = min(measured, key=lambda point: point[1])
        tiles.append(("validation loss", f"{measured[-1][1]:.3f}", f"best {best[1]:.3f} at step {best[0]:,}"))
        tiles.append(("perplexity", _perplexity(measured[-1][1]), f"of the validation; best {_perplexity(best[1])}"))
    own = [(name, values(validations, name)[-1:]) for name in own_numbers(validations)]
    tiles += [(name, f"{last:.4g}", f"of the validation at step {at:,}") for name, one in own for at, last in one]
    if speeds := values(steps, "tokens_per_second"):
        tiles.append(("tokens a second", short(statistics.median(speed for _, speed in speeds)), "median of the steps"))
    tiles += _padding_tile(steps)
    if memory := values(steps, "memory_bytes"):
        tiles.append(("peak memory", in_bytes(max(size for _, size in memory)), "of one process"))
    return tiles


def _perplexity(loss: float) -> str:
    number = math.exp(min(loss, 700))
    return f"{number:.2f}" if number < 1000 else short(number)


def _padding_tile(steps: Sequence[Row]) -> list[tuple[str, str, str]]:
    tokens, padded, in_order = (total(steps, name) for name in ("tokens", "padded_tokens", "padded_in_order"))
    if not tokens or padded < tokens:
        return []
    share = f"{1 - tokens / padded:.1%}"
    if in_order <= tokens:
        return [("padding", share, "of the tokens computed")]
    saved = (in_order - padded) / (in_order - tokens)
    return [("padding saved", f"{saved:.1%}", f"{share} left, {1 - tokens / in_order:.1%} in the usual order")]


def _comparison(runs: Sequence[Run]) -> dict[str, list[str]]:
    """A table with the last numbers of each run, and with the settings in which the runs differ."""
    columns = [_last_numbers(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    table = {name: [column.get(name, "-") for column in columns] for name in names}
    settings = [_used_settings(run.facts) for run in runs]
    for name in dict.fromkeys(name for one in settings for name in one):
        if len({_text(one[name]) for one in settings if name in one}) > 1:
            table[flag_of(name)] = [_setting(one, name) for one in settings]
    return table


def _setting(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "-"
    return "default" if settings[name] in (None, []) else _text(settings[name])


def _last_numbers(run: Run) -> dict[str, str]:
    losses, measured = values(run.steps, "loss"), values(run.validations, "loss")
    speeds = [speed for _, speed in values(run.steps, "tokens_per_second")]
    own = {name: values(run.validations, name) for name in own_numbers(run.validations)}
    return {
        "steps": f"{run.steps[-1]['step']:,}",
        "ending": _ending(run) or "-",
        "loss": f"{statistics.fmean(loss for _, loss in losses[-10:]):.3f}" if losses else "-",
        "validation loss": f"{measured[-1][1]:.3f}" if measured else "-",
        "best validation": f"{min(loss for _, loss in measured):.3f}" if measured else "-",
        "tokens a second": short(statistics.median(speeds)) if speeds else "-",
        "training": clock_time(total(run.steps, "seconds")),
        **{name: f"{found[-1][1]:.4g}" for name, found in own.items() if found},
    }


def _time(steps: Sequence[Row]) -> list[dict[str, Any]]:
    """The parts of the time of all steps; empty if none was measured."""
    totals: dict[str, float] = {}
    for row in steps:
        for part, seconds in (row.get("time") or {}).items():
            if is_number(seconds):
                totals[part] = totals.get(part, 0.0) + seconds
    whole = sum(totals.values())
    colours = [*PARTS, *(part for part in totals if part not in PARTS)]
    return [
        {
            "name": name,
            "number": colours.index(name) % 8,
            "share": f"{seconds / whole:.4f}",
            "percent": f"{seconds / whole:.1%}",
            "seconds": f"{seconds:,.1f}",
        }
        for name, seconds in totals.items()
        if whole
    ]


def _used_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that have an effect on a run."""
    settings, unused = facts.get("settings"), facts.get("unused")
    without = unused if isinstance(unused, list) else []
    return {name: v for name, v in settings.items() if name not in without} if isinstance(settings, Mapping) else {}


def _tables(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    defaults = json.loads(json.dumps(Settings().lasting))
    changed = {n: v for n, v in _used_settings(run).items() if n not in defaults or v != defaults[n]}
    run = {**run, "changed": changed}
    names = {
        "changed": "Settings that differ from the default",
        "derived": "Derived",
        "versions": "Versions",
        "identity": "What the losses depend on",
        "settings": "All settings",
    }
    return [
        {"title": title, "facts": facts, "is_open": key not in ("identity", "settings")}
        for key, title in names.items()
        if (facts := flat(run.get(key) or {}))
    ]


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
