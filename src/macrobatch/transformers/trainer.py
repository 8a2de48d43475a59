"""`exact`: a trainer class of transformers with exact gradient accumulation.

The trainer keeps its loop: it reads a window's batches, calls ``training_step`` for each, clips, steps and logs. This
module divides the gradients by the number of items of the window on all ranks, before the trainer clips them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from macrobatch._border import arguments as validation
from macrobatch._cut.fitting import checked_micro
from macrobatch._cut.policies import Policy
from macrobatch._torch.snapshot import Snapshot
from macrobatch.errors import MacrobatchError, UsageError, warn
from macrobatch.transformers.asking import meaning_of, still_fits
from macrobatch.transformers.meaning import Inputs, Meaning
from macrobatch.transformers.private import prepared
from macrobatch.transformers.support import require_supported
from macrobatch.transformers.trl import declared, layout_for
from macrobatch.transformers.widths import have_different_widths, padding_warning, widest_of
from macrobatch.transformers.windows import BatchByBatch, Settings, WholeWindow, Windows, padding_of, zero_of

logger = logging.getLogger("macrobatch")
OPTIONS = ("accumulate_dtype", "fit_file")
MOST_ASKED = 8  # samples with which the loss function is tried before training
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
    """

    macrobatch_settings: Settings
    _steps_of_window = 1

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._windows: Windows | None = None
        self._meaning: Meaning | None = None
        self._number = 0  # the number of the window
        self._batches: list[Inputs] = []  # the batches of a window in which the loss function is checked
        self._left = 0  # remaining batches of the window
        self._fillers = 0  # how many of them are empty ones, which come first
        self._awaits_step = self._is_undivided = self._told_of_widths = False
        self._operations: int | None = None  # floating point operations per element of the main input
        super().__init__(*arguments, **named)
        require_supported(self, self.macrobatch_settings)
        self._meaning = declared(self)
        if self._meaning is None:
            self._ask_at_construction()

    # ------------------------------------------------------------------------------------------ the trainer's loop

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self.start_over()
        return super()._inner_training_loop(*arguments, **named)

    def start_over(self) -> None:
        """Forget all windows, because the model may have been wrapped again."""
        self._windows, self._number, self._left, self._awaits_step = None, 0, 0, False

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of the next window, as many as the loop asks for, because otherwise it would not step.

        If there are fewer, empty ones come first: in the loop, ranks exchange gradients in the last batch.
        """
        if self._awaits_step:
            raise UsageError(STEPS_CHANGED)
        if self._windows is not None:
            self._windows.drop()  # a window that a callback has interrupted
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._number += bool(batches)
        self._operations = None
        self._batches = batches if self._is_looked_at else []
        self._fillers = num_batches - len(batches) if batches else 0
        self._left = len(batches) + self._fillers
        fillers = [_nothing_of(batches[0])] * self._fillers if self._fillers else []
        return [*fillers, *batches], None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if len(batch_samples) != 1 and self.is_in_train and self.model.training:
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Process a batch of the window. Returns the window's loss for its last batch, else 0: the loop sums them."""
        self._left -= 1
        if self._fillers:
            self._fillers -= 1
            return zero_of(self.args.device)
        self._look_at_loss(model)
        if self._windows is None:
            self._windows = self._windows_for(model)
        if isinstance(self._windows, WholeWindow) and not self._left:  # no super().training_step
            model.train()
            if callable(getattr(self.optimizer, "train", None)):
                self.optimizer.train()
        is_last_word = type(self).compute_loss is ExactTrainer.compute_loss  # else a subclass changes the loss
        self._windows.compares = is_last_word and self._is_looked_at
        self._is_undivided = True
        try:
            result = self._windows.step(
                inputs,
                lambda: super(ExactTrainer, self).training_step(model, inputs, num_items_in_batch),
                last=not self._left,
            )
        finally:
            self._is_undivided = False
        if result is None:
            return zero_of(self.args.device)
        self._awaits_step = True
        if self._windows.is_void:
            model.zero_grad()  # without items, no step is taken
        return result.loss.detach().to(self.args.device, torch.float32)

    def compute_loss(self, model: Any, inputs: Inputs, *arguments: Any, **named: Any) -> Any:
        """The trainer's own loss; in training, as a mean over the items of this batch only."""
        windows, meaning = self._windows, self._meaning
        if not self._is_undivided or windows is None or meaning is None:
            return super().compute_loss(model, inputs, *arguments, **named)
        named.pop("num_items_in_batch", None)
        if arguments:
            named["return_outputs"] = arguments[0]
        loss, items = meaning.loss(self, super().compute_loss, model, inputs, **named)
        windows.note(loss, items)
        return loss

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
        return 1 if self._is_undivided else self._steps_of_window

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, steps: int) -> None:
        self._steps_of_window = steps

    # ------------------------------------------------------------------------------------------ what the loss means

    def _windows_for(self, model: nn.Module) -> Windows:
        settings, meaning = self.macrobatch_settings, self._meaning
        assert meaning is not None
        if settings.cuts or settings.cuda_graph or meaning.balance is not None or meaning.terms is not None:
            return WholeWindow(self, model, settings, meaning)
        library = str(getattr(super().training_step, "__module__", "")).partition(".")[0]
        return BatchByBatch(self, model, settings, saves_train=library in ("transformers", "trl"))

    def _look_at_loss(self, model: nn.Module) -> None:
        """Find out what the loss is a mean over, if that is unknown; and check in some windows that it still is.

        Raises:
            UsageError: it is not, on any rank. All ranks raise it.
        """
        batches, self._batches = self._batches, []
        if not batches or declared(self) is not None:
            return
        given = [prepared(self, batch) for batch in batches[:2]]
        if self._meaning is None:
            try:
                self._meaning = meaning_of(self, model, given[0], layout_for(self))
            except ValueError as error:  # e.g. of a model that returns a loss in training mode only
                raise UsageError(
                    f"{type(self).__name__}.compute_loss could not be asked, in evaluation mode, what its loss is a "
                    f"mean over: {error}"
                ) from error
        if not still_fits(self, model, self._meaning, given, padding_of(self), self._is_on_any_rank):
            raise UsageError(
                f"the loss of {type(self).__name__}.compute_loss was taken for a mean over {self._meaning.of}, but in "
                f"window {self._number} it is not one: parts of a batch, so weighed, do not give the whole. Let "
                "compute_loss return (loss, items), where the loss is a mean over so many items."
            )
        self._look_at_widths(model, batches, given)

    def _look_at_widths(self, model: nn.Module, batches: Sequence[Inputs], given: Sequence[Inputs]) -> None:
        """Warn once, on all ranks, if the loss depends on padding that the micro-batches have less of."""
        assert self._meaning is not None
        if self._told_of_widths:
            return
        widest = self._largest_over_ranks(widest_of(batches))
        if not self._is_on_any_rank(have_different_widths(batches, self.macrobatch_settings, widest)):
            return
        if (message := padding_warning(self, model, self._meaning, given, widest, self._is_on_any_rank)) is not None:
            self._told_of_widths = True
            warn(message)

    @property
    def _is_looked_at(self) -> bool:
        return self._number & (self._number - 1) == 0  # the windows 1, 2, 4, 8 ...

    def _is_on_any_rank(self, here: bool) -> bool:
        if self.args.world_size == 1:
            return here
        return bool(self.accelerator.reduce(torch.tensor(float(here), device=self.args.device), "sum"))

    def _largest_over_ranks(self, number: int) -> int:
        if self.args.world_size == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.args.device)).max())

    def _ask_at_construction(self) -> None:
        """Find out what the loss is a mean over, with some training data. An own loss may not be ready yet."""
        data = self.train_dataset
        is_listed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not is_listed or not len(data) or self.is_fsdp_enabled or not self.place_model_on_device:
            return
        before, number = Snapshot([self.model]), min(MOST_ASKED, 2 * self.args.per_device_train_batch_size)
        places = sorted({len(data) * index // number for index in range(number)})
        try:
            batch = self._get_collator_with_removed_columns(self.data_collator)([data[place] for place in places])
            if hasattr(batch, "keys"):
                self._meaning = meaning_of(self, self.model, prepared(self, batch), layout_for(self))
        except MacrobatchError:
            raise
        except Exception as error:  # it is tried again with the first batch, which shows the error itself
            logger.info("exact: compute_loss could not be asked before training: %s", error)
        finally:
            before.restore()  # because collators use random numbers


def _elements_of(model: Any, inputs: Any) -> int:
    main = inputs.get(getattr(model, "main_input_name", "input_ids")) if hasattr(inputs, "get") else None
    return main.numel() if isinstance(main, Tensor) else 0


def _nothing_of(batch: Any) -> Any:
    """A batch without samples, in which the trainer counts no tokens."""
    if not hasattr(batch, "items"):
        return type(batch)()
    return {key: value[:0] if isinstance(value, Tensor) and value.dim() else value for key, value in batch.items()}
