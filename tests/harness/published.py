"""Training steps as people publish them, in small: right ones, and the same with a mistake. Data for `verify`.

Each is a `Program`. The verdict that it should get is "exact", "wrong", or "unknown" where that is the honest answer.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Any]
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step with everything that it needs. `make` returns the other arguments, made anew for each run."""

    make: Callable[[], dict[str, Any]]
    verdict: str = "exact"
    cause: str | None = None
    windows: int | None = None  # what the report shows


# ------------------------------------------------------------------------------------------------ models, data, loops


def net(inputs: int = 5, outputs: int = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data(count: int = 12, seed: int = 1) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, 6, generator=draw) < torch.linspace(0.2, 1, count)[:, None]
    mask[:, 0] = True
    tokens = torch.randint(1, 7, (count, 6), generator=draw)
    return {
        "x": torch.randn(count, 5, generator=draw).double(),
        "y": torch.randint(3, (count,), generator=draw),
        "t": torch.randn(count, 3, generator=draw).double(),
        "tokens": tokens,
        "labels": tokens.masked_fill(~mask, IGNORED),
        "a": torch.randn(count, generator=draw).double(),
        "index": torch.arange(count),
    }


def cut(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    parts = [tensor.split(list(sizes)) for tensor in batch.values()]
    return (dict(zip(batch, tensors, strict=True)) for tensors in zip(*parts, strict=True))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def by_samples(part: Batch, window: list[Batch]) -> float:
    return len(part["x"]) / sum(len(other["x"]) for other in window)


def alike(_: Batch, window: list[Batch]) -> float:
    return 1 / len(window)


def undivided(_: Batch, __: list[Batch]) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """An ordinary loop: windows of `steps` micro-batches, with something done before and after the optimizer's step."""

    loss: Loss = classify
    sizes: Sequence[int] = (4, 4, 4)
    steps: int = 3
    weight: Callable[[Batch, list[Batch]], float] = by_samples
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    before: Callable[[nn.Module], object] = lambda model: None
    each: Callable[[nn.Module], object] = lambda model: None
    after: Callable[[nn.Module], object] = lambda model: None

    def __call__(self, model: nn.Module, batch: Batch) -> None:
        optimizer, parts = self.optimizer(model), list(cut(batch, self.sizes))
        optimizer.zero_grad()
        for first in range(0, len(parts), self.steps):
            window = parts[first : first + self.steps]
            for part in window:
                (self.loss(model, part) * self.weight(part, window)).backward()
                self.each(model)
            self.before(model)
            optimizer.step()
            optimizer.zero_grad()
            self.after(model)


def ordinary(
    loss: Loss = classify,
    *,
    model: Callable[[], nn.Module] = net,
    loss_fn: Loss | None = None,
    batch: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> Callable[[], dict[str, Any]]:
    """What `verify` needs for an ordinary loop."""
    return lambda: {
        "model": model(),
        "loss_fn": loss_fn or loss,
        "batch": data() if batch is None else batch(),
        "step": Steps(loss=loss, **options),
        "reduction": reduction,
    }


UNEQUAL = (6, 4, 2)


# ----------------------------------------------------------------------------------------------- generative, with draws


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.mean, self.spread, self.decoder = (
            nn.Linear(*sizes).double() for sizes in ((5, 8), (8, 2), (8, 2), (2, 5))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).relu()
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def elbo(model: nn.Module, batch: Batch) -> Tensor:
    seen, mean, spread = model(batch["x"])
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp())
    return (seen - batch["x"]).square().sum(1).mean() + divergence.sum(1).mean()


def diffusion(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"]
    step, noise = torch.randint(1, 10, (len(x), 1)), torch.randn_like(x)
    share = step.double() / 10
    return F.mse_loss(model(torch.cat([(1 - share).sqrt() * x + share.sqrt() * noise, share], 1)), noise)


def flow(model: nn.Module, batch: Batch) -> Tensor:
    x, noise, time = batch["x"], torch.randn_like(batch["x"]), torch.rand(len(batch["x"]), 1, dtype=torch.float64)
    return F.mse_loss(model(torch.cat([time * x + (1 - time) * noise, time], 1)), x - noise)


def masked(model: nn.Module, batch: Batch) -> Tensor:
    """A masked autoencoder: a share of each sample is hidden, chosen by sorting noise."""
    x = batch["x"]
    hidden = torch.rand(len(x), 5).argsort(1) < 3
    return ((model(x * ~hidden) - x).square() * hidden).sum(1).mean() / 3


def denoising(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"] + 0.3 * torch.randn_like(batch["x"])), batch["x"])


class DropPath(nn.Module):
    """Drops the whole branch of a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(5, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.inner(x).tanh() * x.new_empty(len(x), 1).bernoulli_(0.6))


class Checkpointed(nn.Module):
    """Draws again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(5, 5)
        self.head = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda h: F.dropout(self.inner(h), 0.5), x, use_reentrant=False))


def functional_dropout(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(F.dropout(batch["x"], 0.4)), batch["y"])


def r_drop(model: nn.Module, batch: Batch) -> Tensor:
    """Two passes with other masks, and how far they are apart."""
    one, other = (F.log_softmax(model(F.dropout(batch["x"], 0.3)), -1) for _ in range(2))
    return F.nll_loss(one, batch["y"]) + F.kl_div(one, other, reduction="batchmean", log_target=True)


def mixup(model: nn.Module, batch: Batch) -> Tensor:
    """A share and a partner for each sample."""
    share, partner = torch.rand(len(batch["x"]), 1, dtype=torch.float64), torch.randperm(len(batch["x"]))
    logits = model(share * batch["x"] + (1 - share) * batch["x"][partner])
    losses = [F.cross_entropy(logits, y, reduction="none") for y in (batch["y"], batch["y"][partner])]
    return (share[:, 0] * losses[0] + (1 - share[:, 0]) * losses[1]).mean()


def one_share_mixup(model: nn.Module, batch: Batch) -> Tensor:
    """As published: one share for all samples of a batch, so that one big batch has another one."""
    share, partner = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(batch["x"]))
    logits = model(share * batch["x"] + (1 - share) * batch["x"][partner])
    return share * F.cross_entropy(logits, batch["y"]) + (1 - share) * F.cross_entropy(logits, batch["y"][partner])


def numpy_noise(model: nn.Module, batch: Batch) -> Tensor:
    import numpy

    noise = torch.from_numpy(numpy.random.randn(*batch["x"].shape))
    return F.cross_entropy(model(batch["x"] + noise), batch["y"])


def gumbel(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(F.gumbel_softmax(model(batch["x"])), batch["t"])


def sampled(model: nn.Module, batch: Batch) -> Tensor:
    """REINFORCE on actions that it samples itself."""
    scores = F.log_softmax(model(batch["x"]), -1)
    action = torch.multinomial(scores.detach().exp(), 1)
    return -(scores.gather(1, action)[:, 0] * batch["a"]).mean()


def diffusion_by_hand(model: nn.Module, batch: Batch) -> None:
    """The loop draws itself, as loss_fn does, and shuffles nothing."""
    optimizer = sgd(model)
    for x in batch["x"].split(4):
        step, noise = torch.randint(1, 10, (len(x), 1)), torch.randn_like(x)
        share = step.double() / 10
        seen = model(torch.cat([(1 - share).sqrt() * x + share.sqrt() * noise, share], 1))
        (F.mse_loss(seen, noise) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()


def shuffled_vae(model: nn.Module, batch: Batch) -> None:
    """Draws an order before the first micro-batch."""
    order = torch.randperm(12)
    Steps(loss=elbo)(model, {name: tensor[order] for name, tensor in batch.items()})


# ------------------------------------------------------------------------------------------------------- two models


def real_and_fake(critic: nn.Module, batch: Batch) -> Tensor:
    return F.softplus(-critic(batch["x"])).mean() + F.softplus(critic(batch["fake"])).mean()


def gan(*, sizes: Sequence[int] = (12,), clears: bool = True, verifies: str = "critic") -> Callable[[], dict[str, Any]]:
    """The critic's step, then the generator's, whose backward leaves gradients in the critic."""

    def make() -> dict[str, Any]:
        generator, critic = net(3, 5), net(5, 1)
        batch = data() | {"fake": generator(data()["t"]).detach()}

        def step(_: nn.Module, batch: Batch) -> None:
            of_critic, of_generator = sgd(critic), sgd(generator)
            if clears:
                critic.zero_grad()
            for part in cut(batch, sizes):
                (F.softplus(-critic(part["x"])).mean() / len(sizes)).backward()
                (F.softplus(critic(generator(part["t"]).detach())).mean() / len(sizes)).backward()
            of_critic.step()
            generator.zero_grad()
            for part in cut(batch, sizes):
                (F.softplus(-critic(generator(part["t"]))).mean() / len(sizes)).backward()
            of_generator.step()

        if verifies == "critic":
            return {"model": critic, "loss_fn": real_and_fake, "batch": batch, "step": step}

        def fools(model: nn.Module, batch: Batch) -> Tensor:
            return F.softplus(-critic(model(batch["t"]))).mean()

        return {"model": generator, "loss_fn": fools, "batch": batch, "step": step}

    return make


def restarted_gan() -> Callable[[], dict[str, Any]]:
    """Each window of the critic is two micro-batches, but the generator's turn in between clears the first."""

    def make() -> dict[str, Any]:
        generator, critic = net(3, 5), net(5, 1)
        batch = data() | {"fake": generator(data()["t"]).detach()}

        def step(_: nn.Module, batch: Batch) -> None:
            of_critic, of_generator = sgd(critic), sgd(generator)
            for index, part in enumerate(cut(batch, (3,) * 4)):
                critic.zero_grad()
                (real_and_fake(critic, part) / (1 if index % 2 else 2)).backward()
                if index % 2:
                    of_critic.step()
                generator.zero_grad()
                F.softplus(-critic(generator(part["t"]))).mean().backward()
                of_generator.step()

        return {"model": critic, "loss_fn": real_and_fake, "batch": batch, "step": step}

    return make


class Vectors(nn.Module):
    """Nothing but rows, each of which belongs to the samples with its word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 3).double()

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index)


def word_vectors(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["index"]), batch["t"])


def clip_little(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def penalised(critic: nn.Module, batch: Batch) -> Tensor:
    """WGAN-GP: the gradient's norm at random points between real and fake."""
    share = torch.rand(len(batch["x"]), 1, dtype=torch.float64)
    between = (share * batch["x"] + (1 - share) * batch["x"].flip(1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(batch["x"].flip(1)).mean() - critic(batch["x"]).mean() + (slope.norm(dim=1) - 1).square().mean()


def r1(critic: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].detach().requires_grad_()
    score = critic(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.relu(1 - score).mean() + slope.square().sum(1).mean()


def clamp_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def actor_critic(*, verifies: str, weight: float = 1 / 3, clears: bool = True) -> Callable[[], dict[str, Any]]:
    """SAC in small: the actor's loss goes through the critic, whose optimizer clears it before it is used."""

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        actor, critic, target = net(5, 4), net(7, 1), net(7, 1)

        def act(policy: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            mean, spread = policy(batch["x"]).chunk(2, -1)
            action = torch.distributions.Normal(mean, F.softplus(spread)).rsample()
            return action.tanh(), mean.square().mean(1) + spread.square().mean(1)

        def of_critic(model: nn.Module, batch: Batch) -> Tensor:
            known = torch.cat([batch["x"], batch["t"][:, :2]], 1)
            with torch.no_grad():
                wanted = batch["a"][:, None] + 0.9 * target(known)
            return F.mse_loss(model(known), wanted)

        def of_actor(model: nn.Module, batch: Batch) -> Tensor:
            action, entropy = act(model, batch)
            return (0.1 * entropy - critic(torch.cat([batch["x"], action], 1))[:, 0]).mean()

        def step(_: nn.Module, batch: Batch) -> None:
            critics, actors = sgd(critic), sgd(actor)
            for begin in (0, 6):
                window = {name: tensor[begin : begin + 6] for name, tensor in batch.items()}
                if clears:
                    critics.zero_grad()
                for part in cut(window, (2, 2, 2)):
                    (of_critic(critic, part) * weight).backward()
                critics.step()
                actors.zero_grad()
                for part in cut(window, (2, 2, 2)):
                    (of_actor(actor, part) * weight).backward()
                actors.step()

        model, loss_fn = (critic, of_critic) if verifies == "critic" else (actor, of_actor)
        return {"model": model, "loss_fn": loss_fn, "batch": data(), "step": step}

    return make


def surrogate(model: nn.Module, batch: Batch) -> Tensor:
    """PPO's clipped objective; advantages come with the batch."""
    scores = F.log_softmax(model(batch["x"]), -1).gather(1, batch["y"][:, None])[:, 0]
    ratio = (scores + 1.1).exp()
    return -torch.minimum(ratio * batch["a"], ratio.clamp(0.8, 1.2) * batch["a"]).mean()


def normalised_surrogate(model: nn.Module, batch: Batch) -> Tensor:
    """Advantages normalised in the loss: each sample counts by the others."""
    return surrogate(model, batch | {"a": (batch["a"] - batch["a"].mean()) / batch["a"].std()})


def several_epochs(loss: Loss, weight: float) -> Callable[[nn.Module, Batch], None]:
    def step(model: nn.Module, batch: Batch) -> None:
        for _ in range(2):
            Steps(loss=loss, sizes=(3,) * 4, steps=2, weight=lambda part, window: weight)(model, batch)

    return step


def q_learning(*, weight: float = 1 / 3, steps: int = 3) -> Callable[[], dict[str, Any]]:
    """DQN whose target network follows slowly."""

    def make() -> dict[str, Any]:
        model = net()
        target = copy.deepcopy(model).requires_grad_(False)
        target[2].weight *= 1.5

        def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
            wanted = batch["a"] + 0.9 * target(batch["x"].flip(1)).amax(1)
            return F.smooth_l1_loss(model(batch["x"]).gather(1, batch["y"][:, None])[:, 0], wanted)

        def follow(model: nn.Module) -> None:
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.data.mul_(0.99).add_(fast.data, alpha=0.01)

        loop = Steps(loss=loss_fn, weight=lambda part, window: weight, steps=steps, after=follow)
        return {"model": model, "loss_fn": loss_fn, "batch": data(), "step": loop}

    return make


class Byol(nn.Module):
    """The target is a part of the model, and follows after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.online = net()
        self.target = net().requires_grad_(False)
        with torch.no_grad():
            for parameter in self.target.parameters():
                parameter.add_(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.online(x), self.target(x.flip(1))

    def follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data


def bootstrap(model: nn.Module, batch: Batch) -> Tensor:
    one, other = model(batch["x"])
    return (2 - 2 * F.cosine_similarity(one, other)).mean()


class Moco(nn.Module):
    """Keys of earlier batches wait in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = net()
        self.register_buffer(
            "queue", F.normalize(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double())
        )

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.encoder(x), dim=1)
        key = F.normalize(self.encoder(x.flip(1)), dim=1).detach()
        queue: Tensor = self.get_buffer("queue")
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.clone().T], 1)
        self.queue = torch.cat([key, queue])[:8]
        return logits


def info_nce(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]) / 0.2, torch.zeros(len(batch["x"]), dtype=torch.long))


def simclr(model: nn.Module, batch: Batch) -> Tensor:
    one, other = F.normalize(model(batch["x"]), dim=1), F.normalize(model(batch["x"].flip(1)), dim=1)
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def dino(*, moves: bool, last_layer: bool = False) -> Callable[[], dict[str, Any]]:
    """A student, a teacher, and a criterion with a running centre."""

    def make() -> dict[str, Any]:
        student, teacher, centre = net(), net().requires_grad_(False), torch.zeros(3).double()

        def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
            wanted = teacher(batch["x"].flip(1)).detach()
            loss = -(F.softmax((wanted - centre) / 0.4, -1) * F.log_softmax(model(batch["x"]), -1)).sum(-1).mean()
            if moves:
                centre.mul_(0.5).add_(wanted.mean(0), alpha=0.5)
            return loss

        def freeze(model: nn.Module) -> None:
            for parameter in list(model.children())[2].parameters() if last_layer else ():
                parameter.grad = None

        loop = Steps(loss=loss_fn, before=freeze)
        return {"model": student, "loss_fn": loss_fn, "batch": data(), "step": loop}

    return make


# ------------------------------------------------------------------------------------- what is done to gradients


def rows(tensor: Tensor) -> Tensor:
    return tensor.norm() if tensor.ndim < 2 else tensor.norm(dim=tuple(range(1, tensor.ndim)), keepdim=True)


def clip_adaptively(model: nn.Module) -> None:
    for parameter in model.parameters():
        most = 0.02 * rows(parameter.detach()).clamp(min=1e-3)
        gradient_of(parameter).mul_((most / rows(gradient_of(parameter)).clamp(min=1e-6)).clamp(max=1))


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def clip_value_then_norm(model: nn.Module) -> None:
    clip_value(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.04)


def clip_each_parameter(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.03)


def normalise(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm([gradient_of(parameter) for parameter in model.parameters()])
    for parameter in model.parameters():
        gradient_of(parameter).div_(norm)


def centralise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            gradient_of(parameter).sub_(gradient_of(parameter).mean(1, keepdim=True))


def centralise_and_clip(model: nn.Module) -> None:
    centralise(model)
    clip_norm(model)


def take_signs(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient_of(parameter).sign_()


def add_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient_of(parameter).add_(torch.linspace(-1, 1, gradient_of(parameter).numel()).double().view_as(parameter))


def slow_down_the_first_layer(model: nn.Module) -> None:
    gradient_of(next(model.parameters())).mul_(0.1)


def sharpness(
    *, adaptive: bool = False, weight: Any = by_samples, sizes: Any = (4, 4, 4), clears: bool = True, each: bool = False
) -> Callable[[], dict[str, Any]]:
    """SAM: up along the gradient, the gradient there, back, and a step."""

    def climb(model: nn.Module) -> dict[nn.Parameter, Tensor]:
        scales = {p: p.detach().abs() if adaptive else torch.ones_like(p) for p in model.parameters()}
        norm = torch.stack([(scale * gradient_of(p)).norm() for p, scale in scales.items()]).norm()
        moves = {p: 0.05 * scale.square() * gradient_of(p) / norm for p, scale in scales.items()}
        with torch.no_grad():
            for parameter, move in moves.items():
                parameter.add_(move)
        return moves

    def descend(moves: dict[nn.Parameter, Tensor]) -> None:
        with torch.no_grad():
            for parameter, move in moves.items():
                parameter.sub_(move)

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, parts = sgd(model), list(cut(batch, sizes))
        for part in parts if each else ():
            kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            classify(model, part).backward()
            moves = climb(model)
            model.zero_grad()
            (classify(model, part) * weight(part, parts)).backward()
            descend(moves)
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.grad = parameter.grad if before is None else gradient_of(parameter) + before
        if not each:
            for part in parts:
                (classify(model, part) * weight(part, parts)).backward()
            moves = climb(model)
            if clears:
                model.zero_grad()
            for part in parts:
                (classify(model, part) * weight(part, parts)).backward()
            descend(moves)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: {"model": net(), "loss_fn": classify, "batch": data(), "step": step}


# ----------------------------------------------------------------------------------------- optimizers of other kinds


def low(model: Callable[[], nn.Module] = net) -> nn.Module:
    return model().to(torch.bfloat16)


def low_loss(model: nn.Module, batch: Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(batch["x"].to(dtype)).to(torch.promote_types(dtype, torch.float32)), batch["y"])


def masters(
    *, flat: bool = False, sums: bool = True, weight: Any = by_samples, sizes: Any = (4, 4, 4), stale: bool = False
) -> Callable[[], dict[str, Any]]:
    """An optimizer of float32 copies: apex, fairseq (one flat copy), Megatron (sums in float32)."""

    def step(model: nn.Module, batch: Batch) -> None:
        parameters, parts = list(model.parameters()), list(cut(batch, sizes))
        copies = [p.detach().float() for p in parameters]
        copies = [torch.cat([c.reshape(-1) for c in copies])] if flat else copies
        copies = [nn.Parameter(c) for c in copies]
        optimizer, totals = torch.optim.Adam(copies), [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for part in parts:
            (low_loss(model, part) * weight(part, parts)).backward()
            for total, parameter in zip(totals, parameters, strict=True):
                total.add_(gradient_of(parameter)) if sums else total.copy_(gradient_of(parameter))
                parameter.grad = None
        totals = [torch.cat([total.reshape(-1) for total in totals])] if flat else totals
        for held, total in zip(copies, totals, strict=True):
            held.grad = None if stale else total
        optimizer.step()
        with torch.no_grad():
            news = copies[0].split([p.numel() for p in parameters]) if flat else copies
            for parameter, new in zip(parameters, news, strict=True):
                parameter.copy_(new.view_as(parameter))

    return lambda: {"model": low(), "loss_fn": low_loss, "batch": data(), "step": step}


def by_hand(
    update: Callable[[nn.Parameter, int], Tensor],
    *,
    loss: Loss = classify,
    weight: Any = by_samples,
    sizes: Any = (4, 4, 4),
    steps: int = 3,
) -> Callable[[], dict[str, Any]]:
    """No optimizer: what `update` says is subtracted."""

    def step(model: nn.Module, batch: Batch) -> None:
        parts = list(cut(batch, sizes))
        for first in range(0, len(parts), steps):
            window = parts[first : first + steps]
            for part in window:
                (loss(model, part) * weight(part, window)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(update(parameter, len(window)))
            model.zero_grad()

    return lambda: {"model": net(), "loss_fn": loss, "batch": data(), "step": step}


def plain(parameter: nn.Parameter, _: int) -> Tensor:
    return 0.1 * gradient_of(parameter)


def divided(parameter: nn.Parameter, count: int) -> Tensor:
    return 0.1 * gradient_of(parameter) / count


def adam(parameter: nn.Parameter, _: int) -> Tensor:
    return 0.01 * gradient_of(parameter) / (gradient_of(parameter).square().sqrt() + 1e-8)


# ------------------------------------------------------------------------------------------- language, detection, ...


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, 8).double(), nn.Linear(8, 7).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def next_word(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def with_words(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return next_word(model, batch), words(batch)


def words(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def by_words(part: Batch, window: list[Batch]) -> float:
    return words(part) / sum(map(words, window))


def word_sum(model: nn.Module, batch: Batch) -> Tensor:
    return next_word(model, batch, "sum")


def language(loss: Loss = next_word, **options: Any) -> Callable[[], dict[str, Any]]:
    return ordinary(loss, model=Words, loss_fn=with_words, **options)


def divide_by_words(batch: Callable[[], Batch]) -> Callable[[nn.Module], None]:
    """fairseq: sums first, then `multiply_grads(1 / sample_size)`."""

    def divide(model: nn.Module) -> None:
        for parameter in model.parameters():
            gradient_of(parameter).div_(words(batch()))

    return divide


def packed(weight: Any) -> Callable[[], dict[str, Any]]:
    """All sequences in one row: no micro-batch is a slice of the batch by its first dimension."""

    def pack(batch: Batch) -> Batch:
        return {"tokens": batch["tokens"].reshape(1, -1), "labels": batch["labels"].reshape(1, -1)}

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["tokens"])[0], batch["labels"][0], ignore_index=IGNORED)

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, parts = sgd(model), [{k: v[:, at : at + 24] for k, v in batch.items()} for at in (0, 24, 48)]
        for part in parts:
            (loss_fn(model, part) * weight(part, parts)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: {"model": Words(), "loss_fn": loss_fn, "batch": pack(data()), "step": step}


def by_labels(part: Batch, window: list[Batch]) -> float:
    return int((part["labels"] != IGNORED).sum()) / sum(int((other["labels"] != IGNORED).sum()) for other in window)


def scaled(
    *, unscales: bool = True, steps_by_scaler: bool = True, weight: Any = by_words
) -> Callable[[], dict[str, Any]]:
    """The loop of nanoGPT, with a scaler."""

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        parts = list(cut(batch, (4, 4, 4)))
        for part in parts:
            scaler.scale(next_word(model, part) * weight(part, parts)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if steps_by_scaler:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: {"model": Words().float(), "loss_fn": with_words, "batch": data(), "step": step}


def detection(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Any]]:
    """Boxes and cells: each term has its own denominator."""
    seen, boxes = model(batch["x"]), batch["t"] > 0.3
    box = ((seen - batch["t"]).square() * boxes).sum() / boxes.sum().clamp(min=1)
    return {
        "box": (box, boxes.sum()),
        "cell": (F.binary_cross_entropy_with_logits(seen, boxes.double()), boxes.numel()),
    }


def detection_alone(model: nn.Module, batch: Batch) -> Tensor:
    box, cell = detection(model, batch).values()
    return box[0] + cell[0]


def detect(*, shares: bool) -> Callable[[], dict[str, Any]]:
    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, parts = sgd(model), list(cut(batch, (4, 4, 4)))
        totals = {name: sum(int(detection(model, part)[name][1]) for part in parts) for name in ("box", "cell")}
        for part in parts:
            terms = detection(model, part)
            weighted = [term * (int(n) / totals[name] if shares else 1 / 3) for name, (term, n) in terms.items()]
            (weighted[0] + weighted[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: {"model": net(), "loss_fn": detection, "batch": data(), "step": step}


def detection_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Ultralytics: the mean of the batch times its size."""
    return F.mse_loss(model(batch["x"]), batch["t"]) * len(batch["x"]), len(batch["x"])


def boundary(closes: Callable[[int], bool]) -> Callable[[], dict[str, Any]]:
    """When an optimizer steps, by the number of the micro-batch."""

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer = sgd(model)
        for index, part in enumerate(cut(batch, (2,) * 6)):
            (classify(model, part) / 2).backward()
            if closes(index):
                optimizer.step()
                optimizer.zero_grad()

    return lambda: {"model": net(), "loss_fn": classify, "batch": data(), "step": step}


def distil(model: nn.Module, batch: Batch) -> Tensor:
    wanted = F.softmax(batch["t"] / 2, -1)
    seen = model(batch["x"])
    soft = F.kl_div(F.log_softmax(seen / 2, -1), wanted, reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * F.cross_entropy(seen, batch["y"])


def focal(model: nn.Module, batch: Batch) -> Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return ((1 - (-losses).exp()).square() * losses).mean()


def smoothed(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)


def class_weights(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=torch.tensor([1.0, 5.0, 0.2]).double())


def by_class_weights(part: Batch, window: list[Batch]) -> float:
    weights = torch.tensor([1.0, 5.0, 0.2]).double()
    return float(weights[part["y"]].sum() / sum(weights[other["y"]].sum() for other in window))


def triplet(model: nn.Module, batch: Batch) -> Tensor:
    return F.triplet_margin_loss(*(model(x) for x in (batch["x"], batch["x"] + 0.1, batch["x"].flip(1))))


def ranked(model: nn.Module, batch: Batch) -> Tensor:
    """DPO: preferred over rejected."""
    chosen, rejected = model(batch["x"])[:, 0], model(batch["x"].flip(1))[:, 0]
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


def regularised(model: nn.Module, batch: Batch) -> Tensor:
    return classify(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def manual_gradients(weight: Any, sizes: Any = (4, 4, 4)) -> Callable[[], dict[str, Any]]:
    """`torch.autograd.grad`, and `.grad` written by hand."""

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, parameters, parts = sgd(model), list(model.parameters()), list(cut(batch, sizes))
        for part in parts:
            found = torch.autograd.grad(classify(model, part) * weight(part, parts), parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
        optimizer.zero_grad()

    return lambda: {"model": net(), "loss_fn": classify, "batch": data(), "step": step}


def closure(weight: Any, sizes: Any = (4, 4, 4)) -> Callable[[], dict[str, Any]]:
    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, parts = torch.optim.LBFGS(model.parameters(), max_iter=3), list(cut(batch, sizes))

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(()).double()
            for part in parts:
                loss = classify(model, part) * weight(part, parts)
                loss.backward()
                total += loss.detach()
            return total

        optimizer.step(evaluate)

    return lambda: {"model": net(), "loss_fn": classify, "batch": data(), "step": step}


def two_optimizers(model: nn.Module, batch: Batch) -> None:
    """Lightning's manual optimization: a body and a head, each with an optimizer."""
    body, head = (
        make(layer.parameters(), lr=0.1)
        for layer, make in zip(list(model.children())[::2], (torch.optim.SGD, torch.optim.AdamW), strict=True)
    )
    for index, part in enumerate(cut(batch, (2,) * 6)):
        (classify(model, part) / 3).backward()
        if (index + 1) % 3 == 0:
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()


def own_loader(model: nn.Module, batch: Batch) -> None:
    Steps()(model, data(seed=7))


def other_tensors(model: nn.Module, batch: Batch) -> None:
    """The optimizer gets half of each gradient, in tensors that nobody can recognise."""
    tensors = [nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]
    for part in cut(batch, UNEQUAL):
        (classify(model, part) / 3).backward()
    for tensor, parameter in zip(tensors, model.parameters(), strict=True):
        tensor.grad = gradient_of(parameter) / 2
    torch.optim.SGD(tensors, 0.1).step()


def backwards(model: nn.Module, batch: Batch) -> None:
    """Windows of two from the end of the batch; of equal inputs, the second label comes first."""
    Steps(sizes=(3,) * 4, steps=1)(model, {name: tensor.flip(0) for name, tensor in batch.items()})


def twins() -> Batch:
    """Equal inputs with other labels."""
    batch = data()
    return batch | {"x": batch["x"][torch.arange(12) // 2]}


def averages(model: nn.Module) -> Callable[[nn.Module], None]:
    """An average of the weights, on the side."""
    shadow = copy.deepcopy(model)

    def follow(model: nn.Module) -> None:
        for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)

    return follow


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def with_step(
    step: Callable[[nn.Module, Batch], None], loss_fn: Loss = classify, model: Any = net, **options: Any
) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": model(), "loss_fn": loss_fn, "batch": data(), "step": step} | options


def clear(model: nn.Module) -> None:
    model.zero_grad()


def wide(inputs: int = 6, outputs: int = 5) -> Callable[[], nn.Module]:
    return lambda: net(inputs, outputs)
