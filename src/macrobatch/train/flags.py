"""Read the settings of a run from flags, from a TOML file, and from the run that is resumed.

Flags override the configuration file or the run that is resumed, which override the defaults. tyro, which makes the
command line from the dataclass, is imported only when there are flags to parse.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from macrobatch.errors import UsageError
from macrobatch.train.settings import ALTERNATIVES, DEFAULT_STEPS, ONCE, Settings, flag_of

NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def parsed(arguments: Sequence[str]) -> Settings:
    """The settings of a command line."""
    import tyro

    arguments = _said_in_full(arguments)
    _check_flags(arguments)
    _check_lists(arguments)
    chosen = tyro.cli(Settings, args=list(arguments), default=_basis(arguments), prog="macrobatch train")
    if chosen.epochs is None:
        chosen.check_warmup(chosen.steps or DEFAULT_STEPS)
    return chosen


# What other trainers call it.
SYNONYMS = {
    "learning_rate": "lr",
    "output_dir": "out",
    "output": "out",
    "dataset": "data",
    "train_file": "data",
    "train_data": "data",
    "dataset_text_field": "text_field",
    "field_mapping": "fields",
    "chat_template_path": "chat_template",
    "validation_file": "validation_data",
    "val_data": "validation_data",
    "model_name_or_path": "model",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_seq_length": "seq_len",
    "max_length": "seq_len",
    "block_size": "seq_len",
    "context": "seq_len",
    "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule",
    "warmup_steps": "warmup",
    "max_grad_norm": "max_norm",
    "grad_clip": "max_norm",
    "gradient_clip_val": "max_norm",
    "per_device_train_batch_size": "micro",
    "gradient_accumulation_steps": "batch_size",
    "dtype": "precision",
    "gradient_checkpointing": "checkpoint_activations",
    "save_steps": "save_every",
    "eval_steps": "validate_every",
    "patience": "early_stop",
    "metric_for_best_model": "best",
    "compute_metrics": "evaluate",
    "report_to": "track",
    "logger": "track",
    "wandb_project": "track_project",
    "resume_from_checkpoint": "resume",
    "optim": "optimizer",
    "optim_args": "optimizer_options",
    "use_peft": "lora",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
}


_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
YES_OR_NO = ("checkpoint_activations",)  # and more: --name alone says yes, --no-name no; in a file, true and false


def _said_in_full(arguments: Sequence[str]) -> list[str]:
    """Add a value to flags that may be given without one.

    >>> _said_in_full(["--checkpoint-activations", "--steps", "3", "--no-checkpoint-activations"])
    ['--checkpoint-activations', 'yes', '--steps', '3', '--checkpoint-activations', 'no']
    """
    found: list[str] = []
    alone = {flag_of(name): (flag_of(name), "yes") for name in YES_OR_NO}
    alone |= {flag_of(f"no_{name}"): (flag_of(name), "no") for name in YES_OR_NO}
    for word, following in itertools.pairwise([*arguments, "--"]):
        flag = word.replace("_", "-") if word.startswith("--") else word
        is_alone = flag in alone and (following.startswith("--") or flag.startswith("--no-"))
        found += alone[flag] if is_alone else [word]
    return found


def _check_flags(arguments: Sequence[str]) -> None:
    """Raise an error for a flag that does not exist, and name the one that was probably meant."""
    hints = typing.get_type_hints(Settings)
    known = {*NAMES, *(f"no_{name}" for name in NAMES if hints[name] is bool), "help"}
    for word in arguments:
        flag, name = word.partition("=")[0], _name_of(word)
        if not _FLAG.fullmatch(word) or name in known or name.startswith("tyro"):
            continue
        meant = _meant(name)
        hint = f"did you mean {flag_of(meant)}?" if meant else "macrobatch train --help lists them."
        raise UsageError(f"there is no {flag}: {hint}")


def _name_of(word: str) -> str:
    """The name of the setting that a flag sets."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def _check_lists(arguments: Sequence[str]) -> None:
    """Raise an error for a list flag that is given twice, because one list would be lost, or without a value."""
    hints = typing.get_type_hints(Settings)
    lists = {name for name in NAMES if typing.get_origin(hints[name]) is tuple}
    seen: set[str] = set()
    for word, following in itertools.pairwise([*arguments, "--"]):
        name = _name_of(word)
        if not _FLAG.fullmatch(word) or name not in lists:
            continue
        if name in seen:
            raise UsageError(f"{flag_of(name)} is given twice: put all behind one, as in {flag_of(name)} ONE TWO.")
        if "=" not in word and following.startswith("--"):
            raise UsageError(f"{flag_of(name)} is followed by nothing: say what it is, or leave it out.")
        seen.add(name)


def _meant(name: str) -> str | None:
    """The setting that a user who writes this name probably means."""
    close = next(iter(difflib.get_close_matches(name, sorted({*NAMES, *SYNONYMS}), 1)), None)
    return SYNONYMS.get(close, close) if close else None


def _basis(arguments: Sequence[str]) -> Settings:
    """The settings that the flags override: those of a file, of the run that is resumed, or the defaults."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume", action="store_true")
    for name in ("config", "out", *(name for pair in ALTERNATIVES for name in pair)):
        first.add_argument(flag_of(name), f"--{name}", dest=name)
    known, _ = first.parse_known_args(arguments)
    if known.config is not None:
        basis = loaded(Path(known.config))
    elif known.resume and known.out is None:
        raise UsageError("--resume goes on with a run: say which, with --out RUN.")
    elif known.resume and (saved := Path(known.out, "run.json")).is_file():
        basis = of_run(saved)
    else:
        basis = Settings()
    for pair in ALTERNATIVES:
        if any(getattr(known, name) is not None for name in pair):  # said instead of the other
            unsaid: dict[str, Any] = dict.fromkeys(pair)
            basis = dataclasses.replace(basis, **unsaid)
    return basis


def loaded(file: Path) -> Settings:
    """The settings in a TOML file; defaults for all others."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} is not TOML: {error}.") from None
    return _from(values, str(file))


def of_run(file: Path) -> Settings:
    """The settings with which a run was started."""
    try:
        return _from(json.loads(file.read_text(encoding="utf-8"))["settings"], str(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(
            f"{file} does not tell the settings of a run. Give them all, or choose another --out."
        ) from None


def _from(values: Mapping[str, Any], where: str) -> Settings:
    given = {name.replace("-", "_"): value for name, value in values.items()}
    for name in given:
        _check_name(name, where)
    try:
        return Settings(**{name: _listed(name, value) for name, value in given.items()})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _check_name(name: str, where: str) -> None:
    possible = [known for known in NAMES if known not in ONCE]
    if name in possible:
        return
    if name in ONCE:
        raise UsageError(f"{where} has no setting {name!r}: it belongs to a call, as the flag {flag_of(name)}.")
    if meant := _meant(name):
        raise UsageError(f"{where} has no setting {name!r}: did you mean {meant!r}?")
    raise UsageError(f"{where} has no setting {name!r}. There are {', '.join(possible)}.")


def _listed(name: str, value: Any) -> Any:
    """Convert a value from a file: lists to tuples, a single text to a tuple of one, true and false to yes and no."""
    if name in YES_OR_NO and isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and typing.get_origin(typing.get_type_hints(Settings)[name]) is tuple:
        return (value,)
    return tuple(value) if isinstance(value, list) else value
