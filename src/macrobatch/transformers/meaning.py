"""What the loss of a trainer is a mean over, and how it is computed as such. `asking` finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch.errors import UsageError
from macrobatch.transformers.balance import Balance
from macrobatch.transformers.preferences import PreferenceTerms
from macrobatch.transformers.samples import Layout
from macrobatch.types import Encoded, Items

Inputs = dict[str, Any]
Compute = Callable[..., Any]  # the trainer's own compute_loss


@dataclass(frozen=True)
class Meaning:
    """How the losses of micro-batches are weighed.

    Attributes:
        count: the items of a batch; None: ``compute_loss`` itself returns them.
        of: what they are, in words.
        divides: whether the loss is a sum that ``compute_loss`` divides by ``num_items_in_batch``.
        balance: the load balancing loss in it, which is a mean of its own.
        terms: the terms of it, if they are means over different things; they have their own counts.
        layout: where the samples are in a batch.
    """

    count: Callable[[Inputs], Items] | None
    of: str
    divides: bool = False
    balance: Balance | None = None
    terms: PreferenceTerms | None = None
    layout: Layout = field(default_factory=Layout)

    def loss(self, trainer: Any, compute: Compute, model: Any, inputs: Inputs, **options: Any) -> tuple[Any, Items]:
        """What ``compute_loss`` returns for a micro-batch, as a mean over its items; and the items."""
        items = None if self.count is None else self.count(inputs)
        if isinstance(items, Tensor) and not self.divides:
            inputs = _with_a_label(inputs, items)
        wants = self.divides or (items is not None and trainer.compute_loss_func is not None)
        number = torch.as_tensor(items).clamp(min=1) if wants else None
        with own_items(trainer):
            found = compute(model, inputs, num_items_in_batch=number, **options)
        if self.count is None:
            return _told(trainer, found)
        return found, items

    def weighed(self, loss: Any, items: Items, outputs: Sequence[Any], inputs: Inputs) -> tuple[Any, Items] | Encoded:
        """A loss as `MacroStep` takes it: with a balance loss in it, what that needs of the model's outputs."""
        if self.balance is None:
            return loss, items
        return self.balance.encoded(loss, items, outputs[-1], inputs.get("attention_mask"))


def _told(trainer: Any, found: Any) -> tuple[Any, Items]:
    if not (isinstance(found, tuple) and len(found) == 2):
        raise UsageError(
            f"compute_loss of {type(trainer).__name__} returned (loss, items) for one batch, and for another "
            f"{type(found).__name__}: return both for all."
        )
    return found


def _with_a_label(inputs: Inputs, items: Tensor) -> Inputs:
    """A batch whose labels are all hidden gets one, so that its mean is finite; it has no weight."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or not labels.dim():
        return inputs
    labels = labels.clone()
    labels[..., -1] = torch.where(items.to(labels.device) == 0, 0, labels[..., -1])
    return {**inputs, "labels": labels}


@contextmanager
def own_items(trainer: Any) -> Iterator[None]:
    """While ``compute_loss`` is handed a micro-batch's own items, which it need not multiply by the ranks."""
    arguments, before = trainer.args, trainer.args.average_tokens_across_devices
    arguments.average_tokens_across_devices = False
    try:
        yield
    finally:
        arguments.average_tokens_across_devices = before


# ---------------------------------------------------------------------------------------------- counts


def labels_shown(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor:
    """How many labels are not -100; `shifted`: without the first of each row, which a causal model does not predict."""
    if "shift_labels" in inputs:
        labels: Tensor = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if shifted else inputs["labels"]
    return (labels != IGNORED).sum()


def causal_labels(inputs: Inputs) -> Tensor:
    """The labels that a causal language model predicts."""
    return labels_shown(inputs, shifted=True)


def all_labels(inputs: Inputs) -> Tensor:
    """The labels of masked, sequence-to-sequence and token classification models."""
    return labels_shown(inputs, shifted=False)
