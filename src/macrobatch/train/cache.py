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
from typing import IO, Any

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
    if (found := _map(path)) is not None:
        return bytes(found)
    content = make()
    with contextlib.suppress(OSError), _new_file(path) as file:
        _write_view(file, name, lambda put: put(content))
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
        if (found := _map(path)) is not None:
            return found
        with contextlib.suppress(OSError), _new_file(path) as file:
            return _write_view(file, name, make)
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
    with contextlib.suppress(OSError), path.open("rb") as file:
        head, total = file.read(_HEAD), _new_checksum(path.name)
        while block := file.read(_BLOCK):
            total.update(block)
        if head == _MAGIC + total.hexdigest().encode("ascii"):
            return _view(file)
        kind, _, _ = head.partition(b"\n")
        if kind == _MAGIC.strip() or not kind.startswith(_MAGIC.strip()[:-1]):  # not of another version
            logger.warning("%s is damaged or foreign, so it is computed again.", path)
    return None


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. If it cannot be written, warn. Removes temporary files of processes that were killed."""
    try:
        for aside in path.parent.glob("*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - aside.stat().st_mtime > _ABANDONED:
                    aside.unlink()
        with replacing(path, "w+b") as file:
            yield file
    except OSError as error:
        logger.warning("%s cannot be written, so the next run computes it again: %s", path, error.strerror or error)
        raise


def _new_checksum(name: str) -> Any:
    """A checksum that includes the file's name, so that a file that was copied to another name is not used."""
    return hashlib.sha256(b"%d:%s" % (len(name.encode()), name.encode()))
