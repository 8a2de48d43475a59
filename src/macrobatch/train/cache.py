"""What takes seconds to make is kept in files, and made anew where a file is not exactly what was written.

Any number of processes may use one folder at once: a file is written aside and renamed, so that nobody ever sees a
part of one. A file says what it is and carries its checksum: one that was cut off, damaged or put there by something
else is not believed. A folder that cannot be written costs time, never a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

from macrobatch._io.files import replacing
from macrobatch.errors import UsageError

logger = logging.getLogger("macrobatch")

# Another number wherever anything that is kept comes to be made otherwise.
_MAGIC = b"macrobatch cache 2\n".ljust(64)  # as wide as the checksum, so that what follows is aligned
_DIGEST = 64  # characters of a SHA-256
_HEAD = len(_MAGIC) + _DIGEST
_BLOCK = 1 << 20  # bytes that are read at once
_ABANDONED = 3600.0  # seconds after which nobody is still writing a file

Put = Callable[[bytes], None]


class Checksum(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None:
        """Go on with these bytes."""

    def hexdigest(self) -> str:
        """That of all bytes so far."""


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


def mapped(folder: Path | None, name: str, make: Callable[[Put], None]) -> memoryview:
    """What `make` writes, for more than should be in memory: read-only, and read from the disk where it is used.

    Args:
        folder: as for `kept`. None, or one that cannot be written: a file without a name, for this process only.
        name: as for `kept`.
        make: is called with a function that takes the next bytes.
    """
    if folder is not None:
        path = folder / name
        found = _map(path)
        if found is not None:
            return found
        try:
            _sweep(folder)
            with replacing(path, "w+b") as file:
                return _written(file, name, make)
        except OSError as error:
            logger.warning("%s cannot be kept, so the next run will make it again: %s", path, error.strerror or error)
    try:
        with tempfile.TemporaryFile(prefix="macrobatch-") as file:
            return _written(file, name, make)
    except OSError as error:
        raise UsageError(
            f"there is no room for the data in {tempfile.gettempdir()}: {error.strerror or error}. Make some, or name "
            "a folder on another disk with MACROBATCH_CACHE."
        ) from error


def _written(file: IO[bytes], name: str, make: Callable[[Put], None]) -> memoryview:
    total = _begun(name)

    def put(content: bytes) -> None:
        file.write(content)
        total.update(content)

    file.write(bytes(_HEAD))
    make(put)
    file.seek(0)
    file.write(_MAGIC + total.hexdigest().encode("ascii"))
    file.flush()
    return _view(file)


def _view(file: IO[bytes]) -> memoryview:
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[_HEAD:]


def _map(path: Path) -> memoryview | None:
    """A file that is there and whole."""
    try:
        with path.open("rb") as file:
            if _is_whole(file, path.name):
                return _view(file)
    except OSError:
        return None
    if not _is_of_another_version(path):
        logger.warning("%s is damaged or not ours: it is made anew.", path)
    return None


def _is_of_another_version(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        first = file.readline(len(_MAGIC)).strip()
        return first != _MAGIC.strip() and first.startswith(_MAGIC.strip()[:-1])
    return False


def _is_whole(file: IO[bytes], name: str) -> bool:
    head, total = file.read(_HEAD), _begun(name)
    for block in _blocks(file):
        total.update(block)
    return head == _MAGIC + total.hexdigest().encode("ascii")


def _begun(name: str) -> Checksum:
    """A checksum that is of the name too: a file that was copied to another name is not what that one promises."""
    return hashlib.sha256(b"%d:%s" % (len(name.encode()), name.encode()))


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _read(path: Path) -> bytes | None:
    found = _map(path)
    return None if found is None else bytes(found)


def _write(path: Path, content: bytes) -> None:
    _sweep(path.parent)
    total = _begun(path.name)
    total.update(content)
    with replacing(path, "wb") as file:
        file.write(_MAGIC + total.hexdigest().encode("ascii"))
        file.write(content)


def _sweep(folder: Path) -> None:
    """Remove what processes left behind that were killed while writing."""
    for aside in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime > _ABANDONED:
                aside.unlink()
