"""`accelerate.utils`, but for `GradientAccumulationPlugin`."""

from dataclasses import dataclass
from typing import Any

import accelerate.utils

__all__ = [name for name in vars(accelerate.utils) if not name.startswith("_")]


@dataclass
class GradientAccumulationPlugin(accelerate.utils.GradientAccumulationPlugin):  # type: ignore[misc]
    """Accelerate's, with one more choice.

    Args:
        exact_remainder: divide a short window by the micro-batches that it holds. False divides by ``num_steps``, as
            Accelerate does: bitwise its results, where they are wrong too. None: as `Accelerator` says.
    """

    exact_remainder: bool | None = None


def __getattr__(name: str) -> Any:
    return getattr(accelerate.utils, name)
