"""Writes the tables of the documentation from results/*.json, or shows where a page and its results differ.

A page marks the place of a table:

    <!-- figures: overhead -->
    <!-- /figures -->

The function of that name in `BLOCKS` generates everything between the marks: all rows of a file of results, including
those in which a peer is faster, and the targets that were missed.

    python benchmarks/tables.py            # exit status 1, and a diff, if a page differs from its results
    python benchmarks/tables.py --write    # rewrites the pages
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^<!-- figures: (\S+) -->\n.*?^<!-- /figures -->$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- (?:figures: \S+|/figures) -->$", re.MULTILINE)
WITH_TARGETS = ("overhead", "gpu", "gpu_sweep", "trainers")  # of this version: `earlier` has the others
MISSED = "benchmarks.md#targets-that-were-missed"  # beside every page with such a table
Results = Callable[[str], Any]  # the name of a file, without its suffix -> its content


class PageError(Exception):
    """A page asks for a table that cannot be made."""


# ---------------------------------------------------------------------------------------------------- how it is written


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["loop", "us"], [["ours", "9"]]))
    | loop | us |
    |---|---|
    | ours | 9 |
    """
    lines = ["|".join(["", *(f" {cell} " if cell else " " for cell in line), ""]) for line in (headings, *rows)]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]])


def number(value: float | None, form: str = ",.0f") -> str:
    """A formatted number; empty if nothing was measured."""
    if value is None:
        return ""
    return format(value, form) if value or "e" not in form else "0"


def verdict(target: dict[str, Any], form: str = ".2f") -> str:
    """A target, and whether it was reached.

    >>> verdict({"at_least": 6.0, "found": 5.75, "reached": False})
    'at least 6.00: missed (5.75)'
    """
    return f"{wanted(target, form)}: {'reached' if target['reached'] else 'missed'} ({found_in(target, form)})"


def wanted(target: dict[str, Any], form: str) -> str:
    """The bound of a target. Its key begins with at_least or at_most, and may say of what."""
    bound = _bound_of(target)
    return f"{'at least' if bound.startswith('at_least') else 'at most'} {target[bound]:{form}}"


def found_in(target: dict[str, Any], form: str = ".2f") -> str:
    """The measured number, with one more digit if it would look the same as a missed bound.

    >>> found_in({"at_most": 1.15, "found": 1.154, "reached": False})
    '1.154'
    """
    found = format(target["found"], form)
    is_alike = not target["reached"] and found == format(target[_bound_of(target)], form)
    return format(target["found"], ".3f") if is_alike else found


def _bound_of(target: dict[str, Any]) -> str:
    return next(key for key in target if key.startswith(("at_least", "at_most")))


def origin(result: dict[str, Any]) -> str:
    """The machine, the day and the versions of a run."""
    machine = result.get("machine") or result.get("processor") or result["device"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "python")
    return f"{machine}, {days_of(result)}; {versions}."


def days_of(result: dict[str, Any]) -> str:
    """The days on which a file of results was measured: cases may have their own dates.

    >>> days_of({"date": "2026-01-02", "cases": [{"date": "2026-01-01"}, {}]})
    '2026-01-01 and 2026-01-02'
    """
    days = {case.get("date", result["date"]) for case in result.get("cases", [])} or {result["date"]}
    return " and ".join(sorted(days))


# ---------------------------------------------------------------------------------------------------------- the tables


def overhead(results: Results) -> str:
    labels = {
        "Macrobatch, max_norm=1": "Macrobatch, clipping (against the loop with `clip_grad_norm_`)",
        "Macrobatch, tensor items": "Macrobatch, items as tensors",
        'Macrobatch, "keep"': 'Macrobatch, `nonfinite="keep"`',
        "macrobatch.accelerate": "`macrobatch.accelerate`, the program of Accelerate",
    }
    result = results("overhead")
    rows = [
        [labels.get(row["name"], row["name"]), number(row["overhead"]), number(row["to_fabric"], ".2f")]
        for row in result["rows"]
        if row["name"] != row["against"]
    ]
    by_hand = next(row["time"] for row in result["rows"] if row["name"] == "hand-written")
    said = f"The hand-written loop itself takes {by_hand:.0f} microseconds. Targets: Macrobatch of Fabric's, "
    said += f"{verdict(result['target'])}; `macrobatch.accelerate` of Accelerate's, {verdict(result['facade_target'])}."
    table = markdown(["microseconds over the hand-written loop", "", "of Fabric's"], rows)
    return f"{table}\n\n{said} {origin(result)}"


def performance(results: Results) -> str:
    """What each way to train faster gave: ratios of two rows, in each case where both ran and have the gradient."""
    fixed, sweep, eager = results("gpu"), results("gpu_sweep"), results("eager")
    speeds = {
        case["name"]: {row["name"]: row["per_second"] for row in case["rows"] if row["per_second"] and row["agrees"]}
        for case in [*fixed["cases"], *eager["cases"]]
    }
    sizes = {case["name"]: case["rows"][0]["per_second"] for case in sweep["cases"]}
    largest, smallest = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)

    def gains(ours: str, theirs: str, cases: Iterable[str] | None = None) -> str:
        found = {name: rows for name, rows in speeds.items() if ours in rows and theirs in rows}
        shown = [
            f"{rows[ours] / rows[theirs]:.2g} ({name})" for name, rows in found.items() if name in (cases or found)
        ]
        return ", ".join(shown)

    mixed = [case["name"] for case in fixed["cases"] if " samples of up to " in case["name"]]
    llama = [name for name in speeds if name.startswith("Llama") and name not in mixed]
    rows = [
        ["a larger micro-batch", f"{sizes[largest] / sizes[smallest]:.2g} ({largest} against {smallest})"],
        ["`by_tokens`", gains("Macrobatch", "hand-written", mixed)],
        ["`cuda_graph=True`", gains("Macrobatch, cuda_graph", "Macrobatch", llama)],
        ["`torch.compile`", gains("Macrobatch, compiled", "Macrobatch", llama)],
        ["both, over compiled alone", gains("Macrobatch, compiled, cuda_graph", "Macrobatch, compiled", llama)],
        ['`gather="window"` (`fully_shard`)', gains('MacroStep, gather="window"', "MacroStep")],
        ["no accumulation: one big batch", gains("one big batch", "hand-written", llama)],
    ]
    said = f"{fixed['processor']}; sizes are samples of a micro-batch x tokens x micro-batches."
    return f"{markdown(['', 'times as fast'], rows)}\n\n{said}"


def gpu(results: Results) -> str:
    """Llama, except for the sweep over sizes of micro-batches."""
    return _loops(results("gpu"), ("fixed", "variable"), "tokens per second (reserved GiB)")


def shapes(results: Results) -> str:
    """The other models."""
    return _loops(results("gpu"), ("others",), "tokens or images per second (reserved GiB)")


def micro_batch_size(results: Results) -> str:
    """The same samples in micro-batches of several sizes."""
    return _loops(results("gpu_sweep"), ("sweep",), "tokens per second (reserved GiB)")


def _loops(result: dict[str, Any], sections: Sequence[str], what: str) -> str:
    """One row per loop and one column per case of these sections; notes on missing ones; the targets."""

    def cell(row: dict[str, Any]) -> str:
        memory = "" if row["reserved_gib"] is None else f" ({row['reserved_gib']:.1f})"
        return f"{number(row['per_second'])}{memory}"

    cases, notes = [case for case in result["cases"] if case["section"] in sections], Notes()
    ran = [case for case in cases if case["rows"]]
    by_case = [{row["name"]: row for row in case["rows"]} for case in ran]
    in_full = max(by_case, key=len, default={})  # the case with all loops determines their order
    names = dict.fromkeys([*in_full, *(name for rows in by_case for name in rows)])
    table = markdown(
        [what, *(case["name"] for case in ran)],
        [[name, *(_checked(rows.get(name), cell, notes) for rows in by_case)] for name in names],
    )
    windows = {row["windows"] for rows in by_case for row in rows.values() if row["windows"]}
    count = " to ".join(map(str, sorted({min(windows), max(windows)}))) if windows else "no"
    said = f"Medians over {count} windows. {origin({**result, 'cases': ran})}"
    failed = [f"{case['name']} failed: {case['error']}." for case in cases if case["error"]]
    shown = {case["name"] for case in ran}
    own = [target for target in result["targets"] if target["name"].partition(":")[0] in shown]
    return "\n\n".join([table, *notes.lines(), *failed, said, *_reached(own)])


def _checked(row: dict[str, Any] | None, cell: Callable[[dict[str, Any]], str], notes: "Notes") -> str:
    """The cell of a row; its failure if it failed or did not run; empty if there is no such row."""
    if row is None:
        return ""
    mark = notes.mark(row)
    if row["per_second"] is None or row["error"]:
        return ("failed" if row["error"] else "not run") + mark
    return cell(row) + (", gradient wrong" if row["agrees"] is False else "") + mark


def targets(results: Results) -> str:
    """The missed targets of all results."""
    rows = []
    for name in WITH_TARGETS:
        for said, target in _targets_in(results(name)):
            if not target["reached"]:
                of = re.sub(r"^at_(most|least)", "", _bound_of(target)).replace("_", " ")  # " of fabric"
                rows.append([f"`{name}.json`{': ' * bool(said)}{said}", wanted(target, "g") + of, found_in(target)])
    return markdown(["missed", "target", "found"], rows)


def _targets_in(found: Any, said: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All targets of a result, each with its name."""
    if isinstance(found, list):
        for one in found:
            yield from _targets_in(one, said)
    elif isinstance(found, dict):
        own = found.get("name") or found.get("case") or found.get("of") or said
        if "trainer" in found:
            own = f"{found['trainer']}, {found['way']}"
        if "reached" in found and "found" in found:
            yield str(own), found
            return
        for one in found.values():
            yield from _targets_in(one, str(own))


def _reached(targets: Sequence[dict[str, Any]]) -> list[str]:
    """How many targets were reached."""
    reached = sum(target["reached"] for target in targets)
    missed = f" ([those that were missed]({MISSED}))" * (reached < len(targets))
    return [f"Targets: {reached} of {len(targets)} reached{missed}."] if targets else []


class Notes:
    """Notes on some rows, below their table."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, row: dict[str, Any]) -> str:
        """The mark behind the name of a row that has a note or an error."""
        note = row.get("note") or row.get("error")
        if not note:
            return ""
        self._texts += [note] if note not in self._texts else []
        return f" [{self._texts.index(note) + 1}]"

    def lines(self) -> list[str]:
        return [f"[{place}] {note}." for place, note in enumerate(self._texts, start=1)]


def trainers(results: Results) -> str:
    result, notes = results("trainers"), Notes()
    rows = [
        [
            f"{row['trainer']}, {row['way']}{notes.mark(row)}",
            number(row["tokens_per_second"]) or "failed",
            number(row.get("times"), ".2f"),
            number(row["reserved_gib"], ".1f"),
            number(row["apart"], ".0e"),
            verdict(row["target"]) if "target" in row else "",
        ]
        for table in result["trainers"].values()
        for row in table["rows"]
    ]
    headings = ["", "tokens/s", "times as it is", "reserved GiB", "losses differ by", "target"]
    return "\n\n".join([markdown(headings, rows), *notes.lines(), origin(result)])


EARLIER = {
    "contrastive": "a loss of the whole batch: speed with graphs over a cached loss; GiB; time over one big batch",
    "network": "seconds of a window over those of the fastest peer on a slow link",
    "terms": "time of a loss with two terms over that of one term, without and with graphs",
    "train": "`macrobatch train`: speed over the fastest peer on the same batches",
    "tuning": "fine-tuning on chats: speed of `macrobatch train` over",
    "variable_length": "real tokens per second, `by_tokens` over fixed micro-batches",
    "variable_length_cuda": "the same on a GPU",
}


def earlier(results: Results) -> str:
    """What was measured with an earlier version: all its targets."""
    rows = []
    for name, what in EARLIER.items():
        result = results(name)
        links = [(link, one["target"]) for link, one in result.get("links", {}).items()]
        times = [
            (link, {"found": one["to_best_peer"], "at_most": one["to_best_peer_at_most"], **one}) for link, one in links
        ]
        found = [f"{said}{': ' * bool(said)}{verdict(one)}" for said, one in times or _targets_in(result)]
        of = [result["versions"]["macrobatch"], result["versions"]["torch"], origin(result).partition(",")[0]]
        rows.append([f"`{name}.json`: {what}", "; ".join(found), *of])
    return markdown(["measured", "targets", "version", "torch", "machine"], rows)


def models(results: Results) -> str:
    """The models of transformers, by the kind of their labels."""
    result = results("models")
    columns = ("exact", "unknown", "refused", "wrong", "not run")
    counts = {task: [len(found.get(column, ())) for column in columns] for task, found in result["tasks"].items()}
    rows = [[task, *map(str, numbers)] for task, numbers in counts.items()]
    rows.append(["all", *(str(sum(numbers)) for numbers in zip(*counts.values(), strict=True))])
    said = f"The largest error of an exact one is {result['largest_error']:.0e}."
    return f"{markdown(['labels', *columns], rows)}\n\n{said} {origin(result)}"


def peers(results: Results) -> str:
    """The test suites of other libraries that were run with our classes."""
    rows = []
    for name, found in results("peers")["suites"].items():
        package = next(key for key in found["versions"] if key not in ("macrobatch", "torch"))
        passed, differ = found["stock"]["passed"], len(found["known"]) + len(found["unknown"])
        rows.append(
            [
                f"{name} {found['versions'][package]}, tests of {found['tests_of']}",
                str(passed),
                str(passed - differ),
                str(len(found["known"])),
                str(len(found["unknown"])),
            ]
        )
    return markdown(["suite", "pass with its class", "of these with ours", "differ by design", "differ"], rows)


def report_card(results: Results) -> str:
    """What `macrobatch audit` says of trainers and examples: one line for all programs of which it says the same."""
    names: dict[tuple[str, ...], list[str]] = {}
    for row in results("report_card")["rows"]:
        said = ", ".join(row["causes"]) or "; ".join(row["unseen"])
        found = row["configuration"], row["verdict"], number(row["factor"], ".4g"), said
        names.setdefault((f"{row['library']} {row['version']}", *found), []).append(row["name"])
    lines = [[f"{of}: {'; '.join(programs)}", *found] for (of, *found), programs in names.items()]
    return markdown(["program", "configuration", "verdict", "factor", "causes, or what was not seen"], lines)


BLOCKS: dict[str, Callable[[Results], str]] = {
    function.__name__: function
    for function in (
        overhead,
        performance,
        gpu,
        micro_batch_size,
        targets,
        trainers,
        shapes,
        earlier,
        models,
        peers,
        report_card,
    )
}


# ------------------------------------------------------------------------------------------------------------ the pages


def filled(page: str, results: Results) -> str:
    """The page with all tables generated from the results."""

    def block(found: re.Match[str]) -> str:
        if found[1] not in BLOCKS:
            raise PageError(f"there is no table {found[1]!r}: there are {', '.join(BLOCKS)}.")
        return f"<!-- figures: {found[1]} -->\n\n{BLOCKS[found[1]](results)}\n\n<!-- /figures -->"

    marks = [mark.startswith("<!-- /") for mark in MARK.findall(page)]
    if marks != [False, True] * (len(marks) // 2):
        raise PageError("every <!-- figures: NAME --> needs a <!-- /figures --> before the next one.")
    return BLOCK.sub(block, page)


def reader(folder: Path) -> Results:
    def read(name: str) -> Any:
        path = folder / f"{name}.json"
        if not path.exists():
            raise PageError(f"there is no {path}: run `macrobatch bench {name}`, or take the table from the page.")
        return json.loads(path.read_text())

    return read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    parser.add_argument("--root", type=Path, default=ROOT, help="a folder with README.md, docs/ and results/")
    arguments = parser.parse_args()
    results, status = reader(arguments.root / "results"), 0
    for path in (arguments.root / "README.md", *sorted(arguments.root.glob("docs/**/*.md"))):
        page = path.read_text()
        try:
            wanted = filled(page, results)
        except PageError as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 1
            continue
        if wanted == page:
            continue
        if arguments.write:
            path.write_text(wanted)
            print(f"{path}: rewritten")
        else:
            lines = page.splitlines(), wanted.splitlines()
            print("\n".join(difflib.unified_diff(*lines, str(path), "the results", lineterm="")))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
