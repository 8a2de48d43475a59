"""Write files so that a kill or a full disk leaves either the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", *, shared: bool = True) -> Iterator[IO[Any]]:
    """A context with a file to write to. It replaces `path` when the block ends without an error.

    `shared` says whether several processes may write the file at the same time. If not, the temporary file has a fixed
    name, so that the next write replaces what a killed process has left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial" if shared else f"{path.name}.partial")
    try:
        with open(aside, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
