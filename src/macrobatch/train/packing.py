"""Several samples in a row: each with positions of its own, and attention that stays inside it.

The loss is that of the samples one by one: no token sees another sample, and the first token of each has no label, as
nothing before it belongs to it.
"""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from macrobatch._cut.memory import is_out_of_memory
from macrobatch._cut.padding import IGNORED
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.train.corpus import Sample

MASKS = (torch.bool, torch.float32)  # what implementations of attention take: what is seen, or what is added
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 1e-2}


SEGMENTS = "segments"  # in a packed batch: which sample of its row a token belongs to


class Packer:
    """Lays samples out in rows, and says in a mask who sees whom.

    >>> samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([7, 8], [9], [5, 6])]
    >>> batch = Packer(width=3)(samples)
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["labels"].tolist()
    ([[7, 8, 9], [5, 6, 0]], [[0, 1, 0], [0, 1, 0]], [[-100, 8, -100], [-100, 6, -100]])
    >>> masked(batch)["attention_mask"][0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]

    Args:
        width: the most tokens in a row, unless one sample has more.
        whole: whether rows are filled up to the width, so that there are few shapes; else to the longest row.
    """

    def __init__(self, width: int, *, whole: bool = False) -> None:
        self.width, self._whole = width, whole

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        rows = self._rows(samples)
        width = max(sum(len(sample["input_ids"]) for sample in row) for row in rows)
        shape = len(rows), max(width, self.width) if self._whole else width
        ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels, segments = torch.full(shape, IGNORED), torch.full(shape, -1)
        for number, row in enumerate(rows):
            start = 0
            for segment, sample in enumerate(row):
                size = len(sample["input_ids"])
                place = number, slice(start, start + size)
                ids[place], labels[place], segments[place] = sample["input_ids"], sample["labels"], segment
                positions[place] = torch.arange(size)
                labels[number, start] = IGNORED
                start += size
            positions[number, start:] = torch.arange(shape[1] - start)  # padding is like one more sample
        return {"input_ids": ids, "position_ids": positions, SEGMENTS: segments, "labels": labels}

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


def masked(batch: Sample, dtype: torch.dtype = torch.bool) -> Sample:
    """A packed batch with the mask that a model takes; made where the batch is, as it is large.

    Args:
        batch: what a `Packer` returned.
        dtype: bool says what is seen, a floating-point mask is added to the scores.
    """
    inputs = {name: value for name, value in batch.items() if name != SEGMENTS}
    seen = _seen(batch[SEGMENTS])
    if dtype != torch.bool:
        hidden = torch.finfo(dtype).min
        return {**inputs, "attention_mask": seen.new_zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)}
    return {**inputs, "attention_mask": seen}


def _seen(segments: Tensor) -> Tensor:
    """(rows, 1, width, width): whether a token sees another one, of its own sample and not after it."""
    places = torch.arange(segments.shape[1], device=segments.device)
    is_before = places.unsqueeze(0) <= places.unsqueeze(1)
    return ((segments.unsqueeze(1) == segments.unsqueeze(2)) & is_before).unsqueeze(1)


def mask_for(model: nn.Module, packer: Packer, device: torch.device) -> torch.dtype:
    """The kind of mask with which this model keeps samples apart. Refuses a model for which there is none."""
    first: UsageError | None = None
    for dtype in MASKS:
        try:
            require_apart(model, packer, device, dtype)
            return dtype
        except UsageError as error:
            first = first or error
    assert first is not None
    raise first


@torch.no_grad()
def require_apart(model: nn.Module, packer: Packer, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model that sees more, or less, of a sample when it shares its row: its own answers are compared.

    With a row as long as they come: what looks back over so many tokens only (a sliding window) differs from there on.
    """
    lengths = [packer.width - packer.width // 3, packer.width // 3]
    vocabulary = without_ddp(model).get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths if length]
    was_training = model.training
    model.eval()
    packed = masked(packer([{"input_ids": part, "labels": part} for part in ids]), dtype)
    try:
        together = _logits(model, packed, device)[0]
    except Exception as error:  # whatever a model makes of a mask that it does not know
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"--pack: {type(without_ddp(model)).__name__} does not take several samples in a row "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Leave out --pack."
        ) from error
    start, worst, size = 0, 0.0, 0.0
    for part in ids:
        alone = _logits(model, {"input_ids": part.unsqueeze(0)}, device)[0]
        worst = max(worst, (together[start : start + len(part)] - alone).abs().max().item())
        size = max(size, alone.abs().max().item())
        start += len(part)
    model.train(was_training)
    if not worst <= TOLERANCE[next(model.parameters()).dtype] * size:
        raise UsageError(
            f"--pack: {type(without_ddp(model)).__name__} computes something else for a sample that shares its row "
            f"with another (logits differ by {worst:.2g}): it takes no notice of positions or of the mask, or looks "
            "back over a limited number of tokens. Leave out --pack, or take a shorter --seq-len."
        )


def _logits(model: nn.Module, batch: Sample, device: torch.device) -> Tensor:
    inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits.double()
