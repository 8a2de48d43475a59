"""A loss of the whole batch (``joint=``) as one function of the model and a batch, and what is wrong with a step.

One process computes it as it stands. On several ranks each holds its own share, so the encodings of the others come to
it without a graph, and what `joint` itself uses counts for a part on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from macrobatch._cut.trees import leaves
from macrobatch._ranks.collectives import all_gather_numbers
from macrobatch._step.encodings import Exchange, Layout, take_apart, total_of
from macrobatch._step.totals import wide
from macrobatch._step.validation import checked_joint_loss, checked_ordinary
from macrobatch.types import Encoded, Joint, Reduction
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.gradient import Ranks
from macrobatch.verification.report import Cause


class WholeLoss:
    """``loss_fn`` and ``joint`` together, as a loss that `BigBatch` can weigh.

    Args:
        loss_fn: of the user, which returns an `Encoded`.
        joint: of the user.
        reduction: of the ordinary loss in it.
        ranks: those that share the batch.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], joint: Joint, reduction: Reduction, ranks: Ranks) -> None:
        self._loss_fn = loss_fn
        self._joint = joint
        self._reduction = reduction
        self._ranks = ranks

    def __call__(self, model: Any, batch: Any) -> Tensor | tuple[Tensor, int]:
        encoded = self._loss_fn(model, batch)
        samples = _samples_of(encoded)
        layout, tensors = take_apart(encoded, samples)
        device = next(model.parameters()).device
        ordinary = self._ordinary(encoded, samples, device)
        if self._ranks.group is None:
            whole = [t.to(f.dtype) if f.is_sum else t for t, f in zip(tensors, layout.fields, strict=True)]
            loss = checked_joint_loss(self._joint(model, layout.encoded(whole)))
            return loss if encoded.loss is None else loss + encoded.loss.reshape(()) * ordinary[0] / ordinary[1]
        loss, total = self._on_ranks(model, layout, tensors, samples, ordinary, encoded.loss)
        return loss * (total / samples), samples  # ranks are weighed by their samples: that is undone here

    def _on_ranks(
        self, model: Any, layout: Layout, tensors: list[Tensor], samples: int, ordinary: Tensor, loss: Tensor | None
    ) -> tuple[Tensor, int]:
        """A scalar whose gradients on all ranks add up to those of the whole loss, and all samples."""
        device, group = ordinary.device, self._ranks.group
        counts = [count for (count,) in all_gather_numbers([samples], group, device)]
        own = [t.detach() for t in tensors]
        own = [total_of([t], f, device) if f.is_sum else t for t, f in zip(own, layout.fields, strict=True)]
        gathered = Exchange(layout, counts, device, group).gather([*own, *[ordinary] * layout.has_loss])
        totals = gathered.pop() if layout.has_loss else ordinary
        rows = [t.to(f.dtype).requires_grad_(f.has_gradient) for t, f in zip(gathered, layout.fields, strict=True)]
        joint = checked_joint_loss(self._joint(model, layout.encoded(rows)))
        inputs = [row for row in rows if row.requires_grad]
        found = iter(torch.autograd.grad(joint, inputs, retain_graph=True, allow_unused=True))
        start = sum(counts[: dist.get_rank(group)])
        # The graph of `joint` ends in the gathered rows: what is left of its backward are the parameters it uses.
        scalar = joint / len(counts)
        for tensor, row, field in zip(tensors, rows, layout.fields, strict=True):
            gradient = next(found) if row.requires_grad else None
            if gradient is not None and tensor.requires_grad:
                own_gradient = gradient if field.is_sum else gradient[start : start + samples]
                scalar = scalar + (tensor * own_gradient).sum()
        if loss is not None:
            scalar = scalar + loss.reshape(()) * ordinary[0] / totals[1]
        return scalar, sum(counts)

    def _ordinary(self, encoded: Encoded, samples: int, device: torch.device) -> Tensor:
        """What the ordinary loss is multiplied by to be a sum, its items, and nothing."""
        items = samples if encoded.items is None else encoded.items
        numbers = torch.zeros(3, dtype=wide(device), device=device)
        if encoded.loss is not None:
            checked_ordinary(encoded.loss, needs_graph=False)
            numbers[1] = items
            numbers[0] = numbers[1] if self._reduction == "mean" else 1
        return numbers


def _samples_of(encoded: object) -> int:
    """As many as the first field has rows."""
    if isinstance(encoded, Encoded):
        for name in vars(encoded):
            for _, leaf in leaves(getattr(encoded, name), name) if name not in ("loss", "items", "_names") else ():
                if isinstance(leaf, Tensor) and leaf.dim():
                    return len(leaf)
    return 1


# ---------------------------------------------------------------------------------------------- what is wrong


def whole_loss_causes(case: Case, wrong: list[Comparison]) -> Iterator[Cause]:
    """Why a step has another gradient than the loss of the whole batch. No weights of micro-batches could tell."""
    for window in wrong[:1]:
        if not window.actual.largest < float("inf"):
            yield Cause(
                name="not finite",
                evidence="the gradient of the step is infinite or NaN, and that of one big batch is not.",
                cure="Look for encodings of length zero, or a scale that overflows.",
            )
            return
        whole = window.actual.distance(window.expected, window.factor) / (window.actual.largest or 1.0)
        if whole <= window.tolerance:
            yield _factor_cause(case, window)
            return
        factors = dict(_own_factors(window))
        if factors and None not in factors.values():
            found = ", ".join(f"{name} {factor:.4g}" for name, factor in list(factors.items())[:3])
            yield Cause(
                name="parameters counted several times",
                evidence=f"all gradients are right but for a factor of some parameters ({found}); there are "
                f"{window.micro_batches} micro-batches on {case.big.ranks.world_size} ranks.",
                cure="What the loss of the whole batch uses itself, such as a logit scale, gets its gradient once, not "
                "in the backward of every micro-batch. MacroStep(..., joint=) does that.",
            )
            return
        yield Cause(
            name="unexplained",
            evidence=f"the error is {window.error:.2g} of the largest gradient (factor {window.factor:.4g}), and no "
            "known mistake gives this gradient.",
            cure="Check that the step and joint compute the same loss of the same samples, that micro-batches are "
            "encoded twice with the same random numbers, and that encodings of other ranks have their gradients.",
        )


def _own_factors(window: Comparison) -> Iterator[tuple[str, float | None]]:
    """The parameters that are wrong, each with the factor that explains it; None where none does."""
    for name, error in window.errors.items():
        if error > window.tolerance:
            actual, expected = window.actual.only({name}), window.expected.only({name})
            factor = actual.fit(expected)
            apart = actual.distance(expected, factor) / (actual.largest or 1.0)
            yield name, factor if apart <= max(window.tolerance, 1e-6) else None


def _factor_cause(case: Case, window: Comparison) -> Cause:
    ranks, factor = case.big.ranks.world_size, window.factor
    said = f"the gradient is {factor:.4g} times the right one"
    close = max(window.tolerance, 1e-6)
    if ranks > 1 and min(abs(factor * ranks - 1), abs(factor / ranks - 1)) <= close:
        return Cause(
            name="world size",
            evidence=f"{said}: there are {ranks} ranks.",
            cure="DDP and FSDP divide by the number of ranks. Where every rank computes the loss of all samples, and "
            "has gradients for its own rows alone, multiply by it.",
        )
    return Cause(
        name="constant factor",
        evidence=f"{said}, on all parameters alike.",
        cure="Check the divisions of the loss: that of the whole batch is divided by nothing else.",
    )
