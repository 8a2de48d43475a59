"""A module of Lightning as `verify` wants it: a model, a loss, a batch, and a step that does what its Trainer does."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._cut.joining import joined
from macrobatch._cut.plans import Part
from macrobatch._cut.samples import samples_of
from macrobatch._step.snapshot import Snapshot
from macrobatch.errors import UsageError
from macrobatch.lightning.schedule import steps_in_epoch
from macrobatch.lightning.strategy import ExactStrategy
from macrobatch.lightning.windows import BatchByBatch, loss_and_items, padding_for
from macrobatch.macrostep import MacroStep
from macrobatch.types import Items

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
Run = Callable[[Any, int], Any]


def is_of_lightning(given: object) -> bool:
    """Whether it is a Trainer or a module of Lightning."""
    return any(isinstance(given, package.Trainer | package.LightningModule) for package in _packages())


def _packages() -> list[Any]:
    return [sys.modules[name] for name in PACKAGES if name in sys.modules]


def case_of(given: Any) -> dict[str, Any]:
    """The arguments of `verify` for a Trainer with its module, or a module with its Trainer: its first window.

    Raises:
        UsageError: one of them, or the data, is missing; or the module steps by itself.
    """
    module = given if isinstance(given, nn.Module) else _module_of(given)
    trainer = _trainer_of(module) if given is module else given
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} steps by itself (automatic_optimization=False): hand its loop to verify, "
            "verify(model, loss_fn, batch, step=...)."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError("a Trainer can be verified in one process only: call verify where there is no other rank.")
    strategy = trainer.strategy
    is_exact = isinstance(strategy, ExactStrategy)
    steps = steps_in_epoch(strategy.steps, 0) if is_exact else trainer.accumulate_grad_batches
    batches = _first_batches(trainer, module, steps)
    run = _training_step(trainer, module)
    sizes = [samples_of(batch).count for batch in batches]

    def loss_fn(_: nn.Module, batch: Any) -> tuple[Tensor, Items] | Tensor:
        loss, items = loss_and_items(run(batch, 0))
        return loss if items is None else (loss, items)

    def step(model: nn.Module, batch: Any) -> None:
        model.zero_grad()  # as Lightning does in a window's first batch
        if is_exact and strategy.settings.micro is not None:
            options = {"micro": strategy.settings.micro, "accumulate_dtype": strategy.settings.accumulate_dtype}
            MacroStep(model, None, loss_fn, **options)(batch)
            return
        samples, starts = samples_of(batch), [sum(sizes[:index]) for index in range(len(sizes))]
        parts = [Part(range(at, at + size)) for at, size in zip(starts, sizes, strict=True)]
        window = [samples.take(part) for part in parts]
        if is_exact:
            _run_exactly(BatchByBatch([model], {"accumulate_dtype": strategy.settings.accumulate_dtype}), run, window)
        else:
            for index, micro_batch in enumerate(window):
                (loss_and_items(run(micro_batch, index))[0] / steps).backward()

    return {"model": module, "loss_fn": loss_fn, "batch": joined(batches, padding_for(module), None), "step": step}


def _run_exactly(windows: BatchByBatch, run: Run, batches: list[Any]) -> None:
    """What an `ExactStrategy` does with the batches of a window."""
    for index, batch in enumerate(batches):
        windows.forward(partial(run, batch, index), (batch,), last=index == len(batches) - 1)
        windows.backward()


def _module_of(trainer: Any) -> Any:
    module = trainer.lightning_module
    if module is None:
        raise UsageError(
            "this Trainer has no module yet. Call verify(trainer) after trainer.fit(module), or before that "
            "`module.trainer = trainer` and verify(module)."
        )
    return module


def _trainer_of(module: Any) -> Any:
    try:
        return module.trainer
    except RuntimeError:
        pass
    raise UsageError(
        f"{type(module).__name__} has no Trainer, which decides how its batches are accumulated. Attach one, "
        "`module.trainer = trainer`, and call verify(module) again."
    )


def _training_step(trainer: Any, module: Any) -> Run:
    """``training_step(batch, batch_idx)`` in the Trainer's precision; what it logs goes nowhere."""
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def run(batch: Any, index: int) -> Any:
        with _without_log(module), trainer.precision_plugin.train_step_context():
            output = module.training_step(batch, index) if takes_index else module.training_step(batch)
        if loss_and_items(output)[0] is None:
            raise UsageError(f"{type(module).__name__}.training_step returned no loss, so there is nothing to verify.")
        return output

    return run


@contextlib.contextmanager
def _without_log(module: Any) -> Iterator[None]:
    module.log = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log


def _first_batches(trainer: Any, module: Any, steps: int) -> list[Any]:
    """The first window, on the device of the module, as the Trainer hands it over."""
    before = Snapshot([module])
    try:
        batches = [batch for _, batch in zip(range(steps), _loader_of(trainer, module), strict=False)]
    finally:
        before.restore()
    if not batches:
        raise UsageError(f"the training data of {type(module).__name__} has no batch, so there is no window to verify.")
    return [_handed_over(trainer, module, batch) for batch in batches]


def _handed_over(trainer: Any, module: Any, batch: Any) -> Any:
    batch = module.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
    return module.on_after_batch_transfer(module.transfer_batch_to_device(batch, module.device, 0), 0)


def _loader_of(trainer: Any, module: Any) -> Any:
    loader = trainer.train_dataloader  # that of the last fit
    if loader is None:
        bases = [package.LightningModule.train_dataloader for package in _packages()]
        owners = [owner for owner in (trainer.datamodule, module) if owner is not None]
        makers = [
            owner.train_dataloader for owner in owners if getattr(owner.train_dataloader, "__func__", None) not in bases
        ]
        if not makers:
            raise UsageError(
                f"{type(module).__name__} has no training data: define its train_dataloader(), or call verify(trainer) "
                "after trainer.fit(module, loader)."
            )
        loader = makers[0]()
    if isinstance(loader, Mapping | list | tuple):
        raise UsageError(
            f"{type(module).__name__} trains on several loaders at once, of which verify cannot make one big batch: "
            "hand over what it needs, verify(model, loss_fn, batch, step=...)."
        )
    return loader
