"""Look on while a program runs backwards, clips gradients and steps: functions of torch are replaced for a while."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional
import torch.nn.utils.clip_grad
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._torch.autograd import AccumulateGrad, python_function_of
from macrobatch._torch.loss_nodes import (
    COPIES,
    LOSSES,
    NEGATION,
    PRODUCTS,
    first_of,
    name_of,
    second_of,
    sizes_after,
    target_of,
)
from macrobatch._torch.tensors import number_on_host
from macrobatch.errors import BackendError

Around = Callable[..., Any]  # ``around(original, *args, **kwargs)`` calls the original, and returns what it returns

_LOSSES = (
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div ctc_loss"
    " binary_cross_entropy_with_logits linear_cross_entropy"
)


@contextlib.contextmanager
def replaced(owner: Any, name: str, around: Around, *, is_required: bool = True) -> Iterator[None]:
    """Inside this context, calls of ``owner.name`` go through `around`."""
    original = vars(owner).get(name)
    if original is None:
        if is_required:
            raise BackendError(
                f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, so the backwards of a "
                "program cannot be watched. Use a version of torch that macrobatch was tested with."
            )
        yield
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        if vars(owner).get(name) is wrapper:
            setattr(owner, name, original)


@contextlib.contextmanager
def watched(
    *, backward: Around, clip: Around, clip_values: Around, scaler_step: Around, scheduler_step: Around
) -> Iterator[None]:
    """Inside this context, these see each call of torch's own functions. `backward` gets what the engine gets."""
    clipping = sys.modules["torch.nn.utils.clip_grad"]  # the package has functions with the names of its modules
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", backward))
        # Called by `clip_grad_norm_`, wherever a program has imported that from.
        stack.enter_context(replaced(clipping, "_clip_grads_with_norm_", clip))
        stack.enter_context(replaced(torch.nn.utils, "clip_grads_with_norm_", clip, is_required=False))
        for owner in (clipping, torch.nn.utils):
            stack.enter_context(replaced(owner, "clip_grad_value_", clip_values))
        stack.enter_context(replaced(GradScaler, "step", scaler_step))
        stack.enter_context(replaced(LRScheduler, "step", scheduler_step))
        yield


@contextlib.contextmanager
def noting_losses(place: Callable[[], str]) -> Iterator[None]:
    """Inside this context, losses of ``torch.nn.functional`` remember their line, scaled ones their scale."""

    def note(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and type(loss) is Tensor and loss.grad_fn is not None:
            notes: dict[str, str] = loss.grad_fn.metadata  # type: ignore[assignment]
            notes.setdefault(_PLACE, place())
        return loss

    def note_scale(original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        for one in scaled if isinstance(scaled, list | tuple) else [scaled]:
            if isinstance(one, Tensor) and one.grad_fn is not None:
                one.grad_fn.metadata[_SCALE] = scaler.get_scale()  # type: ignore[index]
        return scaled

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(GradScaler, "scale", note_scale))
        for name in _LOSSES.split():
            stack.enter_context(replaced(torch.nn.functional, name, note, is_required=False))
        yield


_PLACE, _SCALE = "macrobatch.place", "macrobatch.scale"
_LAYERS = ("Addmm", "Mm", "Bmm", "Convolution", "Embedding")
MOST_NODES = 32


class Expression(NamedTuple):
    """What a loss is, apart from the model and the data."""

    text: str  # the functions between the loss and the last layers of the model, with the signs of constants
    constants: tuple[float, ...]  # the numbers that the loss or a term of it is multiplied by
    place: str | None  # where the program called the first loss in it, if that was noted
    scale: float  # that of a `GradScaler`
    target: Tensor | None  # of the first loss in it


def expression_of(loss: Tensor) -> Expression:
    """Read the graph of a loss down to the last layers. Two losses that differ in this are not the same function."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, text, place, scale, target = {*nodes, None}, list[str](), None, 1.0, None
    constants: list[float] = []
    for node in nodes:  # the list grows while it is read
        name, notes = name_of(node), node.metadata
        place, scale = place or notes.get(_PLACE), notes.get(_SCALE, scale)
        target = target_of(node) if target is None and name in LOSSES else target
        constant = _constant_of(node, name)
        if constant is not None and _SCALE not in notes and math.prod(sizes_after(node, 0)) == 1:
            constants.append(constant)
        if not _is_wrapping(node, name):
            text.append(f"-{name}" if constant is not None and constant < 0 else name)
        edges = [source for source, _ in node.next_functions if source not in seen]
        if len(nodes) < MOST_NODES and not name.startswith(_LAYERS) and AccumulateGrad not in map(type, edges):
            seen.update(edges)
            nodes += edges
    return Expression(" ".join(text), tuple(constants), place, scale, target)


def _is_wrapping(node: Any, name: str) -> bool:
    """Whether a node only copies, or is a function of a wrapper such as DDP, which is not there in every backward."""
    function = python_function_of(type(node))
    return name in COPIES or str(getattr(function, "__module__", "")).startswith("torch.")


def _constant_of(node: Any, name: str) -> float | None:
    """The number that a node multiplies by; None if it does not, or that is not known."""
    if name == NEGATION:
        return -1.0
    if name not in PRODUCTS or len(node.next_functions) < 2:
        return None
    (first, _), (second, _) = node.next_functions[:2]
    try:
        constant = second_of(node) if second is None else first_of(node) if first is None else None
        number = None if constant is None or constant.numel() != 1 else number_on_host(constant)
    except RuntimeError:  # packed, freed or changed
        return None
    return None if number is None else float(number)
