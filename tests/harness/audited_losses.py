"""Several losses of one step: added up by intent, by mistake, or in a way that cannot be told."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.audited import CLASSES, EQUAL, WIDTH, batches, network, program, right, sgd, step, unknown, windows


def scored(scores: Tensor, wanted: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


def adversaries() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    maker, judge = network(WIDTH), network(1)
    return maker, judge, sgd(maker), sgd(judge)


@unknown
def a_gan_in_a_loop() -> None:
    maker, judge, for_maker, for_judge = adversaries()
    for x, _ in batches(EQUAL):
        made = maker(torch.randn_like(x))
        for seen, wanted in ((x, 1.0), (made.detach(), 0.0)):
            scored(judge(seen), wanted).backward()
        step(for_judge)
        scored(judge(made), 1.0).backward()
        step(for_maker)
        for_judge.zero_grad()


@unknown
def a_gan_of_least_squares_in_a_loop() -> None:
    maker, judge, for_maker, for_judge = adversaries()
    for x, _ in batches([4] * 4 + [1] * 4):
        made = maker(torch.randn(3, WIDTH))
        for_judge.zero_grad()
        for seen, wanted in ((x, 1.0), (made.detach(), 0.0)):
            (judge(seen) - wanted).square().mean().backward()
        for_judge.step()
        for_maker.zero_grad()
        (judge(made) - 1).square().mean().backward()
        for_maker.step()


@unknown
def a_gan_with_noisy_labels() -> None:
    maker, judge, _, for_judge = adversaries()
    for x, _ in batches(EQUAL):
        made = maker(torch.randn_like(x)).detach()
        for seen, least in ((x, 0.8), (made, 0.0)):
            F.binary_cross_entropy_with_logits(judge(seen), least + 0.2 * torch.rand(len(x), 1)).backward()
        step(for_judge)


@right
def a_critic_in_a_loop() -> None:
    maker, judge, _, for_judge = adversaries()
    for x, _ in batches(EQUAL):
        made = maker(torch.randn_like(x)).detach()
        for seen, sign in ((x, -1), (made, 1)):
            (sign * judge(seen).mean()).backward()
        step(for_judge)


@right
def hinges_in_a_loop() -> None:
    maker, judge, _, for_judge = adversaries()
    for x, _ in batches(EQUAL):
        made = maker(torch.randn_like(x)).detach()
        for seen, sign in ((x, -1), (made, 1)):
            F.relu(1 + sign * judge(seen)).mean().backward()
        step(for_judge)


@right
def a_critic_with_a_gradient_penalty() -> None:
    maker, judge, _, for_judge = adversaries()
    for x, _ in batches(EQUAL):
        made = maker(torch.randn_like(x)).detach()
        judge(x).mean().backward(torch.tensor(-1.0))
        judge(made).mean().backward(torch.tensor(1.0))
        between = ((x + made) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        (10 * (slope.norm(2, dim=1) - 1).pow(2).mean()).backward()
        step(for_judge)


@unknown
def the_gradient_of_a_generator_in_the_judge() -> None:
    maker, judge, for_maker, for_judge = adversaries()
    for x, _ in batches(EQUAL):
        made = maker(torch.randn_like(x))
        scored(judge(x), 1.0).backward()
        scored(judge(made.detach()), 0.0).backward()
        step(for_judge)
        scored(judge(made), 1.0).backward()  # also adds to the judge, and nobody clears that
        step(for_maker)


@unknown
def the_gradient_of_an_actor_in_the_critic() -> None:
    actor, critic = network(2), nn.Linear(WIDTH + 2, 1)
    for_actor, for_critic = sgd(actor), sgd(critic)
    for x, _ in batches(EQUAL):
        F.mse_loss(critic(torch.cat([x, torch.randn(len(x), 2)], 1)), torch.randn(len(x), 1)).backward()
        (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
        step(for_critic)
        step(for_actor)


@right
def losses_of_other_kinds_in_a_loop() -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in batches(EQUAL):
        for term in (lambda s, y=y: F.cross_entropy(s, y), lambda s: 0.1 * s.pow(2).mean(), lambda s: s.abs().mean()):
            term(model(x)).backward()
        step(optimizer)


@unknown
def two_views_of_the_same_samples() -> None:
    model = network()
    optimizer = sgd(model)
    for x, y in batches(EQUAL):
        for view in (x, x + 0.1 * torch.randn_like(x)):
            F.cross_entropy(model(view), y).backward()
        step(optimizer)


@unknown
def two_batches_in_two_lines() -> None:
    model = network()
    optimizer = sgd(model)
    for (x, y), (z, w) in windows(EQUAL, 2):
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(z), w).backward()
        step(optimizer)


@unknown
def an_expert_for_each_micro_batch() -> None:
    experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))
    optimizer = sgd(experts)
    for (x, y), expert in zip(batches([4] * 3), experts, strict=True):
        F.cross_entropy(expert(x), y).backward()
    step(optimizer)


@program("wrong", 4.0, "not divided")
def heads_in_undivided_windows() -> None:
    trunk, heads = network(8), nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(2))
    optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
    for window in windows(EQUAL, 4):
        for x, y in window:
            for head in heads:
                F.cross_entropy(head(trunk(x)), y).backward()
        step(optimizer)


@program("wrong", 2.0, "not divided")
def undivided_terms_of_a_policy() -> None:
    actor, critic = network(2), network(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    for window in windows(EQUAL, 2):
        for x, _ in window:
            gains, choice = torch.randn(len(x)), torch.distributions.Categorical(logits=actor(x))
            policy = -(choice.log_prob(choice.sample()) * gains).mean()
            value = 0.5 * F.mse_loss(critic(x)[:, 0], gains)
            (policy + value - 0.01 * choice.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.1)
        nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
        step(optimizer)


@unknown
def sums_that_nothing_divides() -> None:
    model = network(1)
    optimizer = sgd(model)
    for window in windows(EQUAL, 4):
        for x, _ in window:
            F.mse_loss(model(x), torch.randn(len(x), 1), reduction="sum").backward()
        step(optimizer)
