"""Asks a loss what it is a mean over.

Nobody says so: a model may divide by ``num_items_in_batch`` or take it and ignore it, shift its labels or not, and
``compute_loss`` may be anybody's. So the loss itself is asked: with other numbers of items, with some of its labels
hidden, with some of its samples. What it is a mean over follows from the answers. That it is so for real batches is
looked at again while it trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._cut.joining import joined
from macrobatch._cut.padding import IGNORED
from macrobatch._torch.modules import run_eagerly
from macrobatch._torch.snapshot import Snapshot
from macrobatch.errors import BatchError, UsageError
from macrobatch.transformers.balance import Balance, balance_of, outputs_of
from macrobatch.transformers.meaning import Inputs, Meaning, all_labels, causal_labels, own_items
from macrobatch.transformers.private import items_in, unlogged
from macrobatch.transformers.samples import Layout, is_bounded
from macrobatch.transformers.scaled import require_unscaled

DIRECTIONS = 2
ROUGH = 0.05  # losses that are rounded so much say nothing about gradients
TOLERANCE = 1e-2  # of the part of a loss that num_items_in_batch divides
AnyRank = Callable[[bool], bool]
HALF = (torch.float16, torch.bfloat16)


class Inquiry:
    """Asks for the loss of batches, without a trace: no gradient, no random number, no statistic, no log is left.

    What is all zero, such as a head at its beginning, is filled with noise meanwhile: else all losses would be equal.

    Args:
        trainer: whose ``compute_loss`` is asked.
        model: the model to pass, as it is wrapped by now.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trainer = trainer
        self._model = model
        own = [p for p in model.parameters() if p.dim() > 1 and not isinstance(p, DTensor) and not p.is_meta]
        self._zeros = [p for p in own if p.is_floating_point() and not p.any()]
        self.rounding = _rounding_of(trainer, model)

    def __call__(self, inputs: Inputs, number: Tensor | None, *, seed: int | None = None) -> float | None:
        """The loss of a batch, which is divided by `number`; None if ``compute_loss`` returns its items too."""
        with torch.no_grad(), self.without_trace():
            if seed is not None:
                torch.manual_seed(seed)
            found = self._run(inputs, number)
        return None if isinstance(found, tuple) else self._value(found)

    def of(self, meaning: Meaning, inputs: Inputs) -> tuple[float, float]:
        """The loss of a batch without its balance loss, and its items."""
        with torch.no_grad(), self.without_trace():
            found, items = self._loss_of(meaning, self._model, inputs)
        return self._value(found), items

    def _loss_of(self, meaning: Meaning, model: nn.Module, inputs: Inputs) -> tuple[Any, float]:
        with outputs_of(self._trainer.model, meaning.balance is not None) as outputs:
            found, items = meaning.loss(self._trainer, self._trainer.compute_loss, model, dict(inputs))
            if meaning.balance is not None:
                found = found - meaning.balance.coefficient * outputs[-1].aux_loss
        return found, float(items if items is not None else meaning.layout.count(inputs))

    def gradient_of(self, meaning: Meaning, inputs: Inputs) -> tuple[Tensor, float, float] | None:
        """The gradient of that loss in some random directions, its norm, and the items; None: it cannot be asked."""
        own = [p for p in self._trainer.model.parameters() if p.requires_grad]
        if self.rounding[0] >= ROUGH or any(isinstance(p, DTensor) for p in own):
            return None
        try:
            with torch.enable_grad(), self.without_trace(), run_eagerly():
                found, items = self._loss_of(meaning, self._trainer.model, inputs)
                gradients = torch.autograd.grad(found, own, allow_unused=True)
        except RuntimeError:  # it does not fit into memory, or cannot be differentiated in this way
            return None
        total, square = torch.zeros(DIRECTIONS, dtype=torch.float64), 0.0
        for gradient in gradients:
            if gradient is not None:
                flat, draw = gradient.to_dense().double().flatten(), torch.Generator(gradient.device).manual_seed(0)
                square += float(flat.square().sum())
                for index in range(DIRECTIONS):
                    direction = torch.randn(flat.shape, generator=draw, device=flat.device, dtype=torch.float32)
                    total[index] += (flat * direction).sum().cpu()
        return total, math.sqrt(square), items

    def balance(self, inputs: Inputs, number: Tensor | None) -> Balance | None:
        """The load balancing loss in it, with its coefficient."""
        with self.without_trace():
            return balance_of(self._trainer.model, inputs, lambda: self._run(inputs, number))

    def _value(self, found: Any) -> float:
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(
                f"{type(self._trainer).__name__}.compute_loss must return a loss, a scalar tensor, or (loss, items): "
                f"got {what}."
            )
        return float(found.detach().double())

    def _run(self, inputs: Inputs, number: Tensor | None) -> Any:
        with own_items(self._trainer), self._trainer.compute_loss_context_manager():
            return self._trainer.compute_loss(self._model, dict(inputs), num_items_in_batch=number)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        modules = {module: module.training for module in self._model.modules()}
        before = Snapshot([self._model])
        self._model.eval()
        with torch.no_grad():
            noise = torch.Generator().manual_seed(0)
            for parameter in self._zeros:
                parameter.copy_(torch.randn(parameter.shape, generator=noise))
        try:
            with unlogged(self._trainer):
                yield
        finally:
            for module, was_training in modules.items():
                module.training = was_training
            with torch.no_grad():
                for parameter in self._zeros:
                    parameter.zero_()
            before.restore()


def meaning_of(trainer: Any, model: nn.Module, inputs: Inputs, layout: Layout) -> Meaning:
    """What the loss is a mean over, as it answers for this batch.

    Raises:
        UsageError: nothing that is known fits.
    """
    ask, real = Inquiry(trainer, model), layout.at_least_two(inputs)
    batches = _with_few_labels(real, trainer.model)
    probe = real if batches is None else batches[0]
    try:
        number = number_of(trainer, probe)
        first = ask(probe, number)
    except (IndexError, RuntimeError):  # a loss that hides other labels than -100
        batches, probe = None, real
        number = number_of(trainer, probe)
        first = ask(probe, number)
    if first is None:
        return Meaning(None, "what compute_loss says", layout=layout)
    require_unscaled(trainer, first, lambda: ask(probe, number))
    second = ask(probe, None if number is None else 2 * number)
    assert second is not None
    divided = 2 * (first - second) / first if first else 0.0  # the part of the loss that num_items_in_batch divides
    balance = ask.balance(probe, number)
    known = divided if balance is None or not divided else divided + balance.of(first)
    divides = number is not None and abs(known - 1) < TOLERANCE
    if abs(divided) >= TOLERANCE and not divides:
        raise UsageError(_hidden(trainer, f"num_items_in_batch divides {divided:.0%} of it, and not the rest"))
    counts: list[tuple[Callable[[Inputs], Any], str]] = [(layout.count, "samples")]
    if _has_classes(real):
        counts = [(causal_labels, "labels, shifted"), (all_labels, "labels"), *counts]
    own_count = trainer.compute_loss_func is None and (not divides or _counts_by_itself(ask, probe))
    if divides and not own_count:
        counts = [_count_of_sum(trainer, ask, batches)]
    every = [Meaning(count, of, divides=divides, balance=balance, layout=layout) for count, of in counts]
    # Without num_items_in_batch, a model that would divide by it divides by what it has counted itself.
    means = [replace(one, divides=False) for one in every] if own_count else every
    is_random = draws_random_numbers(ask, probe, number)
    why = "hiding labels and leaving out samples change it in no way that a mean does"
    if batches is not None and _tells_labels_apart(ask, means[0], batches):
        # Hidden labels tell nothing about a mean over samples, such as that of each sample's own mean.
        *of_labels, of_samples = zip(every, means, strict=True)
        every = [one for one, mean in of_labels if fits(ask, mean, *batches)] + [of_samples[0]]
    elif is_random:
        every = every[-1:]
    elif number is not None:  # undecided: what the trainer itself counts comes first
        every.sort(key=lambda one: one.count is None or bool(one.count(probe) != number))
    for one in every:
        if is_random:
            return one
        splits = _splits(layout, real)
        if all(fits(ask, one, real, *parts) for parts in splits):
            if not splits or gradients_fit(ask, one, real, *splits[0]):
                return one
            why = f"it is a mean over the {one.of}, but its gradient is not"
    raise UsageError(_hidden(trainer, why))


def still_fits(
    trainer: Any, model: nn.Module, meaning: Meaning, batches: Sequence[Inputs], padding: Any, any_rank: AnyRank
) -> bool:
    """Whether the loss of real batches is the mean that it was taken for, on all ranks; or that cannot be asked.

    `any_rank` says whether something is so on any of them: they ask together.
    """
    ask, case = Inquiry(trainer, model), _whole_and_parts(meaning.layout, batches, padding)
    is_wrong = any_rank(case is not None and not fits(ask, meaning, *case))
    return not is_wrong or any_rank(draws_random_numbers(ask, batches[0], number_of(trainer, batches[0])))


def _whole_and_parts(layout: Layout, batches: Sequence[Inputs], padding: Any) -> list[Inputs] | None:
    parts = list(batches[:2])
    if layout.count(batches[0]) > 1:
        return [batches[0], *_splits(layout, batches[0])[0]]
    if len(parts) < 2 or any(map(is_bounded, parts)):
        return None
    try:
        return [layout.as_inputs(joined([layout.as_rows(part) for part in parts], padding), padding), *parts]
    except BatchError:
        return None


def fits(ask: Inquiry, meaning: Meaning, whole: Inputs, *parts: Inputs) -> bool:
    """Whether the loss of a whole is the mean of those of its parts, weighed by their items."""
    loss, items = ask.of(meaning, whole)
    found = [ask.of(meaning, part) for part in parts]
    if not items or abs(sum(count for _, count in found) - items) > 1e-6 * items:
        return not items
    mean = sum(part * count / items for part, count in found if count)
    spread = max((abs(loss - part) for part, count in found if count and not math.isnan(part)), default=0.0)
    relative, absolute = ask.rounding
    return abs(loss - mean) <= relative * spread + absolute * abs(loss)


def gradients_fit(ask: Inquiry, meaning: Meaning, whole: Inputs, *parts: Inputs) -> bool:
    """Whether the gradient is the mean that the loss is, or cannot be asked.

    Terms with another denominator may hardly show in a loss: an entropy that is nearly the same everywhere, or
    ``(ratio - 1) * advantage``, which is 0.
    """
    found = [one for inputs in (whole, *parts) if (one := ask.gradient_of(meaning, inputs)) is not None]
    if len(found) <= len(parts) or not found[0][2]:
        return True
    (own, size, items), *others = found
    counted = [(part, count) for part, _, count in others if count]
    mean = sum(part * count / items for part, count in counted)
    spread = max(float((own - part).norm()) for part, _ in counted)
    return float((own - mean).norm()) <= max(2e-4, 50 * ask.rounding[0]) * (spread + size)


def _rounding_of(trainer: Any, model: nn.Module) -> tuple[float, float]:
    """How far losses of the same samples may be apart: of what they differ by, and of themselves."""
    dtypes = {p.dtype for p in model.parameters()}
    if dtypes & set(HALF) or trainer.args.bf16 or trainer.args.fp16:
        return 0.1, 1e-2
    if trainer.args.device.type != "cpu" and torch.float32 in dtypes:
        return 1e-3, 1e-4  # kernels may compute in TF32
    return 1e-6, 3e-6  # models compute losses in float32, whatever their weights are


def _splits(layout: Layout, inputs: Inputs) -> list[list[Inputs]]:
    """The batch in two unequal parts, in two ways: what fits one of them by chance does not fit the other."""
    samples = layout.count(inputs)
    if samples < 2:
        return []
    some = [list(range(max(samples // 3, 1))), list(range(0, samples, 2))]
    pairs = [(one, [sample for sample in range(samples) if sample not in one]) for one in some]
    return [[layout.select(inputs, one), layout.select(inputs, other)] for one, other in pairs]


def _counts_by_itself(ask: Inquiry, inputs: Inputs) -> bool:
    """Whether the loss can do without ``num_items_in_batch``."""
    try:
        ask(inputs, None)
    except Exception:  # mostly a TypeError, of a division by None
        return False
    return True


def _count_of_sum(trainer: Any, ask: Inquiry, batches: Sequence[Inputs] | None) -> tuple[Callable[[Inputs], Any], str]:
    """The items of a sum that divides by whatever it is given: its labels after the shift, if it does shift them."""
    if batches is not None:
        whole, first, others = (ask(batch, torch.ones((), dtype=torch.long)) for batch in batches)
        if others and first == 0 and whole == others:  # the first label of a row adds nothing
            return causal_labels, "labels, shifted"
    return lambda batch: number_of(trainer, batch), "labels"


def _tells_labels_apart(ask: Inquiry, meaning: Meaning, batches: Sequence[Inputs]) -> bool:
    """Whether it matters which labels are shown."""
    losses = [ask.of(meaning, batch)[0] for batch in batches]
    return max(losses) - min(losses) > 1e-4 * abs(losses[0])


def draws_random_numbers(ask: Inquiry, inputs: Inputs, number: Tensor | None) -> bool:
    """Whether the loss draws random numbers, as one that adds noise does: then parts have other ones than the whole."""
    one, other = (ask(inputs, number, seed=seed) for seed in (1, 2))
    return one is not None and other is not None and abs(one - other) > 1e-6 * abs(one)


def _has_classes(inputs: Inputs) -> bool:
    labels = inputs.get("labels")
    return "shift_labels" in inputs or (isinstance(labels, Tensor) and not labels.dtype.is_floating_point)


def number_of(trainer: Any, inputs: Inputs) -> Tensor | None:
    """What the trainer itself would pass as ``num_items_in_batch`` for this batch, on this rank alone."""
    with own_items(trainer):
        number = items_in(trainer, inputs)
    return None if number is None else torch.as_tensor(number)


def _hidden(trainer: Any, why: str) -> str:
    return (
        f"what the loss of {type(trainer).__name__}.compute_loss is a mean over is hidden: it is neither a mean over "
        f"the labels that are not -100, nor over the samples, nor a sum divided by num_items_in_batch ({why}; it was "
        "asked in evaluation mode). The "
        "mean over several micro-batches cannot be told from it. Let compute_loss return (loss, items), where the loss "
        "is a mean over so many items, or divide a sum by num_items_in_batch."
    )


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
    if "decoder_input_ids" not in inputs and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        if not callable(shift):
            return None  # they would change with the labels
        fixed["decoder_input_ids"] = shift(labels=labels)
    most = place.new_full((len(labels),), 2)
    most[place.flatten(1).amax(1).argmax()] = 8
    most = most.reshape(-1, *[1] * (labels.dim() - 1))
    few = [(place > 0) & (place <= most), place == 1, (place > 1) & (place <= most)]
    return [{**fixed, "labels": torch.where(chosen, label, IGNORED).expand_as(labels)} for chosen in few]
