"""`ExactStrategy`: a strategy of Lightning with exact gradient accumulation.

The Trainer counts batches, steps, schedules and logs as it does with ``accumulate_grad_batches``, which is set while it
fits. Only the backward differs: the engine in `_engine` adds up the gradients, and divides them in the last batch of a
window by the number of its items, before Lightning clips and steps. Where each batch is a step of its own, in one
process, nothing differs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from macrobatch._border.arguments import checked_dtype, checked_switch
from macrobatch._cut.fitting import checked_micro
from macrobatch._cut.policies import Policy
from macrobatch._torch.contract import warn_about_unknown_torch
from macrobatch._torch.modules import data_parallel_of
from macrobatch.errors import UsageError
from macrobatch.lightning.choosing import LATE, choose_strategy, find_strategy, package_of
from macrobatch.lightning.ends import LoaderEnds
from macrobatch.lightning.gradients import ClearingHook, require_own, trained_modules
from macrobatch.lightning.schedule import (
    Steps,
    checked_schedule,
    require_no_other,
    steps_in_epoch,
    tell_trainer,
)
from macrobatch.lightning.stock import AsStock
from macrobatch.lightning.windows import BatchByBatch, Settings, WholeWindow, Windows
from macrobatch.lightning.words import in_words_of_lightning
from macrobatch.types import StepResult

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object  # the base class is that of the strategy that `ExactStrategy` extends

SAVED_AS = "macrobatch"  # in checkpoints


class ExactStrategy(Strategy):  # type: ignore[misc]
    """A strategy for Lightning's `Trainer` that accumulates gradients exactly.

    Each optimizer step has the gradient that its batches, a *window*, would have as one big batch on all ranks.

    >>> from lightning.pytorch import Trainer
    >>> from lightning.pytorch.strategies import DDPStrategy
    >>> from macrobatch.lightning import ExactStrategy
    >>> strategy = ExactStrategy("ddp", steps=8)
    >>> isinstance(strategy, DDPStrategy)
    True

    ``Trainer(strategy=strategy)`` then takes one optimizer step for every 8 batches. Your ``training_step`` returns the
    loss, a mean over its items, such as samples or tokens: every item of the window has the same weight, on all ranks.
    Their number is read from the graph of the loss. If it cannot be read, an error in the first window says so: return
    ``{"loss": loss, "items": items}``. With ``steps=1`` in one process, every loss is exact, and nothing is read.

    Args:
        strategy: the strategy of Lightning to extend: a name that `Trainer` accepts, "fsdp2" (a ModelParallelStrategy
            whose devices are all data-parallel), or a `Strategy` object, which is copied. It decides on processes,
            devices, precision and checkpoints.
        steps: the number of batches in a window, or a schedule ``{epoch: steps}`` as in Lightning's
            GradientAccumulationScheduler. The last window of an epoch may be shorter; it gets the right divisor.
        micro: how to cut the samples of a window into micro-batches: a number of samples, `by_count`, `by_tokens`, or
            "auto" for the largest number of samples that fits into memory. All batches of a window are then kept until
            its last one. Default: each batch is a micro-batch.
        cuda_graph: record the forward and backward of a micro-batch as a CUDA graph, once for each shape, and replay
            it. This helps if micro-batches are so small that the GPU waits for Python.
        accumulate_dtype: the dtype in which gradients are summed, e.g. ``torch.float32`` for bfloat16 weights. Default:
            gradients keep their own dtype.

    Attributes:
        result: the `StepResult` of the last window, e.g. ``result.loss``, its mean loss on all ranks; None before the
            first window.
        steps: the argument ``steps``.
        settings: the arguments ``micro``, ``cuda_graph`` and ``accumulate_dtype``.

    Raises:
        UsageError: ``steps`` or ``micro`` is invalid, or the strategy is unknown.
        BackendError: the strategy does not give access to its gradients: DeepSpeed, XLA, and the first FSDP.
    """

    around: type  # the class of the strategy that it extends

    def __new__(cls, strategy: Any = "auto", **_: Any) -> ExactStrategy:
        found = find_strategy(strategy)
        made = _make_bare(found.around if isinstance(found, ExactStrategy) else type(found))
        made.__dict__.update(vars(found))
        return made

    def __init__(
        self,
        strategy: Any = "auto",
        *,
        steps: Steps = 1,
        micro: int | Policy | Literal["auto"] | None = None,
        cuda_graph: bool = False,
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        warn_about_unknown_torch()
        if micro is not None:
            checked_micro(micro)
        self.result: StepResult | None = None
        self.steps = checked_schedule(steps)
        self.settings = Settings(micro, checked_switch("cuda_graph", cuda_graph), checked_dtype(accumulate_dtype))
        self._late = strategy.lower() if isinstance(strategy, str) and strategy.lower() in LATE else None
        self._forget_fit()

    def _forget_fit(self) -> None:
        """Set what exists only while a Trainer fits."""
        self._windows: Windows | None = None  # with automatic optimization
        self._make_windows: Callable[[], Windows] | None = None  # as soon as a parameter requires a gradient
        self._saved: Mapping[str, int | float] | None = None  # state from a checkpoint, until there are windows
        self._ends: LoaderEnds | None = None
        self._num_losses = 0  # how often the loss of the current batch was computed
        self._told = contextlib.ExitStack()  # restores the settings of the Trainer

    def __reduce__(self) -> tuple[Any, ...]:
        copied = _make_bare(self.around)  # a copy, of a callback in a hook for example, takes part in no fit
        copied.__dict__.update(vars(self))
        copied._forget_fit()
        return _make_bare, (self.around,), copied.__getstate__()

    # ------------------------------------------------------------------------------------------ one micro-batch

    @in_words_of_lightning()
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a micro-batch and run its forward; or keep the batch until the last one of the window."""
        run = functools.partial(super().training_step, *args, **kwargs)
        if (windows := self._windows) is None:
            return run()
        is_first, is_last = self._is_at_first_batch(), self._is_at_last_batch()
        self._num_losses += 1
        if self._num_losses > 1 and not (is_first and is_last):
            raise self._computed_again()
        if windows.is_broken or (windows.num_open and is_first):
            windows.drop()  # the loop has left the window before its last batch
        alone = is_first and is_last and self.lightning_module.trainer.world_size == 1
        return windows.forward(run, args, last=is_last, alone=alone)

    @in_words_of_lightning()
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the gradient of the micro-batch. In the last one of a window, ``.grad`` becomes the mean.

        Hooks see the loss as in Lightning: divided by ``accumulate_grad_batches``, and scaled.
        """
        windows = self._windows
        if windows is None or not windows.has_loss:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if windows.is_stock:
            self.result = windows.backward()
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        shown = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.result = windows.backward() or self.result
        shown = self.precision_plugin.post_backward(shown, self.lightning_module)
        self.post_backward(shown)
        return shown

    @in_words_of_lightning()
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's own step. It closes the window after the closure has run; without items no step is taken."""
        if (windows := self._windows) is None:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

        def close() -> Any:
            loss = closure()
            self.result = windows.close() or self.result
            if not windows.is_void():
                return loss
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            return None  # None, so that a scaler does not step either

        return super().optimizer_step(optimizer, close, *args, **kwargs)

    def _computed_again(self) -> UsageError:
        """The error for a batch whose closure is called a second time: the others of its window are gone."""
        module, base = self.lightning_module, self._package.LightningModule
        has_own = type(module).optimizer_step is not base.optimizer_step
        who = f"{type(module).__name__}.optimizer_step" if has_own else type(self.optimizers[0]).__name__
        return UsageError(
            f"{who} computes the loss several times in one step (it calls its closure again), but the other batches of "
            "the window are there once only. Use steps=1 with it. For larger batches, set "
            "automatic_optimization=False, and compute the gradient with macrobatch.MacroStep(model, None, loss_fn), "
            "which may run several times on the same batch."
        )

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context. Under automatic optimization it does nothing: the engine delays the exchange of gradients."""
        with contextlib.nullcontext() if self._windows is not None else super().block_backward_sync():
            yield

    def _is_at_last_batch(self) -> bool:
        """Whether the optimizer steps after the current batch."""
        trainer = self.lightning_module.trainer
        ready = trainer.fit_loop.batch_idx + 1
        is_full = ready % trainer.accumulate_grad_batches == 0
        return bool(is_full or trainer.is_last_batch or ready == trainer.num_training_batches)

    def _is_at_first_batch(self) -> bool:
        trainer = self.lightning_module.trainer
        return bool(trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0)

    # ------------------------------------------------------------------------------------------ one fit

    def connect(self, model: Any) -> None:
        """Lightning's `connect`. It also sets the length of windows in the Trainer."""
        super().connect(model)
        try:
            trainer = model.trainer
        except RuntimeError:  # it has none: somebody wants to save it, for example
            return
        if trainer.state.fn == "fit":
            self._check(trainer, model)
        if model.automatic_optimization and trainer.state.fn == "fit":
            self._told.enter_context(tell_trainer(trainer, self.steps, package_of(self.around)))
        elif model.automatic_optimization:
            trainer.accumulate_grad_batches = steps_in_epoch(self.steps, trainer.current_epoch)

    @in_words_of_lightning()
    def setup(self, trainer: Any) -> None:
        """Lightning's `setup`. It also makes the engine, for the model as it is trained."""
        super().setup(trainer)
        if trainer.state.fn != "fit" or not self.lightning_module.automatic_optimization:
            return
        require_no_other(trainer, package_of(self.around))  # a module may have added callbacks
        self.result = None
        if self._is_stock(trainer):
            self._windows = AsStock(trainer, package_of(self.around))
            return
        self._require_no_own_backward()
        models = trained_modules(self.model)
        parameters = [p for model in models for p in model.parameters()]
        require_own(self.optimizers, parameters)
        self._make_windows = functools.partial(self._windows_for, trainer, models, super().training_step)
        if any(parameter.requires_grad for parameter in parameters):  # a callback may unfreeze them later
            self._begin_windows()

    def _is_stock(self, trainer: Any) -> bool:
        """Whether each batch is a step of its own, in one process. Then Lightning is exact already."""
        return self._longest == 1 and not self.settings.keeps and trainer.world_size == 1

    def _windows_for(self, trainer: Any, models: list[Any], run: Callable[..., Any]) -> Windows:
        mesh = getattr(self, "device_mesh", None)
        shares = mesh is not None and data_parallel_of(models[0]) is None  # only tensor parallelism shards the model
        options = {
            "scaler": getattr(self.precision_plugin, "scaler", None),
            "process_group": mesh["data_parallel"] if mesh is not None and shares else None,
            "accumulate_dtype": self.settings.accumulate_dtype,
        }
        clearing = ClearingHook(self.lightning_module, self._package.LightningModule, self.optimizers)
        if self.settings.keeps:
            return WholeWindow(self, run, models, self.settings, options, clearing)
        return BatchByBatch(models, options, clearing, lambda: int(trainer.accumulate_grad_batches))

    def _begin_windows(self) -> None:
        assert self._make_windows is not None
        self._windows, self._make_windows = self._make_windows(), None
        if self._saved is not None:
            self._windows.load_state_dict(self._saved)

    def on_train_start(self) -> None:
        """Lightning's `on_train_start`. It raises an error if ranks would wait for each other forever."""
        super().on_train_start()
        if self._windows is not None and self._saved is not None:
            self._windows.load_state_dict(self._saved)
        trainer = self.lightning_module.trainer
        if trainer.world_size > 1 and (self._windows is not None or self._make_windows is not None):
            self._ends = LoaderEnds(self, trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Lightning's `on_train_batch_start`. It raises an error if loaders without a length end on some ranks only."""
        super().on_train_batch_start(batch, batch_idx)
        self._num_losses = 0
        if self._make_windows is not None:
            self._begin_windows()
        if self._ends is not None:
            self._ends.exchange(ends=self.lightning_module.trainer.is_last_batch)

    def teardown(self) -> None:
        """Lightning's `teardown`. It also restores the settings of the Trainer."""
        self._told.close()
        if self._windows is not None:
            self._windows.drop()
        self._forget_fit()
        super().teardown()

    @property
    def _longest(self) -> int:
        """The most batches that a window has."""
        return self.steps if isinstance(self.steps, int) else max(self.steps.values())

    @property
    def _package(self) -> Any:
        """The package of Lightning that the program uses."""
        return importlib.import_module(package_of(self.around))

    def _check(self, trainer: Any, model: Any) -> None:
        """Raise an error for settings that cannot be exact."""
        package = package_of(self.around)
        lengths = {self.steps} if isinstance(self.steps, int) else set(self.steps.values())
        if trainer.accumulate_grad_batches not in {1, *lengths}:  # an earlier fit has left one of those
            raise UsageError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) beside ExactStrategy: leave it "
                f"out, and make the strategy with steps={trainer.accumulate_grad_batches}."
            )
        require_no_other(trainer, package)
        if not model.automatic_optimization:
            if self._longest > 1 or self.settings != Settings():
                raise UsageError(
                    f"ExactStrategy(steps={self.steps}) with automatic_optimization=False: a module that steps by "
                    "itself decides where its windows end. Make a macrobatch.Accumulator for each of its optimizers, "
                    "and leave ExactStrategy out."
                )
            return
        counts_batches = self._longest > 1 or self.settings.keeps
        if not (counts_batches and callable(model.training_step)):  # without one, Lightning says so
            return
        if "dataloader_iter" in inspect.signature(model.training_step).parameters:
            raise UsageError(
                f"{type(model).__name__}.training_step takes a dataloader_iter, so the Trainer cannot tell where its "
                "windows begin and end. Let it take a batch, or use steps=1 without micro= and cuda_graph=."
            )

    def _require_no_own_backward(self) -> None:
        """Raise an error if the module or the precision plugin runs the backward itself."""
        plugins = importlib.import_module(f"{package_of(self.around)}.plugins.precision")
        pairs = ((self.lightning_module, self._package.LightningModule), (self.precision_plugin, plugins.Precision))
        for owner, kind in pairs:
            if type(owner).backward is not kind.backward:
                raise UsageError(
                    f"{type(owner).__name__} has a backward() of its own, which ExactStrategy does not call: it runs "
                    "the backward itself, to scale it. Leave it out; on_after_backward() can look at gradients. (With "
                    "steps=1 in one process, it is called.)"
                )

    # ------------------------------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Lightning's `save_checkpoint`, with the engine's state. It warns inside a window: gradients are not saved."""
        windows = self._windows
        if windows is None or "optimizer_states" not in checkpoint:  # of weights only
            pass
        elif windows.num_open:
            warnings.warn(
                f"a checkpoint inside a window: the gradients of its first {windows.num_open} micro-batches are not "
                "saved, so a run that resumes here makes its first step of the others alone. Save where windows end, "
                "e.g. with ModelCheckpoint(every_n_train_steps=...).",
                stacklevel=2,
            )
        else:
            checkpoint = checkpoint | {SAVED_AS: windows.state_dict()}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's `load_checkpoint`. It also keeps the engine's state, which hooks do not see."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._saved = checkpoint.pop(SAVED_AS, None)
        return checkpoint

    # ----------------------------------------------------------------------------------- strategies given by name

    def _configure_launcher(self) -> None:
        """Replace a strategy that was only a name. By now the Trainer has set devices, nodes and plugins."""
        if self._late is not None:
            chosen = ExactStrategy(choose_strategy(self, self._late), steps=self.steps, **vars(self.settings))
            self.__dict__.clear()
            self.__dict__.update(vars(chosen))
            self.__class__ = type(chosen)
        super()._configure_launcher()


@functools.cache
def _exact(around: Any) -> Any:
    """The class of exact strategies that extend this class."""
    attributes = {"around": around, "__module__": __name__, "__doc__": ExactStrategy.__doc__}
    return type(f"Exact{around.__name__}", (ExactStrategy, around), attributes)


def _make_bare(around: type) -> ExactStrategy:
    """An object without attributes, which a copy or a pickle then sets."""
    made: ExactStrategy = object.__new__(_exact(around))
    return made
