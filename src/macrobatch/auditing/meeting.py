"""Ranks tell each other what they saw, through files: a program gets no collective that it does not make itself."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from macrobatch._io.files import replacing
from macrobatch.auditing.records import Window, window_from
from macrobatch.errors import UsageError

SECONDS = 120.0  # how long to wait for the other ranks
POLL = 0.05
_NUMBERS = itertools.count()  # all ranks begin their audits in the same order
_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")


class Told(NamedTuple):
    """What one rank has seen."""

    windows: list[Window]
    failures: list[str]


def world_of_environment() -> tuple[int, int]:
    """The number of ranks and the number of this one, as torchrun tells its processes."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1") or 1)), int(os.environ.get("RANK", "0") or 0)


class Meeting:
    """The folder of one audit. `base`: a folder that all nodes share; default: the folder for temporary files."""

    def __init__(self, base: Path | None = None) -> None:
        # The processes of one node have the same parent, which no other job has.
        is_one_node = os.environ.get("LOCAL_WORLD_SIZE") in (None, os.environ.get("WORLD_SIZE"))
        job = [os.environ.get(name, "") for name in _JOB] + [str(os.getppid() if is_one_node else "")]
        job.append(str(next(_NUMBERS)))
        name = hashlib.sha256("\n".join(job).encode()).hexdigest()[:16]
        self._folder = (base or Path(tempfile.gettempdir())) / f"macrobatch-audit-{os.getuid()}-{name}"

    def tell(self, rank: int, windows: Sequence[Window], failures: Sequence[str]) -> None:
        """Write down what this rank has seen."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise UsageError(f"{self._folder} belongs to another user. Remove it, or set TMPDIR to an own folder.")
        found = {"windows": [window.to_dict() for window in windows], "failures": list(failures)}
        with replacing(self._folder / f"rank-{rank}.json") as file:
            json.dump(found, file)

    def listen(self, world: int, seconds: float = SECONDS) -> list[Told | None]:
        """What all ranks have seen, in their order; None for those that have told nothing in time."""
        end = time.monotonic() + seconds
        found: list[Told | None] = [None] * world
        while any(one is None for one in found) and time.monotonic() < end:
            for rank in range(world):
                path = self._folder / f"rank-{rank}.json"
                if found[rank] is None and path.exists():
                    found[rank] = _told(json.loads(path.read_text(encoding="utf-8")))
            if any(one is None for one in found):
                time.sleep(POLL)
        return found

    def leave(self, rank: int, world: int, *, all_listen: bool) -> None:
        """The first rank removes the folder, after all that listen have read it."""
        if rank:
            if all_listen:
                (self._folder / f"read-{rank}").touch()
            return
        end = time.monotonic() + SECONDS
        while all_listen and time.monotonic() < end:
            if all((self._folder / f"read-{other}").exists() for other in range(1, world)):
                break
            time.sleep(POLL)
        shutil.rmtree(self._folder, ignore_errors=True)


def _told(found: dict[str, Any]) -> Told:
    return Told([window_from(window) for window in found["windows"]], found["failures"])
