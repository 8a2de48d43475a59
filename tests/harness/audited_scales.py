"""Factors of a loss: its own constants, the scale of a GradScaler, and what comes from accumulating."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.audited import CLASSES, EQUAL, cross_entropy, network, program, right, sgd, simple, step, unknown, windows


def scaled(
    *, scale: float = 1024.0, weight: float = 1.0, max_norm: float | None = None, unscales: bool = False
) -> None:
    """The recipe for float16: windows of four, each loss divided by four."""
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            scaler.scale(weight * cross_entropy(model, x, y) / 4).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@right
def a_small_loss_scale() -> None:
    scaled(scale=4.0)


@right
def a_loss_scale_that_undoes_a_constant() -> None:
    scaled(scale=2.0, weight=0.5)


@right
def clipped_after_it_was_scaled() -> None:
    scaled(max_norm=0.1, unscales=True)


@program("wrong", 1.0, "clipped while scaled")
def clipped_while_it_was_scaled() -> None:
    scaled(max_norm=1.0)


@right
def a_power_of_two_as_a_weight() -> None:
    simple(EQUAL, 4, lambda m, x, y: 128 * cross_entropy(m, x, y) / 4)


@right
def a_weight_and_a_share_are_multiplied() -> None:
    simple(EQUAL, 4, lambda m, x, y: 0.3 * cross_entropy(m, x, y) * 0.25)


@unknown
def a_half_and_a_half() -> None:
    simple(EQUAL, 2, lambda m, x, y: 0.5 * F.mse_loss(m(x), x[:, :CLASSES]) * (1 / 2))


@unknown
def divided_by_two_and_by_two() -> None:
    simple(EQUAL, 2, lambda m, x, y: F.mse_loss(m(x), x[:, :CLASSES]) / 2 / 2)


@unknown
def twice_the_loss_in_two_micro_batches() -> None:
    simple(EQUAL, 2, lambda m, x, y: 2 * cross_entropy(m, x, y) / 2)


def weighed(loss_of: Callable[[Any, Tensor, Tensor], Tensor], steps: int = 3, more: float = 1.0) -> None:
    """Micro-batches weighed by their items; the sizes of a window are 4, 1, 3."""
    model = network()
    optimizer = sgd(model)
    for window in windows([4, 1, 3, 2] * 3, steps):
        items = sum(len(y) for _, y in window)
        for x, y in window:
            (loss_of(model, model(x), y) * len(y) / (more * items)).backward()
        step(optimizer)


@right
def smoothed_labels_weighed_by_items() -> None:
    weighed(lambda m, out, y: F.cross_entropy(out, y, label_smoothing=0.1))


@right
def a_half_weighed_by_items() -> None:
    weighed(lambda m, out, y: 0.5 * F.cross_entropy(out, y))


@right
def a_penalty_on_outputs_weighed_by_items() -> None:
    weighed(lambda m, out, y: F.cross_entropy(out, y) + 0.01 * out.square().mean())


@right
def a_penalty_on_weights_weighed_by_items() -> None:
    weighed(lambda m, out, y: F.cross_entropy(out, y) + 0.01 * m[0].weight.square().sum())


@right
def two_losses_weighed_by_items() -> None:
    weighed(lambda m, out, y: 0.7 * F.cross_entropy(out, y) + 0.3 * F.mse_loss(out, out.detach() + 1))


@unknown
def a_half_weighed_by_items_in_two_micro_batches() -> None:
    weighed(lambda m, out, y: 0.5 * F.cross_entropy(out, y), 2)


@program("wrong", 0.8, "constant factor")
def weighed_by_more_items_than_there_are() -> None:
    weighed(lambda m, out, y: F.cross_entropy(out, y), 4, more=1.25)


def mixed(steps: int, divisor: float) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        share, out = torch.rand(()).item(), model(x)
        loss: Tensor = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))
        return loss / divisor

    simple(EQUAL, steps, loss_of)


@right
def a_share_drawn_in_each_micro_batch() -> None:
    mixed(4, 4)


@program("wrong", 0.25, "divided twice")
def a_share_drawn_and_divided_twice() -> None:
    mixed(4, 16)
