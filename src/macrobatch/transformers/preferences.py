"""DPO with a language modelling loss besides the preference loss: two terms, over pairs and over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from macrobatch.types import Items


class Noting:
    """A weight that records each loss that is multiplied by it."""

    def __init__(self, weight: float, found: list[Tensor]) -> None:
        self._weight = weight
        self._found = found

    def __rmul__(self, loss: Tensor) -> Tensor:
        self._found.append(loss * self._weight)
        return self._found[-1]


@dataclass(frozen=True)
class PreferenceTerms:
    """The losses of a DPOTrainer with several loss types, as terms.

    Attributes:
        types: the types of the losses, in order.
    """

    types: tuple[str, ...]

    def counts(self, inputs: dict[str, Any]) -> dict[str, Items]:
        """The items of a batch: its pairs, and the tokens of the chosen completions."""
        mask: Tensor = inputs["completion_mask"]
        pairs = len(mask) // 2
        return {"preference": pairs, "sft": (mask[:pairs, 1:] != 0).sum()}

    def loss(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> dict[str, tuple[Tensor, Items]]:
        """The terms of the trainer's own loss for a batch."""
        with self._noted(trainer) as losses, trainer.compute_loss_context_manager():
            trainer.compute_loss(model, dict(inputs))
        return self._of(losses, self.counts(inputs))

    @contextmanager
    def _noted(self, trainer: Any) -> Iterator[list[Tensor]]:
        """A context that collects the weighted losses of ``compute_loss``, one of each type."""
        before, found = trainer.loss_weights, list[Tensor]()
        trainer.loss_weights = [Noting(weight, found) for weight in before]
        try:
            yield found
        finally:
            trainer.loss_weights = before

    def _of(self, losses: list[Tensor], counts: dict[str, Items]) -> dict[str, tuple[Tensor, Items]]:
        """The two terms, with their items."""
        by_name: dict[str, list[Tensor]] = {"preference": [], "sft": []}
        for kind, loss in zip(self.types, losses, strict=True):
            by_name["sft" if kind == "sft" else "preference"].append(loss)
        return {name: (sum(some[1:], some[0]), counts[name]) for name, some in by_name.items()}


def terms_of(trainer: Any) -> PreferenceTerms | None:
    """The terms of a trainer with ``sft`` and another loss type; None for others, and if there are more terms."""
    types = tuple(getattr(trainer, "loss_types", ()))
    if "sft" not in types or set(types) == {"sft"} or trainer.use_weighting or trainer.aux_loss_enabled:
        return None
    return PreferenceTerms(types)
