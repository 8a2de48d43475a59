"""The balance loss of a mixture of experts in a trainer's loss: taken out, to be computed over the whole window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._joint.balance import choices_of, from_sums, outputs_of, sums_of
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.transformers.reading import Reading
from macrobatch.transformers.samples import Inputs
from macrobatch.types import Encoded, Sum

SWITCH, COEFFICIENT = "output_router_logits", "router_aux_loss_coef"  # names in configurations


def has_balance(trainer: Any) -> bool:
    """Whether the model computes a balance loss, which its configuration or the trainer adds to the loss."""
    if getattr(trainer, "aux_loss_enabled", False):
        return True
    config: Any = getattr(trainer.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(getattr(one, SWITCH, False) and getattr(one, COEFFICIENT, 1.0) for one in (config, text))


class BalanceLoss:
    """Takes the balance loss out of the losses of micro-batches.

    Args:
        trainer: the trainer.
        reading: reads what the rest of the loss is a mean over.
    """

    def __init__(self, trainer: Any, reading: Reading) -> None:
        self._trainer = trainer
        self._reading = reading
        self._is_known = False  # whether its formula was compared with the model's own
        own = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
        self._inner: nn.Module = getattr(own, "base_model", own)  # has the outputs of the routers
        self._choices = choices_of(own)

    def encoded(self, model: Any, inputs: Inputs) -> Encoded:
        """The loss of a micro-batch without its balance loss, and the sums that the balance loss needs."""
        is_first_pass = not torch.is_grad_enabled()
        if is_first_pass:  # DDP would wait for the backward of a graph that is only read
            model = without_ddp(model)
        trainer, mask = self._trainer, inputs.get("attention_mask")
        with torch.enable_grad(), outputs_of(trainer.model) as outputs, outputs_of(self._inner) as inner:
            loss = self._reading.loss(model, inputs)
            aux = self._last(outputs, "aux_loss")
            logits = self._last(outputs, "router_logits") or self._last(inner, "router_logits")
            slope = _slope(loss, aux)
            rest, items = self._reading.weighed(loss, aux)
            if slope is not None:
                rest = rest - slope * aux
            if (scale := getattr(items, "scale", None)) is not None:
                rest = rest * scale
            chosen, probable, tokens = sums_of(self._required(logits), self._choices or 1, mask)
            self._compare(aux, chosen, probable, tokens)
            probable = probable * (0.0 if slope is None else slope)
        if is_first_pass:
            rest, probable = rest.detach(), probable.detach()
        count = getattr(items, "items", items)
        return Encoded(rest, count, chosen=Sum(chosen), probable=Sum(probable), tokens=Sum(tokens))

    @staticmethod
    def joint(_: nn.Module, encoded: Encoded) -> Tensor:
        """The balance loss of all micro-batches on all ranks. Its coefficient is in the probabilities."""
        return from_sums(encoded.chosen, encoded.probable, encoded.tokens)

    def _required(self, logits: Any) -> tuple[Tensor, ...]:
        if logits is None or self._choices is None:
            raise self._unknown()
        return tuple(logits)

    def _unknown(self) -> UsageError:
        return UsageError(
            f"{type(self._trainer.model).__name__} adds a loss of its own (aux_loss) that depends on the whole batch, "
            "and is none that can be put together from micro-batches here. Switch it off (router_aux_loss_coef=0, or "
            "output_router_logits=False), or write the loop with MacroStep(joint=)."
        )

    def _compare(self, aux: Tensor | None, *sums: Tensor) -> None:
        """Once: whether the model's balance loss is the one that is computed here."""
        if self._is_known or aux is None:
            return
        with torch.no_grad():
            known = from_sums(*sums)
        if not torch.isclose(known, aux.detach().to(known), rtol=1e-2, atol=1e-3, equal_nan=True):
            raise self._unknown()
        self._is_known = True

    def _last(self, outputs: list[Any], name: str) -> Any:
        """What the last forward with a graph has returned: others are those of a reference."""
        found = [value for one in outputs if (value := getattr(one, name, None)) is not None and _has_graph(value)]
        return found[-1] if found else None


def _has_graph(value: Any) -> bool:
    return bool((value if isinstance(value, Tensor) else value[0]).requires_grad)


def _slope(loss: Tensor, aux: Tensor | None) -> Tensor | None:
    """The coefficient of the balance loss in the loss. Its graph says it."""
    if aux is None:
        return None
    (slope,) = torch.autograd.grad(loss, aux, retain_graph=True, allow_unused=True)
    return slope
