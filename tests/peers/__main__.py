"""`make peers`: run the test suites of other libraries with their own class, and with ours in its place; compare.

Nothing is fetched. Name checkouts of their repositories at the installed versions, for example
`python -m peers trl=/home/me/trl`; what their tests need beyond the installed packages (`parameterized`,
`pytest-datadir`) goes into a folder on PYTHONPATH. The exit status is 1 if a test passes with their class only and
`peers/known.py` has no reason for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from peers import hub
from peers.comparing import Comparison, compare, differing, table
from peers.plugin import read_notes
from peers.suites import SUITES, Suite

ROOT = Path(__file__).parents[2]
SIDES = ("stock", "ours")
SECONDS_PER_TEST, SECONDS_PER_PROCESS, MOST_PROCESSES = 180, 3600, 5
DONE = (0, 1, 5)  # exit statuses of pytest: all passed, some failed, none collected


def main() -> int:
    options = _parser().parse_args()
    checkouts = dict(options.checkouts)
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        notes = options.notes or home / "notes"
        notes.mkdir(parents=True, exist_ok=True)
        environment = _environment(home)
        trl = [str(checkouts["trl"])] if "trl" in checkouts else []
        subprocess.run(
            [sys.executable, "-m", "peers.hub", str(home), *trl], env=environment | {"TQDM_DISABLE": "1"}, check=True
        )
        suites = {name: chosen(SUITES[name], options.file) for name in checkouts}
        runs = [Run(name, suites[name], checkout, notes, environment) for name, checkout in checkouts.items()]
        comparisons = {run.name: run.compared() for run in runs}
    print(table(comparisons))
    unknown = [(suite, *line) for suite, found in comparisons.items() for line in found.unknown.items()]
    for suite, test, end in unknown:
        print(f"\n{suite}: {test} passes with their class only. With ours, it {end}")
    if options.out:
        _write(options.out, suites, checkouts, comparisons)
    return 1 if unknown or not all(found.stock.get("passed") for found in comparisons.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=_checkout, metavar="SUITE=FOLDER", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--file", action="append", help="run only files and folders with this in their path")
    parser.add_argument("--notes", type=Path, help="a folder for how tests ended: another run continues there")
    parser.add_argument("--out", type=Path, help="write what came of it to this file")
    return parser


def _checkout(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    path = Path(folder).expanduser().resolve()
    if name not in SUITES:
        raise argparse.ArgumentTypeError(f"{name!r} is no suite: known are {', '.join(SUITES)}")
    if not folder or not (path / SUITES[name].folder / SUITES[name].groups[0][0]).exists():
        raise argparse.ArgumentTypeError(f"{folder!r} is no checkout of {name}: it has no {SUITES[name].groups[0][0]}")
    return name, path


def chosen(suite: Suite, names: Sequence[str] | None) -> Suite:
    """The part of a suite whose paths contain one of these names."""
    groups = [
        tuple(file for file in group if names is None or any(name in file for name in names)) for group in suite.groups
    ]
    return dataclasses.replace(suite, groups=tuple(filter(None, groups)))


def _environment(home: Path) -> dict[str, str]:
    """What the suites run in: our sources, the stand-ins for the hub, no GPU, and a folder for what they leave."""
    (home / "tmp").mkdir()
    path = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **hub.environment(home),
        "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(home / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
    }


@dataclasses.dataclass
class Run:
    """Both sides of a suite."""

    name: str
    suite: Suite
    checkout: Path
    notes: Path
    environment: dict[str, str]

    def compared(self) -> Comparison:
        """Run what has not been run, and a second time the tests that differ, because a busy machine lets some fail."""
        for group in self.suite.groups:
            for side in SIDES:
                self._run(side, group)
        if again := differing(*map(self._ends, SIDES)):
            for side in SIDES:
                self._forget(side, again)
                self._run(side, again)
        return compare(self.name, *map(self._ends, SIDES))

    def _file(self, side: str) -> Path:
        return self.notes / f"{self.name}-{side}.jsonl"

    def _ends(self, side: str) -> dict[str, tuple[str, str]]:
        return read_notes(self._file(side))

    def _forget(self, side: str, tests: Sequence[str]) -> None:
        lines = self._file(side).read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["test"] not in tests]
        self._file(side).write_text("".join(f"{line}\n" for line in kept))

    def _run(self, side: str, tests: Sequence[str]) -> None:
        """Run these tests. A process that hangs or crashes loses a test, and another one continues after it."""
        own = {"PEERS_PACKAGE": self.suite.package, "PEERS_NOTES": str(self._file(side))}
        own["PEERS_OURS"] = self.suite.ours if side == "ours" else ""
        flags = "-p peers.plugin -p no:cacheprovider -q --no-header --tb=line --rootdir=. --override-ini=addopts= "
        flags += f"--timeout={SECONDS_PER_TEST} --continue-on-collection-errors"
        command = [sys.executable, "-m", "pytest", *shlex.split(flags), *tests]
        print(f"{self.name}, {side}: {' '.join(tests[:4])}{' ...' if len(tests) > 4 else ''}", flush=True)
        for _ in range(MOST_PROCESSES):
            before = len(self._ends(side))
            status = run_limited(
                command, self.checkout / self.suite.folder, self.environment | own, SECONDS_PER_PROCESS
            )
            if status in DONE or len(self._ends(side)) == before:
                return


def run_limited(command: Sequence[str], folder: Path, environment: dict[str, str], seconds: float) -> int | None:
    """The exit status of a program; None if it had to be ended. What it has started ends with it."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _write(
    file: Path, suites: dict[str, Suite], checkouts: dict[str, Path], comparisons: dict[str, Comparison]
) -> None:
    report = json.loads(file.read_text()) if file.exists() else {"suites": {}}
    what = "test suites of other libraries, with their class and with ours in its place"
    report = {"what": what, "date": datetime.now(UTC).date().isoformat()} | report
    for name, found in comparisons.items():
        packages = ("macrobatch", "torch", suites[name].package.partition(".")[0])
        report["suites"][name] = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {package: metadata.version(package) for package in packages},
            "tests_of": _version_of(checkouts[name]),
            "files": [file for group in suites[name].groups for file in group],
            **dataclasses.asdict(found),
        }
    file.write_text(json.dumps(report, indent=2) + "\n")


def _version_of(checkout: Path) -> str:
    """The tag of a checkout, or its commit."""
    for ask in (["describe", "--tags", "--exact-match"], ["rev-parse", "--short=12", "HEAD"]):
        told = subprocess.run(["git", "-C", str(checkout), *ask], capture_output=True, text=True, check=False)
        if told.returncode == 0:
            return told.stdout.strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
