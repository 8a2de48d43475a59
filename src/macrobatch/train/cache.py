"""What takes seconds to make is kept in files, and made anew where a file is not exactly what was written.

Any number of processes may use one folder at once: a file is written aside and renamed, so that nobody ever sees a
part of one. A file says what it is and carries its checksum: one that was cut off, damaged or put there by something
else is not believed. A folder that cannot be written costs time, never a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from macrobatch._io.files import replacing

logger = logging.getLogger("macrobatch")

_MAGIC = b"macrobatch cache 1\n"  # another number wherever anything that is kept comes to be made otherwise
_DIGEST = 64  # characters of a SHA-256
_ABANDONED = 3600.0  # seconds after which nobody is still writing a file


def cache_folder() -> Path | None:
    """Where files are kept by default: ``$MACROBATCH_CACHE``, or ``~/.cache/macrobatch``; None: there is no home."""
    if chosen := os.environ.get("MACROBATCH_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "macrobatch"
    except RuntimeError:  # in a container, a user without a name
        return None


def kept(folder: Path | None, name: str, make: Callable[[], bytes]) -> bytes:
    """What `make` returns; where an earlier call left it in `folder`, whole and under this name, without making it.

    Args:
        folder: made where it is missing; None: nothing is kept.
        name: must change with everything that the result depends on: see `digest`.
        make: what to do otherwise.
    """
    if folder is None:
        return make()
    path = folder / name
    found = _read(path)
    if found is not None:
        return found
    content = make()
    try:
        _write(path, content)
    except OSError as error:
        logger.warning("%s cannot be kept, so the next run will make it again: %s", path, error.strerror or error)
    return content


def digest(parts: Iterable[str | bytes]) -> str:
    """A name for these parts in this order, and for no others.

    >>> digest(["ab", "c"]) == digest(["a", "bc"])
    False
    """
    total = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        total.update(b"%d:" % len(content))
        total.update(content)
    return total.hexdigest()


def _checksum(path: Path, content: bytes) -> bytes:
    """Of the name too: a file that was copied to another name is not what that one promises."""
    return digest([path.name, content]).encode("ascii")


def _read(path: Path) -> bytes | None:
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + _DIGEST
    content = whole[head:]
    if whole[:head] == _MAGIC + _checksum(path, content):
        return content
    logger.warning("%s is damaged or not ours: it is made anew.", path)
    return None


def _write(path: Path, content: bytes) -> None:
    _sweep(path.parent)
    with replacing(path, "wb") as file:
        file.write(_MAGIC + _checksum(path, content))
        file.write(content)


def _sweep(folder: Path) -> None:
    """Remove what processes left behind that were killed while writing."""
    for aside in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime > _ABANDONED:
                aside.unlink()
