"""Out of memory: recognised, explained, and remembered, so that the next micro-batches are of a size that fits.

`FittingSizes` is what is known so far, by the shape of a sample. When a window is done again, `_step.attempts` decides.
"""

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

# What the allocators and libraries of torch's devices say when they have no memory left.
MESSAGES = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)
ASKED_FOR = re.compile(r"tried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)
UNLIMITED = 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, is a lack of memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    True
    >>> is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    False
    """
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and MESSAGES.search(str(one)) is not None)
        for one in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def requested_memory(error: BaseException) -> str:
    """How much was asked for, in the words of the allocator.

    >>> requested_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."))
    '2.00 GiB'
    """
    for one in _with_causes(error):
        if found := ASKED_FOR.search(str(one)):
            return found[1]
    return f"an unknown amount ({(str(error) or type(error).__name__).splitlines()[0]})"


def too_large_error(asked: str) -> FitError:
    """A batch that does not fit, however it is cut."""
    return FitError(
        f"not even one sample fits into memory: {asked} more was asked for in a micro-batch of its own. Make samples "
        "smaller (shorter sequences, smaller images), keep fewer activations (torch.utils.checkpoint; for language "
        "models macrobatch.causal_lm_loss, which projects in chunks), compute in bfloat16, shard the model "
        "(fully_shard), or free what else holds memory."
    )


# ---------------------------------------------------------------------------------------------- what is known

PATIENCE = 50  # windows without trouble, until a larger size is tried
SHAPES = 1000  # that are remembered at a time
CLEAR = 0.9  # of a size that failed: above it fragments of memory decide, and the allocator frees and asks again


@dataclass
class SizeRecord:
    """What is known for samples of one shape.

    Attributes:
        size: how many of them to put into a micro-batch.
        failed: the smallest number that did not fit, if any did not.
        once: the largest number that went through a window.
        fits: the largest that did so twice, the second time with an optimizer's state in memory: it is proven.
        quiet: windows at `size` without trouble.
        patience: after how many of them a larger size is tried.
        rising: whether `size` is such a larger one, not known to fit.
    """

    size: int
    failed: int | None = None
    once: int = 0
    fits: int = 0
    quiet: int = 0
    patience: int = PATIENCE
    rising: bool = False

    def fitted(self, size: int) -> None:
        """A window with micro-batches of that size went through."""
        if size <= self.once:
            self.fits = max(self.fits, size)
        self.once = max(self.once, size)
        if size == self.size:
            self.rising = False
            self.quiet += 1
            if self.quiet >= self.patience:
                self._go_up()

    def _go_up(self) -> None:
        """Try more: half-way to what failed, while that stays clear of it; then as if it had not failed."""
        self.quiet, self.rising = 0, True
        if self.failed is not None and self.size < (half_way := (self.size + self.failed) // 2) <= CLEAR * self.failed:
            self.size = half_way
        else:
            self.size, self.failed = 2 * self.size, None

    def ran_out(self, size: int) -> None:
        """One did not: half of it, or what is known to fit if that is more."""
        if self.rising:
            self.patience *= 2
        if size <= self.once:  # it did fit before: something else has taken memory since
            self.once = self.fits = 0
        self.size = max(size // 2, self.once, 1)
        self.failed = size if self.failed is None else min(self.failed, size)
        self.quiet, self.rising = 0, False


class FittingSizes:
    """Which sizes of micro-batches fit, by the shape of a sample.

    >>> sizes, shape = FittingSizes(), Shape("x", (512,))
    >>> sizes.ran_out(shape, 16)
    >>> sizes.proposed(shape), sizes.proposed(Shape("x", (1024,)))    # the next try; a longer one fits no better
    (8, 8)

    Args:
        file: where sizes that did not fit are kept for the next run; they are read from it now.
    """

    def __init__(self, file: str | os.PathLike[str] | None = None) -> None:
        self._known: dict[Shape, SizeRecord] = {}
        if file is not None and not isinstance(file, str | os.PathLike):
            raise UsageError(f"fit_file must be the path of a file: got {file!r}.")
        self.file = None if file is None else Path(file)
        if self.file is not None:
            self._known.update(_read(self.file))

    def proposed(self, shape: Shape) -> int:
        """How many samples of that shape to put into a micro-batch, by all that is known."""
        if shape in self._known:
            return self._known[shape].size
        alike = {s: known for s, known in self._known.items() if s.kind == shape.kind}
        limits = {s: known.size for s, known in alike.items() if known.size < UNLIMITED}
        if not limits:
            return UNLIMITED
        fit = max((limits.get(s, known.once) for s, known in alike.items() if _within(shape, s)), default=0)
        return fit or min([size for s, size in limits.items() if _within(s, shape)] or limits.values())

    def proven(self, shape: Shape) -> int:
        """The largest number of samples of that shape, or a larger one, that is known to fit."""
        return max((known.fits for s, known in self._known.items() if _within(shape, s)), default=0)

    def fitted(self, shape: Shape, size: int) -> None:
        """A window with micro-batches of so many samples went through."""
        known = self._of(shape)
        before = known.failed, known.size
        known.fitted(size)
        if (known.failed, known.size) != before:
            self.save()

    def ran_out(self, shape: Shape, size: int) -> None:
        """One did not."""
        self._of(shape).ran_out(size)
        self.save()

    def _of(self, shape: Shape) -> SizeRecord:
        if shape not in self._known:
            self._known[shape] = SizeRecord(self.proposed(shape))
            if len(self._known) > SHAPES:
                del self._known[next(iter(self._known))]  # the one known longest
        return self._known[shape]

    def save(self) -> None:
        """Write down what is limited, if a file was named; what others have written there stays."""
        if self.file is None:
            return
        kept = _read(self.file) | {shape: known for shape, known in self._known.items() if known.size < UNLIMITED}
        rows = [
            {"kind": shape.kind, "sizes": shape.sizes, "size": known.size, "failed": known.failed}
            for shape, known in kept.items()
        ]
        with replacing(self.file) as file:
            json.dump({"macrobatch": "sizes that fit", "shapes": rows}, file, indent=1)


def _within(shape: Shape, other: Shape) -> bool:
    """Whether a sample of one shape is in no dimension larger than one of the other."""
    return shape.kind == other.kind and all(a <= b for a, b in zip(shape.sizes, other.sizes, strict=True))


def _read(file: Path) -> dict[Shape, SizeRecord]:
    try:
        if file.exists() and not file.is_file():
            raise ValueError("no regular file")  # a pipe would keep whoever reads it waiting
        rows = json.loads(file.read_text())["shapes"]
        return {Shape(str(row["kind"]), tuple(map(int, row["sizes"]))): _known(row) for row in rows}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UsageError(f"{file} is not a file of sizes that fit ({error!r}). Name another, or delete it.") from None


def _known(row: dict[str, Any]) -> SizeRecord:
    known = SizeRecord(int(row["size"]), None if row["failed"] is None else int(row["failed"]))
    if known.size < 1 or (known.failed is not None and known.failed < 1):
        raise ValueError(f"sizes are 1 or more: {row}")
    return known


# ---------------------------------------------------------------------------------------------- the cliff


class Pressure:
    """How often the allocator of a CUDA device had to free its cache and ask again: a size that barely fits is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._retries()

    def _retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def rose(self) -> bool:
        """Whether it has happened since."""
        return self._retries() > self._before


def release_cached_memory(device: torch.device) -> None:
    """Give cached memory back, so that smaller micro-batches do not meet the fragments of larger ones."""
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).empty_cache()
