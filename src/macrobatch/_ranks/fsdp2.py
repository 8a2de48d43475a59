"""The backend for `fully_shard`, the second generation of FSDP, including HSDP."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.backend import Abilities, Local, closed_early
from macrobatch._ranks.collectives import Group, tally_use
from macrobatch._torch import fsdp2 as fsdp
from macrobatch._torch.autograd import backward_under_way, run_backward
from macrobatch.errors import BackendError
from macrobatch.types import When


class FSDP2(Local):
    """`fully_shard`, over one mesh dimension or two (HSDP). It sets flags of parameter groups for each micro-batch."""

    def __init__(self, models: Sequence[Any], *, sync: When, gather: When, group: Group) -> None:
        self._models = models
        self._topology = fsdp.Topology(models)
        self._micro = sync == "micro"
        self._gathered = gather == "window"
        self._held = False
        self._saved: fsdp.Flags | None = None
        self._closed = False  # whether the last backward was a window's last
        self._is_alone = dist.get_world_size(group) == 1
        self.group = group
        self.abilities = Abilities(
            lockstep=self._micro or not self._gathered,
            leaves_are_parameters=False,  # they are the gathered parameters, not the shards that users see
            # An aborted forward or backward leaves state in many places. Only torch 2.13 and later clear it.
            can_hold=self._gathered and fsdp.can_recover(self._topology),
            needs_every_rank=True,
            can_skip=False,
            can_record=False,
            exchanges_use=True,
        )
        assert self.average, "an error if its parts do not divide alike"
        for module in self._topology.modules:
            module.reshard()  # a forward without a backward leaves roots gathered, and they show other parameters then
        self._watched: dict[int, tuple[Tensor, RemovableHandle]] = {}  # shards with a hook, by their ids
        self._order = _Order(
            lockstep=self.abilities.lockstep,
            on_repeat=weakref.WeakMethod(self._reduce_later),
            compare=weakref.WeakMethod(self._require_same_call),
        )
        self._call_hooks: list[RemovableHandle] = []
        self._reach_hooks: list[RemovableHandle] = []
        self._check_all_sharded(self._topology)
        self._watch_forwards()

    def _renew_topology(self) -> None:
        """Look up the parts of the models again, which a program may have changed between two windows."""
        found = fsdp.Topology(self._models)
        self._check_all_sharded(found)
        if not found.has_parts_of(self._topology):
            self._topology = found
            self._watch_forwards()

    def _watch_forwards(self) -> None:
        for hook in self._call_hooks:
            hook.remove()
        modules = enumerate(self._topology.modules)
        note = self._order.note_forward  # before the hook that gathers
        self._call_hooks = [m.register_forward_pre_hook(partial(note, i), prepend=True) for i, m in modules]
        self._call_hooks += [model.register_forward_hook(self._order.end_forward) for model in self._models]
        for hook in self._call_hooks:
            weakref.finalize(self, hook.remove)

    @property
    def average(self) -> float:  # type: ignore[override]
        factors = fsdp.divisors_of(self._topology)
        if len(factors) != 1:
            raise BackendError(
                f"the parts of the model divide gradients by different factors: {sorted(factors)}. Set one for all: "
                "set_gradient_divide_factor() does not reach the modules inside."
            )
        return float(factors.pop())

    def uses_float16(self) -> bool:
        policies = fsdp.precisions_of(self._topology)
        return any(torch.float16 in (policy.param_dtype, policy.reduce_dtype) for policy in policies)

    def held_gradients(self) -> list[Tensor | None]:
        return fsdp.held_gradients(self._topology)

    def hold_window(self) -> None:
        self._renew_topology()
        self._held, self._closed = True, False
        self._topology.initialize()
        for module in self._topology.modules:
            module.unshard()

    def gather_roots(self) -> None:
        self._topology.initialize()
        for model in self._models:
            model.unshard()

    def begin(self, last: bool) -> None:
        self.end()
        topology = self._topology
        topology.initialize()
        self._saved = fsdp.Flags(topology)
        self._closed = last
        self._order.begin(gathers=not self._held)
        fsdp.finish_every_backward(topology)
        reduces = (last or self._micro) and not self._held
        fsdp.set_reductions(topology, reduces=reduces, all_reduces=last if self._micro else reduces)
        if self._gathered:
            fsdp.keep_after_forward(topology)
            fsdp.set_reshard_after_backward(topology, last)
        fsdp.reduce_unused_too(topology)
        if not self._is_alone:
            self._watch_shards()

    def backward(self, root: Tensor, seed: Tensor, inputs: Sequence[Tensor] | None) -> None:
        self._prepare_backward()
        run_backward(root, seed, inputs)

    def _prepare_backward(self) -> None:
        fsdp.fill_unused(self._topology)
        if (self._closed or self._micro) and not self._held:
            self._reach_hooks = [
                register_multi_grad_hook(leaves, self._order.reaching(place), mode="any")
                for place, leaves in enumerate(fsdp.trained_groups(self._topology))
                if leaves
            ]

    def _watch_shards(self) -> None:
        """Raise an error if a backward reaches a shard itself, and not the parameter gathered for a forward."""
        shards = fsdp.trained_shards(self._topology)
        for key in self._watched.keys() - shards.keys():
            self._watched.pop(key)[1].remove()
        if unwatched := shards.keys() - self._watched.keys():
            names = {id(p): name for model in self._models for name, p in model.named_parameters()}
            backend = weakref.ref(self)
            for key in unwatched:
                refuse = partial(_refuse_shard, backend, names.get(key, f"of shape {tuple(shards[key].shape)}"))
                handle = shards[key].register_hook(refuse)  # type: ignore[no-untyped-call]
                self._watched[key] = shards[key], handle
                weakref.finalize(self, handle.remove)

    def _reduce_later(self) -> None:
        """If the last micro-batch calls a module twice, let `finish` reduce, not the backward.

        Torch would reduce the gradients of earlier micro-batches after the first of the two backwards, but nothing on
        ranks without earlier ones, so the ranks' collectives would not match.
        """
        if self._closed and self._gathered and not self._micro:
            self._closed = False
            fsdp.set_reductions(self._topology, reduces=False, all_reduces=False)
            fsdp.set_reshard_after_backward(self._topology, False)

    def _require_same_call(self, place: int) -> None:
        """Raise an error on all ranks unless they all are about to gather this module, or (-1) have ended a forward."""
        _, is_same = tally_use({}, (), place, self.host_group())
        if not is_same:
            raise _different_modules("nothing was gathered, and no step was taken")

    def _check_all_sharded(self, topology: fsdp.Topology) -> None:
        """Raise an error if `fully_shard` does not shard a trained parameter: its gradient would not be exchanged."""
        trained = {id(parameter) for parameter in topology.strangers if parameter.requires_grad}
        if not trained or self._is_alone:
            return
        named = (named for model in self._models for named in model.named_parameters())
        name = next(name for name, parameter in named if id(parameter) in trained)
        raise BackendError(
            f"parameter {name!r} is none of those that fully_shard shards: nothing synchronises its gradient. "
            "Leave it out of ignored_params, or freeze it."
        )

    def check_dtype(self, dtype: torch.dtype | None) -> None:
        """Raise an error unless the reduce dtype, in which gradients are held, is the requested one."""
        policies = {policy.reduce_dtype for policy in fsdp.precisions_of(self._topology)}
        if policies != {dtype} or self._micro:
            raise BackendError(
                f"accumulate_dtype={dtype} under fully_shard needs gradients held and reduced in that dtype: shard "
                f'with MixedPrecisionPolicy(reduce_dtype={dtype}), and keep sync="window".'
            )

    def end(self) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        saved.restore()
        for hook in self._reach_hooks:
            hook.remove()
        self._reach_hooks.clear()
        self._order.end()

    def leaves(self, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        leaves = fsdp.gathered_by_shard(self._topology) if named else {}
        whole = {name: tensor for name, tensor in named.items() if not isinstance(tensor, DTensor)}
        return whole | {name: leaves[id(shard)] for name, shard in named.items() if id(shard) in leaves}

    def zeroing_hooks(self, parameters: Sequence[Tensor]) -> list[RemovableHandle]:
        return super().zeroing_hooks([leaf for leaf in fsdp.leaves_of(self._topology) if leaf is not None])

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        held, self._held = self._held, False
        if not self._closed:
            self._reduce(held)
        elif any(gradient is not None for gradient in self.held_gradients()):
            raise BackendError(
                "the last backward of the window has reduced no gradients of some modules. Of several models in a "
                "list, each must take part in the last micro-batch of a window: let its loss use all of them, if only "
                "times 0. Or somebody switched reducing off, as model.set_requires_gradient_sync(False) does: leave "
                "such calls out of the loop, they are made here where they belong."
            )
        of_none, is_same = tally_use(named, unused or (), self._order.close(), self.host_group())
        if not is_same:
            raise _different_modules("weights or gradients were mixed up; no step was taken")
        for name in of_none:
            named[name].grad = None  # it is all zeros, because any rank might have used it

    def _reduce(self, held: bool) -> None:
        """Reduce the gradients that the last backward has not reduced. With sync="micro" only a held window has any."""
        if self._micro and not held and fsdp.has_replicas(self._topology):
            raise closed_early("fully_shard over a mesh of two dimensions")
        if held or not self._micro:
            self.begin(last=True)
            self._prepare_backward()
            fsdp.reduce_held_gradients(self._topology)
            self.end()
        self._reshard()

    def drop_stale_gradients(self) -> None:
        self._renew_topology()

    def drop_gradients(self) -> None:
        self._held = False
        self._order.close()
        fsdp.drop_held_gradients(self._topology)
        self._reshard()

    def observe_communication(self, span: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter the span before the hook in which a module gathers its parameters, and leave it after that hook."""
        entered: list[AbstractContextManager[None]] = []

        def enter(*_: object) -> None:
            entered.append(span())
            entered[-1].__enter__()

        def leave(*_: object) -> None:
            entered.pop().__exit__(None, None, None)

        for module in self._topology.modules:
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_pre_hook(leave)

    def _reshard(self) -> None:
        """Shard all parameters again. Otherwise the optimizer would step parameters that the modules do not use."""
        if self._gathered:
            for module in self._topology.modules:
                module.reshard()


def _refuse_shard(backend: weakref.ref[FSDP2], name: str, _: Tensor) -> None:
    """A hook on a shard, which raises an error: fully_shard does not reduce the gradient of the shard itself."""
    if (own := backend()) is not None and own._saved is not None:  # in a micro-batch
        raise BackendError(
            f"the loss uses parameter {name!r} outside of the forward of its module, by its shard (as full_tensor() "
            "does): fully_shard does not add up such a gradient over the ranks. Compute that part of the loss in the "
            'model\'s forward, or after it with gather="window", which keeps parameters whole.'
        )


def _different_modules(so: str) -> BackendError:
    return BackendError(
        "ranks have called different modules that fully_shard was applied to, or in another order, or their "
        f"losses have reached different ones. Ranks gather and reduce in that order, so {so}. Let all ranks call the "
        "same ones, and all losses use what they return (e.g. by 0 * output.sum()). Or do not apply fully_shard to a "
        "module that only some ranks use, but to the one around it: ranks may use different parameters of a group."
    )


class _Order:
    """A fingerprint of the modules that a window gathers and reduces, in order. It must be the same on all ranks.

    Modules of different sizes end a rank without a word, so in the first window ranks also compare each one before they
    gather it.
    """

    def __init__(
        self,
        *,
        lockstep: bool,
        on_repeat: weakref.WeakMethod[Callable[[], None]],
        compare: weakref.WeakMethod[Callable[[int], None]],
    ) -> None:
        self._lockstep = lockstep  # whether every forward gathers parameters, and not only the first of a window
        self._on_repeat = on_repeat  # called if a micro-batch calls a module again
        self._compare = compare  # an error on all ranks if they do not all gather the same module
        self._compares = lockstep
        self._fingerprint = 0
        self._gathered: set[int] = set()
        self._reached: set[int] = set()
        self._called: set[int] = set()  # the modules called in the forward of the current micro-batch
        self._is_open = self._gathers = False

    def begin(self, *, gathers: bool) -> None:
        """Begin a micro-batch. `gathers`: whether its forward may gather parameters."""
        self._is_open, self._gathers = True, gathers
        self._called.clear()

    def note_forward(self, place: int, module: nn.Module, _: object) -> None:
        """A hook before the forward of a module, which gathers its parameters if they are not gathered yet."""
        # It leaves out forwards without a graph, and those that a backward recomputes.
        if not self._is_open or not torch.is_grad_enabled() or backward_under_way() != -1:
            return
        if self._gathers and (self._lockstep or place not in self._gathered):
            if self._compares:
                self._require_same(place)
            self._gathered.add(place)
            self._fingerprint = hash((self._fingerprint, place))
        if place in self._called and (repeat := self._on_repeat()) is not None:
            repeat()
        self._called.add(place)

    def end_forward(self, *_: object) -> None:
        """A hook after the forward of a model: no rank may gather another part of it now."""
        if (
            self._compares
            and self._is_open
            and self._gathers
            and torch.is_grad_enabled()
            and backward_under_way() == -1
        ):
            self._require_same(-1)

    def _require_same(self, place: int) -> None:
        if (compare := self._compare()) is not None:
            compare(place)

    def reaching(self, place: int) -> Callable[[Tensor], None]:
        """A hook for the first gradient of a parameter group in a backward that reduces."""
        return lambda _: self._reached.add(place)

    def end(self) -> None:
        """End a micro-batch, after its backward."""
        self._is_open = False
        if self._reached:
            self._fingerprint = hash((self._fingerprint, -1, *sorted(self._reached)))
            self._reached.clear()

    def close(self) -> int:
        """Return the fingerprint of a window at its end, and start a new one."""
        self._compares = self._compares and not self._fingerprint  # until the first window has ended
        fingerprint, self._fingerprint = self._fingerprint, 0
        self._gathered.clear()
        self._reached.clear()
        return fingerprint
