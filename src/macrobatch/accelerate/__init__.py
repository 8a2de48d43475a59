"""For programs written for Hugging Face Accelerate's gradient accumulation: only their import lines change.

``from accelerate import Accelerator`` becomes ``from macrobatch.accelerate import Accelerator``, and likewise
``accelerate.utils``, ``accelerate.logging`` and ``accelerate.state``. docs/from-accelerate.md says what is the same,
what is better, and what is not here.
"""

from typing import Any

from macrobatch.accelerate.accelerator import Accelerator
from macrobatch.accelerate.loaders import skip_first_batches
from macrobatch.accelerate.logging import get_logger
from macrobatch.accelerate.missing import missing_import
from macrobatch.accelerate.seeding import set_seed
from macrobatch.accelerate.settings import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from macrobatch.accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "PartialState",
    "get_logger",
    "set_seed",
    "skip_first_batches",
]


def __getattr__(name: str) -> Any:
    missing_import(name, __name__)
