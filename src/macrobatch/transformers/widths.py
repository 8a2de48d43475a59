"""Finds losses that depend on padding: micro-batches of different widths then are not one big batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cut.joining import padded_columns
from macrobatch._cut.padding import IGNORED
from macrobatch._cut.policies import ByTokens
from macrobatch._cut.token_groups import MASK
from macrobatch.transformers.asking import ROUGH, AnyRank, Inquiry, draws_random_numbers, number_of
from macrobatch.transformers.meaning import Inputs, Meaning
from macrobatch.transformers.windows import Settings, padding_of

PADDED_BY_NAME = {MASK, "input_ids", "labels", "shift_labels", "token_type_ids"}


def widest_of(batches: Sequence[Any]) -> int:
    """The largest width of these batches; 0 if none has a mask."""
    return max(map(_width, batches), default=0)


def have_different_widths(batches: Sequence[Any], settings: Settings, widest: int) -> bool:
    """Whether micro-batches of this rank may have other widths than `widest`, the largest on any rank.

    Windows that are cut by a number of samples are first padded to one width on each rank.
    """
    widths = {_width(batch) for batch in batches if _has_mask(batch)}
    if settings.cuts:
        return isinstance(settings.micro, ByTokens) or max(widths, default=widest) != widest
    return bool(widths - {widest})


def padding_warning(
    trainer: Any, model: nn.Module, meaning: Meaning, batches: Sequence[Inputs], widest: int, any_rank: AnyRank
) -> str | None:
    """What to tell about a loss that depends on padding, on any rank: they ask together. None if it does not."""
    ask = Inquiry(trainer, model)
    each = [(one, _without_padding(one)) for one in (_shortest(batch, meaning) for batch in batches)]
    alone, bare = max(each, key=lambda pair: _width(pair[0]) - _width(pair[1]))
    if _width(alone) == _width(bare):  # no batch has padding
        bare = min((bare for _, bare in each), key=_width)
        alone = _with_padding(bare, widest, trainer)
    (whole, items), (without, _) = (ask.of(meaning, one) for one in (alone, bare))
    effect = abs(whole - without) / (abs(whole) or 1.0) if items else 0.0
    if not any_rank(ask.rounding[0] < ROUGH and effect > 10 * ask.rounding[1]):
        return None
    if any_rank(draws_random_numbers(ask, bare, number_of(trainer, bare))):
        return None
    return (
        f"the loss of {type(trainer).__name__}.compute_loss depends on padding: the loss of one sample changes by "
        f"{effect:.2g} of itself if its padding is left out. The micro-batches of a window are padded to different "
        "widths, so their gradient is not that of one big batch, which has one width. Pad all batches to the same "
        "width, leave padded positions out of the loss, or, in one process, let exact() pad each window with micro= "
        "(told once)."
    )


def _shortest(batch: Inputs, meaning: Meaning) -> Inputs:
    """The shortest sample that has items; if that is not known, the first one."""
    samples = list(range(meaning.layout.count(batch)))
    if _has_mask(batch) and not meaning.layout.has_pairs:
        lengths = _shown(batch).sum(1).tolist()
        samples.sort(key=lengths.__getitem__)
    alone = [meaning.layout.select(batch, [sample]) for sample in samples]
    return next((one for one in alone if meaning.count is None or meaning.count(one)), alone[0])


def _without_padding(batch: Inputs) -> Inputs:
    """The batch without the columns that show nothing in any row, at either end."""
    columns = _shown(batch).any(0).nonzero().flatten().tolist() if _has_mask(batch) else []
    if not columns:
        return batch
    kept = slice(columns[0], columns[-1] + 1)
    wide = _wide_fields(batch)
    return {key: value[:, kept].contiguous() if key in wide else value for key, value in batch.items()}


def _with_padding(batch: Inputs, width: int, trainer: Any) -> Inputs:
    """The batch in that width; unchanged if it is not known what pads all of its fields."""
    wide = _wide_fields(batch)
    if not wide or not wide <= PADDED_BY_NAME or width <= _width(batch):
        return batch
    padding, at_left = padding_of(trainer), getattr(trainer.processing_class, "padding_side", "right") == "left"
    more = width - _width(batch)
    padded = {key: padded_columns(batch[key], more, padding.get(key, 0), at_left) for key in wide}
    return {**batch, **padded}


def _has_mask(batch: Any) -> bool:
    mask = batch.get(MASK) if isinstance(batch, Mapping) or hasattr(batch, "get") else None
    return isinstance(mask, Tensor) and mask.dim() == 2


def _width(batch: Any) -> int:
    return int(batch[MASK].shape[1]) if _has_mask(batch) else 0


def _wide_fields(batch: Inputs) -> set[str]:
    """The names of fields with a column for each position."""
    width = _width(batch)
    return {key for key, value in batch.items() if isinstance(value, Tensor) and value.shape[1:2] == (width,)}


def _shown(batch: Inputs) -> Tensor:
    """(samples, positions): where the mask or a label shows something."""
    labels, shown = batch.get("labels"), torch.ne(batch[MASK], 0)
    if isinstance(labels, Tensor) and labels.shape == shown.shape:
        shown = shown | (labels != IGNORED)
    return shown
