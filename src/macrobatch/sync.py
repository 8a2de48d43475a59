"""When gradients travel: one small class a backend, chosen by `sync_for`.

A micro-batch lies between `begin`, before its forward, and `end`, after its backward. What a class sets on a model in
between, `end` puts back as it was. What remains to be done when a window closes is in `finish`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.hooks import RemovableHandle

from macrobatch.collectives import Group, all_reduce_flat, host_group, local, unused_by_all
from macrobatch.errors import BackendError, UsageError
from macrobatch.graph import Reach
from macrobatch.placements import ranks_of

When = Literal["window", "micro"]


class Local:
    """One process: gradients stay where they are.

    Attributes:
        group: the ranks whose items are counted together; None: this process alone.
        average: what the backend has divided the gradients of a closing window by.
        lockstep: whether every micro-batch communicates, so that all ranks must do equally many.
        confines: whether a backward can be confined to the own parameters: they are the leaves of its graph.
        may_move: whether gradients may be copied to another place between backwards.
        shows_views: whether ``.grad`` holds views of what is held elsewhere, made anew in each forward.
        shards: the groups of ranks that hold other parts of plain gradients.
        holds: whether all that ranks do together in a window can wait for its close (`hold`).
        needs_turns: whether a rank must take a turn in a window even if it has nothing to add.
        recordable: whether a micro-step can be one CUDA graph: what ranks do together cannot.
    """

    group: Group = None
    average: float = 1
    lockstep = False
    confines = True
    may_move = False
    shows_views = False
    shards: tuple[Group, ...] = ()
    holds = True
    needs_turns = False
    recordable = True
    _hosts: Group = None

    def hosts(self) -> Group:
        """The same ranks, to exchange what lives on the host. Made once, by all of them together."""
        if self._hosts is None:
            self._hosts = host_group(self.group)
        return self._hosts

    def hold(self) -> None:
        """Before a window that may fail on one rank: no micro-batch of it communicates, only `finish` does."""

    def begin(self, last: bool) -> None:
        """Before the forward of a micro-batch."""

    def end(self) -> None:
        """After its backward, or when it is given up: everything is put back as it was."""

    def check(self, reach: Reach, named: dict[str, nn.Parameter]) -> Sequence[str]:
        """Before a backward: an error if it would leave a gradient unsynchronised that should not be.

        Returns the names of parameters that must turn out to get a gradient in it, where that cannot be seen yet.
        """
        return ()

    @property
    def checks(self) -> bool:
        """Whether `check` has anything to say of this micro-batch."""
        return False

    def narrows(self) -> bool:
        """Whether gradients pass through float16 somewhere on their way."""
        return False

    def held(self) -> list[Tensor | None] | None:
        """All that may hold gradients of the window besides ``.grad``; None: nothing ever does."""
        return None

    def zeroed(self, parameters: Sequence[nn.Parameter]) -> list[RemovableHandle]:
        """Hooks under which a backward adds zeros, where its own gradient is infinite too."""
        return [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]

    def accumulated(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the open window has added up so far, wherever it is held: this rank's own tensors."""
        return [local(p.grad) for p in parameters if p.grad is not None]

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        """When a window closes: synchronise what its last backward has not.

        `unused`: the parameters that this rank's micro-batches did not use, repeated ones left out; None: that need
        not be told, as no rank repeats any.
        """

    def clear(self) -> None:
        """Drop gradients that are held anywhere but in ``.grad``."""

    def clear_stale(self) -> None:
        """Before a window: drop what may be left there of an earlier one."""


class DDP(Local):
    """DistributedDataParallel: the reducer averages, overlapped with the last backward; or one flat sum at the close.

    Flat where the reducer cannot: gradients wider than their parameters, a window closed before its last micro-batch,
    one in which a rank has nothing, or that is held.
    """

    def __init__(
        self, models: Sequence[Any], *, sync: When, group: Group, flat: bool, sees_forwards: bool = True
    ) -> None:
        self._models = models
        self._sees_forwards = sees_forwards  # a compiled one may not run DDP's own code
        self._reduced = _reduced_by(models)
        if flat and sync == "micro":
            raise BackendError(
                'accumulate_dtype under DistributedDataParallel needs sync="window": its reducer takes no gradients '
                "that are wider than their parameters, so they travel in one flat sum when the window closes."
            )
        self._micro = sync == "micro"
        self._flat = flat
        self._flags = contextlib.ExitStack()
        self._synced = False  # whether the last backward went through the reducer
        self._held = False
        self._world = dist.get_world_size(group)
        self.group = group
        self.lockstep = self._micro
        self.recordable = not (self._micro or any(model.static_graph for model in models))
        self.may_move = any(model.gradient_as_bucket_view for model in models)  # once, when its buckets are laid out

    @property
    def average(self) -> float:  # type: ignore[override]
        return self._world if self._synced else 1

    def hold(self) -> None:
        self._held, self._synced = True, False
        for model in self._models:  # what else the first forward would do, together with the other ranks
            model.reducer._rebuild_buckets()
            if model.will_sync_module_buffers():
                model._sync_buffers()
            model.require_forward_param_sync = False

    def begin(self, last: bool) -> None:
        for model in self._models:
            if model._join_config.enable:
                raise BackendError(
                    "the loop runs inside a Join (or model.join()) context, which shadows the collectives of ranks "
                    "that have run out, and would pair them wrongly here. Leave it out: batches() and MacroStep keep "
                    "ranks of different lengths together by themselves."
                )
        may_sync = not (self._flat or self._held) and (last or self._micro)
        self._synced = may_sync and not self._has_others()
        if self._synced:
            for model in self._models:  # a number that says the same, until a forward of DDP's sets it to True
                model.require_forward_param_sync = int(model.require_forward_param_sync)
            return
        if may_sync and self._micro:
            raise BackendError(
                "a parameter was frozen or thawed after DistributedDataParallel was made, whose reducer does not know "
                'it: with sync="micro" its gradient would not travel. Wrap the model anew, or use sync="window".'
            )
        for model in self._models:
            if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
                raise BackendError(
                    "DistributedDataParallel(static_graph=True) learns its graph in the first iteration, which must be "
                    "synchronised. Let the first window have one micro-batch "
                    "(steps=lambda step: 1 if step == 0 else 8), or leave static_graph out."
                )
            self._flags.enter_context(model.no_sync())

    def end(self) -> None:
        self._flags.close()
        for model in self._models:
            model.require_forward_param_sync = bool(model.require_forward_param_sync)

    def _has_others(self) -> bool:
        """Whether other parameters are trained than the reducer knows: those that were trained when DDP was made."""
        if self._reduced is None:
            return False
        return any(p.requires_grad != (id(p) in self._reduced) for p in _reducible(self._models))

    def check(self, reach: Reach, named: dict[str, nn.Parameter]) -> Sequence[str]:
        if not self._synced:
            return ()
        used = set(map(id, reach.leaves))
        for model in self._models if self._sees_forwards else ():
            if model.require_forward_param_sync is not True and any(id(p) in used for p in model.parameters()):
                raise BackendError(
                    "the forward of this rank's last micro-batch did not go through DistributedDataParallel, or inside "
                    "its no_sync(): nothing would synchronise the gradients. Call model(...) instead of "
                    "model.module(...), and leave no_sync() out of the loop: it is entered here where it belongs."
                )
        if all(m.find_unused_parameters or m.static_graph for m in self._models):
            return ()
        missing = [name for name, p in named.items() if id(p) not in used and self._reduces(p)]
        if missing and not reach.may_nest:
            raise BackendError(
                f"{len(missing)} parameters have no part in this rank's last micro-batch of the window, the first of "
                f"them {missing[0]!r}: DistributedDataParallel would not synchronise what they have accumulated. Wrap "
                "the model with find_unused_parameters=True."
            )
        return missing

    @property
    def checks(self) -> bool:
        return self._synced

    def _reduces(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad if self._reduced is None else id(parameter) in self._reduced

    def narrows(self) -> bool:
        return any(_compresses_to_half(model) for model in self._models)

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        self._held = False
        if not self._synced:
            all_reduce_flat(named, self.group, self.hosts(), unused or ())
            for model in self._models:  # as after a synchronised backward: the next forward broadcasts buffers
                model.require_forward_param_sync = True
        elif unused is not None:  # the reducer takes what a repeated micro-batch used for used
            for name in unused_by_all(named, unused, self.hosts()):
                named[name].grad = None

    def clear(self) -> None:
        self._held = False


class FSDP1(Local):
    """FullyShardedDataParallel: its no_sync holds unsharded gradients until the last micro-batch."""

    recordable = False
    confines = False  # torch forbids it here
    shows_views = True
    lockstep = True  # parameters are gathered for every micro-batch
    holds = False
    needs_turns = True

    def __init__(self, models: Sequence[Any], *, sync: When, group: Group) -> None:
        self._models = models
        self._micro = sync == "micro"
        self._flags = contextlib.ExitStack()
        self._synced = False
        self.group = group
        if models[0].sharding_strategy.name != "NO_SHARD":
            self.shards = (models[0].process_group,)
        if any(_flattens_dtensors(module) for model in models for module in model.modules()):
            raise BackendError(
                "FullyShardedDataParallel around parameters that are DTensors, as under tensor parallelism, hides "
                "which ranks hold which parts: no norm of all gradients can be known. Shard with fully_shard instead."
            )

    @property
    def average(self) -> float:  # type: ignore[override]
        model = self._models[0]
        return float(model._gradient_predivide_factor * model._gradient_postdivide_factor)

    def narrows(self) -> bool:
        dtypes = {dtype for handle in self._handles() for dtype in (handle._fwd_bwd_param_dtype, handle._reduce_dtype)}
        return torch.float16 in dtypes or any(getattr(model, "_comm_hook", None) is not None for model in self._models)

    def held(self) -> list[Tensor | None]:
        flat = [handle.flat_param for handle in self._handles()]
        return [p.grad for p in flat] + [getattr(p, "_saved_grad_shard", None) for p in flat]

    def _modules(self) -> list[Any]:
        return [module for model in self._models for module in type(model).fsdp_modules(model)]

    def _handles(self) -> list[Any]:
        return [module._handle for module in self._modules() if module._handle is not None]

    def begin(self, last: bool) -> None:
        if any(module.training_state.name != "IDLE" for module in self._modules()):
            raise BackendError(
                "a forward or backward of FullyShardedDataParallel was left by an exception, and torch has no way to "
                "put its state back. Start again from a checkpoint; fully_shard goes on after discard()."
            )
        self._synced = last or self._micro
        if not self._synced:
            for model in self._models:
                self._flags.enter_context(model.no_sync())

    def end(self) -> None:
        self._flags.close()

    def zeroed(self, parameters: Sequence[nn.Parameter]) -> list[RemovableHandle]:
        flat = [handle.flat_param for handle in self._handles()]
        return [p.register_hook(torch.zeros_like) for p in flat if p.requires_grad]

    def accumulated(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        raise BackendError(
            "what FullyShardedDataParallel holds back cannot be reached: shard with fully_shard instead."
        )

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        if not self._synced:
            raise _closed_early("FullyShardedDataParallel")

    def clear(self) -> None:
        for handle in self._handles():
            handle.flat_param.grad = None
            if hasattr(handle.flat_param, "_saved_grad_shard"):
                del handle.flat_param._saved_grad_shard

    def clear_stale(self) -> None:
        self.clear()


class FSDP2(Local):
    """`fully_shard`, over one mesh dimension or two (HSDP): flags on each parameter group, for forward and backward."""

    recordable = False
    confines = False  # the leaves of the graph are the gathered parameters, not those that users see
    needs_turns = True

    def __init__(self, models: Sequence[Any], *, sync: When, gather: When, group: Group) -> None:
        self._models = models
        self._micro = sync == "micro"
        self._gathered = gather == "window"
        self._held = False
        # An aborted forward or backward leaves traces everywhere, which torch clears away since 2.13.
        self.holds = self._gathered and all(hasattr(model, "reset_iter_state") for model in models)
        self._saved: list[tuple[object, str, object]] = []
        self._closed = False  # whether the last backward was a window's last
        self.group = group
        self.lockstep = self._micro or not self._gathered
        assert self.average, "an error if its parts do not divide alike"
        self._check_all_sharded()

    @property
    def average(self) -> float:  # type: ignore[override]
        factors = {g.gradient_divide_factor or g.mesh_info.mesh.size() for g in _groups(self._models)}
        if len(factors) != 1:
            raise BackendError(
                f"the parts of the model divide gradients by different factors: {sorted(factors)}. Set one for all: "
                "set_gradient_divide_factor() does not reach the modules inside."
            )
        return float(factors.pop())

    def narrows(self) -> bool:
        policies = [state._mp_policy for state in _states(self._models)]
        return any(torch.float16 in (policy.param_dtype, policy.reduce_dtype) for policy in policies)

    def held(self) -> list[Tensor | None]:
        held = [group._partial_reduce_output for group in _groups(self._models)]
        for parameter in self._sharded():
            held.append(parameter.unsharded_accumulated_grad)
            held.append(parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None)
        return held

    def hold(self) -> None:
        self._held, self._closed = True, False
        for model in self._models:
            model._get_fsdp_state()._lazy_init()
        for module in self._modules():
            module.unshard()

    def begin(self, last: bool) -> None:
        self._save()
        self._closed = last
        for model in self._models:
            model.set_requires_gradient_sync((last or self._micro) and not self._held)
            if self._micro:
                model.set_requires_all_reduce(last)  # of HSDP: once a window
            if self._gathered:
                model.set_reshard_after_forward(False)
                model.set_reshard_after_backward(last)

    def _check_all_sharded(self) -> None:
        """What `fully_shard` was told to ignore, or does not know, is trained by each rank on its own."""
        known = {id(getattr(p, kind, None)) for p in self._sharded() for kind in ("sharded_param", "_unsharded_param")}
        for name, parameter in (named for model in self._models for named in model.named_parameters()):
            if parameter.requires_grad and id(parameter) not in known and dist.get_world_size(self.group) > 1:
                raise BackendError(
                    f"parameter {name!r} is none of those that fully_shard shards: nothing synchronises its gradient. "
                    "Leave it out of ignored_params, or freeze it."
                )

    def check_dtype(self, dtype: torch.dtype | None) -> None:
        """Gradients are held back in the reduce dtype: it has to be the one asked for."""
        policies = {state._mp_policy.reduce_dtype for state in _states(self._models)}
        if policies != {dtype} or self._micro:
            raise BackendError(
                f"accumulate_dtype={dtype} under fully_shard needs gradients held and reduced in that dtype: shard "
                f'with MixedPrecisionPolicy(reduce_dtype={dtype}), and keep sync="window".'
            )

    def _save(self) -> None:
        self.end()
        for model in self._models:
            model._get_fsdp_state()._lazy_init()  # in the first forward else, which changes the flags of the root
        flags = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
        self._saved = [(group, flag, getattr(group, flag)) for group in _groups(self._models) for flag in flags]
        flag = "_auto_reshard_after_forward"
        self._saved += [(state, flag, getattr(state, flag)) for state in _states(self._models)]

    def end(self) -> None:
        for owner, flag, value in self._saved:
            setattr(owner, flag, value)
        self._saved.clear()

    def zeroed(self, parameters: Sequence[nn.Parameter]) -> list[RemovableHandle]:
        leaves = [p._unsharded_param for p in self._sharded() if hasattr(p, "_unsharded_param")]
        return [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]

    def accumulated(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        held = self.held() + [parameter.sharded_param.grad for parameter in self._sharded()]
        found = super().accumulated(parameters) + [local(gradient) for gradient in held if gradient is not None]
        return list(
            {gradient.data_ptr(): gradient for gradient in found}.values()
        )  # while gathered, some are seen twice

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        held, self._held = self._held, False
        if self._closed:
            self._require_reduced()
            return
        if self._micro and not held and any(group.mesh_info.mesh.ndim > 1 for group in _groups(self._models)):
            raise _closed_early("fully_shard over a mesh of two dimensions")
        if held or not self._micro:  # what a backward does at its very end, for gradients that were held back
            self.begin(last=True)
            for model in self._models:
                model._get_fsdp_state()._root_post_backward_final_callback()
            self.end()
        self._reshard()

    def _require_reduced(self) -> None:
        """After a window's last backward nothing may be held back any more."""
        if any(gradient is not None for gradient in self.held()):
            raise BackendError(
                "the last backward of the window has reduced no gradients: somebody switched that off, as "
                "model.set_requires_gradient_sync(False) does. Leave such calls out of the loop: they are made here "
                "where they belong."
            )

    def clear(self) -> None:
        self._held = False
        for model in self._models:
            if hasattr(model, "reset_iter_state") and model._get_fsdp_state()._is_root:
                model.reset_iter_state()
        # zero_grad() does not reach what a parameter group holds back: the next window would be off by it.
        for parameter in self._sharded():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        for group in _groups(self._models):
            group._partial_reduce_output = None
        self._reshard()

    def _reshard(self) -> None:
        """Else an optimizer would step parameters that nobody sees."""
        if self._gathered:
            for module in self._modules():
                module.reshard()

    def _modules(self) -> Iterator[Any]:
        return (m for model in self._models for m in model.modules() if _wrapper(m) == "FSDPModule")

    def _sharded(self) -> Iterator[Any]:
        for group in _groups(self._models):
            yield from group.fsdp_params


def _flattens_dtensors(module: nn.Module) -> bool:
    """Whether FullyShardedDataParallel has made a flat parameter of DTensors here."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    return any(layout is not None for layout in getattr(flat, "_param_extensions", ()))


def _states(models: Sequence[Any]) -> Iterator[Any]:
    """The states that `fully_shard` keeps of its modules."""
    for model in models:
        for module in model.modules():
            if _wrapper(module) == "FSDPModule":
                yield module._get_fsdp_state()


def _groups(models: Sequence[Any]) -> Iterator[Any]:
    """Its groups of parameters, which communicate together."""
    for state in _states(models):
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before it, one or none
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        yield from groups


# ---------------------------------------------------------------------------------------------- which class


def sync_for(
    models: Sequence[nn.Module],
    *,
    sync: When,
    gather: When,
    process_group: object,
    accumulate_dtype: torch.dtype | None,
) -> Local:
    """The class that fits these models, or an error that says which option does not."""
    for name, value in (("sync", sync), ("gather", gather)):
        if value not in ("window", "micro"):
            raise UsageError(f'{name} must be "window" or "micro": got {value!r}.')
    kind = backend_of(models)
    if gather == "window" and kind != "FSDPModule":
        raise BackendError('gather="window" keeps the parameters of FSDP2 gathered; no given model is sharded by it.')
    if process_group is not None and not _initialized():
        raise BackendError("process_group was given, but torch.distributed is not initialized.")
    is_compiled = any(_unwrapped(model) is not model for model in models)
    models = [_unwrapped(model) for model in models if kind is None or _wrapper(model) == kind]  # no frozen teacher
    if kind is None:
        group = _given(process_group)
        if _initialized() and dist.get_world_size(group) > 1:
            raise _not_wrapped(models, group)
        return Local()
    own = _own_group(models[0], kind)
    group = own if process_group is None else _given(process_group)
    if _ranks(group) != _ranks(own):
        raise BackendError(
            f"process_group has the ranks {_ranks(group)}, but the model averages its gradients over {_ranks(own)}: "
            "items must be counted over the same ranks. Leave process_group out, or hand over those."
        )
    if kind == "DistributedDataParallel":
        flat = _widens(models, accumulate_dtype)
        return DDP(models, sync=sync, group=group, flat=flat, sees_forwards=not is_compiled)
    if kind == "FSDPModule":
        backend = FSDP2(models, sync=sync, gather=gather, group=group)
        if _widens(models, accumulate_dtype):
            backend.check_dtype(accumulate_dtype)
        return backend
    if _widens(models, accumulate_dtype):
        raise BackendError(
            "accumulate_dtype is for DistributedDataParallel and fully_shard. FullyShardedDataParallel sums in a dtype "
            "of its own: set MixedPrecision(reduce_dtype=torch.float32) there."
        )
    return FSDP1(models, sync=sync, group=group)


def wrapping(models: Sequence[nn.Module]) -> tuple[object, ...]:
    """Changes where a model is wrapped, or ranks appear."""
    return (*map(type, models), dist.get_world_size() if _initialized() else 1)


def _widens(models: Sequence[nn.Module], dtype: torch.dtype | None) -> bool:
    """Whether gradients summed in `dtype` are wider than their parameters."""
    return dtype is not None and any(p.dtype.itemsize < dtype.itemsize for m in models for p in m.parameters())


def backend_of(models: Sequence[nn.Module]) -> str | None:
    """The wrapper that all models share."""
    kinds = {_wrapper(model) for model in models if any(p.requires_grad for p in model.parameters())}
    if len(kinds) > 1:
        found = sorted(kind or "no wrapper" for kind in kinds)
        raise BackendError(f"all models must have the same data-parallel wrapper: found {', '.join(found)}.")
    return kinds.pop() if kinds else None


def _wrapper(model: nn.Module) -> str | None:
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    return next((c.__name__ for c in type(_unwrapped(model)).__mro__ if c.__name__ in wrappers), None)


def _unwrapped(model: nn.Module) -> Any:
    """The module that a compiled one was made of."""
    return getattr(model, "_orig_mod", model)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _given(process_group: Any) -> Group:
    """A group, as it is or as a dimension of a mesh."""
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return process_group
    if not hasattr(process_group, "mesh_dim_names"):
        raise UsageError(f"process_group must be a ProcessGroup or a DeviceMesh: got {type(process_group).__name__}.")
    return (process_group if process_group.ndim == 1 else process_group._flatten()).get_group()


def _own_group(model: Any, kind: str) -> Group:
    """The ranks over which the model itself averages."""
    if kind == "DistributedDataParallel":
        return model.process_group
    if kind == "FSDPModule":
        mesh = next(_groups([model])).mesh_info.mesh
        return dist.group.WORLD if mesh.size() == dist.get_world_size() else _given(mesh)
    return dist.group.WORLD if "HYBRID" in model.sharding_strategy.name else model.process_group


def _reducible(models: Sequence[Any]) -> Iterator[nn.Parameter]:
    """The parameters that DistributedDataParallel looks after."""
    for model in models:
        yield from model._module_parameters


def _reduced_by(models: Sequence[Any]) -> set[int] | None:
    """The ids of the parameters that the reducers know: those that were trained when they were made.

    The buckets tell, which are laid out once for the question: as much memory as the gradients will take.
    """
    try:
        buckets = [bucket for model in models for bucket in model.reducer._get_zeros_like_grad_buckets()]
    except (AttributeError, RuntimeError):  # no public way: without it, that nothing was thawed is believed
        return None
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


def _compresses_to_half(model: Any) -> bool:
    """Whether a communication hook of DDP's may make gradients float16: any but that of bfloat16 may."""
    hooks = [hook for hook, _ in getattr(model, "_comm_hooks", ())]
    built_in = str(model._get_ddp_logging_data().get("comm_hook", ""))
    return any(hook is not bf16_compress_hook for hook in hooks) or "FP16" in built_in.upper()


def _ranks(group: Group) -> list[int]:
    return sorted(dist.get_process_group_ranks(group))


def _not_wrapped(models: Sequence[nn.Module], group: Group) -> BackendError:
    """What to say of ranks that nothing synchronises: each may train on its own, or all may share a model."""
    world = dist.get_world_size(group)
    found = f"there are {world} ranks, but the model is not wrapped: nothing synchronises its gradients"
    sharing = ranks_of(p for model in models for p in model.parameters())
    if len(sharing) < 2:
        return BackendError(
            f"{found}. Wrap it in DistributedDataParallel or fully_shard and make the Accumulator after that; for "
            "ranks that train on their own, hand over a process_group of one."
        )
    return BackendError(
        f"{found} between the ranks {_ranks(group)}. Its parameters are DTensors over the ranks {sharing}. Ranks that "
        "share a model, as under tensor parallelism, get the same data and are one to the Accumulator: hand over the "
        'ranks whose data differs, process_group=mesh["dp"]; a dimension of size 1, as in init_device_mesh(device, (1, '
        'ranks), mesh_dim_names=("dp", "tp")), where all share one model. Where it is larger, wrap the model too: '
        'fully_shard(model, mesh=mesh["dp"]).'
    )


def _closed_early(wrapper: str) -> BackendError:
    return BackendError(
        f"step(now=True) cannot close this window: {wrapper} synchronises gradients in a backward, and the last one "
        'did not. Close windows with micro_batch(last=True) or remainder="step", or accumulate with sync="micro".'
    )
