"""The processes that a program has started: who they are, and none of them left behind.

A program of `started` leads a session of its own. Its family are the processes of that session, and all that descend
from those: torchrun gives each rank another session, and Ray's daemons outlive their parents.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Family = dict[int, int]  # process -> when it was started: together they tell it from all others


def started(command: Sequence[object], screen: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output in a file, beside which it runs."""
    with screen.open("ab") as file:
        return subprocess.Popen(
            [*map(str, command)], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=screen.parent,
            start_new_session=True,
        )  # fmt: skip


def family_of(leader: int) -> Family:
    """Those that are alive."""
    found: Family = {}
    parents: dict[int, tuple[int, int]] = {}  # of those outside the session
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            if int(fields[3]) == leader:
                found[int(entry.name)] = int(fields[19])
            else:
                parents[int(entry.name)] = (int(fields[1]), int(fields[19]))
    while children := {pid: when for pid, (parent, when) in parents.items() if parent in found and pid not in found}:
        found |= children
    return found


def end_family(leader: subprocess.Popen[bytes]) -> None:
    """Kill those that are alive, by their ids."""
    while family := family_of(leader.pid):
        for pid in family:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        leader.wait()
    leader.wait()
