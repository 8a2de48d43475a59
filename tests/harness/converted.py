"""Published training programs, each reduced to its step, converted as the docs say, and compared with one big batch.

cd tests && ../.venv/bin/python -m harness.converted      # writes results/converted.json and docs/converted.md
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import macrobatch
from harness import ROOT
from harness.converting import (
    PROGRAMS,
    SIZES,
    STEPS,
    Batch,
    as_a_batch,
    difference,
    draw,
    gradients,
    in_a_loop,
    joined,
    layers,
    program,
    split,
    trained,
    whole_numbers,
)
from macrobatch import Accumulator, Encoded, MacroStep, Sum, contrastive_loss

RESULTS, PAGE = ROOT / "results" / "converted.json", ROOT / "docs" / "converted.md"
HEAD = """\
# Published programs, converted

How the training steps of well-known public programs are converted, and how far each gradient is then from that of one
big batch. Each program is reduced to what its step computes (the loss, the optimizer, what else moves), written anew on
a tiny model in float64, with micro-batches of unequal sizes; no weights, data or code of these projects are used. The
error is the largest difference of any gradient, divided by the largest gradient of the model. "Lines" counts the lines
that a loop by hand has to change. The page is made by `tests/harness/converted.py`, which runs all of them; the test
`tests/unit/test_converted.py` keeps each below 1e-12.

| program | its step | what is changed | lines | error |
|---|---|---|---|---|
"""
TAIL = """
Two kinds of programs need more than the loader, `backward` and `step`:

- **Weights or buffers that a forward moves** (MoCo, DINO): the update goes behind the step, and uses what all
  micro-batches of the window have added up ([recipe](recipes.md#momentum-encoders-queues-and-codebooks)).
- **Losses that compare samples** (OpenCLIP, SimCLR, the balance loss of experts): `MacroStep(..., joint=)`
  ([losses of the whole batch](contrastive.md)).
"""


N = sum(SIZES)
PLAIN = "loader, `backward`, `step`; `/ steps` goes"

# --------------------------------------------------------------------------------------------- language and speech


@program("nanoGPT", "cross-entropy over all tokens", PLAIN, 3)
def nanogpt() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()
    tokens = whole_numbers(11, N, 7)
    return in_a_loop(
        model, lambda m, b: F.cross_entropy(m(b[0][:, :-1]).flatten(0, 1), b[0][:, 1:].flatten()), (tokens,)
    )


def labels_of(tokens: Tensor) -> Tensor:
    lengths = 1 + torch.arange(len(tokens)) % 6
    return tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths[:, None], -100)


@program("BERT, masked language model", "cross-entropy over the masked tokens", PLAIN, 3)
def bert() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()
    tokens = whole_numbers(11, N, 7)
    return in_a_loop(
        model, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), (tokens, labels_of(tokens))
    )


@program(
    "fairseq, translation",
    "label-smoothed sums, divided by the tokens of all",
    '`reduction="sum"`, `items=` its sample size',
    4,
)
def fairseq() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()
    tokens = whole_numbers(11, N, 7)
    labels = labels_of(tokens)

    def sums(m: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), reduction="sum", label_smoothing=0.1)

    def count(b: Batch) -> int:
        return int((b[1] != -100).sum())

    other = copy.deepcopy(model)
    found: list[list[Tensor]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: found.append(gradients(trained(model))))
    acc = Accumulator(model, optimizer, steps=len(SIZES), reduction="sum")
    for one in acc.batches(split((tokens, labels))):
        acc.backward(sums(model, one), count(one))
        acc.step()
    (sums(other, (tokens, labels)) / count((tokens, labels))).backward()
    return difference(found[0], gradients(trained(other)))


class Recurrent(nn.Module):
    def __init__(self, out: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, out)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.rnn(x)
        return self.head(hidden), hidden


@program("AWD-LSTM", "cross-entropy, plus a mean of squared activations", PLAIN, 3)
def awd_lstm() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        logits, hidden = m(b[0])
        return F.cross_entropy(logits.flatten(0, 1), b[1].flatten()) + 2.0 * hidden.pow(2).mean()

    return in_a_loop(Recurrent(), loss_of, (draw(N, 7, 3), whole_numbers(5, N, 7)))


@program("DeepSpeech 2, CTC", "`ctc_loss`, a mean over utterances", PLAIN, 3)
def ctc() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        logits = m(b[0])[0].log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, b[1], torch.full((len(b[0]),), 9), b[2])

    lengths = 1 + whole_numbers(3, N, seed=3)
    return in_a_loop(Recurrent(), loss_of, (draw(N, 9, 3), 1 + whole_numbers(4, N, 3), lengths))


@program(
    "word2vec, negative sampling", "mean of log-sigmoids; sparse gradients, SparseAdam", "loader, `backward`, `step`", 3
)
def word2vec() -> float:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(20, 4, sparse=True), nn.Embedding(20, 4, sparse=True)]).double()

    def loss_of(m: Any, b: Batch) -> Tensor:
        centre, others = m[0](b[0]), m[1](b[1])
        return -F.logsigmoid((others @ centre[:, :, None])[..., 0] * b[2]).mean()

    signs = torch.where(torch.arange(4) == 0, 1.0, -1.0).double().expand(N, 4).contiguous()
    return in_a_loop(
        model,
        loss_of,
        (whole_numbers(20, N), whole_numbers(20, N, 4), signs),
        make=partial(torch.optim.SparseAdam, lr=0.1),
    )


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(0.1 * torch.randn(5, 2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@program("LoRA", "cross-entropy; frozen base weights", PLAIN, 3)
def lora() -> float:
    return in_a_loop(LowRank(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (draw(N, 6), whole_numbers(5, N)))


# -------------------------------------------------------------------------------------------------------- vision


@program("torchvision references, ImageNet", "cross-entropy with label smoothing", PLAIN, 3)
def imagenet() -> float:
    return in_a_loop(
        layers(6, 8, 5),
        lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
        (draw(N, 6), whole_numbers(5, N)),
    )


@program("timm, mixup", "mean over samples of soft-target cross-entropies", PLAIN, 3)
def timm() -> float:
    targets = draw(N, 5, seed=5).softmax(1)
    return in_a_loop(
        layers(6, 8, 5), lambda m, b: (-b[1] * m(b[0]).log_softmax(1)).sum(1).mean(), (draw(N, 6), targets)
    )


@program("U-Net, segmentation", "weighted cross-entropy over pixels, some ignored", PLAIN, 3)
def unet() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    labels = whole_numbers(4, N, 5, 5)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    return in_a_loop(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight, ignore_index=3), (draw(N, 2, 5, 5), labels)
    )


@program("MAE", "squared error over the masked patches", "and `items=mask.sum()`", 3)
def mae() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        x, mask = b
        error = (m(x * (1 - mask)[..., None]) - x).square().mean(-1)
        return (error * mask).sum() / mask.sum()

    masks = (draw(N, 7, seed=6) > 0).double()
    return in_a_loop(layers(3, 8, 3), loss_of, (draw(N, 7, 3), masks), items=lambda b: int(b[1].sum()))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 9)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(self.body(x).tanh())
        return found[..., :4], found[..., 4:]


def detections() -> Batch:
    return draw(N, 3, 6), draw(N, 3, 4, seed=3), (draw(N, 3, seed=4) > 0.3).long()


def terms_of(m: nn.Module, b: Sequence[Tensor]) -> dict[str, tuple[Tensor, Any]]:
    boxes, classes = m(b[0])
    number = b[2].sum()
    l1 = (boxes - b[1]).abs().sum(-1)
    return {
        "box": (5 * (l1 * b[2]).sum() / number.clamp(min=1), number),
        "class": (F.cross_entropy(classes.flatten(0, 1), b[2].flatten()), b[2].numel()),
    }


def sum_of_terms(m: nn.Module, b: Sequence[Tensor]) -> Tensor:
    return sum((loss for loss, _ in terms_of(m, b).values()), torch.zeros((), dtype=torch.float64))


@program(
    "DETR", "boxes over all boxes, classes over all queries", "a dict of terms and `counts=`; its all-reduce goes", 6
)
def detr() -> float:
    counts = lambda b: {"box": b[2].sum(), "class": b[2].numel()}  # noqa: E731
    batch = detections()
    return as_a_batch(Detector(), terms_of, batch, lambda m: sum_of_terms(m, batch), counts=counts)


@program("YOLOv5", "means over targets, and over cells", "a dict of terms and `counts=`", 6)
def yolo() -> float:
    def terms(m: nn.Module, b: Sequence[Tensor]) -> dict[str, tuple[Tensor, Any]]:
        boxes, cells = m(b[0])
        chosen = b[2].bool()
        box = F.mse_loss(boxes[chosen], b[1][chosen]) if chosen.any() else boxes.sum() * 0
        return {
            "box": (0.05 * box, chosen.sum()),
            "cells": (F.binary_cross_entropy_with_logits(cells[..., 0], b[2].double()), chosen.numel()),
        }

    batch = detections()
    counts = lambda b: {"box": b[2].sum(), "cells": b[2].numel()}  # noqa: E731
    whole = lambda m: sum((loss for loss, _ in terms(m, batch).values()), torch.zeros((), dtype=torch.float64))  # noqa: E731
    return as_a_batch(Detector(), terms, batch, whole, counts=counts)


# --------------------------------------------------------------------------------- contrastive, and self-supervised


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = layers(6, 8, 4), layers(5, 8, 4, seed=1)
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))


@program("OpenCLIP", "contrastive loss of all pairs of the batch", "`MacroStep` with `joint=`", 5)
def openclip() -> float:
    batch = (draw(N, 6), draw(N, 5, seed=2))
    joint = lambda m, e: contrastive_loss(e.image, e.text, scale=m.logit_scale.exp())  # noqa: E731

    def whole(m: Any) -> Tensor:
        a, b = F.normalize(m.image(batch[0])), F.normalize(m.text(batch[1]))
        logits, own = m.logit_scale.exp() * a @ b.T, torch.arange(N)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return as_a_batch(Towers(), lambda m, b: Encoded(image=m.image(b[0]), text=m.text(b[1])), batch, whole, joint=joint)


def nt_xent(a: Tensor, b: Tensor) -> Tensor:
    both = F.normalize(torch.cat([a, b]))
    logits = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(both)).roll(len(a)))


@program("SimCLR", "NT-Xent of all pairs of views", "`MacroStep` with `joint=`", 5)
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
    """A network, one that follows it slowly, and a buffer of what that gave."""

    memory: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.student, self.teacher = layers(6, 8, 4), layers(6, 8, 4, seed=1).requires_grad_(False)
        self.register_buffer("memory", draw(rows, 4, seed=7))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


def following(
    rows: int, loss_of: Callable[[Any, Batch], tuple[Tensor, Tensor]], remember: Callable[[Any, Tensor], None]
) -> float:
    """Two windows of a model whose updates come after the step, against two big batches of another one."""
    model = Following(rows)
    other, batches = copy.deepcopy(model), split((draw(N, 6), draw(N, 6, seed=2)))
    optimizer, errors, kept = torch.optim.SGD(model.student.parameters(), lr=0.1), [], []
    found: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(gradients(trained(model))))
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
        plain.step()
        plain.zero_grad()
        other.follow()
        remember(other, output)
    return max(errors)


@program("MoCo", "contrastive loss against a queue of a momentum encoder", "momentum and queue move after the step", 6)
def moco() -> float:
    def loss_of(m: Any, b: Batch) -> tuple[Tensor, Tensor]:
        query = F.normalize(m.student(b[0]))
        key = F.normalize(m.teacher(b[1]))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ m.memory.T], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long)), key

    def remember(m: Any, keys: Tensor) -> None:
        m.memory.copy_(torch.cat([keys, m.memory])[: len(m.memory)])

    return following(24, loss_of, remember)


@program("DINO", "cross-entropy with a centred teacher", "teacher and centre move after the step", 6)
def dino() -> float:
    def loss_of(m: Any, b: Batch) -> tuple[Tensor, Tensor]:
        target = m.teacher(b[1])
        wanted = ((target - m.memory) / 0.04).softmax(1)
        return (-wanted * (m.student(b[0]) / 0.1).log_softmax(1)).sum(1).mean(), target

    def remember(m: Any, targets: Tensor) -> None:
        m.memory.mul_(0.9).add_(targets.mean(0, keepdim=True), alpha=0.1)

    return following(1, loss_of, remember)


# ------------------------------------------------------------------------------------------------ generative models


@program("DDPM", "mean squared error of the noise", PLAIN, 3)
def ddpm() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        x, noise, level = b
        return F.mse_loss(m(torch.cat([level.sqrt() * x + (1 - level).sqrt() * noise, level], 1)), noise)

    return in_a_loop(layers(6, 8, 5), loss_of, (draw(N, 5), draw(N, 5, seed=2), draw(N, 1, seed=3).sigmoid()))


@program("VAE (pytorch/examples)", "sums of reconstruction and divergence, never divided", '`reduction="total"`', 3)
def vae() -> float:
    model = nn.ModuleList([layers(6, 8, 4), layers(2, 8, 6)])

    def loss_of(m: Any, b: Batch) -> Tensor:
        mean, log_variance = m[0](b[0]).chunk(2, 1)
        again = m[1](mean + b[1] * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        return F.binary_cross_entropy_with_logits(again, b[0].sigmoid(), reduction="sum") + divergence

    return in_a_loop(
        model, loss_of, (draw(N, 6), draw(N, 2, seed=2)), reduction="total", make=partial(torch.optim.SGD, lr=1e-3)
    )


@program("DCGAN (pytorch/examples)", "a critic and a generator, each with its loss", "two Accumulators", 6)
def gan() -> float:
    bce = F.binary_cross_entropy_with_logits
    forger, critic = layers(4, 8, 6), layers(6, 8, 1, seed=1)
    acc_critic = Accumulator(critic, torch.optim.SGD(critic.parameters(), lr=0.0), steps=len(SIZES))
    acc_forger = Accumulator(forger, torch.optim.SGD(forger.parameters(), lr=0.0), steps=len(SIZES))
    found: dict[str, list[Tensor]] = {}
    for name, acc, model in (("critic", acc_critic, critic), ("forger", acc_forger, forger)):
        keep = lambda *_, name=name, model=model: found.update({name: gradients(trained(model))})  # noqa: E731
        acc._engine.optimizers[0].register_step_pre_hook(keep)

    def critic_loss(real: Tensor, fake: Tensor) -> Tensor:
        return bce(critic(real), torch.ones(len(real), 1).double()) + bce(
            critic(fake.detach()), torch.zeros(len(real), 1).double()
        )

    def forger_loss(fake: Tensor) -> Tensor:
        return bce(critic(fake), torch.ones(len(fake), 1).double())

    batch = (draw(N, 6), draw(N, 4, seed=2))
    for (real, noise), _ in zip(acc_critic.batches(split(batch)), acc_forger.batches(split(batch)), strict=False):
        fake = forger(noise)
        acc_critic.backward(critic_loss(real, fake))
        acc_critic.step()
        acc_forger.backward(forger_loss(fake))
        acc_forger.step()
    errors = []
    for name, model, loss in (
        ("critic", critic, critic_loss(batch[0], forger(batch[1]))),
        ("forger", forger, forger_loss(forger(batch[1]))),
    ):
        expected = torch.autograd.grad(loss, trained(model), retain_graph=True)
        errors.append(difference(found[name], expected))
    return max(errors)


# ------------------------------------------------------------------------------------------ reinforcement learning


@program(
    "CleanRL, PPO",
    "clipped policy, value and entropy means; advantages normalised over the minibatch",
    "`MacroStep`; normalise before",
    4,
)
def ppo() -> float:
    actor, values = layers(5, 8, 3), layers(5, 8, 1, seed=1)
    advantages = draw(N, seed=3)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    batch = (draw(N, 5), whole_numbers(3, N), draw(N, seed=4).mul(0.1), advantages, draw(N, seed=5))
    model = nn.ModuleList([actor, values])

    def loss_fn(m: Any, b: Sequence[Tensor]) -> Tensor:
        x, action, old, advantage, returns = b
        policy = torch.distributions.Categorical(logits=m[0](x))
        ratio = (policy.log_prob(action) - old).exp()
        clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        return clipped - 0.01 * policy.entropy().mean() + 0.5 * 0.5 * (m[1](x)[:, 0] - returns).square().mean()

    return as_a_batch(model, loss_fn, batch, lambda m: loss_fn(m, batch))


@program("CleanRL, SAC", "two critics, and a temperature that is a bare tensor", PLAIN, 3)
def sac() -> float:
    critics, log_alpha = (
        nn.ModuleList([layers(6, 8, 1), layers(6, 8, 1, seed=1)]),
        torch.zeros(1).double().requires_grad_(),
    )
    entropies = draw(N, seed=4)
    first = in_a_loop(
        critics,
        lambda m, b: F.mse_loss(m[0](b[0])[:, 0], b[1]) + F.mse_loss(m[1](b[0])[:, 0], b[1]),
        (draw(N, 6), draw(N, seed=3)),
    )
    acc = Accumulator(log_alpha, torch.optim.SGD([log_alpha], lr=1.0), steps=len(SIZES))  # type: ignore[arg-type]
    for one in acc.batches(entropies.split(SIZES)):
        acc.backward((-log_alpha.exp() * one).mean())
        acc.step()
    return max(first, difference([log_alpha.detach()], [entropies.mean().reshape(1)]))


@program("REINFORCE (pytorch/examples)", "a sum over the steps of an episode", '`reduction="total"`', 3)
def reinforce() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        return (-torch.distributions.Categorical(logits=m(b[0])).log_prob(b[1]) * b[2]).sum()

    batch = (draw(N, 5), whole_numbers(3, N), draw(N, seed=3))
    return in_a_loop(layers(5, 8, 3), loss_of, batch, reduction="total", make=partial(torch.optim.SGD, lr=1e-2))


# --------------------------------------------------------------------------------------------------------- others


@program("PINN", "means over collocation points, and over boundary points", "a dict of terms and `counts=`", 6)
def pinn() -> float:
    def terms(m: nn.Module, b: Sequence[Tensor]) -> dict[str, tuple[Tensor, Any]]:
        x = b[0].requires_grad_()
        y = m(x)
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        is_edge = b[1].double()
        return {
            "inside": ((slope + y).square().mean(), len(x)),
            "edge": (((y - 1).square()[:, 0] * is_edge).sum() / is_edge.sum().clamp(min=1), int(is_edge.sum())),
        }

    batch = (draw(N, 1), draw(N, seed=2) > 0)
    counts = lambda b: {"inside": len(b[1]), "edge": int(b[1].sum())}  # noqa: E731
    whole = lambda m: sum((one for one, _ in terms(m, batch).values()), torch.zeros((), dtype=torch.float64))  # noqa: E731
    fresh = tuple(tensor.clone() for tensor in batch)
    return as_a_batch(layers(1, 8, 1), terms, fresh, whole, counts=counts)


@program("GCN, node classification", "cross-entropy over the labelled nodes of the graphs", PLAIN, 3)
def gnn() -> float:
    def loss_of(m: Any, b: Batch) -> Tensor:
        nodes, links, labels = b
        return F.cross_entropy(m[1](links @ m[0](nodes).tanh()).flatten(0, 1), labels.flatten(), ignore_index=-1)

    links = (draw(N, 4, 4, seed=3) > 0).double().softmax(-1)
    return in_a_loop(layers(3, 8, 5)[::2], loss_of, (draw(N, 4, 3), links, whole_numbers(6, N, 4) - 1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights[..., None, :]).sum(-1), weights


def balance(used: Tensor, weights: Tensor, number: Tensor) -> Tensor:
    return 3 * (used / number * weights / number).sum()


@program("Switch Transformer", "cross-entropy, and a balance loss of the whole batch", "`joint=` with `Sum`", 7)
def switch() -> float:
    def loss_fn(m: nn.Module, b: Sequence[Tensor]) -> Encoded:
        output, weights = m(b[0])
        used = F.one_hot(weights.argmax(-1), 3).double()
        loss = F.cross_entropy(output, b[1])
        return Encoded(
            loss,
            len(b[0]),
            used=Sum(used.sum(0)),
            weights=Sum(weights.sum(0)),
            number=Sum(torch.tensor([float(len(b[0]))]).double()),
        )

    batch = (draw(N, 4), whole_numbers(5, N))

    def whole(m: nn.Module) -> Tensor:
        output, weights = m(batch[0])
        used = F.one_hot(weights.argmax(-1), 3).double().sum(0)
        return F.cross_entropy(output, batch[1]) + balance(used, weights.sum(0), torch.tensor(float(N)))

    return as_a_batch(Experts(), loss_fn, batch, whole, joint=lambda _, e: balance(e.used, e.weights, e.number))


@program("Knowledge distillation", "cross-entropy, and a divergence from a teacher", PLAIN, 3)
def distillation() -> float:
    teacher = layers(6, 8, 5, seed=3)

    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        wanted = (teacher(b[0]).detach() / 2).log_softmax(1)
        found = (m(b[0]) / 2).log_softmax(1)
        return F.cross_entropy(m(b[0]), b[1]) + 4 * (wanted.exp() * (wanted - found)).sum(1).mean()

    return in_a_loop(layers(6, 8, 5), loss_of, (draw(N, 6), whole_numbers(5, N)))


@program(
    "LBFGS and SAM programs",
    "a closure that evaluates the loss several times",
    "`MacroStep(model, None, ...)` in the closure",
    4,
)
def closures() -> float:
    batch, weights = draw(N, 6), []
    for micro in (N, 5):
        model = layers(6, 8, 5)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        train = MacroStep(model, None, lambda m, x: m(x).square().mean(), micro=micro)

        def closure(optimizer: Any = optimizer, train: MacroStep = train) -> Tensor:
            optimizer.zero_grad()
            return train(batch).loss

        optimizer.step(closure)
        weights.append([p.detach() for p in model.parameters()])
    return difference(*weights)


# -------------------------------------------------------------------------------------------------------- the page


def measured() -> list[dict[str, Any]]:
    """All rows, with their errors."""
    return [asdict(one) | {"error": float(f"{one.error():.1g}")} for one in PROGRAMS]


def page(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {r['name']} | {r['step']} | {r['changed']} | {r['lines']} | {r['error']:.0e} |" for r in rows]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def write() -> None:
    """Run all programs, and write the figures and the page."""
    rows = measured()
    record = {
        "what": "published programs, reduced to their steps and converted, beside one big batch",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"macrobatch": macrobatch.__version__, "torch": torch.__version__},
        "samples": SIZES,
        "steps": STEPS,
        "programs": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    write()
