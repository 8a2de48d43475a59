"""Functions of users, named on a command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from macrobatch.errors import UsageError


def function_named(target: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names, in a module of the current folder or among what is installed.

    >>> function_named("math:sqrt")(4)
    2.0
    """
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(f"{target!r} is not MODULE:FUNCTION. For check() in training.py, say training:check.")
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (module_name + ".").startswith(f"{error.name}."):
            raise UsageError(f"module {module_name!r} needs {error.name!r}, which is not installed.") from None
        raise UsageError(f"there is no module {module_name!r} in {os.getcwd()} or among what is installed.") from None
    function = getattr(module, name, None)
    if function is None:
        raise UsageError(f"module {module_name!r} has no function {name!r}.")
    if not callable(function):
        raise UsageError(f"{target} is not a function: got {type(function).__name__}.")
    called: Callable[..., Any] = function
    return called
