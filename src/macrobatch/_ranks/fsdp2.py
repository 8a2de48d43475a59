"""`fully_shard`, the second generation of FSDP, with HSDP."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.backend import Abilities, Local, closed_early
from macrobatch._ranks.collectives import Group, local
from macrobatch._torch.modules import is_fully_sharded
from macrobatch.errors import BackendError
from macrobatch.types import When


class FSDP2(Local):
    """`fully_shard`, over one mesh dimension or two (HSDP): flags on each parameter group, for forward and backward."""

    def __init__(self, models: Sequence[Any], *, sync: When, gather: When, group: Group) -> None:
        self._models = models
        self._micro = sync == "micro"
        self._gathered = gather == "window"
        self._held = False
        self._saved: list[tuple[object, str, object]] = []
        self._closed = False  # whether the last backward was a window's last
        self.group = group
        self.abilities = Abilities(
            lockstep=self._micro or not self._gathered,
            confines=False,  # the leaves of the graph are the gathered parameters, not those that users see
            # An aborted forward or backward leaves traces everywhere, which torch clears away since 2.13.
            can_hold=self._gathered and all(hasattr(model, "reset_iter_state") for model in models),
            needs_every_rank=True,
            can_record=False,
        )
        assert self.average, "an error if its parts do not divide alike"
        self._check_all_sharded()

    @property
    def average(self) -> float:  # type: ignore[override]
        factors = {g.gradient_divide_factor or g.mesh_info.mesh.size() for g in param_groups(self._models)}
        if len(factors) != 1:
            raise BackendError(
                f"the parts of the model divide gradients by different factors: {sorted(factors)}. Set one for all: "
                "set_gradient_divide_factor() does not reach the modules inside."
            )
        return float(factors.pop())

    def uses_float16(self) -> bool:
        policies = [state._mp_policy for state in states(self._models)]
        return any(torch.float16 in (policy.param_dtype, policy.reduce_dtype) for policy in policies)

    def held_gradients(self) -> list[Tensor | None]:
        held = [group._partial_reduce_output for group in param_groups(self._models)]
        for parameter in self._sharded():
            held.append(parameter.unsharded_accumulated_grad)
            held.append(parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None)
        return held

    def hold_window(self) -> None:
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
        policies = {state._mp_policy.reduce_dtype for state in states(self._models)}
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
        self._saved = [(group, flag, getattr(group, flag)) for group in param_groups(self._models) for flag in flags]
        flag = "_auto_reshard_after_forward"
        self._saved += [(state, flag, getattr(state, flag)) for state in states(self._models)]

    def end(self) -> None:
        for owner, flag, value in self._saved:
            setattr(owner, flag, value)
        self._saved.clear()

    def zeroing_hooks(self, parameters: Sequence[nn.Parameter]) -> list[RemovableHandle]:
        leaves = [p._unsharded_param for p in self._sharded() if hasattr(p, "_unsharded_param")]
        return [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]

    def accumulated_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        held = self.held_gradients() + [parameter.sharded_param.grad for parameter in self._sharded()]
        found = super().accumulated_gradients(parameters)
        found += [local(gradient) for gradient in held if gradient is not None]
        return list({gradient.data_ptr(): gradient for gradient in found}.values())  # while gathered, some come twice

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        held, self._held = self._held, False
        if self._closed:
            self._require_reduced()
            return
        if self._micro and not held and any(group.mesh_info.mesh.ndim > 1 for group in param_groups(self._models)):
            raise closed_early("fully_shard over a mesh of two dimensions")
        if held or not self._micro:  # what a backward does at its very end, for gradients that were held back
            self.begin(last=True)
            for model in self._models:
                model._get_fsdp_state()._root_post_backward_final_callback()
            self.end()
        self._reshard()

    def _require_reduced(self) -> None:
        """After a window's last backward nothing may be held back any more."""
        if any(gradient is not None for gradient in self.held_gradients()):
            raise BackendError(
                "the last backward of the window has reduced no gradients: somebody switched that off, as "
                "model.set_requires_gradient_sync(False) does. Leave such calls out of the loop: they are made here "
                "where they belong."
            )

    def drop_gradients(self) -> None:
        self._held = False
        for model in self._models:
            if hasattr(model, "reset_iter_state") and model._get_fsdp_state()._is_root:
                model.reset_iter_state()
        # zero_grad() does not reach what a parameter group holds back: the next window would be off by it.
        for parameter in self._sharded():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        for group in param_groups(self._models):
            group._partial_reduce_output = None
        self._reshard()

    def _reshard(self) -> None:
        """Else an optimizer would step parameters that nobody sees."""
        if self._gathered:
            for module in self._modules():
                module.reshard()

    def _modules(self) -> Iterator[Any]:
        return (m for model in self._models for m in model.modules() if is_fully_sharded(m))

    def _sharded(self) -> Iterator[Any]:
        for group in param_groups(self._models):
            yield from group.fsdp_params


def states(models: Sequence[Any]) -> Iterator[Any]:
    """The states that `fully_shard` keeps of its modules."""
    for model in models:
        for module in model.modules():
            if is_fully_sharded(module):
                yield module._get_fsdp_state()


def param_groups(models: Sequence[Any]) -> Iterator[Any]:
    """Its groups of parameters, which communicate together."""
    for state in states(models):
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before it, one or none
        if groups is None:
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        yield from groups
