"""What a ``training_step`` returns: the loss, and the number of items that it is a mean over."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from macrobatch._border.arguments import checked_items, items_on_host
from macrobatch._loss.proportions import Number
from macrobatch._loss.weighing import weigh
from macrobatch.errors import BatchError, MacrobatchError
from macrobatch.types import Items


def loss_and_items(output: Any) -> tuple[Any, Any]:
    """Loss and items of the output of a ``training_step``; items are None if it does not count them."""
    if isinstance(output, Tensor) or not isinstance(output, Mapping):  # the first is the faster question
        return output, None
    return output.get("loss"), output.get("items")


def unreadable(node: str) -> BatchError:
    """The error for a loss that does not state what it is a mean over."""
    return BatchError(
        f"what the loss of training_step is a mean over cannot be read from it ({node} was not understood), so the "
        'batches of a window cannot be weighed. Return {"loss": loss, "items": n} for a loss that is a mean over n '
        'items, such as tokens or samples; "items": 1 gives all batches the same weight. (A loss that is no mean, '
        "such as a root or a ratio of means, is exact with steps=1 in one process only.)"
    )


def countable(items: Any) -> Items:
    """The items that a program states; None if it states none. What is no count is something else of its own."""
    try:
        return items_on_host(checked_items(items))
    except MacrobatchError:
        return None


def items_stated_by(loss: Tensor) -> Tensor:
    """The items that a loss states, for a result; 1 if it states none."""
    items: Number | None = None
    if loss.grad_fn is not None:
        with contextlib.suppress(MacrobatchError):
            items = weigh(loss, None, is_mean=True, steps=None, on_host=True).items
    return on_device(1 if items is None else items, loss.device)


def on_device(items: Number, device: torch.device) -> Tensor:
    """A number of items as a scalar on the device, for which the host does not wait."""
    if isinstance(items, Tensor):
        return items.detach().reshape(()).to(device, non_blocking=True)
    return torch.full((), items, device=device)
