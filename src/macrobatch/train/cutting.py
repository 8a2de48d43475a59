"""How a run cuts its batches into micro-batches, and the file of the sizes that fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from macrobatch._cut.memory import FittingSizes
from macrobatch._cut.plans import plan_by_count, plan_by_tokens, plan_rows
from macrobatch._cut.policies import ByTokens, PackedRows, by_tokens
from macrobatch.errors import UsageError
from macrobatch.train.settings import Settings
from macrobatch.train.world import World

logger = logging.getLogger("macrobatch")

CPU_TOKENS = 1024  # per micro-batch. On a CPU no sizes are tried by default: a process without memory is killed.

Micro = int | ByTokens | Literal["auto"]


def micro_of(settings: Settings, longest: int, device: torch.device) -> Micro:
    """The ``micro=`` of `MacroStep`, for samples of at most `longest` tokens."""
    kind, size = settings.cut
    if kind == "count":
        assert size is not None, "the settings have checked it"
        return size
    if kind == "auto" and not settings.pack:
        return "auto"
    is_tried = kind == "auto" or (size is None and device.type == "cuda")
    longest = packed_width(settings) if settings.pack else longest
    budget: int | Literal["auto"] = "auto" if is_tried else size or max(CPU_TOKENS, longest)
    return PackedRows(budget, width=longest) if settings.pack else by_tokens(budget)


def packed_width(settings: Settings) -> int:
    """The number of tokens that fit into a packed row."""
    assert settings.seq_len is not None, "it was derived from the data"
    return settings.seq_len


def cut_summary(micro: Micro, lengths: Sequence[int]) -> str:
    """A text that says how samples of these lengths are cut."""
    if isinstance(micro, int):
        return f"about {len(plan_by_count(len(lengths), micro))} on each rank, of {micro} samples"
    if micro == "auto":
        return "as many samples in each as fit"
    rows = len(plan_rows(lengths, micro.width)) if isinstance(micro, PackedRows) else 0
    packed = f", in {rows} rows of at most {micro.width} tokens" if isinstance(micro, PackedRows) else ""
    if micro.budget == "auto":
        return f"as many tokens in each as fit{packed}"
    count = len(plan_by_tokens(lengths, micro.budget))
    if isinstance(micro, PackedRows):
        count = -(-rows // max(micro.budget // micro.width, 1))
    return f"about {count} on each rank, by tokens, {micro.budget:,} at most{packed}"


def fit_file(settings: Settings, micro: Micro) -> Path | None:
    """The file that stores the sizes that fit into memory; None if no sizes are tried."""
    is_tried = micro == "auto" or (isinstance(micro, ByTokens) and micro.budget == "auto")
    return Path(settings.out, "fit.json") if is_tried and settings.out else None


def drop_damaged_sizes(file: Path | None, world: World) -> None:
    """Remove a file of sizes that cannot be read. The sizes are then found again, which takes some time."""
    if file is None or not world.is_first or not file.exists():
        return
    try:
        if file.is_file():
            FittingSizes(file)
            return
    except (UsageError, RecursionError):
        pass
    logger.warning("%s is damaged and was removed. The sizes that fit are searched again.", file)
    file.unlink()
