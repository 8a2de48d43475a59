"""What the engine asks of a data-parallel backend. One process needs no more than this."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.collectives import Group, host_group, local
from macrobatch.errors import BackendError


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

    def check(self, used: Collection[int], named: dict[str, nn.Parameter], *, may_nest: bool) -> Sequence[str]:
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


def closed_early(wrapper: str) -> BackendError:
    return BackendError(
        f"step(now=True) cannot close this window: {wrapper} synchronises gradients in a backward, and the last one "
        'did not. Close windows with micro_batch(last=True) or remainder="step", or accumulate with sync="micro".'
    )
