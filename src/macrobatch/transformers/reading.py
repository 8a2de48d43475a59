"""What the loss of a batch is a mean over: as its graph, the program, or a list of TRL's losses says.

A trainer hands the number of items to ``compute_loss``, which may divide a sum by it, or take a mean of its own. Here
it gets that of its own batch, as a tensor of our own: a quotient by that very tensor is recognised in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from macrobatch._loss.anatomy import anatomy_of
from macrobatch._loss.reading import Known
from macrobatch._loss.weighing import Weight, weigh
from macrobatch.errors import MacrobatchError, UsageError
from macrobatch.transformers.compiled import CompiledLosses
from macrobatch.transformers.private import items_in
from macrobatch.transformers.samples import Inputs
from macrobatch.transformers.trl import counter_of
from macrobatch.transformers.words import ADVICE, in_words_of_trainers
from macrobatch.types import Items

RANKS = {"num_processes", "world_size"}  # names of the number of processes, in programs


class Reading:
    """Computes the losses of a trainer, and reads what they are means over.

    Args:
        trainer: the trainer.
        on_host: whether numbers in the memory of the host may be read. In a recording they may not.
        is_alone: whether each batch is a window, so that the number of items that the trainer counts is the right one.
    """

    def __init__(self, trainer: Any, *, on_host: bool = True, is_alone: bool = False) -> None:
        self._trainer = trainer
        self._on_host = on_host
        self._is_alone = is_alone
        self._count = counter_of(trainer)
        is_hidden = trainer.args.torch_compile and self._count is None and not is_alone
        self._compiled = CompiledLosses() if is_hidden else None
        self._names_ranks = trainer.args.world_size > 1 and _names_ranks(trainer)
        self.begin()

    def begin(self) -> None:
        """Forget the last batch."""
        self._divisors: list[Tensor] = []
        self._means: list[tuple[Tensor, Items]] = []
        self._items: list[Items] = []

    def loss(self, model: Any, inputs: Inputs) -> Any:
        """The loss of a batch, outside of the trainer's own ``training_step``."""
        trainer = self._trainer
        self.begin()
        with trainer.compute_loss_context_manager(), _one_step(trainer), self.looking(inputs):
            if hasattr(trainer, "reads_with"):
                with trainer.reads_with(self):
                    return trainer.compute_loss(model, dict(inputs))
            return self.compute(trainer.compute_loss, model, dict(inputs))

    def looking(self, inputs: Inputs) -> Any:
        """A context for the forward of a batch, in which its graph can be read, if it has to be."""
        return contextlib.nullcontext() if self._compiled is None else self._compiled.looking(inputs)

    def compute(
        self, compute: Callable[..., Any], model: Any, inputs: Inputs, num_items_in_batch: Any = None, **named: Any
    ) -> Any:
        """What the trainer's ``compute_loss`` returns for a batch, given the number of items of that batch alone."""
        number, count = num_items_in_batch, None
        with contextlib.ExitStack() as stack:
            if not self._is_alone:
                count = None if self._count is None else self._count(inputs)
                stack.enter_context(own_items(self._trainer))
                number = items_in(self._trainer, inputs) if count is None else count
                if self._compiled is not None and self._trainer.compute_loss_func is None:
                    number = count  # a model then takes a mean, whose items may be counted
                number = None if number is None else torch.as_tensor(number, device=self._trainer.args.device).clamp(1)
            if isinstance(number, Tensor):
                self._divisors.append(number)
            stack.enter_context(_counting_smoother(self._trainer, self._means))
            found = compute(model, inputs, num_items_in_batch=number, **named)
        if isinstance(found, tuple) and not named.get("return_outputs"):
            found, items = found
            self._items.append(items)
        elif count is not None and isinstance(found, Tensor):
            self._means.append((found, count))
        return found

    def weighed(self, loss: Tensor, other: Tensor | None = None) -> tuple[Tensor, Any]:
        """The loss, and what it weighs: the items that ``compute_loss`` has returned, or a `Weight`.

        `other`: a term of the loss that is left out of the reading.

        Raises:
            UsageError: nothing says what it is a mean over.
        """
        if len(self._items) > 1:
            raise UsageError(
                f"compute_loss of {type(self._trainer).__name__} has returned (loss, items) {len(self._items)} times "
                "for one backward, so it is unknown which items belong to the loss. Call it once for each batch."
            )
        if self._items:
            return loss, self._items[0]
        steps = self._trainer.args.gradient_accumulation_steps
        try:
            with in_words_of_trainers():
                weight = self._weigh(loss, other, None if steps == 1 else steps)
        except MacrobatchError as error:
            raise UsageError(f"{type(self._trainer).__name__}.compute_loss: {error}") from error
        if weight.items is None:
            raise UsageError(
                f"what the loss of {type(self._trainer).__name__}.compute_loss is a mean over cannot be read from its "
                f"graph: {weight.unread} says no count. {ADVICE} (Or let it end in a mean(), in a cross_entropy, or in "
                "a sum divided by num_items_in_batch; or take one batch for each step.)"
            )
        return loss, weight

    def scale_alone(self, loss: Tensor) -> tuple[Items, Any]:
        """The items of a batch that makes a window alone, and what its loss has to be multiplied by, as far as known.

        That is only the case if the trainer has counted other labels than the loss has.
        """
        if self._items or self._count is not None:
            return (self._items or [None])[0], None
        try:
            weight = self._weigh(loss, None, None)
        except MacrobatchError:  # whatever it is, it is that of the whole window
            return None, None
        return weight.items, weight.scale

    def _weigh(self, loss: Tensor, other: Tensor | None, steps: int | None) -> Weight:
        known = Known(tuple(self._divisors), tuple(self._means), other)
        if self._names_ranks:
            _refuse_ranks(self._trainer, loss, known)
        weight = weigh(loss, None, is_mean=True, steps=steps, on_host=self._on_host, known=known)
        return weight if self._compiled is None else self._compiled.weight(weight)


@contextmanager
def _one_step(trainer: Any) -> Iterator[None]:
    """A context in which a loss that is divided by the number of batches in a window is divided by 1."""
    before = vars(trainer).get("current_gradient_accumulation_steps")
    if before is not None:
        trainer.current_gradient_accumulation_steps = 1
    try:
        yield
    finally:
        if before is not None:
            trainer.current_gradient_accumulation_steps = before


@contextmanager
def own_items(trainer: Any) -> Iterator[None]:
    """While ``compute_loss`` is handed a micro-batch's own items, which it need not multiply by the ranks."""
    arguments, before = trainer.args, trainer.args.average_tokens_across_devices
    arguments.average_tokens_across_devices = False
    try:
        yield
    finally:
        arguments.average_tokens_across_devices = before


@contextmanager
def _counting_smoother(trainer: Any, means: list[tuple[Tensor, Items]]) -> Iterator[None]:
    """A context in which a trainer that smooths its labels divides by the labels that it smooths, and notes them."""
    smooth = getattr(trainer, "label_smoother", None)
    if smooth is None:
        yield
        return

    def counting(outputs: Any, labels: Tensor, shift_labels: bool = False, **named: Any) -> Tensor:
        count = ((labels[..., 1:] if shift_labels else labels) != smooth.ignore_index).sum()
        if named.get("num_items_in_batch") is not None:
            named["num_items_in_batch"] = count.clamp(min=1)
        loss: Tensor = smooth(outputs, labels, shift_labels=shift_labels, **named)
        means.append((loss, count))
        return loss

    trainer.label_smoother = counting
    try:
        yield
    finally:
        trainer.label_smoother = smooth


def _names_ranks(trainer: Any) -> bool:
    """Whether the program's own code for the loss names the number of processes."""
    own = [vars(one).get("compute_loss") for one in type(trainer).__mro__ if one is not Trainer and not _is_known(one)]
    codes = [getattr(one, "__code__", None) for one in (*own, trainer.compute_loss_func)]
    return any(RANKS.intersection(code.co_names) for code in codes if code is not None)


def _is_known(one: type) -> bool:
    return one.__module__.partition(".")[0] in ("macrobatch", "trl", "transformers")


def _refuse_ranks(trainer: Any, loss: Tensor, known: Known) -> None:
    """Raise an error for a loss that the program has multiplied by the number of processes."""
    ranks = trainer.args.world_size
    if any(part.factor == ranks for part in anatomy_of(loss, known).parts if not isinstance(part.factor, Tensor)):
        raise UsageError(
            f"the loss is multiplied by {ranks}, the number of processes. exact() needs the loss of a batch alone: it "
            "divides by the items of all batches and ranks itself. Leave that factor out."
        )
