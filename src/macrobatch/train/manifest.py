"""The manifest of a checkpoint: which tensors are in which file, with the checksum of each file.

A manifest is used only if every part of it has the form that `contents` gives it. Anyone who can write to a run folder
can also write a manifest with a valid checksum. Therefore files have plain names only, the chunks of a tensor must
cover it exactly once, and only regular files are opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from io import BufferedReader
from itertools import combinations
from pathlib import Path
from typing import Any

from macrobatch.errors import CheckpointError, UsageError
from macrobatch.train.storage import NAMED, Json, world_size

MANIFEST = "manifest.json"
KIND, VERSION = "macrobatch checkpoint", 1
FILE = re.compile(r"rank-\d{5,}\.safetensors")
LARGEST = 2**30  # bytes of a manifest that are read at most


def contents(step: int, owner: str, facts: Json, held: Json, files: Json) -> Json:
    """The contents of a manifest, as they will be read from the file."""
    about = {"kind": KIND, "version": VERSION, "step": step, "ranks": world_size(), "owner": owner}
    try:
        said: Json = json.loads(json.dumps({**about, "facts": facts, "files": files, "tensors": held}))
    except (TypeError, ValueError) as error:
        raise UsageError(f"facts must be what JSON can hold: {error}.") from None
    return said


def to_bytes(said: Json) -> bytes:
    """The bytes of the manifest file."""
    return json.dumps({"sha256": _digest(said), "contents": said}, indent=1).encode()


def read(path: Path) -> Json:
    """The contents of a checkpoint's manifest. Raises an error if it is missing, damaged or malformed."""
    file = path / MANIFEST
    try:
        with open_regular(file) as opened:
            # Read the size of the file: `read` allocates all bytes that it is asked for, and memory may be limited.
            content = opened.read(min(os.fstat(opened.fileno()).st_size, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if path.is_dir() else "is no folder"
        raise CheckpointError(f"{path} is not a checkpoint: it {what}.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from None
    try:
        outer = json.loads(content)
        said: Json = outer["contents"]
        is_intact = isinstance(said, dict) and outer["sha256"] == _digest(said)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CheckpointError(f"{file} is damaged, or was not written by macrobatch.")
    kind, version = said.get("kind"), said.get("version")
    if (kind, version) != (KIND, VERSION):
        raise CheckpointError(
            f"{path} is a {kind!r} of version {version!r}; this macrobatch reads a {KIND!r} of version {VERSION}. "
            "Use the macrobatch that wrote it."
        )
    try:
        flaw = _flaw(said)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        flaw = "has parts that no checkpoint has"
    if flaw is not None:
        raise CheckpointError(f"{file} {flaw}.")
    return said


def _flaw(said: Json) -> str | None:
    """What is malformed in the contents of a manifest; None if nothing is."""
    if not isinstance(said["facts"], dict) or not _is_count(said["step"]):
        return "has parts that no checkpoint has"
    files = said["files"]
    if not files or not all(FILE.fullmatch(name) for name in files):
        return "names files that no checkpoint has"
    if not all(_is_count(one["bytes"]) and isinstance(one["sha256"], str) for one in files.values()):
        return "does not say what is in its files"
    for name, tensor in said["tensors"].items():
        if tensor["dtype"] not in NAMED or not all(map(_is_count, tensor["shape"])):
            return f"has a tensor {name!r} that no checkpoint has"
        if not all(chunk["file"] in files for chunk in tensor["chunks"]):
            return "names files that no checkpoint has"
        if not _is_covered(tensor["shape"], tensor["chunks"]):
            return f"has chunks of {name!r} that are not the whole of it"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_covered(shape: list[int], chunks: list[Json]) -> bool:
    """Whether chunks cover each number of a tensor exactly once."""
    boxes = []
    for chunk in chunks:
        offsets, sizes = chunk["offsets"], chunk["sizes"]
        if not (len(offsets) == len(sizes) == len(shape) and all(map(_is_count, [*offsets, *sizes]))):
            return False
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            return False
        boxes.append([(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)])
    if sum(math.prod(chunk["sizes"]) for chunk in chunks) != math.prod(shape) or not chunks:
        return False
    return not any(
        all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
        for one, other in combinations(boxes, 2)
    )


def damage(file: Path, expected: Json) -> str | None:
    """What is wrong with a file that a manifest names; None if nothing is."""
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != expected["bytes"]:
                return f"{file} is damaged: it has {size:,} bytes where {expected['bytes']:,} were written."
            if hashlib.file_digest(opened, "sha256").hexdigest() != expected["sha256"]:
                return f"{file} is damaged: its content is not what was written."
    except FileNotFoundError:
        return f"{file} is missing."
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}."
    return None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. A pipe, which would wait for a writer, or any other kind raises an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(f"{path} is no file")


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
