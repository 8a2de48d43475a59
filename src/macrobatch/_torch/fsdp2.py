"""`fully_shard`: its parameter groups, the gradients that they hold back, and how to reduce these on demand.

Up to torch 2.14, a held gradient moves from the gathered parameter to a separate attribute, and only the callback at
the end of a backward can reduce it. From 2.15 on, it stays in place, and `FSDPModule.finalize_backward` reduces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from macrobatch._torch.modules import is_fully_sharded

_ROOT_FLAGS = ("is_last_backward", "manual_backward_finalization")
_REDUCES_UNUSED = "reduce_scatter_unused_params"
_GROUP_FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info", _REDUCES_UNUSED)


# ---------------------------------------------------------------------------------------------- the parts


def modules_of(models: Iterable[Any]) -> Iterator[Any]:
    """All modules that `fully_shard` was applied to."""
    return (module for model in models for module in model.modules() if is_fully_sharded(module))


def states_of(models: Iterable[Any]) -> Iterator[Any]:
    """The states that `fully_shard` keeps for those modules."""
    return (module._get_fsdp_state() for module in modules_of(models))


def param_groups(models: Iterable[Any]) -> Iterator[Any]:
    """Its parameter groups. The parameters of a group are communicated together."""
    return (group for state in states_of(models) for group in _groups_of(state))


def _groups_of(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)  # older versions have one or none
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def _parameters(models: Iterable[Any]) -> Iterator[Any]:
    for group in param_groups(models):
        yield from group.fsdp_params


def gathered_parameters(models: Iterable[Any]) -> list[Tensor]:
    """The unsharded parameters, which are the leaves of graphs, if they were gathered at least once."""
    return [leaf for p in _parameters(models) if (leaf := _leaf_of(p)) is not None]


def _leaf_of(parameter: Any) -> Tensor | None:
    """The unsharded form of a parameter; None before it was first gathered."""
    return getattr(parameter, "_unsharded_param", None)


def trained_groups(models: Iterable[Any]) -> list[list[Tensor]]:
    """For each parameter group, the gathered parameters that are trained."""
    found = (map(_leaf_of, group.fsdp_params) for group in param_groups(models))
    return [[leaf for leaf in leaves if leaf is not None and leaf.requires_grad] for leaves in found]


def shards_of(models: Iterable[Any]) -> list[Tensor]:
    """This rank's shards of the parameters."""
    return [parameter.sharded_param for parameter in _parameters(models)]


def gathered_by_shard(models: Iterable[Any]) -> dict[int, Tensor]:
    """The gathered parameters, by the ids of their shards, which users see."""
    found = ((p.sharded_param, _leaf_of(p)) for p in _parameters(models))
    return {id(shard): leaf for shard, leaf in found if leaf is not None}


def parameters_in_care(models: Iterable[Any]) -> set[int]:
    """The ids of all parameters that it shards, both of the shards and of the gathered parameters."""
    models = list(models)
    return {id(p.sharded_param) for p in _parameters(models)} | set(map(id, gathered_parameters(models)))


def initialize(models: Iterable[Any]) -> None:
    """Do the initialization of the first forward, which changes the flags of the root."""
    for model in models:
        model._get_fsdp_state()._lazy_init()


# ---------------------------------------------------------------------------------------------- how it is set


class Flags:
    """The current flags that decide when models communicate, reshard and end a backward."""

    def __init__(self, models: Iterable[Any]) -> None:
        models = list(models)
        owners = [(group, flag) for group in param_groups(models) for flag in _GROUP_FLAGS]
        owners += [(state, "_auto_reshard_after_forward") for state in states_of(models)]
        owners += [(root._state_ctx, flag) for root in _roots(models) for flag in _ROOT_FLAGS]
        self._saved = [(owner, flag, getattr(owner, flag)) for owner, flag in owners if hasattr(owner, flag)]

    def restore(self) -> None:
        """Restore the flags."""
        for owner, flag, value in self._saved:
            setattr(owner, flag, value)


def finish_every_backward(models: Iterable[Any]) -> None:
    """Make each backward wait for its reductions, whatever flags the program has set."""
    for root in _roots(models):
        (module,) = root._modules
        module.set_is_last_backward(True)
        if hasattr(module, "set_manual_backward_finalization"):
            module.set_manual_backward_finalization(False)


def reduce_unused_too(models: Iterable[Any]) -> None:
    """Make each rank reduce all parameters of a group, with zeros for those that it has not used. Other ranks may have.

    Otherwise ranks that have used different parameters would reduce different lists, and torch would add the gradient
    of one parameter to that of another with the same shape.
    """
    for module in modules_of(models):
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
            continue
        for group in _groups_of(module._get_fsdp_state()):
            if not hasattr(group, _REDUCES_UNUSED):
                _backport_unused(group)
            setattr(group, _REDUCES_UNUSED, True)


@contextlib.contextmanager
def reducing_unused(models: Iterable[Any]) -> Iterator[None]:
    """The same inside a block."""
    models = list(models)
    before = [(group, getattr(group, _REDUCES_UNUSED, False)) for group in param_groups(models)]
    reduce_unused_too(models)
    try:
        yield
    finally:
        for group, flag in before:
            setattr(group, _REDUCES_UNUSED, flag)


def fill_unused(models: Iterable[Any]) -> None:
    """Add zeros for missing gradients, in the dtype of the group's held ones: a group must have one dtype."""
    for group in param_groups(models):
        apart = [parameter for parameter in group.fsdp_params if _holds_apart(parameter)]
        held = next((p.unsharded_accumulated_grad for p in apart if p.unsharded_accumulated_grad is not None), None)
        if group.reduce_grads and held is not None:
            for parameter in filter(_is_unused, apart):
                parameter.unsharded_accumulated_grad = torch.zeros_like(parameter._unsharded_param, dtype=held.dtype)


def _is_unused(parameter: Any) -> bool:
    """Whether a trained parameter has no gradient to reduce."""
    leaf = _leaf_of(parameter)
    is_held = parameter.unsharded_accumulated_grad is not None
    return leaf is not None and leaf.requires_grad and leaf.grad is None and not is_held


def _backport_unused(group: Any) -> None:
    """Do the same before torch 2.13, which has no such flag: add zeros for missing gradients before each reduction."""
    reduce = group.post_backward

    def post_backward(*arguments: Any) -> None:
        if group.reduce_grads and getattr(group, _REDUCES_UNUSED):
            for parameter in filter(_is_unused, group.fsdp_params):
                parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
        reduce(*arguments)

    group.post_backward = post_backward


def mesh_of(model: Any) -> Any:
    """The mesh over which the model averages."""
    return next(param_groups([model])).mesh_info.mesh


def has_replicas(models: Iterable[Any]) -> bool:
    """Whether shards are replicated over a second dimension of the mesh (HSDP)."""
    return any(group.mesh_info.mesh.ndim > 1 for group in param_groups(models))


def divisors_of(models: Iterable[Any]) -> set[float]:
    """The numbers by which its groups divide gradients."""
    return {g.gradient_divide_factor or g.mesh_info.mesh.size() for g in param_groups(models)}


def precisions_of(models: Iterable[Any]) -> list[Any]:
    """The `MixedPrecisionPolicy` of each module."""
    return [state._mp_policy for state in states_of(models)]


# ---------------------------------------------------------------------------------------------- held gradients


def _holds_apart(parameter: Any) -> bool:
    """Whether held gradients have an attribute of their own. (Later, it became a property for the gathered one's.)"""
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def held_gradients(models: Iterable[Any]) -> list[Tensor | None]:
    """All tensors that may hold gradients that are not reduced, or only in part."""
    held: list[Tensor | None] = []
    for group in param_groups(models):
        held.append(group._partial_reduce_output)
        for parameter in group.fsdp_params:
            if _holds_apart(parameter):
                held.append(parameter.unsharded_accumulated_grad)
            leaf = _leaf_of(parameter)
            held.append(None if leaf is None else leaf.grad)
    return held


def sharded_gradients(models: Iterable[Any]) -> list[Tensor | None]:
    """The gradients that were reduced."""
    return [shard.grad for shard in shards_of(models)]


def can_recover(models: Iterable[Any]) -> bool:
    """Whether torch can clear the state that an aborted forward or backward leaves."""
    return all(hasattr(model, "reset_iter_state") for model in models)


def drop_held_gradients(models: Iterable[Any]) -> None:
    """Drop held gradients, and the state that an aborted forward or backward has left: `zero_grad()` does neither."""
    models = list(models)
    for model in models:
        if hasattr(model, "reset_iter_state") and model._get_fsdp_state()._is_root:
            model.reset_iter_state()
    for group in param_groups(models):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if _holds_apart(parameter):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def reduce_held_gradients(models: Iterable[Any]) -> None:
    """Reduce the gradients that backwards have held back, by the current flags. All ranks take part."""
    for root in _roots(models):
        (module,) = root._modules
        if not hasattr(module, "finalize_backward"):
            root._root_post_backward_final_callback()
            continue
        module.set_manual_backward_finalization(True)  # allowed, because no backward is running
        try:
            module.finalize_backward()
        finally:
            module.set_manual_backward_finalization(False)


def _roots(models: Iterable[Any]) -> list[Any]:
    """The root states, each once. A root ends the backward for all modules inside of it."""
    states = [model._get_fsdp_state() for model in models]
    return list({id(root): root for state in states for root in state._state_ctx.all_states[:1]}.values())
