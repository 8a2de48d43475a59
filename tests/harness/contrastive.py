"""The obvious contrastive loss, which holds the matrix of all pairs, and rows to compare losses on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT = 1e-12
float64 = torch.float64


def obvious(a: Tensor, b: Tensor, *, scale: Tensor, symmetric: bool = True, negatives: Tensor | None = None) -> Tensor:
    logits = scale * F.normalize(a) @ F.normalize(b).T
    answers = torch.arange(len(a), device=a.device)
    candidates = logits
    if negatives is not None:
        candidates = torch.cat([logits, scale * F.normalize(a) @ F.normalize(negatives).T], dim=1)
    loss = F.cross_entropy(candidates, answers)
    return (loss + F.cross_entropy(logits.T, answers)) / 2 if symmetric else loss


def random_rows(count: int, dimension: int = 5, *, seed: int, dtype: torch.dtype = float64) -> Tensor:
    """Of norms between 0.5 and 2, so that their gradients are of one size."""
    draw = torch.Generator().manual_seed(seed)
    norms = torch.rand(count, 1, generator=draw, dtype=float64) * 1.5 + 0.5
    return (F.normalize(torch.randn(count, dimension, generator=draw, dtype=float64)) * norms).to(dtype)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=float64)


def similar_rows(
    count: int, dimension: int, *, closeness: float, seed: int = 0, dtype: torch.dtype = float64
) -> tuple[Tensor, Tensor]:
    """Pairs that a model has learnt, the better the closer."""
    a = random_rows(count, dimension, seed=seed)
    return a.to(dtype), (random_rows(count, dimension, seed=seed + 1) + closeness * a).to(dtype)


def with_gradients(
    loss_of: Callable[..., Tensor], inputs: Sequence[Tensor], *, dtype: torch.dtype | None = None, **options: Any
) -> list[Tensor]:
    """The loss, and the gradients of `inputs`: a, b, scale and perhaps negatives, which are cast to `dtype` before."""
    leaves = [one.detach().to(dtype or one.dtype).requires_grad_() for one in inputs]
    a, b, scale, *negatives = leaves
    loss = loss_of(a, b, scale=scale, negatives=negatives[0] if negatives else None, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max((f.double() - w.double()).abs().max().item() for f, w in zip(found, wanted, strict=True) if w.numel())


def largest(tensors: Sequence[Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors if tensor.numel())


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Of the loss and its gradients, relative to the largest of them."""
    return difference(found, wanted) / largest(wanted)
