"""A module of Lightning as `verify` wants it: a model, a loss, a batch, and a step that its Trainer does."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._cut.joining import joined
from macrobatch._cut.plans import Part
from macrobatch._cut.samples import samples_of
from macrobatch.errors import UsageError
from macrobatch.lightning import private
from macrobatch.lightning.outputs import loss_and_items
from macrobatch.lightning.rehearsal import Rehearsal
from macrobatch.lightning.windows import padding_for
from macrobatch.types import Items

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class Verify(Protocol):
    """`verify`, of what a Trainer does."""

    def __call__(self, notes: Sequence[str], **arguments: Any) -> None:
        """Add these notes to the report."""


def is_of_lightning(given: object) -> bool:
    """Whether it is a Trainer or a module of Lightning."""
    return any(isinstance(given, package.Trainer | package.LightningModule) for package in _packages())


def _packages() -> list[Any]:
    return [sys.modules[name] for name in PACKAGES if name in sys.modules]


def module_of(given: Any) -> Any:
    """The module of a Trainer; or the one given, which must have a Trainer."""
    if isinstance(given, nn.Module):
        _trainer_of(given)
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in given.parameters()):
            raise UsageError(
                f"some parameters of {type(given).__name__} have no shape yet (lazy modules). Call it before verify."
            )
        return given
    if given.lightning_module is None:
        raise UsageError(
            "this Trainer has no module yet. Call verify(trainer) after trainer.fit(module), or before that "
            "`module.trainer = trainer` and verify(module)."
        )
    return given.lightning_module


def run_first_window(given: Any, verify: Verify) -> None:
    """Let a Trainer with its module, or a module with its Trainer, begin a fit, and verify its first window.

    The Trainer is put back; the module is left as the fit leaves it.

    Raises:
        UsageError: one of them, or the data, is missing; or the module steps by itself.
    """
    module = module_of(given)
    trainer = _trainer_of(module) if given is module else given
    _require_verifiable(trainer, module)
    rehearsal = Rehearsal(trainer, module)

    def act(batches: Sequence[Any]) -> None:
        sizes = [samples_of(batch).count for batch in batches]
        samples_before = [sum(sizes[:index]) for index in range(len(sizes))]
        parts = [Part(range(at, at + size)) for at, size in zip(samples_before, sizes, strict=True)]

        def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Items] | Tensor:
            return _loss_of(trainer, model, batch)

        def window_of(batch: Any) -> list[Any]:
            samples = samples_of(batch)
            return [samples.take(part) for part in parts]

        def run(_: nn.Module, window: list[Any]) -> None:
            rehearsal.run(window)

        batch = joined(batches, padding_for(module), None)
        case = {"model": module, "loss_fn": loss_fn, "batch": batch}
        verify(rehearsal.notes, batches=batches, window_of=window_of, run=run, **case)

    rehearsal.at_first_window(act)


def _trainer_of(module: Any) -> Any:
    try:
        return module.trainer
    except RuntimeError:
        pass
    raise UsageError(
        f"{type(module).__name__} has no Trainer, which decides how its batches are accumulated. Attach one, "
        "`module.trainer = trainer`, and call verify(module) again."
    )


def _require_verifiable(trainer: Any, module: Any) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{name} steps by itself (automatic_optimization=False): pass its loop to verify, "
            "verify(model, loss_fn, batch, step=...)."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UsageError(
            f"{name}.training_step takes a dataloader_iter, so verify cannot tell which batches it uses: pass its "
            "loop, verify(model, loss_fn, batch, step=...)."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError("a Trainer can be verified in one process only: call verify where there is no other rank.")
    bases = [package.LightningModule.train_dataloader for package in _packages()]
    has_own = getattr(module.train_dataloader, "__func__", None) not in bases
    if trainer.datamodule is None and not has_own and private.given_loader(trainer) is None:
        raise UsageError(
            f"{name} has no training data: define its train_dataloader(), or call verify(trainer) after "
            "trainer.fit(module, loader)."
        )


def _loss_of(trainer: Any, model: Any, batch: Any) -> tuple[Tensor, Items] | Tensor:
    """The loss of a batch, by the module or a copy of it, in the Trainer's precision; what it logs goes nowhere."""
    model.trainer = trainer  # a copy has none
    arguments = private.step_arguments(trainer, batch)
    with _without_log(model), _gradients_kept(model), trainer.precision_plugin.train_step_context():
        model.on_train_batch_start(batch, 0)  # it may set what training_step reads
        loss, items = loss_and_items(model.training_step(*arguments))
    if loss is None:
        raise UsageError(f"{type(model).__name__}.training_step returned no loss, so there is nothing to verify.")
    return loss if items is None else (loss, items)


@contextlib.contextmanager
def _without_log(module: Any) -> Iterator[None]:
    module.log = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log


@contextlib.contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """Inside there are none, so that nobody can clear them."""
    found = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in found:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in found:
            parameter.grad = gradient
