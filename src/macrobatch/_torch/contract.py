"""The contract: every private name of torch that this folder uses, and what happens if torch no longer has it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, nll_loss

from macrobatch.errors import warn

OLDEST_TESTED, NEWEST_TESTED = (2, 11), (2, 15)


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """One name that torch does not promise to keep."""

    path: str  # module, class and name
    without: str  # what happens if the name is missing
    since: tuple[int, int] | None = None  # the first version of torch that has it; None if all tested versions do
    successor: str | None = None  # the public replacement, which is used if torch has it
    example: Callable[[], object] | None = None  # makes an object that has it, if its class cannot be found by a path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


_IMPORT = "macrobatch cannot be imported: AttributeError, which names it"
_DDP = "AttributeError when an Accumulator for DistributedDataParallel is made, or in its first window"
_FSDP1 = "AttributeError when an Accumulator for FullyShardedDataParallel is made"
_FSDP2 = "AttributeError when an Accumulator for fully_shard is made, or in its first window"
_FLAT_PARAM = "torch.distributed.fsdp._flat_param"
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FULLY_SHARD}._fsdp_state.FSDPState"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_FULLY_SHARD}._fsdp_param.FSDPParam"

# By their owners: names, and what happens without them.
_OWNED = {
    # tensors.py
    "torch": {
        "_foreach_mul_ _foreach_copy_ _foreach_zero_ _foreach_norm": _IMPORT,
        "_amp_foreach_non_finite_check_and_unscale_": _IMPORT,
    },
    "torch._C._nn": {"flatten_dense_tensors": _IMPORT},
    "torch.Tensor": {
        "_version": "AttributeError in the first window",
        "_backward_hooks": "AttributeError in the first window",
        "_post_accumulate_grad_hooks": "hooks that write to gradients go unnoticed",
    },
    "torch.distributed.tensor.parallel.ddp": {
        "_st_info": "parameters under DistributedDataParallel(device_mesh=) are taken for replicated ones",
    },
    # modules.py
    "torch.nn.Module": {
        "_parameters _buffers _modules": "AttributeError when an Accumulator is made, or at its first window",
        "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks": "AttributeError in causal_lm_loss",
        "_compiled_call_impl": "modules compiled in place are taken for eager ones",
    },
    "torch.nn.modules.batchnorm": {"_BatchNorm": "macrobatch cannot be imported: ImportError"},
    "torch._dynamo.eval_frame.OptimizedModule": {"_orig_mod": "AttributeError with a compiled model"},
    "torch.distributed.fsdp.FullyShardedDataParallel": {"_fsdp_wrapped_module": "AttributeError"},
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": {
        "_checkpoint_wrapped_module": (
            "AttributeError with checkpointed modules, in causal_lm_loss, verify() and checkpoints"
        ),
    },
    # tensors.py, autograd.py, cuda.py
    "torch._C": {
        "DisableTorchFunction _is_torch_function_mode_enabled _current_graph_task_id": _IMPORT,
        "_cuda_beginAllocateToPool _cuda_endAllocateToPool _cuda_releasePool": "AttributeError with cuda_graph=True",
    },
    "torch._C._functions": {"AccumulateGrad": _IMPORT},
    "torch._C._functorch": {"get_interpreter_stack TransformType": "AttributeError in verify()"},
    "torch.autograd.graph": {"_engine_run_backward": "torch.autograd.backward() instead: slower"},
    "torch.autograd": {
        "_engine_run_backward": "BackendError in audit(); verify() reads no loss of a step, and infers all causes",
    },
    "torch.utils._python_dispatch": {"TorchDispatchMode": "verify() cannot be imported: ImportError"},
    # watching.py
    "torch.nn.utils.clip_grad": {"_clip_grads_with_norm_": "BackendError in audit()"},
    "torch.autograd.function.BackwardCFunction": {
        "_forward_cls": "all functions of Python are taken for ones with a backward inside: slower",
    },
    # optimizers.py
    "torch.amp.GradScaler": {"_scale _per_optimizer_states": "AttributeError in the first window with a scaler"},
    "torch.optim.Optimizer": {
        "_optimizer_step_pre_hooks _optimizer_step_post_hooks": (
            "hooks of optimizers see undivided gradients where the optimizer is fused"
        ),
    },
    "torch.optim.optimizer": {
        "_global_optimizer_pre_hooks _global_optimizer_post_hooks": "KeyError when the first window closes",
    },
    # distributed.py
    "torch.distributed.ProcessGroup": {"_get_backend": "AttributeError at the first exchange of ranks"},
    "torch.distributed.distributed_c10d": {
        "_get_default_store _abort_process_group": (
            "ranks that wait for one that failed do not learn why, and wait for their time-out"
        ),
    },
    "torch.distributed.device_mesh.DeviceMesh": {
        "_flatten": "AttributeError where a mesh of several dimensions is one group of ranks",
    },
    # ddp.py
    "torch.nn.parallel.DistributedDataParallel": {
        "_join_config _module_parameters _sync_buffers _get_ddp_logging_data": _DDP,
        "_static_graph_delay_allreduce_enqueued": _DDP,
        "_comm_hooks": "hooks that use float16 go unnoticed",
    },
    "torch.distributed.Reducer": {
        "_rebuild_buckets": _DDP,
        "_get_zeros_like_grad_buckets": "parameters that were unfrozen after wrapping go unnoticed",
    },
    # fsdp1.py
    "torch.distributed.fsdp._common_utils._FSDPState": {
        "_handle _gradient_predivide_factor _gradient_postdivide_factor": _FSDP1,
        "_comm_hook": "hooks that use float16 go unnoticed",
    },
    f"{_FLAT_PARAM}.FlatParamHandle": {"_fwd_bwd_param_dtype _reduce_dtype": _FSDP1},
    f"{_FLAT_PARAM}.FlatParameter": {
        "_saved_grad_shard": 'discard() with sync="micro" leaves gradients behind',
        "_param_extensions": "DTensors under FullyShardedDataParallel go unnoticed",
        "_local_shard _params _param_infos _shard_param_infos": "AttributeError in the first window",
    },
    # fsdp2.py
    "torch.distributed.fsdp.FSDPModule": {"_get_fsdp_state": _FSDP2},
    _STATE: {
        "_lazy_init _is_root _mp_policy _modules _state_ctx": _FSDP2,
        "_auto_reshard_after_forward": "it is neither saved nor put back",
    },
    f"{_STATE}Context": {"all_states is_last_backward": _FSDP2},
    _GROUP: {
        "fsdp_params mesh_info gradient_divide_factor _partial_reduce_output": _FSDP2,
        "reduce_grads all_reduce_grads reshard_after_backward post_forward_mesh_info": (
            "what a program has set is neither saved nor put back"
        ),
    },
    _PARAM: {
        "sharded_param _unsharded_param": _FSDP2,
        "_sharded_post_forward_param": (
            "BackendError after a forward without a backward, with reshard_after_forward=<number>"
        ),
    },
}
# By their paths: names that some versions of torch do not have, with the version that brought them.
_SINCE = {
    f"{_STATE}._fsdp_param_groups": ((2, 12), "_fsdp_param_group, of states with one group"),
    f"{_STATE}Context.manual_backward_finalization": ((2, 15), "torch has no such mode"),
    f"{_GROUP}.reduce_scatter_unused_params": ((2, 13), "zeros are put in place of missing gradients"),
}
# By their paths: names with a public replacement, which is used alone if torch no longer has the name.
_SUCCESSORS = {
    "torch.autograd.Variable._execution_engine": "torch.autograd.graph.queue_callback (2.15)",
    f"{_STATE}._fsdp_param_group": f"{_STATE}._fsdp_param_groups",
    f"{_STATE}._root_post_backward_final_callback": "FSDPModule.finalize_backward (2.15)",
    f"{_GROUP}.post_backward": "FSDPModule.set_reduce_scatter_unused_params (2.13)",
    f"{_PARAM}.unsharded_accumulated_grad": "the gradient of _unsharded_param, which it is a name for since 2.15",
}
# By the names of nodes in a graph: what they have saved, and an example. (loss_nodes.py)
_ONE = torch.ones(1, 1)
_NODES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "NllLossBackward0": (
        "_saved_reduction _saved_total_weight _raw_saved_total_weight _saved_weight _raw_saved_weight",
        lambda x: nll_loss(x, torch.zeros(1, dtype=torch.long)).grad_fn,
    ),
    "MseLossBackward0": ("_saved_reduction _saved_self _raw_saved_self", lambda x: mse_loss(x, _ONE).grad_fn),
    "MeanBackward1": ("_saved_dim _saved_self_sym_sizes _input_metadata", lambda x: x.mean(0).grad_fn),
    "StackBackward0": ("_saved_dim", lambda x: torch.stack([x]).grad_fn),
    "SelectBackward0": ("_saved_dim _saved_index", lambda x: x[0].grad_fn),
    "SliceBackward0": ("_saved_dim _saved_start _saved_end _saved_step", lambda x: x[:1].grad_fn),
    "MulBackward0": ("_raw_saved_other _saved_self _raw_saved_self", lambda x: (x * _ONE).grad_fn),
    "AddBackward0": ("_saved_alpha", lambda x: (x + x).grad_fn),
    # Only its type: to read from one whose node is gone is a segmentation fault.
    "SavedTensor": ("unpack_hook", lambda x: type((x * _ONE).grad_fn._raw_saved_other)),  # type: ignore[union-attr]
}
CONTRACT: tuple[PrivateName, ...] = (
    *(
        PrivateName(path=f"{owner}.{name}", without=without)
        for owner, rows in _OWNED.items()
        for names, without in rows.items()
        for name in names.split()
    ),
    *(PrivateName(path=path, since=since, without=without) for path, (since, without) in _SINCE.items()),
    *(PrivateName(path=path, successor=name, without="the successor alone") for path, name in _SUCCESSORS.items()),
    PrivateName(
        path="MulBackward0._saved_other",
        without="a loss that was scaled already is not noticed",
        example=lambda: (torch.ones((), requires_grad=True) * torch.ones(())).grad_fn,
    ),
    *(
        PrivateName(
            path=f"MseLossBackward0.{name}",
            without="`audit` cannot tell losses apart by their targets",
            example=lambda: mse_loss(_ONE.clone().requires_grad_(), _ONE).grad_fn,
        )
        for name in ("_saved_target", "_raw_saved_target")
    ),
    *(
        PrivateName(
            path=f"{node}.{name}",
            without="losses with such a node are unknown: `items=` is needed",
            example=partial(example, _ONE.clone().requires_grad_()),
        )
        for node, (names, example) in _NODES.items()
        for name in names.split()
    ),
)


# ---------------------------------------------------------------------------------------------- looking for them


def is_there(private: PrivateName) -> bool | None:
    """Whether this torch has the name; None if its module is not loaded."""
    if private.example is not None:
        return hasattr(private.example(), private.name)
    parts = private.path.split(".")[:-1]
    loaded = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in sys.modules)
    owner: Any = sys.modules[".".join(parts[:loaded])]
    for number, part in enumerate(parts[loaded:], start=loaded + 1):
        if part not in vars(owner):  # hasattr would make torch load some modules
            is_module = isinstance(owner, ModuleType) and part.lstrip("_")[:1].islower()
            return None if is_module and find_spec(".".join(parts[:number])) is not None else False
        owner = vars(owner)[part]
    return hasattr(owner, private.name) or private.name in _mentioned_in(owner)


def _mentioned_in(owner: Any) -> Iterator[str]:
    """The names of the attributes that a class, or the functions of a module, use on objects."""
    for kind in owner.__mro__ if isinstance(owner, type) else (owner,):
        yield from getattr(kind, "__annotations__", ())
        for function in filter(inspect.isfunction, vars(kind).values()):
            yield from getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def missing_names() -> list[PrivateName]:
    """The names that this torch does not have, and that have no public replacement."""
    return [one for one in CONTRACT if one.successor is None and is_there(one) is False]


_reported: set[str] = set()


def warn_about_unknown_torch() -> None:
    """If torch is newer than the tested versions, warn once of each private name that it no longer has."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) <= NEWEST_TESTED:
        return
    lost = [one for one in missing_names() if one.path not in _reported]
    if not lost:
        return
    _reported.update(one.path for one in lost)
    found = "; ".join(f"{one.path} (without it: {one.without})" for one in lost)
    warn(
        f"torch {torch.__version__} is newer than those that this version of macrobatch was tested with (up to "
        f"{'.'.join(map(str, NEWEST_TESTED))}), and does not have: {found}. Look for a newer macrobatch."
    )
