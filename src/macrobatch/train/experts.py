"""Mixtures of experts: their balance loss, over the whole batch.

A model of transformers adds the balance loss of each batch that it sees to its own loss. Here it sees micro-batches, so
the model is told not to, its routers are read, and `_joint.balance` computes the loss of the whole batch.
"""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._joint.balance import Balance, balance_of, outputs_of
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.losses import causal_lm_loss
from macrobatch.types import Encoded

logger = logging.getLogger("macrobatch")

SAME = 1e-5  # two computations of one loss in float32 differ by less; a further term differs by more
SWITCH = "output_router_logits"  # of a configuration: whether the model computes its balance loss


def balance_in(model: nn.Module, said: str) -> Balance | None:
    """The balance loss in the model's own loss; None if there is none. From now on the model does not compute it.

    Refuses a model whose own loss has any other term than predicting the next token: it would be missing here.
    """
    ids = torch.arange(8).unsqueeze(0) % min(int(model.get_input_embeddings().weight.shape[0]), 8)  # type: ignore[operator]
    model.eval()
    try:
        balance = balance_of(model, {"input_ids": ids}, lambda: _own_loss(model, ids))
    except UsageError as error:
        raise UsageError(f"{said}: {error}") from error
    with torch.no_grad():
        own = _own_loss(model, ids)
        ours, _ = causal_lm_loss(model, {"input_ids": ids})
    if own is None:
        return None
    rest = own.item() - (balance.coefficient * balance.value if balance else 0.0)
    if abs(rest - ours.item()) > SAME * abs(ours.item()):
        raise UsageError(
            f"{said}: the loss of {type(model).__name__} is not only that of predicting the next token: {rest:.6f}, "
            f"where that is {ours.item():.6f}. It adds something that is not computed here. Train it with "
            "exact(Trainer) of macrobatch.transformers."
        )
    if balance is None:
        _warn_if_off(model, said)
        return None
    model.config.output_router_logits = False  # type: ignore[union-attr]
    _require_readable(model, ids, said)
    return balance


def encode(balance: Balance, model: nn.Module, compute: Callable[[], tuple[Tensor, Tensor]], shown: Tensor) -> Encoded:
    """The loss of a micro-batch, and what the balance loss of the whole batch needs of it."""
    with _routers_of(model) as outputs:
        loss, items = compute()
    return balance.beside(loss, items, outputs[-1], shown)


@contextmanager
def _routers_of(model: nn.Module) -> Iterator[list[Any]]:
    """A context that collects the outputs of the decoder below the head, with what its routers compute."""
    decoder: Any = without_ddp(model).base_model

    def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, SWITCH: True}

    handle = decoder.register_forward_pre_hook(ask, with_kwargs=True)
    try:
        with outputs_of(decoder) as outputs:
            yield outputs
    finally:
        handle.remove()


def _own_loss(model: nn.Module, ids: Tensor) -> Any:
    return getattr(model(input_ids=ids, labels=ids), "loss", None)


@torch.no_grad()
def _require_readable(model: nn.Module, ids: Tensor, said: str) -> None:
    """Refuse a model whose routers cannot be read below its head."""
    expected = model(input_ids=ids, output_router_logits=True).router_logits
    with _routers_of(model) as outputs:
        output = model(input_ids=ids)
    found = getattr(outputs[-1], "router_logits", None) if outputs else None
    is_same = found is not None and len(found) == len(expected) and all(map(torch.equal, found, expected))
    if not is_same or getattr(output, "aux_loss", None) is not None:
        raise UsageError(
            f"{said}: the routers of {type(model).__name__} cannot be read apart from its own loss. Train it with "
            "exact(Trainer) of macrobatch.transformers."
        )


@torch.no_grad()
def _warn_if_off(model: nn.Module, said: str) -> None:
    """Warn about a mixture whose configuration leaves out the balance loss."""
    config: Any = model.config
    if getattr(config, SWITCH, None) is False and getattr(config, "router_aux_loss_coef", None):
        logger.warning(
            "%s: this mixture of experts trains without its balance loss, because its configuration says so. "
            '"output_router_logits": true in its config.json turns it on.', said,
        )  # fmt: skip
