"""A loss of several terms: each is a mean over its own items, whose number is known before the first backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from macrobatch._border.arguments import checked_terms
from macrobatch._engine.objective import Objective
from macrobatch._engine.totals import PROPORTIONS, Denominators, Micro
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._loss.proportions import Number, Pair
from macrobatch._ranks.backend import Local
from macrobatch._ranks.ties import OutputTies
from macrobatch._terms.proportions import in_column, proportion_flags, require_fit, weight_of
from macrobatch._torch.optimizers import current_scale
from macrobatch._torch.tensors import in_order, wide
from macrobatch.errors import BatchError
from macrobatch.types import Items, Reduction

MISCOUNTS = "miscounts"
ROUNDING = "rounding of counts"  # the name of what ranks exchange


class Terms(Objective):
    """A sum of terms, each a mean over its own items. The denominators come before the first backward (`expect`).

    Each micro-batch makes one scalar of its terms, each mean with the weight n / N. So at the close only two divisors
    remain: the scale of a scaler, and the number of ranks over which a backend averages.

    Args:
        reduction: whether the loss of a term is a "mean" or a "sum" over its items.
        scaler: the GradScaler, whose scale multiplies the losses.
        backend: how ranks communicate.
        models: the models, whose outputs are tied where ranks wait for each other.
    """

    def __init__(
        self, reduction: Reduction, scaler: GradScaler | None, backend: Local, models: Sequence[nn.Module]
    ) -> None:
        self.ties: OutputTies | None = None if backend.group is None else OutputTies(models, backend)
        self.is_mean = reduction == "mean"
        self._scaler = scaler
        self._group = backend.group

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        return Window(number, num_planned, device)

    def expect(self, window: Window, denominators: Denominators) -> None:
        scale = UNSCALED if self._scaler is None else current_scale(self._scaler, denominators.own.device)
        window.expect(denominators, scale)

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
        names, divisors = window.early.names, window.early.divisors
        terms = checked_terms(given, None if are_samples else items, names)
        losses = [terms[name][0] if name in terms else None for name in names]
        numbers = [_number_of(terms.get(name), window.device) for name in names]
        pairs: list[Pair] = []
        for column, (name, loss) in enumerate(zip(names, losses, strict=True)):
            if loss is not None and not repeats:
                samples = items if are_samples else 1
                numbers[column], fixed = self._weight_of(name, loss, terms[name][1], samples, window)
                pairs += in_column(column, fixed)
        require_fit(pairs, window, self._group)
        # A mean over no items is 0 / 0, and must add nothing; a sum adds what it is. An absent term is None.
        adds = [
            loss is not None and (not self.is_mean or isinstance(n, Tensor) or n != 0)
            for loss, n in zip(losses, numbers, strict=True)
        ]
        shares = [
            self._share(loss, n, divisor, window.device) if loss is not None and has and not repeats else None
            for loss, n, has, divisor in zip(losses, numbers, adds, divisors, strict=True)
        ]
        found = [share for share in shares if share is not None and share.requires_grad]
        root = functools.reduce(torch.add, found) if found else _sum_of(losses)
        if self.ties is not None:
            root = self.ties.tie(root, lacks=not all(adds))
        if repeats:
            return Micro(root, None if root is None else torch.zeros_like(root), counts=False)
        seed = None if root is None else torch.ones_like(root)
        if seed is not None and isinstance(window.multiplier, Tensor):
            seed = (seed * window.multiplier).to(seed.dtype)
        parts = [None if share is None else share.detach() for share in shares]
        given = [loss for loss in losses if loss is not None]
        return Micro(root, seed, parts, numbers, counts=bool(found), given=given, pairs=pairs)

    def _weight_of(
        self, name: str, loss: Tensor, items: Items, samples: int | Callable[[], int], window: Window
    ) -> tuple[Number, tuple[Pair, ...]]:
        """The items of a term: those given, or else what its graph says, or its samples. And what is in proportion."""
        number = None if items is None else _number_of((loss, items), window.device)
        pairs: tuple[Pair, ...] = ()
        if loss.requires_grad and (self.is_mean or items is not None):
            try:
                weight = weight_of(loss, number, window, is_mean=self.is_mean)
            except BatchError as error:
                raise BatchError(f"the term {name!r}: {error}") from None
            number, pairs = weight.items if number is None else number, weight.pairs
        if number is None:
            number = samples() if callable(samples) else samples
        return number, pairs

    def _share(self, loss: Tensor, items: Number, divisor: float | Tensor, device: torch.device) -> Tensor:
        """What a loss adds to its mean, at least in float32. It uses few kernels, because they delay small models."""
        if loss.dim() or loss.device != device or loss.dtype.itemsize < torch.float32.itemsize:
            dtype = torch.promote_types(torch.float32, loss.dtype)
            loss = in_order(loss, device).reshape(()).to(device, dtype, non_blocking=True)
        if isinstance(items, Tensor):
            items = items.to(wide(device))  # a whole number divided by a Python float would be rounded to float32
        weight = (items if self.is_mean else 1) / divisor
        return loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)

    def numbers(self, window: Window) -> dict[str, Tensor]:
        """For each term, how far its counts may be off, so that all ranks compare alike."""
        rounding = torch.tensor(_rounding(window), device="cpu").to(window.early.own, non_blocking=True)
        return {ROUNDING: rounding, PROPORTIONS: window.totals.sums_of_pairs(window.device)}

    def flags(self, window: Window) -> Flags:
        """Whether the items of a term do not add up to what was said before the window, over all ranks.

        A rank's own need not: a loss may divide by a mean over ranks, and give that as its items.
        """
        denominators, rounding = window.denominators, window.everyone.get(ROUNDING)
        if denominators is None:
            return {}
        pairs = list(zip(denominators.host, window.host_items, _rounding(window), strict=True))
        known = [(said, have, off) for said, have, off in pairs if said is not None and have is not None]
        is_known = not all(_agree(*numbers) for numbers in known)
        flags = proportion_flags(window)
        if rounding is None and len(known) == len(pairs) and not is_known:
            return flags
        said, found = window.early.total, window.everyone.get("items")
        if rounding is None or found is None:
            said, found = window.early.own, window.totals.sums(window.device).items
            rounding = torch.tensor(_rounding(window), device="cpu").to(said, non_blocking=True)
        miscounted = _differ(said, found, rounding)
        error = partial(_miscount, window, said, found, miscounted)
        return {MISCOUNTS: Flag(miscounted.any(), error, True, is_known), **flags}


def _number_of(term: tuple[Tensor, Items] | None, device: torch.device) -> Number:
    """The items of a term: 0 if it is absent, 1 if it has none. A tensor is moved, and keeps its dtype."""
    if term is None:
        return 0
    if not isinstance(term[1], Tensor):
        return 1 if term[1] is None else term[1]
    return in_order(term[1].detach(), device).reshape(()).to(device, non_blocking=True)


def _sum_of(losses: Sequence[Tensor | None]) -> Tensor | None:
    """A scalar whose backward reaches everything that the losses reach; None if no loss has a graph."""
    total = None
    for loss in losses:
        if loss is not None and loss.requires_grad:
            total = loss.reshape(()) if total is None else total + loss.reshape(()).to(total.device)
    return total


# ---------------------------------------------------------------------------------------------- what was said before


def _rounding(window: Window) -> list[float]:
    return list(map(max, window.early.rounding, window.totals.rounding))


def _differ(said: Tensor, found: Tensor, rounding: Tensor) -> Tensor:
    """Whether counts differ. Whole numbers must agree exactly, if they are small enough for floats to represent."""
    apart, largest = (said - found).abs(), torch.maximum(said.abs(), found.abs())
    is_whole = (said == said.round()) & (found == found.round()) & (largest * rounding < 64)
    return (apart != 0) & (is_whole | ~(apart <= rounding * largest))


def _agree(said: float, found: float, rounding: float) -> bool:
    """The same on the host, for one term: whether they do not differ."""
    largest = max(abs(said), abs(found))
    is_whole = said == round(said) and found == round(found) and largest * rounding < 64
    return said == found or (not is_whole and abs(said - found) <= rounding * largest)


def _miscount(window: Window, said: Tensor, found: Tensor, miscounted: Tensor) -> BatchError:
    """The error, with the term and both numbers. The host waits for them."""
    index = int(miscounted.int().argmax())
    where = ", with those of the other ranks," if window.everyone else ""
    return BatchError(
        f"the items of the term {window.early.names[index]!r}{where} add up to {found[index].item():.12g}, but counts= "
        f"said {said[index].item():.12g}, in window {window.number}; its step was not taken. What loss_fn returns as "
        "items of a term must add up, over all micro-batches, to what counts(batch) says of the batch: count both in "
        "the same way, after any shift of labels."
    )
