"""`macrobatch train`: a trainer for causal language models that uses `MacroStep`. Its training loop is in `trainer`.

Programs call it with ``from macrobatch.train import Settings, train``. Modules that need torch and transformers are
imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from macrobatch.errors import pip_install as _pip_install

if TYPE_CHECKING:
    from macrobatch.train.hooks import Event, StopTraining
    from macrobatch.train.outcome import Outcome
    from macrobatch.train.settings import Settings
    from macrobatch.train.trainer import train

__all__ = ["Event", "Outcome", "Settings", "StopTraining", "train"]

_HOMES = {"Event": "hooks", "Outcome": "outcome", "Settings": "settings", "StopTraining": "hooks", "train": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("macrobatch"):
            raise
        raise ImportError(
            f"macrobatch.train needs {error.name}, which is not installed: {_pip_install('train')}."
        ) from error
