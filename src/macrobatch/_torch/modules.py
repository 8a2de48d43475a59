"""Modules: wrappers of a model (`torch.compile`, DDP, FSDP1, checkpointing), and the private dicts of a module.

Wrappers are recognised by the name of their class: a user's own module may also have children called `module` or
`_orig_mod`, and importing the classes would load dynamo.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

Wrapper = Literal["OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "ActivationWrapper"]
CHILD_OF: dict[Wrapper, str] = {  # classes of torch, and the attribute under which each holds the wrapped module
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
WRAPPERS: tuple[Wrapper, ...] = tuple(CHILD_OF)
REPLICATED: tuple[Wrapper, ...] = ("OptimizedModule", "DistributedDataParallel")  # what they wrap trains without them

DataParallel = Literal["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"]
DATA_PARALLEL: tuple[DataParallel, ...] = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

BatchNorm = nn.modules.batchnorm._BatchNorm  # of any number of dimensions, synchronised or not
RunningStatistics = (BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # which training does not read

# Functions in C, for fast loops over all modules. They return the dicts themselves, to read and to write.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")


def modules_of(models: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules of the models, each once, like `nn.Module.modules`, whose generators are many times slower."""
    found: dict[nn.Module, None] = {}
    pending = list(models)[::-1]
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            pending += [inner for inner in reversed(children_of(module).values()) if inner is not None]
    return list(found)


# ---------------------------------------------------------------------------------------------- wrappers


def _classes_of_torch(module: nn.Module) -> tuple[str, ...]:
    kind: Any = type(module)
    return _classes_of_torch_in(kind)


@functools.lru_cache(maxsize=4096)
def _classes_of_torch_in(kind: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch."))


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """The name of the wrapper class of this module; None for a plain module."""
    classes = _classes_of_torch(module)
    return next((wrapper for wrapper in WRAPPERS if wrapper in classes), None)


def data_parallel_of(model: nn.Module) -> DataParallel | None:
    """The data-parallel class of a model, compiled or not."""
    classes = _classes_of_torch(without_compile(model))
    return next((kind for kind in DATA_PARALLEL if kind in classes), None)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module itself."""
    return "FSDPModule" in _classes_of_torch(module)


def layers_around(model: nn.Module, wrappers: tuple[Wrapper, ...] = WRAPPERS) -> list[Any]:
    """The model, the module that it wraps, the module inside that, and so on, through these wrappers."""
    layers: list[nn.Module] = [model]
    while (wrapper := wrapper_of(layers[-1])) in wrappers:
        layers.append(cast(nn.Module, getattr(layers[-1], CHILD_OF[wrapper])))
    return layers


def unwrapped(model: nn.Module, wrappers: tuple[Wrapper, ...] = WRAPPERS) -> Any:
    """The module inside all of these wrappers."""
    return layers_around(model, wrappers)[-1]


def without_compile(model: nn.Module) -> Any:
    """The module that was passed to `torch.compile`."""
    return unwrapped(model, ("OptimizedModule",))


def without_ddp(model: nn.Module) -> Any:
    """The module that was passed to `DistributedDataParallel`."""
    return unwrapped(model, ("DistributedDataParallel",))


def plain_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer without the attributes under which wrappers hold their modules."""
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        while module is not None and (wrapper := wrapper_of(module)) is not None and part != CHILD_OF[wrapper]:
            module = children_of(module)[CHILD_OF[wrapper]]  # some wrappers leave out this name themselves
        if module is None or wrapper_of(module) is None:
            kept.append(part)
        module = None if module is None else children_of(module).get(part)
    return ".".join(kept)


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of a model is compiled, by `torch.compile(part)` or `part.compile()`."""
    return any(wrapper_of(module) == "OptimizedModule" or has_compiled_call(module) for module in model.modules())


def can_have_compiled() -> bool:
    """Whether anything can be compiled yet. This does not load the compiler, which takes seconds."""
    return "torch._dynamo" in sys.modules


def has_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return vars(module).get("_compiled_call_impl") is not None


# ---------------------------------------------------------------------------------------------- inside one module


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after its backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def run_eagerly() -> contextlib.AbstractContextManager[object]:
    """Run everything in the block without compiling, so that no hook breaks a graph."""
    return torch.compiler.set_stance("force_eager") if can_have_compiled() else contextlib.nullcontext()
