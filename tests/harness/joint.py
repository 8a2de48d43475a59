"""Losses of the whole batch, and what they are in plain torch: what tests of `joint=` share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.reference import relative_error
from macrobatch import Encoded, MacroStep, Sum, contrastive_loss

TOKENS, FEATURES, WIDTH, EXPERTS = 4, 3, 6, 5
Batch = dict[str, Tensor]


class Towers(nn.Module):
    """Two towers, experts behind a router, and what only the loss of the whole batch uses: a scale and a head."""

    def __init__(self, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(FEATURES, WIDTH), norm(WIDTH), nn.Tanh(), nn.Dropout(dropout))
        self.text = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.full((1,), 1.2))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Of each sample an image, a text, and the probabilities of its experts."""
        mask = batch["attention_mask"].to(batch["x"])[..., None]
        image = self.image(batch["image"])
        text = (self.text(batch["x"]) * mask).sum(1) / mask.sum(1)
        return image, text, self.router(image).softmax(-1)


def towers(dtype: torch.dtype = torch.float64, **options: Any) -> Towers:
    torch.manual_seed(0)
    return Towers(**options).to(dtype)


def batch_of(samples: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, TOKENS + 1, (samples, 1), generator=draw)
    return {
        "image": torch.randn(samples, FEATURES, generator=draw, dtype=torch.float64).to(dtype),
        "x": torch.randn(samples, TOKENS, FEATURES, generator=draw, dtype=torch.float64).to(dtype),
        "attention_mask": torch.arange(TOKENS) < lengths,
        "label": torch.randint(0, 3, (samples,), generator=draw),
    }


# ---------------------------------------------------------------------------------------------------------- losses


def plain_contrast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """With the matrix of all pairs."""
    logits = scale * F.normalize(image) @ F.normalize(text).T
    answers = torch.arange(len(logits))
    return (F.cross_entropy(logits, answers) + F.cross_entropy(logits.T, answers)) / 2


@dataclass(frozen=True)
class Case:
    """A loss of the whole batch, as `loss_fn` and `joint`, and as one function of the model and the whole batch."""

    loss_fn: Callable[[Any, Batch], Encoded]
    joint: Callable[[Any, Encoded], Tensor]
    whole: Callable[[Any, Batch], Tensor]


def _pairs(model: Any, batch: Batch) -> Encoded:
    image, text, _ = model(batch)
    return Encoded(image=image, text=text)


CONTRAST = Case(
    _pairs,
    lambda model, encoded: contrastive_loss(encoded.image, encoded.text, scale=model.scale.exp(), tile=4),
    lambda model, batch: plain_contrast(model(batch)[0], model(batch)[1], model.scale.exp()),
)


def _balance(counts: Tensor, probabilities: Tensor, samples: Tensor | int) -> Tensor:
    return EXPERTS * (counts / samples * probabilities / samples).sum()


def _routed(model: Any, batch: Batch) -> Encoded:
    _, text, gates = model(batch)
    chosen = F.one_hot(gates.argmax(-1), EXPERTS)
    return Encoded(
        text.square().mean(),
        len(text),
        load={"chosen": Sum(chosen.sum(0)), "probability": Sum(gates.sum(0))},
        samples=Sum(len(text)),
    )


def _whole_balance(model: Any, batch: Batch) -> Tensor:
    _, text, gates = model(batch)
    counts = F.one_hot(gates.argmax(-1), EXPERTS).sum(0)
    return text.square().mean() + _balance(counts, gates.sum(0), len(text))


BALANCE = Case(
    _routed,
    lambda _, encoded: _balance(encoded.load["chosen"], encoded.load["probability"], encoded.samples),
    _whole_balance,
)


def _nested(model: Any, batch: Batch) -> Encoded:
    """Rows of several shapes and dtypes in containers, some without a graph; a loss over some tokens."""
    image, text, gates = model(batch)
    mask = batch["attention_mask"]
    tokens = (batch["x"].sum(-1) * text.mean(-1, keepdim=True)).square().mul(mask).sum() / mask.sum()
    return Encoded(tokens, mask.sum(), rows=[image, {"gates": gates.float()}], label=batch["label"], length=mask.sum(1))


def _ranked(model: Any, image: Tensor, gates: Tensor, label: Tensor, length: Tensor) -> Tensor:
    """Samples of the same label should be alike; later ones weigh more, so that the order matters."""
    weights = torch.arange(1, len(image) + 1, dtype=image.dtype, device=image.device) * length
    scores = model.head(image)[:, 0] * weights
    same = label[:, None] == label[None]
    apart = (image[:, None] - image[None]).square().sum(-1)
    return (apart * same * weights).mean() + scores.std() + gates.to(image).T.cov().square().sum()


def _whole_nested(model: Any, batch: Batch) -> Tensor:
    encoded = _nested(model, batch)
    image, gates = encoded.rows[0], encoded.rows[1]["gates"]
    assert encoded.loss is not None
    return encoded.loss + _ranked(model, image, gates, encoded.label, encoded.length)


NESTED = Case(
    _nested,
    lambda model, e: _ranked(model, e.rows[0], e.rows[1]["gates"], e.label, e.length),
    _whole_nested,
)
CASES = {"contrast": CONTRAST, "balance": BALANCE, "nested": NESTED}


# -------------------------------------------------------------------------------------------------- one big batch


def concatenate(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def parts_of(batch: Batch, micro: int) -> list[Batch]:
    samples = len(batch["x"])
    return [{key: rows[i : i + micro] for key, rows in batch.items()} for i in range(0, samples, micro)]


def gradient_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Zeros where it reaches none."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def checkpointed_gradient(model: nn.Module, case: Case, batch: Batch, micro: int) -> dict[str, Tensor]:
    """Of pairs: each micro-batch under `checkpoint`, the loss of all, one backward. Dropout is replayed by torch."""
    outputs = [checkpoint(model, part, use_reentrant=False) for part in parts_of(batch, micro)]
    image, text = (torch.cat([output[i] for output in outputs]) for i in range(2))
    return gradient_of(model, case.joint(model, Encoded(image=image, text=text)))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def step_of(model: nn.Module, step: Callable[[], object]) -> dict[str, Tensor]:
    """What a step of SGD with a learning rate of 1 subtracts: the gradient."""
    before = weights(model)
    step()
    return {name: before[name] - now for name, now in weights(model).items()}


def step_error(model: nn.Module, case: Case, batch: Batch, step: Callable[[], object]) -> float:
    """How far it is from the gradient of one big batch."""
    expected = gradient_of(model, case.whole(model, batch))
    return relative_error(step_of(model, step), expected)


class Untouched(torch.optim.SGD):
    """Notes the gradients that it is given, and does nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.named = dict(model.named_parameters())
        self.seen: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        self.seen = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.named.items()}


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """With a learning rate of 1: a step subtracts the gradient."""
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0, **options)


def train_on(
    model: nn.Module, case: Case = CONTRAST, micro: Any = 3, optimizer: Any = None, **options: Any
) -> MacroStep:
    options = {"joint": case.joint} | options
    return MacroStep(model, optimizer or sgd(model), case.loss_fn, micro=micro, **options)
