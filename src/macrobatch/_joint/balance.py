"""The load balancing loss of mixture-of-experts models, over the whole window.

It multiplies two means: the share of tokens that each expert got, and its mean probability. So it is no mean over
micro-batches, and depends on how a batch is cut. The sums of both can be added, so a first pass computes them over the
whole window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch.errors import UsageError
from macrobatch.types import Encoded, Items, Sum


@dataclass(frozen=True)
class Balance:
    """The balance loss of a model.

    Attributes:
        coefficient: its factor in the loss.
        choices: the number of experts for each token.
        value: its value when it was found.
    """

    coefficient: float
    choices: int
    value: float

    def beside(self, loss: Tensor, items: Items, outputs: Any, mask: Tensor | None) -> Encoded:
        """A loss that does not include the balance loss, and the sums that the balance loss needs."""
        chosen, probable, tokens = sums_of(outputs.router_logits, self.choices, mask)
        return Encoded(loss, items, chosen=Sum(chosen), probable=Sum(probable), tokens=Sum(tokens))

    def joint(self, _: nn.Module, encoded: Encoded) -> Tensor:
        """The balance loss of all micro-batches on all ranks."""
        return self.coefficient * from_sums(encoded.chosen, encoded.probable, encoded.tokens)


def sums_of(logits: tuple[Tensor, ...], choices: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the tokens of all layers: how often each expert was chosen, its probability, number of tokens."""
    chosen, probable, tokens = [], [], []
    for layer in logits:
        weights = layer.flatten(0, -2).softmax(-1)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        shown = weights.new_ones(len(weights)) if mask is None else mask.reshape(-1).to(weights)
        best = torch.zeros_like(weights).scatter_(1, weights.topk(choices, -1).indices, 1.0)
        chosen.append((best * shown[:, None]).sum(0))
        probable.append((weights * shown[:, None]).sum(0))
        tokens.append(shown.sum())
    return torch.stack(chosen).sum(0).detach(), torch.stack(probable).sum(0), torch.stack(tokens).sum()


def from_sums(chosen: Tensor, probable: Tensor, tokens: Tensor) -> Tensor:
    """The balance loss: 1 if all experts are used equally."""
    return len(chosen) * ((chosen / tokens) * (probable / tokens)).sum()


@contextmanager
def outputs_of(model: nn.Module, is_watched: bool = True) -> Iterator[list[Any]]:
    """A context that collects the outputs of the model; none if it is not watched, because outputs are large."""
    found: list[Any] = []
    if not is_watched:
        yield found
        return
    handle = model.register_forward_hook(lambda _module, _arguments, outputs: found.append(outputs))
    try:
        yield found
    finally:
        handle.remove()


def balance_of(model: nn.Module, inputs: dict[str, Any], run: Callable[[], Any]) -> Balance | None:
    """The balance loss in what `run` returns, or None. Its coefficient is found as the derivative of the loss.

    Raises:
        UsageError: the model has a balance loss that is computed in an unknown way.
    """
    with torch.no_grad(), outputs_of(model) as outputs:
        run()
    if not outputs or not isinstance(getattr(outputs[-1], "aux_loss", None), Tensor):
        return None  # most models, which then need no graph
    with torch.enable_grad(), outputs_of(model) as outputs:
        loss = run()
    aux = outputs[-1].aux_loss
    if not isinstance(loss, Tensor) or not aux.requires_grad:
        return None
    (slope,) = torch.autograd.grad(loss, aux, allow_unused=True)
    if slope is None or not slope.item():
        return None
    logits, choices = getattr(outputs[-1], "router_logits", None), choices_of(model)
    mask = inputs.get("attention_mask")
    if logits is not None and choices is not None:
        with torch.no_grad():
            known = from_sums(*sums_of(tuple(logits), choices, mask))
        if torch.isclose(known, aux.detach().to(known), rtol=1e-3, atol=1e-4):
            return Balance(slope.item(), choices, aux.item())
    raise UsageError(
        f"{type(model).__name__} adds a loss of its own (aux_loss) that depends on the whole batch, and is none that "
        "can be put together from micro-batches here. Switch it off (router_aux_loss_coef=0, or "
        "output_router_logits=False), or write the loop with MacroStep(joint=)."
    )


def choices_of(model: nn.Module) -> int | None:
    """How many experts each token is sent to, as the configuration of a model says."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    return found if isinstance(found, int) else None
