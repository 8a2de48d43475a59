"""`exact`: a trainer of transformers, with its windows on the engine.

The trainer keeps its loop: it reads a window's batches, calls ``training_step`` for each, clips, steps and logs. Here
the gradients become the mean over the items of the window and of all ranks, before it clips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from macrobatch._cut.policies import Policy
from macrobatch._step import validation
from macrobatch.errors import UsageError
from macrobatch.macrostep import checked_micro
from macrobatch.transformers.meaning import Inputs, Meaning, meaning_of
from macrobatch.transformers.support import require_supported
from macrobatch.transformers.trl import declared, layout_for
from macrobatch.transformers.windows import BatchByBatch, Settings, WholeWindow, Windows, zero_of

OPTIONS = ("sync", "gather", "accumulate_dtype", "fit_file")


def exact(trainer: type, *, micro: int | Policy | str | None = None, cuda_graph: bool = False, **options: Any) -> type:
    """The same trainer class, with gradient accumulation that is exact.

    Its arguments, callbacks, logs and checkpoints stay what they are. A window, the ``gradient_accumulation_steps``
    batches of one optimizer step on all ranks, has the gradient of one big batch, whatever its batches hold, and the
    loss that is logged is that of the window.

    Args:
        trainer: the `Trainer` of transformers, or a class made of it, such as `SFTTrainer`.
        micro: how to cut the samples of a window anew: `by_tokens`, `by_count`, a number of samples, or "auto":
            whatever fits into memory. None: the trainer's batches are the micro-batches.
        cuda_graph: micro-steps are recorded once for each shape, and replayed, for a GPU that waits for Python.
        options: ``accumulate_dtype``, ``sync``, ``gather`` and ``fit_file`` of `MacroStep`.

    Returns:
        A subclass, to be used in its place.

    Raises:
        UsageError: it is no trainer. What a trainer does that cannot be exact is told when one is constructed.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        name = trainer.__name__ if isinstance(trainer, type) else f"an object of type {type(trainer).__name__}"
        raise UsageError(
            f"exact() takes a trainer class of transformers, as in exact(Trainer)(model, args): got {name}."
        )
    if issubclass(trainer, ExactTrainer):
        raise UsageError(f"{trainer.__name__} is exact already: hand the class itself to exact(), with all options.")
    validation.require_options(options, OPTIONS)
    if micro is not None:
        checked_micro(micro)
    elif "fit_file" in options:
        raise UsageError('fit_file keeps the sizes that micro="auto" has found: leave it out otherwise.')
    settings = Settings(micro, cuda_graph, options)
    members = {"macrobatch_settings": settings, "__doc__": trainer.__doc__, "__module__": trainer.__module__}
    made: Any = type(f"Exact{trainer.__name__}", (ExactTrainer, trainer), members)

    @wraps(trainer.__init__)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        super(made, self).__init__(*arguments, **named)

    made.__init__ = construct
    return made  # type: ignore[no-any-return]


class ExactTrainer(Trainer):  # type: ignore[misc]
    """What `exact` adds to a trainer class.

    Attributes:
        macrobatch_settings: what `exact` was asked for.
    """

    macrobatch_settings: Settings
    _steps_of_window = 1

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._windows: Windows | None = None
        self._meaning: Meaning | None = None
        self._left = 0  # batches of the window that have not come yet
        self._fillers = 0  # of them, those that only fill it up
        self._is_undivided = False
        super().__init__(*arguments, **named)
        require_supported(self, self.macrobatch_settings)
        self._meaning = declared(self)
        if self._meaning is None and (batch := self._batch_to_ask()) is not None:
            self._ask(self.model, batch)

    # ------------------------------------------------------------------------------------------ the trainer's loop

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self._windows = None  # the model will be wrapped anew
        return super()._inner_training_loop(*arguments, **named)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of the next window, as many as the loop has asked for, or it would not step."""
        if self._windows is not None:
            self._windows.drop()  # one that a callback has broken off
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._left, self._fillers = len(batches), 0
        if batches and len(batches) < num_batches:
            self._fillers = num_batches - len(batches)
            self._left = num_batches
            batches = [*batches, *[_nothing_of(batches[-1])] * self._fillers]
        return batches, None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if len(batch_samples) != 1 and self.is_in_train and self.model.training:
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """A batch of the window. Returns its loss where it closes the window, else 0: the loop adds them up."""
        self._left -= 1
        if self._fillers and self._left < self._fillers:
            return zero_of(self.args.device)
        if self._meaning is None:
            self._ask(model, self._prepare_inputs(inputs))
        if self._windows is None:
            self._windows = self._windows_for(model)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._is_undivided = True
        try:
            result = self._windows.step(
                inputs,
                lambda: super(ExactTrainer, self).training_step(model, inputs, num_items_in_batch),
                last=self._left == self._fillers,
            )
        finally:
            self._is_undivided = False
        if result is None:
            return zero_of(self.args.device)
        if self._windows.is_void:
            model.zero_grad()  # no items, no step
        return result.loss.detach().to(self.args.device, torch.float32)

    def compute_loss(self, model: Any, inputs: Inputs, *arguments: Any, **named: Any) -> Any:
        """The trainer's own loss; in training as a mean over the items of the batch alone."""
        windows, meaning = self._windows, self._meaning
        if not self._is_undivided or not isinstance(windows, BatchByBatch) or meaning is None:
            return super().compute_loss(model, inputs, *arguments, **named)
        named.pop("num_items_in_batch", None)
        if arguments:
            named["return_outputs"] = arguments[0]
        loss, items = meaning.loss(self, super().compute_loss, model, inputs, **named)
        windows.note(items)
        return loss

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The batches of the window; 1 while a loss is computed that would be divided by them."""
        return 1 if self._is_undivided else self._steps_of_window

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, steps: int) -> None:
        self._steps_of_window = steps

    # ------------------------------------------------------------------------------------------ what is needed once

    def _windows_for(self, model: nn.Module) -> Windows:
        settings, meaning = self.macrobatch_settings, self._meaning
        assert meaning is not None
        if settings.cuts or settings.cuda_graph or meaning.balance is not None:
            return WholeWindow(self, model, settings, meaning, super().compute_loss)
        return BatchByBatch(self, model, settings)

    def _ask(self, model: nn.Module, batch: Inputs) -> None:
        self._meaning = meaning_of(self, super().compute_loss, model, batch, layout_for(self))

    def _batch_to_ask(self) -> Inputs | None:
        """The first samples of the training data as a batch; None where they are not at hand before training."""
        data = self.train_dataset
        is_listed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not is_listed or not len(data) or self.is_fsdp_enabled or not self.place_model_on_device:
            return None
        samples: Sequence[Any] = [data[index] for index in range(min(4, len(data)))]
        batch = self._get_collator_with_removed_columns(self.data_collator)(samples)
        return self._prepare_inputs(batch) if isinstance(batch, dict) or hasattr(batch, "keys") else None


def _nothing_of(batch: Any) -> Any:
    """A batch of no samples, for the trainer to count no tokens in."""
    return {key: value[:0] if isinstance(value, Tensor) and value.dim() else value for key, value in batch.items()}
