"""A trainer as `verify` wants it: a model, a loss, a batch, and a step that does what the trainer does in a window."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from torch import nn
from transformers import Trainer

from macrobatch._cut.joining import joined
from macrobatch._torch.snapshot import Snapshot
from macrobatch.errors import UsageError
from macrobatch.transformers.balance import BalanceLoss, has_balance
from macrobatch.transformers.preferences import terms_of
from macrobatch.transformers.private import prepared
from macrobatch.transformers.reading import Reading
from macrobatch.transformers.samples import Inputs
from macrobatch.transformers.support import require_supported
from macrobatch.transformers.trainer import ExactTrainer
from macrobatch.transformers.trl import generates, has_terms, layout_for
from macrobatch.transformers.windows import Settings, padding_of


def is_trainer(given: object) -> bool:
    """Whether it is a trainer of transformers."""
    return isinstance(given, Trainer)


def case_of(trainer: Any) -> dict[str, Any]:
    """The arguments of `verified` for a trainer, exact or not: its first window, as the trainer runs it.

    The loss is the trainer's own expression, computed for the whole window at once.

    Raises:
        UsageError: it has no batch to try, or its batches come only with training.
    """
    require_supported(trainer, Settings())
    if generates(trainer):
        raise UsageError(
            f"{type(trainer).__name__} generates its batches while it trains, so there is no window to verify. Its "
            "losses are compared with one big batch in the tests of macrobatch."
        )
    model = _wrapped(trainer)
    batches = _first_window(trainer)
    padding, layout, loss = padding_of(trainer), layout_for(trainer), _WholeLoss(trainer)
    rows = [layout.count(batch) for batch in batches]

    def window_of(inputs: Inputs) -> list[Inputs]:
        starts = [sum(rows[:index]) for index in range(len(rows))]
        return [layout.select(inputs, range(at, at + count)) for at, count in zip(starts, rows, strict=True)]

    batch = layout.as_inputs(joined([layout.as_rows(batch) for batch in batches], padding), padding)
    case = {"model": model, "loss_fn": loss, "batch": batch, "joint": loss.joint}
    return {**case, "batches": batches, "window_of": window_of, "run": partial(run_window, trainer)}


class _WholeLoss:
    """The loss of a whole window, or of a part of it, as the trainer's own expression of those samples.

    Attributes:
        joint: what computes the balance loss of the whole window, if there is one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._reading = Reading(trainer)
        self._terms = terms_of(trainer) if has_terms(trainer) else None
        self._balance = BalanceLoss(trainer, self._reading) if has_balance(trainer) else None
        self.joint = None if self._balance is None else self._balance.joint

    def __call__(self, model: Any, inputs: Inputs) -> Any:
        if self._terms is not None:
            return self._terms.loss(self._trainer, model, inputs)
        if self._balance is not None:
            return self._balance.encoded(model, inputs)
        loss = self._reading.loss(model, inputs)
        try:
            loss, items = self._reading.weighed(loss)
        except UsageError:  # it says nothing, but has a gradient
            return loss
        scale = getattr(items, "scale", None)
        return loss if scale is None else loss * scale, getattr(items, "items", items)


def run_window(trainer: Any, model: nn.Module, batches: list[Inputs]) -> None:
    """What the trainer's loop does with the batches of a window, up to clipping."""
    if isinstance(trainer, ExactTrainer):
        trainer.start_over()  # nobody has taken a step after the window before
    window, number = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
    trainer.current_gradient_accumulation_steps = len(window)
    for index, inputs in enumerate(window):
        is_last = index == len(window) - 1
        with contextlib.nullcontext() if is_last else trainer.accelerator.no_sync(model):
            trainer.training_step(model, dict(inputs), number)


def _first_window(trainer: Any) -> list[Inputs]:
    before = Snapshot([trainer.model])
    try:
        loader = iter(trainer.get_train_dataloader())
        wanted = range(trainer.args.gradient_accumulation_steps)
        batches = [prepared(trainer, batch) for _, batch in zip(wanted, loader, strict=False)]
    finally:
        before.restore()
    if not batches:
        raise UsageError(f"{type(trainer).__name__} has no training data, so there is no window to verify.")
    return batches


def _wrapped(trainer: Any) -> nn.Module:
    """The model as it is trained."""
    if trainer.args.world_size == 1 or trainer.model_wrapped is not trainer.model:
        return trainer.model_wrapped  # type: ignore[no-any-return]
    if trainer.is_fsdp_enabled:
        raise UsageError(
            "the model is not sharded before train(): verify the trainer in one process, or after train()."
        )
    return trainer.accelerator.prepare_model(trainer.model)  # type: ignore[no-any-return]
