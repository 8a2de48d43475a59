"""The windows of a trainer: batch by batch, or all batches of a window together."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from macrobatch._torch.modules import modules_of
from macrobatch.errors import UsageError
from macrobatch.macrostep import MacroStep
from macrobatch.transformers.balance import outputs_of
from macrobatch.transformers.logs import logs_of
from macrobatch.transformers.meaning import Inputs, Meaning
from macrobatch.transformers.private import prepared
from macrobatch.types import Encoded, Items, StepResult, Terms

PLAIN = {nn.Module.train, PreTrainedModel.train, DistributedDataParallel.train}


class _Stated(MacroStep):
    """Takes the items that it is told, whatever the graph of a loss says."""

    reads = False


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

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._items: list[Items] = []  # items of the losses that compute_loss has returned and no backward has used
        self._last: Any = None  # the last of these losses, if it is to be compared
        self.compares = False

    def note(self, loss: Any, items: Items) -> None:
        """Note a loss that ``compute_loss`` has returned, and the number of items that it is a mean over."""
        self._items.append(items)
        if self.compares:
            self._last = (loss[0] if isinstance(loss, tuple) else loss).detach()  # detached, so that its graph is freed

    def _noted(self) -> Items:
        items, self._items = self._items, []
        if len(items) != 1:
            name = type(self._trainer).__name__
            raise UsageError(
                f"{name} has called the compute_loss that exact() was given {len(items)} times for one backward: its "
                "loss is weighed by the items of that, so it must be called once. What replaces compute_loss "
                "altogether belongs into the class that is passed to exact()."
            )
        return items[0]

    @abstractmethod
    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> StepResult | None:
        """Process a batch with `run`, the trainer's own ``training_step``. Returns the result of a closed window."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the open window, if there is one."""

    @property
    @abstractmethod
    def is_void(self) -> bool:
        """Whether the last window had no items."""


class BatchByBatch(Windows):
    """Every batch is a micro-batch. The trainer's own ``training_step`` runs it, but with our backward.

    Args:
        trainer: the trainer.
        model: the model, as the trainer has wrapped it.
        settings: the options of `exact`.
        saves_train: whether to skip the ``model.train()`` with which ``training_step`` begins.
    """

    def __init__(self, trainer: Any, model: nn.Module, settings: Settings, *, saves_train: bool) -> None:
        super().__init__(trainer)
        self._model = model
        self._train_saved: Any = first_train_saved if saves_train else contextlib.nullcontext
        self._engine = engine_for(Engine, model, None, scaler=trainer.accelerator.scaler, **settings.options)

    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> StepResult | None:  # noqa: ARG002
        engine = self._engine
        self._items.clear()
        engine.begin(LAST_OF_ALL if last else IN_BETWEEN)
        try:
            with self._backward_here(), self._train_saved(self._model):
                run()
            return engine.close()
        except BaseException:
            engine.give_up()
            self.drop()
            raise

    @contextlib.contextmanager
    def _backward_here(self) -> Iterator[None]:
        accelerator = self._trainer.accelerator
        accelerator.backward = self._backward  # only for this object and this context
        try:
            yield
        finally:
            del accelerator.backward

    def _backward(self, loss: Tensor, **_: Any) -> None:
        items = self._noted()
        if self.compares and not torch.allclose(loss.detach(), self._last.to(loss), equal_nan=True):
            raise UsageError(
                f"training_step of {type(self._trainer).__name__} changes the loss after compute_loss: it adds to it, "
                "or divides it, which exact() does itself. What belongs to the loss belongs into compute_loss."
            )
        self._engine.backward(loss, items)

    def drop(self) -> None:
        self._engine.discard()

    @property
    def is_void(self) -> bool:
        closing = self._engine.closing
        assert isinstance(closing, LeaveMean)
        return closing.is_void()


class WholeWindow(Windows):
    """Keeps the batches of a window until the last one, then runs them together: cut again, recorded, or in two passes.

    Args:
        trainer: the trainer.
        model: the model, as the trainer has wrapped it.
        settings: the options of `exact`.
        meaning: what the loss is a mean over.
    """

    def __init__(self, trainer: Any, model: nn.Module, settings: Settings, meaning: Meaning) -> None:
        super().__init__(trainer)
        self._meaning = meaning
        self._cuts = settings.cuts
        self._padding = padding_of(trainer)
        self._logged = logs_of(trainer, is_recorded=settings.cuda_graph)
        self._waiting: list[Inputs] = []
        options: dict[str, Any] = {"micro": settings.micro} if settings.cuts else {"micro": 1, "collate": the_only_one}
        if meaning.balance is not None:
            options["joint"] = meaning.balance.joint
        if meaning.terms is not None:
            options["counts"] = self._counts
        self._train = _Stated(
            model,
            None,
            self._loss,
            cuda_graph=settings.cuda_graph,
            scaler=trainer.accelerator.scaler,
            **options,
            **settings.options,
        )

    def step(self, inputs: Inputs, run: Callable[[], Any], *, last: bool) -> StepResult | None:  # noqa: ARG002
        self._waiting.append(prepared(self._trainer, inputs))
        if not last:
            return None
        batches, self._waiting = self._waiting, []
        layout = self._meaning.layout
        rows = [layout.as_rows(batch) for batch in batches]
        with contextlib.nullcontext() if self._logged is None else self._logged.of_window(batches):
            return self._train(joined(rows, self._padding) if self._cuts else rows)

    def _counts(self, batch: Inputs | list[Inputs]) -> dict[str, Any]:
        """The items of each term in a window."""
        terms, layout = self._meaning.terms, self._meaning.layout
        assert terms is not None
        batches = batch if isinstance(batch, list) else [batch]
        counts = [terms.counts(layout.as_inputs(rows, self._padding)) for rows in batches]
        return {name: sum(one[name] for one in counts) for name in counts[0]}

    def _loss(self, model: Any, rows: Inputs) -> tuple[Tensor, Items] | Encoded | Terms:
        trainer, meaning = self._trainer, self._meaning
        inputs = meaning.layout.as_inputs(rows, self._padding)
        if (terms := meaning.terms) is not None:
            found = terms.loss(trainer, model, inputs)
            self._noted()
            return found
        is_watched = meaning.balance is not None or self._logged is not None
        with outputs_of(trainer.model, is_watched) as outputs, trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, dict(inputs))
        if self._logged is not None:
            self._logged.note(outputs[-1])
        return meaning.weighed(loss, self._noted(), outputs, inputs)

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
