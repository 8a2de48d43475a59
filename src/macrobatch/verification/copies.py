"""Recognises an optimizer that holds copies of the parameters: float32 ones, each by itself or all in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch.verification.gradient import NamedGradients


def is_same(one: Tensor, other: Tensor | None) -> bool:
    """Whether two weights have the same values."""
    return other is not None and one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def gradients_of_copies(optimizer: Optimizer, named: dict[str, nn.Parameter]) -> NamedGradients:
    """The gradients of an optimizer's tensors by the parameters that they are copies of; empty if they are not.

    A copy has the values of its parameter in its own precision. One flat tensor may hold several of them.
    """
    unused = {name: p for name, p in named.items() if p.requires_grad}
    found: NamedGradients = {}
    for copy in (p for group in optimizer.param_groups for p in group["params"]):
        if copy.grad is None:
            continue
        pieces = _pieces_of(copy, unused)
        if pieces is None:
            return {}
        gradients = torch.split(copy.grad.detach().reshape(-1), [unused[name].numel() for name in pieces])
        found |= {name: part.clone().view_as(unused[name]) for name, part in zip(pieces, gradients, strict=True)}
        for name in pieces:
            del unused[name]
    return found


def _pieces_of(copy: Tensor, unused: dict[str, nn.Parameter]) -> list[str] | None:
    """The names of the parameters, one or several in a row, whose values a tensor holds."""
    names = list(unused)
    for first, name in enumerate(names):
        if unused[name].shape == copy.shape and _has_values(copy, [unused[name]]):
            return [name]
        if copy.ndim != 1:
            continue
        for last in range(first + 1, len(names) + 1):
            size = sum(unused[each].numel() for each in names[first:last])
            if size == copy.numel() and _has_values(copy, [unused[each] for each in names[first:last]]):
                return names[first:last]
            if size >= copy.numel():
                break
    return None


def _has_values(copy: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    values = torch.split(copy.detach().reshape(-1), [p.numel() for p in parameters])
    return all(
        torch.equal(v.to(p.device, p.dtype), p.detach().reshape(-1)) for v, p in zip(values, parameters, strict=True)
    )
