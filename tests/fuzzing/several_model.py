"""What programs with several terms, or with a loss of the whole batch, train: batches, a model, and its losses."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzzing.model import LENGTH, WIDTH, draw
from fuzzing.several_program import NAMES, SeveralProgram
from macrobatch import Encoded, Sum

HIDDEN = 4
Batch = dict[str, Tensor]
FRACTIONS = ("float", "float32", "float64", "one element", "mixed")


def make_batch(p: SeveralProgram, epoch: int, index: int, samples: int, rank: int = 0) -> Batch:
    """Sequences `x` of unequal lengths, a target `y` for each, and how many items `n` of each term it has."""
    generator, dtype = draw(p.seed, epoch, index, rank), getattr(torch, p.dtype)
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    counts = torch.randint(1, 4, (samples, len(p.terms)), generator=generator).double()
    if p.sparse:
        counts *= torch.rand(counts.shape, generator=generator) < 0.3
    for term, kind in enumerate(p.terms):
        if kind in FRACTIONS:
            counts[:, term] /= 8
        if (epoch, index, term) in p.lacking:
            counts[:, term] = 0
    if rank in getattr(p, "lacks", ()):
        counts[:, -1] = 0
    return {
        "x": torch.randn(samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        "attention_mask": torch.arange(LENGTH) < lengths,
        "y": torch.randn(samples, generator=generator, dtype=torch.float64).to(dtype),
        "n": counts,
        "ids": torch.arange(samples) + 1000 * (100 * epoch + index) + 100_000 * rank,
    }


def joined(batches: Sequence[Batch]) -> Batch:
    """As one batch. Micro-batches of unequal widths are padded."""
    width = max(batch["x"].shape[1] for batch in batches)
    padded = [batch | {key: widened(batch[key], width) for key in ("x", "attention_mask")} for batch in batches]
    return {key: torch.cat([batch[key] for batch in padded]) for key in batches[0]}


def widened(rows: Tensor, width: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(len(rows), width - rows.shape[1], *rows.shape[2:])], dim=1)


class SeveralNet(nn.Module):
    """A trunk; for each term a head that no other term uses, or rows for joint and what only joint uses."""

    def __init__(self, p: SeveralProgram) -> None:
        super().__init__()
        self.p, dtype = p, getattr(torch, p.dtype)
        self.trunk = nn.Linear(WIDTH, HIDDEN)
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, 1) for _ in (() if p.is_joint else p.terms))
        if p.is_joint:
            self.embed = nn.Linear(HIDDEN, WIDTH)
        if "scale" in p.uses:
            self.scale = nn.Parameter(torch.empty(1))
        if "head" in p.uses:
            self.head = nn.Linear(WIDTH, 1)
        generator = draw(p.seed, "weights")
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) / 2
        self.named = dict(self.named_parameters())
        self.others: list[nn.Module] = []

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Of every sample a number for each term; or a row."""
        mask = batch["attention_mask"].to(self.dtype)[..., None]
        hidden = torch.tanh(self.trunk(batch["x"]))
        hidden = F.dropout(hidden, 0.4) if self.p.dropout else hidden
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return (self.embed(pooled),) if self.p.is_joint else tuple(head(pooled)[:, 0] for head in self.heads)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.p.dtype)

    def clear(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


# ------------------------------------------------------------------------------------------------------------- terms

LOSSES = (
    lambda out, y: (out - y) ** 2,
    lambda out, y: torch.sin(out) * 3,
    lambda out, y: torch.exp(out / 2),
    lambda out, y: out * y,
)


def term_sums(outputs: Sequence[Tensor], batch: Batch) -> dict[str, tuple[Tensor, float]]:
    """Of each term the summed loss, and its items."""
    counts = batch["n"]
    return {
        name: ((function(out, batch["y"]) * counts[:, term].to(out)).sum(), counts[:, term].sum().item())
        for term, (name, function, out) in enumerate(zip(NAMES, LOSSES, outputs, strict=False))
    }


def given(kind: str, count: float, turn: int = 0) -> Any:
    """Items as a program gives them."""
    if kind == "mixed":
        kind = ("float", "float64")[turn % 2]
    match kind:
        case "int":
            return int(count)
        case "float":
            return count
        case "one element":
            return torch.tensor([count], dtype=torch.float64)
    return torch.tensor(count, dtype=getattr(torch, kind))


def terms_of(p: SeveralProgram, model: Any, batch: Batch, turn: int = 0) -> dict[str, tuple[Tensor, Any]]:
    """The terms of a micro-batch, as a user writes them."""
    terms = {}
    for kind, (name, (total, count)) in zip(p.terms, term_sums(model(batch), batch).items(), strict=True):
        items = given(kind, count, turn)
        if not count and not isinstance(items, Tensor):
            if p.without != "absent":
                is_nan = p.without == "nan" and p.reduction == "mean"  # a sum adds what it is
                terms[name] = (total * torch.nan if is_nan else total, items)
            continue
        terms[name] = (total if p.reduction == "sum" else total / (count or 1), items)
    return terms


def counts_of(p: SeveralProgram, batch: Batch) -> dict[str, Any]:
    return {
        name: given(kind if p.counted == "same" else p.counted, batch["n"][:, term].sum().item())
        for term, (name, kind) in enumerate(zip(NAMES, p.terms, strict=False))
    }


# ------------------------------------------------------------------------------------------------------------- joint


def ordinary_loss(rows: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """The sum of a loss over the items of the first term, and these."""
    counts = batch["n"][:, 0]
    return ((rows.sum(1) - batch["y"]) ** 2 * counts.to(rows)).sum(), counts.sum().item()


def encode(p: SeveralProgram, model: Any, batch: Batch) -> Encoded:
    (rows,) = model(batch)
    more: dict[str, Any] = {}
    if "label" in p.fields:
        more |= {"label": batch["ids"] % 3, "is_even": batch["ids"] % 2 == 0}
    if "nested" in p.fields:
        more["nested"] = [rows[:, 0] ** 2, {"y": batch["y"]}]
    if "float32" in p.fields:
        more["low"] = rows.float()
    if "half" in p.fields:
        more["half"] = batch["y"].bfloat16()
    if "sum" in p.fields:
        more["total"] = Sum(rows.tanh().sum(0))
    if "count" in p.fields:
        more["statistics"] = {"samples": Sum(len(rows)), "items": Sum(batch["n"].sum())}
    if not p.ordinary:
        return Encoded(rows=rows, **more)
    total, count = ordinary_loss(rows, batch)
    return Encoded(total if p.reduction == "sum" else total / count, given(p.ordinary, count), rows=rows, **more)


def joint_loss(p: SeveralProgram, model: Any, encoded: Any) -> Tensor:
    """A loss of all pairs of samples, later ones of more weight, so that the order matters."""
    rows = encoded.rows
    weights = torch.arange(1, len(rows) + 1).to(rows)
    pairs = torch.tanh(rows @ rows.T) * weights
    if "label" in p.fields:
        pairs = pairs * (encoded.label[:, None] == encoded.label[None]) * encoded.is_even
    loss = pairs.mean()
    if "nested" in p.fields:
        loss = loss + (encoded.nested[0] * encoded.nested[1]["y"] * weights).mean() ** 2
    if "float32" in p.fields:
        loss = loss + (encoded.low.to(rows).mean(0) ** 2).sum()
    if "half" in p.fields:
        loss = loss + (encoded.half.to(rows) * rows[:, 0]).mean()
    if "sum" in p.fields:
        loss = loss + ((encoded.total / len(rows)) ** 2).sum()
    if "count" in p.fields:
        loss = loss * (1 + encoded.statistics["items"] / encoded.statistics["samples"]).to(loss)
    if "head" in p.uses:
        loss = loss + (model.head(rows)[:, 0] * weights).mean() ** 2
    return (loss * model.scale.exp()).sum() if "scale" in p.uses else loss


def plain_encoded(p: SeveralProgram, net: Any, parts: Sequence[Batch]) -> Any:
    """What joint gets of these micro-batches: their rows in the order of the batch, their statistics added up."""
    encodings = [encode(p, net, part) for part in parts]
    order = torch.cat([part["ids"] for part in parts]).argsort()

    def all_of(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Sum):
            return sum(value.value for value in values)
        if isinstance(first, dict):
            return {key: all_of([value[key] for value in values]) for key in first}
        if isinstance(first, list):
            return [all_of(list(each)) for each in zip(*values, strict=True)]
        return torch.cat(list(values))[order]

    fields = {name: all_of([vars(each)[name] for each in encodings]) for name in vars(encodings[0]) if has_rows(name)}
    return Encoded(**fields)


def has_rows(name: str) -> bool:
    return not name.startswith("_") and name not in ("loss", "items")
