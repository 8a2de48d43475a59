"""A window with a loss of the whole batch: the gradient of every encoding is known before its first backward.

Each micro-batch makes one scalar: the dot product of its encodings and their gradients, plus its ordinary loss with the
weight n / total. The gradient of this scalar is the micro-batch's part of the window's gradient. The first pass has
counted the totals. So only two divisors remain: the number of ranks over which a backend averages, and the scale of a
scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._step.frozen import Frozen
from macrobatch._step.means import MeanWindow
from macrobatch._step.pass_difference import differs, ordinary_differs, ranks_differ
from macrobatch._step.totals import UNSCALED, HostItems, Totals, is_zero, wide
from macrobatch._step.validation import checked_items, checked_ordinary
from macrobatch.types import Encoded, Items


class FirstPass(NamedTuple):
    """What the first pass has counted on all ranks.

    Attributes:
        samples: the number of samples.
        ordinary: the sum of the ordinary losses, the sum of their items, and the number of invalid counts; None if
            there are no ordinary losses.
        is_whole: whether all of these items are whole numbers by their type.
        is_double: whether everything is computed in float64.
    """

    samples: int
    ordinary: Tensor | None
    is_whole: bool
    is_double: bool


class Share(NamedTuple):
    """A micro-batch in the second pass, after its forward.

    Attributes:
        tensors: its encodings.
        first: its encodings from the first pass; None for a micro-batch that counts for nothing.
        gradients: the gradients of the whole loss for each encoding, times the scale; None if there is none.
        loss: the ordinary loss.
        items: the items of the ordinary loss, as counted in the first pass.
        items_now: the same, as counted in the second pass.
        ordinary: the ordinary loss and its items from the first pass, on the device; None if they are not compared.
    """

    tensors: Sequence[Tensor]
    first: Sequence[Tensor] | None
    gradients: Sequence[Tensor | None]
    loss: Tensor | None
    items: Items
    items_now: Items
    ordinary: Tensor | None


class Bundle(NamedTuple):
    """What is known of a micro-batch before its forward in the second pass. It is the input of a recorded one.

    Attributes:
        micro_batch: the micro-batch itself.
        first, gradients, ordinary: the same as those of `Share`.
    """

    micro_batch: Any
    first: list[Tensor] | None
    gradients: list[Tensor | None]
    ordinary: Tensor | None


def share_of(bundle: Bundle, tensors: Sequence[Tensor], encoded: Encoded, items: Items, samples: int) -> Share:
    """A micro-batch after its forward in the second pass."""
    if (loss := encoded.loss) is not None:
        checked_ordinary(loss, needs_graph=not is_zero(items))
    items_now = samples if encoded.items is None else checked_items(encoded.items)
    return Share(tensors, bundle.first, bundle.gradients, loss, items, items_now, bundle.ordinary)


class Pulled(NamedTuple):
    """A micro-batch of the second pass, combined into one scalar.

    Attributes:
        loss: the scalar; None if nothing in the micro-batch has a graph.
        lacks: whether the ordinary loss was left out.
        counts: whether the micro-batch counts. A repeat does not.
        differs: whether the passes differ: 0 or 1; None if there was nothing to compare.
    """

    loss: Tensor | None
    lacks: bool
    counts: bool
    differs: Tensor | None


class JointWindow(MeanWindow):
    """The totals of one window with a loss of the whole batch.

    Args:
        options: the arguments of `Window`: number, length, reduction, scaler, multiplier.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._first: FirstPass | None = None
        self._joint: Tensor | None = None  # the loss of the whole batch
        self._joint_dtype = torch.float32
        self._joints: Tensor | None = None  # this loss at the index of this rank, zeros for others: their sum shows all
        self._differs: Tensor | None = None  # how many micro-batches differed between the passes
        self._frozen: Frozen | None = None  # parameters that are not trained
        self._changed: Tensor | None = None  # how many of them have changed

    def expect(self, first: FirstPass, device: torch.device) -> None:
        """Set the counts of the first pass, before the second."""
        self._begin_on(device)
        self._first = first
        self._differs = torch.zeros((), device=device, dtype=wide(device))
        self._changed = torch.zeros((), device=device, dtype=wide(device))

    @property
    def ordinary(self) -> Tensor | None:
        """The totals of the ordinary losses: see `FirstPass`."""
        return None if self._first is None else self._first.ordinary

    def note_joint(self, loss: Tensor, rank: int, ranks: int) -> None:
        """Note the loss of the whole batch that this rank has computed."""
        self._joint = loss.detach().reshape(()).to(self.device, wide(self.device))
        self._joint_dtype = loss.dtype
        self._joints = torch.zeros(ranks, device=self.device, dtype=wide(self.device))
        self._joints[rank] = self._joint

    def note_frozen(self, frozen: Frozen) -> None:
        """Check that the first pass and the loss have not changed frozen parameters."""
        frozen.compare(self.device)
        if frozen.changed is not None:
            self._frozen, self._changed = frozen, frozen.changed.to(wide(self.device)).sum()

    # ------------------------------------------------------------------------------------------ one micro-batch

    def weigh(self, share: Share, *, repeats: bool = False) -> Pulled:
        """Combine a micro-batch into one scalar. `repeats`: with the weight 0, but its backward reaches as much."""
        pieces = []
        for tensor, gradient in zip(share.tensors, share.gradients, strict=True):
            if gradient is not None and tensor.requires_grad:
                pieces.append(_dot(tensor, torch.zeros_like(tensor) if repeats else gradient))
        loss, lacks = share.loss, False
        if loss is not None and loss.requires_grad:
            lacks = is_zero(share.items) and not repeats and self._reduction == "mean"  # it may be 0 / 0
            if not lacks:
                pieces.append(self._weight(loss, share.items))
        return Pulled(_sum_of(pieces), lacks, not repeats, None if repeats else self._difference(share))

    def _difference(self, share: Share) -> Tensor | None:
        """Whether the passes differ: 0 or 1; None if there is nothing to compare."""
        assert self._first is not None
        assert share.first is not None
        is_double = self._first.is_double
        found = differs(share.first, share.tensors, self.device, is_double=is_double)
        if share.loss is not None and share.ordinary is not None:
            other = ordinary_differs(share.ordinary, share.loss, share.items_now, is_double=is_double)
            found = other if found is None else found | other
        return None if found is None else found.to(wide(self.device))

    def _weight(self, loss: Tensor, items: Items) -> Tensor:
        assert self._first is not None
        assert self._first.ordinary is not None
        loss = loss.reshape(()).to(self.device)
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        total = self._first.ordinary[1]
        weight = torch.where(total == 0, 1, total).reciprocal()
        if self._reduction == "mean":
            weight = weight * (items.detach().to(weight) if isinstance(items, Tensor) else items or 0)
        if self.multiplier is not UNSCALED:
            weight = weight * self.multiplier
        return loss * weight.to(loss.dtype)

    def add(self, loss: Tensor | None, items: Any) -> Tensor:
        """Count a micro-batch after `weigh`. Returns the seed of its backward."""
        self.turns += 1
        self.micro_batches += 1
        if items.differs is not None:
            self._differs = self._differs + items.differs
        return torch.ones((), device=self.device) if loss is None else torch.ones_like(loss)

    def add_nothing(self, loss: Tensor) -> Tensor:
        self.turns += 1
        if self._device is None:
            self._device = loss.device
        return torch.zeros_like(loss)

    def counts_for_nothing(self, items: Any) -> bool:
        return not items.counts

    # ------------------------------------------------------------------------------------------ recorded ones

    @property
    def host_items(self) -> HostItems:
        return 0

    def add_recorded(self, host_items: HostItems, device_total: Tensor) -> None:  # noqa: ARG002
        self.turns += 1
        self.micro_batches += 1

    def totals(self) -> Totals:
        assert self._differs is not None
        return Totals(self._differs, None, None)

    def absorb(self, totals: Totals) -> None:
        assert self._differs is not None
        self._differs = self._differs + totals.loss

    # ------------------------------------------------------------------------------------------ between ranks

    def send(self, all_reduce: Callable[[Tensor], Callable[[], Tensor]], flags: Sequence[float] = ()) -> None:
        assert not flags, "no loader is read here"
        if self._differs is not None and self._changed is not None and self._joints is not None:
            self._travelling = all_reduce(torch.cat([torch.stack([self._differs, self._changed]), self._joints]))

    # ------------------------------------------------------------------------------------------ the totals

    @property
    def is_empty(self) -> bool:
        return self._first is None

    @property
    def has_items(self) -> bool:
        return self._first is not None

    def items(self) -> Tensor:
        """The items of the ordinary loss; without one, the samples."""
        if self._first is None or self._first.ordinary is None:
            samples = 0 if self._first is None else self._first.samples
            return torch.full((), samples, device=self.device, dtype=torch.int64)
        items = self._first.ordinary[1]
        return items.to(torch.int64) if self._first.is_whole else items

    def loss(self) -> Tensor:
        if self._first is None or self._joint is None:
            return torch.full((), torch.nan, device=self.device, dtype=wide(self.device))
        if self._first.ordinary is None:
            return self._joint
        total, items, _ = self._first.ordinary.unbind()
        return self._joint + (total / items).masked_fill(items == 0, 0)

    def bad_items(self) -> Tensor | None:
        if self._first is None or self._first.ordinary is None:
            return None
        _, items, bad = self._first.ordinary.unbind()
        return (bad != 0) | ~torch.isfinite(items)

    def miscounted(self) -> Tensor | None:
        """Whether the passes differ on any rank, a frozen parameter has changed, or ranks have different losses."""
        if self._differs is None or self._changed is None:
            return None
        if self._everyone is None:
            return torch.stack([self._differs, self._changed]) != 0
        assert self._first is not None
        unlike = ranks_differ(self._everyone[2:], self._joint_dtype, is_double=self._first.is_double)
        return torch.stack([*(self._everyone[:2] != 0).unbind(), unlike])

    def miscount(self) -> str:
        """The error message. The host waits for the numbers."""
        miscounted = self.miscounted()
        assert miscounted is not None
        if miscounted[1]:
            name = "on another rank one" if self._frozen is None else self._frozen.first_changed()
            return (
                f"{name}, a parameter that is not trained, changed inside window {self.number}; its step was not "
                "taken. loss_fn runs twice for every micro-batch, and a window may be done again: a momentum encoder "
                "would move several times. Update it after the step, outside of loss_fn and joint."
            )
        if not miscounted[0]:
            return (
                f"joint did not return the same loss on all ranks in window {self.number}; its step was not taken. "
                "Every rank computes it from the encodings of all, with the same random numbers. Draw from the default "
                "generators alone (no torch.Generator of your own), and use nothing in it that ranks have each for "
                "themselves: a queue of old encodings is the same on all of them if joint fills it."
            )
        return (
            "encodings, or the ordinary loss or its items, were not the same in the two passes of window "
            f"{self.number}; its step was not taken. Each micro-batch goes through loss_fn twice, with the same "
            "weights, buffers and default random number generators. Draw from those alone (no torch.Generator of your "
            "own), and let loss_fn keep nothing from one call to the next. Where layers compute otherwise without a "
            "graph, as the first pass does (nn.TransformerEncoder in eval mode with padding), write `with "
            "torch.enable_grad():` in loss_fn."
        )


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
