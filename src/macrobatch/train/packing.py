"""Packing: several samples in one row, each with its own positions, and with attention only inside each sample.

The loss is the same as for separate samples: no token sees another sample, and the first token of a sample has no
label, because nothing before it belongs to the sample.
"""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from macrobatch._cut.memory import is_out_of_memory
from macrobatch._cut.padding import IGNORED
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.train import varlen
from macrobatch.train.corpus import Sample
from macrobatch.train.suitable import on_trial, states_of

logger = logging.getLogger("macrobatch")

MASKS = (torch.bool, torch.float32)  # dtypes of masks: bool marks visible tokens, float is added to the scores
MOST_APART = 0.05  # largest relative difference of norms, in half precision
# Differences in float32, relative to the largest input of the head. Half precision would hide an effect of one sample
# on another.
MOST_ROUNDING = 2e-4  # the largest rounding error on any device
CLOSE = 1e-5  # so small that it is only rounding


SEGMENTS = "segments"  # in a packed batch: the number of each token's sample in its row
BOUNDS = "bounds"  # the index of each sample's first token among all tokens, and the end of the last one

Inputs = Callable[[Sample], Sample]  # converts a packed batch to the inputs of a model


class Packer:
    """Packs samples into rows.

    >>> samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([7, 8], [9], [5, 6])]
    >>> batch = Packer(width=3)(samples)
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["labels"].tolist()
    ([[7, 8, 9], [5, 6, 0]], [[0, 1, 0], [0, 1, 0]], [[-100, 8, -100], [-100, 6, -100]])
    >>> add_mask(batch)["attention_mask"][0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]

    With `whole`, rows are padded to `width`, so that there are few shapes; otherwise to the longest row, and the
    batch has the bounds of its samples.
    """

    def __init__(self, width: int, *, whole: bool = False) -> None:
        self.width, self._whole = width, whole

    @property
    def has_bounds(self) -> bool:
        """Whether batches have the bounds of samples. With few shapes they have not: the number of bounds varies."""
        return not self._whole

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        rows = self._rows(samples)
        width = max(sum(len(sample["input_ids"]) for sample in row) for row in rows)
        shape = len(rows), max(width, self.width) if self._whole else width
        ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels, segments = torch.full(shape, IGNORED), torch.full(shape, -1)
        bounds: list[int] = []
        for number, row in enumerate(rows):
            start = 0
            for segment, sample in enumerate(row):
                size = len(sample["input_ids"])
                place = number, slice(start, start + size)
                ids[place], labels[place], segments[place] = sample["input_ids"], sample["labels"], segment
                positions[place] = torch.arange(size)
                labels[number, start] = IGNORED
                bounds.append(number * shape[1] + start)
                start += size
            if start < shape[1]:  # padding is treated as one more sample
                positions[number, start:] = torch.arange(shape[1] - start)
                bounds.append(number * shape[1] + start)
        batch = {"input_ids": ids, "position_ids": positions, SEGMENTS: segments, "labels": labels}
        return batch if self._whole else {**batch, BOUNDS: torch.tensor([*bounds, ids.numel()], dtype=torch.int32)}

    def _rows(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        rows: list[list[Sample]] = []
        room = 0
        for sample in samples:
            size = len(sample["input_ids"])
            if not rows or size > room:
                rows.append([])
                room = self.width
            rows[-1].append(sample)
            room -= size
        return rows


def add_mask(batch: Sample, dtype: torch.dtype = torch.bool) -> Sample:
    """A packed batch with an attention mask. It is made on the device of the batch, because it is large.

    A bool mask marks visible tokens; a floating-point mask is added to the scores.
    """
    inputs = _without_layout(batch)
    seen = _visibility(batch[SEGMENTS])
    if dtype != torch.bool:
        hidden = torch.finfo(dtype).min
        return {**inputs, "attention_mask": seen.new_zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)}
    return {**inputs, "attention_mask": seen}


def add_bounds(batch: Sample) -> Sample:
    """A packed batch with the bounds of its samples, for the kernels of `varlen`."""
    bounds, width = batch[BOUNDS], batch["input_ids"].shape[1]
    unused = bounds.new_ones((1, 1, 1, 1), dtype=torch.bool)  # not used, but keeps a model from making a mask
    lengths = {"max_length_q": width, "max_length_k": width}
    return {
        **_without_layout(batch),
        "attention_mask": unused,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        **lengths,  # type: ignore[dict-item]  # numbers, which models pass on
    }


def _without_layout(batch: Sample) -> Sample:
    return {name: value for name, value in batch.items() if name not in (SEGMENTS, BOUNDS)}


def _visibility(segments: Tensor) -> Tensor:
    """A mask (rows, 1, width, width): whether a token sees another one, of the same sample and not after it."""
    places = torch.arange(segments.shape[1], device=segments.device)
    is_before = places.unsqueeze(0) <= places.unsqueeze(1)
    return ((segments.unsqueeze(1) == segments.unsqueeze(2)) & is_before).unsqueeze(1)


def inputs_for(
    model: nn.Module, packer: Packer, device: torch.device, dtype: torch.dtype | None, mask: torch.dtype | None = None
) -> Inputs:
    """How to pass packed batches to this model: with bounds if the kernels support them, otherwise with a mask.

    `mask` is the result of `mask_for`, for a model in half precision that was checked before it was converted.
    """
    mask = mask or mask_for(model, packer, device)
    with_mask = partial(add_mask, dtype=mask)
    is_usual = mask == torch.bool  # of torch's attention "sdpa"; a model with another attention keeps it
    if is_usual and packer.has_bounds and varlen.can_serve(model, device, dtype):
        varlen.switch(model, on=True)
        if _serves_bounds(model, packer, device, dtype, with_mask):
            return add_bounds
        varlen.switch(model, on=False)
    return with_mask


def _serves_bounds(
    model: nn.Module, packer: Packer, device: torch.device, dtype: torch.dtype | None, with_mask: Inputs
) -> bool:
    """Whether bounds separate samples like a mask: the result is far closer to a mask's than to that without bounds."""
    packed = packer(_trial_samples(model, packer.width))
    total, width = packed["input_ids"].numel(), packed["input_ids"].shape[1]
    blurred = {**packed, BOUNDS: torch.arange(0, total + 1, width, dtype=torch.int32)}
    try:
        with on_trial(model, device), torch.autocast(device.type, dtype, enabled=dtype is not None):
            model.eval()
            expected, found, wrong = (
                _states(model, batch, device) for batch in (with_mask(packed), add_bounds(packed), add_bounds(blurred))
            )
            _states(model.train(), add_bounds(packed), device)  # dropout, which kernels may not support
    except Exception as error:  # a model or a kernel may raise anything for unknown arguments
        if is_out_of_memory(error):
            raise
        logger.info("--pack: samples are kept apart by a mask (%s: %s).", type(error).__name__, error)
        return False
    apart, mixed = ((one - expected).norm().item() / expected.norm().item() for one in (found, wrong))
    return bool(apart <= min(mixed / 3, MOST_APART))


def _trial_samples(model: nn.Module, width: int) -> list[Sample]:
    """Two samples that share a row, and one that fills a row, to detect a limited attention window."""
    vocabulary = without_ddp(model).get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    lengths = (width - width // 3, width // 3, width)
    ids = [torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths if length]
    return [{"input_ids": part, "labels": part} for part in ids]


def mask_for(model: nn.Module, packer: Packer, device: torch.device) -> torch.dtype:
    """The dtype of mask with which this model separates samples. Refuses a model for which no mask works."""
    first: UsageError | None = None
    for dtype in MASKS:
        try:
            require_apart(model, packer, device, dtype)
            return dtype
        except UsageError as error:
            first = first or error
    assert first is not None
    raise first


def require_apart(model: nn.Module, packer: Packer, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model that computes something else for a sample that shares its row than for the sample alone."""
    samples = _trial_samples(model, packer.width)
    packed = add_mask(packer(samples), dtype)
    with on_trial(model, device):
        model.eval()
        try:
            together = _states(model, packed, device).flatten(0, 1)
        except Exception as error:  # a model may raise anything for an unknown mask
            if is_out_of_memory(error):
                raise
            raise UsageError(
                f"--pack: {type(without_ddp(model)).__name__} cannot process several samples in one row "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Leave out --pack."
            ) from error
        alone = [_states(model, {"input_ids": one["input_ids"].unsqueeze(0)}, device)[0] for one in samples]
    shared = together.split([len(one) for one in alone])
    apart = [(one - other).abs().max().item() for one, other in zip(shared, alone, strict=True)]
    rounding, worst = apart[-1], max(apart)  # the last sample shares its row with no other
    size = max(one.abs().max().item() for one in alone)
    if not (rounding <= MOST_ROUNDING * size and worst <= max(10 * rounding, CLOSE * size)):
        raise UsageError(
            f"--pack: {type(without_ddp(model)).__name__} gives another result for a sample that shares its row "
            f"with another (off by {worst:.2g}, in numbers of up to {size:.2g}): it ignores positions or the "
            "mask, or attends to a limited number of tokens. Leave out --pack, or pass a smaller --seq-len."
        )


def _states(model: nn.Module, batch: Sample, device: torch.device) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    inputs |= {name: value.to(device) for name, value in inputs.items() if isinstance(value, Tensor)}
    return states_of(model, **inputs).double()
