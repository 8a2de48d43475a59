"""The obvious program: the gradient of a window in plain torch, with all graphs in memory. The library equals it.

`losses` are the means of the micro-batches, on all ranks, each with its graph; `items` says how many items each is a
mean over. Nothing here is fast, and nothing needs an explanation:

>>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
>>> batches = torch.ones(3, 2), torch.zeros(1, 2)              # three samples, then one
>>> losses = [(x @ weight).mean() for x in batches]
>>> mean_gradients([weight], losses, items=[3, 1])             # not (1 + 0) / 2, which is the mean of the means
(tensor([0.7500, 0.7500]),)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Gradients = tuple[Tensor, ...]


def mean_gradients(parameters: Sequence[Tensor], losses: Sequence[Tensor], items: Sequence[float]) -> Gradients:
    """Of the mean over all items: the sum of the summed losses, divided once by the sum of the items."""
    sums = [loss * n for loss, n in zip(losses, items, strict=True) if n]
    return torch.autograd.grad(torch.stack(sums).sum() / sum(items), parameters)


def term_gradients(parameters: Sequence[Tensor], losses: Sequence[Mapping[str, tuple[Tensor, float]]]) -> Gradients:
    """Of a sum of terms, each the mean over its own items. `losses`: of each micro-batch, the terms that it has."""
    means = []
    for name in dict.fromkeys(name for terms in losses for name in terms):
        parts = [terms[name] for terms in losses if name in terms]
        means.append(torch.stack([loss * n for loss, n in parts if n]).sum() / sum(n for _, n in parts))
    return torch.autograd.grad(torch.stack(means).sum(), parameters)


def joint_gradients(
    parameters: Sequence[Tensor], encodings: Sequence[Tensor], joint: Callable[[Tensor], Tensor]
) -> Gradients:
    """Of a loss of the whole batch: `joint` of the encodings of all micro-batches, in the order of the batch."""
    return torch.autograd.grad(joint(torch.cat(list(encodings))), parameters)
