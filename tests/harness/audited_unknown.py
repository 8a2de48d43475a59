"""Programs that cannot be seen whole: none of them may be called exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.audited import CLASSES, EQUAL, batches, cross_entropy, network, right, sgd, simple, step, unknown, windows


@unknown
def masked_mean() -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask = (y > 0).float()
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum() / 4

    simple([4, 6, 8, 2] * 2, 4, loss_of)


@unknown
def noise_on_the_gradients() -> None:
    def blur(model: nn.Module, _: object) -> None:
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn_like(p))  # type: ignore[union-attr]

    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=blur)


@unknown
def decay_in_the_gradients() -> None:
    def decay(model: nn.Module, _: object) -> None:
        for p in model.parameters():
            p.grad.add_(p.detach(), alpha=0.1)  # type: ignore[union-attr]

    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=decay)


@unknown
def hooks_that_clamp() -> None:
    model = network()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        step(optimizer)


@unknown
def one_layer_scaled() -> None:
    def scale(model: Any, _: object) -> None:
        model[0].weight.grad.mul_(0.5)

    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=scale)


class Doubled(torch.autograd.Function):
    """A loss of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mean()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Tensor:
        return seed.expand(4, CLASSES) / 20


@unknown
def a_function_of_ones_own() -> None:
    simple(EQUAL, 4, lambda m, x, y: Doubled.apply(m(x)) / 4)


@unknown
def gradients_from_elsewhere() -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in batches(EQUAL):
        cross_entropy(model, x, y).backward()
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()


@unknown
def no_step_at_all() -> None:
    model = network()
    for x, y in batches(EQUAL):
        cross_entropy(model, x, y).backward()


@unknown
def sharpness_aware() -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in batches(EQUAL):
        moved = []
        for turn in range(2):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            if turn == 0:
                with torch.no_grad():
                    moved = [0.05 * p.grad for p in model.parameters()]  # type: ignore[operator]
                    for p, way in zip(model.parameters(), moved, strict=True):
                        p.add_(way)
        with torch.no_grad():
            for p, way in zip(model.parameters(), moved, strict=True):
                p.sub_(way)
        optimizer.step()


def checkpointed(use_reentrant: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            out = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
            (F.cross_entropy(out, y) / 4).backward()
        step(optimizer)


@unknown
def a_model_inside_of_reentrant_checkpointing() -> None:
    checkpointed(use_reentrant=True)


@right
def a_model_inside_of_checkpointing() -> None:
    checkpointed(use_reentrant=False)
