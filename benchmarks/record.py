"""What all benchmarks share: descriptions of run and machine, tables, and files of results.

A benchmark is a file in this folder. The first line of its docstring says what it measures. Its `main` returns 0; 1 if
a gradient was wrong or a loop failed; or 2 if it cannot run here. With `--out FILE` it writes its results there.
`macrobatch bench` runs all benchmarks, and finds in these files, at any depth:

- targets: mappings with `reached`, and a bound: `at_least...` or `at_most...` of `found`, or `X_at_least` of `X`;
- rows: mappings with `exact`, whether the gradient agreed with the reference; or with `agrees`, if something else was
  compared, None if nothing was.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from runner import plain_table

import macrobatch


def stamp(what: str, *packages: str) -> dict[str, Any]:
    """The beginning of a file of results: what was measured, when, and with which versions."""
    numbers = {name: version(name) for name in packages}
    return {
        "what": what,
        "date": today(),
        "versions": {"python": platform.python_version(), "macrobatch": macrobatch.__version__, **numbers},
    }


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def source() -> str:
    """A fingerprint of the package: two runs with the same one ran the same code."""
    package = Path(macrobatch.__file__).parent
    files = sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix())
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def in_words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def machine(device: str = "cpu") -> str:
    """The name of the GPU, or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def started(command: Sequence[str], seconds: float, **variables: str) -> str:
    """Run a program, and return what it prints. It finds this package, and no hub. If it fails, end this process."""
    package = str(Path(macrobatch.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:5])} ... failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def quartiles(figures: Sequence[float]) -> tuple[float, float, float]:
    """The median, then the quartiles around it.

    >>> quartiles([1, 2, 3, 4, 5])
    (3.0, 2.0, 4.0)
    """
    if len(figures) == 1:
        return figures[0], figures[0], figures[0]
    lower, median, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return median, lower, upper


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table. The first column is a name, the others are numbers. It is plain text without rich."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n\n{plain_table(headings, rows)}\n")
        if caption:
            print(f"{caption}\n")
        return
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar, if rich is installed. Yields a function to call after each of `total` pieces of work.

    No thread refreshes it: it is drawn between the pieces, never while one is timed.
    """
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    with Progress(auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.update(task, advance=1, refresh=True)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the option for the file of results."""
    parser.add_argument(
        "--out",
        "--output",
        dest="output",
        metavar="PATH",
        type=lambda path: Path(path) if path.endswith(".json") else Path(path) / f"{name}.json",
        default=Path("results") / f"{name}.json",
        help=f"a folder for {name}.json, or a file that ends in .json (default: results)",
    )


def save(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
