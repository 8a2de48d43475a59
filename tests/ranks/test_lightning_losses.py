"""What a loss is a mean over, read by `ExactStrategy` on two real processes: exact, or refused by all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness import reference
from harness.lightnings import Task, fit
from harness.ranks import Outcome, all_refused, all_well, full_weights, same_on_all, share
from harness.reference import IGNORED, Batch, relative_error
from macrobatch.lightning import ExactStrategy

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
COUNT, STEPS = 5, 3


def tokens(net: nn.Module, batch: Batch, **options: Any) -> Tensor:
    logits = net(batch.x).flatten(0, 1)
    return F.cross_entropy(logits, batch.y.flatten(), ignore_index=IGNORED, **options)


def mixed(net: nn.Module, batch: Batch) -> Tensor:
    """A sum of means whose counts keep their proportion: both are over all positions."""
    logits = net(batch.x)
    return logits.square().mean() + 0.3 * F.huber_loss(logits, torch.ones_like(logits))


def masked(net: nn.Module, batch: Batch) -> Tensor:
    mask = batch.y != IGNORED
    losses = F.cross_entropy(net(batch.x).transpose(1, 2), batch.y.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def two_counts(net: nn.Module, batch: Batch) -> Tensor:
    return tokens(net, batch) + net(batch.x)[:, 0].square().mean()


LOSSES: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "tokens": tokens,
    "smoothed": partial(tokens, label_smoothing=0.1),
    "elements": lambda net, batch: net(batch.x).square().mean(),
    "mixed": mixed,
    "masked": masked,
    "counted": masked,  # with its items
    "divided": lambda net, batch: tokens(net, batch) / STEPS,
    "a sum": lambda net, batch: net(batch.x).square().sum(),
    "two counts": two_counts,
}


class Lossy(Task):
    """Learns with one of these losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        micro = Batch(batch["x"], batch["y"])
        loss = LOSSES[self.name](self.net, micro)
        return {"loss": loss, "items": (micro.y != IGNORED).sum()} if self.name == "counted" else loss


class Twice(Lossy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Own(Lossy):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


def train(name: str, steps: int = STEPS, make: type[Lossy] = Lossy, **options: Any) -> Outcome:
    task = make(name)
    batches = [micro for _, micro in share(dist.get_rank(), COUNT)]
    trainer = fit(task, batches, devices=2, strategy=ExactStrategy("ddp", steps=steps, **options))
    result = trainer.strategy.result
    return {"weights": full_weights(task.net), "items": result.items, "loss": result.loss}


def whole(name: str, steps: int) -> dict[str, Tensor]:
    """One process, each step with one big batch of both ranks."""
    own = reference.trainee()
    shares = [[micro for _, micro in share(rank, COUNT)] for rank in (0, 1)]
    for begin in range(0, COUNT, steps):
        batch = reference.concatenate([micro for mine in shares for micro in mine[begin : begin + steps]])
        own.optimizers[0].zero_grad()
        LOSSES[name](own.model, batch).backward()
        own.optimizers[0].step()
        own.schedulers[0].step()
    return reference.weights_of(own.model)


EXACT = [
    *((name, steps, {}) for name in ("tokens", "smoothed", "elements", "mixed", "counted") for steps in (1, STEPS)),
    *((name, STEPS, {"micro": 2}) for name in ("tokens", "elements", "counted")),
]
SCENARIOS |= {f"{name} {steps} {options}": partial(train, name, steps, **options) for name, steps, options in EXACT}
SCENARIOS |= {
    "masked 3": partial(train, "masked"),
    "masked 1": partial(train, "masked", 1),
    "masked cut": partial(train, "masked", micro=2),
    "divided": partial(train, "divided"),
    "a sum": partial(train, "a sum"),
    "two counts": partial(train, "two counts"),
    "twice": partial(train, "tokens", make=Twice),
    "own": partial(train, "tokens", 1, make=Own),
}


@pytest.mark.parametrize(("name", "steps", "options"), EXACT, ids=str)
def test_each_step_is_that_of_one_big_batch(on_two_ranks, name, steps, options):
    outcomes = all_well(on_two_ranks[f"{name} {steps} {options}"])
    same_on_all(outcomes, "weights", "loss", "items")
    assert relative_error(outcomes[0]["weights"], whole(name, steps)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("masked 3", ["DivBackward0 was not understood", '{"loss": loss, "items": n}']),
        ("masked 1", ["DivBackward0 was not understood", '{"loss": loss, "items": n}']),
        ("masked cut", ["DivBackward0 was not understood", '{"loss": loss, "items": n}']),
        ("divided", ["divided by 3", "leave the division out"]),
        ("a sum", ["is a sum", '"loss": loss / n, "items": n']),
        ("two counts", ["several means", "MacroStep(..., counts=...)"]),
        ("twice", ["Twice.optimizer_step computes the loss several times"]),
        ("own", ["Own has a backward() of its own", "steps=1 in one process"]),
    ],
)
def test_what_cannot_be_exact_is_refused_by_all_ranks(on_two_ranks, name, words):
    all_refused(on_two_ranks[name], *words)
