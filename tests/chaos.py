"""`make chaos`: runs of `macrobatch train` killed many times over, each compared in the end with one that was not.

Half of the kills come at a random moment; the others just before a file of the run is opened, made, renamed or removed.
A run is in float32 or in fp16 with its GradScaler. After every kill the last checkpoint must be at least as new as
before; a run that has come to its end must be bitwise the undisturbed one of its precision: the model, all tensors of
the last checkpoint, and one line of metrics for each step.
"""

import argparse
import dataclasses
import itertools
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from harness import killing

# By precision, with its batch. What fp16 multiplies sums with depends on the window before, so windows must differ.
BATCHES = {
    "float32": ("--batch-size", 8),
    "fp16": ("--precision", "fp16", "--batch-tokens", 300, "--batch-ramp", 20),
}
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


@dataclass
class Tally:
    """What came of the runs in one precision."""

    kills_at_a_moment: int = 0
    kills_at_a_use_of_a_file: int = 0
    runs_that_ended: int = 0

    @property
    def kills(self) -> int:
        return self.kills_at_a_moment + self.kills_at_a_use_of_a_file


def tortured(
    command: killing.Command, folder: Path, kills: int, seconds: float, draw: random.Random
) -> dict[str, object]:
    settings, begun = {kind: killing.settings_in(folder, batch) for kind, batch in BATCHES.items()}, time.monotonic()
    undisturbed = {precision: folder / f"undisturbed-{precision}" for precision in BATCHES}
    for precision, run in undisturbed.items():
        command.run(*settings[precision], "--out", run)
    warm = time.monotonic()
    command.run(*settings["float32"], "--out", folder / "timed")
    whole = time.monotonic() - warm
    tallies = {precision: Tally() for precision in BATCHES}
    failures: list[str] = []
    runs = (folder / f"run-{number}" for number in itertools.count())
    run, precision = next(runs), draw.choice([*BATCHES])
    while (
        sum(tally.kills for tally in tallies.values()) < kills
        and time.monotonic() - begun < seconds
        and len(failures) < 10
    ):
        before, tally = newest(run), tallies[precision]
        is_crash = draw.random() < 0.5
        crash = (str(run), draw.randrange(1, USES)) if is_crash else None
        started = command.start(*settings[precision], "--out", run, *killing.again(run), crash=crash)
        if not is_crash:
            moment = time.monotonic() + draw.uniform(0, 0.7 * whole)
            killing.until(started, partial(is_past, moment))
            started.kill()
        status = started.wait()
        if newest(run) < before:
            failures.append(f"{precision}: the checkpoint of step {before} is lost; the last is of step {newest(run)}")
        if status == [-signal.SIGKILL]:
            tally.kills_at_a_use_of_a_file += is_crash
            tally.kills_at_a_moment += not is_crash
        elif status == [0]:
            tally.runs_that_ended += 1
            try:
                killing.same(run, undisturbed[precision])
            except AssertionError as error:
                failures.append(f"{precision}: not the same: {error}")
        else:
            failures.append(f"{precision}: ended with {status}: {started.output[-2000:]}")
        if status != [-signal.SIGKILL]:
            shutil.rmtree(run)
            run, precision = next(runs), draw.choice([*BATCHES])
        for screen in folder.glob("screen-*"):
            screen.unlink()
    ended = sum(tally.runs_that_ended for tally in tallies.values())
    return {
        "what": "runs of macrobatch train, killed and resumed; each that ended is bitwise the undisturbed one",
        "date": datetime.now(UTC).date().isoformat(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "kills": sum(tally.kills for tally in tallies.values()),
        "by_precision": {precision: dataclasses.asdict(tally) for precision, tally in tallies.items()},
        "runs_that_ended": ended,
        "steps_compared": ended * killing.STEPS,
        "seconds": round(time.monotonic() - begun),
        "failures": failures,
        "bitwise": not failures,
    }


if __name__ == "__main__":
    sys.exit(main())
