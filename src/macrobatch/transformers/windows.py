"""The windows of a trainer: batch by batch, or all batches of a window together."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from macrobatch._assembly import engine_for
from macrobatch._cut.joining import joined, the_only_one
from macrobatch._cut.padding import IGNORED
from macrobatch._cut.policies import Policy
from macrobatch._engine.closing import LeaveMean
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import IN_BETWEEN, LAST_OF_ALL
from macrobatch._joint.balance import outputs_of
from macrobatch._terms.mean import Mean
from macrobatch._torch.modules import modules_of
from macrobatch.macrostep import MacroStep
from macrobatch.transformers.balance import BalanceLoss, has_balance
from macrobatch.transformers.logs import logs_of
from macrobatch.transformers.preferences import terms_of
from macrobatch.transformers.private import prepared
from macrobatch.transformers.reading import Reading
from macrobatch.transformers.samples import Inputs
from macrobatch.transformers.trl import has_terms, is_total, layout_for
from macrobatch.transformers.words import advised

PLAIN = {nn.Module.train, PreTrainedModel.train, DistributedDataParallel.train}


@dataclass(frozen=True)
class Settings:
    """The options of `exact`.

    Attributes:
        micro: how to cut the samples of a window again; None: its batches stay as they are.
        cuda_graph: whether to record micro-batches as CUDA graphs.
        options: other options, for the engine.
    """

    micro: int | Policy | str | None = None
    cuda_graph: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuts(self) -> bool:
        """Whether micro-batches differ from the trainer's batches."""
        return self.micro is not None


class Windows(ABC):
    """Processes the batches of windows, one by one."""

    is_for_one = False  # whether windows have one batch, in one process

    def __init__(self, trainer: Any, *, on_host: bool = True) -> None:
        self._trainer = trainer
        self.reading = Reading(trainer, on_host=on_host, is_alone=self.is_for_one)

    @abstractmethod
    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> Tensor | None:
        """Process a batch with `run`, the trainer's own ``training_step``. Returns the loss of a closed window."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the open window, if there is one."""

    @property
    @abstractmethod
    def is_void(self) -> bool:
        """Whether the last window had no items."""

    @contextlib.contextmanager
    def _backward_here(self, backward: Callable[..., None]) -> Iterator[None]:
        """A context in which the trainer runs another backward."""
        accelerator = self._trainer.accelerator
        accelerator.backward = backward  # only for this object and this context
        try:
            yield
        finally:
            del accelerator.backward


class OneBatch(Windows):
    """A window of one batch in one process is the trainer's own step, bit by bit, and exact whatever its loss is.

    Only two things differ: labels that the trainer counts but its loss does not have do not shrink the gradient, and
    a batch without any label takes no step.
    """

    is_for_one = True
    is_void = False

    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> Tensor | None:  # noqa: ARG002
        self.is_void, scales = False, list[Any]()
        backward = self._trainer.accelerator.backward

        def scaled(loss: Tensor, **options: Any) -> None:
            items, scale = self.reading.scale_alone(loss)
            scales.append(scale)
            backward(loss if scale is None else loss * scale, **options)
            self.is_void = items is not None and not bool(items)

        with self._backward_here(scaled):
            loss: Tensor = run()
        return loss if not scales or scales[-1] is None else loss * scales[-1]

    def drop(self) -> None:
        """There is nothing to drop: the trainer clears its gradients."""


class BatchByBatch(Windows):
    """Every batch is a micro-batch. The trainer's own ``training_step`` runs it, but with our backward.

    `saves_train`: whether to skip the ``model.train()`` with which ``training_step`` begins.
    """

    def __init__(self, trainer: Any, model: nn.Module, settings: Settings, *, saves_train: bool) -> None:
        super().__init__(trainer)
        self._model = model
        self._train_saved: Any = first_train_saved if saves_train else contextlib.nullcontext
        options: dict[str, Any] = {"scaler": trainer.accelerator.scaler, **settings.options}
        self._engine = engine_for(Engine, model, None, objective=partial(Mean, reads=True), **options)

    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> Tensor | None:
        engine = self._engine
        engine.begin(LAST_OF_ALL if last else IN_BETWEEN, inputs)
        try:
            with self._backward_here(self._backward), self._train_saved(self._model), advised(self._trainer):
                with self.reading.looking(inputs):
                    run()
                result = engine.close()
        except BaseException:
            engine.give_up()
            self.drop()
            raise
        return None if result is None else result.loss

    def _backward(self, loss: Tensor, **_: Any) -> None:
        loss, items = self.reading.weighed(loss)
        if is_total(self._trainer):
            loss = loss * self._trainer.batches_of_window
        self._engine.backward(loss, items)

    def drop(self) -> None:
        self._engine.discard()

    @property
    def is_void(self) -> bool:
        closing = self._engine.closing
        assert isinstance(closing, LeaveMean)
        return closing.is_void()


class _ForTheirOptimizer(MacroStep):
    """Leaves gradients in the dtype of their parameters, which the trainer's optimizer wants."""

    leaves_wide = False


class WholeWindow(Windows):
    """Keeps the batches of a window until the last one, then runs them together: cut, recorded, or in two passes."""

    def __init__(self, trainer: Any, model: nn.Module, settings: Settings) -> None:
        super().__init__(trainer, on_host=not settings.cuda_graph)
        self._layout = layout_for(trainer)
        self._cuts = settings.cuts
        self._padding = padding_of(trainer)
        self._logged = logs_of(trainer, is_recorded=settings.cuda_graph)
        self._terms = terms_of(trainer) if has_terms(trainer) else None
        self._balance = BalanceLoss(trainer, self.reading) if has_balance(trainer) else None
        self._waiting: list[Inputs] = []
        options: dict[str, Any] = {"micro": settings.micro} if settings.cuts else {"micro": 1, "collate": the_only_one}
        if self._balance is not None:
            options["joint"] = self._balance.joint
        if self._terms is not None:
            options["counts"] = self._counts
        options |= {"cuda_graph": settings.cuda_graph, "scaler": trainer.accelerator.scaler, **settings.options}
        self._train = _ForTheirOptimizer(model, None, self._loss, **options)

    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> Tensor | None:  # noqa: ARG002
        self._waiting.append(prepared(self._trainer, inputs))
        if not last:
            return None
        batches, self._waiting = self._waiting, []
        rows = [self._layout.as_rows(batch) for batch in batches]
        logged: Any = contextlib.nullcontext() if self._logged is None else self._logged.of_window(batches)
        with logged, advised(self._trainer):
            return self._train(joined(rows, self._padding) if self._cuts else rows).loss

    def _counts(self, batch: Inputs | list[Inputs]) -> dict[str, Any]:
        """The items of each term in a window."""
        assert self._terms is not None
        batches = batch if isinstance(batch, list) else [batch]
        counts = [self._terms.counts(self._layout.as_inputs(rows, self._padding)) for rows in batches]
        return {name: sum(one[name] for one in counts) for name in counts[0]}

    def _loss(self, model: Any, rows: Inputs) -> Any:
        trainer, inputs = self._trainer, self._layout.as_inputs(rows, self._padding)
        if self._terms is not None:
            return self._terms.loss(trainer, model, inputs)
        with outputs_of(trainer.model, self._logged is not None) as outputs:
            if self._balance is not None:
                found: Any = self._balance.encoded(model, inputs)
            else:
                found = self.reading.weighed(self.reading.loss(model, inputs))
        if self._logged is not None:
            self._logged.note(outputs[-1])
        return found

    def drop(self) -> None:
        self._waiting = []

    @property
    def is_void(self) -> bool:
        return self._train.is_void()


@contextlib.contextmanager
def first_train_saved(model: nn.Module) -> Iterator[None]:
    """A context in which the first ``model.train()`` does nothing if it would change nothing: the trainer calls it per
    batch.

    Later calls, e.g. of a loss that evaluates in between, are the model's own, and so are those of a copy of the model.
    """
    own = vars(model)
    if "train" in own:
        yield
        return

    def train(mode: bool = True) -> nn.Module:
        own.pop("train", None)
        return model if mode and all(map(_trains_plainly, modules_of([model]))) else model.train(mode)

    own["train"] = train
    try:
        yield
    finally:
        if own.get("train") is train:
            del own["train"]


def _trains_plainly(module: nn.Module) -> bool:
    """Whether it is in training mode, and its ``train()`` does nothing else than setting that mode."""
    return module.training and "train" not in vars(module) and type(module).train in PLAIN


def padding_of(trainer: Any) -> dict[str, int]:
    """The padding values of a batch's fields; 0 for all other fields."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    config = getattr(trainer.model, "config", None)
    token = getattr(tokenizer, "pad_token_id", None)
    token = getattr(config, "pad_token_id", None) if token is None else token
    pad = token if isinstance(token, int) else 0
    return {"input_ids": pad, "decoder_input_ids": pad, "labels": IGNORED, "shift_labels": IGNORED}


def zero_of(device: torch.device) -> Tensor:
    """The loss of a batch that does not close a window."""
    return torch.zeros((), device=device)
