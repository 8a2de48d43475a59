"""What the loss of a trainer is a mean over.

Nobody says so: a model may divide by ``num_items_in_batch`` or take it and ignore it, shift its labels or not, and
``compute_loss`` may be anybody's. So the loss itself is asked, once: with other numbers of items, with some of its
labels hidden, with some of its samples. What it is a mean over follows from the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._step.snapshot import Snapshot
from macrobatch.errors import UsageError
from macrobatch.transformers.balance import Balance, balance_of
from macrobatch.transformers.private import items_in, unlogged
from macrobatch.transformers.samples import Layout
from macrobatch.types import Items

Inputs = dict[str, Any]
Compute = Callable[..., Any]  # the trainer's own compute_loss
IGNORED = -100
TOLERANCE = 1e-2  # of a share: candidates differ by a tenth or more, rounding of bfloat16 by less


@dataclass(frozen=True)
class Meaning:
    """How the losses of micro-batches are weighed.

    Attributes:
        count: the items of a batch; None: ``compute_loss`` itself returns them.
        of: what they are, in words.
        divides: whether the loss is a sum that ``compute_loss`` divides by ``num_items_in_batch``.
        balance: the load balancing loss in it, which is a mean of its own.
        layout: where the samples are in a batch.
    """

    count: Callable[[Inputs], Items] | None
    of: str
    divides: bool = False
    balance: Balance | None = None
    layout: Layout = field(default_factory=Layout)

    def loss(self, trainer: Any, compute: Compute, model: Any, inputs: Inputs, **options: Any) -> tuple[Any, Items]:
        """What ``compute_loss`` returns for a micro-batch, as a mean over its items; and the items."""
        items = None if self.count is None else self.count(inputs)
        if isinstance(items, Tensor) and not self.divides:
            inputs = _with_a_label(inputs, items)
        number = torch.as_tensor(items).clamp(min=1) if self.divides else None
        with own_items(trainer):
            found = compute(model, inputs, num_items_in_batch=number, **options)
        if self.count is None:
            return _told(trainer, found)
        return found, items


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
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dim() < 2:
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


# ---------------------------------------------------------------------------------------------- asking


class Inquiry:
    """Asks for the loss of batches, without a trace: no gradient, no random number, no statistic, no log is left.

    Args:
        trainer: whose ``compute_loss`` is asked.
        compute: that function.
        model: the model to hand over, as it is wrapped by now.
    """

    def __init__(self, trainer: Any, compute: Compute, model: nn.Module) -> None:
        self._trainer = trainer
        self._compute = compute
        self._model = model

    def __call__(self, inputs: Inputs, number: Tensor | None) -> float | None:
        """The loss of a batch, which is divided by `number`; None if ``compute_loss`` returns its items too."""
        with torch.no_grad(), self.without_trace():
            found = self._run(inputs, number)
        if isinstance(found, tuple):
            return None
        return float(torch.as_tensor(found).detach().double())

    def balance(self, inputs: Inputs, number: Tensor | None) -> Balance | None:
        """The load balancing loss in it, with its coefficient."""
        with torch.enable_grad(), self.without_trace():
            return balance_of(self._trainer.model, inputs, lambda: self._run(inputs, number))

    def _run(self, inputs: Inputs, number: Tensor | None) -> Any:
        with own_items(self._trainer), self._trainer.compute_loss_context_manager():
            return self._compute(self._model, dict(inputs), num_items_in_batch=number)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        modules = {module: module.training for module in self._model.modules()}
        before = Snapshot([self._model])
        self._model.eval()
        try:
            with unlogged(self._trainer):
                yield
        finally:
            for module, was_training in modules.items():
                module.training = was_training
            before.restore()


def meaning_of(trainer: Any, compute: Compute, model: nn.Module, inputs: Inputs, layout: Layout) -> Meaning:
    """What the loss is a mean over, as it answers for this batch.

    The same questions are asked whatever the answers: under FSDP all ranks ask together.

    Raises:
        UsageError: nothing that is known fits.
    """
    ask = Inquiry(trainer, compute, model)
    batches = _with_few_labels(layout.at_least_two(inputs), trainer.model)
    probe = layout.at_least_two(inputs) if batches is None else batches[0]
    number = _number_of(trainer, probe)
    first = ask(probe, number)
    if first is None:
        return Meaning(None, "what compute_loss says", layout=layout)
    second = ask(probe, None if number is None else 2 * number)
    assert second is not None
    divided = 2 * (first - second) / first if first else 0.0  # the part of the loss that num_items_in_batch divides
    # A function of the user's may want a number in any case; a model without one divides by what it has counted.
    answers = _Answers(ask, number if trainer.compute_loss_func is not None else None)
    by_labels, by_samples = answers.about_labels(batches), answers.about_samples(probe, layout)
    balance = ask.balance(probe, number)
    known = divided if balance is None else divided + (0 if divided == 0 else balance.of(first))
    if abs(known - 1) < TOLERANCE and number is not None:
        count = by_labels.count if by_labels is not None else lambda batch: _number_of(trainer, batch)
        found = Meaning(count, "labels" if by_labels is None else by_labels.of, divides=True)
    elif abs(divided) >= TOLERANCE:
        raise UsageError(_hidden(trainer, f"num_items_in_batch divides {divided:.0%} of it, and not the rest"))
    elif by_labels is not None:
        found = by_labels
    elif by_samples:
        found = Meaning(layout.count, "samples")
    else:
        raise UsageError(_hidden(trainer, "hiding labels and leaving out samples change it in no way that a mean does"))
    return replace(found, balance=balance, layout=layout)


def _number_of(trainer: Any, inputs: Inputs) -> Tensor | None:
    """What the trainer itself would hand over as ``num_items_in_batch`` for this batch, on this rank alone."""
    with own_items(trainer):
        number = items_in(trainer, inputs)
    return None if number is None else torch.as_tensor(number)


def _hidden(trainer: Any, why: str) -> str:
    return (
        f"what the loss of {type(trainer).__name__}.compute_loss is a mean over is hidden: it is neither a mean over "
        f"the labels that are not -100, nor over the samples, nor a sum divided by num_items_in_batch ({why}). The "
        "mean over several micro-batches cannot be told from it. Let compute_loss return (loss, items), where the loss "
        "is a mean over so many items, or divide a sum by num_items_in_batch."
    )


@dataclass(frozen=True)
class _Answers:
    ask: Inquiry
    number: Tensor | None

    def about_labels(self, batches: list[Inputs] | None) -> Meaning | None:
        """Which labels count, if the loss is a mean over labels: seen by what hiding some of them does to it."""
        if batches is None:
            return None
        whole, one, other = map(self._loss, batches)
        for count, of in ((causal_labels, "labels, shifted"), (all_labels, "labels")):
            counts = [float(count(batch)) for batch in batches]
            if counts[0] and _is_mean(whole, [one, other], [count / counts[0] for count in counts[1:]]):
                return Meaning(count, of)
        return None

    def about_samples(self, inputs: Inputs, layout: Layout) -> bool:
        """Whether the loss is a mean over samples: seen by what leaving some out does to it."""
        samples = layout.count(inputs)
        if samples < 2:
            return True
        whole = self._loss(inputs)
        one, others = (self._loss(layout.select(inputs, some)) for some in (range(1), range(1, samples)))
        return _is_mean(whole, [one, others], [1 / samples, 1 - 1 / samples], tolerance=TOLERANCE)

    def _loss(self, inputs: Inputs) -> float:
        found = self.ask(inputs, self.number)
        assert found is not None
        return found


def _is_mean(whole: float, parts: list[float], shares: list[float], tolerance: float = 1e-4) -> bool:
    """Whether the loss of a whole is the mean of those of its parts, weighed so. A part without share may be NaN."""
    mean = sum(share * part for share, part in zip(shares, parts, strict=True) if share)
    spread = max((abs(whole - part) for part in parts if not math.isnan(part)), default=0.0)
    return abs(whole - mean) <= tolerance * spread + 1e-6 * abs(whole)


def _with_few_labels(inputs: Inputs, model: Any) -> list[Inputs] | None:
    """The batch with a few labels in each row, then with the first of them, and with the others; None without labels.

    They are at the first tokens, where it matters whether they are shifted, and all the same: any that the batch has.
    One row has more than the others, so that a mean over labels is another one than a mean of the means of rows.
    """
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dim() < 2 or labels.shape[1] < 2:
        return None
    if "shift_labels" in inputs:
        return None
    shown = labels[labels != IGNORED]
    label = shown[0] if len(shown) else labels.new_zeros(())
    tokens = torch.ones(labels.shape[:2], dtype=torch.long, device=labels.device)
    if isinstance(mask, Tensor) and mask.shape == labels.shape[:2]:
        tokens = (mask != 0).long()
    place = (tokens.cumsum(1) * tokens).reshape(*labels.shape[:2], *[1] * (labels.dim() - 2))
    fixed = dict(inputs)
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if callable(shift) and "decoder_input_ids" not in inputs:
        fixed["decoder_input_ids"] = shift(labels=labels)  # else they would change with the labels
    most = place.new_full((len(labels),), 2)
    most[place.flatten(1).amax(1).argmax()] = 8
    most = most.reshape(-1, *[1] * (labels.dim() - 1))
    few = [(place > 0) & (place <= most), place == 1, (place > 1) & (place <= most)]
    return [{**fixed, "labels": torch.where(chosen, label, IGNORED).expand_as(labels)} for chosen in few]
