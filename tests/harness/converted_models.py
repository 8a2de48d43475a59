"""Published contrastive, self-supervised and generative programs, each reduced to its step and converted."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.converting import (
    PLAIN,
    STEPS,
    Batch,
    N,
    as_a_batch,
    difference,
    draw,
    gradients,
    in_a_loop,
    joined,
    layers,
    one_after_another,
    program,
    split,
    trained,
)
from macrobatch import Accumulator, Encoded, contrastive_loss


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = layers(6, 8, 4), layers(5, 8, 4, seed=1)
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))


@program(
    "OpenCLIP",
    ("mlfoundations/open_clip", "89fb801", "src/open_clip_train/train.py"),
    "contrastive loss of all pairs, with a learnt scale",
    "`MacroStep` with `joint=`; its cache of features goes",
    5,
)
def openclip() -> float:
    batch = (draw(N, 6), draw(N, 5, seed=2))
    joint = lambda m, e: contrastive_loss(e.image, e.text, scale=m.logit_scale.exp())  # noqa: E731

    def loss_of(m: Any) -> Tensor:
        a, b = F.normalize(m.image(batch[0])), F.normalize(m.text(batch[1]))
        logits, own = m.logit_scale.exp() * a @ b.T, torch.arange(N)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return as_a_batch(
        Towers(), lambda m, b: Encoded(image=m.image(b[0]), text=m.text(b[1])), batch, loss_of, joint=joint
    )


def nt_xent(a: Tensor, b: Tensor) -> Tensor:
    both = F.normalize(torch.cat([a, b]))
    logits = (both @ both.T / 0.07).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(both)).roll(len(a)))


@program(
    "SimCLR",
    ("sthalles/SimCLR", "1848fc9", "simclr.py"),
    "each view against all others",
    "`MacroStep` with `joint=`",
    5,
)
def simclr() -> float:
    batch = (draw(N, 6), draw(N, 6, seed=2))
    return as_a_batch(
        layers(6, 8, 4),
        lambda m, b: Encoded(a=m(b[0]), b=m(b[1])),
        batch,
        lambda m: nt_xent(m(batch[0]), m(batch[1])),
        joint=lambda _, e: nt_xent(e.a, e.b),
    )


class Following(nn.Module):
    """A network, one that begins as its copy and follows it slowly, and a buffer of what that gave."""

    memory: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.student = layers(6, 8, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("memory", F.normalize(draw(rows, 4, seed=7)))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data


def following(
    rows: int,
    batch: Batch,
    loss_of: Callable[[Any, Batch], tuple[Tensor, Tensor]],
    remember: Callable[[Any, Tensor], None],
    before_step: Callable[[Any], None] = lambda _: None,
) -> float:
    """Two windows of a model whose updates come after the step, against two big batches of another one."""
    model = Following(rows)
    other, batches = copy.deepcopy(model), split(batch)
    optimizer, errors, kept = torch.optim.SGD(model.student.parameters(), lr=0.1), [], []
    found: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(gradients(trained(model))))
    optimizer.register_step_pre_hook(lambda *_: before_step(model))
    acc = Accumulator(model, optimizer, steps=STEPS)
    for one in acc.batches(batches):
        loss, output = loss_of(model, one)
        acc.backward(loss)
        kept.append(output)
        if acc.step():
            model.follow()
            remember(model, torch.cat(kept))
            kept.clear()
    plain = torch.optim.SGD(other.student.parameters(), lr=0.1)
    for index in range(2):
        loss, output = loss_of(other, joined(batches[index * STEPS : (index + 1) * STEPS]))
        loss.backward()
        errors.append(difference(found[index], gradients(trained(other))))
        before_step(other)
        plain.step()
        plain.zero_grad()
        other.follow()
        remember(other, output)
    return max(errors)


@program(
    "MoCo",
    ("facebookresearch/moco", "132aea9", "moco/builder.py"),
    "contrastive loss against a queue of a momentum encoder, both moved in the forward",
    "momentum and queue move after the step",
    6,
)
def moco() -> float:
    def loss_of(m: Any, b: Batch) -> tuple[Tensor, Tensor]:
        query, key = F.normalize(m.student(b[0])), F.normalize(m.teacher(b[1]))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ m.memory.T], 1) / 0.07
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long)), key

    def remember(m: Any, keys: Tensor) -> None:
        m.memory.copy_(torch.cat([keys, m.memory])[: len(m.memory)])

    return following(24, (draw(N, 6), draw(N, 6, seed=2)), loss_of, remember)


@program(
    "DINO",
    ("facebookresearch/dino", "7c446df", "main_dino.py"),
    "cross-entropies of pairs of crops with a centred teacher; each parameter's gradient clipped",
    "teacher and centre move after the step; the clipping is an optimizer pre-hook",
    8,
)
def dino() -> float:
    def loss_of(m: Any, b: Batch) -> tuple[Tensor, Tensor]:
        targets = [m.teacher(crop) for crop in b[:2]]
        logits = [m.student(crop) / 0.1 for crop in b]
        total = torch.zeros(()).double()
        for i, target in enumerate(targets):
            wanted = ((target - m.memory) / 0.04).softmax(-1)
            for j, found in enumerate(logits):
                total = total if i == j else total + (-wanted * found.log_softmax(-1)).sum(-1).mean()
        return total / 4, torch.cat(targets)

    def remember(m: Any, targets: Tensor) -> None:
        m.memory = m.memory * 0.9 + targets.mean(0, keepdim=True) * 0.1

    def clip(m: Any) -> None:
        for p in m.student.parameters():
            p.grad.mul_((0.3 / (p.grad.norm() + 1e-6)).clamp(max=1))
        m.student[-1].bias.grad = None  # the last layer, which the first epoch does not train

    crops = (draw(N, 6), draw(N, 6, seed=2), draw(N, 6, seed=3))
    return following(1, crops, loss_of, remember, clip)


# ------------------------------------------------------------------------------------------------ generative models


@program(
    "Denoising diffusion",
    ("lucidrains/denoising-diffusion-pytorch", "faed4db", "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py"),
    "squared error, weighted by time; clipped",
    PLAIN,
    4,
)
def ddpm() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        x, noise, level = b
        found = m(torch.cat([level.sqrt() * x + (1 - level).sqrt() * noise, level], 1))
        losses = F.mse_loss(found, noise, reduction="none").mean(1)
        return (losses * (level / (1 - level)).clamp(max=5)[:, 0]).mean()

    batch = (draw(N, 5), draw(N, 5, seed=2), draw(N, 1, seed=3).sigmoid())
    return in_a_loop(layers(6, 8, 5), loss_of, batch, max_norm=0.1)


@program(
    "VAE",
    ("pytorch/examples", "77f55b9", "vae/main.py"),
    "undivided sums of reconstruction and divergence",
    '`reduction="total"`',
    3,
)
def vae() -> float:
    def loss_of(m: Any, b: Batch) -> Tensor:
        mean, log_variance = m[0](b[0]).chunk(2, 1)
        again = torch.sigmoid(m[1](mean + b[1] * torch.exp(0.5 * log_variance)))
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(again, b[0].sigmoid(), reduction="sum") + divergence

    model, batch = nn.ModuleList([layers(6, 8, 4), layers(2, 8, 6)]), (draw(N, 6), draw(N, 2, seed=2))
    return in_a_loop(model, loss_of, batch, reduction="total", make=lambda p: torch.optim.SGD(p, lr=1e-3))


@program(
    "DCGAN",
    ("pytorch/examples", "77f55b9", "dcgan/main.py"),
    "a critic steps, with two backwards; then a generator, against the critic after its step",
    "two `MacroStep`s, one after the other",
    8,
)
def gan() -> float:
    forger, critic = layers(4, 8, 6), layers(6, 8, 1, seed=1)

    def says(m: nn.Module, pictures: Tensor, is_real: int) -> Tensor:
        found = torch.sigmoid(m(pictures))
        return F.binary_cross_entropy(found, torch.full_like(found, is_real))

    def critic_loss(m: nn.Module, b: Batch) -> Tensor:
        return says(m, b[0], 1) + says(m, forger(b[1]).detach(), 0)

    def forger_loss(m: nn.Module, b: Batch) -> Tensor:
        return says(critic, m(b[1]), 1)

    steps = [(critic, trained(critic), critic_loss), (forger, trained(forger), forger_loss)]
    return one_after_another(steps, (draw(N, 6), draw(N, 4, seed=2)))
