"""What is private to Lightning, and used here all the same: this file alone names it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

TRANSFERS = ("_on_before_batch_transfer", "_apply_batch_transfer_handler")  # of a module, around what its hooks do


def fetcher_of(loop: Any) -> Any:
    """What fetches the batches of a fit."""
    return loop._data_fetcher


def transferred(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as ``training_step`` gets it: converted, through the module's hooks, on the device."""
    converted = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
    return trainer.strategy.batch_to_device(converted)


def connector_of(trainer: Any) -> Any:
    """What holds the strategy of a Trainer."""
    return trainer._accelerator_connector


def forget_logged(trainer: Any) -> None:
    """Give a Trainer nothing that was logged before."""
    trainer._logger_connector = type(trainer._logger_connector)(trainer)


def given_loader(trainer: Any) -> Any:
    """What the last fit was given to train on; None if there was no fit, or the module has its data itself."""
    source = trainer.fit_loop._data_source
    return None if source.is_module() else source.instance


def step_arguments(trainer: Any, batch: Any) -> Iterable[Any]:
    """What ``training_step`` is called with, by its signature."""
    arguments: Iterable[Any] = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values()
    return arguments
