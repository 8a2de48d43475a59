"""Losses of several terms, each over other items, and the whole batch in plain torch: what tests of terms share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.reference import relative_error
from macrobatch.types import Reduction

TOKENS, FEATURES = 5, 3
NAMES = ("tokens", "samples", "chosen", "weights")
Batch = dict[str, Tensor]


class Heads(nn.Module):
    """A trunk, and for each term a head that no other term uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in NAMES)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.trunk(x))
        return tuple(head(hidden)[..., 0] for head in self.heads)


def heads(dtype: torch.dtype = torch.float64) -> Heads:
    torch.manual_seed(0)
    return Heads().to(dtype)


def batch_of(samples: int, *, seed: int = 0, chosen: float = 0.4, dtype: torch.dtype = torch.float64) -> Batch:
    """Samples of unequal numbers of tokens, some of them chosen, each with a weight."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, TOKENS + 1, (samples, 1), generator=draw)
    return {
        "x": torch.randn(samples, TOKENS, FEATURES, generator=draw, dtype=torch.float64).to(dtype),
        "mask": torch.arange(TOKENS) < lengths,
        "chosen": torch.rand(samples, generator=draw) < chosen,
        "weight": torch.rand(samples, generator=draw, dtype=torch.float64),
    }


def sums_of(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each term the summed loss, and its items."""
    tokens, samples, chosen, weights = model(batch["x"])
    mask, is_chosen, weight = batch["mask"], batch["chosen"], batch["weight"].to(batch["x"])
    return {
        "tokens": ((tokens - 1).square().mul(mask).sum(), mask.sum()),
        "samples": (samples.mean(1).exp().sum(), torch.tensor(len(mask))),
        "chosen": (chosen.sin().sum(1).mul(is_chosen).sum(), is_chosen.sum()),
        "weights": (weights.square().mean(1).mul(weight).sum(), batch["weight"].sum()),
    }


def counts_of(batch: Batch) -> dict[str, Tensor | int]:
    return {
        "tokens": batch["mask"].sum(),
        "samples": len(batch["mask"]),
        "chosen": batch["chosen"].sum(),
        "weights": batch["weight"].sum(),
    }


@dataclass(frozen=True)
class Losses:
    """A `loss_fn` of some terms, with its `counts`.

    `items` is "int", "tensor" or "mixed". `without` says what becomes of a term without items, where they are ints: it
    is "absent", or "nan": a mean of 0 / 0 as people write it. `wrong` is added to what is counted of a term.
    """

    names: tuple[str, ...] = NAMES[:2]
    items: str = "tensor"
    reduction: Reduction = "mean"
    without: str = "absent"
    wrong: Mapping[str, float] = ()  # type: ignore[assignment]

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        found, terms = sums_of(model, batch), {}
        for index, name in enumerate(self.names):
            total, count = found[name]
            items = self._given(count, index)
            if not isinstance(items, Tensor) and not items:
                if self.without == "nan" and self.reduction == "mean":
                    terms[name] = (total * torch.nan, items)
                continue
            if self.reduction == "mean":
                total = total / (count.clamp(min=1) if not count.is_floating_point() else count)
            terms[name] = (total, items)
        return terms

    def counts(self, batch: Batch) -> dict[str, Any]:
        found = counts_of(batch)
        given = {name: self._given(torch.as_tensor(found[name]), index) for index, name in enumerate(self.names)}
        return {name: count + dict(self.wrong).get(name, 0) for name, count in given.items()}

    def _given(self, count: Tensor, index: int) -> Any:
        as_tensor = self.items == "tensor" or (self.items == "mixed" and index % 2 == 0)
        return count if as_tensor else count.item()


def whole_loss(model: nn.Module, batches: Sequence[Batch], names: Sequence[str]) -> tuple[Tensor, dict[str, float]]:
    """The loss of one big batch in plain torch, and each term's; a term without items is left out."""
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    found = sums_of(model, whole)
    means = {name: total / count for name, (total, count) in found.items() if name in names}
    counted = [mean for name, mean in means.items() if found[name][1] > 0]
    return torch.stack(counted).sum(), {name: mean.item() for name, mean in means.items()}


def whole_gradient(model: nn.Module, batches: Sequence[Batch], names: Sequence[str]) -> dict[str, Tensor]:
    """Zeros where no term reaches a parameter."""
    loss, _ = whole_loss(model, batches, names)
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def step_error(model: nn.Module, batches: Sequence[Batch], names: Sequence[str], step: Callable[[], object]) -> float:
    """How far a step of SGD with a learning rate of 1 is from the gradient of one big batch."""
    expected, before = whole_gradient(model, batches, names), weights(model)
    step()
    return relative_error({name: before[name] - now for name, now in weights(model).items()}, expected)
