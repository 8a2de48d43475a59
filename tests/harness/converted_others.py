"""Published programs of other kinds (reinforcement learning, physics, graphs, experts, odd optimizers), converted."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.converting import (
    SGD,
    SIZES,
    Batch,
    N,
    as_a_batch,
    difference,
    draw,
    in_a_loop,
    joined,
    layers,
    one_after_another,
    program,
    split,
    trained,
    whole_numbers,
)
from macrobatch import Encoded, MacroStep, Sum


@program(
    "CleanRL, PPO",
    ("vwxyzjn/cleanrl", "fe8d8a0", "cleanrl/ppo.py"),
    "means of clipped policy and value losses and entropy; advantages normalised over the minibatch",
    "`MacroStep`; normalise before it",
    5,
)
def ppo() -> float:
    advantages = draw(N, seed=3)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    batch = (
        draw(N, 5), whole_numbers(3, N), draw(N, seed=4).mul(0.1), advantages, draw(N, seed=5), draw(N, seed=6)
    )  # fmt: skip

    def loss_fn(m: Any, b: Batch) -> Tensor:
        x, action, old, advantage, returns, values = b
        policy, value = torch.distributions.Categorical(logits=m[0](x)), m[1](x).view(-1)
        ratio = (policy.log_prob(action) - old).exp()
        gain = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        near = values + (value - values).clamp(-0.2, 0.2)
        error = 0.5 * torch.max((value - returns) ** 2, (near - returns) ** 2).mean()
        return gain - 0.01 * policy.entropy().mean() + error * 0.5

    model = nn.ModuleList([layers(5, 8, 3), layers(5, 8, 1, seed=1)])
    return as_a_batch(model, loss_fn, batch, lambda m: loss_fn(m, batch))


@program(
    "CleanRL, SAC",
    ("vwxyzjn/cleanrl", "fe8d8a0", "cleanrl/sac_continuous_action.py"),
    "two critics step, then an actor, then a temperature (a bare tensor)",
    "three `MacroStep`s, one after the other",
    9,
)
def sac() -> float:
    critics, actor = nn.ModuleList([layers(6, 8, 1), layers(6, 8, 1, seed=1)]), layers(4, 8, 4, seed=2)
    log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def drawn(m: nn.Module, b: Batch) -> tuple[Tensor, Tensor]:
        mean, log_std = m(b[0]).chunk(2, 1)
        policy = torch.distributions.Normal(mean, log_std.tanh().exp())
        action = mean + policy.stddev * b[3]
        return action.tanh(), (policy.log_prob(action) - torch.log(1 - action.tanh().pow(2) + 1e-6)).sum(1)

    def critic_loss(m: Any, b: Batch) -> Tensor:
        pair = torch.cat(b[:2], 1)
        return F.mse_loss(m[0](pair).view(-1), b[2]) + F.mse_loss(m[1](pair).view(-1), b[2])

    def actor_loss(m: nn.Module, b: Batch) -> Tensor:
        action, log_p = drawn(m, b)
        pair = torch.cat([b[0], action], 1)
        return (log_alpha.exp().item() * log_p - torch.min(critics[0](pair), critics[1](pair)).view(-1)).mean()

    def alpha_loss(m: nn.Module, b: Batch) -> Tensor:
        with torch.no_grad():
            _, log_p = drawn(m, b)
        return (-log_alpha.exp() * (log_p - 2)).mean()

    batch = (draw(N, 4), draw(N, 2, seed=2), draw(N, seed=3), draw(N, 2, seed=4))
    steps = [
        (critics, trained(critics), critic_loss),
        (actor, trained(actor), actor_loss),
        (actor, [log_alpha], alpha_loss),
    ]
    return one_after_another(steps, batch)


@program(
    "REINFORCE",
    ("pytorch/examples", "77f55b9", "reinforcement_learning/reinforce.py"),
    "a sum over the steps of an episode, weighted by normalised returns",
    '`reduction="total"`',
    3,
)
def reinforce() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        actions = zip(m(b[0]), b[1], b[2], strict=True)
        return torch.stack([-torch.distributions.Categorical(logits=p).log_prob(a) * r for p, a, r in actions]).sum()

    returns = [one - one.mean() for one in draw(N, seed=3).split(SIZES)]
    returns = [one / (one.std() + 1e-6) if len(one) > 1 else one for one in returns]
    batch = (draw(N, 5), whole_numbers(3, N), torch.cat(returns))
    return in_a_loop(layers(5, 8, 3), loss_of, batch, reduction="total", make=partial(SGD, lr=1e-2))


@program(
    "Physics-informed network",
    ("jayroxis/PINNs", "fcc37d2", "Burgers Equation/Burgers Inference (PyTorch).ipynb"),
    "means over collocation points (second derivatives) and boundary points; LBFGS",
    "in the closure: `MacroStep(model, None, ...)` for the first mean, `backward` for the second",
    5,
)
def pinn() -> float:
    inside, edge, weights = draw(N, 2), (draw(5, 2, seed=2), draw(5, 1, seed=3)), []

    def residual(m: nn.Module, points: Tensor) -> Tensor:
        x, t = (column.detach().requires_grad_() for column in points.split(1, 1))
        u = m(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)
        return ((u_t + u * u_x - 0.01 * u_xx) ** 2).mean()

    for micro in (None, 5):
        model = layers(2, 8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        gradient = MacroStep(model, None, residual, micro=5)

        def closure(model: Any = model, optimizer: Any = optimizer, gradient: Any = gradient, cut: Any = micro) -> Any:
            optimizer.zero_grad()
            on_edge = ((model(edge[0]) - edge[1]) ** 2).mean()
            if cut is None:
                loss = on_edge + residual(model, inside)
                loss.backward()
                return loss
            within = gradient(inside).loss
            on_edge.backward()
            return within + on_edge

        optimizer.step(closure)
        weights.append([p.detach() for p in model.parameters()])
    return difference(*weights)


@program(
    "Graph attention, PPI",
    ("pyg-team/pytorch_geometric", "5c6461b", "examples/ppi.py"),
    "binary cross-entropy over nodes and labels of graphs",
    "loader, `backward`, `step`",
    3,
)
def graphs() -> float:
    def loss_of(m: Any, b: Batch) -> Tensor:
        nodes, labels, graph = b
        inside = torch.where(graph[:, None] == graph, 0.0, -torch.inf)  # no edge leaves a graph
        hidden = m[0](nodes).tanh()
        return F.binary_cross_entropy_with_logits(m[1]((hidden @ hidden.T + inside).softmax(1) @ hidden), labels)

    graph = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))  # a micro-batch is a graph of its size
    batch = (draw(N, 3), (draw(N, 5, seed=2) > 0).double(), graph)
    return in_a_loop(layers(3, 8, 5)[::2], loss_of, batch)


class Experts(nn.Module):
    """Three experts, of which two see each sample, chosen by gates with noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.noise = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.double()

    def forward(self, x: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts say, the gates, and how likely each expert is to be among the two."""
        clean, spread = self.gate(x), F.softplus(self.noise(x)) + 1e-2
        noisy = clean + draws * spread
        top = noisy.softmax(1).topk(3, 1)
        chosen = top.values[:, :2]
        gates = torch.zeros_like(noisy).scatter(1, top.indices[:, :2], chosen / (chosen.sum(1, keepdim=True) + 1e-6))
        (last, first_out), normal = top.values[:, 1:].split(1, 1), torch.distributions.Normal(0, 1)
        likely = torch.where(
            noisy > first_out, normal.cdf((clean - first_out) / spread), normal.cdf((clean - last) / spread)
        )
        return (torch.stack([expert(x) for expert in self.experts], -1) * gates[:, None]).sum(-1), gates, likely


def balance(importance: Tensor, load: Tensor) -> Tensor:
    return 0.01 * sum((x.var() / (x.mean() ** 2 + 1e-10) for x in (importance, load)), torch.zeros(()).double())


@program(
    "Mixture of experts",
    ("davidmrau/mixture-of-experts", "f662999", "moe.py"),
    "cross-entropy, and a balance loss of the whole batch",
    "`joint=` with `Sum`",
    7,
)
def experts() -> float:
    batch = (draw(N, 4), whole_numbers(5, N), draw(N, 3, seed=3))

    def loss_fn(m: nn.Module, b: Batch) -> Encoded:
        output, gates, likely = m(b[0], b[2])
        return Encoded(F.cross_entropy(output, b[1]), len(b[0]), gates=Sum(gates.sum(0)), load=Sum(likely.sum(0)))

    def loss_of(m: nn.Module) -> Tensor:
        output, gates, likely = m(batch[0], batch[2])
        return F.cross_entropy(output, batch[1]) + balance(gates.sum(0), likely.sum(0))

    return as_a_batch(Experts(), loss_fn, batch, loss_of, joint=lambda _, e: balance(e.gates, e.load))


@program(
    "Knowledge distillation",
    ("haitongli/knowledge-distillation-pytorch", "9937528", "train.py"),
    "cross-entropy over samples, and a divergence from a teacher over samples and classes",
    "loader, `backward`, `step`",
    3,
)
def distillation() -> float:
    teacher = layers(6, 8, 5, seed=3)

    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        found = m(b[0])
        with torch.no_grad():
            wanted = teacher(b[0])
        near = F.kl_div((found / 6).log_softmax(1), (wanted / 6).softmax(1), reduction="none").mean()
        return near * (0.9 * 6 * 6) + F.cross_entropy(found, b[1]) * (1.0 - 0.9)

    return in_a_loop(layers(6, 8, 5), loss_of, (draw(N, 6), whole_numbers(5, N)))


# ----------------------------------------------------------------------------- optimizers that evaluate several times


@program(
    "Sine waves, LBFGS",
    ("pytorch/examples", "77f55b9", "time_sequence_prediction/train.py"),
    "mean squared error of an LSTM; a closure that evaluates it several times",
    "`MacroStep(model, None, ...)` in the closure",
    4,
)
def sines() -> float:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.LSTM(1, 6, num_layers=2, batch_first=True), nn.Linear(6, 1)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.rnn(x[..., None])[0]
            out: Tensor = self.head(hidden)
            return out[..., 0]

    waves, weights = (torch.arange(8) + 4 * draw(N, 1)).div(2).sin(), []
    for cut in (False, True):
        model = Sequence()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
        gradient = MacroStep(model, None, lambda m, b: F.mse_loss(m(b[:, :-1]), b[:, 1:]), micro=5)

        def closure(model: Any = model, optimizer: Any = optimizer, gradient: Any = gradient, cut: bool = cut) -> Any:
            optimizer.zero_grad()
            if cut:
                return gradient(waves).loss
            loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            return loss

        optimizer.step(closure)
        weights.append([p.detach() for p in model.parameters()])
    return difference(*weights)


@program(
    "SAM",
    ("davda54/sam", "3c3afdb", "example/train.py"),
    "a smoothed cross-entropy whose gradient is taken twice: at the weights, and at a point nearby",
    "`MacroStep(model, None, ...)` in place of each backward",
    4,
)
def sam() -> float:
    def loss_fn(m: nn.Module, b: Batch) -> Tensor:
        wanted = torch.full((len(b[1]), 5), 0.1 / 4, dtype=torch.float64).scatter(1, b[1][:, None], 0.9)
        return F.kl_div(m(b[0]).log_softmax(1), wanted, reduction="none").sum(-1).mean()

    def step(model: nn.Module, sgd: Any, backward: Any) -> None:
        backward()
        weights = trained(model)
        norm, olds = torch.stack([p.grad.norm() for p in weights if p.grad is not None]).norm(), []  # fmt: skip
        for p in weights:
            assert p.grad is not None
            olds.append(p.data.clone())
            p.data.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))
        sgd.zero_grad()
        backward()
        for p, old in zip(weights, olds, strict=True):
            p.data = old
        sgd.step()
        sgd.zero_grad()

    model, batches = layers(6, 8, 5), split((draw(N, 6), whole_numbers(5, N)))
    other, gradient = copy.deepcopy(model), MacroStep(model, None, loss_fn, micro=2)
    sgd, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    for index in (0, 3):
        batch = joined(batches[index : index + 3])
        step(model, sgd, lambda batch=batch: gradient(batch))
        step(other, plain, lambda batch=batch: loss_fn(other, batch).backward())
    return difference([p.detach() for p in trained(model)], [p.detach() for p in trained(other)])
