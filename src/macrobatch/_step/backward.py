"""The backward of one micro-batch: on the own parameters alone, whatever else its graph reaches."""

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
    "are frozen. Hand over the loss of the model that this Accumulator was made for."
)


class Replayable(Protocol):
    """A micro-step that was recorded: forward and backward at once."""

    reached: set[nn.Parameter]

    def replay(self, micro_batch: object, window: Window) -> None:
        """Compute a micro-batch, and count it in the window."""


class Backward:
    """Runs the backwards of a window.

    Every graph is walked: another model may be a part of this one, and none of the last. On a GPU that happens while
    the backward runs, as long as the graphs of the window have ended in its own parameters alone.
    """

    def __init__(self, backend: Local, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        self._backend = backend
        self._parameters = parameters
        self._may_overlap = backend.abilities.confines and accumulate_dtype is None
        self._walker = Walker()
        self.begin_window()

    def begin_window(self) -> None:
        """Nothing is known of its graphs."""
        self._is_ordinary = False  # whether they have ended in the own parameters alone so far

    def plan(self, loss: Tensor, gradients: Gradients, *, is_first: bool) -> tuple[Confinement | None, Sequence[str]]:
        """What this backward is to be confined to, and which parameters must turn out to get a gradient in it.

        None: the graph is walked while the backward runs.
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
        """Whether the graph is walked while its backward runs. A CPU would gain nothing by it."""
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
        """Add the gradients of `loss`; zeros where it does not count."""
        # A micro-batch without items counts for nothing even where its own gradient is 0 / 0; but what it used has a
        # gradient of zero, not none, as in one big batch.
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
        """Add the gradients of a loss of the whole batch, those of these leaves too."""
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
        """The backward itself; returns what it reached, where that was found out meanwhile."""
        if confinement is not None:
            run_confined(loss, seed, confinement)
            return None
        with self._walker.walking(loss) as walk:
            run_confined(loss, seed, UNCONFINED)
        return walk.result()

    def _include(self, reach: Reach, gradients: Gradients) -> None:
        """Accumulate parameters of the models that were frozen, or not there yet, when the window began."""
        if any(isinstance(leaf, nn.Parameter) and id(leaf) not in gradients.own for leaf in reach.leaves):
            gradients.adopt(self._parameters.named(anew=True))
        gradients.include(reach.leaves)

    def _require_no_others(self, reach: Reach, gradients: Gradients) -> None:
        """After a backward that was not confined."""
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
    """A backward has left gradients on this rank alone: they cannot be taken back."""


@contextlib.contextmanager
def record_use(leaves: dict[str, Tensor], awaited: Sequence[str]) -> Iterator[set[str]]:
    """Note which of these a backward uses, by name; an error if one of those awaited is not among them."""
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
