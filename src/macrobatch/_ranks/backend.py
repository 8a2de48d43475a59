"""The interface of a data-parallel backend. `Local`, for one process, is its simplest implementation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.collectives import Group, all_reduce_flat, host_group
from macrobatch._torch.autograd import run_backward
from macrobatch._torch.fsdp1 import Stored
from macrobatch.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a backend can do, and what it requires."""

    lockstep: bool = False  # every micro-batch communicates, so all ranks must run the same number of them
    leaves_are_parameters: bool = True  # the leaves of graphs are parameters, so a backward can be confined to them
    moves_gradients: bool = False  # the backend may copy gradients to other tensors between backwards
    shows_views: bool = False  # ``.grad`` is a view of a tensor that the backend holds; each forward makes new views
    can_hold: bool = True  # all communication of a window can wait for its close (`Local.hold_window`)
    needs_every_rank: bool = False  # a rank must run a micro-batch in every window, even without samples
    can_record: bool = True  # a micro-batch can be recorded as one CUDA graph, because it does not communicate
    can_skip: bool = True  # a rank may leave out the forward and backward of a micro-batch that others run
    exchanges_use: bool = False  # in every window, ranks tell each other which parameters they have used


class Local:
    """One process, which exchanges nothing. Other backends override what differs."""

    abilities = Abilities()
    group: Group = None  # the ranks whose items are counted together; None for this process alone
    average: float = 1  # what the backend has divided the gradients of a closing window by
    shards: tuple[Group, ...] = ()  # the groups of ranks that hold the other parts of plain gradients
    will_check: bool = False  # whether `check` does anything for this micro-batch
    _hosts: Group = None

    @property
    def has_settings(self) -> bool:
        """Whether it does anything around backwards, or at the close."""
        kind = type(self)
        return (kind.begin, kind.end, kind.finish) != (Local.begin, Local.end, Local.finish)

    def host_group(self) -> Group:
        """A group of the same ranks for data on the host. It is made once, by all of them together."""
        if self._hosts is None:
            self._hosts = host_group(self.group)
        return self._hosts

    def hold_window(self) -> None:
        """Begin a window that may fail on one rank. Its micro-batches do not communicate; only `finish` does."""

    def begin(self, last: bool) -> None:
        """Called before the forward of a micro-batch."""

    def begin_backward(self, last: bool) -> None:
        """The same as `begin`, but after the forward. The caller has switched the exchange of gradients on or off."""
        self.begin(last)

    # Runs a backward: ``backward(root, seed, inputs)`` adds to the gradients of `inputs` only, or of all leaves.
    backward: Callable[[Tensor, Tensor, Sequence[Tensor] | None], None] = staticmethod(run_backward)

    def end(self) -> None:
        """Called after the backward of a micro-batch, or when it is dropped. It restores all settings."""

    def join_backward(self) -> None:
        """In place of a backward: take part in what it would exchange, with what earlier ones have added."""

    def gather_roots(self) -> None:
        """Gather the parameters of the root modules, for code that uses them outside of a forward."""

    def check(self, used: Collection[int], named: dict[str, nn.Parameter], *, may_nest: bool) -> Sequence[str]:
        """Raise an error before a backward that would leave a gradient unsynchronised.

        Returns the names of parameters that must get a gradient in it, if the graph cannot show that in advance.
        """
        return ()

    def uses_float16(self) -> bool:
        """Whether gradients are float16 at some point."""
        return False

    def held_gradients(self) -> list[Tensor | None] | None:
        """All tensors that may hold gradients of the window besides ``.grad``; None if there are never any."""
        return None

    def leaves(self, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The leaves of the graph of a loss, by the names of their parameters."""
        return dict(named)

    def stored(self) -> list[Stored]:
        """What it keeps of parameters between forwards, if they are views (`Abilities.shows_views`)."""
        return []

    def zeroing_hooks(self, parameters: Sequence[Tensor]) -> list[RemovableHandle]:
        """Hooks that make a backward add zeros, even if its own gradient is infinite."""
        return [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        """Called when a window closes: synchronise the gradients that its last backward has not synchronised.

        `unused`: the parameters that this rank's micro-batches did not use, without repeated ones. None if no rank
        repeats micro-batches; but backends with `exchanges_use` always get them.
        """

    def finish_others(self, others: dict[str, Any], unused: Collection[str] | None = None) -> None:
        """After `finish`: synchronise the gradients of leaf tensors that no model holds, on the same scale."""
        if others and self.group is not None:
            all_reduce_flat(others, self.group, self.host_group(), unused or ())
            for tensor in others.values() if self.average != 1 else ():
                if tensor.grad is not None:
                    tensor.grad /= self.average

    def drop_gradients(self) -> None:
        """Drop the gradients that are held outside of ``.grad``."""

    def observe_communication(self, span: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter such a span around all later communication inside a forward."""

    def drop_stale_gradients(self) -> None:
        """Called before a window: drop the gradients that an earlier one may have left."""


class LeftToProgram(Local):
    """Ranks whose program exchanges gradients itself, and takes their mean, as DistributedDataParallel would.

    Items are counted over all ranks, so that this mean is exact also if ranks have unequal shares of a batch.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.average = group, dist.get_world_size(group)


class UnsynchronisedError(BackendError):
    """A backward has left gradients that only this rank has. They cannot be undone."""


def closed_early(wrapper: str) -> BackendError:
    return BackendError(
        f"step(now=True) cannot close this window: {wrapper} synchronises gradients in a backward, and the last one "
        'did not. Close windows with micro_batch(last=True) or remainder="step", or accumulate with sync="micro".'
    )
