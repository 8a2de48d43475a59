"""`accelerate.utils`, with another `GradientAccumulationPlugin`."""

from dataclasses import dataclass
from typing import Any

import accelerate.utils

__all__ = [name for name in vars(accelerate.utils) if not name.startswith("_")]


@dataclass
class GradientAccumulationPlugin(accelerate.utils.GradientAccumulationPlugin):  # type: ignore[misc]
    """Accelerate's `GradientAccumulationPlugin`, with one more option. All other arguments are Accelerate's.

    Args:
        exact: whether windows are exact, or as Accelerate has them bit for bit: see `Accelerator`. Default: the
            environment variable MACROBATCH_EXACT (0 or 1), then MACROBATCH_EXACT_REMAINDER; if neither is set, True.
            The argument of `Accelerator` overrides it.
        exact_remainder: the older name of ``exact``.
    """

    exact_remainder: bool | None = None
    exact: bool | None = None


def __getattr__(name: str) -> Any:
    return getattr(accelerate.utils, name)
