"""What the losses of a backward are means over, read from their graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from macrobatch._loss.anatomy import Part, anatomy_of
from macrobatch._torch.tensors import hooks_on_gradient
from macrobatch._torch.watching import place_of
from macrobatch.auditing.records import Term


def terms_of(outputs: Sequence[Any], seeds: Sequence[Any]) -> tuple[tuple[Term, ...], str | None]:
    """The terms of the losses, or what keeps them from being known."""
    terms: list[Term] = []
    for output, seed in zip(outputs, seeds, strict=True):
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return (), "something that is no loss"
        if output.numel() != 1 or seed is None or seed.numel() != 1:
            return (), "a tensor that is no single number"
        if hooks_on_gradient(output):
            return (), "a hook on the loss, which may change its gradient"
        anatomy = anatomy_of(output, takes_divisors=True)
        if all(part.kind == "unknown" for part in anatomy.parts):
            node = anatomy.unknown or anatomy.parts[0].node
            return (), f"{node}, which is not understood"
        terms += [_term_of(part, float(seed)) for part in anatomy.parts]
    return tuple(terms), None


def loss_place_of(outputs: Sequence[Any]) -> str | None:
    """The line of the program that computed the first loss, if it was noted."""
    losses = (output for output in outputs if isinstance(output, Tensor))
    return next((place for loss in losses if (place := place_of(loss.grad_fn)) is not None), None)


def _term_of(part: Part, seed: float) -> Term:
    written = float(part.factor) * math.prod(part.divisors)
    return Term(
        node=part.node,
        kind=part.kind,
        count=None if part.count is None else float(part.count),
        multiplier=written * seed,
        written=written,
        divisors=tuple(map(float, part.divisors)),
        is_regulariser=part.leaf_only,
    )
