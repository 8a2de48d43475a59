"""A loss of the whole batch as an objective: the gradient of every encoding is known before the first backward.

Each micro-batch makes one scalar: the dot product of its encodings and their gradients, plus its ordinary loss with the
weight n / N. The gradient of this scalar is the micro-batch's part of the window's gradient. The first pass has summed
losses and items of all ranks, so that all columns are known: micro-batches add nothing to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from macrobatch._border.arguments import checked_items, checked_ordinary, items_on_host
from macrobatch._checks.joint import PassesDiffer
from macrobatch._checks.pass_difference import is_all_double
from macrobatch._engine.totals import PROPORTIONS, Denominators, Micro
from macrobatch._engine.verdict import Flags
from macrobatch._engine.window import Window
from macrobatch._ranks.backend import Local
from macrobatch._terms.objective import Terms
from macrobatch._terms.proportions import proportion_flags, require_fit, weight_of
from macrobatch._torch.tensors import in_order, wide
from macrobatch.errors import rewording
from macrobatch.types import Encoded, Items, Reduction

COUNT = "Count what the loss averages, after any shift of labels and without ignored ones: Encoded(loss, items, ...)."
CURES = {
    "items out of proportion": f"{COUNT} Without items, its samples count: the first pass has no graph to read.",
    "sum": 'Divide it by its items, or make the MacroStep with reduction="sum" and pass Encoded(loss, items, ...).',
}


class FirstPass(NamedTuple):
    """What the first pass has counted on all ranks."""

    samples: int
    ordinary: Tensor | None  # the sums of the ordinary losses and of their items, and the number of invalid counts
    is_whole: bool  # whether all of these items are whole numbers by their type

    def denominators(self, device: torch.device) -> Denominators:
        """The columns: the ordinary loss, if there is one, and the loss of the whole batch, over its samples."""
        samples = torch.full((1,), self.samples, device=device, dtype=wide(device))
        if self.ordinary is None:
            return Denominators(("joint",), (self.samples,), samples, samples, [1], [0.0], are_terms=False)
        items = torch.cat([self.ordinary[1:2], samples])
        divisors = torch.where(items == 0, 1, items).unbind()
        rounding = [0.0 if self.is_whole else 1e-9, 0.0]
        return Denominators(("loss", "joint"), (None, self.samples), items, items, divisors, rounding, are_terms=False)

    def sums(self, joint: Tensor, device: torch.device) -> dict[str, Tensor]:
        """The sums of all ranks, with the loss of the whole batch."""
        samples = torch.full((1,), self.samples, device=device, dtype=wide(device))
        value = joint.detach().reshape(1).to(device, wide(device))
        if self.ordinary is None:
            return {"losses": value, "items": samples, "bad": torch.zeros_like(value)}
        total, items, bad = (number.reshape(1) for number in self.ordinary.unbind())
        mean = (total / items).masked_fill(items == 0, 0)
        return {
            "losses": torch.cat([mean, value]),
            "items": torch.cat([items, samples]),
            "bad": torch.cat([bad, torch.zeros_like(bad)]),
        }


class Pull(NamedTuple):
    """What is known of a micro-batch before its forward in the second pass. It is the input of a recorded one."""

    micro_batch: Any
    first: list[Tensor] | None  # its encodings from the first pass; None for one that counts for nothing
    gradients: Sequence[Tensor | None]  # of the whole loss for each encoding, times the scale
    ordinary: Tensor | None  # ordinary loss and items from the first pass, on the device; None: not compared


class Encodings(NamedTuple):
    """A micro-batch in the second pass, after its forward."""

    pull: Pull  # what was known before
    tensors: Sequence[Tensor]  # its encodings
    loss: Tensor | None  # the ordinary loss
    items: Items  # of the ordinary loss, as counted in the first pass
    items_now: Items  # the same, as counted in the second pass

    @classmethod
    def of(cls, pull: Pull, tensors: Sequence[Tensor], encoded: Encoded, items: Items, samples: int) -> Encodings:
        if encoded.loss is not None:
            checked_ordinary(encoded.loss, needs_graph=not is_zero(items))
        items_now = samples if encoded.items is None else checked_items(encoded.items)
        return cls(pull, tensors, encoded.loss, items, items_now)


class Joint(Terms):
    """A loss of the whole batch, pulled back to its micro-batches."""

    num_passes = 2

    def __init__(
        self,
        reduction: Reduction,
        scaler: GradScaler | None,
        backend: Local,
        models: Sequence[nn.Module],
        passes: PassesDiffer | None,  # compares the two passes
    ) -> None:
        super().__init__(reduction, scaler, backend, models)
        self._passes = passes
        self._models = models
        self.is_double = False  # whether everything in this window is computed in float64

    def expect(self, window: Window, denominators: Denominators) -> None:
        super().expect(window, denominators)
        self.is_double = is_all_double(self._models)
        window.totals.note(PassesDiffer.NOTE, torch.zeros((), device=window.device))  # all ranks exchange it

    def numbers(self, window: Window) -> dict[str, Tensor]:
        return {PROPORTIONS: window.totals.sums_of_pairs(window.device)}

    def flags(self, window: Window) -> Flags:
        return proportion_flags(window)

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
        assert isinstance(given, Encodings)
        pieces = []
        for tensor, gradient in zip(given.tensors, given.pull.gradients, strict=True):
            if gradient is not None and tensor.requires_grad:
                pieces.append(_dot(tensor, torch.zeros_like(tensor) if repeats else gradient))
        lacks, pairs = False, tuple[Any, ...]()
        if given.loss is not None and given.loss.requires_grad:
            lacks = is_zero(given.items) and not repeats and self.is_mean  # it may be 0 / 0
            if not lacks:
                pieces.append(self._weigh(given.loss, given.items, window))
                if not (repeats or window.is_static or _differ(given.items, given.items_now)):
                    pairs = self._compare_items(given.loss, given.items, window)
        root = _sum_of(pieces)
        if self.ties is not None:
            root = self.ties.tie(root, lacks=lacks)
        seed = None if root is None else torch.zeros_like(root) if repeats else torch.ones_like(root)
        notes = {} if repeats else self._compare(given, window.device)
        return Micro(root, seed, counts=not repeats, notes=notes, pairs=pairs)

    @rewording(CURES)
    def _compare_items(self, loss: Tensor, items: Items, window: Window) -> tuple[Any, ...]:
        """What must keep its proportion: the items of the ordinary loss, or its samples, and what its graph says."""
        number = in_order(items, window.device) if isinstance(items, Tensor) else items
        pairs = weight_of(loss, number, window, is_mean=self.is_mean).pairs
        require_fit(pairs, window, self._group)
        return pairs

    def _compare(self, given: Encodings, device: torch.device) -> dict[str, Tensor]:
        """The note whether the passes differ."""
        if self._passes is None or given.pull.first is None:
            return {}
        ordinary = None
        if given.loss is not None and given.pull.ordinary is not None:
            ordinary = given.pull.ordinary, given.loss, given.items_now
        return self._passes.compare(given.pull.first, given.tensors, ordinary, device, is_double=self.is_double)

    def _weigh(self, loss: Tensor, items: Items, window: Window) -> Tensor:
        """The ordinary loss with its weight. The gradients of encodings have the scale of the scaler already."""
        loss = loss.reshape(()).to(window.device)
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        divisor = window.early.divisors[0]
        assert isinstance(divisor, Tensor)
        weight = divisor.reciprocal()
        if self.is_mean:
            weight = weight * (items.detach().to(weight) if isinstance(items, Tensor) else items or 0)
        if isinstance(window.multiplier, Tensor):
            weight = weight * window.multiplier
        return loss * weight.to(loss.dtype)


def _differ(first: Items, second: Items) -> bool:
    """Whether the host knows that the two passes have counted other items, which is an error of its own."""
    told = [items_on_host(items) for items in (first, second)]
    return not any(isinstance(items, Tensor) for items in told) and told[0] != told[1]


def is_zero(items: Items) -> bool:
    """Whether the host knows that there are no items."""
    return items is not None and not isinstance(items, Tensor) and items == 0


def _dot(tensor: Tensor, gradient: Tensor) -> Tensor:
    """A scalar whose gradient for `tensor` is exactly `gradient`, in all bits."""
    tensor, gradient = tensor.reshape(-1), gradient.reshape(-1)
    return torch.vdot(gradient, tensor).real if tensor.is_complex() else torch.dot(tensor, gradient)


def _sum_of(pieces: Sequence[Tensor]) -> Tensor | None:
    """The sum, at least in float32. Its backward passes the seed to every piece."""
    if not pieces:
        return None
    dtype = torch.float32
    for piece in pieces:
        dtype = torch.promote_types(dtype, piece.dtype)
    total = pieces[0].to(dtype)
    for piece in pieces[1:]:
        total = total + piece.to(total.device, dtype)
    return total
