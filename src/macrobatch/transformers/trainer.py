"""`exact`: a trainer class of transformers with exact gradient accumulation.

The trainer keeps its loop: it reads a window's batches, calls ``training_step`` for each, clips, steps and logs. This
module divides the gradients by the number of items of the window on all ranks, before the trainer clips them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from macrobatch._border import arguments as validation
from macrobatch._cut.fitting import checked_micro
from macrobatch._cut.policies import Policy
from macrobatch.errors import UsageError
from macrobatch.transformers.balance import has_balance
from macrobatch.transformers.reading import Reading
from macrobatch.transformers.samples import Inputs
from macrobatch.transformers.support import require_supported
from macrobatch.transformers.trl import has_terms, require_possible
from macrobatch.transformers.windows import BatchByBatch, OneBatch, Settings, WholeWindow, Windows, zero_of

OPTIONS = ("accumulate_dtype", "fit_file")
STEPS_CHANGED = (
    "gradient_accumulation_steps was changed while training, so that the trainer steps inside a window, or does not "
    "step after one. Set it before train(), or in on_train_begin."
)


def exact(trainer: type, *, micro: int | Policy | str | None = None, cuda_graph: bool = False, **options: Any) -> type:
    """Make a subclass of a trainer class that accumulates gradients exactly: ``exact(Trainer)(model, args, ...)``.

    Arguments, callbacks, logs and checkpoints work as before. Each optimizer step has the gradient that its
    ``gradient_accumulation_steps`` batches on all ranks would have as one big batch, even if they have different
    numbers of tokens. The logged loss is the mean over that big batch.

    >>> from transformers import Trainer
    >>> exact(Trainer).__name__
    'ExactTrainer'

    Args:
        trainer: the `Trainer` of transformers, or a subclass of it, such as `SFTTrainer` of TRL.
        micro: how to cut the samples of a window into micro-batches: a number of samples, `by_count`, `by_tokens`, or
            "auto" for the largest number of samples that fits into memory. Default: the trainer's batches are the
            micro-batches.
        cuda_graph: record the forward and backward of a micro-batch as a CUDA graph, once for each shape, and replay
            it. This helps if micro-batches are so small that the GPU waits for Python.
        options: ``accumulate_dtype`` and ``fit_file``, as described for `Accumulator` and `MacroStep`.

    Returns:
        The subclass. Use it in place of the trainer class.

    Raises:
        UsageError: ``trainer`` is not a trainer class, or an option is invalid. If a trainer does something that cannot
            be exact, the error comes when you construct the trainer.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        name = trainer.__name__ if isinstance(trainer, type) else f"an object of type {type(trainer).__name__}"
        raise UsageError(
            f"exact() takes a trainer class of transformers, as in exact(Trainer)(model, args): got {name}."
        )
    if issubclass(trainer, ExactTrainer):
        raise UsageError(f"{trainer.__name__} is exact already: pass the class itself to exact(), with all options.")
    if {"model", "args"} & options.keys():
        raise UsageError("exact() takes a class and returns one: call that, as in exact(Trainer)(model=..., args=...).")
    validation.require_options(options, ("micro", "cuda_graph", *OPTIONS))
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
    """The methods that `exact` adds to a trainer class.

    Attributes:
        macrobatch_settings: the options of `exact`.
        batches_of_window: the number of batches in the window.
    """

    macrobatch_settings: Settings
    batches_of_window = 0
    _steps_of_window = 1  # the trainer sets it

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._windows: Windows | None = None
        self._reading: Reading | None = None  # of the batch that is processed
        self._left = 0  # remaining batches of the window
        self._fillers = 0  # how many of them are empty ones, which come first
        self._awaits_step = self._is_alone = False
        self._operations: int | None = None  # floating point operations per element of the main input
        super().__init__(*arguments, **named)
        require_supported(self, self.macrobatch_settings)

    # ------------------------------------------------------------------------------------------ the trainer's loop

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self.start_over()
        return super()._inner_training_loop(*arguments, **named)

    def start_over(self) -> None:
        """Forget all windows, because the model may have been wrapped again."""
        self._windows, self._left, self._awaits_step = None, 0, False

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of the next window, as many as the loop asks for, because otherwise it would not step.

        If there are fewer, empty ones come first: in the loop, ranks exchange gradients in the last batch.
        """
        if self._awaits_step:
            raise UsageError(STEPS_CHANGED)
        if self._windows is not None:
            self._windows.drop()  # a window that a callback has interrupted
        batches, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._operations = None
        self._fillers = num_batches - len(batches) if batches else 0
        self._left = self.batches_of_window = len(batches) + self._fillers
        settings = self.macrobatch_settings
        self._is_alone = len(batches) == self.args.world_size == 1 and not (settings.cuts or settings.cuda_graph)
        fillers = [_nothing_of(batches[0])] * self._fillers if self._fillers else []
        return [*fillers, *batches], number if self._is_alone else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if len(batch_samples) != 1 and self.is_in_train and self.model.training:
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Process a batch of the window. Returns the window's loss for its last batch, else 0: the loop sums them.

        Outside of a window, it is the trainer's own.
        """
        if not self._left:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        self._left -= 1
        if self._fillers:
            self._fillers -= 1
            return zero_of(self.args.device)
        if self._windows is None or self._windows.is_for_one is not self._is_alone:
            self._windows = self._windows_for(model)
        if isinstance(self._windows, WholeWindow) and not self._left:  # no super().training_step
            model.train()
            if callable(getattr(self.optimizer, "train", None)):
                self.optimizer.train()
        self._windows.reading.begin()
        with self.reads_with(self._windows.reading):
            found = self._windows.step(
                inputs,
                lambda: super(ExactTrainer, self).training_step(model, inputs, num_items_in_batch),
                last=not self._left,
            )
        if found is None:
            return zero_of(self.args.device)
        self._awaits_step = True
        if self._windows.is_void:
            model.zero_grad()  # without items, no step is taken
        return found.detach().to(self.args.device, torch.float32)

    def compute_loss(self, model: Any, inputs: Inputs, *arguments: Any, **named: Any) -> Any:
        """The trainer's own loss; in a window, that of this batch alone, and without the items that it returns."""
        named |= zip(("return_outputs", "num_items_in_batch"), arguments, strict=False)
        if self._reading is None:
            return super().compute_loss(model, inputs, **named)
        return self._reading.compute(super().compute_loss, model, inputs, **named)

    @contextmanager
    def reads_with(self, reading: Reading) -> Iterator[None]:
        """A context in which ``compute_loss`` computes the loss of a batch alone, and notes what it is a mean over."""
        before, self._reading = self._reading, reading
        try:
            yield
        finally:
            self._reading = before

    def _get_grad_norm(self, *arguments: Any, **named: Any) -> Any:
        """Check that a window is complete, because the loop is about to step."""
        if self._left or not self._awaits_step:
            raise UsageError(STEPS_CHANGED)
        self._awaits_step = False
        return super()._get_grad_norm(*arguments, **named)

    def floating_point_ops(self, inputs: Inputs) -> int:
        """The operations of a batch. The trainer counts all parameters for each batch, which would take long."""
        count, elements = super().floating_point_ops, _elements_of(self.model, inputs)
        if not elements or getattr(count, "__func__", None) is not Trainer.floating_point_ops:
            return count(inputs)  # type: ignore[no-any-return]
        if self._operations is None:  # the count is proportional to the elements
            self._operations = count(inputs) // elements
        return self._operations * elements

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The number of batches of the window; 1 while a loss is computed that would be divided by it."""
        return self._steps_of_window if self._reading is None else 1

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, steps: int) -> None:
        self._steps_of_window = steps

    def _windows_for(self, model: nn.Module) -> Windows:
        settings = self.macrobatch_settings
        if self._is_alone:
            return OneBatch(self)
        require_possible(self, cuts=settings.cuts)
        if settings.cuts or settings.cuda_graph or has_balance(self) or has_terms(self):
            return WholeWindow(self, model, settings)
        library = str(getattr(super().training_step, "__module__", "")).partition(".")[0]
        return BatchByBatch(self, model, settings, saves_train=library in ("transformers", "trl"))


def _elements_of(model: Any, inputs: Any) -> int:
    main = inputs.get(getattr(model, "main_input_name", "input_ids")) if hasattr(inputs, "get") else None
    return main.numel() if isinstance(main, Tensor) else 0


def _nothing_of(batch: Any) -> Any:
    """A batch without samples, in which the trainer counts no tokens."""
    if not hasattr(batch, "items"):
        return type(batch)()
    return {key: value[:0] if isinstance(value, Tensor) and value.dim() else value for key, value in batch.items()}
