"""The backward of one micro-batch. It adds gradients only to parameters of the given models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from macrobatch._ranks.backend import Local
from macrobatch._step.gradients import Gradients
from macrobatch._step.graph import (
    UNCONFINED,
    Confinement,
    Reach,
    Walker,
    confinement_of,
    reach_of,
    run_confined,
)
from macrobatch._step.hooks import guard_hooks
from macrobatch._step.parameters import Parameters
from macrobatch._step.totals import Window
from macrobatch.errors import BackendError, BatchError, UsageError

NO_PARAMETER = (
    "the loss reached no parameter of the given models: its graph belongs to others, or the parameters that it uses "
    "are frozen. Pass the loss of the model that this Accumulator was made for."
)


class Replayable(Protocol):
    """A recorded micro-batch: its forward and backward as one call."""

    reached: set[nn.Parameter]

    def replay(self, micro_batch: object, window: Window) -> None:
        """Compute a micro-batch, and count it in the window."""


class Backward:
    """Runs the backwards of a window.

    It walks every graph, because a graph may reach another model even if the last one did not. On a GPU it walks the
    graph while the backward runs, as long as all graphs of the window so far ended only in the window's parameters.
    """

    def __init__(self, backend: Local, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        self._backend = backend
        self._parameters = parameters
        self._may_overlap = backend.abilities.confines and accumulate_dtype is None
        self._walker = Walker()
        self.begin_window()

    def begin_window(self) -> None:
        """Begin a window. Nothing is known of its graphs yet."""
        self._is_ordinary = False  # whether the graphs of the window so far ended only in its parameters

    def plan(self, loss: Tensor, gradients: Gradients, *, is_first: bool) -> tuple[Confinement | None, Sequence[str]]:
        """How to confine this backward, and the names of the parameters that must get a gradient in it.

        The confinement is None if the graph is walked while the backward runs.
        """
        if self._is_ordinary and not is_first and self.overlaps(loss):
            return None, ()
        if not self._backend.abilities.confines:
            return UNCONFINED, ()
        reach, confinement = reach_of(loss), UNCONFINED
        self._is_ordinary = gradients.are_all_watched(reach.leaves)
        if not self._is_ordinary:
            self._include(reach, gradients)
            confinement = confinement_of(reach, gradients.own)
        if is_first and not (reach.may_nest or any(id(leaf) in gradients.own for leaf in reach.leaves)):
            raise BatchError(NO_PARAMETER)
        if not self._backend.will_check:
            return confinement, ()
        used = set(map(id, reach.leaves))
        return confinement, self._backend.check(used, gradients.named, may_nest=reach.may_nest)

    def overlaps(self, loss: Tensor) -> bool:
        """Whether the graph is walked while its backward runs. On a CPU that would not save time."""
        return loss.is_cuda and self._may_overlap and not self._backend.will_check

    def run(
        self,
        loss: Tensor,
        seed: Tensor,
        gradients: Gradients,
        confinement: Confinement | None,
        *,
        counts: bool,
        is_first: bool,
    ) -> None:
        """Add the gradients of `loss`, or zeros if the micro-batch does not count."""
        # A micro-batch without items must add nothing, even if its own gradient is 0 / 0. But the parameters that it
        # used get a gradient of zero, not None, as in one big batch.
        hooks = [] if counts else self._backend.zeroing_hooks(gradients.parameters)
        self._backend.prepare_backward()
        try:
            if gradients.hooked:
                with guard_hooks(gradients.hooked):
                    reach = self._backpropagate(loss, seed, confinement)
            else:
                reach = self._backpropagate(loss, seed, confinement)
        finally:
            for hook in hooks:
                hook.remove()
        gradients.mark()
        if reach is not None:
            self._require_no_others(reach, gradients)
        if is_first and self._backend.abilities.confines and not gradients.exist():
            raise BatchError(NO_PARAMETER)

    def run_joint(self, loss: Tensor, seed: Tensor, gradients: Gradients, leaves: Sequence[Tensor]) -> None:
        """Add the gradients of a loss of the whole batch, also to `leaves`."""
        confinement = UNCONFINED
        if self._backend.abilities.confines:
            reach = reach_of(loss)
            self._include(reach, gradients)
            confinement = confinement_of(reach, {*gradients.own, *map(id, leaves)})
        if gradients.hooked:
            with guard_hooks(gradients.hooked):
                run_confined(loss, seed, confinement)
        else:
            run_confined(loss, seed, confinement)
        gradients.mark()

    def _backpropagate(self, loss: Tensor, seed: Tensor, confinement: Confinement | None) -> Reach | None:
        """Run the backward. Returns what it reached, if the graph was walked meanwhile."""
        if confinement is not None:
            run_confined(loss, seed, confinement)
            return None
        with self._walker.walking(loss) as walk:
            run_confined(loss, seed, UNCONFINED)
        return walk.result()

    def _include(self, reach: Reach, gradients: Gradients) -> None:
        """Accumulate parameters of the models that were frozen, or did not exist, when the window began."""
        if any(isinstance(leaf, nn.Parameter) and id(leaf) not in gradients.own for leaf in reach.leaves):
            gradients.adopt(self._parameters.named(anew=True))
        gradients.include(reach.leaves)

    def _require_no_others(self, reach: Reach, gradients: Gradients) -> None:
        """Raise an error if a backward that was not confined reached parameters of another model."""
        if gradients.are_all_watched(reach.leaves):
            return
        self._is_ordinary = False
        self._include(reach, gradients)
        others = [leaf for leaf in reach.leaves if id(leaf) not in gradients.own and isinstance(leaf, nn.Parameter)]
        if others:
            raise UsageError(
                f"this micro-batch reached {len(others)} parameters of another model, the first of shape "
                f"{tuple(others[0].shape)}, where no earlier one of its window did: undivided sums were added to "
                "their gradients. Clear those with zero_grad(), drop this window with discard(), and let all "
                "micro-batches of a window reach the other model, or none: detach() it, or freeze it."
            )


class UnsynchronisedError(BackendError):
    """A backward has left gradients that only this rank has. They cannot be undone."""


@contextlib.contextmanager
def record_use(leaves: dict[str, Tensor], awaited: Sequence[str]) -> Iterator[set[str]]:
    """Note the names of the leaves that a backward uses. Raise an error if it does not use all `awaited` ones."""
    used: set[str] = set()
    hooks = [
        leaf.register_hook(lambda _, name=name: used.add(name))  # type: ignore[no-untyped-call]
        for name, leaf in leaves.items()
        if leaf.requires_grad
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()
    if missing := [name for name in awaited if name not in used]:
        raise UnsynchronisedError(
            f"{len(missing)} parameters got no gradient in this rank's last micro-batch of the window, the first "
            f"of them {missing[0]!r}: DistributedDataParallel has not synchronised what they have accumulated. Use "
            "every parameter in every micro-batch, or wrap the model with find_unused_parameters=True, which needs "
            "checkpoint(..., use_reentrant=False)."
        )
