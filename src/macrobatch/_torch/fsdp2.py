"""`fully_shard`: its parameter groups, the gradients that they hold back, and how to reduce these on demand.

Up to torch 2.14, a held gradient moves from the gathered parameter to a separate attribute, and only the callback at
the end of a backward can reduce it. From 2.15 on, it stays in place, and `FSDPModule.finalize_backward` reduces it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from macrobatch._torch.modules import is_fully_sharded, modules_of, parameters_of

_ROOT_FLAGS = ("is_last_backward", "manual_backward_finalization")
_REDUCES_UNUSED = "reduce_scatter_unused_params"
_GROUP_FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info", _REDUCES_UNUSED)
_STATE_FLAG = "_auto_reshard_after_forward"
_FORMS = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")  # modules show one of them at a time


# ---------------------------------------------------------------------------------------------- the parts


class Topology:
    """The parts of models that `fully_shard` was applied to, looked up in one pass over all modules."""

    def __init__(self, models: Iterable[Any]) -> None:
        everything = modules_of(models)
        kinds = {kind for kind, one in {type(one): one for one in everything}.items() if is_fully_sharded(one)}
        self.modules: list[Any] = [module for module in everything if type(module) in kinds]
        # Several modules may have one state together. The parameters of a group are communicated together.
        self.states = list(dict.fromkeys([module._get_fsdp_state() for module in self.modules]))
        self.groups = [group for state in self.states for group in _groups_of(state)]
        self.parameters = [parameter for group in self.groups for parameter in group.fsdp_params]
        known = {id(getattr(parameter, form, None)) for form in _FORMS for parameter in self.parameters}
        shown = [parameter for module in everything for parameter in parameters_of(module).values()]
        self.strangers = [p for p in shown if p is not None and id(p) not in known]  # which it does not shard
        held = [getattr(kind, "unsharded_accumulated_grad", None) for kind in set(map(type, self.parameters))]
        self.holds_apart = not any(isinstance(attribute, property) for attribute in held)  # up to torch 2.14
        self.contexts: list[Any] = []  # what states with the same root have in common; known after `initialize`
        self.flags: list[tuple[Any, str]] = []  # all flags that `Flags` saves, with owners; known after `initialize`
        for group in self.groups:
            if not hasattr(group, _REDUCES_UNUSED):
                _backport_unused(group)

    def has_parts_of(self, other: Topology) -> bool:
        """Whether all parts are the same objects."""
        parts = self.modules, self.states, self.groups, self.parameters
        return parts == (other.modules, other.states, other.groups, other.parameters)

    def initialize(self) -> None:
        """Do the initialization of the first forward, which changes the flags of the root."""
        if self.contexts:
            return
        for state in self.states:
            if state._is_root is None:  # those around it come first, and initialize it too
                state._lazy_init()
        self.contexts = list(dict.fromkeys([state._state_ctx for state in self.states]))
        owners = [(group, flag) for group in self.groups for flag in _GROUP_FLAGS]
        owners += [(state, _STATE_FLAG) for state in self.states]
        owners += [(context, flag) for context in self.contexts for flag in _ROOT_FLAGS]
        self.flags = [(owner, flag) for owner, flag in owners if hasattr(owner, flag)]


def _groups_of(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)  # older versions have one or none
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def leaves_of(topology: Topology) -> list[Tensor | None]:
    """The unsharded parameters, which are the leaves of graphs; None for those that were not gathered yet."""
    return [getattr(parameter, "_unsharded_param", None) for parameter in topology.parameters]


def trained_groups(topology: Topology) -> list[list[Tensor]]:
    """For each parameter group, the gathered parameters that are trained."""
    found = [[getattr(p, "_unsharded_param", None) for p in group.fsdp_params] for group in topology.groups]
    return [[leaf for leaf in leaves if leaf is not None and leaf.requires_grad] for leaves in found]


def trained_shards(topology: Topology) -> dict[int, Tensor]:
    """This rank's shards of the parameters that are trained, by their ids."""
    shards = [parameter.sharded_param for parameter in topology.parameters]
    return {id(shard): shard for shard in shards if shard.requires_grad}


def gathered_by_shard(topology: Topology) -> dict[int, Tensor]:
    """The gathered parameters, by the ids of their shards, which users see."""
    found = zip(topology.parameters, leaves_of(topology), strict=True)
    return {id(parameter.sharded_param): leaf for parameter, leaf in found if leaf is not None}


def mesh_of(model: Any) -> Any:
    """The mesh over which the model averages."""
    return Topology([model]).groups[0].mesh_info.mesh


def has_replicas(topology: Topology) -> bool:
    """Whether shards are replicated over a second dimension of the mesh (HSDP)."""
    return any(group.mesh_info.mesh.ndim > 1 for group in topology.groups)


def divisors_of(topology: Topology) -> set[float]:
    """The numbers by which its groups divide gradients."""
    return {group.gradient_divide_factor or group.mesh_info.mesh.size() for group in topology.groups}


def precisions_of(topology: Topology) -> list[Any]:
    """The `MixedPrecisionPolicy` of each state."""
    return [state._mp_policy for state in topology.states]


def gathered_bytes(topology: Topology) -> tuple[int, int]:
    """The bytes of all gathered parameters, and of the sums of their gradients that a held window keeps."""
    weights = sums = 0
    for state, policy in zip(topology.states, precisions_of(topology), strict=True):
        for shard in [parameter.sharded_param for group in _groups_of(state) for parameter in group.fsdp_params]:
            dtype = policy.param_dtype or shard.dtype
            weights += shard.numel() * dtype.itemsize
            sums += shard.numel() * (policy.reduce_dtype or dtype).itemsize * shard.requires_grad
    return weights, sums


# ---------------------------------------------------------------------------------------------- how it is set


class Flags:
    """The current flags that decide when models communicate, reshard and end a backward."""

    def __init__(self, topology: Topology) -> None:
        self._saved = [(owner, flag, getattr(owner, flag)) for owner, flag in topology.flags]

    def restore(self) -> None:
        """Restore the flags."""
        for owner, flag, value in self._saved:
            if getattr(owner, flag) is not value:
                setattr(owner, flag, value)


def _write(owners: Iterable[Any], flag: str, value: object) -> None:
    for owner in owners:
        if getattr(owner, flag) is not value:
            setattr(owner, flag, value)


# The next three write what `FSDPModule.set_requires_gradient_sync` etc. write. Those walk all modules at every call.


def set_reductions(topology: Topology, *, reduces: bool, all_reduces: bool) -> None:
    """Set whether backwards reduce gradients, and also over the second dimension of the mesh (HSDP)."""
    _write(topology.groups, "reduce_grads", reduces)
    _write(topology.groups, "all_reduce_grads", all_reduces)


def set_reshard_after_backward(topology: Topology, value: bool) -> None:
    """Set whether backwards shard parameters again."""
    _write(topology.groups, "reshard_after_backward", value)


def keep_after_forward(topology: Topology) -> None:
    """Keep parameters gathered after forwards, as `set_reshard_after_forward(False)` does."""
    _write([state for state in topology.states if hasattr(state, _STATE_FLAG)], _STATE_FLAG, False)
    _write(topology.groups, "post_forward_mesh_info", None)


def finish_every_backward(topology: Topology) -> None:
    """Make each backward wait for its reductions, whatever flags the program has set."""
    for context in topology.contexts:
        context.is_last_backward = True
        if getattr(context, "manual_backward_finalization", False):
            (module,) = context.all_states[0]._modules
            module.set_manual_backward_finalization(False)  # an error if a backward of the program is not finished


def reduce_unused_too(topology: Topology) -> None:
    """Make each rank reduce all parameters of a group, with zeros for those that it has not used."""
    # Ranks that have used different ones would add the gradient of one parameter to that of another of the same shape.
    _write(topology.groups, _REDUCES_UNUSED, True)


@contextlib.contextmanager
def reducing_unused(models: Iterable[Any]) -> Iterator[None]:
    """The same inside a block."""
    groups = [group for group in Topology(models).groups if not getattr(group, _REDUCES_UNUSED)]
    _write(groups, _REDUCES_UNUSED, True)
    try:
        yield
    finally:
        _write(groups, _REDUCES_UNUSED, False)


def fill_unused(topology: Topology) -> None:
    """Add zeros for missing gradients, in the dtype of the group's held ones: a group must have one dtype."""
    for group in topology.groups if topology.holds_apart else ():
        if not group.reduce_grads:
            continue
        held = [p.unsharded_accumulated_grad for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
        for parameter in filter(_is_unused, group.fsdp_params) if held else ():
            parameter.unsharded_accumulated_grad = torch.zeros_like(parameter._unsharded_param, dtype=held[0].dtype)


def _is_unused(parameter: Any) -> bool:
    """Whether a trained parameter has no gradient to reduce."""
    leaf = getattr(parameter, "_unsharded_param", None)
    is_held = parameter.unsharded_accumulated_grad is not None
    return leaf is not None and leaf.requires_grad and leaf.grad is None and not is_held


def _backport_unused(group: Any) -> None:
    """Add this flag before torch 2.13, which has none: if it is set, add zeros for missing gradients to reductions."""
    reduce = group.post_backward

    def post_backward(*arguments: Any) -> None:
        if group.reduce_grads and getattr(group, _REDUCES_UNUSED):
            for parameter in filter(_is_unused, group.fsdp_params):
                parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
        reduce(*arguments)

    group.post_backward = post_backward
    setattr(group, _REDUCES_UNUSED, False)


# ---------------------------------------------------------------------------------------------- held gradients


def held_gradients(topology: Topology) -> list[Tensor | None]:
    """All tensors that may hold gradients that are not reduced, or only in part."""
    held: list[Tensor | None] = [group._partial_reduce_output for group in topology.groups]
    if topology.holds_apart:
        held += [parameter.unsharded_accumulated_grad for parameter in topology.parameters]
    return held + [None if leaf is None else leaf.grad for leaf in leaves_of(topology)]


def can_recover(topology: Topology) -> bool:
    """Whether torch can clear the state that an aborted forward or backward leaves."""
    return all(hasattr(module, "reset_iter_state") for module in topology.modules)


def drop_held_gradients(topology: Topology) -> None:
    """Drop held gradients, and the state that an aborted forward or backward has left: `zero_grad()` does neither."""
    for module in topology.modules:
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
            module.reset_iter_state()
    for group in topology.groups:
        group._partial_reduce_output = None
    for parameter in topology.parameters:
        if topology.holds_apart:
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def reduce_held_gradients(topology: Topology) -> None:
    """Reduce the gradients that backwards have held back, by the current flags. All ranks take part."""
    for context in topology.contexts:
        root = context.all_states[0]  # it ends the backward for all modules inside of it
        (module,) = root._modules
        if not hasattr(module, "finalize_backward"):
            root._root_post_backward_final_callback()
            continue
        module.set_manual_backward_finalization(True)  # allowed, because no backward is running
        try:
            module.finalize_backward()
        finally:
            module.set_manual_backward_finalization(False)


# ---------------------------------------------------------------------------------------------- seen from outside


def shards_by_leaf() -> dict[int, tuple[Tensor, Tensor]]:
    """All gathered parameters of this process, and the shards that optimizers hold, by the ids of the former."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    if module is None:
        return {}
    found = [one for one in gc.get_objects() if type(one) is module.FSDPParam]
    pairs = [(getattr(one, "_unsharded_param", None), one.sharded_param) for one in found]
    return {id(leaf): (leaf, shard) for leaf, shard in pairs if leaf is not None}
