"""Names of Accelerate that have no part in gradient accumulation, each with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

from macrobatch.errors import UsageError


class MissingNameError(UsageError, AttributeError):
    """An attribute that Accelerate has, and this facade has not. (`hasattr` says False, as it should.)"""


class MissingImportError(UsageError, ImportError):
    """A name that could be imported from Accelerate, and cannot be from here."""


_TRACKING = "a SummaryWriter of torch.utils.tensorboard, or the tracker's own library, where is_main_process"
_LAUNCHER = "torchrun"
_FSDP = "fsdp_plugin=FullyShardedDataParallelPlugin(), which shards parameters, gradients and optimizer state"
_COMPILE = "torch.compile(model) before prepare()"
_WEIGHTS = (
    "unwrap_model(model).state_dict(), or get_model_state_dict of torch.distributed.checkpoint.state_dict for a "
    "sharded model"
)
_TRIM = "macrobatch.MacroStep(..., micro='auto'), which finds the size that fits"
_FIRST = "an `if accelerator.is_main_process:` followed by wait_for_everyone()"

# Attributes and methods of an Accelerator.
ATTRIBUTES = {
    "reduce": "gather(value).sum() or .mean(), or torch.distributed.all_reduce",
    "pad_across_processes": "torch.nn.functional.pad before gather(), to a length that all processes know",
    "gather_object": "torch.distributed.all_gather_object",
    "join_uneven_inputs": "macrobatch.Accumulator, whose batches() copes with ranks that run out at different times",
    "split_between_processes": "inputs[accelerator.process_index :: accelerator.num_processes]",
    "set_trigger": "gather(flag).any()",
    "check_trigger": "gather(flag).any()",
    "init_trackers": _TRACKING,
    "get_tracker": _TRACKING,
    "log": _TRACKING,
    "trackers": _TRACKING,
    "save": "torch.save, where is_main_process",
    "save_model": _WEIGHTS,
    "get_state_dict": _WEIGHTS,
    "register_save_state_pre_hook": "your own code before save_state()",
    "register_load_state_pre_hook": "your own code before load_state()",
    "project_dir": "a path of your own, handed to save_state()",
    "project_configuration": "a path of your own, handed to save_state()",
    "logging_dir": "a path of your own",
    "free_memory": f"del, gc.collect() and torch.cuda.empty_cache(); or {_TRIM}",
    "clear": f"del, gc.collect() and torch.cuda.empty_cache(); or {_TRIM}",
    "profile": "torch.profiler.profile",
    "on_main_process": "an `if accelerator.is_main_process:`",
    "on_local_main_process": "an `if accelerator.is_local_main_process:`",
    "on_last_process": "an `if accelerator.is_last_process:`",
    "on_process": "an `if accelerator.process_index == ...:`",
    "on_local_process": "an `if accelerator.local_process_index == ...:`",
    "main_process_first": _FIRST,
    "local_main_process_first": _FIRST,
    "lomo_backward": "an optimizer that steps once a window",
    "maybe_context_parallel": "torch.distributed.tensor.experimental.context_parallel",
    "deepspeed_plugin": _FSDP,
}

# Arguments of an Accelerator.
ARGUMENTS = {
    "deepspeed_plugin": _FSDP,
    "deepspeed_plugins": _FSDP,
    "megatron_lm_plugin": _FSDP,
    "torch_tp_plugin": "torch.distributed.tensor.parallel.parallelize_module on the model, with macrobatch.Accumulator",
    "parallelism_config": "torch.distributed.tensor.parallel on the model, with macrobatch.Accumulator",
    "rng_types": "nothing: the generators of shuffling samplers are kept in step, and set_seed() seeds the others",
    "log_with": _TRACKING,
    "project_dir": "a path of your own, handed to save_state()",
    "project_config": "a path of your own, handed to save_state()",
    "dynamo_backend": _COMPILE,
    "dynamo_plugin": _COMPILE,
}

# What can be imported from accelerate or accelerate.utils.
NAMES = {
    "notebook_launcher": _LAUNCHER,
    "debug_launcher": _LAUNCHER,
    "DeepSpeedPlugin": _FSDP,
    "MegatronLMPlugin": _FSDP,
    "TorchTensorParallelPlugin": ARGUMENTS["torch_tp_plugin"],
    "ParallelismConfig": ARGUMENTS["parallelism_config"],
    "TorchDynamoPlugin": _COMPILE,
    "ProjectConfiguration": "a path of your own, handed to save_state()",
    "InitProcessGroupKwargs": "torch.distributed.init_process_group before the Accelerator is made",
    "AutocastKwargs": "torch.autocast",
    "ProfileKwargs": "torch.profiler.profile",
    "FP8RecipeKwargs": "torchao on the model",
    "LocalSGD": "macrobatch.Accumulator with more steps: as few synchronisations, and exact",
    "find_executable_batch_size": _TRIM,
    "release_memory": _TRIM,
    "init_empty_weights": "torch.device('meta')",
    "load_checkpoint_and_dispatch": "torch.distributed.checkpoint",
    "load_checkpoint_in_model": "torch.distributed.checkpoint",
    "dispatch_model": _FSDP,
    "infer_auto_device_map": _FSDP,
    "cpu_offload": _FSDP,
    "disk_offload": _FSDP,
    "prepare_pippy": "torch.distributed.pipelining",
    "broadcast": "torch.distributed.broadcast",
    "broadcast_object_list": "torch.distributed.broadcast_object_list",
    "gather_object": "torch.distributed.all_gather_object",
    "reduce": "torch.distributed.all_reduce",
    "pad_across_processes": ATTRIBUTES["pad_across_processes"],
    "send_to_device": "tensor.to(accelerator.device); prepared loaders do it",
    "synchronize_rng_states": "set_seed() on all processes",
    "write_basic_config": _LAUNCHER,
    "tqdm": "tqdm.auto.tqdm(..., disable=not accelerator.is_local_main_process)",
}


def missing_attribute(name: str, owner: str = "Accelerator") -> Never:
    """Raise what `accelerator.name` should raise."""
    if name in ATTRIBUTES:
        raise MissingNameError(
            f"{owner}.{name} has no part in gradient accumulation, so macrobatch.accelerate does not have it. Use "
            f"{ATTRIBUTES[name]}."
        )
    raise AttributeError(f"{owner!r} object has no attribute {name!r}")


def missing_argument(given: Mapping[str, object]) -> None:
    """An error for the first argument that `Accelerator` does not take here; one of None asks for nothing."""
    for name in (name for name, value in given.items() if value is not None):
        if name in ARGUMENTS:
            raise UsageError(
                f"Accelerator({name}=...) has no part in gradient accumulation, so macrobatch.accelerate does not take "
                f"it. Use {ARGUMENTS[name]}."
            )
        raise UsageError(f"Accelerator has no argument {name!r}, here as in Accelerate: correct or remove it.")


def missing_import(name: str, module: str) -> Never:
    """Raise what ``from module import name`` should raise."""
    if name in NAMES:
        raise MissingImportError(
            f"{name} has no part in gradient accumulation, so {module} does not have it. Use {NAMES[name]}."
        )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
