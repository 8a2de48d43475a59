"""The origin of a model: a configuration, a folder with weights, the folder of a run, or the hub.

The content of a folder is checked before anything else reads it, so that no code in it is executed or unpickled, and so
that weights that cannot be read are never silently replaced by new ones.
"""

# mypy: untyped-calls-exclude="transformers"
from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from macrobatch.errors import UsageError
from macrobatch.train.storage import NAMED

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Files of weights that hold code, or that are not supported.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.safetensors")
NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}  # files of a trainer, not weights
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

UNEXECUTED = "Here nothing in a folder is executed."

Kind = Literal["size", "config", "weights", "hub"]


@dataclass(frozen=True)
class ExportInfo:
    """What an export keeps of the weights that a run started from."""

    dtype: torch.dtype | None  # the dtype of the weights on disk
    generation: bytes | None  # the content of their generation_config.json
    base: str  # the name or absolute path by which an adapter finds its base model


@dataclass(frozen=True)
class Origin:
    """The origin of the model that ``--model`` names."""

    name: str  # the name that the user gave
    kind: Kind  # one of the sizes of this trainer, a configuration without weights, a folder with weights, or the hub
    path: Path  # the path of the configuration, or of the folder with weights; for the other kinds, just the name
    flag: str = "--model "  # the flag with which the user named it, for messages
    adapter: Path | None = None  # the folder of an adapter; `path` is then that of its base model

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.flag}{self.name}"

    @property
    def has_weights(self) -> bool:
        """Whether weights are loaded. Otherwise they are new."""
        return self.kind in ("weights", "hub")

    @property
    def source(self) -> str:
        """The name or path that transformers loads from."""
        return str(self.path) if self.kind == "weights" else self.name

    @property
    def folder(self) -> Path | None:
        """The folder of its configuration; None: there is none on this machine."""
        return {"config": self.path.parent, "weights": self.path}.get(self.kind)

    @property
    def tokenizer(self) -> str | None:
        """The name or folder of its tokenizer; None: it has none."""
        if self.kind == "hub":
            return self.name
        folders = [folder for folder in (self.adapter, self.folder) if folder is not None]
        return next((str(one) for one in folders if any((one / name).is_file() for name in TOKENIZERS)), None)

    def file(self, name: str) -> Path | None:
        """One of its files; None if there is no file with that name."""
        if self.kind == "weights":
            return self.path / name if (self.path / name).is_file() else None
        if self.kind != "hub":
            return None
        from transformers.utils import cached_file

        found = cached_file(self.name, name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    def export_info(self) -> ExportInfo:
        """What an export keeps of it. It is read before the training: hours later it may be gone or out of reach."""
        generation = self.file(GENERATION)
        base = str(self.path.resolve()) if self.kind == "weights" else self.name
        return ExportInfo(self._dtype(), None if generation is None else generation.read_bytes(), base)

    def _dtype(self) -> torch.dtype | None:
        """The dtype of most of its weights on disk; None if there are none."""
        if not self.has_weights:
            return None
        if self.kind == "hub":
            from transformers import AutoConfig

            found = AutoConfig.from_pretrained(self.name, trust_remote_code=False).dtype
            return found if isinstance(found, torch.dtype) else None
        sizes: Counter[torch.dtype] = Counter()
        for file in weight_files(self.path):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dict
                    piece = opened.get_slice(name)
                    dtype = NAMED.get(piece.get_dtype())
                    if dtype is not None and dtype.is_floating_point:
                        sizes[dtype] += torch.Size(piece.get_shape()).numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def find(name: str) -> Origin:
    """The origin for a name that is none of the sizes. Refuses names that do not lead to a model."""
    path = Path(name).expanduser()
    if path.is_dir():
        return in_folder(path, name=name)
    if path.is_file() and path.suffix == ".json":
        return Origin(name, "config", path)
    if path.is_file() and path.suffix == ".safetensors":
        raise UsageError(f"--model {name} is a file of weights only; name its folder: --model {path.parent}.")
    if path.exists() or name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise UsageError(
            f"--model {name}: there is no configuration of a model there. It must be the name of a size, a config.json "
            "of transformers, a folder with one, or the folder of a run."
        )
    return Origin(name, "hub", path)


def in_folder(path: Path, *, name: str | None = None) -> Origin:
    """The model in a folder, or in the folder of a run. `name`: the value of --model, if that names the folder."""
    folder = path if (path / ADAPTER).exists() else model_folder(path)
    origin = Origin(str(path), "weights", folder, flag="") if name is None else Origin(name, "weights", folder)
    if (folder / ADAPTER).exists():
        return _with_base(origin)
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        weight_files(folder)
        return origin
    others = sorted({path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)} - NO_WEIGHTS)
    if others:
        new = "" if name is None else f"; or say --model {folder / CONFIG} to train new weights"
        raise UsageError(
            f"{origin.label}: its weights are in {others[0]}, which is not read here: only {WEIGHTS} is, because it "
            "holds no code. If you trust the file, load it with transformers and write it with "
            f"save_pretrained(folder, safe_serialization=True){new}."
        )
    return replace(origin, kind="config", path=folder / CONFIG)


def _with_base(adapter: Origin) -> Origin:
    """The origin of an adapter's base model, together with the adapter."""
    said, folder = adapter.label, adapter.path
    config = read_json(folder / ADAPTER)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not name or not isinstance(name, str):
        raise UsageError(f"{said} is an adapter, and its {ADAPTER} does not name its base (base_model_name_or_path).")
    base = Path(name).expanduser()
    if not base.is_dir():
        raise UsageError(
            f"{said} is an adapter, and its base model {name} was not found. Set base_model_name_or_path in "
            f"{folder / ADAPTER} to the folder of the base model."
        )
    if (base / ADAPTER).exists():
        raise UsageError(f"{said}: its base {name} is an adapter itself. Merge that into its model first.")
    if not (folder / ADAPTER_WEIGHTS).exists() and (others := sorted(folder.glob("adapter_model*"))):
        raise UsageError(
            f"{said}: its weights are in {others[0].name}, which is not read here: only {ADAPTER_WEIGHTS} is, because "
            "it holds no code. If you trust the file, load it with peft and write it with save_pretrained."
        )
    _plain_file(folder / ADAPTER_WEIGHTS)
    found = in_folder(base)
    if not found.has_weights:
        raise UsageError(f"{said}: its base {name} has a configuration, but no weights.")
    return replace(adapter, path=found.path, adapter=folder)


def model_folder(folder: Path) -> Path:
    """The folder of the model: this folder, or the folder `model` in the folder of a run."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}. Name the folder of a model, or of a run.")
    if (folder / CONFIG).is_file():
        return folder
    if (folder / "model" / CONFIG).is_file():
        return folder / "model"
    if (folder / "run.json").is_file():
        raise UsageError(
            f"{folder} holds no model yet. A run writes its model when it ends. Resume it: "
            f"macrobatch train --resume --out {folder}."
        )
    raise UsageError(f"{folder} holds no model: there is no {CONFIG} in it. Name the folder of a model, or of a run.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Refuses an index that names any other file."""
    whole = folder / WEIGHTS
    if whole.exists():
        return [_plain_file(whole)]
    return check_index(folder / INDEX, folder)


def check_index(index: Path, folder: Path | None = None) -> list[Path]:
    """The files that an index of weights names. With `folder`, they must exist in it."""
    try:
        named = set(read_json(index)["weight_map"].values())
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{index} is not an index of weights: there is no weight_map in it.") from None
    for name in named:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UsageError(
                f"{index} names {name!r}, which is no safetensors file of its own folder: nothing else is read. Write "
                "the model again with save_pretrained of transformers."
            )
    return [] if folder is None else [_plain_file(folder / name) for name in sorted(named)]


def _plain_file(path: Path) -> Path:
    """The path, if it is a file that can be opened as safetensors. Refuses pipes, devices and folders."""
    if not path.is_file():
        raise UsageError(f"{path} is missing, or is no file: the weights of the model cannot be read.")
    try:
        with safe_open(path, framework="pt"):
            return path
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path}: no model could be loaded: it is damaged, or no safetensors file ({error})."
        ) from None


# ------------------------------------------------------------------------------------------- code is never executed


def code_in(folder: Path) -> str | None:
    """The name of code that lies beside a model or a tokenizer, for messages; None: there is none."""
    files = sorted(path.name for path in folder.glob("*.py"))
    if not files and not any(_names_code(folder / name) for name in (CONFIG, "tokenizer_config.json")):
        return None
    return f"{files[0]}{' and more' if files[1:] else ''}" if files else "named by auto_map"


def _names_code(file: Path) -> bool:
    content = read_json(file) if file.is_file() else None
    return isinstance(content, dict) and bool(content.get("auto_map"))


# Entries of a configuration for which transformers would fetch code, or that need libraries which execute their own.
_CHOICES = re.compile(r"_?\w+_implementation(_internal)?")
_LOCAL = re.compile(r"(paged\|)?(eager|sdpa|flex_attention|\w+_mm|deepgemm|sonicmoe)")
_WITH_CODE = ("quantization_config", "use_kernels", "kernel_config", "custom_generate")


def check_code(config: Any, said: str) -> None:
    """Refuse a configuration, or a part of it, that makes transformers fetch or execute code."""
    if isinstance(config, list):
        for part in config:
            check_code(part, said)
    if not isinstance(config, dict):
        return
    for name, value in config.items():
        names = [*(value.values() if isinstance(value, dict) else (value,))] if _CHOICES.fullmatch(str(name)) else []
        foreign = [one for one in names if one is not None and not (isinstance(one, str) and _LOCAL.fullmatch(one))]
        if foreign or (name in _WITH_CODE and value):
            shown = repr(foreign[0] if foreign else value)
            raise UsageError(
                f"{said}: its {CONFIG} has {name}, {shown[:80]}, for which code would be fetched or executed. "
                f"{UNEXECUTED} Remove this entry; for quantized weights, take the model before it was quantized."
            )
        if name == "transformers_weights" and value not in (None, WEIGHTS, INDEX):
            raise UsageError(f"{said}: its {CONFIG} has {name}, {value!r}, and only {WEIGHTS} is read here.")
        check_code(value, said)


def reason(error: Exception) -> str:
    """The first line of another library's error, in our words if the library wants to execute foreign code."""
    said = str(error).strip() or type(error).__name__
    if "trust_remote_code" in said:
        return f"it works only with code of its own. {UNEXECUTED}"
    return said.splitlines()[0]


def check_type(config: Any, said: str, folder: Path) -> None:
    """Refuse a configuration whose model type transformers does not have."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise UsageError(f"{said} is not a configuration of transformers: no model_type in it.")
    if kind not in CONFIG_MAPPING:
        code = code_in(folder)
        own = f" It comes with code for it ({code}). {UNEXECUTED}" if code else ""
        raise UsageError(
            f"{said}: transformers {version('transformers')} does not have the model type {kind!r}.{own} Install a "
            "newer transformers, or choose another model."
        )


def read_json(file: Path) -> Any:
    """The content of a JSON file of a model."""
    if not file.is_file():
        raise UsageError(f"{file} is missing, or is no file.")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read as JSON: {str(error).splitlines()[0]}.") from None
