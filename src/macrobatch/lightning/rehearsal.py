"""A fit of a Trainer that stops before its first window, and can run that window several times.

Everything up to there is Lightning's own: ``trainer.fit`` with the loop of `_loop_class`. Afterwards, the Trainer is
restored.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from macrobatch.errors import UsageError
from macrobatch.lightning import private
from macrobatch.lightning.choosing import package_of
from macrobatch.lightning.strategy import ExactStrategy

# These callbacks are left out, because they write files, print, or run fits of their own.
LEFT_OUT = ("Checkpoint", "ProgressBar", "ModelSummary", "LearningRateFinder", "BatchSizeFinder")
SEVERAL = (
    "{cls} was run on one of its {ranks} ranks, with the first batches of the whole loader: what the ranks do with "
    "each other's gradients was not compared"
)
UNRECORDED = "micro-steps were not recorded (cuda_graph=True)"
UNCLIPPED = "gradients were compared before they are clipped (gradient_clip_val={value})"


class Batches:
    """Passes batches to Lightning's loop, as its own fetchers do. `ends`: whether no batch comes after them."""

    def __init__(self, batches: Sequence[Any], *, ends: bool) -> None:
        self.fetched, self.done = 0, False
        self._batches, self._ends = batches, ends

    def __next__(self) -> tuple[Any, int, int]:
        if self.fetched == len(self._batches):
            raise StopIteration
        self.fetched += 1
        self.done = self._ends and self.fetched == len(self._batches)
        return self._batches[self.fetched - 1], self.fetched - 1, 0


class Rehearsal:
    """A Trainer with its module, before its first window.

    Args:
        trainer: the Trainer. It is restored after `at_first_window`.
        module: the module. It stays as the fit leaves it.

    Attributes:
        notes: how the fit differs from a regular one of the Trainer.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer
        self.module = module
        self.notes: list[str] = []
        self._package = package_of(type(trainer.strategy))
        self._ends = False  # whether the epoch ends with the window

    def at_first_window(self, act: Callable[[Sequence[Any]], None]) -> None:
        """Run a fit, and call `act` with the batches of the first window when the Trainer is about to run it."""
        advice = importlib.import_module(f"{self._package}.utilities.warnings").PossibleUserWarning
        loader = private.given_loader(self.trainer)
        with self._restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore", advice)  # on workers, logs, validation: a regular fit repeats it
            make_loop = _loop_class(type(self.trainer.fit_loop))
            self.trainer.fit_loop = make_loop(self.trainer.fit_loop, lambda: act(self._first_batches()))
            if self.trainer.datamodule is not None:
                self.trainer.fit(self.module, datamodule=self.trainer.datamodule)
            else:
                self.trainer.fit(self.module, loader)

    def run(self, batches: Sequence[Any]) -> None:
        """Run the window with these batches in place of its own: with all hooks, up to the optimizer step."""
        callbacks = self.trainer.callbacks
        self.trainer.callbacks = self._copies(callbacks)
        unchanged = dict.fromkeys(private.TRANSFERS, lambda batch, *_, **__: batch)  # batches are transferred already
        vars(self.module).update(unchanged)
        try:
            self.trainer.fit_loop.run_batches(Batches(batches, ends=self._ends))
        finally:
            self.trainer.callbacks = callbacks
            for name in unchanged:
                vars(self.module).pop(name, None)

    def _first_batches(self) -> list[Any]:
        """The batches of the first window, on the device, as the Trainer passes them."""
        trainer, fetcher = self.trainer, private.fetcher_of(self.trainer.fit_loop)
        if len(fetcher.combined_loader.flattened) > 1:
            raise UsageError(
                f"{type(self.module).__name__} trains on several loaders at once, of which verify cannot make one big "
                "batch: pass what it needs, verify(model, loss_fn, batch, step=...)."
            )
        found: list[Any] = []
        while len(found) < trainer.accumulate_grad_batches and not fetcher.done:
            batch, *_ = next(fetcher)
            found.append(private.transferred(trainer, self.module, batch))
        self._ends = fetcher.done
        return found

    # --------------------------------------------------------------------------------- restoring the Trainer

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """A context in which parts of the Trainer may be changed. Afterwards they are restored."""
        trainer, connector = self.trainer, private.connector_of(self.trainer)
        owners = [trainer] if trainer.datamodule is None else [trainer, trainer.datamodule]
        before, strategy = [dict(vars(owner)) for owner in owners], connector.strategy
        package = importlib.import_module(self._package)
        loggers = importlib.import_module(f"{self._package}.loggers.logger")
        left_out = tuple(getattr(package.callbacks, name) for name in LEFT_OUT)
        try:
            connector.strategy = self._alone(strategy)
            trainer.state = copy.copy(trainer.state)
            private.forget_logged(trainer)
            trainer.loggers = [loggers.DummyLogger() for _ in trainer.loggers]
            trainer.profiler = package.profilers.PassThroughProfiler()
            trainer.callbacks = self._copies([each for each in trainer.callbacks if not isinstance(each, left_out)])
            trainer.limit_val_batches = 0
            trainer.num_sanity_val_steps = 0
            if trainer.gradient_clip_val and not self._overrides("configure_gradient_clipping"):
                self.notes.append(UNCLIPPED.format(value=trainer.gradient_clip_val))
                trainer.gradient_clip_val = None
            yield
        finally:
            connector.strategy = strategy
            for owner, attributes in zip(owners, before, strict=True):
                vars(owner).clear()
                vars(owner).update(attributes)

    def _overrides(self, hook: str) -> bool:
        """Whether the module overrides a hook."""
        base = importlib.import_module(self._package).LightningModule
        return getattr(type(self.module), hook) is not getattr(base, hook)

    def _copies(self, callbacks: Sequence[Any]) -> list[Any]:
        """Copies of callbacks with their states. A callback that cannot be copied is used itself."""
        found = []
        for callback in callbacks:
            shared = {id(each): each for each in (self.trainer, self.module, self.trainer.datamodule)}
            try:
                found.append(copy.deepcopy(callback, shared))
            except Exception:  # e.g. it holds a file or a lock
                found.append(callback)
        return found

    def _alone(self, strategy: Any) -> Any:
        """A strategy that does the same in this process only."""
        strategies = importlib.import_module(f"{self._package}.strategies")
        is_exact = isinstance(strategy, ExactStrategy)
        if is_exact and strategy.settings.cuda_graph:
            self.notes.append(UNRECORDED)
        kind = strategy.around if is_exact else type(strategy)
        precision = copy.deepcopy(strategy.precision_plugin)  # a scaler's scale changes
        if issubclass(kind, strategies.SingleDeviceStrategy):
            alone = copy.copy(strategy)
            alone.precision_plugin = precision
            if is_exact:
                alone.settings = replace(strategy.settings, cuda_graph=False)
            return alone
        if issubclass(kind, strategies.ModelParallelStrategy) and self._overrides("configure_model"):
            raise UsageError(
                f"{type(self.module).__name__}.configure_model() shards the model over processes, but verify(trainer) "
                "runs in one. Call verify(model, loss_fn, batch, step=...) under torchrun, with the sharded model."
            )
        if strategy.world_size > 1 or self.trainer.num_devices > 1:
            ranks = max(strategy.world_size, self.trainer.num_devices * self.trainer.num_nodes)
            self.notes.append(SEVERAL.format(cls="the Trainer", ranks=ranks))
        device = {"device": strategy.root_device, "accelerator": strategy.accelerator}
        alone = strategies.SingleDeviceStrategy(**device, precision_plugin=precision)
        if not is_exact:
            return alone
        return ExactStrategy(alone, steps=strategy.steps, **vars(replace(strategy.settings, cuda_graph=False)))


def _loop_class(kind: Any) -> Any:
    class RehearsingLoop(kind):  # type: ignore[misc]
        """Lightning's loop, up to the first batch; then it calls `act`."""

        def __init__(self, own: Any, act: Callable[[], None]) -> None:
            super().__init__(own.trainer, own.min_epochs, own.max_epochs)
            self._own, self._act = own, act
            self._renew_epoch_loop()

        def run(self) -> None:
            self.setup_data()
            if self.skip:
                raise UsageError(
                    "the Trainer has no batch to train on, so there is no window to verify. Look at its data, "
                    "limit_train_batches, max_steps and max_epochs."
                )
            self.reset()
            self.on_run_start()
            self.on_advance_start()
            self._act()

        def run_batches(self, batches: Batches) -> None:
            self._renew_epoch_loop()
            self.epoch_loop.run(batches)

        def _renew_epoch_loop(self) -> None:
            self.epoch_loop: Any = type(self._own.epoch_loop)(self.trainer, self._own.min_steps, self._own.max_steps)

    return RehearsingLoop
