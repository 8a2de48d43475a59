"""Programs that are written in other ways than most: the right ones must not be refused, nor the wrong ones missed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.audited import (
    CLASSES,
    EQUAL,
    UNEQUAL,
    WIDTH,
    batches,
    cross_entropy,
    network,
    program,
    right,
    sgd,
    simple,
    step,
    unknown,
    windows,
)


@program("wrong", 0.25, "short window")
def a_step_after_the_first_micro_batch() -> None:
    model = network()
    optimizer = sgd(model)
    for index, (x, y) in enumerate(batches([4] * 9)):
        (cross_entropy(model, x, y) / 4).backward()
        if index % 4 == 0:
            step(optimizer)


@program("wrong", None, "gradients cleared inside the window")
def cleared_before_the_step() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        optimizer.zero_grad()
        optimizer.step()


@program("wrong", None, "clip per micro-batch")
def clipped_by_value_in_every_micro_batch() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
        step(optimizer)


@program("wrong", 4.0, "not divided")
def the_last_backward_in_another_line_undivided() -> None:
    model = network()
    optimizer = sgd(model)
    for index, (x, y) in enumerate(batches(EQUAL)):
        loss = cross_entropy(model, x, y)
        if (index + 1) % 4:
            loss.backward()
        else:
            loss.backward()
            step(optimizer)


@right
def the_last_backward_in_another_line() -> None:
    model = network()
    optimizer = sgd(model)
    for index, (x, y) in enumerate(batches(EQUAL)):
        loss = cross_entropy(model, x, y) / 4
        if (index + 1) % 4:
            loss.backward()
        else:
            loss.backward()
            step(optimizer)


@right
def a_head_for_each_task() -> None:
    trunk, heads = network(8), [nn.Linear(8, CLASSES) for _ in range(2)]
    optimizer = torch.optim.Adam([p for module in (trunk, *heads) for p in module.parameters()])
    for x, y in batches(EQUAL):
        for head in heads:
            F.cross_entropy(head(trunk(x)), y).backward()
        step(optimizer)


@right
def what_is_left_goes_into_the_next_epoch() -> None:
    model = network()
    optimizer, count = sgd(model), 0
    for _ in range(2):
        for x, y in batches([4] * 6):
            (cross_entropy(model, x, y) / 4).backward()
            count += 1
            if count % 4 == 0:
                step(optimizer)


@right
def reentrant_checkpoints() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), network())
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
            (F.cross_entropy(model[1](hidden), y) / 4).backward()
        step(optimizer)


@right
def a_constant_loss_scale_by_hand() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (0.3 * cross_entropy(model, x, y) * 128 / 4).backward()
        for p in model.parameters():
            p.grad = p.grad / 128  # type: ignore[assignment, operator]
        step(optimizer)


@right
def a_penalty_that_grows() -> None:
    model = network()
    optimizer = sgd(model)
    for number, window in enumerate(windows(EQUAL * 2, 4)):
        for x, y in window:
            out = model(x)
            ((F.cross_entropy(out, y) + 0.03 * (number + 1) * out.pow(2).mean()) / 4).backward()
        step(optimizer)


@right
def windows_of_a_number_of_tokens() -> None:
    model = network()
    optimizer, tokens = sgd(model), 0
    for x, y in batches(UNEQUAL * 2):
        F.cross_entropy(model(x), y, reduction="sum").backward()
        tokens += len(y)
        if tokens >= 8:
            for p in model.parameters():
                p.grad.div_(tokens)  # type: ignore[union-attr]
            step(optimizer)
            tokens = 0


@right
def a_new_optimizer() -> None:
    model = network()
    for rate in (0.1, 0.01):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for window in windows(EQUAL, 4):
            for x, y in window:
                (cross_entropy(model, x, y) / 4).backward()
            step(optimizer)


@right
def weights_of_classes() -> None:
    weights = torch.rand(CLASSES) + 0.5
    model = network()
    optimizer = sgd(model)
    for window in windows(UNEQUAL, 4):
        total = torch.stack([weights[y].sum() for _, y in window]).sum()
        for x, y in window:
            (F.cross_entropy(model(x), y, weight=weights, reduction="sum") / total).backward()
        step(optimizer)


@right
def gradients_for_a_look_between_windows() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            (cross_entropy(model, x, y) / 4).backward()
        step(optimizer)
        torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))


@right
def layers_unfrozen_later() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for window in windows(EQUAL, 4):
            for x, y in window:
                (cross_entropy(model, x, y) / 4).backward()
            step(optimizer)
        model[0].requires_grad_(True)


@right
def a_micro_batch_without_labels() -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(2):
        for learnt in (3, 0, 2):
            y = torch.where(torch.arange(4) < learnt, torch.arange(4), -100)
            (F.cross_entropy(model(torch.randn(4, WIDTH)), y, reduction="sum") / 5).backward()
        step(optimizer)


@right
def sparse_gradients() -> None:
    table, head = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES)
    first, second = torch.optim.SparseAdam(table.parameters()), torch.optim.Adam(head.parameters())
    for window in windows(EQUAL, 4):
        for _, y in window:
            (F.cross_entropy(head(table(torch.randint(50, (len(y),)))), y) / 4).backward()
        step(first)
        step(second)


@right
def two_losses_in_one_backward() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            out = model(x)
            torch.autograd.backward([F.cross_entropy(out, y) / 4, out.pow(2).mean() / 4])
        step(optimizer)


@right
def a_regulariser_once_a_window() -> None:
    model = network()
    optimizer = sgd(model)
    for window in windows(UNEQUAL, 4):
        total = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
        (1e-3 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()).backward()
        step(optimizer)


@right
def half_of_the_squares_in_two_micro_batches() -> None:
    simple(EQUAL, 2, lambda m, x, y: 0.5 * F.mse_loss(m(x).sum(1), y.float()) / 2)


@right
def squares_over_two_in_four_micro_batches() -> None:
    simple(EQUAL, 4, lambda m, x, y: F.mse_loss(m(x).sum(1), y.float()) / 2 / 4)


# ------------------------------------------------------------------ sums over features, divided by samples


@right
def squared_errors_of_each_sample() -> None:
    simple(EQUAL, 4, lambda m, x, y: F.mse_loss(m(x)[:, :3], x[:, :3], reduction="sum") / len(x) / 4)


@right
def as_many_features_as_micro_batches() -> None:
    simple(EQUAL, 4, lambda m, x, y: F.mse_loss(m(x)[:, :4], x[:, :4], reduction="sum") / len(x) / 4)


@unknown
def entropy_of_each_sequence() -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = m(x).unsqueeze(1).expand(-1, 6, -1)
        return F.cross_entropy(scores.flatten(0, 1), y.repeat_interleave(6), reduction="sum") / len(x) / 4

    simple(EQUAL, 4, loss)


@right
def evidence_bound() -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)
        rebuilt = F.binary_cross_entropy_with_logits(out, x[:, :CLASSES].sigmoid(), reduction="sum") / len(x)
        divergence = -0.5 * (1 + out - out.exp()).sum(1).mean()
        return (rebuilt + divergence) / 4

    simple(EQUAL, 4, loss)


@program("wrong", None, "mean of means")
def errors_of_each_sample_in_unequal_micro_batches() -> None:
    simple(UNEQUAL, 4, lambda m, x, y: F.mse_loss(m(x), x[:, :CLASSES], reduction="sum") / len(x) / 4)


@program("wrong", 1024.0, "constant factor")
def scaled_and_never_divided() -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, y in window:
            scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
        step(optimizer)  # not by the scaler


@right
def two_losses_of_a_critic_by_a_helper() -> None:
    model = network(1)
    optimizer = sgd(model)

    def add_loss(x: Tensor, wanted: float) -> None:
        scores = model(x).squeeze(1)
        F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted)).backward()

    for x, _ in batches(EQUAL):
        add_loss(x, 1.0)
        add_loss(x + 1, 0.0)
        step(optimizer)
