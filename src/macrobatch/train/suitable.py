"""Check whether a model can be trained here, by what it computes, not by its name."""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.train.pretrained import Origin

# Relative differences: below ROUNDING they are only rounding, above MORE they are not. (Some models always compute in
# float32.)
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
MORE = {torch.float64: 1e-3, torch.float32: 1e-3}


@torch.no_grad()
def require_causal(model: nn.Module, origin: Origin) -> None:
    """Refuse a model that sees the tokens that it has to predict: it would learn to copy them."""
    ids = _some_ids(model)
    others = torch.cat([ids[:4], torch.zeros(4, dtype=torch.long)])
    model.eval()
    one, other = (model(input_ids=row.unsqueeze(0)).logits[0, :4].double() for row in (ids, others))
    if (one - other).abs().max() > 1e-5 * one.abs().max():
        raise UsageError(
            f"{origin.label}: {type(model).__name__} is not causal as configured: its predictions depend on later "
            "tokens, as in an encoder. Choose a decoder; for BERT and similar models, a config.json with "
            '"is_decoder": true makes one.'
        )


class PaddingEffect(NamedTuple):
    """The effect of padding on the right on the tokens before it."""

    # there is no effect, even without an attention mask. Attention without a mask is faster, and its kernels
    # support any shape at once
    is_none: bool
    is_masked: bool  # with a mask, there is no effect except rounding


@contextlib.contextmanager
def on_trial(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context for trial forwards: no graph is recorded, and the model's mode and random states are restored."""
    was_training = model.training
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            model.train(was_training)


def padding_effect(
    model: nn.Module, width: int, device: torch.device, autocast: torch.dtype | None = None
) -> PaddingEffect:
    """Compare padded samples with the same samples alone, in eval mode, and in train mode if there is no dropout.

    `autocast` is needed for a model with weights of several dtypes.
    """
    sizes = sorted({width // 3 + 1, width // 8 + 1, min(width, 2)})
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _num_words(model), (1 + len(sizes), width), generator=draw).to(device)
    samples = [row[:size].clone().unsqueeze(0) for row, size in zip(ids[1:], sizes, strict=True)]
    mask = torch.ones_like(ids)
    for row, size in enumerate(sizes, start=1):
        ids[row, size:] = mask[row, size:] = 0
    is_none = is_masked = True
    with on_trial(model, device), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        for trains in (False, True):
            model.train(trains)
            expected = [states_of(model, input_ids=sample)[0] for sample in samples]
            if trains and not torch.equal(expected[-1], states_of(model, input_ids=samples[-1])[0]):
                break  # dropout: nothing to compare
            without, masked = (
                _farthest(states_of(model, input_ids=ids, **more)[1:], expected)
                for more in ({}, {"attention_mask": mask})
            )
            dtype = autocast or expected[0].dtype
            is_none &= without <= ROUNDING.get(dtype, 1e-2)
            is_masked &= not masked > MORE.get(dtype, 1e-1)  # NaN does not count as an effect of padding
    return PaddingEffect(is_none, is_masked)


def states_of(model: nn.Module, **inputs: Any) -> torch.Tensor:
    """The output of a model before its head, or the logits if it has no head: all logits may not fit into memory."""
    head = getattr(without_ddp(model), "get_output_embeddings", lambda: None)()
    seen: list[torch.Tensor] = []

    def look(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.extend(args)
        return tuple(states[:, :1] for states in args)  # the logits of one token

    hook = head.register_forward_pre_hook(look) if isinstance(head, nn.Module) else None
    try:
        output = model(**inputs)
    finally:
        if hook is not None:
            hook.remove()
    logits: torch.Tensor = output.logits
    return seen[0] if len(seen) == 1 else logits


def _farthest(rows: torch.Tensor, expected: Sequence[torch.Tensor]) -> float:
    """The largest difference between the beginnings of rows and what is expected, relative to the largest value."""
    pairs = [(row[: len(one)], one) for row, one in zip(rows, expected, strict=True)]
    return max(float((row - one).abs().max() / one.abs().max()) for row, one in pairs)


def _some_ids(model: nn.Module) -> torch.Tensor:
    return torch.arange(8) % min(_num_words(model), 8)


def _num_words(model: nn.Module) -> int:
    return int(without_ddp(model).get_input_embeddings().weight.shape[0])
