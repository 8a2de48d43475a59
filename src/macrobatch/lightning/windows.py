"""The windows of a fit: batch by batch, or all batches of a window together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from macrobatch._assembly import engine_for
from macrobatch._border.arguments import checked_items
from macrobatch._cut.joining import joined, the_only_one
from macrobatch._cut.padding import IGNORED
from macrobatch._cut.policies import Policy
from macrobatch._cut.token_groups import BESIDE_TOKENS, LABELS, MASK, OTHER_MASKS, TOKENS
from macrobatch._engine.closing import LeaveMean
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import IN_BETWEEN, LAST_OF_ALL
from macrobatch._loss.weighing import weigh
from macrobatch._terms.mean import Mean
from macrobatch._torch.modules import data_parallel_of
from macrobatch.errors import UsageError
from macrobatch.lightning.choosing import package_of
from macrobatch.lightning.gradients import ClearingHook, StaleGradients
from macrobatch.lightning.logged import Logged
from macrobatch.lightning.outputs import items_stated_by, loss_and_items, unreadable
from macrobatch.lightning.schedule import wants_forwards_alone
from macrobatch.macrostep import MacroStep
from macrobatch.types import Items, StepResult

State = Mapping[str, int | float]


@dataclass(frozen=True)
class Settings:
    """The options of `ExactStrategy`, besides its steps.

    Attributes:
        micro: how to cut the samples of a window again; None: its batches stay as they are.
        cuda_graph: whether to record micro-batches as CUDA graphs.
        accumulate_dtype: the dtype in which gradients are summed.
    """

    micro: int | Policy | str | None = None
    cuda_graph: bool = False
    accumulate_dtype: torch.dtype | None = None

    @property
    def keeps(self) -> bool:
        """Whether the batches of a window are kept until its last one."""
        return self.micro is not None or self.cuda_graph


class Windows(Protocol):
    """Processes the batches of windows, one by one."""

    def forward(self, run: Callable[[], Any], arguments: Sequence[Any], *, last: bool, alone: bool) -> Any:
        """Process a batch. `run` calls the module's ``training_step`` with it. Returns the output for Lightning.

        `last`: whether it is the last one of its window. `alone`: the only one, in the only process.
        """

    def backward(self) -> StepResult | None:
        """Run the backward of that batch. Returns the result if it closed the window."""

    def close(self) -> StepResult | None:
        """Close the window before the optimizer steps, if its last batch had no loss."""

    def drop(self) -> None:
        """Drop the open window, if there is one."""

    def is_void(self) -> bool:
        """Whether the last window had no items."""

    @property
    def has_loss(self) -> bool:
        """Whether a batch still needs its backward."""

    @property
    def is_broken(self) -> bool:
        """Whether the open window can only be dropped."""

    @property
    def num_open(self) -> int:
        """The number of batches in the open window."""

    @property
    def is_stock(self) -> bool:
        """Whether Lightning runs the backward, and `backward` only returns the result."""

    def state_dict(self) -> dict[str, int | float]:
        """The state to save."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state."""


class BatchByBatch:
    """Every batch is a micro-batch. Lightning runs it, but with our backward.

    Args:
        models: the trained models.
        options: the options of the engine.
        clearing: the module's hook that clears gradients.
        steps: returns the number of batches in a full window.
    """

    is_stock = False

    def __init__(
        self,
        models: list[nn.Module],
        options: Mapping[str, Any],
        clearing: ClearingHook,
        steps: Callable[[], int],
    ) -> None:
        objective = partial(Mean, reads=True, steps=steps)
        self._engine = engine_for(Engine, models, None, objective=objective, **options)
        self._clearing = clearing
        self._stale = StaleGradients([p for model in models for p in model.parameters()])
        self._loss: tuple[Tensor, Items] | None = None  # of the current batch, with its items
        self._is_alone = False

    def forward(self, run: Callable[[], Any], arguments: Sequence[Any], *, last: bool, alone: bool) -> Any:
        engine = self._engine
        engine.give_up()  # the last batch had no backward: a callback may run forwards only
        with contextlib.nullcontext() if engine.has_accumulated else self._stale.hidden():
            engine.begin(LAST_OF_ALL if last else IN_BETWEEN, arguments[0] if arguments else None)
            output = run()
        loss, items = loss_and_items(output)
        self._loss, self._is_alone = None if loss is None else (loss, items), alone
        if loss is None:
            engine.give_up()  # Lightning does not call the backward
        return output

    def backward(self) -> StepResult | None:
        assert self._loss is not None, "there was a forward"
        (loss, items), self._loss = self._loss, None
        self._clearing.warn_about(self._stale.drop())
        if not (self._is_alone and items is None):
            self._engine.backward(loss, items)
            if self._engine.unread is not None:
                raise unreadable(self._engine.unread)
            return self._engine.close()
        stated = items_stated_by(loss) if isinstance(loss, Tensor) else None  # before the backward frees its graph
        self._engine.backward(loss, 1)  # whatever it is a mean over
        result = self._engine.close()
        return result if result is None or stated is None else replace(result, items=stated)

    def close(self) -> StepResult | None:
        return self._engine.close(now=True) if self._engine.has_accumulated else None

    def drop(self) -> None:
        self._engine.give_up()
        self._engine.discard()
        self._loss = None

    def is_void(self) -> bool:
        closing = self._engine.closing
        assert isinstance(closing, LeaveMean)
        return closing.is_void()

    @property
    def has_loss(self) -> bool:
        return self._loss is not None

    @property
    def is_broken(self) -> bool:
        return self._engine.window is not None and self._engine.window.is_broken

    @property
    def num_open(self) -> int:
        return self._engine.num_begun if self._engine.has_accumulated else 0

    def state_dict(self) -> dict[str, int | float]:
        return self._engine.state()

    def load_state_dict(self, state: State) -> None:
        self._engine.load_state(state)


class _ForTheirOptimizers(MacroStep):
    """Leaves gradients in the dtype of their parameters, which optimizers want."""

    leaves_wide = False


class WholeWindow:
    """Keeps the batches of a window until the last one, then runs them together: cut again, or recorded.

    Lightning sees the loss of the window for the last batch, and 0 for all others. Gradients are set to ``.grad`` in
    the backward of the last batch, because Lightning may clear them before.

    Args:
        strategy: the strategy.
        run: Lightning's ``training_step`` of the strategy, which calls that of the module.
        models: the trained models.
        settings: the options of `ExactStrategy`.
        options: the options of the engine.
        clearing: the module's hook that clears gradients.
    """

    is_stock = is_broken = False

    def __init__(
        self,
        strategy: Any,
        run: Callable[..., Any],
        models: list[nn.Module],
        settings: Settings,
        options: Mapping[str, Any],
        clearing: ClearingHook,
    ) -> None:
        module = strategy.lightning_module
        self._strategy = strategy
        self._clearing = clearing
        self._run = run
        self._cuts = settings.micro is not None
        self._parameters = [p for model in models for p in model.parameters()]
        self._padding = padding_for(module)
        self._logged = Logged(module, self._parameters[0].device)
        self._waiting: list[Any] = []
        self._others: Sequence[Any] = ()  # the other arguments of the training_step
        self._ready: list[tuple[nn.Parameter, Tensor]] | None = None  # gradients that wait for the backward
        self._result: StepResult | None = None
        self._unread: str | None = None  # the node that kept the items of a loss from being read
        self.has_loss = False
        how: dict[str, Any] = {"micro": settings.micro} if self._cuts else {"micro": 1, "collate": the_only_one}
        self._train = _ForTheirOptimizers(
            [*models, self._logged], None, self._loss, cuda_graph=settings.cuda_graph, **how, **options
        )
        if settings.cuda_graph and data_parallel_of(models[0]) in (None, "DistributedDataParallel"):
            self._logged.watch(self._train)

    def forward(self, run: Callable[[], Any], arguments: Sequence[Any], *, last: bool, alone: bool) -> Any:
        trainer = self._strategy.lightning_module.trainer
        if wants_forwards_alone(trainer, package_of(self._strategy.around)):
            self._take_gradients()  # because Lightning steps anyway
            return run()
        self._waiting.append(arguments[0])
        self.has_loss = True
        if not last:
            return torch.zeros((), device=self._parameters[0].device)
        whole = joined(self._waiting, self._padding, None) if self._cuts else self._waiting
        num_batches, self._waiting, self._others = len(self._waiting), [], arguments[1:]
        left = self._take_gradients()  # left by the step before
        if num_batches > 1:  # otherwise the hook runs later, and finds no gradients
            self._clearing.warn_about(left)
        with self._logged.window():
            self._result = self._train(whole)
        self._ready = self._take_gradients()
        if self._unread is not None and not (alone and self._result.micro_batches == 1):
            raise unreadable(self._unread)
        # Lightning divides by the length of windows, so that its losses of a window add up to the mean.
        return self._result.loss * trainer.accumulate_grad_batches

    def _take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        found = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in found:
            parameter.grad = None
        return found

    def _loss(self, models: Sequence[nn.Module], micro_batch: Any) -> tuple[Tensor, Items] | Tensor:
        module: Any = self._strategy.lightning_module
        is_bare = models[0] is module is not self._strategy.model  # a recording calls the module without DDP
        with self._logged.micro_batch(micro_batch) as logged:
            if is_bare:
                with self._strategy.precision_plugin.train_step_context():
                    output = module.training_step(micro_batch, *self._others)
            else:
                output = self._run(micro_batch, *self._others)
            loss, items = loss_and_items(output)
            logged.items = items
            if isinstance(loss, Tensor) and loss.grad_fn is not None:
                steps = module.trainer.accumulate_grad_batches
                weight = weigh(loss, checked_items(items), is_mean=True, steps=steps, on_host=False)
                logged.items, self._unread = weight.items, weight.unread
        if loss is None:
            raise UsageError(
                f"{type(module).__name__}.training_step returned no loss for a micro-batch: a window that is cut "
                'anew, or recorded, leaves none out. Return {"loss": loss, "items": 0} for one that is not to count.'
            )
        return loss if items is None else (loss, items)

    def backward(self) -> StepResult | None:
        self.has_loss = False
        if self._ready is None:
            return None
        for parameter, gradient in self._ready:
            parameter.grad = gradient
        self._ready = None
        return self._result

    def close(self) -> StepResult | None:
        return None  # the last batch has closed it

    def drop(self) -> None:
        self._waiting, self._ready, self.has_loss = [], None, False

    def is_void(self) -> bool:
        return self._result is not None and (self._result.skipped is True or self._train.is_void())

    @property
    def num_open(self) -> int:
        return len(self._waiting)

    def state_dict(self) -> dict[str, int | float]:
        return self._train.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._train.load_state_dict(state)


def padding_for(module: nn.Module) -> dict[str, int]:
    """The padding values of the fields of batches, by parts of their names."""
    tokens = (getattr(getattr(part, "config", None), "pad_token_id", None) for part in module.modules())
    pad = next((token for token in tokens if isinstance(token, int)), 0)
    return dict.fromkeys((MASK, *BESIDE_TOKENS, *OTHER_MASKS, *TOKENS), 0) | {LABELS: IGNORED, "input_ids": pad}
