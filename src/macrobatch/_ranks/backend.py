"""What the engine asks of a data-parallel backend. One process needs no more than this."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.collectives import Group, host_group, local_tensor
from macrobatch.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a backend can do, and what it asks for.

    Attributes:
        lockstep: every micro-batch communicates, so all ranks must do equally many.
        confines: a backward can be confined to the own parameters: they are the leaves of its graph.
        moves_gradients: gradients may be copied to another place between backwards.
        shows_views: ``.grad`` holds views of what is held elsewhere, made anew in each forward.
        can_hold: all that ranks do together in a window can wait for its close (`Local.hold_window`).
        needs_every_rank: a rank must do a micro-batch in every window, even if it has nothing to add.
        can_record: a micro-step can be one CUDA graph; what ranks do together cannot.
        exchanges_use: in every window, ranks tell each other which parameters they have used.
    """

    lockstep: bool = False
    confines: bool = True
    moves_gradients: bool = False
    shows_views: bool = False
    can_hold: bool = True
    needs_every_rank: bool = False
    can_record: bool = True
    exchanges_use: bool = False


class Local:
    """One process: gradients stay where they are. Other backends override what differs.

    Attributes:
        abilities: what it can do.
        group: the ranks whose items are counted together; None: this process alone.
        average: what the backend has divided the gradients of a closing window by.
        shards: the groups of ranks that hold other parts of plain gradients.
    """

    abilities = Abilities()
    group: Group = None
    average: float = 1
    shards: tuple[Group, ...] = ()
    _hosts: Group = None

    def host_group(self) -> Group:
        """The same ranks, to exchange what lives on the host. Made once, by all of them together."""
        if self._hosts is None:
            self._hosts = host_group(self.group)
        return self._hosts

    def hold_window(self) -> None:
        """Before a window that may fail on one rank: no micro-batch of it communicates, only `finish` does."""

    def begin(self, last: bool) -> None:
        """Before the forward of a micro-batch."""

    def begin_backward(self, last: bool) -> None:
        """The same after its forward, where the caller has kept its gradients from travelling, or not, as it should."""
        self.begin(last)

    def prepare_backward(self) -> None:
        """Just before the backward itself, when nobody looks at what the window has accumulated any more."""

    def end(self) -> None:
        """After its backward, or when it is given up: everything is put back as it was."""

    def gather_roots(self) -> None:
        """Have the parameters of the models themselves whole, for code that uses them outside of a forward."""

    def check(self, used: Collection[int], named: dict[str, nn.Parameter], *, may_nest: bool) -> Sequence[str]:
        """Before a backward: an error if it would leave a gradient unsynchronised that should not be.

        Returns the names of parameters that must turn out to get a gradient in it, where that cannot be seen yet.
        """
        return ()

    @property
    def will_check(self) -> bool:
        """Whether `check` has anything to say of this micro-batch."""
        return False

    def uses_float16(self) -> bool:
        """Whether gradients pass through float16 somewhere on their way."""
        return False

    def held_gradients(self) -> list[Tensor | None] | None:
        """All that may hold gradients of the window besides ``.grad``; None: nothing ever does."""
        return None

    def leaves(self, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the graph of a loss ends in, by the names of the parameters."""
        return dict(named)

    def zeroing_hooks(self, parameters: Sequence[nn.Parameter]) -> list[RemovableHandle]:
        """Hooks under which a backward adds zeros, where its own gradient is infinite too."""
        return [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]

    def accumulated_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the open window has added up so far, wherever it is held: this rank's own tensors."""
        return [local_tensor(p.grad) for p in parameters if p.grad is not None]

    def finish(self, named: dict[str, nn.Parameter], unused: Collection[str] | None = None) -> None:
        """When a window closes: synchronise what its last backward has not.

        `unused`: the parameters that this rank's micro-batches did not use, repeated ones left out; None: that need
        not be told, as no rank repeats any (but for backends with `exchanges_use`, which are always told).
        """

    def drop_gradients(self) -> None:
        """Drop gradients that are held anywhere but in ``.grad``."""

    def observe_communication(self, span: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on, enter such a span around what ranks do together inside a forward."""

    def drop_stale_gradients(self) -> None:
        """Before a window: drop what may be left there of an earlier one."""


def closed_early(wrapper: str) -> BackendError:
    return BackendError(
        f"step(now=True) cannot close this window: {wrapper} synchronises gradients in a backward, and the last one "
        'did not. Close windows with micro_batch(last=True) or remainder="step", or accumulate with sync="micro".'
    )
