"""What programs import from ``accelerate.utils``, under that name."""

from typing import Any

from macrobatch.accelerate.gathering import gather
from macrobatch.accelerate.missing import missing_import
from macrobatch.accelerate.seeding import set_seed
from macrobatch.accelerate.settings import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from macrobatch.accelerate.state import DistributedType

__all__ = [
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "gather",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    missing_import(name, __name__)
