"""Whether a model can be trained here: judged by what it computes, not by its name."""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import torch
from torch import nn

from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.losses import causal_lm_loss
from macrobatch.train.pretrained import Origin

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}  # of logits, relative; coarser in half precision


@torch.no_grad()
def require_causal(model: nn.Module, origin: Origin) -> None:
    """Refuse a model that sees the tokens which it is to predict: it would learn to copy them."""
    ids = _some_ids(model)
    others = torch.cat([ids[:4], torch.zeros(4, dtype=torch.long)])
    model.eval()
    one, other = (model(input_ids=row.unsqueeze(0)).logits[0, :4].double() for row in (ids, others))
    if (one - other).abs().max() > 1e-5 * one.abs().max():
        raise UsageError(
            f"{origin.said}: {type(model).__name__} is no causal model as it is configured: what it predicts depends "
            "on later tokens, as in an encoder. Choose a decoder; for BERT and its kin, a config.json with "
            '"is_decoder": true makes one.'
        )


@torch.no_grad()
def require_plain_loss(model: nn.Module, origin: Origin) -> None:
    """Refuse a model whose own loss has more in it than predicting the next token: that would be left out here."""
    ids = _some_ids(model).unsqueeze(0)
    model.eval()
    own = getattr(model(input_ids=ids, labels=ids), "loss", None)
    ours, _ = causal_lm_loss(model, {"input_ids": ids})
    if own is not None and abs(own.item() - ours.item()) > 1e-3 * abs(ours.item()):
        raise UsageError(
            f"{origin.said}: the loss of {type(model).__name__} is not only that of predicting the next token: "
            f"{own.item():.4f}, where that is {ours.item():.4f}. It adds something, such as the balance of its "
            "experts, which is not computed here. Train it with exact(Trainer) of macrobatch.transformers; or leave it "
            'out: "output_router_logits": false in its config.json.'
        )


@torch.no_grad()
def can_spare_mask(model: nn.Module, width: int, device: torch.device) -> bool:
    """Whether padding on the right, which no token before it sees, changes nothing without an attention mask either.

    Attention without a mask is faster, and has kernels that take any shape at once. Tried with rows as wide as they
    come, filled with the padding of batches.
    """
    draw, shape = torch.Generator().manual_seed(0), (2, width)
    ids = torch.randint(0, _num_words(model), shape, generator=draw).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for tensor in batch.values():
        tensor[1, width // 3 + 1 :] = 0
    was_training = model.training
    model.eval()
    with_mask, without = model(**batch).logits, model(input_ids=batch["input_ids"]).logits
    model.train(was_training)
    seen = batch["attention_mask"].bool()
    apart, size = (with_mask - without)[seen].abs().max(), with_mask[seen].abs().max()
    return bool(apart <= ROUNDING.get(with_mask.dtype, 1e-2) * size)


def _some_ids(model: nn.Module) -> torch.Tensor:
    return torch.arange(8) % min(_num_words(model), 8)


def _num_words(model: nn.Module) -> int:
    return int(without_ddp(model).get_input_embeddings().weight.shape[0])
