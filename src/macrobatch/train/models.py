"""The model: make or load it, set its precision and device, and distribute it over the ranks.

New weights depend only on the seed: every rank draws them in float32 on the CPU, and converts or moves them afterwards.
"""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from macrobatch._torch.modules import without_ddp
from macrobatch.errors import BackendError, UsageError
from macrobatch.train import adapters, suitable
from macrobatch.train.files import replacing_folder
from macrobatch.train.pretrained import (
    ADAPTER,
    CONFIG,
    GENERATION,
    INDEX,
    Kept,
    Origin,
    check_index,
    check_type,
    code_in,
    find,
    read_json,
    reason,
)
from macrobatch.train.settings import Settings
from macrobatch.train.vocabulary import Vocabulary, hub_is_out_of_reach
from macrobatch.train.world import World

# Llama models: width, layers, heads. Keys and values have as many heads as queries; embedding and head are tied.
SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (32, 2, 2),
    "small": (128, 4, 4),
    "medium": (384, 6, 6),
    "large": (768, 12, 12),
}
RATES = {"tiny": 5e-3, "small": 5e-3, "medium": 1.5e-3, "large": 6e-4}  # default learning rates of these sizes
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = {"float64": torch.float64, "pure-bf16": torch.bfloat16}

NAMES_OF_CODE = {"auto_map", "custom_pipelines"}  # entries of a configuration that refer to code

Config = dict[str, Any]

# DDP need not broadcast buffers, because those of these models never change. torch 2.13 has renamed the option.
_DDP = inspect.signature(DistributedDataParallel).parameters
_SYNCS_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP else "broadcast_buffers"


def check(settings: Settings, world: World) -> None:
    """Refuse settings that are wrong, as far as that is known before data and weights are read."""
    origin = origin_of(settings)
    if origin.kind in ("config", "weights"):
        _config_of(origin)
    elif origin.kind == "hub":
        _check_hub(origin)
    adapters.check(settings, origin)
    if origin.kind == "weights" and settings.tokenizer is None and origin.tokenizer is None:
        raise UsageError(
            f"--model {settings.model} has weights and no tokenizer: without the one that they were trained with, they "
            "mean nothing. Say where it is: --tokenizer FOLDER."
        )
    if settings.parallel == "ddp":
        return
    if world.size == 1:
        raise UsageError(
            f"--parallel {settings.parallel} spreads the model over ranks, and there is one: start it with "
            "torchrun --nproc-per-node, or say --parallel ddp."
        )
    if settings.parallel == "hsdp" and world.size % (settings.shard_ranks or world.local_size):
        raise UsageError(
            f"--shard-ranks {settings.shard_ranks or world.local_size} does not divide the {world.size} ranks."
        )


def _warn_of_code(origin: Origin, tokenizer: str | None) -> None:
    folders = [origin.folder, None if tokenizer is None else Path(tokenizer)]
    for folder in dict.fromkeys(folder for folder in folders if folder is not None and folder.is_dir()):
        if code := code_in(folder):
            warnings.warn(
                f"{folder} holds code ({code}), which is not executed: what transformers and tokenizers have of their "
                "own is used instead. An export does not name it.",
                stacklevel=2,
            )


# ---------------------------------------------------------------------------------------------- making and loading


def origin_of(settings: Settings) -> Origin:
    """The origin of the model that ``--model`` names."""
    return Origin(settings.model, "size", Path(settings.model)) if settings.model in SIZES else find(settings.model)


def model_of(settings: Settings, vocabulary_size: int, end: int) -> nn.Module:
    """The model to train, new or loaded, in float32 on the CPU."""
    origin = origin_of(settings)
    _warn_of_code(origin, settings.tokenizer)
    if origin.kind == "size":
        size = SIZES[settings.model]
        return made(_llama(*size, vocabulary_size=vocabulary_size, end=end, seq_len=settings.seq_len), settings.seed)
    if settings.lora:
        model = loaded(origin)
        adapters.add(model, blocks_of(model), settings, origin)
    else:
        model = merged(origin) if origin.has_weights else made(_config_of(origin), settings.seed)
    suitable.require_causal(model, origin)
    suitable.require_plain_loss(model, origin)
    return model


def merged(origin: Origin) -> nn.Module:
    """The model in a folder with weights. For an adapter it is the base model with the adapter merged into it."""
    model = loaded(origin)
    if origin.adapter is not None:
        adapters.merge(model, origin.adapter, origin.said)
    return model


def learning_rate(settings: Settings) -> float:
    """The learning rate of the settings, or the default for the model."""
    if settings.lr is not None:
        return settings.lr
    if settings.lora:
        return adapters.RATE
    if settings.model in RATES:
        return RATES[settings.model]
    return 5e-5 if origin_of(settings).has_weights else 1e-3


def _llama(width: int, layers: int, heads: int, *, vocabulary_size: int, end: int, seq_len: int) -> Config:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        "hidden_size": width,
        "intermediate_size": -(-width * 8 // 3 // 32) * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
    }


def _config_of(origin: Origin) -> Config:
    """The configuration in a file, or in a folder with weights."""
    folder = origin.folder
    assert folder is not None
    file = origin.path if origin.kind == "config" else folder / CONFIG
    config: Config = read_json(file)
    check_type(config, origin.said if origin.kind == "weights" else str(file), folder)
    return config


def made(config: Config, seed: int) -> nn.Module:
    """A model of this configuration with new weights that depend only on the seed, in float32 on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, rest = config["model_type"], {name: value for name, value in config.items() if name != "model_type"}
    try:
        full = AutoConfig.for_model(kind, **rest)
        full.dtype = torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = AutoModelForCausalLM.from_config(full)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"a model of the type {kind!r} cannot be made of this configuration: {reason(error)}"
        ) from error
    return model.float()


def _check_hub(origin: Origin) -> None:
    """Refuse a model that is not on the hub or out of reach, and weights in other formats than safetensors."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(origin.name, trust_remote_code=False, local_files_only=hub_is_out_of_reach())
        index, adapter = origin.file(INDEX), origin.file(ADAPTER)
    except Exception as error:  # many types, e.g. for a missing, damaged or unreachable model
        raise UsageError(
            f"--model {origin.name}: this is no size ({', '.join(SIZES)}), no file or folder here, and no model on the "
            f"hub that can be reached: {reason(error)}"
        ) from error
    if adapter is not None:
        raise UsageError(f"--model {origin.name} is an adapter on the hub. Download it, and name its folder.")
    if index is not None:
        check_index(index)


def loaded(origin: Origin) -> nn.Module:
    """The model in a folder with weights, or on the hub. Only safetensors files are read, because they hold no code."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shows, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # missing weights are an error below, so its warning is not needed
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            origin.source,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            local_files_only=origin.kind == "weights" or hub_is_out_of_reach(),
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, SafetensorError) as error:
        raise UsageError(f"{origin.said}: no model could be loaded: {reason(error)}") from error
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise UsageError(
            f"{origin.said}: its files lack {len(missing)} of the weights of {type(model).__name__}, "
            f"{missing[0]} for one, which would be random. Choose a complete causal language model."
        )
    found: nn.Module = model
    return found


def summary(model: nn.Module) -> Config:
    """The configuration of a model as JSON, for the identity of a run."""
    config: Config = model.config.to_diff_dict()  # type: ignore[operator, union-attr]
    return {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}


def vocabulary_size_of(model: nn.Module) -> int:
    """The number of tokens in the model's embedding."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


# --------------------------------------------------------------------------------- precision, device and distribution


def prepared(model: nn.Module, settings: Settings, world: World) -> nn.Module:
    """The model ready for training: in its precision, on its device, and distributed."""
    _warn_of_dropout(model)
    model.train()
    adapters.move(model, world.device, WEIGHTS.get(settings.precision, torch.float32))
    _widen_norms(model)
    if settings.checkpoint_activations == "yes":
        checkpoint_activations(model)
    if settings.compile:
        for layer in blocks_of(model):
            layer.compile(dynamic=True)
    return _spread(model, settings, world)


def _warn_of_dropout(model: nn.Module) -> None:
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    config = getattr(model, "config", None)
    rates += [getattr(config, name, 0.0) or 0.0 for name in ("attention_dropout", "attn_pdrop", "dropout")]
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        warnings.warn(
            "this model has dropout, whose masks depend on how a batch is cut: losses will depend a little on --micro "
            "and on the number of ranks.",
            stacklevel=2,
        )


def _widen_norms(model: nn.Module) -> None:
    """Replace Llama's norms by torch's, which run in one kernel, and compute float64 in float64.

    The class of transformers always computes in float32, so float64 would be only as precise as float32.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)  # type: ignore[arg-type, index]
                norm.weight = child.weight  # type: ignore[assignment]
                setattr(parent, name, norm)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a decoder."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()), default=None)
    if largest is None:
        raise BackendError(
            f"{type(model).__name__} is no stack of layers: leave out --compile, --parallel and the like."
        )
    return list(largest)


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward."""
    plain = without_ddp(model)
    if not getattr(plain, "supports_gradient_checkpointing", False):
        raise BackendError(f"{type(plain).__name__} does not support --checkpoint-activations.")
    plain.gradient_checkpointing_enable({"use_reentrant": False})


def _spread(model: nn.Module, settings: Settings, world: World) -> nn.Module:
    if settings.parallel == "ddp":
        if world.size == 1:
            return model
        device_ids = [world.device] if world.device.type == "cuda" else None
        options: dict[str, Any] = {"device_ids": device_ids, "gradient_as_bucket_view": True, _SYNCS_BUFFERS: False}
        return DistributedDataParallel(model, **options)
    mesh = _mesh(settings, world)
    reduced = torch.float32 if settings.precision == "pure-bf16" else None
    policy = MixedPrecisionPolicy(reduce_dtype=reduced)
    for layer in blocks_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _mesh(settings: Settings, world: World) -> Any:
    kind = world.device.type
    if settings.parallel == "fsdp":
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    shard = settings.shard_ranks or world.local_size
    return init_device_mesh(kind, (world.size // shard, shard), mesh_dim_names=("replicate", "shard"))


# ---------------------------------------------------------------------------------------------------------- exporting


def exported(
    model: nn.Module, run: Path, vocabulary: Vocabulary, kept: Kept, world: World, *, which: str = ""
) -> list[Path]:
    """Write the model with its tokenizer, so that ``AutoModelForCausalLM.from_pretrained`` can read it.

    Weights that were loaded keep their dtype on disk. All ranks take part, because each may hold only a shard. An
    earlier export stays until the new one is complete. An adapter is merged into the model, and also written alone.
    Returns the folders, whose names end with `which`.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    plain = without_ddp(model)
    folders = [run / f"model{which}", *([run / f"adapter{which}"] if adapters.is_adapted(plain) else [])]
    if not world.is_first:
        return folders
    tied = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in plain.named_parameters()}
    own = {n: v.contiguous() for n, v in weights.items() if n not in tied and isinstance(v, torch.Tensor)}
    for folder in folders[1:]:
        with replacing_folder(folder) as aside:
            adapters.write(plain, own, kept.base, aside)
            vocabulary.save(aside)
    with replacing_folder(folders[0]) as aside:
        dtype = kept.dtype or next(plain.parameters()).dtype
        own = {name: _as_saved(tensor, dtype) for name, tensor in adapters.merged(plain, own).items()}
        save_file(own, aside / "model.safetensors", metadata={"format": "pt"})
        config: Any = copy.deepcopy(plain.config)
        config.architectures = [type(plain).__name__.removeprefix("FSDP")]
        config.dtype = dtype
        for name in NAMES_OF_CODE & vars(config).keys():  # the code itself is not exported
            delattr(config, name)
        config.save_pretrained(aside)
        if kept.generation is not None:
            (aside / GENERATION).write_bytes(kept.generation)
        vocabulary.save(aside)
    return folders


def _as_saved(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the dtype of the original weights, unless values would become infinite in it."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    return tensor if narrow.isinf().any() and not tensor.isinf().any() else narrow
