"""Limits in time and memory for what files of strangers make a library do: tokenizers, chat templates, packed files."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from macrobatch.errors import BatchError

SECONDS = 60.0  # for one conversation, or for a million characters
MEMORY = 8 << 30  # bytes, for the same; and at most half of what is free
PATIENCE = 0.1  # seconds between two looks at the memory
RATIO = 500  # times the size of a packed file: a text that says the same over and over is packed 200 times smaller
UNPACKED = 256 << 20  # bytes that any packed file may have

Result = TypeVar("Result")


def run_within_limits(
    action: Callable[[], Result], what: str, *, share: float = 1.0, is_python: bool = False
) -> Result:
    """Return what `action` returns, or raise an error if it takes too long or too much memory.

    The action runs in a thread of its own, which cannot be stopped: after an error it goes on until the process ends.

    >>> run_within_limits(lambda: 2 + 2, "the sum")
    4

    `share` multiplies the limits. With `is_python`, an error can be raised before too much memory is taken.
    """
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="macrobatch-limited", daemon=True)
    memory = psutil.Process().memory_info
    before, waited, most = memory().rss, 0.0, min(int(share * MEMORY), psutil.virtual_memory().available // 2)
    with _address_space(most) if is_python else contextlib.nullcontext():
        thread.start()
        while thread.is_alive():
            thread.join(PATIENCE)
            waited += PATIENCE
            if thread.is_alive() and waited > share * SECONDS:
                raise BatchError(f"{what} did not end within {share * SECONDS:.0f} seconds.")
            if thread.is_alive() and memory().rss - before > most:
                raise BatchError(f"{what} takes more than {most / 2**30:.2g} GiB of memory.")
    if failed and isinstance(failed[0], MemoryError):
        raise BatchError(f"{what} takes more than {most / 2**30:.2g} GiB of memory.")
    if failed and not isinstance(failed[0], Exception):  # a panic of a library that is written in Rust
        raise BatchError(f"{what} failed: {failed[0]}") from None
    if failed:
        raise failed[0]
    return done[0]


@contextlib.contextmanager
def _address_space(more: int) -> Iterator[None]:
    """A context in which this process may take only so many bytes more than it has."""
    now = psutil.Process().memory_info().vms
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = min(now + more, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class BoundedReader(io.RawIOBase):
    """The content of a packed file. It is an error if it is so much larger than the file that it must be a bomb."""

    def __init__(self, unpacked: IO[bytes], path: Path) -> None:
        self._unpacked: Any = unpacked
        self._path, self._most = path, max(UNPACKED, RATIO * os.path.getsize(path))
        self._size = 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        count: int = self._unpacked.readinto(buffer) or 0
        self._size += count
        if self._size > self._most:
            raise BatchError(
                f"{self._path} unpacks to more than {self._most:,} bytes, {RATIO} times its own size or more: it seems "
                "to be made to fill the memory. If it is not, unpack it yourself."
            )
        return count
