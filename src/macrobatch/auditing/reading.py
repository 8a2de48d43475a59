"""What the losses of a backward are means over, and what tells them apart, read from their graphs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from macrobatch._loss.anatomy import anatomy_of
from macrobatch._loss.reading import Part
from macrobatch._torch.tensors import hooks_on_gradient
from macrobatch._torch.watching import expression_of
from macrobatch.auditing.records import Micro, Term

MOST_TARGETS = 2**16  # elements of a target whose range is read


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


def micro_of(outputs: Sequence[Any], seeds: Sequence[Any]) -> tuple[Micro, Tensor | None]:
    """A micro-batch with all that its losses say of themselves, and the target of the first one."""
    terms, unknown = terms_of(outputs, seeds)
    loss = outputs[0] if outputs else None
    micro = Micro(terms=terms, unknown=unknown)
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return micro, None
    text, micro.constants, micro.loss_place, scale, target = expression_of(loss)
    signs = "".join("-" if term.multiplier < 0 else "+" for term in terms)
    micro.expression = f"{zlib.crc32(f'{signs} {text}'.encode()):08x}"
    if scale != 1:
        micro.loss_scale = scale
        micro.terms = tuple(replace(term, written=term.written / scale) for term in terms)
    if target is not None and target.is_floating_point() and 1 < target.numel() <= MOST_TARGETS:
        low, high = target.aminmax()
        micro.target = float(low), float(high)
    return micro, target


def _term_of(part: Part, seed: float) -> Term:
    written = float(part.factor) * math.prod(part.divisors)
    return Term(
        node=part.node,
        kind=part.kind,
        count=None if part.count is None else float(part.count),
        samples=part.shape[0] if part.shape else None,
        multiplier=written * seed,
        written=written,
        divisors=tuple(map(float, part.divisors)),
        is_regulariser=part.leaf_only,
    )
