"""What a recorded micro-step depends on, and what cannot be recorded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cut.trees import leaves, map_tensors
from macrobatch._torch import modules as inside
from macrobatch._torch.graph import reach_of
from macrobatch._torch.modules import modules_of
from macrobatch._torch.snapshot import HostRandom
from macrobatch._torch.tensors import hooks_after_accumulation, hooks_on_gradient


class NotRecordableError(Exception):
    """The reason why micro-steps must run eagerly."""


# ---------------------------------------------------------------------------------------------- micro-batches


def tensors_of(micro_batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a micro-batch with their paths."""
    return [(path, leaf) for path, leaf in leaves(micro_batch, "batch") if isinstance(leaf, Tensor)]


def signature(micro_batch: Any, device_type: str = "cuda") -> Hashable:
    """All properties of a micro-batch that a recording depends on, except the values of its tensors."""
    parts: list[Hashable] = []
    for path, leaf in leaves(micro_batch, "batch"):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise NotRecordableError(f"{path} requires a gradient of its own")
            if leaf.device.type != device_type or leaf.layout != torch.strided:
                raise NotRecordableError(f"{path} is a {leaf.layout} tensor on {leaf.device}")
            parts.append((path, leaf.shape, leaf.dtype))
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            parts.append((path, type(leaf), leaf))
        else:
            raise NotRecordableError(f"{path} is of type {type(leaf).__name__}, whose value a recording would freeze")
    return tuple(parts)


def copy_tensors(micro_batch: Any) -> Any:
    """Copy the tensors of a micro-batch, as the inputs of a recording."""
    return map_tensors(micro_batch, lambda leaf: leaf.clone(memory_format=torch.contiguous_format))


# ---------------------------------------------------------------------------------------------- models


def model_state(modules: Sequence[nn.Module]) -> object:
    """Everything that recordings of these modules depend on. If it changes, they are invalid."""
    held = [
        tensor
        for module in modules
        for tensors in (inside.parameters_of(module), inside.buffers_of(module))
        for tensor in tensors.values()
        if tensor is not None
    ]
    return (
        [(id(tensor), _address(tensor), tensor.requires_grad) for tensor in held],
        [(module, module.training) for module in modules],  # the modules themselves: a new one could get an old id
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    )


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # e.g. quantised weights consist of several tensors
        return 0


def owner_of_hook(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> str | None:
    """The module or parameter that has a hook, in words; None if there is none."""
    for module in modules:
        if inside.has_forward_hooks(module) or inside.has_backward_hooks(module):
            return f"a module of type {type(module).__name__}"
    for parameter in parameters:
        if hooks_on_gradient(parameter) or hooks_after_accumulation(parameter):
            return f"a parameter of shape {tuple(parameter.shape)}"
    return None


def all_buffers(models: Sequence[nn.Module]) -> list[Tensor | None]:
    """All buffers of the models, in order."""
    return [buffer for module in modules_of(models) for buffer in inside.buffers_of(module).values()]


def without_ddp(model: Any) -> Any:
    """The model or models without their DDP wrappers, whose Python code a replay would leave out."""
    if isinstance(model, list | tuple):
        return type(model)(without_ddp(one) for one in model)
    return inside.without_ddp(model)


def is_compiled_around_ddp(model: nn.Module) -> bool:
    """Whether `torch.compile` was applied to a DDP model, which cannot be unwrapped."""
    inner = inside.without_compile(model)
    return inner is not model and inside.wrapper_of(inner) == "DistributedDataParallel"


# ---------------------------------------------------------------------------------------------- parameters


@contextlib.contextmanager
def gradient_leaves(
    models: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """The leaf for each parameter that a recorded backward adds gradients to: itself, or, under DDP, a twin.

    DDP keeps the gradient nodes of its parameters, which belong to the stream on which DDP was created: a backward
    cannot be captured on another one. Twins share the memory of the parameters and replace them inside the block.
    """
    if not any(inside.wrapper_of(model) == "DistributedDataParallel" for model in models):
        yield {parameter: parameter for parameter in parameters}
        return
    twins = {parameter: nn.Parameter(parameter.detach()) for parameter in parameters}
    for parameter, twin in twins.items():
        twin.grad_dtype = parameter.grad_dtype
    places = [
        (module, name, parameter)
        for module in modules_of(models)
        for name, parameter in inside.parameters_of(module).items()
        if parameter is not None and parameter in twins
    ]
    try:
        for module, name, parameter in places:
            inside.parameters_of(module)[name] = twins[parameter]
        yield twins
    finally:
        for module, name, parameter in places:
            inside.parameters_of(module)[name] = parameter


def require_leaves(loss: Tensor, leaves_of: dict[nn.Parameter, nn.Parameter]) -> None:
    """Raise if a loss uses a parameter that a twin should replace."""
    replaced = {id(parameter) for parameter, leaf in leaves_of.items() if leaf is not parameter}
    if not replaced:
        return
    if any(id(leaf) in replaced for leaf in reach_of(loss).leaves):
        raise NotRecordableError("under DistributedDataParallel, the loss uses a parameter not taken from the model")
    if any(leaf.data_ptr() != parameter.data_ptr() for parameter, leaf in leaves_of.items()):
        raise NotRecordableError("under DistributedDataParallel, a forward moves its weights, as those of nn.LSTM do")


def reached_parameters(
    micro_step: Callable[[], object], leaves_of: dict[nn.Parameter, nn.Parameter]
) -> set[nn.Parameter]:
    """Run a micro-step, and return the parameters to which it adds gradients."""
    found: set[nn.Parameter] = set()
    hooks = [
        leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, parameter=parameter: found.add(parameter)
        )
        for parameter, leaf in leaves_of.items()
    ]
    try:
        micro_step()
    finally:
        for hook in hooks:
            hook.remove()
    return found


# ---------------------------------------------------------------------------------------------- side effects


class SideEffects:
    """Detects effects of a micro-step, besides gradients, that a replay would not have.

    A single occurrence may come from another thread, or from a cache. Only effects of every run count.
    """

    KEEPS = "keeps a tensor that it created, which the next replay would overwrite"
    DRAWS = "draws random numbers on the host, which a recording would freeze"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = torch.cuda.memory_allocated(device)
        self._random = HostRandom()

    def since_start(self) -> set[str]:
        """The effects since the object was created."""
        found = set()
        if self.has_kept_memory():
            found.add(self.KEEPS)
        if self._random.has_moved():
            found.add(self.DRAWS)
        return found

    def has_kept_memory(self) -> bool:
        """Whether more memory is allocated now."""
        if torch.cuda.memory_allocated(self._device) <= self._allocated:
            return False
        gc.collect()  # memory that only a reference cycle holds does not count
        return torch.cuda.memory_allocated(self._device) > self._allocated


def require_no_side_effects(each: Collection[set[str]]) -> None:
    """Raise if all runs of a micro-step have a side effect in common."""
    if found := set.intersection(*each):
        raise NotRecordableError(f"a micro-step {'; it '.join(sorted(found))}")
