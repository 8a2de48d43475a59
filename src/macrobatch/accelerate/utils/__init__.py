"""`accelerate.utils`, with another `GradientAccumulationPlugin`."""

from dataclasses import dataclass
from typing import Any

import accelerate.utils

__all__ = [name for name in vars(accelerate.utils) if not name.startswith("_")]


@dataclass
class GradientAccumulationPlugin(accelerate.utils.GradientAccumulationPlugin):  # type: ignore[misc]
    """Accelerate's `GradientAccumulationPlugin`, with one more option. All other arguments are Accelerate's.

    Args:
        exact_remainder: whether to divide a short window by the number of micro-batches that it has. False divides by
            ``num_steps``, as Accelerate does, to repeat its results bit for bit, also where they are wrong. Default:
            the environment variable MACROBATCH_EXACT_REMAINDER (0 or 1); if it is not set, True. The argument of
            `Accelerator` with the same name overrides it.
    """

    exact_remainder: bool | None = None


def __getattr__(name: str) -> Any:
    return getattr(accelerate.utils, name)
