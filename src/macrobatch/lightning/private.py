"""All private names of Lightning that this package uses. No other file uses any."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

TRANSFERS = ("_on_before_batch_transfer", "_apply_batch_transfer_handler")  # methods that call a module's hooks


def fetcher_of(loop: Any) -> Any:
    """The object that fetches the batches of a fit."""
    return loop._data_fetcher


def transferred(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as ``training_step`` gets it: converted, through the module's hooks, and on the device."""
    converted = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
    return trainer.strategy.batch_to_device(converted)


def connector_of(trainer: Any) -> Any:
    """The object that holds the strategy of a Trainer."""
    return trainer._accelerator_connector


def forget_logged(trainer: Any) -> None:
    """Drop everything that a Trainer has logged before."""
    trainer._logger_connector = type(trainer._logger_connector)(trainer)


def given_loader(trainer: Any) -> Any:
    """The loader that the last fit got; None if there was no fit, or if the module has its own data."""
    source = trainer.fit_loop._data_source
    return None if source.is_module() else source.instance


def step_arguments(trainer: Any, batch: Any) -> Iterable[Any]:
    """The arguments of ``training_step``, according to its signature."""
    arguments: Iterable[Any] = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values()
    return arguments
