"""Run many random programs: `python -m fuzzing --programs 100000 --rank-programs 500 --out results/fuzz.json`.

Every seed is a program of its own. One that fails is made smaller and printed, and the command ends with status 1.
"""

import argparse
import contextlib
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import macrobatch
from fuzzing import describe
from fuzzing.drawing import draw_rank_program
from fuzzing.many import Failed, be_quiet, count, in_one_process
from fuzzing.on_ranks import run_programs

PART = 20  # programs that a process is given at a time
LAUNCH = 50  # programs in one launch of two ranks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000, help="how many in one process")
    parser.add_argument("--rank-programs", type=int, default=100, help="how many on two ranks")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1, help="how many of those in one process run side by side")
    parser.add_argument("--out", type=Path, help="where to write the result, as JSON")
    options = parser.parse_args(arguments)
    be_quiet()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    seeds = range(options.first, options.first + options.programs)
    rank_seeds = range(options.first, options.first + options.rank_programs)
    with Progress(*columns, console=console) as progress:
        started = time.monotonic()
        alone, failed = side_by_side(seeds, options.processes, progress, console)
        between = time.monotonic()
        on_ranks, failed_on_ranks = on_two_ranks(rank_seeds, progress, console)
    report = {
        "what": "random programs, each compared with one big batch in plain torch",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            "macrobatch": macrobatch.__version__,
            "torch": torch.__version__,
        },
        "one_process": section(seeds, alone, failed, between - started),
        "two_ranks": section(rank_seeds, on_ranks, failed_on_ranks, time.monotonic() - between),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    for name in ("one_process", "two_ranks"):
        part = report[name]
        failing = f"{len(part['failures'])} of {part['programs']} programs failed"
        print(f"{name}: seeds {part['seeds']}, {failing}, {part['seconds']} s")
    return 1 if failed or failed_on_ranks else 0


def section(seeds: range, counts: Counter[str], failures: list[Failed], seconds: float) -> dict[str, Any]:
    return {
        "seeds": f"{seeds.start} to {seeds.stop - 1}" if seeds else "none",
        "programs": len(seeds),
        "by_kind": dict(sorted(counts.items())),
        "seconds": round(seconds, 1),
        "failures": failures,
    }


def side_by_side(
    seeds: range, processes: int, progress: Progress, console: Console
) -> tuple[Counter[str], list[Failed]]:
    """Programs in one process each, so many processes at a time."""
    counts: Counter[str] = Counter()
    failures: list[Failed] = []
    parts = [seeds[begin : begin + PART] for begin in range(0, len(seeds), PART)]
    bar = progress.add_task("one process", total=len(seeds))
    with contextlib.ExitStack() as stack:
        results: Iterable[tuple[Counter[str], list[Failed]]] = map(in_one_process, parts)
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, context, initializer=be_quiet))
            results = pool.map(in_one_process, parts)
        for part, (counted, failed) in zip(parts, results, strict=True):
            counts += counted
            failures += failed
            for one in failed:
                show(console, one)
            progress.advance(bar, len(part))
    return counts, failures


def on_two_ranks(seeds: range, progress: Progress, console: Console) -> tuple[Counter[str], list[Failed]]:
    counts: Counter[str] = Counter()
    failures: list[Failed] = []
    bar = progress.add_task("two ranks", total=len(seeds))
    for begin in range(0, len(seeds), LAUNCH):
        launched = seeds[begin : begin + LAUNCH]
        with tempfile.TemporaryDirectory() as directory:
            complaints = run_programs(launched, Path(directory))
        for seed in launched:
            program = draw_rank_program(seed)
            count(counts, program)
            counts[program.wrap] += 1
            if seed in complaints:
                wrong = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(complaints[seed]) if said)
                failures.append({"seed": seed, "wrong": wrong, "program": describe(program)})
                show(console, failures[-1])
        progress.advance(bar, len(launched))
    return counts, failures


def show(console: Console, failed: Failed) -> None:
    text = f"seed {failed['seed']}: {failed['wrong']}\n    {failed['program']}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
