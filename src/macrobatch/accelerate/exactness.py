"""Whether an `Accelerator` is exact, or does what Accelerate does bit for bit."""

from __future__ import annotations

import os
from typing import Any

from macrobatch.errors import UsageError

WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
NAMES = ("exact", "exact_remainder")  # the second one is the older name of the first
VARIABLES = ("MACROBATCH_EXACT", "MACROBATCH_EXACT_REMAINDER")


class Exactness:
    """Whether windows are exact: what the argument says, else the plugin, else the environment, else True.

    Args:
        state: Accelerate's ``GradientState``, which keeps the options of the plugin.
        arguments: ``exact`` and ``exact_remainder`` of the `Accelerator`.
    """

    def __init__(self, state: Any, arguments: dict[str, Any]) -> None:
        self._state = state
        self._argument = _chosen(arguments, "Accelerator()")
        found = (_of_environment(name) for name in VARIABLES)
        self._default = next((said for said in found if said is not None), True)
        _chosen(state.plugin_kwargs, "GradientAccumulationPlugin()")

    def __call__(self) -> bool:
        """Whether windows are exact now. The plugin's options may change."""
        if self._argument is not None:
            return self._argument
        options = self._state.plugin_kwargs
        said: bool | None = options.get(NAMES[0])
        if said is None:
            said = options.get(NAMES[1])
        return self._default if said is None else said


def _chosen(options: dict[str, Any], where: str) -> bool | None:
    """What one of the two names says; None if neither is given."""
    said = {name: options[name] for name in NAMES if options.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} of {where} must be True or False: got {value!r}.")
    if len(set(said.values())) > 1:
        raise UsageError(
            f"{where} got exact={said['exact']} and exact_remainder={said['exact_remainder']}, which mean the same: "
            "leave exact_remainder, the older name, out."
        )
    return next(iter(said.values()), None)


def _of_environment(name: str) -> bool | None:
    """The value of a variable; None if it is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    if text.lower() not in WORDS:
        raise UsageError(f"the environment variable {name} must be 0 or 1: got {text!r}.")
    return WORDS[text.lower()]
