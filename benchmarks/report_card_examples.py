"""The loops of well-known examples for PyTorch, written here anew, on tiny models and data."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 4


def batches(count: int = 8, size: int = 4, features: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(size, features), torch.randint(5, (size,))


def network(inputs: int = 6, outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def proximal_policy() -> None:
    """ppo: several epochs of minibatches over the same batch, with a value and an entropy term."""
    actor, critic = network(outputs=2), network(outputs=1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters)
    x, actions, old, gains = torch.randn(16, 6), torch.randint(2, (16,)), torch.randn(16), torch.randn(16)
    for _ in range(3):
        for part in torch.randperm(16).split(4):
            choice = torch.distributions.Categorical(logits=actor(x[part]))
            ratio = (choice.log_prob(actions[part]) - old[part]).exp()
            policy = torch.max(-ratio * gains[part], -ratio.clamp(0.8, 1.2) * gains[part]).mean()
            value = 0.5 * ((critic(x[part])[:, 0] - gains[part]) ** 2).mean()
            optimizer.zero_grad()
            (policy - 0.01 * choice.entropy().mean() + 0.5 * value).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


def second_order() -> None:
    """time_sequence_prediction: LBFGS with a closure."""
    model = network(outputs=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(16, 6), torch.randn(16, 1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def accumulated(divide: bool = True, last: int = 8) -> None:
    """The loop of tutorials: a backward for each micro-batch, a step after four, and at the end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (x, y) in enumerate(batches(last)):
        loss = F.cross_entropy(model(x), y)
        (loss / STEPS if divide else loss).backward()
        if (index + 1) % STEPS == 0 or index + 1 == last:
            optimizer.step()
            optimizer.zero_grad()


def mixed_precision() -> None:
    """The recipe for automatic mixed precision with accumulation: scale, unscale, clip, step."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / STEPS
        scaler.scale(loss).backward()
        if (index + 1) % STEPS == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


ROWS: list[tuple[str, str, str, Any]] = [
    ("torch", "examples, time_sequence_prediction", "LBFGS", second_order),
    ("torch", "proximal policy optimization", "3 epochs over a batch", proximal_policy),
    ("torch", "accumulation of tutorials", "4 steps", accumulated),
    ("torch", "accumulation of tutorials", "4 steps, 6 batches", lambda: accumulated(last=6)),
    ("torch", "accumulation of tutorials", "4 steps, without dividing", lambda: accumulated(divide=False)),
    ("torch", "recipe for mixed precision", "4 steps", mixed_precision),
]
