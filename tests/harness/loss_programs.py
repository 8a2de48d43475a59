"""Losses as programs for Accelerate compute them, and a loop that trains with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import reference
from harness.reference import Batch


class Custom(torch.autograd.Function):
    """A mean that its graph does not show."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.size = losses.shape
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient / ctx.size.numel()).expand(ctx.size)


def tokens(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    """Cross-entropy without the labels that are ignored."""
    scores = model(batch.x)
    return F.cross_entropy(scores.flatten(0, 1), batch.y.flatten(), ignore_index=reference.IGNORED, **options)


def target(scores: Tensor, batch: Batch) -> Tensor:
    return torch.sin(torch.arange(scores.numel(), dtype=scores.dtype)[: scores[0].numel()]).view_as(scores[0])


def mixed(model: nn.Module, batch: Batch, share: float = 0.3) -> Tensor:
    scores, other = model(batch.x).flatten(0, 1), batch.y.clamp(min=0)
    first = F.cross_entropy(scores, other.flatten())
    return share * first + (1 - share) * F.cross_entropy(scores, other.flip(1).flatten())


def by_hand(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch.x).flatten(0, 1)
    losses = F.cross_entropy(scores, batch.y.clamp(min=0).flatten(), reduction="none")
    mask = (batch.y != reference.IGNORED).flatten()
    return (losses * mask).sum() / mask.sum()


def hinge(model: nn.Module, batch: Batch) -> Tensor:
    return (1 - model(batch.x)[..., 0]).relu().mean()


WEIGHTS = torch.linspace(0.5, 2, reference.VOCABULARY, dtype=torch.float64)
Loss = Callable[[nn.Module, Batch], Tensor]


class Case(NamedTuple):
    """A loss, and words of the warning that it gets if it cannot be read."""

    loss: Loss
    warning: str = ""


# What these are means over is read: the windows are those of one big batch.
READ: dict[str, Loss] = {
    "cross-entropy with padding": tokens,
    "class weights": lambda model, batch: tokens(model, batch, weight=WEIGHTS),
    "label smoothing": lambda model, batch: tokens(model, batch, label_smoothing=0.1),
    "mse": lambda model, batch: F.mse_loss(scores := model(batch.x), target(scores, batch).expand_as(scores)),
    "smooth l1": lambda model, batch: F.smooth_l1_loss(s := model(batch.x), target(s, batch).expand_as(s)),
    "binary cross-entropy": lambda model, batch: F.binary_cross_entropy_with_logits(
        model(batch.x)[..., 0], (batch.y > 2).double()
    ),
    "mixup": mixed,
    "hinge": hinge,
    "a factor": lambda model, batch: 0.25 * tokens(model, batch),
    "divided by a number": lambda model, batch: tokens(model, batch) / 3,
    "a penalty": lambda model, batch: (
        hinge(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    ),
    "a mean of means along dimensions": lambda model, batch: model(batch.x).square().mean(-1).mean(),
    "negative log-likelihood": lambda model, batch: F.nll_loss(
        model(batch.x).log_softmax(-1).flatten(0, 1), batch.y.flatten(), ignore_index=reference.IGNORED
    ),
    "two tasks over the same samples": lambda model, batch: hinge(model, batch) + 0.5 * model(batch.x)[..., 1].mean(),
}

# What these are means over cannot be read: every micro-batch has the same weight.
UNREAD: dict[str, Case] = {
    "a mean by hand": Case(by_hand, "DivBackward0"),
    "a custom function": Case(lambda model, batch: Custom.apply(model(batch.x).square()), "CustomBackward"),
    "a sum": Case(lambda model, batch: tokens(model, batch, reduction="sum"), r"is a sum, or contains one \(Nll"),
    "kl_div, batchmean": Case(
        lambda model, batch: F.kl_div(
            s := model(batch.x).log_softmax(-1), torch.full_like(s, 0.2), reduction="batchmean"
        ),
        "DivBackward0",
    ),
    "a contrastive loss": Case(
        lambda model, batch: torch.stack([model(row[None]).square().mean() for row in batch.x]).mean(), "Stack"
    ),
    "a factor that changes": Case(lambda model, batch: len(batch.x) * hinge(model, batch), "not the same expression"),
    "mixup with a new share each time": Case(
        lambda model, batch: mixed(model, batch, 0.1 * len(batch.x)), "not the same expression"
    ),
    "means of different counts": Case(
        lambda model, batch: tokens(model, batch) + hinge(model, batch), "no fixed proportion"
    ),
}


def gradients(
    accelerator: Any, model: nn.Module, loader: Iterable[Batch], loss_of: Loss, **options: Any
) -> list[reference.Named]:
    """The gradients that each optimizer step of a program gets. The options are those of backward()."""
    raw = torch.optim.SGD(model.parameters(), lr=0.0)
    bare, seen = model, []
    raw.register_step_pre_hook(lambda *_: seen.append(reference.gradients_of(bare)))
    model, optimizer = accelerator.prepare(model, raw)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch), **options)
            optimizer.step()
            optimizer.zero_grad()
    return seen


def big_gradient(model: nn.Module, window: Iterable[Batch], loss_of: Loss) -> reference.Named:
    """The gradient of one big batch."""
    model.zero_grad()
    loss_of(model, reference.concatenate(list(window))).backward()
    gradient = reference.gradients_of(model)
    model.zero_grad()
    return gradient
