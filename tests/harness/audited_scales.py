"""Factors of a loss: its own constants, the scale of a GradScaler, and what comes from accumulating."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from harness.audited import CLASSES, EQUAL, cross_entropy, network, program, right, sgd, simple, unknown, windows


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
