"""Read files as bytes, decompressed if needed; and import the libraries that only some data needs."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from macrobatch.errors import BatchError, UsageError, pip_install
from macrobatch.train.limits import BoundedReader

_AT_ONCE = 1 << 20  # bytes


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, and decompress it. An error names a file that is damaged or cannot be read."""
    try:
        if not is_packed(path):
            with path.open("rb") as file:
                yield file
            return
        with _OPENERS[path.suffix.lower()](path) as unpacked:
            yield io.BufferedReader(BoundedReader(unpacked, path), _AT_ONCE)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
        raise BatchError(
            f"{path} cannot be unpacked: {error}. It is damaged, or its name has a wrong ending."
        ) from None


def is_packed(path: Path) -> bool:
    """Whether the file's name has the suffix of a compressed file."""
    return path.suffix.lower() in _OPENERS


def library(name: str, source: Path) -> Any:
    """Import the library that this source needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        how = "pip install datasets" if name == "datasets" else pip_install("data")
        raise UsageError(
            f"{source} needs the library {name}, which is not installed: {how}. Or write the data as JSONL."
        ) from None


@contextmanager
def _zstandard(path: Path) -> Iterator[IO[bytes]]:
    zstandard = library("zstandard", path)
    unpacking = zstandard.ZstdDecompressor(max_window_size=2**31)
    with path.open("rb") as file:
        try:
            yield io.BufferedReader(_Frames(file, unpacking), _AT_ONCE)
        except zstandard.ZstdError as error:
            raise EOFError(error) from None


class _Frames(io.RawIOBase):
    """All frames of a .zst file, one after the other. The library's own reader does not notice a truncated frame."""

    def __init__(self, file: IO[bytes], unpacking: Any) -> None:
        self._file, self._unpacking, self._frame, self._rest = file, unpacking, None, b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked and self._unpack():
            pass
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size

    def _unpack(self) -> bool:
        """Decompress some more bytes, and return whether there were any."""
        packed = self._rest or self._file.read(1 << 14)
        if not packed:
            if self._frame is not None:
                raise EOFError("it ends in the middle")
            return False
        frame = self._frame or self._unpacking.decompressobj()
        self._unpacked = memoryview(frame.decompress(packed))
        self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")
        return True


_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstandard}
