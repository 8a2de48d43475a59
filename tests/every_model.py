"""Every model of transformers that computes a loss, made tiny: are micro-batches exact, without being told?

`make models` leaves in results/models.json what came of each. It fails if a gradient is wrong and nothing was said, or
if a loss was refused.
"""

import argparse
import json
import platform
import signal
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from harness.zoo import TASKS, Model, NotRunError, judge, models

SECONDS = 120  # for a model
SHOWN = ("exact", "unknown", "refused", "wrong", "not run")


def outcome_of(model: Model) -> dict[str, Any]:
    """What came of it, and why."""
    signal.alarm(SECONDS)
    try:
        found = judge(*model)
    except NotRunError as reason:
        return {"outcome": "not run", "why": str(reason).splitlines()[0][:160]}
    finally:
        signal.alarm(0)
    if found.verdict == "exact":
        return {"outcome": "exact", "error": found.error}
    return {"outcome": found.verdict, "error": found.error, "why": found.said}


def _summary(found: dict[Model, dict[str, Any]], task: str) -> dict[str, Any]:
    """The names of models by outcome; and why those that are not exact are not."""
    of_task = {model.name: one for model, one in sorted(found.items()) if model.task == task}
    exact = [name for name, one in of_task.items() if one["outcome"] == "exact"]
    others = {
        outcome: {name: one["why"] for name, one in of_task.items() if one["outcome"] == outcome}
        for outcome in SHOWN
        if outcome != "exact"
    }
    return {"exact": exact} | {outcome: names for outcome, names in others.items() if names}


def _too_long(*_: Any) -> None:
    raise NotRunError(f"it takes more than {SECONDS} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some models only; nothing is written then")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "models.json")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_long)
    wanted = [model for model in models() if not options.names or model.name in options.names]
    console, found = Console(), {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("models", total=len(wanted))
        for model in wanted:
            progress.update(bar, description=model.name)
            found[model] = outcome_of(model)
            progress.advance(bar)
    table = Table("labels", *SHOWN)
    for task in TASKS.values():
        counts = Counter(one["outcome"] for model, one in found.items() if model.task == task)
        table.add_row(task, *(str(counts[outcome]) for outcome in SHOWN))
    console.print(table)
    bad = {model: one for model, one in found.items() if one["outcome"] in ("wrong", "refused")}
    for model, one in bad.items():
        console.print(f"{model.name} ({model.task}): {one['outcome']}, error {one['error']:.1e}. {one['why']}")
    if not options.names:
        report = {
            "what": "the gradient of each model of transformers in micro-batches, beside that of the whole batch",
            "date": datetime.now(UTC).date().isoformat(),
            "processor": platform.processor() or platform.machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "largest_error": max(one["error"] for one in found.values() if one["outcome"] == "exact"),
            "tasks": {task: _summary(found, task) for task in TASKS.values()},
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
