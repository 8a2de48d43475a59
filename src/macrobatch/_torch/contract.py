"""The contract: every private name of torch that this folder uses, and what happens if torch no longer has it.

`tests/contract/test_torch.py` checks for each name that it exists and behaves as expected.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from macrobatch.errors import warn

OLDEST_TESTED, NEWEST_TESTED = (2, 11), (2, 15)


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """One name that torch does not promise to keep."""

    path: str  # module, class and name
    since: tuple[int, int] | None = None  # the first version of torch that has it; None if all tested versions do
    until: tuple[int, int] | None = None  # the last one
    successor: str | None = None  # the public replacement, which is used if torch has it
    without: str  # what happens if the name is missing
    needs_cuda: bool = False  # whether only builds of torch for CUDA have it
    example: Callable[[], object] | None = None  # makes an object that has it, if its class cannot be found by a path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


def _names(owner: str, *names: str, without: str, needs_cuda: bool = False) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(path=f"{owner}.{name}", without=without, needs_cuda=needs_cuda) for name in names)


_IMPORT = "macrobatch cannot be imported: AttributeError, which names it"
_MODULES = "AttributeError when an Accumulator is made, or at its first window"
_SCALER = "AttributeError in the first window with a scaler"
_DDP = "AttributeError when an Accumulator for DistributedDataParallel is made, or in its first window"
_FSDP1 = "AttributeError when an Accumulator for FullyShardedDataParallel is made"
_FSDP2 = "AttributeError when an Accumulator for fully_shard is made, or in its first window"
_HALF = "hooks that use float16 go unnoticed"
_DDP_MODEL = "torch.nn.parallel.DistributedDataParallel"
_FSDP1_STATE = "torch.distributed.fsdp._common_utils._FSDPState"
_FLAT_PARAM = "torch.distributed.fsdp._flat_param"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_CONTEXT = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"

CONTRACT: tuple[PrivateName, ...] = (
    # tensors.py
    *_names("torch", "_foreach_mul_", "_foreach_copy_", "_foreach_zero_", "_foreach_norm", without=_IMPORT),
    *_names("torch", "_amp_foreach_non_finite_check_and_unscale_", without=_IMPORT),
    *_names("torch._C", "DisableTorchFunction", without=_IMPORT),
    *_names("torch.Tensor", "_version", without="AttributeError in the first window"),
    *_names("torch.Tensor", "_backward_hooks", without="AttributeError in verify() and with cuda_graph=True"),
    *_names("torch.Tensor", "_post_accumulate_grad_hooks", without="hooks that write to gradients go unnoticed"),
    *_names(
        "torch.distributed.tensor.parallel.ddp",
        "_st_info",
        without="parameters under DistributedDataParallel(device_mesh=) are taken for replicated ones",
    ),
    # modules.py
    *_names("torch.nn.Module", "_parameters", "_buffers", "_modules", without=_MODULES),
    *_names("torch.nn.Module", "_forward_hooks", "_forward_pre_hooks", without="AttributeError in causal_lm_loss"),
    *_names("torch.nn.Module", "_backward_hooks", "_backward_pre_hooks", without="AttributeError in causal_lm_loss"),
    *_names("torch.nn.Module", "_compiled_call_impl", without="modules compiled in place are taken for eager ones"),
    *_names("torch.nn.modules.batchnorm", "_BatchNorm", without="macrobatch cannot be imported: ImportError"),
    *_names("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", without="AttributeError with a compiled model"),
    *_names("torch.distributed.fsdp.FullyShardedDataParallel", "_fsdp_wrapped_module", without="AttributeError"),
    *_names(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
        "_checkpoint_wrapped_module",
        without="AttributeError with checkpointed modules, in causal_lm_loss, verify() and checkpoints",
    ),
    # autograd.py
    *_names("torch._C._functions", "AccumulateGrad", without=_IMPORT),
    *_names("torch.autograd.graph", "_engine_run_backward", without="torch.autograd.backward() instead: slower"),
    *_names("torch._C", "_current_graph_task_id", without=_IMPORT),
    *_names("torch._C._functorch", "get_interpreter_stack", "TransformType", without="AttributeError in verify()"),
    *_names(
        "torch.autograd.function.BackwardCFunction",
        "_forward_cls",
        without="all functions of Python are taken for ones with a backward inside: slower",
    ),
    PrivateName(
        path="MulBackward0._saved_other",
        without="a loss that was scaled already is not noticed",
        example=lambda: (torch.ones((), requires_grad=True) * torch.ones(())).grad_fn,
    ),
    PrivateName(
        path="torch.autograd.Variable._execution_engine",
        successor="torch.autograd.graph.queue_callback (2.15)",
        without="the successor alone",
    ),
    # optimizers.py
    *_names("torch.amp.GradScaler", "_scale", "_per_optimizer_states", without=_SCALER),
    *_names(
        "torch.optim.Optimizer",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        without="hooks of optimizers see undivided gradients where the optimizer is fused",
    ),
    *_names(
        "torch.optim.optimizer",
        "_global_optimizer_pre_hooks",
        "_global_optimizer_post_hooks",
        without="KeyError when the first window closes",
    ),
    # cuda.py
    *_names(
        "torch._C",
        "_cuda_beginAllocateToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
        without="AttributeError with cuda_graph=True",
        needs_cuda=True,
    ),
    # distributed.py
    *_names("torch.distributed.ProcessGroup", "_get_backend", without="AttributeError at the first exchange of ranks"),
    *_names(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "_abort_process_group",
        without="ranks that wait for one that failed do not learn why, and wait for their time-out",
    ),
    *_names(
        "torch.distributed.device_mesh.DeviceMesh",
        "_flatten",
        without="AttributeError where a mesh of several dimensions is one group of ranks",
    ),
    # ddp.py
    *_names(_DDP_MODEL, "_join_config", "_module_parameters", "_sync_buffers", "_get_ddp_logging_data", without=_DDP),
    *_names(_DDP_MODEL, "_static_graph_delay_allreduce_enqueued", without=_DDP),
    *_names(_DDP_MODEL, "_comm_hooks", without=_HALF),
    *_names("torch.distributed.Reducer", "_rebuild_buckets", without=_DDP),
    *_names(
        "torch.distributed.Reducer",
        "_get_zeros_like_grad_buckets",
        without="parameters that were unfrozen after wrapping go unnoticed",
    ),
    # fsdp1.py
    *_names(_FSDP1_STATE, "_handle", "_gradient_predivide_factor", "_gradient_postdivide_factor", without=_FSDP1),
    *_names(_FSDP1_STATE, "_comm_hook", without=_HALF),
    *_names(f"{_FLAT_PARAM}.FlatParamHandle", "_fwd_bwd_param_dtype", "_reduce_dtype", without=_FSDP1),
    *_names(
        f"{_FLAT_PARAM}.FlatParameter",
        "_saved_grad_shard",
        without='discard() with sync="micro" leaves gradients behind',
    ),
    *_names(
        f"{_FLAT_PARAM}.FlatParameter",
        "_param_extensions",
        without="DTensors under FullyShardedDataParallel go unnoticed",
    ),
    # fsdp2.py
    *_names("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", without=_FSDP2),
    PrivateName(path=f"{_STATE}._fsdp_param_groups", since=(2, 12), without="the next one, of states with one group"),
    PrivateName(path=f"{_STATE}._fsdp_param_group", successor=f"{_STATE}._fsdp_param_groups", without="the one above"),
    *_names(_STATE, "_lazy_init", "_is_root", "_mp_policy", "_modules", "_state_ctx", without=_FSDP2),
    *_names(_STATE, "_auto_reshard_after_forward", without="it is neither saved nor put back"),
    PrivateName(
        path=f"{_STATE}._root_post_backward_final_callback",
        successor="FSDPModule.finalize_backward (2.15)",
        without="the successor alone",
    ),
    *_names(_CONTEXT, "all_states", "is_last_backward", without=_FSDP2),
    PrivateName(path=f"{_CONTEXT}.manual_backward_finalization", since=(2, 15), without="torch has no such mode"),
    *_names(_GROUP, "fsdp_params", "mesh_info", "gradient_divide_factor", "_partial_reduce_output", without=_FSDP2),
    *_names(
        _GROUP,
        "reduce_grads",
        "all_reduce_grads",
        "reshard_after_backward",
        "post_forward_mesh_info",
        without="what a program has set is neither saved nor put back",
    ),
    PrivateName(
        path=f"{_GROUP}.reduce_scatter_unused_params",
        since=(2, 13),
        without="zeros are put in place of missing gradients, before the next one",
    ),
    PrivateName(
        path=f"{_GROUP}.post_backward",
        successor="FSDPModule.set_reduce_scatter_unused_params (2.13)",
        without="the successor alone",
    ),
    *_names(_PARAM, "sharded_param", "_unsharded_param", without=_FSDP2),
    *_names(
        _PARAM,
        "_sharded_post_forward_param",
        without="BackendError after a forward without a backward, with reshard_after_forward=<number>",
    ),
    PrivateName(
        path=f"{_PARAM}.unsharded_accumulated_grad",
        successor="the gradient of _unsharded_param, which it is a name for since 2.15",
        without="the successor alone",
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
    return [one for one in CONTRACT if one.until is None and one.successor is None and is_there(one) is False]


@functools.cache
def _is_newer(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) > NEWEST_TESTED


_reported: set[str] = set()


def warn_about_unknown_torch() -> None:
    """If torch is newer than the tested versions, warn once of each private name that it no longer has."""
    if not _is_newer(torch.__version__):
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
