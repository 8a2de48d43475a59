"""`contrastive_loss`: each row of `a` must recognise its partner among all rows of `b`, without a matrix of all pairs.

The matrix of logits is cut into tiles. The forward computes one tile after the other, and keeps only what the softmax
of each row and column needs to know (`log_sum_exps`). The backward computes each tile again, and adds its part to the
gradients (`add_gradients`). Both work on any `Block` of the matrix, such as the rows of one rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._torch.autograd import only_first
from macrobatch.errors import BatchError, UsageError

TILE = 2048  # rows and columns: 16 MB of float32 logits, large enough for fast matrix products
EPSILON = 1e-12  # the smallest norm that a row is divided by: that of F.normalize

ONLY_FIRST = (
    "contrastive_loss was differentiated twice, but it has only first derivatives. For second ones (gradient "
    "penalties, Hessians), write the loss with F.cross_entropy on the matrix of all pairs."
)


def contrastive_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    symmetric: bool = True,
    negatives: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """Compute the contrastive loss of CLIP (also called InfoNCE) without the matrix of all pairs in memory.

    Row i of `a` and row i of `b` are a pair; all other rows are wrong answers. Rows are normalised, so a logit is
    `scale` times the cosine of two rows. The loss is the mean cross-entropy of finding each row's partner. Its value
    and gradient equal those of this code:

    >>> import torch.nn.functional as F
    >>> a, b = torch.randn(6, 4), torch.randn(6, 4)
    >>> logits = 20.0 * F.normalize(a) @ F.normalize(b).T
    >>> answers = torch.arange(6)
    >>> naive = (F.cross_entropy(logits, answers) + F.cross_entropy(logits.T, answers)) / 2
    >>> torch.testing.assert_close(contrastive_loss(a, b, scale=20.0), naive)

    It holds at most four tiles of the matrix in memory at a time, of up to ``tile * tile`` logits each. Beyond that, it
    needs memory only for the gradients. The backward computes the logits again, and cannot be differentiated a second
    time. The host never waits for the device.

    Everything is computed in float32 (in float64 if the rows are float64), also for bfloat16 and float16 rows and under
    autocast. On a GPU, `torch.set_float32_matmul_precision("high")` allows faster products (TF32), as elsewhere.

    Args:
        a: a matrix (pairs, dimension) of the rows that look for their partners, such as images or questions.
        b: a matrix (pairs, dimension) of the partners in the same order, such as captions or answers.
        scale: the factor for the cosines, the inverse of a temperature: a number, or a tensor with one element, which
            gets a gradient if it requires one.
        symmetric: whether the loss is the mean of both directions, as in CLIP. False: only the rows of `a` look for
            their partners in `b`.
        negatives: a matrix (any number, dimension) of further wrong answers for every row of `a`, such as hard
            negatives. They get gradients. They have no partners, so the direction from `b` to `a` does not use them.
            Default: none.
        tile: the number of rows, and of columns, in a tile of the matrix. Smaller tiles need less memory. The result
            does not depend on it, except for rounding.

    Returns:
        The mean over the pairs, a scalar in float32 or float64. A row of zeros has the cosine 0 with every other row.

    Raises:
        BatchError: `a`, `b` and `negatives` are not floating-point matrices that fit together, or there is no pair.
        UsageError: `scale`, `symmetric` or `tile` is invalid, or something asks for a second derivative.
    """
    if not isinstance(symmetric, bool):
        raise UsageError(f"symmetric must be True or False: got {symmetric!r}.")
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise UsageError(f"tile must be a number of rows and columns, at least 1: got {tile!r}.")
    _check_rows(a, b, negatives)
    negatives = a[:0].detach() if negatives is None else negatives
    dtype = functools.reduce(torch.promote_types, (a.dtype, b.dtype, negatives.dtype, torch.float32))
    factor = _scalar(scale, a.device, dtype)
    loss: Tensor = _ContrastiveLoss.apply(a, b, negatives, factor, symmetric, tile)  # type: ignore[no-untyped-call]
    return loss


# ---------------------------------------------------------------------------------------------------- arguments


def _check_rows(a: Tensor, b: Tensor, negatives: Tensor | None) -> None:
    """Raise an error if the tensors are not matrices of pairs."""
    given = {"a": a, "b": b} | ({} if negatives is None else {"negatives": negatives})
    for name, rows in given.items():
        if not isinstance(rows, Tensor):
            raise BatchError(f"{name} must be a tensor with one row a sample: got {type(rows).__name__}.")
        if rows.dim() != 2 or not rows.is_floating_point():
            raise BatchError(
                f"{name} must be floating-point rows of the shape (samples, dimension): found {rows.dtype} of shape "
                f"{tuple(rows.shape)}. Bring the encodings of each sample into one row."
            )
    shapes = " and ".join(f"{name} {tuple(rows.shape)}" for name, rows in given.items())
    if len(a) != len(b):
        raise BatchError(
            f"row i of a and row i of b must be a pair: found {shapes}. Pass rows without a partner as negatives."
        )
    if len({rows.shape[1] for rows in given.values()}) > 1:
        raise BatchError(f"all rows must have the same dimension: found {shapes}. Project them to one space first.")
    if len(a) == 0:
        raise BatchError(f"a loss needs at least one pair: found {shapes}. Skip empty batches.")
    if len({rows.device for rows in given.values()}) > 1:
        devices = ", ".join(f"{name} on {rows.device}" for name, rows in given.items())
        raise BatchError(f"all rows must be on one device: found {devices}. Move them to one with .to(device).")


def _scalar(scale: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The scale as a tensor without dimensions, with its graph if it has one."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.is_floating_point():
            raise UsageError(
                "scale must be a number, or a floating-point tensor with one element: found "
                f"{scale.dtype} of shape {tuple(scale.shape)}."
            )
        if scale.device != device:
            raise UsageError(f"scale is on {scale.device}, but a on {device}: move it with .to(device).")
        return scale.reshape(()).to(dtype)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise UsageError(f"scale must be a finite number, or a tensor with one element: got {scale!r}.")
    return torch.full((), float(scale), dtype=dtype, device=device)


# ---------------------------------------------------------------------------------------------------- by tiles


@dataclass(frozen=True)
class Rows:
    """Rows that are normalised a part at a time, as by `F.normalize`: there is no copy of all of them."""

    given: Tensor  # (count, dimension)
    norms: Tensor  # (count, 1), in the dtype of the logits, at least EPSILON

    @staticmethod
    def of(given: Tensor, dtype: torch.dtype) -> Rows:
        norms = torch.linalg.vector_norm(given, dim=1, keepdim=True, dtype=dtype)
        return Rows(given, norms.clamp_(min=EPSILON))

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, part: slice) -> Tensor:
        """Some rows, normalised."""
        return self.given[part] / self.norms[part]

    def empty_sums(self) -> Tensor:
        """What `add_gradients` adds to."""
        return torch.zeros_like(self.given, dtype=self.norms.dtype)

    def components(self, vectors: Tensor) -> Tensor:
        """(count, 1): of one vector for each row, its component along that row."""
        parts = [(self[part] * vectors[part]).sum(1, keepdim=True) for part in _spans(len(self), TILE)]
        return torch.cat(parts) if parts else torch.zeros_like(self.norms)

    def gradient(self, sums: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the given rows, if `weight * sums` is that of the normalised rows; `sums` is overwritten."""
        # A change along a row only changes its norm, which is divided away, unless the norm is below EPSILON.
        components = self.components(sums).masked_fill_(self.norms <= EPSILON, 0)
        for part in _spans(len(self), TILE):
            sums[part].addcmul_(self[part], components[part], value=-1)
        return sums.mul_(weight / self.norms).to(self.given.dtype)


class Tile(NamedTuple):
    """The logits of some rows and columns of a `Block`."""

    rows: slice
    columns: slice
    a: Tensor  # (rows, dimension), normalised
    b: Tensor  # (columns, dimension), normalised
    logits: Tensor  # (rows, columns)
    offset: int  # the partner of the tile's row i is its column i + offset, if it has that column

    def part(self, dim: int) -> slice:
        """Its rows in the block (dim 1), or its columns (dim 0)."""
        return self.rows if dim == 1 else self.columns

    def answers(self, dim: int) -> slice:
        """Those of its rows, or columns, whose right answers are on its diagonal: the partners."""
        start = max(0, -self.offset if dim == 1 else self.offset)
        return slice(start, start + len(self.logits.diagonal(self.offset)))


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows and columns of the matrix of logits: ``scale * a @ b.T`` of normalised rows, one tile at a time."""

    a: Rows
    b: Rows
    scale: Tensor  # without dimensions
    tile: int
    first: int = 0  # the partner of row i of `a` is row first + i of `b`, if there is one; len(b): nobody has one

    def tiles(self) -> Iterator[Tile]:
        for rows in _spans(len(self.a), self.tile):
            a = self.a[rows]
            scaled = a * self.scale
            for columns in _spans(len(self.b), self.tile):
                b = self.b[columns]
                yield Tile(rows, columns, a, b, scaled @ b.T, self.first + rows.start - columns.start)


class LogSumExp(NamedTuple):
    """What the softmax of each row (dim 1), or of each column (dim 0), needs of all their logits.

    Exponentials are relative to that of the largest logit, so that none overflows. The right answer is not in the sum:
    if a model is almost always right, the wrong answers beside it would lose their digits.
    """

    peak: Tensor  # the largest logit
    wrong: Tensor  # the sum of exp(logit - peak) over the wrong answers
    right: Tensor  # the logit of the right answer; the lowest number if it is in another block

    @staticmethod
    def of_nothing(rows: Rows) -> LogSumExp:
        """Before there is a logit."""
        lowest = torch.full_like(rows.norms[:, 0], torch.finfo(rows.norms.dtype).min)
        return LogSumExp(lowest, torch.zeros_like(lowest), lowest.clone())

    def at(self, part: slice) -> LogSumExp:
        return LogSumExp(self.peak[part], self.wrong[part], self.right[part])

    def merge(self, other: LogSumExp) -> LogSumExp:
        """Of the logits of both: the same rows or columns, in two blocks."""
        peak = torch.maximum(self.peak, other.peak)
        wrong = self.wrong * (self.peak - peak).exp_() + other.wrong * (other.peak - peak).exp_()
        return LogSumExp(peak, wrong, torch.maximum(self.right, other.right))

    def add_(self, tile: Tile, dim: int) -> None:
        """Merge the logits of a tile."""
        own = self.at(tile.part(dim))
        own.right[tile.answers(dim)] = tile.logits.diagonal(tile.offset)
        peak = tile.logits.amax(dim)
        exponentials = (tile.logits - peak.unsqueeze(dim)).exp_()
        exponentials.diagonal(tile.offset).zero_()
        merged = own.merge(LogSumExp(peak, exponentials.sum(dim), own.right))
        own.peak.copy_(merged.peak)
        own.wrong.copy_(merged.wrong)

    def cross_entropies(self) -> Tensor:
        """The loss of each row or column."""
        return (self.peak - self.right) + torch.log1p(self.wrong + torch.expm1(self.right - self.peak))

    def slopes(self, tile: Tile, dim: int) -> Tensor:
        """The derivatives of these losses by the logits of a tile: the softmax, minus 1 for right answers."""
        own = self.at(tile.part(dim))
        total = own.wrong + (own.right - own.peak).exp_()
        slopes = (tile.logits - own.peak.unsqueeze(dim)).exp_().div_(total.unsqueeze(dim))
        slopes.diagonal(tile.offset).copy_((-own.wrong / total)[tile.answers(dim)])
        return slopes


def log_sum_exps(block: Block, *, of_columns: bool = True) -> tuple[LogSumExp, LogSumExp | None]:
    """Those of a block's rows and, if wanted, of its columns; `merge` makes those of the whole matrix."""
    rows = LogSumExp.of_nothing(block.a)
    columns = LogSumExp.of_nothing(block.b) if of_columns else None
    for tile in block.tiles():
        rows.add_(tile, dim=1)
        if columns is not None:
            columns.add_(tile, dim=0)
    return rows, columns


def add_gradients(
    block: Block, *, rows: LogSumExp | None, columns: LogSumExp | None, sum_a: Tensor | None, sum_b: Tensor | None
) -> None:
    """Add to each row of `sum_a` the rows of `b`, weighted by the derivatives by their logits; `sum_b` likewise.

    The loss is the sum of the cross-entropies of all rows, if `rows` is given, and of all columns, if `columns` is.
    Both must be of the whole matrix, of which the block may be any part. Times `scale`, the sums are the gradients of
    the normalised rows. The components of `sum_a` along `a`, all added up, are the gradient of `scale`.
    """
    for tile in block.tiles():
        directions = [(of, dim) for of, dim in ((rows, 1), (columns, 0)) if of is not None]
        slopes = functools.reduce(Tensor.add_, [of.slopes(tile, dim) for of, dim in directions])
        if sum_a is not None:
            sum_a[tile.rows].addmm_(slopes, tile.b)
        if sum_b is not None:
            sum_b[tile.columns].addmm_(slopes.T, tile.a)


def _spans(length: int, largest: int) -> list[slice]:
    """As few parts as possible, as even as possible."""
    if length == 0:
        return []
    step = math.ceil(length / math.ceil(length / largest))
    return [slice(start, start + step) for start in range(0, length, step)]


# ---------------------------------------------------------------------------------------------------- the loss


class _ContrastiveLoss(torch.autograd.Function):
    """The loss of the whole matrix. It saves its inputs, and three numbers for each row and column."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, negatives: Tensor, scale: Tensor, symmetric: bool, tile: int) -> Tensor:
        with torch.autocast(a.device.type, enabled=False):
            pairs, others = _blocks(a, b, negatives, scale, tile)
            rows, columns = log_sum_exps(pairs, of_columns=symmetric)
            rows = rows.merge(log_sum_exps(others, of_columns=False)[0])
            directions = [rows] if columns is None else [rows, columns]
            loss = torch.cat([direction.cross_entropies() for direction in directions]).mean()
        ctx.save_for_backward(a, b, negatives, scale, *rows, *(columns or ()))
        ctx.tile = tile
        return loss

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        a, b, negatives, scale, *saved = ctx.saved_tensors
        rows, columns = LogSumExp(*saved[:3]), LogSumExp(*saved[3:]) if saved[3:] else None
        for_a, for_b, for_negatives, for_scale = ctx.needs_input_grad[:4]
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
            pairs, others = _blocks(a, b, negatives, scale, ctx.tile)
            sum_a = pairs.a.empty_sums() if for_a or for_scale else None
            sum_b = pairs.b.empty_sums() if for_b else None
            sum_negatives = others.b.empty_sums() if for_negatives else None
            add_gradients(pairs, rows=rows, columns=columns, sum_a=sum_a, sum_b=sum_b)
            add_gradients(others, rows=rows, columns=None, sum_a=sum_a, sum_b=sum_negatives)
            weight = seed / (len(a) if columns is None else 2 * len(a))  # of each cross-entropy
            grad_scale = pairs.a.components(sum_a).sum() * weight if sum_a is not None and for_scale else None
            sums = (pairs.a, sum_a), (pairs.b, sum_b), (others.b, sum_negatives)
            gradients = [None if one is None else given.gradient(one, weight * scale) for given, one in sums]
        return *only_first([*gradients, grad_scale], (seed, a, b, negatives, scale), ONLY_FIRST), None, None


def _blocks(a: Tensor, b: Tensor, negatives: Tensor, scale: Tensor, tile: int) -> tuple[Block, Block]:
    """The logits of all pairs, and those of the negatives."""
    rows, columns, others = (Rows.of(given, scale.dtype) for given in (a, b, negatives))
    return (
        Block(a=rows, b=columns, scale=scale, tile=tile),
        Block(a=rows, b=others, scale=scale, tile=tile, first=len(others)),
    )
