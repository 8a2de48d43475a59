"""Find the leaves that the backward of a loss reaches, and run that backward only on the leaves of one's own models."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from macrobatch._torch.autograd import AccumulateGrad, python_function_of, run_backward

_VARIABLE_OF: Callable[[Any], Tensor] = operator.attrgetter("variable")
RunBackward = Callable[[Tensor, Tensor, Sequence[Tensor] | None], None]


class Reach(NamedTuple):
    """The leaf tensors that the backward of a loss adds gradients to.

    Attributes:
        leaves: the leaves, each once.
        may_nest: whether the graph holds functions that may run another backward inside their own, as reentrant
            checkpointing does. The leaves of such an inner backward cannot be known in advance.
    """

    leaves: list[Tensor]
    may_nest: bool


def reach_of(loss: Tensor) -> Reach:
    """Walk the graph behind `loss`.

    A walk takes about 0.4 us per node, so the loop does as little as possible. It turns the garbage collector off: a
    walk makes thousands of objects and frees them all, but their number would trigger collections of everything else.
    """
    root: Any = loss.grad_fn
    if root is None:  # the loss is a leaf itself
        return Reach([loss], may_nest=False)
    known, seen, ends, pending = _CPP_NODES, {root, None}, [], [root]
    unknown = set() if type(root) in known else {type(root)}
    pop, push, see = pending.pop, pending.append, seen.add
    is_enabled = gc.isenabled()
    gc.disable()
    try:
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
        leaves = list(map(_VARIABLE_OF, ends))
    finally:
        if is_enabled:
            gc.enable()
    if not unknown:
        return Reach(leaves, may_nest=False)
    known.update(kind for kind in unknown if not issubclass(kind, BackwardCFunction))
    return Reach(leaves, may_nest=any(map(_may_nest, unknown)))


class Walker:
    """Walks a graph on a separate thread while its backward runs.

    On a GPU the walk then costs no time, because the host only waits for kernels that are queued outside of Python. But
    the result comes too late to confine that backward.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def walking(self, loss: Tensor) -> Iterator[Future[Reach]]:
        """Walk the graph behind `loss` while the block runs. The block should run only the backward of `loss`.

        Other Python code in the block and the walk would wait for each other.
        """
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
    """Whether nodes of this kind may run another backward inside their own. Any function written in Python may.

    The functions of torch itself, such as those of compiled models and of DDP, do not. The exception is reentrant
    checkpointing.
    """
    if not issubclass(kind, BackwardCFunction):
        return False
    function = python_function_of(kind)
    return function is CheckpointFunction or not str(getattr(function, "__module__", "")).startswith("torch.")


class Confinement(NamedTuple):
    """How to keep a backward from changing gradients of other models.

    Attributes:
        inputs: the leaves whose gradients torch computes; None for all leaves.
        restore_after: the leaves whose gradients are restored after the backward.
    """

    inputs: Sequence[Tensor] | None = None
    restore_after: Sequence[Tensor] = ()


UNCONFINED = Confinement()


def confinement_of(reach: Reach, own: Collection[int]) -> Confinement:
    """How to confine a backward with that reach to the leaves whose ids are `own`.

    ``inputs=`` makes torch skip the parts of the graph that lead to no own leaf. But torch would also skip, without an
    error, a function that runs a backward of its own inside. If there may be one, all gradients are computed, and those
    of the other leaves are restored afterwards.
    """
    others = [leaf for leaf in reach.leaves if id(leaf) not in own]
    if not others:
        return UNCONFINED
    inputs = [leaf for leaf in reach.leaves if id(leaf) in own]
    # Without an own leaf there would be no inputs, which means all. A few other leaves are cheaper to restore.
    if reach.may_nest or not inputs or not any(isinstance(leaf, nn.Parameter) for leaf in others):
        return Confinement(restore_after=others)
    return Confinement(inputs)


@contextlib.contextmanager
def restoring_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Restore the gradients of these leaves after the block."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def run_confined(loss: Tensor, seed: Tensor, confinement: Confinement, run: RunBackward = run_backward) -> None:
    """Run the backward of `loss` as `confinement` says."""
    if confinement is UNCONFINED:
        run(loss, seed, None)
        return
    with restoring_gradients(confinement.restore_after):
        run(loss, seed, confinement.inputs)
