"""Models, losses and loops of the right steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness.loops import (
    UNEQUAL,
    Loop,
    batch_of,
    by_items,
    loss_fn,
    pieces,
    sequences,
    two_counts,
    two_terms,
)
from harness.peers import accelerator, loader_of
from harness.reference import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    Attention,
    Batch,
    Convolution,
    Experts,
    PartlyFrozen,
    Tied,
    mean_loss,
    sum_loss,
)
from macrobatch import Accumulator, MacroStep, by_tokens

RIGHT = Loop(weight=by_items)


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(checkpoint(lambda h: self.norm(h + torch.tanh(self.value(h))), h, use_reentrant=False))


class Uncalled(Attention):
    """Never called itself: its loss uses a method of its own."""

    def encode(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


def encoded_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    logits = model.encode(batch.x)
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED), batch.items


class Local(nn.Module):
    """Each position by itself, so that padding may be trimmed."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class Recurrent(nn.Module):
    """Dropout between the layers of a GRU, which is a number that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gru = nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(x))[0])


class Narrow(nn.Module):
    """Computes in float32 whatever it is given, as the norms of many language models do."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Aside(Local):
    """Keeps what the loss is made of, and returns something else."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.embedding(x)
        return self.head(self.hidden[:, :1])


def loss_aside(model: Any, batch: Batch) -> tuple[Tensor, int]:
    model(batch.x)
    logits = F.linear(model.hidden, model.head.weight, model.head.bias)
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED), batch.items


class Towers(nn.Module):
    """Called twice for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Local()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def distance_of_towers(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.x) - model(batch.x.flip(1))).square().mean()


def accumulated(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> Callable[[nn.Module, Batch], None]:
    def step(model: nn.Module, batch: Batch) -> None:
        acc = Accumulator(model, make([p for p in model.parameters() if p.requires_grad], lr=0.1), steps=4, **options)
        for micro in acc.batches(list(pieces(batch, 5))):
            acc.backward(*loss_fn(model, micro))
            acc.step()

    return step


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def mean_left_to_clipping(model: nn.Module, batch: Batch) -> None:
    """The gradient is divided after the last backward, and clipped then."""
    MacroStep(model, None, loss_fn, micro=5)(batch)
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 0.02)
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


def clipping_each(limit: float, least_dims: int = 0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """For `make_optimizer`: each parameter's gradient is clipped by its own norm."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @optimizer.register_step_pre_hook
        def clip(*_: object) -> None:
            for parameter in model.parameters():
                if parameter.dim() >= least_dims:
                    nn.utils.clip_grad_norm_(parameter, limit)

        return optimizer

    return make


class CallsItsParent(torch.optim.SGD):
    """So hooks run twice in each step; and its step changes gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad - parameter.grad.mean()
        return super().step(closure)


def scaled(model: nn.Module, batch: Batch) -> None:
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for micro in pieces(batch, 5):
        scaler.scale(mean_loss(model, micro) * by_items([batch], micro)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def autocast(model: nn.Module, batch: Batch) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(model, batch)


def in_a_closure(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> None:
        optimizer.zero_grad()
        for micro in pieces(batch, 5):
            (mean_loss(model, micro) * by_items([batch], micro)).backward()

    optimizer.step(closure)


def two_optimizers(model: Any, batch: Batch) -> None:
    head = torch.optim.SGD(model.head.parameters(), 0.1)
    rest = torch.optim.AdamW([p for name, p in model.named_parameters() if "head" not in name], 0.1)
    micro_batches = list(pieces(batch, 5))
    for index, micro in enumerate(micro_batches):
        first = index - index % 4
        (mean_loss(model, micro) * by_items(micro_batches[first : first + 4], micro)).backward()
        if index % 4 == 3 or index == len(micro_batches) - 1:
            head.step(), rest.step()
            head.zero_grad(), rest.zero_grad()


def in_the_backward(model: nn.Module, batch: Batch) -> None:
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    try:
        mean_loss(model, batch).backward()
    finally:
        for hook in hooks:
            hook.remove()


def without_an_optimizer(model: nn.Module, batch: Batch) -> None:
    for micro in pieces(batch, 5):
        (mean_loss(model, micro) * by_items([batch], micro)).backward()


def losses_added_first(model: nn.Module, batch: Batch) -> None:
    sum(mean_loss(model, micro) * by_items([batch], micro) for micro in pieces(batch, 5)).backward()


def divided_at_the_end(model: nn.Module, batch: Batch) -> None:
    for micro in pieces(batch, 5):
        sum_loss(model, micro).backward()
    for parameter in model.parameters():
        parameter.grad /= batch.items


def with_an_evaluation(model: nn.Module, batch: Batch) -> None:
    """Forwards that are no training, before, between and after the windows."""
    for _ in range(2):
        with torch.no_grad():
            model(batch.x)
        model(batch.x[:2])  # with a graph, but nobody goes back through it
        RIGHT(model, batch)
    model(batch.x[:3])


def in_training_mode(model: nn.Module, batch: Batch) -> None:
    model.train()
    mean_loss(model, batch).backward()


def recomputed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The whole forward happens again in the backward."""
    with set_checkpoint_early_stop(False):
        logits = checkpoint(model, batch.x, use_reentrant=False)
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED), batch.items


def shuffled(batch: Batch, size: int) -> Iterator[Batch]:
    order = torch.randperm(len(batch.x))
    yield from pieces(Batch(batch.x[order], batch.y[order]), size)


def trimmed(batch: Batch, size: int) -> Iterator[Batch]:
    for micro in pieces(batch, size):
        longest = int((micro.y != IGNORED).sum(1).max())
        yield Batch(micro.x[:, :longest], micro.y[:, :longest])


def padded(batch: Batch) -> Batch:
    return Batch(batch.x.masked_fill(batch.y == IGNORED, 0), batch.y)


def accelerate_in_bf16(model: nn.Module, batch: Batch) -> None:
    with accelerator(mixed_precision="bf16") as theirs:
        model, optimizer, loader = theirs.prepare(model, torch.optim.AdamW(model.parameters()), loader_of(batch))
        for x, y in loader:
            with theirs.accumulate(model):
                theirs.backward(mean_loss(model, Batch(x, y)))
                optimizer.step()
                optimizer.zero_grad()


def by_length(model: nn.Module, batch: dict[str, Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    MacroStep(model, optimizer, named_loss, micro=by_tokens(40))(batch)


def named_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    return loss, (batch["labels"] != IGNORED).sum()


SEQUENCES = sequences()


def prompted() -> dict[str, Tensor]:
    """With prompts, which are shown but not trained."""
    labels = SEQUENCES["labels"].clone()
    labels[:, :2] = IGNORED
    return SEQUENCES | {"labels": labels}


def filled_on_the_left() -> dict[str, Tensor]:
    return {name: tensor.flip(1) for name, tensor in SEQUENCES.items()}


def other_way_round() -> dict[str, Tensor]:
    """A mask of what is padding, not of what is shown."""
    return SEQUENCES | {"attention_mask": 1 - SEQUENCES["attention_mask"]}


def two_languages() -> dict[str, Tensor]:
    """Labels that are no tokens of the input, and have nothing to do with its mask."""
    return SEQUENCES | {"labels": batch_of(seed=1, items=UNEQUAL).y}


def with_a_label_for_padding() -> dict[str, Tensor]:
    return {"input_ids": SEQUENCES["input_ids"], "labels": SEQUENCES["input_ids"]}


def averaged_as_it_goes(model: nn.Module, batch: Batch) -> None:
    """Gradients are made smaller between backwards, on purpose: they are a mean at any time."""
    items = 0
    for micro in pieces(batch, 5):
        items += micro.items
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 - micro.items / items
        (mean_loss(model, micro) * micro.items / items).backward()


FLOATS = (torch.float64, torch.float32, torch.bfloat16)


EVERY_MODEL = (Attention, Tied, Experts, Convolution, PartlyFrozen)


def terms_in_windows(model: nn.Module, batch: Batch) -> None:
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=4, counts=two_counts)
    for micro in acc.batches(list(pieces(batch, 5))):
        acc.backward(two_terms(model, micro))
        acc.step()
