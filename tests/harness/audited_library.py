"""Programs that use this library: its windows report themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from harness.audited import CLASSES, UNEQUAL, WIDTH, batches, cross_entropy, network, program, right, sgd, step, unknown
from macrobatch import Accumulator, Encoded, MacroStep, contrastive_loss


@right
def an_accumulator() -> None:
    model = network()
    acc = Accumulator(model, sgd(model), steps=4, max_norm=0.1)
    for x, y in acc.batches(list(batches([*UNEQUAL, 3]))):
        acc.backward(cross_entropy(model, x, y))
        acc.step()


@right
def an_accumulator_with_items() -> None:
    model = network()
    acc = Accumulator(model, sgd(model), steps=4, reduction="sum")
    for x, y in acc.batches(list(batches(UNEQUAL))):
        acc.backward(F.cross_entropy(model(x), y, reduction="sum"), items=torch.tensor(len(y)))
        acc.step()


@right
def totals_of_an_accumulator() -> None:
    model = network()
    acc = Accumulator(model, sgd(model), steps=4, reduction="total")
    for x, y in acc.batches(list(batches([4] * 8))):
        acc.backward(F.cross_entropy(model(x), y, reduction="sum") / 16)
        acc.step()


@program("wrong", 0.5, "items that do not fit the loss")
def wrong_totals_of_an_accumulator() -> None:
    model = network()
    acc = Accumulator(model, sgd(model), steps=4, reduction="total")
    for x, y in acc.batches(list(batches([4] * 8))):
        acc.backward(F.cross_entropy(model(x), y, reduction="sum") / 32)
        acc.step()


@unknown
def an_accumulator_that_cannot_read() -> None:
    model = network()
    acc = Accumulator(model, sgd(model), steps=4)
    for x, y in acc.batches(list(batches([4] * 8))):
        losses = F.cross_entropy(model(x), y, reduction="none")
        acc.backward((losses * (y > 0)).sum() / (y > 0).sum().clamp(min=1))
        acc.step()


@right
def a_macro_step() -> None:
    model = network()
    train = MacroStep(model, sgd(model), lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro=3)
    for batch in batches([10, 7]):
        train(batch)


@right
def a_macro_step_that_leaves_the_mean() -> None:
    model = network()
    optimizer = sgd(model)
    train = MacroStep(model, None, lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro=3)
    for batch in batches([10, 7]):
        train(batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        step(optimizer)


@program("wrong", 0.5, "constant factor")
def a_mean_that_was_halved() -> None:
    model = network()
    optimizer = sgd(model)
    train = MacroStep(model, None, lambda m, b: F.cross_entropy(m(b[0]), b[1]), micro=3)
    for batch in batches([12, 12]):
        train(batch)
        for p in model.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]
        step(optimizer)


@right
def terms_of_a_macro_step() -> None:
    model = network()

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        learnt = (batch[1] > 1).sum()
        policy = F.cross_entropy(out, torch.where(batch[1] > 1, batch[1], -100))
        return {"policy": (policy, learnt), "size": (0.1 * out.pow(2).mean(), len(out))}

    train = MacroStep(
        model, sgd(model), loss_fn, micro=3, counts=lambda b: {"policy": (b[1] > 1).sum(), "size": len(b[1])}
    )
    train([torch.randn(12, WIDTH), torch.arange(12) % CLASSES])


@right
def a_loss_of_the_whole_batch() -> None:
    model = network()
    train = MacroStep(
        model, sgd(model), lambda m, b: Encoded(a=m(b[0]), b=m(b[1])), micro=2,
        joint=lambda m, found: contrastive_loss(found.a, found.b, scale=4.0),
    )  # fmt: skip
    train([torch.randn(8, WIDTH), torch.randn(8, WIDTH)])
