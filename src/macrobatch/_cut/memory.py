"""Recognises and explains a lack of memory, and remembers which micro-batch sizes fit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from macrobatch._cut.samples import Shape
from macrobatch._io.files import replacing
from macrobatch.errors import FitError, UsageError

# Messages of torch's allocators and libraries when there is no memory left.
MESSAGES = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)
REQUEST = re.compile(r"tried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)
UNLIMITED = 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is a lack of memory."""
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and MESSAGES.search(str(one)) is not None)
        for one in _error_chain(error)
    )


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def requested_memory(error: BaseException) -> str:
    """The requested amount of memory, in the words of the allocator."""
    for one in _error_chain(error):
        if found := REQUEST.search(str(one)):
            return found[1]
    return f"an unknown amount ({(str(error) or type(error).__name__).splitlines()[0]})"


def too_large_error(asked: str) -> FitError:
    """The error for a batch that does not fit even in micro-batches of one sample."""
    return FitError(
        f"not even one sample fits into memory: a micro-batch of one sample needed {asked} more. Make samples smaller "
        "(shorter sequences, smaller images), keep fewer activations (torch.utils.checkpoint; for language models "
        "macrobatch.causal_lm_loss, which computes logits in chunks), compute in bfloat16, shard the model "
        "(fully_shard), or free other memory."
    )


# ---------------------------------------------------------------------------------------------- sizes that fit

PATIENCE = 50  # windows without a failure before a larger size is tried
MAX_SHAPES = 1000  # remembered at a time
SAFE_SHARE = 0.9  # of a size that failed: above it, memory fragments decide, and the allocator has to retry


@dataclass
class SizeRecord:
    """Which sizes fit for samples of one shape."""

    size: int  # the number of samples to put into a micro-batch
    failed: int | None = None  # the smallest number that did not fit
    once: int = 0  # the largest number that fitted in a window
    fits: int = 0  # the largest number that fitted twice, the second time with an optimizer's state in memory
    quiet: int = 0  # windows at `size` without a failure
    patience: int = PATIENCE  # quiet windows before a larger size is tried
    is_trial: bool = False  # whether `size` is such a larger size, which may not fit

    def note_success(self, size: int) -> None:
        """Note that a window with micro-batches of that size fitted."""
        if size <= self.once:
            self.fits = max(self.fits, size)
        self.once = max(self.once, size)
        if size == self.size:
            self.is_trial = False
            self.quiet += 1
            if self.quiet >= self.patience:
                self._try_larger()

    def _try_larger(self) -> None:
        """Try half-way to the size that failed, unless that is too close to it; then forget the failure and double."""
        self.quiet, self.is_trial = 0, True
        half_way = (self.size + (self.failed or 0)) // 2
        if self.failed is not None and self.size < half_way <= SAFE_SHARE * self.failed:
            self.size = half_way
        else:
            self.size, self.failed = 2 * self.size, None

    def note_failure(self, size: int) -> None:
        """Note that a micro-batch of that size did not fit: try half of it, or a larger size that fitted before."""
        if self.is_trial:
            self.patience *= 2
        if size <= self.once:  # it fitted before: something else uses memory now
            self.once = self.fits = 0
        self.size = max(size // 2, self.once, 1)
        self.failed = size if self.failed is None else min(self.failed, size)
        self.quiet, self.is_trial = 0, False


class FittingSizes:
    """Remembers which sizes of micro-batches fit, for each shape of a sample; a file keeps them for the next run."""

    def __init__(self, file: str | os.PathLike[str] | None = None) -> None:
        self._noted: set[Shape] = set()  # shapes that this run has seen, not only the file
        if file is not None and not isinstance(file, str | os.PathLike):
            raise UsageError(f"fit_file must be the path of a file: got {file!r}.")
        self.file = None if file is None else Path(file)
        self._known = {} if self.file is None else _read_file(self.file)

    def proposal(self, shape: Shape) -> int:
        """The number of samples of that shape to put into a micro-batch."""
        if shape in self._known:
            return self._known[shape].size
        alike = {s: known for s, known in self._known.items() if s.kind == shape.kind}
        limits = {s: known.size for s, known in alike.items() if known.size < UNLIMITED}
        if not limits:
            return UNLIMITED
        fit = max((limits.get(s, known.once) for s, known in alike.items() if _is_within(shape, s)), default=0)
        return fit or min([size for s, size in limits.items() if _is_within(s, shape)] or limits.values())

    def proven_size(self, shape: Shape) -> int:
        """The largest number of samples of that shape, or of a larger shape, that is known to fit."""
        return max((known.fits for s, known in self._known.items() if _is_within(shape, s)), default=0)

    def note_success(self, shape: Shape, size: int) -> None:
        """Note that a window with micro-batches of that size fitted."""
        known = self._of(shape)
        before = known.failed, known.size
        known.note_success(size)
        if (known.failed, known.size) != before:
            self.save()

    def note_failure(self, shape: Shape, size: int) -> None:
        """Note that a micro-batch of that size did not fit."""
        self._of(shape).note_failure(size)
        self.save()

    def forget(self) -> None:
        """Forget all sizes that were noted here, in the file too. Those of other shapes, which it came with, stay."""
        noted, self._noted = self._noted, set()
        self._known = {shape: one for shape, one in self._known.items() if shape not in noted}
        if self.file is not None and self.file.exists():
            _write_file(self.file, {s: one for s, one in _read_file(self.file).items() if s not in noted})

    def _of(self, shape: Shape) -> SizeRecord:
        self._noted.add(shape)
        if shape not in self._known:
            self._known[shape] = SizeRecord(self.proposal(shape))
            if len(self._known) > MAX_SHAPES:
                del self._known[next(iter(self._known))]  # the oldest
        return self._known[shape]

    def save(self) -> None:
        """Write the sizes that are limited to the file, if there is one. Sizes that others wrote there stay."""
        if self.file is not None:
            limited = {shape: known for shape, known in self._known.items() if known.size < UNLIMITED}
            _write_file(self.file, _read_file(self.file) | limited)


def _is_within(shape: Shape, other: Shape) -> bool:
    """Whether no dimension of a shape is larger than in the other."""
    return shape.kind == other.kind and all(a <= b for a, b in zip(shape.sizes, other.sizes, strict=True))


def _read_file(file: Path) -> dict[Shape, SizeRecord]:
    try:
        if file.exists() and not file.is_file():
            raise ValueError("no regular file")  # reading a pipe would wait forever
        rows = json.loads(file.read_text())["shapes"]
        return {Shape(str(row["kind"]), tuple(map(int, row["sizes"]))): _record_from_json(row) for row in rows}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UsageError(f"{file} is not a file of sizes that fit ({error!r}). Pass another or delete it.") from None


def _write_file(path: Path, records: dict[Shape, SizeRecord]) -> None:
    rows = [shape._asdict() | {"size": known.size, "failed": known.failed} for shape, known in records.items()]
    with replacing(path) as file:
        json.dump({"macrobatch": "sizes that fit", "shapes": rows}, file, indent=1)


def _record_from_json(row: dict[str, Any]) -> SizeRecord:
    known = SizeRecord(int(row["size"]), None if row["failed"] is None else int(row["failed"]))
    if known.size < 1 or (known.failed is not None and known.failed < 1):
        raise ValueError(f"sizes are 1 or more: {row}")
    return known


# ---------------------------------------------------------------------------------------------- memory pressure


class Pressure:
    """Counts how often the allocator of a CUDA device frees its cache and retries: a size that barely fits is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._retries()

    def _retries(self) -> int:
        statistics = torch.cuda.memory_stats(self._device) if self._device.type == "cuda" else {}
        return int(statistics.get("num_alloc_retries", 0))

    def has_risen(self) -> bool:
        """Whether the allocator has retried since."""
        return self._retries() > self._before


def release_cached_memory(device: torch.device) -> None:
    """Free the allocator's cache, so that smaller micro-batches do not get the fragments of larger ones."""
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).empty_cache()
