"""What users hand to an `Accelerator`, each bundle checked where it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from macrobatch._step.validation import checked_steps
from macrobatch.errors import UsageError

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches in a window; None: 1.
        adjust_scheduler: let schedulers count the micro-batches in between, in their ``_step_count``. It changes no
            learning rate, here as there.
        sync_with_dataloader: close the window at the end of the loader, however short it is.
        sync_each_batch: let gradients travel at every micro-batch: slower, but less memory under FSDP.
        exact_remainder: scale a window by the micro-batches that it holds. False divides by `num_steps` also where a
            loader ended before, as Accelerate does: too small a gradient.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    exact_remainder: bool = True

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            checked_steps(self.num_steps, "num_steps")

    def to_kwargs(self) -> dict[str, Any]:
        """As `GradientState.plugin_kwargs` keeps them."""
        return asdict(self) | {"num_steps": self.num_steps or 1}


@dataclass
class DataLoaderConfiguration:
    """How the batches of a prepared loader are shared out among processes.

    Args:
        split_batches: cut each batch of the loader, instead of handing whole batches to the processes in turn.
        dispatch_batches: let only process 0 read, and send every process its part. None: where the dataset is iterable.
        even_batches: fill the last batches up with samples from the start, so that all processes have equally many.
        non_blocking: move batches to the device without waiting; needs a loader with ``pin_memory=True``.
        use_seedable_sampler: shuffle by a seed and the number of the epoch, not by a generator that runs on.
        data_seed: that seed; None: the one that torch was seeded with.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    non_blocking: bool = False
    use_seedable_sampler: bool = False
    data_seed: int | None = None


@dataclass
class FullyShardedDataParallelPlugin:
    """Shard models with torch's `fully_shard` (FSDP2) instead of replicating them.

    Args:
        fsdp_version: 2, the only one.
        reshard_after_forward: free the gathered parameters between forward and backward.
        auto_wrap_policy: a function of a module that says whether it is gathered by itself.
        transformer_cls_names_to_wrap: the classes of such modules, by name, instead of a function.
        mixed_precision_policy: torch's; None: by the Accelerator's ``mixed_precision``, reduced in float32.
    """

    fsdp_version: int = 2
    reshard_after_forward: bool = True
    auto_wrap_policy: Callable[[nn.Module], bool] | None = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    mixed_precision_policy: MixedPrecisionPolicy | None = None

    def __post_init__(self) -> None:
        if self.fsdp_version != 2:
            raise UsageError(
                f"fsdp_version must be 2, torch's fully_shard: got {self.fsdp_version!r}. A model wrapped in "
                "FullyShardedDataParallel (FSDP1) trains with macrobatch.Accumulator."
            )
        if self.auto_wrap_policy is not None and not callable(self.auto_wrap_policy):
            raise UsageError(
                f"auto_wrap_policy must be a function of a module: got {self.auto_wrap_policy!r}. For classes by name "
                "there is transformer_cls_names_to_wrap=[...]."
            )
        if isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = [self.transformer_cls_names_to_wrap]

    def wraps(self, module: nn.Module) -> bool:
        """Whether a part of a model is gathered by itself."""
        if self.auto_wrap_policy is not None:
            return self.auto_wrap_policy(module)
        return type(module).__name__ in (self.transformer_cls_names_to_wrap or ())

    def policy(self, mixed_precision: str) -> MixedPrecisionPolicy:
        """How parameters are gathered and gradients reduced."""
        if self.mixed_precision_policy is not None:
            return self.mixed_precision_policy
        if (dtype := PRECISIONS[mixed_precision]) is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)


@dataclass
class DistributedDataParallelKwargs:
    """Options of torch's DistributedDataParallel, for ``Accelerator(kwargs_handlers=[...])``."""

    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def to_kwargs(self) -> dict[str, Any]:
        """Those that are not torch's own defaults: it deprecates some of their names."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


@dataclass
class GradScalerKwargs:
    """Options of torch's GradScaler, for ``Accelerator(mixed_precision="fp16", kwargs_handlers=[...])``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


def checked_precision(mixed_precision: object) -> str:
    """One of "no", "bf16", "fp16"."""
    if mixed_precision not in PRECISIONS:
        raise UsageError(f"mixed_precision must be one of {', '.join(PRECISIONS)}: got {mixed_precision!r}.")
    return str(mixed_precision)


def handlers_of(given: Sequence[object] | None) -> tuple[DistributedDataParallelKwargs, GradScalerKwargs]:
    """The options for DistributedDataParallel and for GradScaler."""
    ddp, scaler = DistributedDataParallelKwargs(), GradScalerKwargs()
    for handler in given or ():
        if isinstance(handler, DistributedDataParallelKwargs):
            ddp = handler
        elif isinstance(handler, GradScalerKwargs):
            scaler = handler
        else:
            raise UsageError(
                f"kwargs_handlers takes DistributedDataParallelKwargs and GradScalerKwargs of macrobatch.accelerate: "
                f"got {type(handler).__name__}."
            )
    return ddp, scaler
