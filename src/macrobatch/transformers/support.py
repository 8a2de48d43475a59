"""Checks, when a trainer is constructed, that it does nothing that cannot be exact."""

from __future__ import annotations

from typing import Any

from macrobatch.errors import BackendError, UsageError
from macrobatch.transformers.trl import require_possible

OWN_STEPS = {"GRPOTrainer", "DistillationTrainer", "SDFTTrainer", "SDPOTrainer"}  # of TRL


def require_supported(trainer: Any, settings: Any) -> None:
    """Raise an error if the trainer's engine accumulates gradients itself, or if an option is not supported."""
    name, arguments = type(trainer).__name__, trainer.args
    if trainer.is_deepspeed_enabled:
        raise BackendError(f"{name}: DeepSpeed accumulates gradients itself, inside its engine. Use DDP or FSDP.")
    if trainer.is_fsdp_xla_enabled or arguments.parallel_mode.value == "tpu":
        raise BackendError(f"{name}: XLA is not supported. Use DDP or FSDP on GPUs, or a CPU.")
    if arguments.parallel_mode.value.startswith("sagemaker"):
        raise BackendError(f"{name}: SageMaker's model parallelism accumulates gradients itself. Use DDP or FSDP.")
    if arguments.n_gpu > 1:
        raise BackendError(
            f"{name}: DataParallel runs one micro-batch on {arguments.n_gpu} GPUs from one process. Start one process "
            "for each GPU: torchrun --nproc-per-node=gpu script.py."
        )
    sizes = {kind: getattr(trainer, f"get_{kind}_size", lambda: 1)() for kind in ("tp", "cp", "sp")}
    if any(size > 1 for size in sizes.values()):
        raise BackendError(f"{name}: ranks that share a model ({sizes}) are not supported. Use DDP or FSDP.")
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise UsageError(
            f"{name}: optim={optimizer!r} steps inside each backward, before a window is complete. Use another one."
        )
    if (settings.cuts or settings.cuda_graph) and (owner := _own_training_step(trainer)) is not None:
        raise UsageError(
            f"{owner} has a training_step of its own, which micro= and cuda_graph= would leave out: they run the "
            "batches of a window together. Leave these options out, or override compute_loss instead."
        )
    require_possible(trainer, cuts=settings.cuts)


def _own_training_step(trainer: Any) -> str | None:
    """The class that overrides ``training_step``. TRL's are ignored if they only offload activations."""
    for one in type(trainer).__mro__:
        if "training_step" in vars(one) and one.__module__.split(".")[0] not in ("macrobatch", "transformers"):
            return None if one.__module__.startswith("trl.") and one.__name__ not in OWN_STEPS else one.__name__
    return None
