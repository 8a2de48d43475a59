"""Optimizers by name: AdamW, Muon, Adafactor, SGD, AdamW in 8 bits, or any class of the user's own.

Only matrices have weight decay. The learning rate of a group is that of the schedule, times the group's ``lr_ratio`` if
it has one.
"""

# mypy: untyped-calls-exclude="torch"
from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from macrobatch._io.functions import function_named
from macrobatch.errors import BackendError, UsageError
from macrobatch.train.models import blocks_of
from macrobatch.train.settings import Settings, flag_of

Groups = list[dict[str, Any]]
Options = dict[str, Any]

TITLES = {"adamw": "AdamW", "muon": "Muon", "adafactor": "Adafactor", "adamw-8bit": "AdamW in 8 bits", "sgd": "SGD"}
NAMES = tuple(TITLES)
UNSHARDED = ("adafactor", "adamw-8bit")  # optimizers whose state cannot be sharded
ADAMW = ("beta1", "beta2", "eps")  # settings of AdamW only
RATIO = "lr_ratio"


def check(settings: Settings) -> None:
    """Refuse an unknown optimizer, and options or settings that it does not take."""
    name = settings.optimizer
    if ":" not in name and name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(f"--optimizer {name}: {hint}There are {', '.join(NAMES)}, and MODULE:CLASS for one of yours.")
    if name in UNSHARDED and settings.parallel != "ddp":
        raise UsageError(
            f"--optimizer {name} does not support sharded models (--parallel {settings.parallel}). Choose adamw, muon "
            "or sgd, or --parallel ddp."
        )
    kind = class_of(name)
    for setting in ADAMW if ":" in name or name in ("adafactor", "sgd") else ():
        _require_unset(settings, setting, f"is AdamW's, and has no effect on --optimizer {name}")
    for setting in ("lr", "weight_decay"):
        if not _takes(kind, setting):
            _require_unset(settings, setting, f"has no effect on --optimizer {name}, whose class does not take it")
    own = {"lr", "weight_decay", *(("betas", "eps") if name.startswith("adamw") else ())}
    for option, value in options_of(settings).items():
        if option in own:
            raise UsageError(f"--optimizer-options {option}: it has its own flag; see macrobatch train --help.")
        if name == "muon" and option == "adamw_lr":
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise UsageError(f"--optimizer-options adamw_lr must be a number, at least 0: got {value!r}.")
        elif not _takes(kind, option):
            known = [*(["adamw_lr"] if name == "muon" else []), *(one for one in _parameters(kind) if one not in own)]
            raise UsageError(f"--optimizer-options: {name} takes no {option!r}. It takes {', '.join(known)}.")


def _require_unset(settings: Settings, name: str, problem: str) -> None:
    if getattr(settings, name) != Settings.__dataclass_fields__[name].default:
        raise UsageError(f"{flag_of(name)} {problem}: leave it out.")


def options_of(settings: Settings) -> Options:
    """The options by name. Numbers, true, false, none, and lists of them such as 0.9,0.99, are converted."""
    found: Options = {}
    for text in settings.optimizer_options:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise UsageError(f"--optimizer-options {text!r} must be NAME=VALUE, such as momentum=0.9.")
        if name in found:
            raise UsageError(f"--optimizer-options: {name} is given twice.")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(","))
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


# ---------------------------------------------------------------------------------------------------------- classes


def class_of(name: str) -> Callable[..., Optimizer]:
    """The class that makes the optimizer of this name."""
    if name == "adamw-8bit":
        return _of_bitsandbytes()
    kinds: dict[str, Callable[..., Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "muon": WholeMuon,
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
    }
    return kinds[name] if name in kinds else _of_the_user(name)


def _of_bitsandbytes() -> Callable[..., Optimizer]:
    try:
        kind: Callable[..., Optimizer] = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError:
        raise UsageError(
            "--optimizer adamw-8bit needs bitsandbytes, which is not installed: pip install bitsandbytes."
        ) from None
    return kind


def _of_the_user(name: str) -> Callable[..., Optimizer]:
    before = list(sys.path)
    try:
        found = function_named(name)
    except UsageError as error:
        raise UsageError(f"--optimizer {name}: MODULE:CLASS cannot be imported: {error}") from error.__cause__
    finally:
        sys.path[:] = before
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UsageError(f"--optimizer {name}: this is not an optimizer class of torch, but {found!r}.")
    return found


def _parameters(kind: Callable[..., Optimizer]) -> list[str]:
    """The names of the options of a class, without the first argument, the parameters to train."""
    return list(inspect.signature(kind).parameters)[1:]


def _takes(kind: Callable[..., Optimizer], option: str) -> bool:
    found = inspect.signature(kind).parameters.values()
    return option in _parameters(kind) or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found)


# ----------------------------------------------------------------------------------------------------------- making


def optimizers_of(model: nn.Module, settings: Settings, lr: float) -> list[Optimizer]:
    """The optimizers of all trained parameters: one, or with Muon a second one for the parameters that it does not
    support.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = options_of(settings)
    if settings.optimizer == "adamw":
        return [adamw(parameters, settings, lr, options)]
    if settings.optimizer == "muon":
        return _muon(parameters, blocks_of(model), settings, lr, options)
    kind = class_of(settings.optimizer)
    if settings.optimizer == "adamw-8bit":
        options |= {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if not _takes(kind, "weight_decay"):
        return [_make(kind, [{"params": parameters}], settings, lr, options)]
    return [_make(kind, _decay_groups(parameters, settings), settings, lr, options)]


def adamw(parameters: Sequence[Tensor], settings: Settings, lr: float, options: Mapping[str, Any]) -> Optimizer:
    """AdamW with the options of the settings; not fused in float64, where that kernel cannot divide gradients."""
    options = {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "fused": settings.precision != "float64",
        **options,
    }
    return _make(torch.optim.AdamW, _decay_groups(parameters, settings), settings, lr, options)


def _muon(
    parameters: Sequence[Tensor], blocks: list[nn.Module], settings: Settings, lr: float, options: Options
) -> list[Optimizer]:
    """Muon for the matrices inside the decoder's blocks; AdamW for embeddings, head and vectors."""
    inside = {p for block in blocks for p in block.parameters() if p.dim() == 2}
    matrices = [p for p in parameters if p in inside]
    others = [p for p in parameters if p not in inside]
    ratio = options.pop("adamw_lr", lr) / lr if lr else 1.0
    groups: Groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
    found = [_make(WholeMuon, groups, settings, lr, {"adjust_lr_fn": "match_rms_adamw"} | options)] if matrices else []
    if others:
        found.append(adamw(others, settings, lr, {}))
        for group in found[-1].param_groups:
            group[RATIO] = ratio
    return found


def _decay_groups(parameters: Sequence[Tensor], settings: Settings) -> Groups:
    groups: Groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _make(
    kind: Callable[..., Optimizer], groups: Groups, settings: Settings, lr: float, options: Mapping[str, Any]
) -> Optimizer:
    rate = {"lr": lr} if _takes(kind, "lr") else {}
    try:
        return kind(groups, **rate, **options)
    except Exception as error:  # whatever the user's code, or torch, raises
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"--optimizer {settings.optimizer} cannot be made: {said}") from error


def set_rates(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Set the learning rate of this step in every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(RATIO, 1.0)


def fixed_bytes(model: nn.Module, settings: Settings, shards: int) -> tuple[int, str]:
    """The bytes of weights, gradients and optimizer state on one rank; and a text that names what is included.

    Each rank holds the whole gradients inside a window; weights and state are split into `shards` shards. Adafactor's
    state is only a row and a column of each matrix, and counts as 0; the state of a user's optimizer is unknown.
    """
    momentum = 1.0 if "momentum" in options_of(settings) else 0.0
    sizes = {"adamw": 2.0, "muon": 1.0, "adafactor": 0.0, "adamw-8bit": 0.5, "sgd": momentum}  # numbers per parameter
    state = sizes.get(settings.optimizer)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    named = "weights and gradients" if state is None else f"weights, gradients and {TITLES[settings.optimizer]}"
    return round((weights + (state or 0) * trained) / shards + trained), named


class WholeMuon(torch.optim.Muon):
    """Muon that orthogonalizes whole matrices even if parameters are sharded, as on one rank.

    torch's own Muon multiplies the shards, and sums the products of the ranks in bfloat16. So its updates differ by
    some percent from those of one rank, and it communicates every product. This class gathers each matrix once, and
    keeps its momentum sharded.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)  # type: ignore[no-untyped-call]
        assert closure is None, "the engine has no closures"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        return None

    def _step_one(self, parameter: DTensor, group: dict[str, Any]) -> None:
        momentum, gradient = group["momentum"], parameter.grad
        assert isinstance(gradient, DTensor)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        averaged = state["momentum_buffer"]
        averaged.lerp_(gradient, 1 - momentum)
        update: Any = gradient.lerp(averaged, momentum) if group["nesterov"] else averaged
        change = distribute_tensor(
            _orthogonal(update.full_tensor(), group), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(change)


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """What torch's Muon would add to a parameter for this update: its step from 0 without momentum and decay."""
    change = nn.Parameter(torch.zeros_like(update))
    change.grad = update
    names = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    options = {name: group[name] for name in names}
    once: Optimizer = torch.optim.Muon([change], momentum=0.0, nesterov=False, weight_decay=0.0, **options)
    once.step()
    return change.detach()


# --------------------------------------------------------------------------------------- saving and restoring groups


def numbers_of(optimizers: Sequence[Optimizer], settings: Settings) -> list[Options]:
    """The entries of a user's optimizer groups besides parameters and learning rate: some optimizers count in them."""
    if ":" not in settings.optimizer:
        return []
    found = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        held = {name: value for name, value in group.items() if name not in ("params", "lr")}
        try:
            found.append(json.loads(json.dumps(held)))
        except (TypeError, ValueError) as error:
            raise BackendError(
                f"--optimizer {settings.optimizer} keeps something in its groups that cannot be saved: {error}."
            ) from None
    return found


def put_back(optimizers: Sequence[Optimizer], numbers: Sequence[Options]) -> None:
    """Restore the entries of the groups that `numbers_of` returned."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups] if numbers else []
    for group, held in zip(groups, numbers, strict=True):
        for name, value in held.items():
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
