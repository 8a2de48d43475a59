"""Checks the arguments of `verify`: one clear line for a call that cannot work."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from macrobatch._border import arguments
from macrobatch.errors import UsageError
from macrobatch.types import Reduction


def require_valid_arguments(
    model: object, loss_fn: object, step: object, reduction: Reduction, collate: object, windows: object
) -> None:
    """Raise an error for arguments that cannot be right."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module: got {type(model).__name__}.")
    for name, value in (("loss_fn", loss_fn), ("step", step)):
        if not callable(value) and not (name == "step" and value is None):
            raise UsageError(f"{name} must be a function of the model and a batch: got {type(value).__name__}.")
    _require_arguments("loss_fn", loss_fn)
    if step is not None:
        _require_arguments("step", step)
    if collate is not None and not callable(collate):
        raise UsageError(f"collate must be a function of a list of samples: got {type(collate).__name__}.")
    if windows is not None and (isinstance(windows, bool) or not isinstance(windows, int) or windows < 1):
        raise UsageError(f"windows must be a number of optimizer steps, at least 1, or None: got {windows!r}.")
    arguments.checked_choice("reduction", reduction, Reduction)
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            "some parameters of the model have no shape yet (lazy modules). Call the model once with a batch first."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient, so there is nothing to verify.")


def _require_arguments(name: str, function: Any) -> None:
    """Raise an error if a function cannot be called with a model and a batch, or does nothing when it is called."""
    if type(function).__module__ == "torch.nn.modules.loss":
        raise UsageError(
            f"{name} must be a function of the model and a batch: got {type(function).__name__}. Write def "
            f"{name}(model, batch): return criterion(model(batch[0]), batch[1])."
        )
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{name} must run when it is called: it is a generator or a coroutine. Remove yield and async."
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise UsageError(
            f"{name} must take the model and a batch, {name}(model, batch): got {name}{inspect.signature(function)}."
        ) from None
    except ValueError:
        return  # it has no signature: a function of C


def require_batch(batch: object) -> None:
    """Raise an error for what yields batches, but is none."""
    if isinstance(batch, Iterator | DataLoader | Dataset):
        raise UsageError(
            f"batch must be one batch: got {type(batch).__name__}. Pass next(iter(loader)), with as many samples as "
            "the micro-batches of a window together, and let step cut it."
        )
