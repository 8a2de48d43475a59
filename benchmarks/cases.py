"""The file of results of `gpu.py`: one case per shape, measured now or in an earlier run, and the targets.

Each case has its own date, and `source`, a fingerprint of the package: cases with the same one ran the same code.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record
from loops import ACCELERATE, COMPILED, COMPILED_GRAPHS, EAGER, GRAPHS
from models import DEVICE

# The wanted speed relative to Accelerate, not compiled, by the title of a shape. Other targets are below.
TARGETS = {
    "Llama 110M, 1 x 512 x 16": {GRAPHS: 4.5, COMPILED_GRAPHS: 8.0},
    "Llama 41M, 2 x 256 x 16": {GRAPHS: 6.0, COMPILED_GRAPHS: 12.0},
    "Llama 110M, 4 x 1024 x 8": {GRAPHS: 1.6, COMPILED_GRAPHS: 2.8},
    "Llama 110M, 64 samples of up to 2048": {EAGER: 5.0, GRAPHS: 8.0, COMPILED_GRAPHS: 12.0},
}
TIME_OF_HAND_WRITTEN = 1.01  # the largest time relative to it, eager
MEMORY_OF_EAGER = 1.15  # the largest memory relative to it, with graphs


def targets_of(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets and what was measured, only for loops that ran. With a wrong gradient a target is not reached."""
    found = []

    def add(name: str, row: dict[str, Any], bound: str, wanted: float, ratio: float | None) -> None:
        if ratio is not None:
            holds = ratio >= wanted if bound == "at_least" else ratio <= wanted
            found.append({"name": name, bound: wanted, "found": ratio, "reached": holds and row["agrees"] is not False})

    for case in cases:
        rows = {row["name"]: row for row in case["rows"] if row["per_second"] is not None}
        for name, row in rows.items():
            said = f"{case['name']}: {name}"
            if name in (wanted_of := TARGETS.get(case["name"], {})) and ACCELERATE in rows:
                times = round(row["per_second"] / rows[ACCELERATE]["per_second"], 3)
                add(f"{said}, speed over eager Accelerate's", row, "at_least", wanted_of[name], times)
            if name == EAGER and case["section"] == "fixed" and row["over_hand"]:
                time_of_it = round(1 / row["over_hand"], 4)
                add(f"{said}, time over the hand-written loop's", row, "at_most", TIME_OF_HAND_WRITTEN, time_of_it)
            eager = rows.get({GRAPHS: EAGER, COMPILED_GRAPHS: COMPILED}.get(name, ""))
            if eager is not None and eager["reserved_gib"] and row["reserved_gib"]:
                ratio = round(row["reserved_gib"] / eager["reserved_gib"], 3)
                add(f"{said}, memory over {eager['name']}'s", row, "at_most", MEMORY_OF_EAGER, ratio)
    return found


@dataclass
class Results:
    """A file of results, with the shapes in it."""

    output: Path
    head: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the name of the shape
    ran: list[dict[str, Any]] = field(default_factory=list)  # cases of this run

    def read(self) -> None:
        """Keep the shapes in the file, if they were measured with the same versions on the same kind of machine."""
        there = json.loads(self.output.read_text())
        for what in ("versions", "processor"):
            if there[what] != self.head[what]:
                raise SystemExit(f"--add: {self.output} has other {what}: {there[what]}, here {self.head[what]}.")
        self.cases = {case["shape"]: {"date": there["date"], **case} for case in there["cases"]}

    def case_of(self, shape: str) -> dict[str, Any]:
        """A case that must exist, because only a part of it is measured again."""
        if shape not in self.cases:
            raise SystemExit(f"--memory: {self.output} has no {shape}. Measure it first, or choose others with --only.")
        return self.cases[shape]

    def add(self, case: dict[str, Any]) -> None:
        self.cases[case["shape"]] = case
        self.ran.append(case)
        record.save({**self.head, "cases": list(self.cases.values()), "targets": self.targets}, self.output)

    @property
    def targets(self) -> list[dict[str, Any]]:
        return targets_of(self.cases.values()) if DEVICE == "cuda" else []
