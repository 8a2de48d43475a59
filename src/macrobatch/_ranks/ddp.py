"""The backend for DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from macrobatch._ranks.backend import Abilities, Local
from macrobatch._ranks.collectives import Group, all_reduce_flat, unused_by_all
from macrobatch._torch import ddp as torch_ddp
from macrobatch._torch.modules import without_compile
from macrobatch.errors import BackendError
from macrobatch.types import When


class DDP(Local):
    """DistributedDataParallel: its reducer averages during the last backward, or one flat sum follows at the close.

    The reducer cannot handle gradients wider than their parameters, windows that are held or closed early, and ranks
    without a micro-batch. Nor can the reducers of several models: ranks may use these in different orders in their last
    micro-batches, or not at all, and would then pair the gradients of one with those of another.
    """

    def __init__(
        self, models: Sequence[Any], *, sync: When, group: Group, flat: bool, sees_forwards: bool = True
    ) -> None:
        self._models = models
        self._sees_forwards = sees_forwards  # a compiled model may not run DDP's own Python code
        self._are_several = len(models) > 1
        self._reduced = None if self._are_several else torch_ddp.reduced_parameters(models)
        self._ignored = torch_ddp.ignored_parameters(models)
        if flat and sync == "micro":
            raise BackendError(
                'accumulate_dtype under DistributedDataParallel needs sync="window": its reducer takes no gradients '
                "that are wider than their parameters, so they are exchanged in one flat sum when the window closes."
            )
        self._micro = sync == "micro" and not self._are_several
        self._flat = flat or self._are_several
        self._flags = contextlib.ExitStack()
        self._called: set[int] = set()  # the ids of models with a forward that their reducers have noticed
        self._entered: set[int] = set()  # the ids of models whose forward has begun, and has broadcast their buffers
        self._synced = False  # whether the last backward went through the reducer
        self._held = False
        self._world = dist.get_world_size(group)
        self.group = group
        self.abilities = Abilities(
            lockstep=self._micro,
            can_record=not (self._micro or any(model.static_graph for model in models)),
            moves_gradients=any(model.gradient_as_bucket_view for model in models),  # once, when DDP builds its buckets
        )

    @property
    def average(self) -> float:  # type: ignore[override]
        return self._world if self._synced else 1

    def hold_window(self) -> None:
        self._held, self._synced = True, False
        for model in self._models:  # what the first forward would otherwise do together with the other ranks
            torch_ddp.prepare_forward(model)

    def begin(self, last: bool) -> None:
        self._require_care()
        self._called.clear()
        self._entered.clear()
        if self._are_several and not self._held:
            self.hold_window()  # this rank may not call all of them
        may_sync = not (self._flat or self._held) and (last or self._micro)
        self._synced = may_sync and not self._has_others()
        for model in self._models:
            if torch_ddp.will_broadcast(model):
                self._flags.callback(model.register_forward_pre_hook(self._note_entry).remove)
        if self._synced:
            for model in self._models:
                # An int of the same value: a forward through DDP sets it to True, and one under no_grad to False.
                model.require_forward_param_sync = int(model.require_forward_param_sync)
                if self._sees_forwards:
                    self._flags.callback(model.register_forward_hook(self._note_call).remove)
            return
        if may_sync and self._micro:
            raise self._unknown_to_reducer()
        for model in self._models:
            if model.static_graph and not torch_ddp.knows_static_graph(model):
                raise self._unknown_graph()
            self._flags.enter_context(model.no_sync())

    def begin_backward(self, last: bool) -> None:
        self._require_care()
        self._called.clear()
        self._synced = (last or self._micro) and not self._are_several
        if self._synced and self._has_others():
            raise self._unknown_to_reducer()

    def join_backward(self) -> None:
        for model in self._models:
            if id(model) in self._entered | self._called:
                model.require_forward_param_sync = False
            torch_ddp.prepare_forward(model)
            if self._synced:
                torch_ddp.run_empty(model)

    def _note_entry(self, model: Any, *_: object) -> None:
        """A hook before the forward of a model, which begins by broadcasting its buffers."""
        self._entered.add(id(model))

    def _note_call(self, model: Any, *_: object) -> None:
        """A hook after the forward of a model: its reducer waits for a backward, unless gradients are not to travel."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._called.add(id(model))

    def _unknown_graph(self) -> BackendError:
        found = (
            "DistributedDataParallel(static_graph=True) learns its graph in the first iteration, which must be "
            "synchronised."
        )
        if self._are_several:
            return BackendError(found, "Leave static_graph out.")
        return BackendError(
            found,
            "Leave static_graph out, or let the first window have one micro-batch (with Accumulator: steps=lambda "
            "step: 1 if step == 0 else 8; not with joint=, which has two passes).",
            code="static graph",
        )

    def _require_care(self) -> None:
        """Raise an error if DDP ignores a trained parameter, or if the model is inside a Join context."""
        for name, parameter in self._ignored.items():
            if parameter.requires_grad and self._world > 1:
                raise BackendError(
                    f"parameter {name!r} is one that DistributedDataParallel was told to ignore: nothing synchronises "
                    "its gradient. Let DDP have it, or freeze it."
                )
        for model in self._models:
            if torch_ddp.is_joining(model):
                raise BackendError(
                    "the loop runs inside a Join (or model.join()) context, which shadows the collectives of ranks "
                    "that have run out, and would pair them wrongly here. Leave it out: batches() and MacroStep keep "
                    "ranks of different lengths together by themselves. If the model was joined earlier, wrap it in "
                    "DistributedDataParallel again: torch never switches joining off again."
                )

    def _unknown_to_reducer(self) -> BackendError:
        cure = ', or use sync="window"' if self._micro else ""
        return BackendError(
            "a parameter was frozen or unfrozen after DistributedDataParallel was made, whose reducer ignores that: "
            f"its gradient would not be synchronised. Wrap the model again{cure}."
        )

    def end(self) -> None:
        self._flags.close()
        for model in self._models:
            model.require_forward_param_sync = bool(model.require_forward_param_sync)

    def _has_others(self) -> bool:
        """Whether the trained parameters are not those that were trained when DDP was made, which its reducer knows."""
        if self._reduced is None:
            return False
        parameters = (p for model in self._models for p in torch_ddp.parameters_in_care(model))
        return any(p.requires_grad != (id(p) in self._reduced) for p in parameters)

    def check(self, used: Collection[int], named: dict[str, nn.Parameter], *, may_nest: bool) -> Sequence[str]:
        if not self._synced:
            return ()
        for model in self._models if self._sees_forwards else ():
            if model.require_forward_param_sync is not True and id(model) not in self._called:
                raise BackendError(
                    "the forward of this rank's last micro-batch did not go through DistributedDataParallel, or inside "
                    "its no_sync(): nothing would synchronise the gradients. Call model(...) in every micro-batch, not "
                    "model.module(...), and leave no_sync() out of the loop: it is entered here where it belongs."
                )
        if all(m.find_unused_parameters or m.static_graph for m in self._models):
            return ()
        missing = [name for name, p in named.items() if id(p) not in used and self._reduces(p)]
        if missing and not may_nest:
            raise _unused(missing)
        return missing

    @property
    def will_check(self) -> bool:  # type: ignore[override]
        return self._synced

    def _reduces(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad if self._reduced is None else id(parameter) in self._reduced

    def uses_float16(self) -> bool:
        return any(map(torch_ddp.may_compress_to_half, self._models))

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        self._held = False
        if not self._synced:
            all_reduce_flat(named, self.group, self.host_group(), unused or ())
            for model in self._models:  # as after a synchronised backward: the next forward broadcasts buffers
                model.require_forward_param_sync = True
        elif unused is not None:  # for the reducer, what a repeated micro-batch used is used
            for name in unused_by_all(named, unused, self.host_group()):
                named[name].grad = None

    def finish_others(self, others: dict[str, Any], unused: Collection[str] | None = None) -> None:
        if self._synced:  # otherwise they were in the flat sum
            super().finish_others(others, unused)

    def drop_gradients(self) -> None:
        self._held = False


def needs_every_parameter(models: Iterable[object]) -> bool:
    """Whether one of them is a DDP that reduces a bucket only after all its parameters have had their backward."""
    return any(map(_reduces_whole_buckets, models))


def require_all_used(models: Iterable[object], used: Collection[int] | None) -> None:
    """Raise an error if the last backward of a window, which used these ids, left a gradient unsynchronised."""
    for model in filter(_reduces_whole_buckets, models if used is not None else ()):
        assert isinstance(model, nn.Module)
        assert used is not None
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in used]:
            raise _unused(missing)


def _reduces_whole_buckets(model: object) -> bool:
    bare = without_compile(model) if isinstance(model, nn.Module) else None
    return isinstance(bare, DistributedDataParallel) and not (bare.find_unused_parameters or bare.static_graph)


def _unused(names: Sequence[str]) -> BackendError:
    return BackendError(
        f"{len(names)} parameters have no part in this rank's last micro-batch of the window, the first of them "
        f"{names[0]!r}: DistributedDataParallel does not synchronise what they have accumulated. Wrap the model with "
        "find_unused_parameters=True."
    )
