"""Run the tests on the torch that is installed, and leave what came of them in results/torch.json.

`python tests/versions.py` runs all, as `make test TORCH=2.15.0` does; others only the folders that they name. With
`--library accelerate` it is the version of that which counts, and results/accelerate.json that is written.
"""

import argparse
import json
import platform
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
WHAT = "the tests on each version of {}, by folder; those that need a GPU are among the skipped"


class Counts:
    """A plugin of pytest: how each test ended, and which of them failed."""

    def __init__(self) -> None:
        self._ends: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped or report.when == "call":
            before = self._ends.get(report.nodeid)
            self._ends[report.nodeid] = before if before == "failed" else report.outcome

    def by_folder(self) -> dict[str, dict[str, Any]]:
        counts: dict[str, Counter[str]] = {}
        for test, end in self._ends.items():
            counts.setdefault(folder_of(test), Counter(passed=0, failed=0, skipped=0))[end] += 1
        failures = {folder_of(test): [] for test, end in self._ends.items() if end == "failed"}
        for test, end in self._ends.items():
            if end == "failed":
                failures[folder_of(test)].append(test)
        return {
            folder: {"date": datetime.now(UTC).date().isoformat(), **counts[folder]}
            | ({"failures": failures[folder]} if folder in failures else {})
            for folder in sorted(counts)
        }


def folder_of(test: str) -> str:
    """The first two parts of its path: tests/unit, src/macrobatch."""
    return "/".join(test.partition("::")[0].split("/")[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["tests", "src"], help="whole folders of tests")
    parser.add_argument("--numprocesses", type=int, default=2, help="how many at a time")
    parser.add_argument("--library", default="torch", choices=["torch", "accelerate"], help="whose version counts")
    options = parser.parse_args()
    file = ROOT / "results" / f"{options.library}.json"
    counts = Counts()
    at_a_time = [f"--numprocesses={options.numprocesses}", "--dist=loadfile", "--no-loadscope-reorder"]
    status = pytest.main([*at_a_time, "--rootdir", str(ROOT), *options.folders], plugins=[counts])
    report = json.loads(file.read_text()) if file.exists() else {"versions": {}}
    report["what"] = WHAT.format(options.library)
    version = f"torch {torch.__version__}, python {platform.python_version()}"
    if options.library != "torch":
        version = f"{options.library} {metadata.version(options.library)}, {version}"
    report["versions"].setdefault(version, {}).update(counts.by_folder())
    report["versions"] = dict(sorted(report["versions"].items()))
    report |= {"date": datetime.now(UTC).date().isoformat(), "processor": platform.processor() or platform.machine()}
    file.write_text(json.dumps(report, indent=2) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
