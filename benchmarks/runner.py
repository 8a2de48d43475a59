"""`macrobatch bench`: the benchmarks one after the other, each a process of its own, then what they found.

They are the scripts of this folder. `record.py` says what such a script does and what its file of results holds;
nothing here knows any of them by name but the two that show results. The command imports only this file, and no torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from macrobatch.errors import UsageError

DONE, WRONG, UNUSABLE = 0, 1, 2  # exit status, of a benchmark and of all of them
FOLDER = Path(__file__).parent
FIGURES, TABLES = "figures", "tables"  # draw what the others have found, and write it into the documentation


class Benchmark(NamedTuple):
    """One script."""

    name: str
    path: Path
    what: str  # the first line of its docstring


def main(arguments: Sequence[str]) -> int:
    """Run `macrobatch bench` with these arguments, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="macrobatch bench",
        description="Runs the benchmarks one after the other, and shows their results and targets. The exit status is "
        "0 if every gradient agreed with its reference, 1 if one did not or a benchmark failed, and 2 if no benchmark "
        "could run here.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks to run; default: all")
    parser.add_argument("--list", action="store_true", help="only list the benchmarks")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for results; default: results")
    parser.add_argument(
        "--figures",
        type=Path,
        nargs="?",
        const=Path("docs/figures"),
        help="also draw figures of the results, into this folder (docs/figures if you name none)",
    )
    parser.add_argument(
        "--options", default="", metavar="WORDS", help="options for each benchmark, e.g. --options='--tiny'"
    )
    parsed = parser.parse_args(arguments)
    there = benchmarks(FOLDER)
    if parsed.list:
        for benchmark in there.values():
            print(f"{benchmark.name}: {benchmark.what}")
        return DONE
    return bench(chosen(parsed.names, there), parsed.out, parsed.figures, shlex.split(parsed.options))


# ---------------------------------------------------------------------------------------------------- which there are


def benchmarks(where: Path) -> dict[str, Benchmark]:
    """Every script there that has a `main` and says in the first line of its docstring what it measures."""
    found = {}
    for path in sorted(where.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)
        docstring = ast.get_docstring(module)
        if has_main and docstring and path.stem not in (FIGURES, TABLES, Path(__file__).stem):
            found[path.stem] = Benchmark(path.stem, path, docstring.splitlines()[0])
    return found


def chosen(names: Sequence[str], there: dict[str, Benchmark]) -> list[Benchmark]:
    """Those of these names, in their order; all, without a name."""
    for name in names:
        if name not in there:
            raise UsageError(f"there is no benchmark {name!r}: there are {', '.join(there)}.")
    return [there[name] for name in names or there]


# ----------------------------------------------------------------------------------------------------------- running


def bench(running: Sequence[Benchmark], out: Path, figures: Path | None, options: Sequence[str]) -> int:
    """Run these, show what they found, and draw what is in `out`. Returns the exit status.

    A benchmark that cannot run on this machine does not keep the others from it, and is no failure beside them.
    """
    before = _written(out)
    rows, statuses = [], []
    for number, benchmark in enumerate(running, start=1):
        print(f"\n[{number}/{len(running)}] {benchmark.name}: {benchmark.what}\n", flush=True)
        began = time.perf_counter()
        statuses.append(_status([benchmark.path, "--out", out / f"{benchmark.name}.json", *options]))
        rows.append([benchmark.name, f"{time.perf_counter() - began:.0f} s", _in_words(statuses[-1], options)])
    new = [path for path, changed in _written(out).items() if before.get(path) != changed]
    print(f"\n{plain_table(['benchmark', 'time', 'outcome'], rows)}\n\n{summary(new)}", flush=True)
    if figures is not None:
        statuses.append(_status([FOLDER / f"{FIGURES}.py", "--results", out, "--out", figures]))
    if set(statuses) == {UNUSABLE}:
        return UNUSABLE
    return DONE if set(statuses) <= {DONE, UNUSABLE} else WRONG


def _status(command: Sequence[str | Path]) -> int:
    return subprocess.run([sys.executable, *command]).returncode


def _written(out: Path) -> dict[Path, int]:
    """The files of results, with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in sorted(out.glob("*.json"))}


def _in_words(status: int, options: Sequence[str]) -> str:
    unusable = "cannot run here, or not with these options" if options else "cannot run here"
    words = {DONE: "done", WRONG: "a gradient was wrong, or a loop failed", UNUSABLE: unusable}
    return words.get(status, f"ended with exit status {status}")


# ---------------------------------------------------------------------------------------------------- what was found


class Target(NamedTuple):
    """What was to be reached."""

    name: str
    wanted: str
    found: float
    is_reached: bool


def summary(files: Sequence[Path]) -> str:
    """What each file of results says of targets, and of gradients."""
    targets, lines = [], []
    for path in files:
        result = json.loads(path.read_text())
        said = [row[key] for key in ("exact", "agrees") for _, row in _holders(result, key)]
        said = [is_right for is_right in said if isinstance(is_right, bool)]
        where = f"{result.get('date', 'undated')}, {result.get('processor', 'on an unknown machine')}"
        lines.append(f"{path}: {where}; {sum(said)} of {len(said)} rows agreed with their reference")
        for target in targets_in(result):
            reached = "reached" if target.is_reached else "MISSED"
            name = ", ".join(filter(None, (path.stem, target.name)))
            targets.append([name, target.wanted, f"{target.found:g}", reached])
    table = plain_table(["target", "wanted", "found", ""], targets) if targets else "No targets were measured."
    return "\n".join([table, "", *lines])


def targets_in(result: Any) -> list[Target]:
    """Those of a file of results, wherever they stand in it.

    >>> targets_in({"target": {"name": "speed", "at_least": 4.5, "found": 5.0, "reached": True}})
    [Target(name='speed', wanted='at least 4.5', found=5.0, is_reached=True)]
    >>> targets_in({"slow": {"target": {"time_at_most": 1.03, "time": 1.2, "reached": False}}})
    [Target(name='slow, time', wanted='at most 1.03', found=1.2, is_reached=False)]
    >>> targets_in({"target": {"at_most_of_fabric": 0.25, "found": 0.2, "reached": True}})
    [Target(name='', wanted='at most 0.25 of fabric', found=0.2, is_reached=True)]
    """
    targets = []
    for path, holder in _holders(result, "reached"):
        bounds = list(_bounds(path, holder))
        if len(bounds) == 1:  # the benchmark knows more: a speed with a wrong gradient does not count
            bounds = [bounds[0]._replace(is_reached=holder["reached"])]
        targets += bounds
    return targets


def _bounds(path: tuple[str, ...], holder: dict[str, Any]) -> Iterator[Target]:
    """A key `at_least...` is a bound of `found`; `X_at_least` is one of `X`."""
    above = [key.removesuffix("target").strip("_") for key in path if key != "targets"]
    for key, wanted in holder.items():
        for bound in ("at_least", "at_most"):
            if key.startswith(bound):
                own, of, found = holder.get("name", ""), key.removeprefix(bound), holder["found"]
            elif key.endswith(f"_{bound}"):
                own, of = key.removesuffix(f"_{bound}"), ""
                found = holder[own]
            else:
                continue
            name = ", ".join(word.replace("_", " ") for word in (*above, own) if word)
            is_reached = found >= wanted if bound == "at_least" else found <= wanted
            yield Target(name, f"{bound} {wanted:g}{of}".replace("_", " "), found, is_reached)


def _holders(tree: Any, key: str, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every mapping of a tree that has the key, with the keys that lead to it."""
    if isinstance(tree, dict):
        if key in tree:
            yield path, tree
        for name, branch in tree.items():
            yield from _holders(branch, key, (*path, name))
    elif isinstance(tree, list):
        for branch in tree:
            yield from _holders(branch, key, path)


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns in line, the first to the left, the others to the right.

    >>> print(plain_table(["loop", "tokens/s"], [["by hand", "9"], ["ours", "12"]]))
    loop     tokens/s
    -------  --------
    by hand         9
    ours           12
    """
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
