"""Wrong programs, with their factor and the causes to be named."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.audited import (
    CLASSES,
    EQUAL,
    UNEQUAL,
    WIDTH,
    batches,
    cross_entropy,
    network,
    program,
    sgd,
    simple,
    step,
    windows,
)

MEAN, SHORT, UNDIVIDED, TWICE = "mean of means", "short window", "not divided", "divided twice"


@program("wrong", 1.0, MEAN)
def mean_of_means() -> None:
    simple(UNEQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4)


@program("wrong", 1.0, MEAN)
def mean_of_squares() -> None:
    simple(UNEQUAL, 4, lambda m, x, y: F.mse_loss(m(x)[:, 0], y.float()) / 4)


@program("wrong", 1.0, MEAN)
def mean_over_tokens() -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.where(torch.arange(len(y)) < len(y) // 2, -100, y)
        return F.cross_entropy(model(x), hidden) / 4

    simple([4, 6, 8, 2] * 2, 4, loss_of)


@program("wrong", 1.0, MEAN)
def sums_divided_by_their_own_tokens() -> None:
    simple(UNEQUAL, 4, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(y) / 4)


@program("wrong", 0.5, SHORT)
def half_a_last_window() -> None:
    simple([4] * 6, 4, lambda m, x, y: cross_entropy(m, x, y) / 4)


@program("wrong", 0.75, SHORT)
def only_short_windows() -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in batches([4] * 3):
            (cross_entropy(model, x, y) / 4).backward()
        step(optimizer)


@program("wrong", 0.25, SHORT, MEAN)
def mean_of_means_and_a_short_window() -> None:
    simple([4, 1, 3, 2, 5], 4, lambda m, x, y: cross_entropy(m, x, y) / 4)


@program("wrong", 4.0, UNDIVIDED)
def not_divided() -> None:
    simple(EQUAL, 4, cross_entropy)


@program("wrong", 4.0, UNDIVIDED)
def not_divided_with_a_weight() -> None:
    simple(EQUAL, 4, lambda m, x, y: 0.3 * cross_entropy(m, x, y))


@program("wrong", 0.25, TWICE)
def divided_twice() -> None:
    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4 / 4)


@program("wrong", 0.25, TWICE)
def loss_and_gradients_divided() -> None:
    def divide(model: nn.Module, _: object) -> None:
        for p in model.parameters():
            p.grad.div_(4)  # type: ignore[union-attr]

    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=divide)


@program("wrong", None, "clip per micro-batch")
def clipped_in_every_micro_batch() -> None:
    simple(
        EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4,
        each=lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    )  # fmt: skip


@program("wrong", 0.25, "gradients cleared inside the window")
def cleared_in_every_micro_batch() -> None:
    model = network()
    optimizer = sgd(model)
    for index, (x, y) in enumerate(batches(EQUAL)):
        optimizer.zero_grad()
        (cross_entropy(model, x, y) / 4).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()


@program("wrong", 1.0, "samples left out")
def what_is_left_at_the_end_of_an_epoch() -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batches([4] * 6)):
            (cross_entropy(model, x, y) / 4).backward()
            if (index + 1) % 4 == 0:
                step(optimizer)


@program("wrong", 2.0, "samples used twice")
def a_second_backward_of_the_same_loss() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            loss = cross_entropy(model, x, y) / 4
            loss.backward(retain_graph=True)
            loss.backward()
        step(optimizer)


@program("wrong", 1.0, "gradients left over")
def never_cleared() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        optimizer.step()


@program("wrong", 1.0, "window closed twice")
def stepped_twice() -> None:
    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=lambda _, optimizer: optimizer.step())


@program("wrong", 1.0, "scheduler per micro-batch")
def scheduler_in_every_micro_batch() -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
            scheduler.step()
        step(optimizer)


@program("wrong", 0.8, "items that do not fit the loss")
def labels_counted_before_the_shift() -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(2):
        for _ in range(2):
            x, labels = torch.randn(3, 5, WIDTH), torch.randint(0, CLASSES, (3, 5))
            logits = model(x)[:, :-1].reshape(-1, CLASSES)
            (F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / (2 * labels.numel())).backward()
        step(optimizer)


@program("wrong", 4.0, UNDIVIDED)
def auxiliary_loss_times_steps() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        total = sum(len(y) for _, y in window)
        for x, y in window:
            out = model(x)
            (F.cross_entropy(out, y, reduction="sum") / total + 0.02 * out.pow(2).mean()).backward()
        step(optimizer)


@program("wrong", 0.5, SHORT)
def scaled_short_window() -> None:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4096.0)
    for window in windows([4] * 6, 4):
        for x, y in window:
            scaler.scale(cross_entropy(model, x, y) / 4).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program("wrong", 3.0, UNDIVIDED)
def gan_with_undivided_windows() -> None:
    maker, judge = network(WIDTH), network(1)
    for_maker, for_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    for window in windows([4] * 6, 3):
        for_judge.zero_grad()
        for x, _ in window:
            F.binary_cross_entropy_with_logits(judge(x), torch.ones(len(x), 1)).backward()
            made = maker(torch.randn(len(x), WIDTH)).detach()
            F.binary_cross_entropy_with_logits(judge(made), torch.zeros(len(x), 1)).backward()
        for_judge.step()
        for_maker.zero_grad()
        F.binary_cross_entropy_with_logits(judge(maker(torch.randn(4, WIDTH))), torch.ones(4, 1)).backward()
        for_maker.step()


@program("wrong", 0.25, TWICE)
def gradient_argument_and_division() -> None:
    simple_with = network()
    optimizer = sgd(simple_with)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(simple_with, x, y) / 4).backward(torch.tensor(0.25))
        step(optimizer)


@program("wrong", 4.0, UNDIVIDED)
def sums_in_a_buffer() -> None:
    model = network()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    for window in windows(EQUAL, 4):
        sums = [torch.zeros_like(p) for p in parameters]
        for x, y in window:
            found = torch.autograd.grad(cross_entropy(model, x, y), parameters)
            sums = [a + b for a, b in zip(sums, found, strict=True)]
        for total, p in zip(sums, parameters, strict=True):
            p.grad = total
        step(optimizer)


@program("wrong", 0.5, SHORT)
def carried_steps_of_a_ramp() -> None:
    model = network()
    optimizer = sgd(model)
    for count in (4, 4, 2):
        for x, y in batches([3] * count):
            (cross_entropy(model, x, y) / 4).backward()
        step(optimizer)


@program("wrong", None, "divided inside the window")
def divided_after_every_backward() -> None:
    def divide(model: nn.Module, _: object) -> None:
        for p in model.parameters():
            p.grad.div_(4)  # type: ignore[union-attr]

    simple(EQUAL, 4, cross_entropy, each=divide)
