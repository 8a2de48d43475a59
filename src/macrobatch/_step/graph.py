"""The graph behind a loss: which leaves its backward reaches, and running that backward on the own leaves alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from macrobatch._torch.autograd import AccumulateGrad, engine_run_backward, python_function_of


class Reach(NamedTuple):
    """What the backward of a loss adds gradients to.

    Attributes:
        leaves: each once.
        may_nest: whether the graph holds functions that may run a backward of their own inside their backward, as
            reentrant checkpointing does. What those reach cannot be seen beforehand.
    """

    leaves: list[Tensor]
    may_nest: bool


def reach_of(loss: Tensor) -> Reach:
    """Walk the graph behind `loss`.

    It takes about 0.4 us a node, so the loop does no more than it must. The garbage collector rests: a walk makes
    thousands of objects and leaves none, but on its way it would set off collections of everything else.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return _walk(loss)
    finally:
        if is_enabled:
            gc.enable()


def _walk(loss: Tensor) -> Reach:
    root: Any = loss.grad_fn
    if root is None:  # the loss is a leaf itself
        return Reach([loss], may_nest=False)
    known, seen, ends, pending = _CPP_NODES, {root, None}, [], [root]
    unknown = set() if type(root) in known else {type(root)}
    pop, push, see = pending.pop, pending.append, seen.add
    while pending:
        for node, _ in pop().next_functions:
            if node not in seen:
                see(node)
                kind = type(node)
                if kind is AccumulateGrad:
                    ends.append(node)
                else:
                    if kind not in known:
                        unknown.add(kind)
                    push(node)
    leaves = [node.variable for node in ends]
    if not unknown:
        return Reach(leaves, may_nest=False)
    known.update(kind for kind in unknown if not issubclass(kind, BackwardCFunction))
    return Reach(leaves, may_nest=any(map(_may_nest, unknown)))


class Walker:
    """Walks a graph on a thread of its own while its backward runs.

    On a GPU the host only waits then, for kernels that are queued outside of Python: a walk costs nothing. But what it
    finds comes too late to confine that backward.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def walking(self, loss: Tensor) -> Iterator[Future[Reach]]:
        """Walk the graph behind `loss` while the block runs, which should do nothing but its backward.

        Whatever else it did in Python would wait for the walk, or the walk for it.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="macrobatch")
        walk = self._thread.submit(reach_of, loss)
        try:
            yield walk
        finally:
            walk.exception()  # the graph must not be freed before


# The kinds of nodes seen so far that are torch's own in C++: there are a few hundred. Those of functions written in
# Python are not kept, for they would keep what was compiled for a model that is gone.
_CPP_NODES: set[type] = set()


def _may_nest(kind: type) -> bool:
    """Whether nodes of this kind may run a backward inside theirs: any function written in Python may.

    Those of torch itself do not, such as those of compiled models and of DDP, but for its reentrant checkpointing.
    """
    if not issubclass(kind, BackwardCFunction):
        return False
    function = python_function_of(kind)
    return function is CheckpointFunction or not str(getattr(function, "__module__", "")).startswith("torch.")


def run_backward(loss: Tensor, seed: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
    """``torch.autograd.backward(loss, seed, inputs=inputs)``, by its last line alone.

    What that function does before it, checking what is known to be right here, takes as long as the backward of a small
    layer.
    """
    if type(loss) is Tensor and engine_run_backward is not None:
        inputs = tuple(inputs or ())
        engine_run_backward((loss,), (seed,), False, False, inputs, allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, seed, inputs=inputs)


class Confinement(NamedTuple):
    """How a backward is kept to the own leaves.

    Attributes:
        inputs: what torch is told to add to; None: to all leaves.
        aside: leaves whose gradients are put back afterwards, as they were.
    """

    inputs: Sequence[Tensor] | None = None
    aside: Sequence[Tensor] = ()


UNCONFINED = Confinement()


def confinement_of(reach: Reach, own: Collection[int]) -> Confinement:
    """How to keep a backward with that reach to the leaves whose ids are `own`.

    ``inputs=`` leaves out what leads to no own leaf: all that is needed, unless a function runs a graph of its own
    inside. That would silently not be run, so all gradients are computed there, and those of others put back.
    """
    others = [leaf for leaf in reach.leaves if id(leaf) not in own]
    if not others:
        return UNCONFINED
    if reach.may_nest or not any(isinstance(leaf, nn.Parameter) for leaf in others):  # cheaper for a few inputs, too
        return Confinement(aside=others)
    return Confinement(inputs=[leaf for leaf in reach.leaves if id(leaf) in own])


@contextlib.contextmanager
def _gradients_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Put the gradients of these leaves back afterwards, as they were."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def run_confined(loss: Tensor, seed: Tensor, confinement: Confinement) -> None:
    """The backward of `loss`, kept to the own leaves."""
    if confinement is UNCONFINED:
        run_backward(loss, seed)
        return
    with _gradients_aside(confinement.aside):
        run_backward(loss, seed, confinement.inputs)
