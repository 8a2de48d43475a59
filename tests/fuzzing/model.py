"""What random programs train: batches, models made of pieces, and their optimizers."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzzing.program import Program

WIDTH, LENGTH = 3, 5  # of a sample's features, and of a sequence


def draw(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


# ----------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Batch:
    """Samples, each with targets `y` and weights `w`: what a loss is a mean over. `ids` tell the samples apart."""

    x: Tensor  # (samples, WIDTH), or (samples, LENGTH, WIDTH)
    y: Tensor  # (samples,), or (samples, LENGTH)
    w: Tensor  # like y
    ids: Tensor  # (samples,)

    @property
    def items(self) -> float:
        return self.w.sum().item()

    def first(self, samples: int) -> "Batch":
        return Batch(*(tensor[:samples] for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.y, self.w, self.ids


def make_batch(p: Program, epoch: int, index: int, samples: int, *rank: int) -> Batch:
    generator, dtype = draw(p.seed, epoch, index, *rank), getattr(torch, p.dtype)
    shape = (samples, LENGTH) if p.is_sequence else (samples,)
    x = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(*shape, generator=generator, dtype=torch.float64)
    w = torch.randint(1, 5, shape, generator=generator).double()
    if p.fractional:
        w /= 8
    if p.is_sequence:
        w = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)).double()
    if p.driver == "macrostep" and samples and "expert" not in p.pieces and not p.is_sequence and not rank:
        w -= w.amin()  # some samples count for nothing
    if p.driver == "macrostep" and p.items == "none":
        w.fill_(1.0)  # a loss alone is a mean over its samples
    if (epoch, index) in p.empty and rank in ((), (0,)):
        w.zero_()
    if "expert" in p.pieces:  # most batches go to the expert as a whole, or not at all
        x[..., 0] = x[..., 0].abs() * torch.tensor([1.0, -1.0, -1.0, 0.5])[torch.randint(4, (), generator=generator)]
    ids = torch.arange(samples) + 1000 * (100 * epoch + index)
    return Batch(x.to(dtype), y.to(dtype), w.to(dtype), ids)


def concatenate(batches: Iterable[Batch]) -> Batch:
    return Batch(*map(torch.cat, zip(*(batch.tensors() for batch in batches), strict=True)))


# ------------------------------------------------------------------------------------------------------------ models


class Checkpoint(torch.autograd.Function):
    """Activation checkpointing as other libraries write it: a backward inside a backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.function = function
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.function(hidden)
        torch.autograd.backward(output, gradient)
        return None, hidden.grad


class PlannedError(Exception):
    """Raised by a program on purpose."""


class Fails(torch.autograd.Function):
    """The identity, whose backward raises in the middle of a model's."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ctx.error


class Dense(nn.Module):
    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(outputs, WIDTH)), nn.Parameter(torch.empty(outputs))

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight, self.bias)


class Piece(nn.Module):
    """One part of a model, of some kind. `plain`: without what ought to change nothing."""

    def __init__(self, kind: str, stem: Dense, plain: bool) -> None:
        super().__init__()
        self.kind, self.plain = kind, plain
        if kind == "norm":
            self.norm: nn.Module = nn.LayerNorm(WIDTH)
        elif kind == "batchnorm":
            self.norm = nn.BatchNorm1d(WIDTH).eval()
        elif kind == "statistics":
            self.register_buffer("running", torch.zeros(WIDTH))
        elif kind == "tied":
            self.weight = stem.weight
        elif kind in ("gain", "scalar"):
            self.gain = nn.Parameter(torch.empty(() if kind == "scalar" else (1,)))
        elif kind == "float32 gain":
            self.gain = nn.Parameter(torch.empty(WIDTH))
        elif kind == "flat":
            self.flat = nn.Parameter(torch.empty(WIDTH * WIDTH + WIDTH))
        elif kind == "complex":
            self.phase = nn.Parameter(torch.empty(WIDTH, dtype=torch.complex64))
        elif kind != "dropout":
            self.dense = Dense()
        if kind == "weight norm":
            nn.utils.parametrizations.weight_norm(self.dense)
        if kind == "parameter hook":
            self.dense.weight.register_hook(lambda gradient: 2 * gradient)
        if kind == "module hook":
            halve = lambda _, inputs, __: tuple(None if g is None else g / 2 for g in inputs)  # noqa: E731
            self.dense.register_full_backward_hook(halve)

    def residual(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.dense(h))

    def forward(self, h: Tensor) -> Tensor:
        match self.kind:
            case "norm":
                return self.norm(h)
            case "batchnorm":
                return self.norm(h.flatten(0, -2)).view_as(h)
            case "statistics":
                return self.centre(h)
            case "dropout":
                return F.dropout(h, 0.5)
            case "tied":
                return h + F.linear(torch.tanh(h), self.weight)
            case "gain":
                return h + self.gain.expand(h.shape)
            case "scalar":
                return h * self.gain
            case "float32 gain":
                return h * self.gain.to(h.dtype)
            case "flat":  # one parameter, used through views of it
                return h + F.linear(torch.tanh(h), self.flat[:-WIDTH].view(WIDTH, WIDTH), self.flat[-WIDTH:])
            case "complex":
                return h + (h * self.phase).real
            case "in place":
                return F.relu_(self.residual(h))
            case "unused":
                return h
            case "detached":
                return h + torch.tanh(self.dense(h)).detach()
            case "expert":
                return self.route(h)
            case "activation hook":
                return self.hooked(h)
            case "penalty":
                return self.penalised(h)
            case "checkpoint" if not self.plain:
                return checkpoint(self.residual, h, use_reentrant=False)
            case "reentrant checkpoint" if not self.plain:
                return checkpoint(self.residual, h, use_reentrant=True)
            case "custom checkpoint" if not self.plain:
                return Checkpoint.apply(self.residual, h)
        return self.residual(h)

    def centre(self, h: Tensor) -> Tensor:
        """By the mean of the micro-batch, which is kept: a BatchNorm in training mode that copes with one sample."""
        mean = h.flatten(0, -2).mean(0)
        self.running.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return h - mean / 2

    def route(self, h: Tensor) -> Tensor:
        """Only samples that the stem sent this way reach the expert; in other batches it has no gradient."""
        chosen = torch.nonzero(self.routed, as_tuple=True)
        # A tensor of its own in any case: a hook on `h` would else run, or not, with the samples of a micro-batch.
        return h.index_put(chosen, self.residual(h[chosen])) if len(chosen[0]) else h.clone()

    def hooked(self, h: Tensor) -> Tensor:
        output = self.residual(h)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / 2)
        return output

    def penalised(self, h: Tensor) -> Tensor:
        """A gradient of its own in the forward, as in a gradient penalty."""
        if not torch.is_grad_enabled():
            return h
        leaf = h if h.requires_grad else h.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(torch.tanh(self.dense(leaf)).sum(), leaf, create_graph=True)
        return h + slope


class Net(nn.Module):
    """A stem, pieces, and a tail that has a number for each position; `offset` reaches the loss by views alone."""

    def __init__(self, p: Program, *, plain: bool, name: str = "") -> None:
        super().__init__()
        self.p, dtype = p, getattr(torch, p.dtype)
        stem = Dense()
        self.body = nn.ModuleList([stem, *(Piece(kind, stem, plain) for kind in p.pieces)])
        self.tail = nn.Module()
        self.tail.head = Dense(1)
        if p.offset:
            shape = {"scalar": (), "view": (1, 1)}.get(p.offset, (1,))
            self.tail.offset = nn.Parameter(torch.empty(shape))
        generator = draw(p.seed, "weights", name)
        narrow = {id(q) for piece in self.body[1:] if piece.kind == "float32 gain" for q in piece.parameters()}
        for parameter in self.parameters():
            drawn = torch.randn(*parameter.shape, 2, generator=generator, dtype=torch.float64).to(dtype) / 2
            drawn = drawn.float() if id(parameter) in narrow else drawn
            parameter.data = torch.view_as_complex(drawn) if parameter.is_complex() else drawn[..., 0].clone()
        for buffer_name, buffer in self.named_buffers():
            if "running" in buffer_name:
                values = torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.5
                buffer.data = values.to(dtype)
        self.named = dict(self.named_parameters())
        self.others = [Dense(1).to(dtype)] if p.other else []  # in the graph, but no part of this model
        for parameter in (q for other in self.others for q in other.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) / 2
        self.fails: Exception | None = None
        stem.requires_grad_(p.stem == "trained")
        for piece in self.body[1:]:
            if piece.kind == "frozen":
                piece.requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        stem, *pieces = self.body
        h = stem(x)
        if not h.requires_grad and torch.is_grad_enabled():
            h.requires_grad_(True)  # as transformers' enable_input_require_grads() does
        for piece in pieces:
            if piece.kind == "expert":
                piece.routed = x[..., 0] > 0
            h = piece(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if self.fails is not None:
            h = Fails.apply(h, self.fails)
        return sum(part(h) for part in (self.tail.head, *self.others)).squeeze(-1)

    def clear(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def shift(self) -> Tensor | None:
        """The offset, as a scalar."""
        if not self.p.offset:
            return None
        offset = self.tail.offset
        match self.p.offset:
            case "squeeze":
                return offset.squeeze()
            case "view" | "reshape":
                return offset.view(()) if self.p.offset == "view" else offset.reshape(())
            case "select":
                return offset[0]
            case "expand":
                return offset.expand(3)[1]
        return offset

    def parts(self) -> list[nn.Module]:
        """The models as they are passed."""
        return [self.body, self.tail] if self.p.split else [self]


def errors(net: Net, batch: Batch, x: Tensor | None = None) -> Tensor:
    """Of every position. `x` takes the place of the batch's own."""
    return (net(batch.x if x is None else x) - batch.y) ** 2


def micro_loss(p: Program, net: Net, batch: Batch, x: Tensor | None = None) -> Tensor:
    """The loss of a micro-batch as a user writes it."""
    losses, shift = errors(net, batch, x), net.shift()
    if p.readable and p.reduction == "mean":  # the same mean in one node, which knows its count
        weights = torch.arange(5, dtype=losses.dtype)
        mean = F.nll_loss(-losses.reshape(-1, 1).expand(-1, 5), batch.w.long().reshape(-1), weights, ignore_index=0)
        return mean if shift is None else mean + shift
    total, count = (batch.w * losses).sum(), batch.w.sum()
    if p.reduction != "mean":
        return total if shift is None else total + count * shift
    mean = total / (count if p.items in HOST_KNOWS else count.clamp(min=1 / 8))
    return mean if shift is None else mean + shift


HOST_KNOWS = ("int", "float")  # a mean over no items is NaN: excused where the host sees that there are none

# ---------------------------------------------------------------------------------------------- what trains a model


@dataclass
class Trainee:
    p: Program
    net: Net
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    schedulers: list[Any] = field(init=False)
    scaler: Any = field(init=False)
    seen: list[dict[str, Tensor | None]] = field(default_factory=list)  # gradients handed to the last optimizer

    def __post_init__(self) -> None:
        p, parameters = self.p, list(self.net.named.values())
        if p.partial:
            parameters.pop()
        many = [parameters if p.shared else parameters[i :: p.optimizers] for i in range(p.optimizers)]
        self.optimizers = [make_optimizer(p, mine) for mine in many]
        self.schedulers = [make_scheduler(p.scheduler, o) for o in self.optimizers] if p.scheduler else []
        self.scaler = None
        if p.scaler:
            scale, interval = p.scaler
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        if p.writing_hook:  # in one big batch it runs once
            self.net.tail.head.weight.register_post_accumulate_grad_hook(halve)
        for optimizer in self.optimizers:
            if p.hook == "clip values":
                mine = [q for group in optimizer.param_groups for q in group["params"]]
                optimizer.register_step_pre_hook(lambda *_, mine=mine: clip_values(mine))
        if p.hook == "watch":
            self.optimizers[-1].register_step_pre_hook(lambda *_: self.seen.append(gradients(self.net)))


def halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def clip_values(parameters: list[nn.Parameter]) -> None:
    if any(parameter.grad is not None for parameter in parameters):
        nn.utils.clip_grad_value_(parameters, 0.05)


def make_optimizer(p: Program, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    lr = 0.005
    groups: Any = parameters
    if p.groups:
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": lr / 2, "weight_decay": 0.1}]
    flags = {} if p.how == "default" else {"foreach": p.how == "foreach"}
    if p.how == "fused":
        flags = {"fused": True}
    eps = 1e-5 if p.dtype == "float64" else 1e-2 if p.dtype == "float32" else 1.0
    match p.optimizer:
        case "SGD":
            return torch.optim.SGD(groups, lr=lr, **flags)
        case "momentum":
            return torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=0.05, nesterov=p.seed % 2 == 0, **flags)
        case "AdamW":
            return torch.optim.AdamW(groups, lr=lr, eps=eps, weight_decay=0.1, **flags)
        case "Adam":
            return torch.optim.Adam(groups, lr=lr, eps=eps, amsgrad=p.seed % 2 == 0, **flags)
        case "Adagrad":
            return torch.optim.Adagrad(groups, lr=lr, eps=eps, initial_accumulator_value=0.01, **flags)
        case "RMSprop":
            return torch.optim.RMSprop(groups, lr=lr, eps=eps, momentum=0.5, **flags)
    raise AssertionError(p.optimizer)


def make_scheduler(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    match kind:
        case "exponential":
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        case "lambda":
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        case "one cycle":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=200, cycle_momentum=False)
    raise AssertionError(kind)


def gradients(net: Net) -> dict[str, Tensor | None]:
    return {name: None if q.grad is None else q.grad.detach().clone() for name, q in net.named.items()}


def rates(trainee: Trainee) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for optimizer in trainee.optimizers for group in optimizer.param_groups)
