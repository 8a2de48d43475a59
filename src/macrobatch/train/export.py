"""Write a trained model with its tokenizer into a folder, so that transformers and peft can read it."""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from macrobatch._torch.modules import without_ddp
from macrobatch.train import adapters
from macrobatch.train.files import replacing_folder
from macrobatch.train.pretrained import CONFIG, GENERATION, WEIGHTS, ExportInfo
from macrobatch.train.vocabulary import Vocabulary
from macrobatch.train.world import World

NAMES_OF_CODE = {"auto_map", "custom_pipelines"}  # entries of a configuration that refer to code


def export_model(
    model: nn.Module,
    run: Path,
    vocabulary: Vocabulary,
    kept: ExportInfo,
    world: World,
    *,
    which: str = "",
    has_balance: bool = False,
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
        own = {name: _to_saved_dtype(tensor, dtype) for name, tensor in adapters.merged_weights(plain, own).items()}
        save_file(own, aside / WEIGHTS, metadata={"format": "pt"})
        config: Any = copy.deepcopy(plain.config)
        config.architectures = [type(plain).__name__.removeprefix("FSDP")]
        config.dtype = dtype
        if has_balance:
            config.output_router_logits = True  # as it was: see `experts`
        for name in NAMES_OF_CODE & vars(config).keys():  # the code itself is not exported
            delattr(config, name)
        config.save_pretrained(aside)
        shutil.copymode(aside / CONFIG, aside / WEIGHTS)  # the library writes it for its owner only
        if kept.generation is not None:
            (aside / GENERATION).write_bytes(kept.generation)
        vocabulary.save(aside)
    return folders


def _to_saved_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the dtype of the original weights, unless values would become infinite in it."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    return tensor if narrow.isinf().any() and not tensor.isinf().any() else narrow
