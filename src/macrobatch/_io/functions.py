"""Functions of users, named on a command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from macrobatch.errors import UsageError


def function_named(target: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names, from the current folder or an installed module."""
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(f"{target!r} is not MODULE:FUNCTION. For check() in training.py, say training:check.")
    if module_name.startswith(".") or "/" in module_name or os.sep in module_name:
        raise UsageError(
            f"{module_name!r} is not the name of a module. For check() in training.py, say training:check."
        )
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (module_name + ".").startswith(f"{error.name}."):
            raise UsageError(f"module {module_name!r} needs {error.name!r}, which is not installed.") from None
        meant = f" Did you mean {module_name.removesuffix('.py')}:{name}?" if module_name.endswith(".py") else ""
        raise UsageError(
            f"there is no module {module_name!r} in {os.getcwd()} or among what is installed.{meant}"
        ) from None
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}. What of it is not to run "
            'on import belongs under if __name__ == "__main__".'
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise UsageError(f"module {module_name!r} has no function {name!r}.")
    if not callable(function):
        raise UsageError(f"{target} is not a function: got {type(function).__name__}.")
    return function
