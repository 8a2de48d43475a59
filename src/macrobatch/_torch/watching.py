"""Look on while a program runs backwards, clips gradients and steps: functions of torch are replaced for a while."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional
import torch.nn.utils.clip_grad
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

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
    """Inside this context, losses of ``torch.nn.functional`` remember where the program called them."""

    def note(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and type(loss) is Tensor and loss.grad_fn is not None:
            notes: dict[str, str] = loss.grad_fn.metadata  # type: ignore[assignment]
            notes.setdefault("macrobatch.place", place())
        return loss

    with contextlib.ExitStack() as stack:
        for name in _LOSSES.split():
            stack.enter_context(replaced(torch.nn.functional, name, note, is_required=False))
        yield


def place_of(node: Any) -> str | None:
    """Where the program called the loss whose graph ends in this node; None if that was not noted."""
    for _ in range(16):  # casts and factors come after the loss
        if node is None:
            return None
        if (place := node.metadata.get("macrobatch.place")) is not None:
            return str(place)
        node = node.next_functions[0][0] if node.next_functions else None
    return None
