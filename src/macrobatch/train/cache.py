"""Keep results that take seconds to compute in files, and compute them again if a file is not exactly what was written.

Any number of processes may use one folder at the same time: each writes a temporary file and renames it, so nobody ever
sees an incomplete file. A file begins with its kind and its checksum, so a truncated, damaged or foreign file is not
used. If the folder cannot be written, a run takes longer, but does not fail.
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

# Raise the number whenever the content of any kept file is computed in another way.
_MAGIC = b"macrobatch cache 3\n".ljust(64)  # as wide as the checksum, so that the content is aligned
_DIGEST = 64  # characters of a SHA-256
_HEAD = len(_MAGIC) + _DIGEST
_BLOCK = 1 << 20  # bytes per read
_ABANDONED = 3600.0  # seconds after which a temporary file is no longer being written

Put = Callable[[bytes], None]


class Checksum(Protocol):
    """A hash object of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far."""


def cache_folder() -> Path | None:
    """The default folder: ``$MACROBATCH_CACHE``, or ``macrobatch`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None without
    a home.
    """
    if chosen := os.environ.get("MACROBATCH_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "macrobatch"
    except RuntimeError:  # a user without a home, e.g. in a container
        return None


def cached(folder: Path | None, name: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returns, from a file in `folder` if an earlier call has left a complete one.

    The name must change with everything that the result depends on: see `digest`.
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
        logger.warning("%s cannot be written, so the next run computes it again: %s", path, error.strerror or error)
    return content


def digest(parts: Iterable[str | bytes]) -> str:
    """A hash of these parts in this order. Other parts, or another order, have another hash.

    >>> digest(["ab", "c"]) == digest(["a", "bc"])
    False
    """
    total = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        total.update(b"%d:" % len(content))
        total.update(content)
    return total.hexdigest()


def cached_view(folder: Path | None, name: str, make: Callable[[Put], None]) -> memoryview:
    """A read-only view of what `make` writes, for data that should not be in memory: it is read from the disk when
    used.

    Without a folder that can be written, it is a temporary file of this process only.
    """
    if folder is not None:
        path = folder / name
        found = _map(path)
        if found is not None:
            return found
        try:
            _sweep(folder)
            with replacing(path, "w+b") as file:
                return _write_view(file, name, make)
        except OSError as error:
            logger.warning("%s cannot be written, so the next run computes it again: %s", path, error.strerror or error)
    try:
        with tempfile.TemporaryFile(prefix="macrobatch-") as file:
            return _write_view(file, name, make)
    except OSError as error:
        raise UsageError(
            f"there is no space for the data in {tempfile.gettempdir()}: {error.strerror or error}. Free some, or set "
            "MACROBATCH_CACHE to a folder on another disk."
        ) from error


def _write_view(file: IO[bytes], name: str, make: Callable[[Put], None]) -> memoryview:
    total = _new_checksum(name)

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
    """A view of a file, if it exists and is complete."""
    try:
        with path.open("rb") as file:
            if _is_whole(file, path.name):
                return _view(file)
    except OSError:
        return None
    if not _is_of_another_version(path):
        logger.warning("%s is damaged or foreign, so it is computed again.", path)
    return None


def _is_of_another_version(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        first = file.readline(len(_MAGIC)).strip()
        return first != _MAGIC.strip() and first.startswith(_MAGIC.strip()[:-1])
    return False


def _is_whole(file: IO[bytes], name: str) -> bool:
    head, total = file.read(_HEAD), _new_checksum(name)
    for block in _blocks(file):
        total.update(block)
    return head == _MAGIC + total.hexdigest().encode("ascii")


def _new_checksum(name: str) -> Checksum:
    """A checksum that includes the file's name, so that a file that was copied to another name is not used."""
    return hashlib.sha256(b"%d:%s" % (len(name.encode()), name.encode()))


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _read(path: Path) -> bytes | None:
    found = _map(path)
    return None if found is None else bytes(found)


def _write(path: Path, content: bytes) -> None:
    _sweep(path.parent)
    total = _new_checksum(path.name)
    total.update(content)
    with replacing(path, "wb") as file:
        file.write(_MAGIC + total.hexdigest().encode("ascii"))
        file.write(content)


def _sweep(folder: Path) -> None:
    """Remove temporary files of processes that were killed while writing."""
    for aside in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime > _ABANDONED:
                aside.unlink()
