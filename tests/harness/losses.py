"""Losses as programs write them, each with what its graph tells about it, and the whole batch to compare with.

A loss is a function of a model and a batch, whose tensors have one row a sample.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.reference import relative_error
from macrobatch._loss.anatomy import Anatomy, anatomy_of

SAMPLES, TOKENS, FEATURES, CLASSES = 7, 4, 3, 5
CUTS = ((3, 2, 2), (1, 4, 2), (5, 1, 1))  # into micro-batches of so many samples

Batch = dict[str, Tensor]
Verdict = Literal[
    "known",  # a mean over its counts: exact if micro-batches weigh as much as these
    "sum",
    "unknown",  # some node was not understood
    "differs",  # known in every micro-batch, but these do not fit together: other factors, parts or proportions
    "coupled",  # looks like a mean, and is none: samples depend on each other where the graph does not show it
]


class Row(NamedTuple):
    """A loss, and what is to be told about it."""

    name: str
    loss: Callable[["Model", Batch], Tensor]
    verdict: Verdict


class Model(nn.Module):
    """Predictions for tokens (n, 4, 5), for samples (n, 5), and one score a sample (n)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 6)
        self.to_tokens = nn.Linear(6, CLASSES)
        self.to_rows = nn.Linear(6 * TOKENS, CLASSES)
        self.to_score = nn.Linear(6 * TOKENS, 1)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.norm = nn.BatchNorm1d(CLASSES)

    def hidden(self, batch: Batch) -> Tensor:
        return torch.tanh(self.trunk(batch["x"]))

    def tokens(self, batch: Batch) -> Tensor:
        return self.to_tokens(self.hidden(batch))

    def rows(self, batch: Batch) -> Tensor:
        return self.to_rows(self.hidden(batch).flatten(1))

    def score(self, batch: Batch) -> Tensor:
        return self.to_score(self.hidden(batch).flatten(1))[:, 0]


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def new_batch(samples: int = SAMPLES) -> Batch:
    """Samples of unequal numbers of tokens. Labels beyond them are -100."""
    draw = torch.Generator().manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(samples, *sizes, generator=draw, dtype=torch.float64)

    mask = torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (samples, 1), generator=draw)
    labels = torch.randint(CLASSES, (samples, TOKENS), generator=draw).masked_fill(~mask, -100)
    return {
        "x": normal(TOKENS, FEATURES),
        "wanted_tokens": normal(TOKENS, CLASSES),
        "wanted_rows": normal(CLASSES),
        "wanted_score": normal(),
        "probabilities": normal(CLASSES).softmax(1),
        "labels": labels,
        "label": labels[:, 0],
        "other_label": torch.randint(CLASSES, (samples,), generator=draw),
        "mask": mask,
        "sign": torch.randint(2, (samples,), generator=draw) * 2 - 1,
        "weight": normal().exp(),
    }


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0], dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- what is to be told


class Judged(NamedTuple):
    """What the anatomies of a window's micro-batches say together."""

    verdict: Verdict
    weights: list[float]  # of the micro-batches, if known


def judge(anatomies: Sequence[Anatomy], samples: Sequence[int]) -> Judged:
    """The rules of DESIGN.md, section 11, in plain Python."""
    if any(anatomy.unknown for anatomy in anatomies):
        return Judged("unknown", [])
    forms = [[(part.node, part.kind, _number(part.factor)) for part in anatomy.parts] for anatomy in anatomies]
    terms = [[part for part in anatomy.parts if not part.leaf_only] for anatomy in anatomies]
    if any(form != forms[0] for form in forms) or not terms[0]:
        return Judged("differs", [])
    columns = [[_number(part.count) for part in column] for column in zip(*terms, strict=True)]
    for part, column in zip(terms[0], columns, strict=True):
        if part.from_shape and len(set(column)) == 1 and len(set(samples)) > 1:
            return Judged("differs", [])
    if any(part.kind == "sum" for part in terms[0]):
        own = [anatomy.quotient is not None and _number(anatomy.quotient) == columns[0][i]
               for i, anatomy in enumerate(anatomies)]  # fmt: skip
        if len(columns) > 1 or not all(own):
            return Judged("sum", [])
    first = columns[0]
    if any(abs(a * first[0] - b * column[0]) > 1e-9 for column in columns for a, b in zip(column, first, strict=True)):
        return Judged("differs", [])
    return Judged("known", first)


def _number(value: float | Tensor | None) -> float:
    return math.nan if value is None else float(value)


def gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


class Measured(NamedTuple):
    """A loss in one big batch and cut into micro-batches."""

    judged: Judged
    error: float  # of the gradient, weighed as judged; of the sum of gradients for a sum; NaN if there is no such rule
    size: float  # of the gradient: its largest element


def measure(row: Row, cut: Sequence[int], batch: Batch | None = None) -> Measured:
    """Cut a batch, let the anatomies weigh the gradients of the micro-batches, and compare with the whole batch."""
    model, batch = new_model(), batch or new_batch(sum(cut))
    whole = gradient(model, row.loss(model, batch))
    size = max(one.abs().max().item() for one in whole.values())
    pieces = {name: tensor.split(list(cut)) for name, tensor in batch.items()}
    anatomies, gradients = [], []
    for i in range(len(cut)):
        loss = row.loss(model, {name: piece[i] for name, piece in pieces.items()})
        anatomies.append(anatomy_of(loss))
        gradients.append(gradient(model, loss))
    judged = judge(anatomies, cut)
    if judged.verdict == "known":
        shares = [weight / sum(judged.weights) for weight in judged.weights]
    elif judged.verdict == "sum" and all(len(anatomy.parts) == 1 and anatomy.quotient is None for anatomy in anatomies):
        shares = [1.0] * len(cut)
    else:
        return Measured(judged, math.nan, size)
    found = {name: torch.stack([w * g[name] for w, g in zip(shares, gradients, strict=True)]).sum(0) for name in whole}
    return Measured(judged, relative_error(dict(found), dict(whole)), size)


# ---------------------------------------------------------------------------------------------- torch's own losses


def _pixels(model: Model, batch: Batch) -> Tensor:
    return model.tokens(batch).transpose(1, 2)  # classes are the second dimension


def _ctc(model: Model, batch: Batch, reduction: str) -> Tensor:
    samples = len(batch["x"])
    log_probabilities = model.tokens(batch).log_softmax(2).transpose(0, 1)
    lengths, targets = torch.full((samples,), TOKENS), batch["other_label"].clamp(min=1)[:, None]
    return F.ctc_loss(log_probabilities, targets, lengths, torch.ones_like(lengths), reduction=reduction)


OF_TORCH: dict[str, Callable[[Model, Batch, str], Tensor]] = {
    "mse": lambda m, b, r: F.mse_loss(m.tokens(b), b["wanted_tokens"], reduction=r),
    "mse of scores": lambda m, b, r: F.mse_loss(m.score(b), b["wanted_score"], reduction=r),
    "l1": lambda m, b, r: F.l1_loss(m.rows(b), b["wanted_rows"], reduction=r),
    "huber": lambda m, b, r: F.huber_loss(m.rows(b), b["wanted_rows"], reduction=r, delta=0.5),
    "smooth l1": lambda m, b, r: F.smooth_l1_loss(m.rows(b), b["wanted_rows"], reduction=r),
    "smooth l1, beta 0": lambda m, b, r: F.smooth_l1_loss(m.rows(b), b["wanted_rows"], reduction=r, beta=0.0),
    "bce": lambda m, b, r: F.binary_cross_entropy(m.rows(b).sigmoid(), b["probabilities"], reduction=r),
    "bce, weights": lambda m, b, r: F.binary_cross_entropy(
        m.rows(b).sigmoid(), b["probabilities"], weight=b["weight"][:, None], reduction=r
    ),
    "bce with logits": lambda m, b, r: F.binary_cross_entropy_with_logits(m.rows(b), b["probabilities"], reduction=r),
    "bce with logits, weights": lambda m, b, r: F.binary_cross_entropy_with_logits(
        m.rows(b), b["probabilities"], weight=b["weight"][:, None], reduction=r
    ),
    "bce with logits, pos_weight": lambda m, b, r: F.binary_cross_entropy_with_logits(
        m.rows(b), b["probabilities"], pos_weight=WEIGHTS, reduction=r
    ),
    "soft margin": lambda m, b, r: F.soft_margin_loss(m.score(b), b["sign"].double(), reduction=r),
    "multilabel margin": lambda m, b, r: F.multilabel_margin_loss(
        m.rows(b), F.pad(b["other_label"][:, None], (0, CLASSES - 1), value=-1), reduction=r
    ),
    "multi margin": lambda m, b, r: F.multi_margin_loss(m.rows(b), b["other_label"], reduction=r),
    "multi margin, weights": lambda m, b, r: F.multi_margin_loss(
        m.rows(b), b["other_label"], weight=WEIGHTS, reduction=r
    ),
    "multilabel soft margin": lambda m, b, r: F.multilabel_soft_margin_loss(
        m.rows(b), b["probabilities"].round(), reduction=r
    ),
    "hinge embedding": lambda m, b, r: F.hinge_embedding_loss(m.score(b), b["sign"], reduction=r),
    "cosine embedding": lambda m, b, r: F.cosine_embedding_loss(m.rows(b), b["wanted_rows"], b["sign"], reduction=r),
    "margin ranking": lambda m, b, r: F.margin_ranking_loss(m.score(b), b["wanted_score"], b["sign"], reduction=r),
    "triplet": lambda m, b, r: F.triplet_margin_loss(
        m.rows(b), b["wanted_rows"], b["wanted_rows"].flip(1), reduction=r
    ),
    "triplet with a distance": lambda m, b, r: F.triplet_margin_with_distance_loss(
        m.rows(b), b["wanted_rows"], b["wanted_rows"].flip(1), reduction=r
    ),
    "poisson": lambda m, b, r: F.poisson_nll_loss(m.rows(b), b["probabilities"], reduction=r),
    "gaussian": lambda m, b, r: F.gaussian_nll_loss(m.rows(b), b["wanted_rows"], b["probabilities"] + 0.1, reduction=r),
    "kl": lambda m, b, r: F.kl_div(m.rows(b).log_softmax(1), b["probabilities"], reduction=r),
    "kl, log_target": lambda m, b, r: F.kl_div(
        m.rows(b).log_softmax(1), b["probabilities"].log(), reduction=r, log_target=True
    ),
    "ctc": _ctc,
    "nll": lambda m, b, r: F.nll_loss(m.rows(b).log_softmax(1), b["other_label"], reduction=r),
    "cross-entropy": lambda m, b, r: F.cross_entropy(m.rows(b), b["other_label"], reduction=r),
    "cross-entropy, weights": lambda m, b, r: F.cross_entropy(m.rows(b), b["other_label"], weight=WEIGHTS, reduction=r),
    "cross-entropy of tokens": lambda m, b, r: F.cross_entropy(
        m.tokens(b).flatten(0, 1), b["labels"].flatten(), reduction=r
    ),
    "cross-entropy of pixels": lambda m, b, r: F.cross_entropy(_pixels(m, b), b["labels"], reduction=r),
    "cross-entropy of pixels, weights": lambda m, b, r: F.cross_entropy(
        _pixels(m, b), b["labels"], weight=WEIGHTS, reduction=r
    ),
    "cross-entropy of videos": lambda m, b, r: F.cross_entropy(
        _pixels(m, b)[..., None, None], b["labels"][..., None, None], reduction=r
    ),
    "ignore_index": lambda m, b, r: F.cross_entropy(
        _pixels(m, b), b["labels"].clamp(min=0), ignore_index=0, reduction=r
    ),
    "label smoothing": lambda m, b, r: F.cross_entropy(m.rows(b), b["other_label"], label_smoothing=0.1, reduction=r),
    "label smoothing of tokens": lambda m, b, r: F.cross_entropy(
        m.tokens(b).flatten(0, 1), b["labels"].flatten(), label_smoothing=0.2, reduction=r
    ),
    "label smoothing of pixels, weights": lambda m, b, r: F.cross_entropy(
        _pixels(m, b), b["labels"], label_smoothing=0.2, weight=WEIGHTS, reduction=r
    ),
    "probabilities": lambda m, b, r: F.cross_entropy(m.rows(b), b["probabilities"], reduction=r),
    "probabilities, weights": lambda m, b, r: F.cross_entropy(
        m.rows(b), b["probabilities"], weight=WEIGHTS, label_smoothing=0.1, reduction=r
    ),
    "probabilities of pixels": lambda m, b, r: F.cross_entropy(
        _pixels(m, b), b["wanted_tokens"].transpose(1, 2).softmax(1), reduction=r
    ),
}


def _of_torch() -> Iterator[Row]:
    for name, loss in OF_TORCH.items():
        yield Row(f"{name}, mean", lambda m, b, loss=loss: loss(m, b, "mean"), "known")  # type: ignore[misc]
        yield Row(f"{name}, sum", lambda m, b, loss=loss: loss(m, b, "sum"), "sum")  # type: ignore[misc]
        yield Row(f"{name}, none, mean", lambda m, b, loss=loss: loss(m, b, "none").mean(), "known")  # type: ignore[misc]
        yield Row(f"{name}, none, sum", lambda m, b, loss=loss: loss(m, b, "none").sum(), "sum")  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------- written by hand


def _mse(model: Model, batch: Batch) -> Tensor:
    return F.mse_loss(model.tokens(batch), batch["wanted_tokens"])


def _entropy(model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model.tokens(batch).flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def _by_sample(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model.rows(batch), batch["other_label"], reduction="none")


def _by_token(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(_pixels(model, batch), batch["labels"], reduction="none")


def _each(model: Model, batch: Batch) -> list[Tensor]:
    """The losses of the samples, one forward each."""
    samples = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(len(batch["x"]))]
    return [_mse(model, sample) for sample in samples]


def _added(terms: list[Tensor]) -> Tensor:
    """As Python's ``sum`` does, which begins with 0."""
    total = sum(terms)
    assert isinstance(total, Tensor)
    return total


def _log_probabilities(model: Model, batch: Batch) -> Tensor:
    logits = model.tokens(batch).log_softmax(-1)
    return logits.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]


def _dpo(model: Model, batch: Batch) -> Tensor:
    chosen = (_log_probabilities(model, batch) * batch["mask"]).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - batch["wanted_score"])).mean()


def _ppo(model: Model, batch: Batch, advantages: Tensor) -> Tensor:
    ratio = (_log_probabilities(model, batch) - batch["wanted_tokens"][..., 0]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).mean()


def _focal(model: Model, batch: Batch) -> Tensor:
    loss = _by_sample(model, batch)
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def _distillation(model: Model, batch: Batch) -> Tensor:
    student, teacher = (model.rows(batch) / 2).log_softmax(1), (batch["wanted_rows"] / 2).softmax(1)
    soft = F.kl_div(student, teacher, reduction="none").sum(1).mean()
    return 0.3 * F.cross_entropy(model.rows(batch), batch["other_label"]) + 0.7 * 4 * soft


def _mixup(model: Model, batch: Batch) -> Tensor:
    logits = model.rows(batch)
    return 0.7 * F.cross_entropy(logits, batch["label"]) + 0.3 * F.cross_entropy(logits, batch["other_label"])


def _contrastive(model: Model, batch: Batch) -> Tensor:
    a, b = F.normalize(model.rows(batch), dim=1), F.normalize(batch["wanted_rows"], dim=1)
    logits, targets = a @ b.T * model.scale.exp(), torch.arange(len(a))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def _weight_decay(model: Model) -> Tensor:
    return torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


BY_HAND: list[tuple[str, Callable[[Model, Batch], Tensor], Verdict]] = [
    # factors, casts and views
    ("half", lambda m, b: 0.5 * _mse(m, b), "known"),
    ("over 4", lambda m, b: _entropy(m, b) / 4, "known"),
    ("times a tensor", lambda m, b: torch.tensor(3.0) * _mse(m, b), "known"),
    ("over a tensor", lambda m, b: _mse(m, b) / torch.tensor(3.0), "known"),
    ("scaled as by a GradScaler", lambda m, b: _mse(m, b) * torch.full((), 65536.0), "known"),
    ("in bfloat16", lambda m, b: _mse(m, b) * torch.tensor(2.0, dtype=torch.bfloat16), "known"),
    ("minus", lambda m, b: -_mse(m, b), "known"),
    ("one minus", lambda m, b: 1 - _mse(m, b), "known"),
    ("plus one", lambda m, b: _mse(m, b) + 1, "known"),
    ("in place", lambda m, b: _mse(m, b).mul_(2).div_(3).add_(1), "known"),
    ("cast", lambda m, b: _mse(m, b).to(torch.float64, copy=True), "known"),
    ("viewed", lambda m, b: _entropy(m, b).view(1).reshape(1, 1).squeeze(), "known"),
    ("cloned", lambda m, b: _entropy(m, b).clone(), "known"),
    ("first of one", lambda m, b: _entropy(m, b)[None][0], "known"),
    ("mean of a scalar", lambda m, b: _entropy(m, b).mean(), "known"),
    ("mean of one", lambda m, b: (2 * _mse(m, b)).view(1).mean(), "known"),
    ("sum of one", lambda m, b: _mse(m, b)[None].sum(), "known"),
    ("checkpointed model", lambda m, b: F.mse_loss(checkpoint(m.rows, b, use_reentrant=False), b["wanted_rows"]),
     "known"),
    # means
    ("mean of rows", lambda m, b: m.tokens(b).mean(1).mean(), "known"),
    ("mean of columns", lambda m, b: m.rows(b).mean(0).mean(), "known"),
    ("mean of columns, minus", lambda m, b: (-m.rows(b).mean(-2)).mean(), "known"),
    ("mean of planes", lambda m, b: m.tokens(b).mean((0, 2)).mean(), "known"),
    ("mean along all", lambda m, b: m.tokens(b).mean((0, 1, 2)), "known"),
    ("mean along each", lambda m, b: m.tokens(b).mean(0).mean(0).mean(0), "known"),
    ("mean along each, last first", lambda m, b: m.tokens(b).mean(-1).mean(-1).mean(-1), "known"),
    ("mean of columns, sum", lambda m, b: m.tokens(b).mean(0).sum(), "known"),
    ("mean of two dimensions, sum", lambda m, b: m.tokens(b).mean(0).mean(0).sum(), "known"),
    ("sum of rows, mean", lambda m, b: (m.rows(b) - b["wanted_rows"]).pow(2).sum(1).mean(), "known"),
    ("sum of rows, mean along", lambda m, b: (m.rows(b) - b["wanted_rows"]).pow(2).sum(-1).mean(0), "known"),
    ("mean of rows, squared", lambda m, b: m.tokens(b).mean(1).pow(2).mean(), "known"),
    ("log-sum-exp of rows", lambda m, b: m.tokens(b).logsumexp(-1).mean(), "known"),
    ("squeezed", lambda m, b: F.mse_loss(m.score(b).squeeze(), b["wanted_score"].squeeze()), "known"),
    ("squeezed, by hand", lambda m, b: (m.score(b).squeeze() - b["wanted_score"].squeeze()).pow(2).mean(), "known"),
    ("mean of a mask", lambda m, b: _by_token(m, b)[b["mask"]].mean(), "known"),
    ("weighted samples", lambda m, b: (b["weight"] * _by_sample(m, b)).mean(), "known"),
    ("means of tokens by sample", lambda m, b: (_by_token(m, b).sum(1) / b["mask"].sum(1)).mean(), "known"),
    ("both directions", lambda m, b: torch.stack([_by_sample(m, b), 2 * _by_sample(m, b)]).mean(), "known"),
    ("a learnt scale", lambda m, b: (m.scale.exp() * _by_sample(m, b)).mean(), "known"),
    ("ensemble", lambda m, b: F.mse_loss(torch.stack([m.rows(b), 2 * m.rows(b)]).mean(0), b["wanted_rows"]), "known"),
    ("ensemble of logits", lambda m, b: F.cross_entropy(torch.stack([m.rows(b), m.rows(b).exp()]).mean(0),
                                                        b["other_label"]), "known"),
    ("uncertainty", lambda m, b: (_by_sample(m, b) * (-m.scale).exp() + m.scale).mean(), "known"),
    # several terms
    ("two terms", lambda m, b: _mse(m, b) + 0.1 * F.l1_loss(m.tokens(b), b["wanted_tokens"]), "known"),
    ("a difference", lambda m, b: _mse(m, b) - 0.1 * F.mse_loss(m.rows(b), b["wanted_rows"]), "known"),
    ("alpha", lambda m, b: torch.add(_mse(m, b), m.rows(b).pow(2).mean(), alpha=0.5), "known"),
    ("python's sum", lambda m, b: _added([_mse(m, b), F.l1_loss(m.rows(b), b["wanted_rows"])]) / 2, "known"),
    ("mixup", _mixup, "known"),
    ("distillation", _distillation, "known"),
    ("mean penalty", lambda m, b: _entropy(m, b) + 0.1 * m.trunk.weight.pow(2).mean(), "known"),
    ("sum penalty", lambda m, b: _entropy(m, b) + 0.1 * m.trunk.weight.pow(2).sum() / 2, "known"),
    ("norm penalty", lambda m, b: _mse(m, b) + 0.1 * m.trunk.weight.norm(), "known"),
    ("group lasso", lambda m, b: _mse(m, b) + m.trunk.weight.pow(2).sum(1).sqrt().sum(), "known"),
    ("penalty of columns", lambda m, b: _mse(m, b) + m.trunk.weight.mean(0).pow(2).mean(), "known"),
    ("penalties", lambda m, b: _mse(m, b) + 0.01 * sum(p.abs().sum() for p in m.parameters()), "known"),
    ("unused parameters", lambda m, b: _mse(m, b) + 0 * m.rows(b).sum(), "known"),
    # programs
    ("focal", _focal, "known"),
    ("dpo", _dpo, "known"),
    ("policy gradient", lambda m, b: -(m.rows(b).log_softmax(1)[:, 0] * b["wanted_score"]).mean(), "known"),
    ("ppo", lambda m, b: _ppo(m, b, b["wanted_score"]), "known"),
    ("diffusion", lambda m, b: (F.mse_loss(m.tokens(b), b["wanted_tokens"], reduction="none").mean((1, 2))
                                * b["weight"]).mean(), "known"),
    ("vae", lambda m, b: F.mse_loss(m.rows(b), b["wanted_rows"], reduction="none").sum(1).mean()
     - 0.5 * (1 + m.rows(b) - m.rows(b).exp()).sum(1).mean(0), "known"),
    ("linear cross-entropy", lambda m, b: F.cross_entropy(F.linear(m.hidden(b).flatten(0, 1), m.to_tokens.weight),
                                                          b["labels"].flatten()), "known"),
    # sums
    ("sum", lambda m, b: m.tokens(b).pow(2).sum(), "sum"),
    ("sum along all", lambda m, b: m.tokens(b).pow(2).sum((0, 1, 2)), "sum"),
    ("sum of columns, sum", lambda m, b: m.tokens(b).pow(2).sum(0).sum(), "sum"),
    ("sum of means", lambda m, b: m.tokens(b).mean(1).sum(), "sum"),
    ("sum of an ensemble", lambda m, b: torch.stack([m.rows(b), 2 * m.rows(b)]).mean(0).sum(), "sum"),
    ("half a sum", lambda m, b: 0.5 * _mse_sum(m, b), "sum"),
    ("a mean and a sum", lambda m, b: _mse(m, b) + 0.1 * _mse_sum(m, b), "sum"),
    ("cross-entropy over its own count", lambda m, b: _entropy(m, b, "sum") / b["mask"].sum(), "known"),
    ("cross-entropy over its own number", lambda m, b: 0.5 * _entropy(m, b, "sum") / int(b["mask"].sum()), "known"),
    ("cross-entropy over samples", lambda m, b: _entropy(m, b, "sum") / len(b["x"]), "sum"),
    ("cross-entropy over a window's count", lambda m, b: _entropy(m, b, "sum") / 16, "sum"),
    # quotients
    ("masked mean", lambda m, b: (_by_token(m, b) * b["mask"]).sum() / b["mask"].sum(), "unknown"),
    ("masked mean, clamped", lambda m, b: _by_token(m, b).sum() / b["mask"].sum().clamp(min=1), "unknown"),
    ("sum over samples", lambda m, b: _by_sample(m, b).sum() / len(b["x"]), "unknown"),
    ("weighted mean", lambda m, b: (b["weight"] * _by_sample(m, b)).sum() / b["weight"].sum(), "unknown"),
    ("batchmean", lambda m, b: F.kl_div(m.rows(b).log_softmax(1), b["probabilities"], reduction="batchmean"),
     "unknown"),
    ("nanmean", lambda m, b: _by_token(m, b).masked_fill(~b["mask"], math.nan).nanmean(), "unknown"),
    ("cross-entropy over two numbers", lambda m, b: _entropy(m, b, "sum") / 2 / b["mask"].sum(), "known"),
    ("two sums, one over a number", lambda m, b: _entropy(m, b, "sum") + _entropy(m, b, "sum") / 2, "sum"),
    ("smoothed sum over its count", lambda m, b: F.cross_entropy(
        _pixels(m, b), b["labels"], label_smoothing=0.1, reduction="sum") / b["mask"].sum(), "unknown"),
    ("mean over a learnt scale", lambda m, b: _mse(m, b) / m.scale, "unknown"),
    ("a mean over another", lambda m, b: _mse(m, b) / m.rows(b).exp().mean(), "unknown"),
    ("one over a mean", lambda m, b: 1 / _mse(m, b), "unknown"),
    # functions of means
    ("root of a mean", lambda m, b: _mse(m, b).sqrt(), "unknown"),
    ("product of means", lambda m, b: _mse(m, b) * m.rows(b).exp().mean(), "unknown"),
    ("learnt weight", lambda m, b: m.scale.exp() * _mse(m, b) - m.scale, "unknown"),
    ("clamped", lambda m, b: _mse(m, b).clamp(min=0.1), "unknown"),
    ("selected term", lambda m, b: torch.stack([_mse(m, b), 2 * _mse(m, b)])[1], "unknown"),
    ("where", lambda m, b: torch.where(b["mask"].any(), _mse(m, b), 0.0), "unknown"),
    ("lerp", lambda m, b: torch.lerp(_mse(m, b), m.rows(b).mean(), 0.3), "unknown"),
    ("mse of means", lambda m, b: F.mse_loss(m.rows(b).mean(), b["wanted_rows"].mean()), "unknown"),
    ("mse of mean rows", lambda m, b: F.mse_loss(m.rows(b).mean(0), b["wanted_rows"].mean(0)), "unknown"),
    ("stacked means", lambda m, b: torch.stack([_mse(m, b), _entropy(m, b)]).mean(), "unknown"),
    ("stacked means, squared", lambda m, b: (2 * torch.stack([_mse(m, b), _entropy(m, b)]).square()).mean(), "unknown"),
    ("stacked means, summed", lambda m, b: torch.stack([_mse(m, b), _entropy(m, b)]).sum(), "unknown"),
    ("joined means", lambda m, b: torch.cat([_mse(m, b).view(1), _entropy(m, b).view(1)]).mean(), "unknown"),
    ("joined vectors", lambda m, b: torch.cat([_by_sample(m, b), _by_sample(m, b)]).mean(), "unknown"),
    ("stacked samples", lambda m, b: torch.stack(_each(m, b)).mean(), "unknown"),
    ("custom function", lambda m, b: _Identity.apply(_mse(m, b)), "unknown"),
    ("checkpointed loss", lambda m, b: checkpoint(_entropy, m, b, use_reentrant=False), "unknown"),
    ("checkpointed loss, reentrant", lambda m, b: checkpoint(
        lambda x: _entropy(m, {**b, "x": x}), b["x"].requires_grad_(), use_reentrant=True), "unknown"),
    ("stacked penalties", lambda m, b: _mse(m, b) + _weight_decay(m), "unknown"),
    # samples that depend on each other, within the nodes that are looked at
    ("mean of columns, squared", lambda m, b: m.rows(b).mean(0).pow(2).mean(), "unknown"),
    ("cross-entropy of centred logits", lambda m, b: F.cross_entropy(m.rows(b) - m.rows(b).mean(0), b["label"]),
     "unknown"),
    ("cross-entropy of a mean", lambda m, b: F.cross_entropy(m.rows(b).mean(0), b["label"][0]), "unknown"),
    ("cross-entropy along samples", lambda m, b: F.nll_loss(m.rows(b).log_softmax(0), b["label"]), "unknown"),
    ("mean of columns, squared sum", lambda m, b: m.rows(b).mean(0).pow(2).sum(), "unknown"),
    ("sum of columns, mean", lambda m, b: m.rows(b).sum(0).mean(), "unknown"),
    ("log-sum-exp of columns", lambda m, b: m.rows(b).logsumexp(0).mean(), "unknown"),
    ("log-sum-exp of columns, negative", lambda m, b: m.rows(b).logsumexp(-2).mean(), "unknown"),
    ("softmax of columns", lambda m, b: -m.rows(b).log_softmax(0)[:, 0].mean(), "unknown"),
    ("variance by hand", lambda m, b: (m.rows(b) - m.rows(b).mean(0)).pow(2).mean(), "unknown"),
    ("variance of all by hand", lambda m, b: (m.rows(b) - m.rows(b).mean()).pow(2).mean(), "unknown"),
    ("variance", lambda m, b: m.rows(b).var(), "unknown"),
    ("variance of columns", lambda m, b: m.rows(b).var(0, correction=0).mean(), "unknown"),
    ("norm", lambda m, b: m.rows(b).norm(), "unknown"),
    ("largest of columns", lambda m, b: m.rows(b).amax(0).mean(), "unknown"),
    ("median", lambda m, b: m.rows(b).median(), "unknown"),
    # seen when micro-batches are compared
    ("mean times samples", lambda m, b: _mse(m, b) * len(b["x"]), "differs"),
    ("mean over samples", lambda m, b: _mse(m, b) / len(b["x"]), "differs"),
    ("masked mean of means", lambda m, b: _by_token(m, b).mean() / b["mask"].double().mean(), "differs"),
    ("python's sum over samples", lambda m, b: _added(_each(m, b)), "differs"),
    ("python's mean over samples", lambda m, b: _added(_each(m, b)) / len(b["x"]), "differs"),
    ("tokens and samples", lambda m, b: _entropy(m, b) + 0.1 * F.mse_loss(m.rows(b), b["wanted_rows"]), "differs"),
    ("correlations", lambda m, b: (m.rows(b).T @ m.rows(b)).pow(2).mean(), "differs"),
    ("transposed", lambda m, b: m.rows(b).T.mean(1).pow(2).mean(), "differs"),
    ("times its own loss", lambda m, b: _mse(m, b) * _mse(m, b).detach(), "differs"),
    ("parameters only", lambda m, b: m.trunk.weight.pow(2).mean(), "differs"),
    # not to be seen in a graph
    ("contrastive", _contrastive, "coupled"),
    ("similarities", lambda m, b: (m.rows(b) @ m.rows(b).T).mean(), "coupled"),
    ("batch norm", lambda m, b: F.mse_loss(m.norm(m.rows(b).repeat(2, 1)), b["wanted_rows"].repeat(2, 1)), "coupled"),
    ("normalised advantages", lambda m, b: _ppo(m, b, b["wanted_score"] - b["wanted_score"].mean()), "coupled"),
    ("normalised weights", lambda m, b: (b["weight"] / b["weight"].sum() * _by_sample(m, b)).mean(), "coupled"),
    ("mask normalised inside", lambda m, b: (_by_token(m, b) / b["mask"].double().mean()).mean(), "coupled"),
    ("weights of the batch's classes", lambda m, b: F.cross_entropy(
        m.rows(b), b["other_label"], weight=1.0 + torch.bincount(b["other_label"], minlength=CLASSES).double()),
     "coupled"),
    ("softmax of transposed rows", lambda m, b: m.rows(b).T.softmax(1).pow(2).mean(), "coupled"),
]  # fmt: skip


def _mse_sum(model: Model, batch: Batch) -> Tensor:
    return F.mse_loss(model.tokens(batch), batch["wanted_tokens"], reduction="sum")


LOSSES: tuple[Row, ...] = (*_of_torch(), *(Row(*row) for row in BY_HAND))
