"""`make chaos`: runs of `macrobatch train` killed many times over, each compared in the end with one that was not.

Half of the kills come at a random moment; the others just before a file of the run is opened, made, renamed or removed.
After every kill the last checkpoint must be at least as new as before; a run that has come to its end must be bitwise
the undisturbed one: the model, all tensors of the last checkpoint, and one line of metrics for each step.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from harness import killing

USES = 90  # of files: about half of those in a whole run


def is_past(moment: float) -> bool:
    return time.monotonic() > moment


def newest(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(name[5:13]) for name in killing.checkpoints(run) if "partial" not in name), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600, help="end after so many, with as many kills as were")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/chaos.json"))
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = killing.Command(folder)
        try:
            result = tortured(command, folder, parsed.kills, parsed.seconds, random.Random(parsed.seed))
        finally:
            command.close()
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(bool(result["failures"]))


def tortured(
    command: killing.Command, folder: Path, kills: int, seconds: float, draw: random.Random
) -> dict[str, object]:
    settings, begun = killing.settings_in(folder), time.monotonic()
    undisturbed = folder / "undisturbed"
    command.run(*settings, "--out", undisturbed)
    warm = time.monotonic()
    command.run(*settings, "--out", folder / "timed")
    whole = time.monotonic() - warm
    counts = {"at a moment": 0, "at a use of a file": 0}
    failures: list[str] = []
    ended, step_sum, run = 0, 0, folder / "run-0"
    while sum(counts.values()) < kills and time.monotonic() - begun < seconds and len(failures) < 10:
        before = newest(run)
        is_crash = draw.random() < 0.5
        crash = (str(run), draw.randrange(1, USES)) if is_crash else None
        started = command.start(*settings, "--out", run, *killing.again(run), crash=crash)
        if not is_crash:
            moment = time.monotonic() + draw.uniform(0, 0.7 * whole)
            killing.until(started, partial(is_past, moment))
            started.kill()
        status = started.wait()
        if status == [-signal.SIGKILL]:
            counts["at a use of a file" if is_crash else "at a moment"] += 1
        elif status != [0]:
            failures.append(f"ended with {status}: {started.output[-2000:]}")
        if newest(run) < before:
            failures.append(f"the checkpoint of step {before} is lost; there is one of step {newest(run)}")
        if status not in ([0], [-signal.SIGKILL]):
            run = folder / f"run-{ended}-after-{len(failures)}-failures"
        elif status == [0]:
            try:
                killing.same(run, undisturbed)
            except AssertionError as error:
                failures.append(f"not the same: {error}")
            ended, step_sum = ended + 1, step_sum + killing.STEPS
            run = folder / f"run-{ended}"
        for screen in folder.glob("screen-*"):
            screen.unlink()
    return {
        "what": "runs of macrobatch train, killed and resumed; each that ended is bitwise the undisturbed one",
        "date": datetime.now(UTC).date().isoformat(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "kills": sum(counts.values()),
        "kills_by_kind": counts,
        "runs_that_ended": ended,
        "steps_compared": step_sum,
        "seconds": round(time.monotonic() - begun),
        "failures": failures,
        "bitwise": not failures,
    }


if __name__ == "__main__":
    sys.exit(main())
