"""What a recorded micro-step depends on, and what cannot be recorded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cut.trees import leaves, map_tensors
from macrobatch._step.graph import reach_of
from macrobatch._step.snapshot import HostRandom, modules_of
from macrobatch._torch import modules as inside
from macrobatch._torch.tensors import hooks_after_accumulation, hooks_on_gradient


class NotRecordableError(Exception):
    """Why micro-steps have to run eagerly."""


# ---------------------------------------------------------------------------------------------- of micro-batches


def tensors_of(micro_batch: Any) -> list[tuple[str, Tensor]]:
    """With where each is found."""
    return [(path, leaf) for path, leaf in leaves(micro_batch, "batch") if isinstance(leaf, Tensor)]


def signature(micro_batch: Any, samples: int, device_type: str = "cuda") -> Hashable:
    """All that a recording of it depends on, but for the numbers in its tensors, which are on that kind of device."""
    parts: list[Hashable] = [samples]
    for path, leaf in leaves(micro_batch, "batch"):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise NotRecordableError(f"{path} requires a gradient of its own")
            _require_plain(path, leaf, device_type)
            parts.append((path, leaf.shape, leaf.dtype))
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            parts.append((path, type(leaf), leaf))
        else:
            raise NotRecordableError(f"{path} is of type {type(leaf).__name__}, whose value a recording would keep")
    return tuple(parts)


def _require_plain(path: str, tensor: Tensor, device_type: str) -> None:
    if tensor.device.type != device_type or tensor.layout != torch.strided:
        raise NotRecordableError(f"{path} is a {tensor.layout} tensor on {tensor.device}")


def copied(micro_batch: Any) -> Any:
    """With tensors of its own, for a recording to read from."""
    return map_tensors(micro_batch, lambda leaf: leaf.clone(memory_format=torch.contiguous_format))


# ---------------------------------------------------------------------------------------------- of models


def situation(modules: Sequence[nn.Module]) -> object:
    """All that recordings of these modules take for granted: where it has changed, they are worthless."""
    held = [
        tensor
        for module in modules
        for tensors in (inside.parameters_of(module), inside.buffers_of(module))
        for tensor in tensors.values()
        if tensor is not None
    ]
    return (
        [(id(tensor), _address(tensor), tensor.requires_grad) for tensor in held],
        [(module, module.training) for module in modules],  # kept, as another could get the address of one that is gone
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    )


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it is made of others, as quantised weights are
        return 0


def hooked(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> str | None:
    """What has a hook of its user's, if anything."""
    for module in modules:
        if inside.has_forward_hooks(module) or inside.has_backward_hooks(module):
            return f"a module of type {type(module).__name__}"
    for parameter in parameters:
        if hooks_on_gradient(parameter) or hooks_after_accumulation(parameter):
            return f"a parameter of shape {tuple(parameter.shape)}"
    return None


def buffers_of(models: Sequence[nn.Module]) -> list[Tensor | None]:
    """All of them, in order."""
    return [buffer for module in modules_of(models) for buffer in inside.buffers_of(module).values()]


def unwrapped(model: Any) -> Any:
    """The same model, or models, without DDP around them, which does things in Python that a replay leaves out."""
    if isinstance(model, list | tuple):
        return type(model)(unwrapped(one) for one in model)
    return inside.without_ddp(model)


def is_compiled_around_ddp(model: nn.Module) -> bool:
    """What cannot be unwrapped."""
    inner = inside.without_compile(model)
    return inner is not model and inside.wrapper_of(inner) == "DistributedDataParallel"


# ---------------------------------------------------------------------------------------------- of their parameters


@contextlib.contextmanager
def leaves_for(
    models: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """The leaves that a recorded backward adds gradients to: the parameters, or, under DDP, twins of theirs.

    DDP keeps the end nodes of its parameters' graphs, which belong to the stream that it was made on: a backward
    could not be recorded on another. Twins share the memory of the parameters, and are in their places meanwhile.
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
    """Where twins stand in for parameters, no part of the loss may have got past them."""
    past = {id(parameter) for parameter, leaf in leaves_of.items() if leaf is not parameter}
    if not past:
        return
    if any(id(leaf) in past for leaf in reach_of(loss).leaves):
        raise NotRecordableError("under DistributedDataParallel, the loss uses a parameter not taken from the model")
    if any(leaf.data_ptr() != parameter.data_ptr() for parameter, leaf in leaves_of.items()):
        raise NotRecordableError("under DistributedDataParallel, a forward moves its weights, as those of nn.LSTM do")


def reached(micro_step: Callable[[], object], leaves_of: dict[nn.Parameter, nn.Parameter]) -> set[nn.Parameter]:
    """The parameters to whose gradients it adds."""
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


# ---------------------------------------------------------------------------------------------- of what they do


class Traces:
    """What a micro-step leaves behind, besides gradients, and a replay would not.

    Once may be chance: what another thread does, or what is made once and kept. What it does every time counts.
    """

    KEEPS = "keeps a tensor that it made, which the next replay would overwrite"
    DRAWS = "draws random numbers on the host, and a recording would keep them"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = torch.cuda.memory_allocated(device)
        self._random = HostRandom()

    def left(self) -> set[str]:
        """What has been left behind since."""
        found = set()
        if self.has_kept():
            found.add(self.KEEPS)
        if self._random.has_moved():
            found.add(self.DRAWS)
        return found

    def has_kept(self) -> bool:
        """Whether more is allocated now."""
        if torch.cuda.memory_allocated(self._device) <= self._allocated:
            return False
        gc.collect()  # what only a cycle holds is not kept
        return torch.cuda.memory_allocated(self._device) > self._allocated


def require_no_traces(each: Collection[set[str]]) -> None:
    """Of some runs of the same micro-step."""
    if found := set.intersection(*each):
        raise NotRecordableError(f"a micro-step {'; it '.join(sorted(found))}")
