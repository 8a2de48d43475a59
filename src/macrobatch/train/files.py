"""Files of a run that are complete at any moment, even if a process is killed."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from macrobatch._io.files import replacing
from macrobatch.errors import UsageError

logger = logging.getLogger("macrobatch")


def replace_whole(path: Path, text: str) -> None:
    """Replace a file at once. No other run may write it at the same time."""
    with replacing(path, shared=False) as file:
        file.write(text)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A context with an empty folder to write into. At the end it replaces `folder`, which stays until then."""
    aside, before = (folder.with_name(f"{folder.name}.{how}") for how in ("partial", "before"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)  # left by a process that was killed before the last line
        folder.rename(before)
    aside.rename(folder)
    shutil.rmtree(before, ignore_errors=True)


class Lines:
    """A file of JSON objects, one per line. Each has its ``step``.

    Lines after `resume_step` are dropped; if it is None, the file must have none.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.path = path
        if resume_step is not None:
            replace_whole(path, "".join(_line(row) for row in rows(path) if row["step"] <= resume_step))
        elif path.exists() and path.stat().st_size:
            raise UsageError(f"{path} holds the steps of another run. Name another folder, or resume that run.")
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line. If the disk is full, add nothing and raise the error."""
        line = _line(row).encode()
        size = os.fstat(self._handle).st_size
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError:
            os.ftruncate(self._handle, size)
            raise

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines of such a file. A run that was killed may have left an incomplete one."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
        else:
            logger.warning("%s, line %d, is not a whole line: passed over", path, number)
    return found


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """A value for JSON: NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
