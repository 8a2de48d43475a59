"""LoRA through peft: a run trains small matrices beside the linear layers, and freezes the weights of the model.

peft changes the layers of a model in place, so the model keeps its class, and the rest of this package works as with
any model. peft is imported only if a run makes or reads an adapter.
"""

# mypy: untyped-calls-exclude="peft,torch,transformers"
from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from macrobatch.errors import UsageError, pip_install
from macrobatch.train.pretrained import ADAPTER, ADAPTER_WEIGHTS, Origin, read_json, reason
from macrobatch.train.settings import Settings, flag_of

RANK = 16  # without --lora-rank
RATE = 2e-4  # a learning rate that suits adapters
NAME = "default"  # the name that peft gives to the only adapter
PREFIX = "base_model.model."  # prefix of the names in files that peft reads
OWN = re.compile(rf"\.lora_[AB]\.{NAME}\.weight$")  # names of the adapter's tensors in the model

# The entries of an adapter's configuration that have an effect here. An entry in neither this list nor WITHOUT_EFFECT
# must be empty, or have its value in PLAIN.
USED = [
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out",
]  # fmt: skip
WITHOUT_EFFECT = {
    "peft_type", "task_type", "base_model_name_or_path", "inference_mode", "revision", "auto_mapping", "peft_version",
    "init_lora_weights", "megatron_core", "qalora_group_size", "runtime_config",
}  # for new adapters only, or with other entries that are refused  # fmt: skip
PLAIN: dict[str, Any] = {"bias": "none"}
KEEPS_BASE = (None, True, False, "gaussian", "orthogonal")  # initializations that do not change the frozen weights


def check(settings: Settings, origin: Origin) -> None:
    """Refuse settings that are wrong, as far as that is known before any weights are read."""
    if origin.adapter is not None:
        config_in(origin.adapter, origin.label)
        named = ("lora_rank", "lora_alpha", "lora_targets", "lora_dropout")
        if given := [name for name in named if getattr(settings, name) not in (None, ())]:
            raise UsageError(
                f"{flag_of(given[0])}: {origin.label} is an adapter with its own configuration. Leave this flag out."
            )
    if not settings.lora:
        return
    if not origin.has_weights:
        raise UsageError(
            f"--lora needs existing weights, and {origin.label} has none. Name a folder with "
            "weights, the folder of a run, or a model on the hub."
        )
    _peft()


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UsageError(f"adapters need peft, which is not installed: {pip_install('train')}.") from None
    return peft


# --------------------------------------------------------------------------------------------- making and loading


def add(model: nn.Module, blocks: list[nn.Module], settings: Settings, origin: Origin) -> None:
    """Add the adapter to train, a new one or the one that `origin` names, and freeze the rest of the model."""
    if origin.adapter is not None:
        _load(model, origin.adapter, origin.label)
        return
    rank = settings.lora_rank or RANK
    config = _peft().LoraConfig(
        r=rank,
        lora_alpha=2 * rank if settings.lora_alpha is None else settings.lora_alpha,
        lora_dropout=settings.lora_dropout or 0.0,
        target_modules=_targets(model, blocks, settings.lora_targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        _inject(model, config, origin.label, " Name other layers with --lora-targets.")


def merge(model: nn.Module, folder: Path, said: str) -> None:
    """Add the adapter in a folder to the weights of its model, so that the model is a plain one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    _load(model, folder, said)
    for name, layer in list(_adapted_layers(model)):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    for parameter in trained:
        parameter.requires_grad_(True)


def config_in(folder: Path, said: str) -> Any:
    """The configuration of a plain LoRA in a folder. Refuses entries that are unknown, or that change more than a plain
    LoRA.
    """
    found = read_json(folder / ADAPTER)
    if found.get("peft_type") != "LORA":
        raise UsageError(f"{said} is an adapter of the type {found.get('peft_type')}, and only LORA is read here.")
    for name, value in found.items():
        is_unknown = value not in (None, False, [], {}, PLAIN.get(name)) and name not in {*USED, *WITHOUT_EFFECT}
        if is_unknown or (name == "init_lora_weights" and value not in KEEPS_BASE):
            raise UsageError(
                f"{said} is no plain LoRA: {name} is {value!r} in its {ADAPTER}. Merge it into its model first "
                "(merge_and_unload of peft, then save_pretrained)."
            )
    used = {name: found[name] for name in USED if found.get(name) is not None}
    try:
        return _peft().LoraConfig(**used, task_type="CAUSAL_LM")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{said}: its {ADAPTER} cannot be used: {reason(error)}") from error


def _load(model: nn.Module, folder: Path, said: str) -> None:
    _inject(model, config_in(folder, said), said)
    saved = {_inside(name): tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if others := sorted(saved.keys() - own.keys()):
        raise UsageError(f"{said}: {others[0]} in {ADAPTER_WEIGHTS} is not in the model with this adapter.")
    if missing := sorted(own.keys() - saved.keys()):
        raise UsageError(f"{said}: its weights lack {len(missing)} tensors, for example {missing[0]}.")
    for name, parameter in own.items():
        if saved[name].shape != parameter.shape:
            raise UsageError(
                f"{said}: {name} has another shape, {list(saved[name].shape)}, than the adapter of its {ADAPTER}, "
                f"{list(parameter.shape)}."
            )
        parameter.data.copy_(saved[name])


def _inject(model: nn.Module, config: Any, said: str, hint: str = "") -> None:
    """Put an adapter beside the linear layers that its configuration names, and freeze everything else."""
    peft = _peft()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=NAME)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise UsageError(f"{said}: the adapter cannot be added to the model: {reason(error)}{hint}") from error
    for name, layer in _adapted_layers(model):
        if not isinstance(layer, peft.tuners.lora.Linear):
            raise UsageError(
                f"{said}: the adapter cannot be added to the model: peft would put it beside {name}, which is no "
                f"linear layer, but experts of a mixture or the like.{hint}"
            )
    for one in heard:
        if "fan_in_fan_out" not in str(one.message):  # peft corrects this entry itself
            warnings.warn(f"{said}: {one.message}", stacklevel=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(OWN.search(name) is not None)


def _targets(model: nn.Module, blocks: list[nn.Module], wanted: tuple[str, ...]) -> list[str]:
    """The names of the layers to adapt, for peft: those that the user named, or all linear layers of the blocks."""
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    inside = {id(module) for block in blocks for module in block.modules()}
    chosen = [name for name, module in linear.items() if id(module) in inside]
    short = sorted({name.rpartition(".")[2] for name in chosen})
    for target in wanted:
        found = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not found:
            raise UsageError(
                f"--lora-targets: the model has no linear layer {target!r}. There are {', '.join(short)}; a longer "
                f"name, such as {chosen[0] if chosen else target}, stands for a single one."
            )
        _require_untied(model, target, linear[found[0]])
    if wanted:
        return list(wanted)
    if not chosen:
        raise UsageError(f"--lora: the blocks of {type(model).__name__} have no linear layers. Name --lora-targets.")
    is_plain = {name for name in linear if name.rpartition(".")[2] in short} == set(chosen)
    return short if is_plain else chosen


def _require_untied(model: nn.Module, target: str, layer: nn.Module) -> None:
    others = [name for name, p in model.named_parameters() if p is layer.weight]
    if others and others[0].removesuffix(".weight").rpartition(".")[2] != target.rpartition(".")[2]:
        name = others[0].removesuffix(".weight").rpartition(".")[2]
        raise UsageError(
            f"--lora-targets: {target!r} shares its weights with {name}, so merging the adapter would change both."
        )


# ------------------------------------------------------------------------------------------------------ while training


def is_adapted(model: nn.Module) -> bool:
    """Whether the model has an adapter to train."""
    return hasattr(model, "peft_config")


def adapter_summary(model: nn.Module) -> dict[str, Any] | None:
    """The adapter that a run trains, as JSON, for the identity of the run; None if there is no adapter."""
    if not is_adapted(model):
        return None
    config: Any = model.peft_config[NAME]  # type: ignore[index]
    targets = config.target_modules
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "targets": targets if isinstance(targets, str) else sorted(targets),
    }


def frozen_fingerprint(model: nn.Module) -> str:
    """A hash of the frozen weights, bit by bit. Checkpoints do not hold these weights."""
    frozen = [(name, p.detach()) for name, p in model.named_parameters() if not p.requires_grad]

    def digest(named: tuple[str, Tensor]) -> bytes:
        name, tensor = named
        head = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return hashlib.sha256(head + hashlib.sha256(content.data).digest()).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases Python's global lock
        return hashlib.sha256(b"".join(pool.map(digest, frozen))).hexdigest()


def move(model: nn.Module, device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None = None) -> None:
    """Move the model to a device and dtype. The adapter stays in float32 or wider, because its updates are small.

    The frozen weights of linear layers are stored in the dtype of autocast, which would convert them at every use: this
    takes half of the memory, and changes no result.
    """
    wide = {p: p.detach().clone() for p in model.parameters() if p.requires_grad} if is_adapted(model) else {}
    if autocast is not None and wide:
        for parameter in _of_linear_layers(model):
            parameter.data = parameter.data.to(autocast)
        model.to(device)
        return
    model.to(device=device, dtype=dtype)
    for parameter, value in wide.items():
        parameter.data = value.to(device=device, dtype=torch.promote_types(dtype, torch.float32))


def _of_linear_layers(model: nn.Module) -> list[nn.Parameter]:
    """The frozen parameters that only linear layers use."""
    from transformers.pytorch_utils import Conv1D

    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    return [
        parameter
        for parameter, modules in users.items()
        if not parameter.requires_grad and all(isinstance(module, nn.Linear | Conv1D) for module in modules)
    ]


# ----------------------------------------------------------------------------------------------------------- exporting


def merged_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the plain model, computed from all weights of the adapted one, e.g. after gathering all shards."""
    own = {name: tensor for name, tensor in weights.items() if not OWN.search(name)}
    for name, layer in _adapted_layers(model):
        for part in [part for part in own if part.startswith(f"{name}.base_layer.")]:
            own[part.replace(f"{name}.base_layer.", f"{name}.")] = own.pop(part)
        a, b = (weights[f"{name}.lora_{letter}.{NAME}.weight"] for letter in "AB")
        delta = (b @ a) * layer.scaling[NAME]
        base = own[f"{name}.weight"]
        wide = base.to(torch.promote_types(base.dtype, delta.dtype))
        own[f"{name}.weight"] = (wide + (delta.T if layer.fan_in_fan_out else delta)).contiguous()
    return own


def write(model: nn.Module, weights: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write only the adapter, for the model `base`. ``PeftModel.from_pretrained`` reads it."""
    own = {_outside(name): tensor.contiguous() for name, tensor in weights.items() if OWN.search(name)}
    save_file(own, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config: Any = model.peft_config[NAME]  # type: ignore[index]
    before = config.base_model_name_or_path, config.inference_mode
    config.base_model_name_or_path, config.inference_mode = base, True
    try:
        config.save_pretrained(folder)
        shutil.copymode(folder / ADAPTER, folder / ADAPTER_WEIGHTS)  # the library writes it for its owner only
    finally:
        config.base_model_name_or_path, config.inference_mode = before


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, with their names."""
    layers = model.named_modules() if is_adapted(model) else ()
    return ((name, layer) for name, layer in layers if NAME in getattr(layer, "lora_A", ()))


def _outside(name: str) -> str:
    """The name of a tensor in files, for its name in the model."""
    return PREFIX + name.replace(f".{NAME}.weight", ".weight")


def _inside(name: str) -> str:
    """The name of a tensor in the model, for its name in files."""
    return name.removeprefix(PREFIX).removesuffix(".weight") + f".{NAME}.weight"
