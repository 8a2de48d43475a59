"""`Settings`: the settings of a run, as a dataclass. `flags.py` reads them from the command line and from files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from macrobatch.errors import UsageError, counted

Schedule = Literal["cosine", "linear", "constant"]
Scaling = Literal["none", "linear", "sqrt"]
Precision = Literal["auto", "float32", "bf16", "fp16", "pure-bf16", "float64"]
Parallel = Literal["ddp", "fsdp", "hsdp"]
Track = Literal["tensorboard", "wandb", "mlflow", "trackio", "none"]

DEFAULT_BATCH = 16  # samples
DEFAULT_STEPS = 320
DEFAULT_RAMP_START = 0.25
DEFAULT_VALIDATION = 0.01  # of the documents
ALTERNATIVES = (("batch_size", "batch_tokens"), ("steps", "epochs"))
GROUPS = {
    "model": "model",
    "data": "data",
    "batch": "batch_size",
    "optimizer": "lr",
    "run": "out",
    "report": "validate_every",
}  # the groups of flags, each with its first one
ONCE = ("config", "print_config", "resume", "debug")  # of this call, not of the run


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train a causal language model, from scratch or from existing weights.

    Without any setting, it trains a small model on the functions of the Python standard library. Under torchrun, the
    same settings use all ranks. Up to rounding, the losses depend only on the data, the seed and the batch, and not on
    the number of ranks and micro-batches. The flags of `macrobatch train` and the arguments of
    `macrobatch.train.Settings` are the same.
    """

    model: str = "small"
    """tiny, small, medium or large; a config.json of transformers; a folder with weights; a run; a name on the hub."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, or a name on the hub.
    If not set: the model's own tokenizer, or a new one that is trained on the data."""
    vocabulary_size: int = 4096
    """The number of tokens in the vocabulary of a tokenizer that is trained on the data."""
    lora: bool = False
    """Freeze the existing weights, and train small adapters beside them (LoRA)."""
    lora_rank: int | None = None
    """The rank of the adapters. If not set: 16."""
    lora_alpha: float | None = None
    """The output of the adapters is multiplied by alpha / rank. If not set: twice the rank."""
    lora_dropout: float | None = None
    """The dropout probability for the inputs of the adapters. If not set: 0."""
    lora_targets: tuple[str, ...] = ()
    """The names of the layers that get an adapter. If not set: all linear layers of the decoder's blocks."""

    data: tuple[str, ...] = ()
    """Files of text, JSONL, CSV or parquet; folders of such files, or folders saved by `datasets`. To mix them, give
    each a weight, as in a.jsonl:0.7 b.jsonl:0.3. If not set: the functions of the Python standard library."""
    text_field: str = "text"
    """The name of the field that holds the text of a record."""
    fields: tuple[str, ...] = ()
    """The names of your fields, if they are not text, prompt, completion, messages and so on.
    Each as NAME=COLUMN, e.g. prompt=question."""
    chat_template: str | None = None
    """The template that turns conversations into text: a Jinja file, or chatml. If not set: the tokenizer's own."""
    seq_len: int | None = None
    """The length of the longest sample, in tokens; longer texts are cut into pieces. If not set: long enough for all
    conversations and prompts, if the model allows it; 256 or more for new models, 2048 or more for all others."""
    truncate: bool = False
    """Cut conversations and prompts that are too long, even if they are more than 5 % of the data. --seq-len does so
    too."""
    validation: float | None = None
    """The fraction of the documents that is kept for validation. 0: no validation. If not set: 0.01."""
    validation_data: tuple[str, ...] = ()
    """Files and folders to validate on, instead of a fraction of the data."""

    batch_size: int | None = None
    """The number of samples in the batch of one optimizer step, over all ranks. If not set: 16."""
    batch_tokens: int | None = None
    """The number of tokens in a batch, instead of a number of samples."""
    batch_ramp: int = 0
    """The number of steps in which the batch grows to its full size. 0: it has its full size from the start."""
    batch_ramp_start: float = DEFAULT_RAMP_START
    """The size of the first batch of a ramp, as a fraction of the full batch."""
    micro: str = "tokens"
    """How to cut a batch into micro-batches. N: N samples each. tokens:N: at most N tokens each, including padding.
    tokens: as many tokens as fit into the memory of a GPU; on a CPU, 1024. auto: as many samples as fit."""
    pack: bool = False
    """Put several samples into each row, with separate positions and attention: less padding, the same losses."""
    steps: int | None = None
    """The number of optimizer steps. If not set: 320."""
    epochs: int | None = None
    """The number of passes over the data, instead of a number of steps."""

    lr: float | None = None
    """The highest learning rate. If not set: a value for each size from tiny to large, 1e-3 for a config.json,
    5e-5 for existing weights, and 2e-4 with --lora."""
    lr_scale: Scaling = "none"
    """Adapt lr to the batch: linear multiplies it by batch / reference_batch, sqrt by the square root of that."""
    reference_batch: int | None = None
    """The batch for which lr is meant: a number of samples, or of tokens with --batch-tokens."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up. constant: it does not fall."""
    warmup: int | None = None
    """The number of steps in which the learning rate rises. If not set: a tenth of all steps."""
    final_lr: float = 0.1
    """The learning rate at the end, as a fraction of the highest one. No effect with --schedule constant."""
    optimizer: str = "adamw"
    """adamw, muon, adafactor, adamw-8bit (needs bitsandbytes), sgd, or MODULE:CLASS for your own optimizer."""
    optimizer_options: tuple[str, ...] = ()
    """Further arguments of the optimizer, as NAME=VALUE."""
    weight_decay: float = 0.1
    """The weight decay of matrices. Vectors, such as biases, have none."""
    beta1: float = 0.9
    """AdamW's beta1, the decay of its mean of gradients."""
    beta2: float = 0.95
    """AdamW's beta2, the decay of its mean of squared gradients."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    max_norm: float = 1.0
    """The norm to which gradients are clipped. inf: no clipping."""

    out: str | None = None
    """The run folder. If not set: runs/MODEL-1, or the next free number."""
    resume: bool | Literal["auto"] = False
    """Resume the run in --out from its last checkpoint. A larger --steps or --epochs extends a finished run.
    auto: resume it if it exists, and begin it otherwise."""
    save_every: int = 100
    """The number of steps between checkpoints. There is also one at the end; 0: only that one."""
    keep: int = 2
    """The number of latest checkpoints to keep. The one with the best validation is kept in addition."""
    precision: Precision = "auto"
    """bf16, fp16: weights in float32 (frozen ones in 16 bits), matrix products in 16 bits (autocast).
    pure-bf16: weights in bfloat16 too, and gradients summed in float32. auto: bf16 on a GPU that has it, or float32."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    cuda_graph: bool = False
    """Record the forward and backward of micro-batches as CUDA graphs, and replay them. For small micro-batches."""
    checkpoint_activations: Literal["no", "yes", "auto"] = "no"
    """yes: save memory by computing each layer again in the backward, instead of keeping its activations.
    auto: do this only if not even a single sample fits otherwise."""
    parallel: Parallel = "ddp"
    """How ranks hold the model: each has a copy (ddp), all share one (fsdp), or groups of ranks share one (hsdp)."""
    shard_ranks: int | None = None
    """For hsdp: the number of ranks that share one copy of the model. If not set: the ranks of one host."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. auto: on GPUs if there are any."""
    seed: int = 0
    """The seed for the initial weights, the order of the samples, and the choice of the validation data."""
    config: str | None = None
    """A YAML or TOML file with any of these settings. Flags override it."""
    print_config: bool = False
    """Print all settings as a TOML file, and exit."""
    debug: bool = False
    """Show the traceback of an error."""

    validate_every: int = 100
    """The number of steps between validations. There is also one at the end; 0: only that one."""
    early_stop: int | None = None
    """Stop after this many validations in a row without a new best result. If not set: do not stop early."""
    evaluate: str | None = None
    """MODULE:FUNCTION, your own evaluation. Each validation calls the function with the model and the tokenizer.
    It returns a dict of numbers, which are recorded."""
    best: str = "loss"
    """The number of a validation that decides which checkpoint is the best: the lowest value is best.
    With :max, as in accuracy:max, the highest is best."""
    track: tuple[Track, ...] = ()
    """The trackers that record all numbers, beside the run folder. none: no tracker. If not set: tensorboard."""
    track_project: str = "macrobatch"
    """The name of the project, or experiment, in the trackers."""
    prompt: str | None = None
    """The beginning of the text that the model writes at the end of the run. If not set: the beginning of a sample."""
    sample_tokens: int = 96
    """The length of that text, in tokens. 0: no text."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # programs have paths, and lists
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        _check_types(self)
        _check_ranges(self)
        _check_together(self)
        self.cut  # noqa: B018  # raises where it cannot be read

    @property
    def cut(self) -> tuple[Literal["count", "tokens", "auto"], int | None]:
        """How batches are cut: by samples or tokens, and the size of a micro-batch (None: found by trying)."""
        kind, colon, number = self.micro.partition(":")
        if self.micro.isdecimal() and int(self.micro) > 0:
            return "count", int(self.micro)
        if self.micro == "auto":
            return "auto", None
        if kind == "tokens" and (not colon or (number.isdecimal() and int(number) > 0)):
            return "tokens", int(number) if colon else None
        raise UsageError(
            f"--micro must be a number of samples, tokens, tokens:NUMBER or auto: got {self.micro!r}. E.g. --micro 16, "
            "or --micro tokens:4096."
        )

    @property
    def best_number(self) -> tuple[str, bool]:
        """The name of the number that decides on the best checkpoint, and whether a higher value is better."""
        name, colon, order = self.best.rpartition(":")
        if not colon or order not in ("min", "max"):
            name, order = self.best, "min"
        return name, order == "max"

    @property
    def trackers(self) -> tuple[str, ...] | None:
        """The names of the trackers. Empty: use the default. None: use no tracker."""
        return None if "none" in self.track else self.track

    @property
    def lasting(self) -> dict[str, Any]:
        """The settings that belong to the run, and not only to this call, as values for JSON."""
        fields = dataclasses.asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items() if name not in ONCE}

    def check_warmup(self, steps: int) -> None:
        """Raise an error if the warm-up is longer than the run."""
        if self.warmup is not None and self.warmup > steps:
            raise UsageError(
                f"--warmup {self.warmup} is longer than the run of {counted(steps, 'step')}: the learning rate would "
                "never be reached. Shorten it, or take more --steps."
            )

    def toml(self) -> str:
        """The settings as a TOML file for `config`. Settings without a value become comments."""
        lines = []
        for name, value in self.lasting.items():
            lines.append(f"# {name} =" if value is None else f"{name} = {_toml(value)}")
        text = "\n".join(lines) + "\n"
        return text.encode("utf-8", "replace").decode("utf-8")  # names of files may hold bytes that are no text


def _plain(value: Any) -> Any:
    """Convert a path to a string, and a list to a tuple."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# ------------------------------------------------------------------------------------------------ what is refused


def _check_types(settings: Settings) -> None:
    hints = typing.get_type_hints(Settings)
    for field in dataclasses.fields(settings):
        value, wanted = getattr(settings, field.name), hints[field.name]
        if not _is_of(value, wanted):
            raise UsageError(f"{flag_of(field.name)} must be {_words(wanted)}: got {value!r}.")
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and "\0" in text for text in texts):
            raise UsageError(f"{flag_of(field.name)} must not hold a NUL character: got {value!r}.")


def is_union(wanted: Any) -> bool:
    """Whether a type is a union of several."""
    return typing.get_origin(wanted) in (types.UnionType, typing.Union)


def _is_of(value: object, wanted: Any) -> bool:
    if typing.get_origin(wanted) is Literal:
        return value in typing.get_args(wanted)
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, typing.get_args(wanted)[0]) for item in value)
    if is_union(wanted):
        return any(_is_of(value, choice) for choice in typing.get_args(wanted))
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _words(wanted: Any) -> str:
    if typing.get_origin(wanted) is Literal:
        return ("one of " if len(typing.get_args(wanted)) > 1 else "") + ", ".join(typing.get_args(wanted))
    if is_union(wanted):
        return " or ".join(_words(choice) for choice in typing.get_args(wanted) if choice is not types.NoneType)
    if wanted == tuple[str, ...]:
        return "a list of texts"
    if typing.get_origin(wanted) is tuple:
        return _words(typing.get_args(wanted)[0]).replace("one", "some", 1)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[wanted]


# The smallest and the largest value of each number, both included.
RANGES: dict[str, tuple[float, float]] = {
    name: (low, high)
    for low, high, names in (
        (258, 2**31, "vocabulary_size"),  # all bytes, and two special ones
        (2, 2**31, "seq_len"),
        (0, 0.9, "validation"),
        (0, 1, "final_lr eps"),
        (1e-6, 1, "batch_ramp_start"),
        (0, 1 - 1e-9, "beta1 beta2 lora_dropout"),
        (0, 1e6, "lr weight_decay"),
        (0, 2**63 - 1, "seed"),
        (0, math.inf, "validate_every batch_ramp warmup save_every sample_tokens"),
        (1, math.inf, "early_stop batch_size batch_tokens steps epochs reference_batch lora_rank shard_ranks keep"),
        (1e-30, 1e30, "lora_alpha"),
        (1e-30, math.inf, "max_norm"),
    )
    for name in names.split()
}


def _check_ranges(settings: Settings) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(settings, name)
        if value is None or low <= value <= high:
            continue
        between = f"at least {_number(low)}" if high == math.inf else f"between {_number(low)} and {_number(high)}"
        raise UsageError(f"{flag_of(name)} must be {between}: got {value!r}.")


def _number(value: float) -> str:
    """A number as text for an error message."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _check_together(settings: Settings) -> None:
    if settings.validation is not None and settings.validation_data:
        raise UsageError("pass --validation or --validation-data, not both.")
    best, _ = settings.best_number
    if not best:
        raise UsageError(f"--best must name a number: got {settings.best!r}. E.g. --best loss, or --best accuracy:max.")
    if settings.early_stop is not None and settings.validation == 0 and best in ("loss", "perplexity"):
        raise UsageError("--early-stop needs validation data, but --validation is 0.")
    if settings.early_stop is not None and settings.validate_every == 0:
        raise UsageError("--early-stop compares several validations, but --validate-every 0 runs only one, at the end.")
    if settings.batch_ramp == 0 and settings.batch_ramp_start != DEFAULT_RAMP_START:
        raise UsageError("--batch-ramp-start needs --batch-ramp.")
    if settings.prompt is not None and settings.sample_tokens == 0:
        raise UsageError("--prompt has no effect with --sample-tokens 0, which writes no text.")
    if len(settings.track) > 1 and "none" in settings.track:
        raise UsageError(f"--track none excludes other trackers: got {' '.join(settings.track)}.")
    for one, other in ALTERNATIVES:
        if getattr(settings, one) is not None and getattr(settings, other) is not None:
            raise UsageError(f"pass {flag_of(one)} or {flag_of(other)}, not both.")
    if (settings.lr_scale != "none") != (settings.reference_batch is not None):
        raise UsageError("pass both --lr-scale linear (or sqrt) and --reference-batch, or neither.")
    if settings.shard_ranks is not None and settings.parallel != "hsdp":
        raise UsageError(f"--shard-ranks needs --parallel hsdp: got --parallel {settings.parallel}.")
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"):
        if not settings.lora and getattr(settings, name) not in (None, ()):
            raise UsageError(f"{flag_of(name)} needs --lora.")
    if not settings.model:
        raise UsageError("--model must not be empty.")


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def _toml(value: Any) -> str:
    """A value as TOML writes it: JSON's strings, lists and booleans are TOML's too."""
    if isinstance(value, float) and not isinstance(value, bool):
        return repr(value)  # 1e-08 and inf are TOML
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
