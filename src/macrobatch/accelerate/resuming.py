"""All that a training consists of, saved in a directory and put back.

::

    model.safetensors, model_1.safetensors ...     weights and buffers, whole, under their own names
    optimizer.json, optimizer.safetensors ...      and so on for schedulers, loaders, the scaler, and what users add
    process_0.json, process_0.safetensors ...      of each process: its random number generators
    training.json                                  how many there are of each kind
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from macrobatch.accelerate import checkpoints
from macrobatch.accelerate.loaders import PreparedLoader
from macrobatch.accelerate.state import AcceleratorState
from macrobatch.errors import UsageError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on process 0, and there alone


@dataclass
class Training:
    """What is saved.

    Attributes:
        state: which process this is.
        models: bare, or sharded.
        optimizers: torch's own.
        others: what else has a state, by kind.
        step: of the Accelerator's windows.
    """

    state: AcceleratorState
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    others: Mapping[str, Sequence[Any]]
    step: int

    def counts(self) -> dict[str, int]:
        kinds = {"model": self.models, "optimizer": self.optimizers, **self.others}
        return {kind: len(several) for kind, several in kinds.items()}


def save(training: Training, directory: Path) -> None:
    """Write it all. Every process must call this."""
    state = training.state
    directory.mkdir(parents=True, exist_ok=True)
    for index, model in enumerate(training.models):
        weights = _weights(model)
        if state.is_main_process:
            checkpoints.save_tensors(weights, directory / f"{_name('model', index)}.safetensors")
    for index, optimizer in enumerate(training.optimizers):
        found = _optimizer_state(optimizer, training.models)
        if state.is_main_process:
            checkpoints.save(found, directory / _name("optimizer", index))
    checkpoints.save(_generators(), directory / f"process_{state.process_index}")
    if state.is_main_process:
        for kind, several in training.others.items():
            for index, one in enumerate(several):
                checkpoints.save(_state_of(one), directory / _name(kind, index))
        checkpoints.save({"counts": training.counts(), "step": training.step}, directory / "training")
    state.wait_for_everyone()


def load(training: Training, directory: Path) -> None:
    """Put it all back. Every process must call this, and be able to read the directory."""
    if not (directory / "training.json").exists():
        raise UsageError(f"{directory} holds no training.json: it was not written by save_state(), or not to its end.")
    saved = checkpoints.load(directory / "training")
    if saved["counts"] != training.counts():
        raise UsageError(
            f"{directory} was saved with {saved['counts']}, but {training.counts()} are prepared now. Prepare the same "
            "objects in the same order before load_state()."
        )
    for index, model in enumerate(training.models):
        _load_weights(model, checkpoints.load_tensors(directory / f"{_name('model', index)}.safetensors"))
    for index, optimizer in enumerate(training.optimizers):
        _load_optimizer(optimizer, training.models, checkpoints.load(directory / _name("optimizer", index)))
    for kind, several in training.others.items():
        for index, one in enumerate(several):
            _load_state_of(one, checkpoints.load(directory / _name(kind, index)))
    own = directory / f"process_{training.state.process_index}"
    if own.with_name(f"{own.name}.json").exists():  # not where there were fewer processes
        _set_generators(checkpoints.load(own))
    training.step = saved["step"]


def _name(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


# ---------------------------------------------------------------------------------------------- models, optimizers


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, whole: of a sharded model on process 0 only. A tied one is saved once."""
    found = get_model_state_dict(model, options=WHOLE) if isinstance(model, FSDPModule) else model.state_dict()
    weights: dict[str, Tensor] = {}
    seen: set[tuple[int, ...]] = set()
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(f"the model's state has {name}, a {type(tensor).__name__}: only tensors can be saved.")
        place = (tensor.data_ptr(), *tensor.shape, *tensor.stride(), tensor.numel())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        weights[name] = tensor
    return weights


def _load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    tied = _tied_names(model)
    for name, first in tied.items():
        if name not in weights and first in weights:
            weights[name] = weights[first]
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(weights)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer that has several, the first of them."""
    first: dict[int, str] = {}
    tied = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if (known := first.setdefault(id(tensor), name)) != name:
            tied[name] = known
    return tied


def _optimizer_state(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
    model = _sharded_model(optimizer, models)
    if model is None:
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def _load_optimizer(optimizer: Optimizer, models: Sequence[nn.Module], state: dict[str, Any]) -> None:
    model = _sharded_model(optimizer, models)
    if model is None:
        optimizer.load_state_dict(state)
    else:
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def _sharded_model(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sharded = [model for model in models if isinstance(model, FSDPModule)]
    return next((model for model in sharded if any(id(p) in held for p in model.parameters())), None)


# ---------------------------------------------------------------------------------------------- the rest


def _state_of(one: Any) -> Any:
    if isinstance(one, PreparedLoader):
        generator = one.shuffling or getattr(getattr(one.batch_sampler, "sampler", None), "generator", None)
        return {"iteration": one.iteration, "shuffling": None if generator is None else generator.get_state()}
    return one.state_dict()


def _load_state_of(one: Any, state: Any) -> None:
    if not isinstance(one, PreparedLoader):
        one.load_state_dict(state)
        return
    one.iteration = state["iteration"]
    generator = one.shuffling or getattr(getattr(one.batch_sampler, "sampler", None), "generator", None)
    if generator is not None and state["shuffling"] is not None:
        generator.set_state(state["shuffling"])


def _generators() -> dict[str, Any]:
    """The random number generators of this process."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    if state["numpy"] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
