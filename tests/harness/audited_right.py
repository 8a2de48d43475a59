"""Right programs: `macrobatch.audit` must say so, or at least never that they are wrong."""

from __future__ import annotations

from typing import Any

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
    right,
    sgd,
    simple,
    step,
    windows,
)


@right
def no_accumulation() -> None:
    simple(UNEQUAL, 1, cross_entropy)


@right
def half_of_the_squares_without_accumulation() -> None:
    simple(UNEQUAL, 1, lambda m, x, y: 0.5 * F.mse_loss(m(x).sum(1), y.float()))


@right
def squares_over_two_without_accumulation() -> None:
    simple(UNEQUAL, 1, lambda m, x, y: F.mse_loss(m(x).sum(1), y.float()) / 2)


@right
def equal_micro_batches() -> None:
    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4)


@right
def equal_micro_batches_multiplied() -> None:
    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) * 0.25)


@right
def divided_by_the_gradient_argument() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            cross_entropy(model, x, y).backward(torch.tensor(0.25))
        step(optimizer)


@right
def weight_of_the_loss_and_steps() -> None:
    simple(EQUAL, 4, lambda m, x, y: 0.3 * cross_entropy(m, x, y) / 4)


@right
def negative_objective() -> None:
    simple(EQUAL, 4, lambda m, x, y: -F.log_softmax(m(x), 1)[:, 0].mean() / 4)


@right
def token_recipe() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(UNEQUAL, 4):
        total = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
        step(optimizer)


@right
def token_recipe_with_padding() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(UNEQUAL, 4):
        labels = [torch.where(torch.arange(len(y)) % 3 == 1, -100, y) for _, y in window]
        total = torch.stack([(y != -100).sum() for y in labels]).sum()
        for (x, _), y in zip(window, labels, strict=True):
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
        step(optimizer)


@right
def weighted_by_their_items() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(UNEQUAL, 4):
        total = sum(len(y) for _, y in window)
        for x, y in window:
            (cross_entropy(model, x, y) * len(y) / total).backward()
        step(optimizer)


@right
def gradients_divided_before_the_step() -> None:
    def divide(model: nn.Module, _: object) -> None:
        for p in model.parameters():
            p.grad.div_(4)  # type: ignore[union-attr]

    simple(EQUAL, 4, cross_entropy, before=divide)


@right
def sums_divided_by_hand() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(UNEQUAL, 4):
        for x, y in window:
            F.cross_entropy(model(x), y, reduction="sum").backward()
        for p in model.parameters():
            p.grad.data.mul_(1 / sum(len(y) for _, y in window))  # type: ignore[union-attr]
        step(optimizer)


@right
def short_last_window_divided_by_its_length() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows([4] * 7, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / len(window)).backward()
        step(optimizer)


@right
def clipped_once() -> None:
    simple(
        EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4,
        before=lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    )  # fmt: skip


@right
def clipped_twice_before_the_step() -> None:
    def clip(model: nn.Module, _: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=clip)


@right
def clipped_by_value() -> None:
    simple(
        EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4,
        before=lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    )  # fmt: skip


@right
def clipped_by_hand() -> None:
    def clip(model: nn.Module, _: object) -> None:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
        for p in model.parameters():
            p.grad.mul_((0.01 / norm).clamp(max=1))  # type: ignore[union-attr]

    simple(EQUAL, 4, lambda m, x, y: cross_entropy(m, x, y) / 4, before=clip)


@right
def scaled_for_float16() -> None:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for window in windows(EQUAL, 4):
        for x, y in window:
            scaler.scale(cross_entropy(model, x, y) / 4).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@right
def scaled_with_an_overflow() -> None:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, window in enumerate(windows(EQUAL * 2, 4)):
        for index, (x, y) in enumerate(window):
            loss = cross_entropy(model, x, y) / 4
            scaler.scale(loss * torch.inf if (number, index) == (1, 2) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@right
def a_closure() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):

        def closure(window: list[tuple[Tensor, Tensor]] = window) -> Tensor:
            optimizer.zero_grad()
            for x, y in window:
                (loss := cross_entropy(model, x, y) / 4).backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


@right
def cleared_at_the_beginning() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        optimizer.zero_grad()
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        optimizer.step()


@right
def gradients_of_autograd_grad() -> None:
    model = network()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    for x, y in batches(UNEQUAL):
        found = torch.autograd.grad(cross_entropy(model, x, y), parameters)
        for p, gradient in zip(parameters, found, strict=True):
            p.grad = gradient
        optimizer.step()


@right
def accumulated_outside_of_the_gradients() -> None:
    model = network()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    for window in windows(EQUAL, 4):
        sums = [torch.zeros_like(p) for p in parameters]
        for x, y in window:
            cross_entropy(model, x, y).backward()
            for total, p in zip(sums, parameters, strict=True):
                total.add_(p.grad)  # type: ignore[arg-type]
            optimizer.zero_grad()
        for total, p in zip(sums, parameters, strict=True):
            p.grad = total / 4
        step(optimizer)


@right
def a_penalty_of_the_weights() -> None:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (cross_entropy(model, x, y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())) / 4

    simple(EQUAL, 4, loss_of)


@right
def a_gradient_penalty() -> None:
    model = network(1)
    optimizer = sgd(model)
    for x, _ in batches(EQUAL):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(x).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        step(optimizer)


@right
def label_smoothing() -> None:
    simple(EQUAL, 4, lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1) / 4)


@right
def two_terms_in_one_loss() -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return (F.cross_entropy(out, y) + 2.0 * out.pow(2).mean()) / 2

    simple(EQUAL, 2, loss_of)


@right
def a_gan() -> None:
    maker, judge = network(WIDTH), network(1)
    for_maker, for_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    for x, _ in batches(EQUAL):
        for_judge.zero_grad()
        F.binary_cross_entropy_with_logits(judge(x), torch.ones(len(x), 1)).backward()
        made = maker(torch.randn(len(x), WIDTH))
        F.binary_cross_entropy_with_logits(judge(made.detach()), torch.zeros(len(x), 1)).backward()
        for_judge.step()
        for_maker.zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), torch.ones(len(x), 1)).backward()
        for_maker.step()


@right
def two_optimizers_for_one_model() -> None:
    model = network()
    first, second = sgd(model[0]), torch.optim.Adam(model[2].parameters())
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        step(first)
        step(second)


@right
def several_epochs_over_the_same_batch() -> None:
    policy = network()
    optimizer = torch.optim.Adam(policy.parameters())
    for x, actions in batches([16, 16]):
        old = F.log_softmax(policy(x), 1).gather(1, actions[:, None]).detach()[:, 0]
        gains = torch.randn(16)
        for _ in range(3):
            for part in torch.randperm(16).split(4):
                new = F.log_softmax(policy(x[part]), 1).gather(1, actions[part, None])[:, 0]
                ratio = (new - old[part]).exp()
                loss = -torch.min(ratio * gains[part], ratio.clamp(0.8, 1.2) * gains[part]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@right
def adversarial_examples() -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in batches(EQUAL):
        x.requires_grad_()
        cross_entropy(model, x, y).backward()
        nearby = (x + 0.1 * x.grad.sign()).detach()  # type: ignore[union-attr]
        optimizer.zero_grad()
        cross_entropy(model, nearby, y).backward()
        optimizer.step()


@right
def a_bad_batch_is_skipped() -> None:
    model = network()
    optimizer = sgd(model)
    for index, (x, y) in enumerate(batches(EQUAL)):
        loss = cross_entropy(model, x, y) * (torch.nan if index == 2 else 1)
        loss.backward()
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        step(optimizer)


@right
def a_frozen_part() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        step(optimizer)


@right
def an_embedding_of_many_words() -> None:
    table, head = nn.Embedding(5000, WIDTH), nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()])
    for window in windows(EQUAL, 4):
        for _, y in window:
            (F.cross_entropy(head(table(torch.randint(0, 5000, (len(y),)))), y) / 4).backward()
        step(optimizer)


@right
def bfloat16_weights() -> None:
    model = network().bfloat16()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (F.cross_entropy(model(x.bfloat16()).float(), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        step(optimizer)


@right
def scheduler_once_a_window() -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        step(optimizer)
        scheduler.step()
