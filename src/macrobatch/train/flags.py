"""Read the settings of a run from flags, from a YAML or TOML file, and from the run that is resumed.

Flags override the configuration file or the run that is resumed, which override the defaults. The command line is made
from the dataclass `Settings`: its groups, types, defaults and texts.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from macrobatch.errors import UsageError, pip_install
from macrobatch.train.settings import ALTERNATIVES, DEFAULT_STEPS, GROUPS, ONCE, Settings, flag_of, is_union

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
NAMES = tuple(FIELDS)
YES_OR_NO = ("checkpoint_activations",)  # and more: --name alone says yes, --no-name no; in a file, true and false
_FLAG = re.compile(r"--[A-Za-z][\w-]*")

# The names that other trainers use for a setting.
SYNONYMS = {
    name: setting
    for setting, names in {
        "lr": "learning_rate",
        "out": "output_dir output",
        "data": "dataset datasets train_file train_data",
        "text_field": "dataset_text_field",
        "fields": "field_mapping",
        "chat_template": "chat_template_path",
        "validation_data": "validation_file val_data test_datasets eval_dataset",
        "validation": "val_set_size val_size",
        "model": "model_name_or_path base_model",
        "steps": "max_steps",
        "epochs": "num_train_epochs num_epochs",
        "seq_len": "max_seq_length max_length cutoff_len sequence_len block_size context",
        "schedule": "lr_scheduler_type lr_scheduler",
        "warmup": "warmup_steps",
        "max_norm": "max_grad_norm grad_clip gradient_clip_val",
        "micro": "per_device_train_batch_size micro_batch_size",
        "batch_size": "gradient_accumulation_steps",
        "precision": "dtype",
        "checkpoint_activations": "gradient_checkpointing",
        "save_every": "save_steps",
        "keep": "save_total_limit",
        "validate_every": "eval_steps",
        "early_stop": "patience early_stopping_patience",
        "best": "metric_for_best_model",
        "evaluate": "compute_metrics",
        "track": "report_to logger",
        "track_project": "wandb_project",
        "resume": "resume_from_checkpoint auto_resume_from_checkpoints",
        "optimizer": "optim",
        "optimizer_options": "optim_args",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "eps": "adam_epsilon",
        "lora": "use_peft",
        "lora_rank": "lora_r",
        "lora_targets": "lora_target lora_target_modules",
        "pack": "packing sample_packing",
        "compile": "torch_compile",
    }.items()
    for name in names.split()
}

# Settings of other trainers that this one handles in another way.
ADVICE = {
    name: advice
    for names, advice in {
        "bf16": "say --precision bf16; on a GPU that has bf16 it is the default",
        "fp16": "say --precision fp16",
        "tf32": "say --precision bf16",
        "fp8": "the precisions are float32, bf16, fp16, pure-bf16 and float64",
        "load_in_4bit load_in_8bit quantization_bit": (
            "quantized weights are not supported; with --lora, the frozen weights are in bfloat16 wherever bf16 is used"
        ),
        "push_to_hub hub_model_id": (
            "the run writes its model into the folder RUN/model; upload it with: hf upload NAME RUN/model"
        ),
        "adapter": "say --lora",
        "finetuning_type": "say --lora for adapters; without it, all weights are trained",
        "warmup_ratio": "say --warmup STEPS; a tenth of all steps is the default",
        "logging_steps": "every step is recorded in RUN/metrics.jsonl",
        "train_on_inputs train_on_prompt": (
            "only answers are learnt; to learn the whole text, write it into the field 'text'"
        ),
        "group_by_length": "micro-batches hold samples of about the same length without a flag: see --micro",
        "pad_to_sequence_len": "only --cuda-graph needs few shapes, and pads to them without a flag",
        "flash_attention flash_attn attn_implementation": (
            "the fastest attention that the model supports is chosen without a flag"
        ),
        "deepspeed fsdp": "shard the model over ranks with --parallel fsdp, under torchrun",
        "trust_remote_code": "code in the folder of a model is never executed here",
        "neftune_noise_alpha": "noise on embeddings is not supported",
        "do_train": "macrobatch train always trains; leave it out",
        "stage": "this trains on texts and conversations; leave it out",
        "saves_per_epoch": "say --save-every STEPS",
        "evals_per_epoch": "say --validate-every STEPS",
        "wandb_watch": "say --track wandb",
        "special_tokens": "name a folder whose tokenizer has these tokens: --tokenizer FOLDER",
    }.items()
    for name in names.split()
}


def parse_flags(arguments: Sequence[str]) -> Settings:
    """The settings of a command line."""
    words = [_with_dashes(word) for word in arguments]
    found, rest = _parser().parse_known_args(words)
    if rest:
        written = dict(zip(words, arguments, strict=True))
        raise UsageError(_unknown_flags([written[word] for word in rest]))
    given = {name: _value(name, value) for name, value in vars(found).items()}
    if isinstance(given.get("resume"), str) and given["resume"] != "auto":
        raise UsageError(f"--resume takes no folder: say --resume --out {given['resume']}.")
    basis = _basis(given)
    for pair in ALTERNATIVES:
        if any(name in given for name in pair):  # said instead of the other
            given = {**dict.fromkeys(pair), **given}
    chosen = dataclasses.replace(basis, **given)
    if chosen.epochs is None:
        chosen.check_warmup(chosen.steps or DEFAULT_STEPS)
    return chosen


def _basis(given: Mapping[str, Any]) -> Settings:
    """The settings that the flags override: those of a file, of the run that is resumed, or the defaults."""
    if given.get("config") is not None:
        return load_config(Path(given["config"]))
    resume, out = given.get("resume"), given.get("out")
    if resume and out is None:
        value = "" if resume is True else " auto"
        raise UsageError(f"--resume{value} needs --out RUN.")
    if resume and out is not None and (saved := Path(out, "run.json")).is_file():
        return settings_of_run(saved)
    return Settings()


# ---------------------------------------------------------------------------------------------------- the command line


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of this package."""

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument (--[\w-]+).*?: ", r"\1: ", message)
        raise UsageError(f"{text.rstrip('.')}. macrobatch train --help lists all flags.")


class _List(argparse.Action):
    """A flag with one or more values, which must not be given twice: one list would be lost."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        if not values:
            raise UsageError(f"{flag} needs a value.")
        if hasattr(namespace, self.dest):
            raise UsageError(f"{flag} is given twice. Put all values after one {flag}: {flag} ONE TWO.")
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    about = (inspect.getdoc(Settings) or "").partition("The flags of")[0]
    parser = _Parser(
        prog="macrobatch train", description=about, usage="macrobatch train [--FLAG VALUE ...]", allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
    )  # fmt: skip
    texts, hints = _texts(), typing.get_type_hints(Settings)
    group: Any = parser
    starts = {first: title for title, first in GROUPS.items()}
    for name, field in FIELDS.items():
        if name in starts:
            group = parser.add_argument_group(starts[name])
        default = (
            ""
            if field.default is None or field.default is False or field.default == ()
            else f" Default: {field.default}."
        )
        _add(group, name, hints[name], (texts[name] + default).replace("%", "%%"))
    return parser


def _add(group: Any, name: str, hint: Any, text: str) -> None:
    """Add the flag of a setting."""
    flag = flag_of(name)
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        group.add_argument(flag, action=_List, nargs="*", metavar=_metavar(inner), help=text)
    elif name in YES_OR_NO:
        group.add_argument(flag, nargs="?", const="yes", metavar=_metavar(hint), help=text)
        group.add_argument(flag_of(f"no_{name}"), dest=name, action="store_const", const="no", help=argparse.SUPPRESS)
    elif name == "resume":
        group.add_argument(flag, nargs="?", const=True, metavar="auto", help=text)
    else:
        group.add_argument(flag, metavar=_metavar(hint), help=text)


def _metavar(hint: Any) -> str:
    """The kind of value that a flag takes, for people."""
    kinds = [kind for kind in _kinds(hint) if kind is not types.NoneType]
    if typing.get_origin(kinds[0]) is Literal:
        return "|".join(typing.get_args(kinds[0]))
    return {int: "N", float: "NUMBER"}.get(kinds[0], "TEXT")


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if is_union(hint) else (hint,)


def _texts() -> dict[str, str]:
    """The text below each field of `Settings`, from its source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(Settings))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _with_dashes(word: str) -> str:
    """A flag as it is listed, for a word of the command line: --batch_size is --batch-size."""
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if _FLAG.fullmatch(flag) else word


def _unknown_flags(rest: Sequence[str]) -> str:
    """The message for words that are no flags; it names the flags that were probably meant."""
    flags = [flag for word in rest if _FLAG.fullmatch(flag := word.partition("=")[0])]
    if not flags:
        return f"unexpected argument {rest[0]!r}. macrobatch train --help lists all flags."
    said = []
    for flag in dict.fromkeys(flags):
        meant, advice = _guess(flag.removeprefix("--").replace("-", "_").removeprefix("no_"))
        listed = "macrobatch train --help lists them" if meant is None else f"did you mean {flag_of(meant)}?"
        said.append(f"there is no {flag}: {advice or listed}")
    return "\n".join(f"{text}{'' if text.endswith('?') else '.'}" for text in said)


def _guess(name: str) -> tuple[str | None, str | None]:
    """The setting that a user who writes this name probably means; or advice, if there is no such setting."""
    close = next(iter(difflib.get_close_matches(name, sorted({*NAMES, *SYNONYMS, *ADVICE}), 1)), None)
    if close in ADVICE and close not in NAMES:
        return None, ADVICE[close]
    return (SYNONYMS.get(close, close) if close else None), None


def _value(name: str, value: Any) -> Any:
    """The value of a setting, for what the command line or a file has. What cannot be converted is refused later."""
    hint = typing.get_type_hints(Settings)[name]
    if typing.get_origin(hint) is tuple:
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value
    if name in YES_OR_NO and isinstance(value, bool):
        return "yes" if value else "no"
    for kind in _kinds(hint):
        if kind in (int, float) and isinstance(value, str):
            try:
                return kind(value)  # YAML reads 1e-5 as a text
            except ValueError:
                continue
        if kind is str and isinstance(value, int) and not isinstance(value, bool):
            return str(value)  # YAML reads `micro: 4` as a number
    return value


# --------------------------------------------------------------------------------------------------------------- files


def load_config(file: Path) -> Settings:
    """The settings in a YAML or TOML file; defaults for all others."""
    is_yaml = file.suffix.lower() in (".yaml", ".yml")
    try:
        text = file.read_text(encoding="utf-8-sig")
        values = _yaml(text) if is_yaml else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        kind = "YAML" if is_yaml else "TOML; a file in YAML must be named .yaml"
        raise UsageError(f"--config {file} is not {kind}: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"--config {file} must have one setting per line, such as lr: 1e-4.")
    return _from(values, str(file))


def _yaml(text: str) -> Any:
    """The content of a YAML file. Refuses a name that is given twice, and aliases, which could stand for any amount."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"a file in YAML needs PyYAML: {pip_install('train')}. Or write the file as TOML.") from None
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"aliases such as *{event.anchor} are not supported")
        root = yaml.compose(text, yaml.SafeLoader)
        names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is given twice")
        return {} if root is None else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def settings_of_run(file: Path) -> Settings:
    """The settings with which a run was started."""
    try:
        return _from(json.loads(file.read_text(encoding="utf-8"))["settings"], str(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(f"{file} has no settings of a run. Pass all settings, or choose another --out.") from None


def _from(values: Mapping[str, Any], where: str) -> Settings:
    given = {name.replace("-", "_"): value for name, value in values.items()}
    if unknown := [said for name in given if (said := _unknown_name(name))]:
        raise UsageError("\n".join(f"{where} has no setting {said}" for said in unknown))
    try:
        return Settings(**{name: _value(name, value) for name, value in given.items()})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _unknown_name(name: str) -> str | None:
    """What to say about the name of a setting that does not exist in files; None if it does."""
    possible = [known for known in NAMES if known not in ONCE]
    if name in possible:
        return None
    if name in ONCE:
        return f"{name!r}: only the command line has it, as {flag_of(name)}."
    meant, advice = _guess(name)
    if advice:
        return f"{name!r}: {advice}."
    return f"{name!r}: did you mean {meant!r}?" if meant else f"{name!r}. There are {', '.join(possible)}."
