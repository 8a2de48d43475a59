"""Find the leaves that the backward of a loss reaches, and run that backward only on the leaves of one's own models."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from macrobatch._torch.autograd import AccumulateGrad, python_function_of, run_backward

FEW_NODES = 100  # that make no difference to the garbage collector
RunBackward = Callable[[Tensor, Tensor, Sequence[Tensor] | None], None]


class Reach(NamedTuple):
    """The leaf tensors that the backward of a loss adds gradients to."""

    leaves: list[Tensor]  # each once
    may_nest: bool  # whether functions in the graph may run another backward inside, whose leaves are not known


def reach_of(loss: Tensor) -> Reach:
    """Walk the graph behind `loss`, in about 0.4 us per node."""
    root: Any = loss.grad_fn
    if root is None:  # the loss is a leaf itself
        return Reach([loss], may_nest=False)
    inner, seen, is_paused = [root], {root, None}, False
    leaves: list[Tensor] = []
    try:
        for index, node in enumerate(inner):  # the list grows while it is read
            if index == FEW_NODES and (is_paused := gc.isenabled()):
                gc.disable()  # the number of new objects would trigger collections, though the walk frees them all
            for behind, _ in node.next_functions:
                if behind not in seen:
                    seen.add(behind)
                    if type(behind) is AccumulateGrad:
                        leaves.append(behind.variable)  # type: ignore[attr-defined]
                    else:
                        inner.append(behind)
    finally:
        if is_paused:
            gc.enable()
    if _CPP_NODES.issuperset(map(type, inner)):
        return Reach(leaves, may_nest=False)
    unknown = set(map(type, inner)) - _CPP_NODES
    _CPP_NODES.update(kind for kind in unknown if not issubclass(kind, BackwardCFunction))
    return Reach(leaves, may_nest=any(map(_may_nest, unknown)))


def ends_in(loss: Tensor, leaves: Collection[int]) -> bool:
    """Whether the graph behind `loss` is small, and ends only in leaves with these ids: `reach_of` without its list."""
    inner: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    for node in inner:  # the list grows while it is read
        for behind, _ in node.next_functions:
            if behind not in seen:
                seen.add(behind)
                if type(behind) is not AccumulateGrad:
                    inner.append(behind)
                elif id(behind.variable) not in leaves:  # type: ignore[attr-defined]
                    return False
        if len(inner) > FEW_NODES:
            return False
    return True


class Walker:
    """Walks a graph on a separate thread while its backward runs. On a GPU the walk then costs no time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def walking(self, loss: Tensor) -> Iterator[Future[Reach]]:
        """Walk the graph behind `loss` while the block runs its backward. Other Python code would slow the walk."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="macrobatch")
        walk = self._thread.submit(reach_of, loss)
        try:
            yield walk
        finally:
            walk.exception()  # the graph must not be freed before the walk ends


# The types of graph nodes seen so far that torch implements in C++: a few hundred. Types of functions written in Python
# are not kept here, because they would keep the compiled code of deleted models alive.
_CPP_NODES: set[type] = set()


def _may_nest(kind: type) -> bool:
    """Whether nodes of this kind may run another backward inside: functions in Python, and reentrant checkpointing."""
    if not issubclass(kind, BackwardCFunction):
        return False
    function = python_function_of(kind)
    return function is CheckpointFunction or not str(getattr(function, "__module__", "")).startswith("torch.")


class Confinement(NamedTuple):
    """How to keep a backward from changing gradients of other models."""

    inputs: Sequence[Tensor] | None = None  # the leaves whose gradients torch computes; None for all leaves
    restore_after: Sequence[Tensor] = ()  # the leaves whose gradients are restored after the backward


UNCONFINED = Confinement()


def confinement_of(reach: Reach, own: Collection[int]) -> Confinement:
    """How to confine a backward with that reach to the leaves whose ids are `own`."""
    others = [leaf for leaf in reach.leaves if id(leaf) not in own]
    if not others:
        return UNCONFINED
    inputs = [leaf for leaf in reach.leaves if id(leaf) in own]
    # With ``inputs=`` torch would silently skip a backward inside another. No inputs at all would mean all leaves.
    # A few leaves that are no parameters are cheaper to restore.
    if reach.may_nest or not inputs or not any(isinstance(leaf, nn.Parameter) for leaf in others):
        return Confinement(restore_after=others)
    return Confinement(inputs)


def run_confined(loss: Tensor, seed: Tensor, confinement: Confinement, run: RunBackward = run_backward) -> None:
    """Run the backward of `loss` as `confinement` says."""
    if confinement is UNCONFINED:
        run(loss, seed, None)
        return
    before = [(leaf, leaf.grad) for leaf in confinement.restore_after]
    for leaf in confinement.restore_after:
        leaf.grad = None
    try:
        run(loss, seed, confinement.inputs)
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient
