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


def classify_digits() -> None:
    """mnist: one step for each batch."""
    model = network()
    optimizer = torch.optim.Adadelta(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.nll_loss(F.log_softmax(model(x), dim=1), y).backward()
        optimizer.step()


def adversarial_pair() -> None:
    """dcgan: two backwards for the discriminator, one for the generator."""
    generator, discriminator = network(outputs=6), network(outputs=1)
    of_generator, of_discriminator = (torch.optim.Adam(m.parameters()) for m in (generator, discriminator))
    criterion = nn.BCEWithLogitsLoss()
    for x, _ in batches():
        real, fake = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        discriminator.zero_grad()
        criterion(discriminator(x), real).backward()
        made = generator(torch.randn_like(x))
        criterion(discriminator(made.detach()), fake).backward()
        of_discriminator.step()
        generator.zero_grad()
        criterion(discriminator(made), real).backward()
        of_generator.step()


def language_model() -> None:
    """word_language_model: windows of text, clipped gradients, plain steps."""
    table, rnn, head = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)
    parameters = [*table.parameters(), *rnn.parameters(), *head.parameters()]
    optimizer, state = torch.optim.SGD(parameters, lr=0.5), None
    for _ in range(6):
        text = torch.randint(20, (8, 4))
        state = None if state is None else tuple(part.detach() for part in state)
        out, state = rnn(table(text[:-1]), state)
        optimizer.zero_grad()
        F.nll_loss(F.log_softmax(head(out), -1).view(-1, 20), text[1:].view(-1)).backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()


def variational_autoencoder() -> None:
    """vae: the sum over a batch, as the example has it."""
    encoder, decoder = network(outputs=4), network(2, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for x, _ in batches():
        mean, log_variance = encoder(x).chunk(2, 1)
        found = decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        loss = F.binary_cross_entropy_with_logits(found, x.sigmoid(), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def policy_gradient() -> None:
    """reinforce: the losses of an episode are added up."""
    policy = network(outputs=2)
    optimizer = torch.optim.Adam(policy.parameters())
    for episode in range(6):
        losses = []
        for _ in range(3 + episode):
            choice = torch.distributions.Categorical(logits=policy(torch.randn(1, 6)))
            losses.append(-choice.log_prob(choice.sample()) * torch.randn(()))
        optimizer.zero_grad()
        torch.cat(losses).sum().backward()
        optimizer.step()


def actor_critic() -> None:
    """actor_critic: two kinds of losses of an episode are added up."""
    actor, critic = network(outputs=2), network(outputs=1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    for episode in range(4):
        x, gains = torch.randn(3 + episode, 6), torch.randn(3 + episode)
        values = critic(x)[:, 0]
        choice = torch.distributions.Categorical(logits=actor(x))
        policy = -choice.log_prob(choice.sample()) * (gains - values.detach())
        optimizer.zero_grad()
        (policy.sum() + F.smooth_l1_loss(values, gains, reduction="sum")).backward()
        optimizer.step()


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


def small_gpt() -> None:
    """The loop of small GPT trainings: micro-steps of equal blocks, divided by their number."""
    table, head = nn.Embedding(20, 8), nn.Linear(8, 20)
    parameters = [*table.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(3):
        for _ in range(STEPS):
            block = torch.randint(20, (4, 9))
            logits = head(table(block[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten(), ignore_index=-1)
            (loss / STEPS).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


ROWS: list[tuple[str, str, str, Any]] = [
    ("torch", "examples, mnist", "as it is", classify_digits),
    ("torch", "examples, dcgan", "as it is", adversarial_pair),
    ("torch", "examples, word_language_model", "as it is", language_model),
    ("torch", "examples, vae", "as it is", variational_autoencoder),
    ("torch", "examples, reinforce", "as it is", policy_gradient),
    ("torch", "examples, actor_critic", "as it is", actor_critic),
    ("torch", "examples, time_sequence_prediction", "LBFGS", second_order),
    ("torch", "proximal policy optimization", "3 epochs over a batch", proximal_policy),
    ("torch", "accumulation of tutorials", "4 steps", accumulated),
    ("torch", "accumulation of tutorials", "4 steps, 6 batches", lambda: accumulated(last=6)),
    ("torch", "accumulation of tutorials", "4 steps, without dividing", lambda: accumulated(divide=False)),
    ("torch", "recipe for mixed precision", "4 steps", mixed_precision),
    ("torch", "small GPT", "4 steps of equal blocks", small_gpt),
]
