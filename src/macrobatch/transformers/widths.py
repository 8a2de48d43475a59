"""Finds losses that depend on padding: micro-batches of different widths then are not one big batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.policies import ByTokens
from macrobatch.transformers.asking import ROUGH, AnyRank, Inquiry, draws_random_numbers, number_of
from macrobatch.transformers.meaning import Inputs, Meaning
from macrobatch.transformers.windows import Settings

MASK = "attention_mask"


def have_different_widths(batches: Sequence[Any], settings: Settings) -> bool:
    """Whether the micro-batches of a window may have different widths. If samples are only counted, they have one."""
    if settings.cuts:
        return isinstance(settings.micro, ByTokens)
    return len({batch[MASK].shape[1:] for batch in batches if _has_mask(batch)}) > 1


def padding_warning(
    trainer: Any, model: nn.Module, meaning: Meaning, batches: Sequence[Inputs], any_rank: AnyRank
) -> str | None:
    """What to tell about a loss that depends on padding, on any rank: they ask together. None if it does not."""
    ask, wide = Inquiry(trainer, model), max(batches, key=_width)
    alone = _shortest(wide, meaning)
    (whole, items), (bare, _) = (ask.of(meaning, one) for one in (alone, _without_padding(alone)))
    effect = abs(whole - bare) / (abs(whole) or 1.0) if items else 0.0
    if not any_rank(ask.rounding[0] < ROUGH and effect > 10 * ask.rounding[1]):
        return None
    if any_rank(draws_random_numbers(ask, alone, number_of(trainer, alone))):
        return None
    return (
        f"the loss of {type(trainer).__name__}.compute_loss depends on padding: the loss of one sample changes by "
        f"{effect:.2g} of itself if its padding is left out. The micro-batches of a window are padded to different "
        "widths, so their gradient is not that of one big batch, which has one width. Pad all batches to the same "
        "width, let exact() do it for each window with micro=, or leave padded positions out of the loss (told once)."
    )


def _shortest(batch: Inputs, meaning: Meaning) -> Inputs:
    """The shortest sample that has items; if that is not known, the first one."""
    samples = list(range(meaning.layout.count(batch)))
    if _has_mask(batch) and not meaning.layout.has_pairs:
        lengths = _shown(batch).sum(1).tolist()
        samples.sort(key=lengths.__getitem__)
    alone = [meaning.layout.select(batch, [sample]) for sample in samples]
    return next((one for one in alone if meaning.count is None or meaning.count(one)), alone[0])


def _has_mask(batch: Any) -> bool:
    mask = batch.get(MASK) if isinstance(batch, Mapping) or hasattr(batch, "get") else None
    return isinstance(mask, Tensor) and mask.dim() == 2


def _width(batch: Inputs) -> int:
    return batch[MASK].shape[1] if _has_mask(batch) else 0


def _shown(batch: Inputs) -> Tensor:
    """(samples, positions): where the mask or a label shows something."""
    labels, shown = batch.get("labels"), torch.ne(batch[MASK], 0)
    if isinstance(labels, Tensor) and labels.shape == shown.shape:
        shown = shown | (labels != IGNORED)
    return shown


def _without_padding(batch: Inputs) -> Inputs:
    """The batch without the columns that show nothing in any row, at either end."""
    if not _has_mask(batch):
        return batch
    columns = _shown(batch).any(0).nonzero().flatten().tolist()
    if not columns:
        return batch
    kept, width = slice(columns[0], columns[-1] + 1), _width(batch)
    return {key: value[:, kept].contiguous() if _is_wide(value, width) else value for key, value in batch.items()}


def _is_wide(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == width
