"""The backward of one micro-batch. It adds gradients only to parameters of the given models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._engine.store import GradientStore
from macrobatch._engine.totals import Micro
from macrobatch._ranks.backend import Local
from macrobatch._torch.graph import UNCONFINED, Confinement, Reach, Walker, confinement_of, reach_of, run_confined
from macrobatch.errors import UsageError


class Backward:
    """Runs the backwards of a window.

    It walks every graph, because a graph may reach another model even if the last one did not. On a GPU it walks the
    graph while the backward runs, as long as all graphs of the window so far ended only in the window's parameters.
    """

    def __init__(self, backend: Local, store: GradientStore, accumulate_dtype: torch.dtype | None) -> None:
        self._backend = backend
        self._store = store
        self._is_confined = backend.abilities.leaves_are_parameters
        self._may_overlap = self._is_confined and accumulate_dtype is None
        self._walker = Walker()
        self.begin_window()

    def begin_window(self) -> None:
        """Begin a window. Nothing is known of its graphs yet."""
        self._is_ordinary = False  # whether the graphs of the window so far ended only in its parameters
        self.used: set[str] = set()  # the parameters that its backwards have used, if that is noted

    def confine(self, root: Tensor, reach: Reach | None) -> Confinement | None:
        """How to confine this backward; None if its graph is walked while it runs.

        `reach`: what the graph reaches, if that is known already.
        """
        if self._is_ordinary and self.overlaps(root):
            return None
        if not self._is_confined:
            return UNCONFINED
        reach, store = reach or reach_of(root), self._store
        self._is_ordinary = store.trained.issuperset(map(id, reach.leaves))
        if self._is_ordinary:
            return UNCONFINED
        store.include(reach.leaves)
        return confinement_of(reach, store.own)

    def overlaps(self, root: Tensor) -> bool:
        """Whether a graph may be walked while its backward runs. On a CPU that would not save time."""
        return root.is_cuda and self._may_overlap and not self._backend.will_check

    def run(self, micro: Micro, confinement: Confinement | None) -> None:
        """Add the gradients of a micro-batch, or zeros if it does not count."""
        assert micro.root is not None
        assert micro.seed is not None
        # A micro-batch without items must add nothing, even if its own gradient is 0 / 0. But the parameters that it
        # used get a gradient of zero, not None, as in one big batch.
        hooks = [] if micro.counts else self._backend.zeroing_hooks(self._store.parameters)
        reach = None
        try:
            if confinement is not None:
                run_confined(micro.root, micro.seed, confinement, self._backend.backward)
            else:
                with self._walker.walking(micro.root) as walk:
                    self._backend.backward(micro.root, micro.seed, None)
                reach = walk.result()
        finally:
            for hook in hooks:
                hook.remove()
        if reach is not None:
            self._require_no_others(reach)

    def run_joint(self, loss: Tensor, seed: Tensor, leaves: Sequence[Tensor]) -> None:
        """Add the gradients of a loss of the whole batch, also to `leaves`."""
        confinement = UNCONFINED
        if self._backend.abilities.leaves_are_parameters:
            reach = reach_of(loss)
            self._store.include(reach.leaves)
            confinement = confinement_of(reach, {*self._store.own, *map(id, leaves)})
        run_confined(loss, seed, confinement)
        self._store.absorb()

    @contextlib.contextmanager
    def noting_use(self, notes: bool) -> Iterator[None]:
        """A context that notes which parameters a backward uses, if it `notes` any."""
        hooks: list[Any] = []
        if notes:
            named = {name: p for name, p in self._store.named.items() if name not in self.used}
            hooks = [
                leaf.register_hook(lambda _, name=name: self.used.add(name))  # type: ignore[no-untyped-call]
                for name, leaf in self._backend.leaves(named).items()
                if leaf.requires_grad
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def note_use(self, parameters: Iterable[Tensor]) -> None:
        """Note that these parameters were used by a recorded backward."""
        self.used.update(self._store.own[id(parameter)] for parameter in parameters)

    def _require_no_others(self, reach: Reach) -> None:
        """Raise an error if a backward that was not confined reached parameters of another model."""
        if self._store.trained.issuperset(map(id, reach.leaves)):
            return
        self._is_ordinary = False
        self._store.include(reach.leaves)
        others = [leaf for leaf in reach.leaves if id(leaf) not in self._store.own and isinstance(leaf, nn.Parameter)]
        if others:
            raise UsageError(
                f"this micro-batch reached {len(others)} parameters of another model, the first of shape "
                f"{tuple(others[0].shape)}, where no earlier one of its window did: undivided sums were added to "
                "their gradients.",
                "Clear those with zero_grad(), drop this window with discard(), and let all micro-batches of a window "
                "reach the other model, or none: detach() it, or freeze it.",
                code="another model",
            )
