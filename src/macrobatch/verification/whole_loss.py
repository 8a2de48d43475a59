"""A loss of the whole batch (``joint=``) as one function of the model and a batch.

In one process it is computed directly. Of several ranks, each has only its own share of the batch. So it gets the
encodings of the other ranks without a graph; and the parameters that `joint` uses directly get an equal part of their
gradient on each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from macrobatch._border.arguments import checked_joint_loss, checked_ordinary
from macrobatch._cut.trees import leaves
from macrobatch._joint.encodings import Exchange, Field, Layout, take_apart, total_of
from macrobatch._ranks.collectives import all_gather_numbers
from macrobatch._torch.tensors import wide
from macrobatch.types import Encoded, Joint, Reduction
from macrobatch.verification.gradient import Ranks


class WholeLoss:
    """``loss_fn`` and ``joint`` together, as a loss that `BigBatch` can weight.

    Args:
        loss_fn: the user's function, which returns an `Encoded`.
        joint: the user's function that computes the loss from the encodings of the whole batch.
        reduction: whether the ordinary loss in `Encoded` is a "mean" or a "sum" over its items.
        ranks: the ranks that share the batch.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], joint: Joint, reduction: Reduction, ranks: Ranks) -> None:
        self._loss_fn = loss_fn
        self._joint = joint
        self._reduction = reduction
        self._ranks = ranks
        self._is_ordinary = False  # whether to return only the ordinary loss
        self._reached: Sequence[int] | None = None  # samples whose encodings have a graph; None: all

    def __call__(self, model: Any, batch: Any) -> Any:
        encoded = self._loss_fn(model, batch)
        samples = _samples_of(encoded)
        if self._is_ordinary:
            return encoded.loss, samples if encoded.items is None else encoded.items
        layout, tensors = take_apart(encoded, samples)
        device = next(model.parameters()).device
        ordinary = self._ordinary(encoded, samples, device)
        if self._ranks.group is None:
            tensors = [self._confined(t, f) for t, f in zip(tensors, layout.fields, strict=True)]
            whole = [t.to(f.dtype) if f.is_sum else t for t, f in zip(tensors, layout.fields, strict=True)]
            loss = checked_joint_loss(self._joint(model, layout.encoded(whole)))
            return loss if encoded.loss is None else loss + encoded.loss.reshape(()) * ordinary[0] / ordinary[1]
        loss, total = self._on_ranks(model, layout, tensors, samples, ordinary, encoded.loss)
        return loss * (total / samples), samples  # undoes the weighting of ranks by their samples

    def encode(self, model: Any, batch: Any) -> Any:
        """The result of `loss_fn`."""
        return self._loss_fn(model, batch)

    @contextlib.contextmanager
    def ordinary_alone(self) -> Iterator[None]:
        """A context in which the loss is only the ordinary one, with its items."""
        self._is_ordinary = True
        try:
            yield
        finally:
            self._is_ordinary = False

    @contextlib.contextmanager
    def reaching(self, samples: Sequence[int]) -> Iterator[None]:
        """A context in which the gradient reaches only the encodings of these samples of the batch."""
        self._reached = samples
        try:
            yield
        finally:
            self._reached = None

    def _confined(self, tensor: Tensor, field: Field) -> Tensor:
        if self._reached is None or field.is_sum:
            return tensor
        rows = list(tensor.detach())
        for sample in self._reached:
            rows[sample] = tensor[sample]
        return torch.stack(rows)

    def _on_ranks(
        self, model: Any, layout: Layout, tensors: list[Tensor], samples: int, ordinary: Tensor, loss: Tensor | None
    ) -> tuple[Tensor, int]:
        """A scalar whose gradients on all ranks add up to those of the whole loss; and the number of all samples."""
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
        # The graph of `joint` ends in the gathered rows, so its backward reaches only the parameters that it uses.
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
        """Three numbers: the factor that turns the ordinary loss into a sum, its number of items, and 0."""
        items = samples if encoded.items is None else encoded.items
        numbers = torch.zeros(3, dtype=wide(device), device=device)
        if encoded.loss is not None:
            checked_ordinary(encoded.loss, needs_graph=False)
            numbers[1] = items
            numbers[0] = numbers[1] if self._reduction == "mean" else 1
        return numbers


def _samples_of(encoded: object) -> int:
    """The number of samples: the rows of the first field."""
    if isinstance(encoded, Encoded):
        for name in vars(encoded):
            for _, leaf in leaves(getattr(encoded, name), name) if name not in ("loss", "items", "_names") else ():
                if isinstance(leaf, Tensor) and leaf.dim():
                    return len(leaf)
    return 1
