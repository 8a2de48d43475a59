"""What `macrobatch audit` says of trainers and examples that many people use, on tiny models and data.

Each row runs a library or a public script as it is, or a well-known recipe, on samples of unequal length where its data
have lengths. Nothing is trained to an end: a few windows are enough.

    python benchmarks/report_card.py --public FOLDER # prints a table, and writes results/report_card.json
    python benchmarks/report_card.py --only Lightning
"""

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import record
import report_card_examples as examples
import report_card_public as public
import report_card_trainers as trainers
import torch
from runner import plain_table

import macrobatch

OUT = Path(__file__).parent.parent / "results" / "report_card.json"


@dataclass(frozen=True)
class Row:
    """One program."""

    library: str  # whose version is shown
    name: str
    configuration: str
    run: Callable[[], object]


ROWS = [Row(*row) for row in (*trainers.ROWS, *examples.ROWS)]


def audited(row: Row) -> dict[str, Any]:
    """Run a program, and say what was found."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with macrobatch.audit() as report:
            row.run()
    return {
        "library": row.library,
        "version": version(row.library),
        "name": row.name,
        "configuration": row.configuration,
        "verdict": report.verdict,
        "factor": None if report.factor is None else round(report.factor, 4),
        "causes": report.causes,
        "unseen": report.judgement.unseen[:1],
        "windows": len(report.windows),
    }


def cost(width: int, layers: int, samples: int, turns: int = 5, windows: int = 5) -> dict[str, Any]:
    """The processor time of a window of four micro-batches of a transformer, with and without an audit, in turns."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(turns):
        for way, found in seconds.items():
            with macrobatch.audit() if way == "with" else contextlib.nullcontext():
                for window in range(windows):
                    begin = time.process_time()
                    for _ in range(4):
                        x = torch.randn(samples, 32, width)
                        (torch.nn.functional.mse_loss(model(x), x) / 4).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    if turn and window:
                        found.append(time.process_time() - begin)
    without, audited_ = (statistics.median(found) for found in seconds.values())
    return {
        "width": width,
        "layers": layers,
        "samples": samples,
        "ms_a_window": 1e3 * without,
        "ratio": audited_ / without,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rows, print them, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose library or name has this text")
    parser.add_argument("--public", type=Path, help="the folder of the repositories of public scripts; else not run")
    parser.add_argument(
        "--out", type=Path, help=f"where to write the results; default: {OUT.name}, if all rows are run"
    )
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    rows = [row for row in ROWS if chosen.only in f"{row.library} {row.name}"]
    found = []
    for row in rows:
        found.append(audited(row))
        print(f"{row.library} {row.name}: {found[-1]['verdict']}", file=sys.stderr, flush=True)
    for script in public.SCRIPTS if chosen.public else ():
        if chosen.only in f"{script.repository} {script.files[0]}":
            found.append(public.audited(script, chosen.public))
            print(f"{script.files[0]}: {found[-1]['verdict']}", file=sys.stderr, flush=True)
    cells = [[one["name"], one["verdict"], str(one["factor"]), ", ".join(one["causes"])] for one in found]
    print(plain_table(["program", "verdict", "factor", "causes"], cells))
    out = chosen.out or (None if chosen.only or not chosen.public else OUT)
    if out is not None:
        torch.set_num_threads(1)
        costs = [cost(128, 4, 8), cost(32, 2, 4)]
        content = record.stamp("what macrobatch audit says of public trainers and examples", "torch")
        out.write_text(json.dumps(content | {"rows": found, "cost": costs}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
