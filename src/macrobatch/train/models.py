"""The model: make or load it, set its precision and device, and distribute it over the ranks.

New weights depend only on the seed: every rank draws them in float32 on the CPU, and converts or moves them afterwards.
"""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from macrobatch._joint.balance import Balance
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import BackendError, MacrobatchError, UsageError
from macrobatch.train import adapters, experts, suitable
from macrobatch.train.pretrained import (
    ADAPTER,
    CONFIG,
    INDEX,
    Origin,
    check_code,
    check_index,
    check_type,
    code_in,
    find,
    read_json,
    reason,
)
from macrobatch.train.settings import Precision, Settings
from macrobatch.train.vocabulary import hub_is_out_of_reach
from macrobatch.train.world import World

# Llama models: width, layers, heads. Keys and values have as many heads as queries; embedding and head are tied.
SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (32, 2, 2),
    "small": (128, 4, 4),
    "medium": (384, 6, 6),
    "large": (768, 12, 12),
}
RATES = {"tiny": 5e-3, "small": 5e-3, "medium": 1.5e-3, "large": 6e-4}  # default learning rates of these sizes
NEW_LENGTHS = 256, 2048  # tokens of a piece of a text, and of a conversation, in a new model of these sizes
LENGTHS = 2048, 8192  # in all other models, if they have so many positions
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = {"float64": torch.float64, "pure-bf16": torch.bfloat16}

CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError, IndexError)
MOST_LAYERS = 10_000  # a hundred times the deepest model in use; each takes a millisecond and more to make

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
            f"--model {settings.model} has no tokenizer. Name the one that its weights were trained with: "
            "--tokenizer FOLDER."
        )
    if settings.parallel == "ddp":
        return
    if world.size == 1:
        raise UsageError(
            f"--parallel {settings.parallel} needs several ranks, and there is only one. Start it with "
            "torchrun --nproc-per-node, or pass --parallel ddp."
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
                f"{folder} contains code ({code}), which is not executed. The classes of transformers and tokenizers "
                "are used instead, and an export does not refer to the code.",
                stacklevel=2,
            )


# ---------------------------------------------------------------------------------------------- making and loading


def origin_of(settings: Settings) -> Origin:
    """The origin of the model that ``--model`` names."""
    return Origin(settings.model, "size", Path(settings.model)) if settings.model in SIZES else find(settings.model)


def build_model(settings: Settings, vocabulary_size: int, end: int) -> tuple[nn.Module, Balance | None]:
    """The model to train, new or loaded, in float32 on the CPU; and the balance loss, if it is a mixture of experts."""
    origin = origin_of(settings)
    _warn_of_code(origin, settings.tokenizer)
    if origin.kind == "size":
        size = SIZES[settings.model]
        assert settings.seq_len is not None, "it was derived from the data"
        config = _llama(*size, vocabulary_size=vocabulary_size, end=end, seq_len=settings.seq_len)
        return make_model(config, settings.seed), None
    if settings.lora:
        model = load_model(origin)
    else:
        model = load_merged(origin) if origin.has_weights else make_model(_config_of(origin), settings.seed)
    suitable.require_causal(model, origin)
    balance = experts.balance_in(model, origin.label)
    if settings.lora:
        adapters.add(model, blocks_of(model), settings, origin)
    return model, balance


def lengths_of(settings: Settings) -> tuple[int, int]:
    """How long a piece of a text may be, and how long a conversation, or a prompt with its completion."""
    if settings.seq_len is not None:
        return settings.seq_len, settings.seq_len
    origin = origin_of(settings)
    if origin.kind == "size":
        return NEW_LENGTHS
    config = _full_config(origin)
    positions = positions_of(settings) or LENGTHS[1]
    window = getattr(config, "sliding_window", None) if settings.pack else None
    return min(LENGTHS[0], positions, window or positions), min(LENGTHS[1], positions)


def positions_of(settings: Settings) -> int | None:
    """The number of positions of the model that the settings name; None: no limit, or a new model of a size."""
    origin = origin_of(settings)
    return None if origin.kind == "size" else longest_of(_full_config(origin))


def longest_of(config: Any) -> int | None:
    """The number of positions of a model; None: there is no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def load_merged(origin: Origin) -> nn.Module:
    """The model in a folder with weights. For an adapter it is the base model with the adapter merged into it."""
    model = load_model(origin)
    if origin.adapter is not None:
        adapters.merge(model, origin.adapter, origin.label)
    return model


def precision_of(settings: Settings, world: World) -> Precision:
    """The precision of the settings; for auto: bf16 on a GPU that computes in it, else float32."""
    if settings.precision != "auto":
        return settings.precision
    has_bf16 = world.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "float32"


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
    """The configuration in a file, in a folder with weights, or on the hub. Refuses one that needs code."""
    file = origin.path if origin.kind == "config" else origin.file(CONFIG)
    config: Config = read_json(file or Path(origin.name, CONFIG))
    if origin.folder is not None:
        check_type(config, origin.label if origin.kind == "weights" else str(file), origin.folder)
    check_code(config, origin.label)
    return config


def make_model(config: Config, seed: int) -> nn.Module:
    """A model of this configuration with new weights that depend only on the seed, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    full = _checked_config(config)
    full.dtype = torch.float32
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = AutoModelForCausalLM.from_config(full)
    except CONFIG_ERRORS as error:
        raise _config_error(config, error) from error
    return model.float()


def _full_config(origin: Origin) -> Any:
    """The configuration of a model that is not one of the sizes, as an object of transformers."""
    from transformers import AutoConfig

    config = _config_of(origin)
    if origin.kind != "hub":
        return _checked_config(config)
    return AutoConfig.from_pretrained(origin.name, trust_remote_code=False, local_files_only=hub_is_out_of_reach())


def _checked_config(config: Config) -> Any:
    """A configuration as an object of transformers. Refuses one that no machine can hold."""
    from transformers import AutoConfig

    try:
        full = AutoConfig.for_model(**config)
        layers = getattr(full.get_text_config(), "num_hidden_layers", None)
    except Exception as error:  # many types, e.g. for a value of another kind
        raise _config_error(config, error) from error
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UsageError(
            f"the configuration of the model has {layers:,} layers, and the most here are {MOST_LAYERS:,}."
        )
    return full


def _config_error(config: Config, error: Exception) -> UsageError:
    return UsageError(
        f"a model of the type {config['model_type']!r} cannot be made from this configuration: {reason(error)}"
    )


def _check_hub(origin: Origin) -> None:
    """Refuse a model that is not on the hub or out of reach, and weights in other formats than safetensors."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(origin.name, trust_remote_code=False, local_files_only=hub_is_out_of_reach())
        index, adapter = origin.file(INDEX), origin.file(ADAPTER)
        _config_of(origin)
    except MacrobatchError:
        raise
    except Exception as error:  # many types, e.g. for a missing, damaged or unreachable model
        raise UsageError(
            f"--model {origin.name}: this is neither a size ({', '.join(SIZES)}), nor a file or folder here, nor a "
            f"model on the hub that can be reached: {reason(error)}"
        ) from error
    if adapter is not None:
        raise UsageError(f"--model {origin.name} is an adapter on the hub. Download it, and name its folder.")
    if index is not None:
        check_index(index)


def load_model(origin: Origin) -> nn.Module:
    """The model in a folder with weights, or on the hub. Only safetensors files are read, because they hold no code."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    _full_config(origin)  # refuses what needs code, and what no machine can hold
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
        raise UsageError(f"{origin.label}: no model could be loaded: {reason(error)}") from error
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise UsageError(
            f"{origin.label}: its files lack {len(missing)} of the weights of {type(model).__name__}, "
            f"{missing[0]} for example, which would be random. Choose a complete causal language model."
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


def prepare(model: nn.Module, settings: Settings, world: World) -> nn.Module:
    """The model ready for training: in its precision, on its device, and distributed."""
    _warn_of_dropout(model)
    model.train()
    adapters.move(model, world.device, WEIGHTS.get(settings.precision, torch.float32), AUTOCAST.get(settings.precision))
    _widen_norms(model)
    if settings.precision == "float64" and callable(choose := getattr(model, "set_experts_implementation", None)):
        choose("eager")  # torch's grouped products have no float64
    if settings.checkpoint_activations == "yes":
        checkpoint_activations(model)
    if settings.compile:
        for layer in blocks_of(model):
            layer.compile(dynamic=True)
    return _distribute(model, settings, world)


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
            f"{type(model).__name__} has no list of layers: leave out --compile, --parallel and the like."
        )
    return list(largest)


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward."""
    plain = without_ddp(model)
    if not getattr(plain, "supports_gradient_checkpointing", False):
        raise BackendError(f"{type(plain).__name__} does not support --checkpoint-activations.")
    plain.gradient_checkpointing_enable({"use_reentrant": False})


def _distribute(model: nn.Module, settings: Settings, world: World) -> nn.Module:
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
