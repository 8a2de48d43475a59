"""Runs the step of a published program, converted as the docs say, and compares it with one big batch."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch import Accumulator, MacroStep

SGD = partial(torch.optim.SGD, lr=0.1)
SIZES = (4, 2, 5, 3, 1, 6)  # samples of the micro-batches: two windows of three
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Program:
    """One row of the page. `error` runs it."""

    name: str
    repository: str
    commit: str
    file: str
    step: str
    changed: str
    lines: int
    error: Callable[[], float]


PROGRAMS: list[Program] = []


def program(
    name: str, source: tuple[str, str, str], step: str, changed: str, lines: int
) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Add a function that runs a program to the page. Its `source` is a repository on GitHub, a commit, a file."""
    repository, commit, file = source

    def register(error: Callable[[], float]) -> Callable[[], float]:
        facts = {"repository": repository, "commit": commit, "file": file}
        PROGRAMS.append(Program(name=name, step=step, changed=changed, lines=lines, error=error, **facts))
        return error

    return register


# ------------------------------------------------------------------------------------------------- what all use


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_numbers(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def layers(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    pairs = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1]).double()


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for p in parameters]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    largest = max(one.abs().max() for one in expected)
    return max(((a - b).abs().max() / largest).item() for a, b in zip(found, expected, strict=True))


def trained(model: Any) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


Batch = tuple[Tensor, ...]
Terms = dict[str, tuple[Tensor, Any]]
PLAIN = "loader, `backward`, `step`; `/ steps` goes"
N = sum(SIZES)


def whole(loss: Tensor | Terms) -> Tensor:
    """The loss of one big batch: terms, each a mean, are added up."""
    return loss if isinstance(loss, Tensor) else torch.stack([term for term, _ in loss.values()]).sum()


def split(batch: Batch) -> list[Batch]:
    return list(zip(*(tensor.split(SIZES) for tensor in batch), strict=True))


def joined(batches: Sequence[Batch]) -> Batch:
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def in_a_loop(
    model: nn.Module,
    loss_of: Callable[[Any, Batch], Tensor | Terms],
    batch: Batch,
    *,
    items: Callable[[Batch], Any] = lambda _: None,
    divisor: Callable[[Batch], Any] = lambda _: 1,
    make: Any = SGD,
    max_norm: float | None = None,
    **options: Any,
) -> float:
    """The largest error of the windows of an Accumulator. Each window is repeated as one big batch on a copy.

    The program divides the loss of a big batch by `divisor`.
    """
    parameters, found = trained(model), []
    optimizer = make(parameters)
    optimizer.register_step_pre_hook(lambda *_: found.append((gradients(parameters), copy.deepcopy(model))))
    acc = Accumulator(model, optimizer, steps=STEPS, max_norm=max_norm, **options)
    batches, errors = split(batch), []
    for one in acc.batches(batches):
        acc.backward(loss_of(model, one), items(one))
        acc.step()
    for index, (now, before) in enumerate(found):
        before.zero_grad()
        every = joined(batches[index * STEPS : (index + 1) * STEPS])
        (whole(loss_of(before, every)) / divisor(every)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(before.parameters(), max_norm)
        errors.append(difference(now, gradients(trained(before))))
    assert len(errors) == 2
    return max(errors)


def as_a_batch(
    model: nn.Module, loss_fn: Any, batch: Any, loss_of: Callable[[Any], Tensor | Terms], **options: Any
) -> float:
    """The error of a MacroStep that cuts a batch, against `loss_of`, the loss of all of it."""
    other = copy.deepcopy(model)
    MacroStep(model, None, loss_fn, micro=5, **options)(batch)
    whole(loss_of(other)).backward()
    return difference(gradients(trained(model)), gradients(trained(other)))


def one_after_another(steps: Sequence[tuple[Any, Any, Callable[[Any, Batch], Tensor]]], batch: Batch) -> float:
    """The error of MacroSteps that are called one after the other, so that each sees the steps before it."""
    errors = []
    for model, tensors, loss_fn in steps:
        expected = torch.autograd.grad(loss_fn(model, batch), tensors)
        found: list[list[Tensor]] = []
        optimizer = SGD(tensors)
        optimizer.register_step_pre_hook(lambda *_, o=tensors, found=found: found.append(gradients(o)))
        MacroStep(model, optimizer, loss_fn, micro=5)(batch)
        errors.append(difference(found[0], expected))
    return max(errors)
