"""A plain loss: the mean over all items of a window, whose number is known only when the window closes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from macrobatch._border.arguments import MOST_ITEMS, checked_items, checked_loss, items_on_host
from macrobatch._engine.objective import Objective
from macrobatch._engine.totals import PROPORTIONS, Micro, Source, Totals
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._loss.proportions import Number, Pair
from macrobatch._loss.steady import Steady
from macrobatch._loss.weighing import Weight, weigh
from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import all_reduce_max
from macrobatch._terms.proportions import proportion_flags, require_fit
from macrobatch._torch.optimizers import current_scale
from macrobatch._torch.tensors import in_order, inverse_power_of_two, wide
from macrobatch.errors import BatchError
from macrobatch.types import Reduction

SOURCES = "sources of items"  # the name of a number of ranks for each of these:
WORDS: dict[Source, str] = {
    "given": "given",
    "read": "read from the loss",
    "alike": "neither given nor to be read",
}


class Mean(Objective):
    """The mean over all items of a window: ``sum of S / sum of n``, divided once, when the window closes.

    Sums overflow float16 although means do not. So with a scaler, or float16 gradients, all losses are multiplied by a
    power of two near 1 / the items of a window: those of a micro-batch (`mean_items`) times the micro-batches planned.
    All ranks use the same one: they agree on the first, and the totals of all ranks give the next.

    >>> mean = Mean("mean", None, Local())
    >>> window = mean.open(1, 2, torch.device("cpu"))
    >>> micro = mean.combine(torch.tensor(2.0, requires_grad=True), 3, window, repeats=False)
    >>> micro.seed                                 # a mean over 3 items becomes their sum
    tensor(3.)
    """

    def __init__(
        self,
        reduction: Reduction,
        scaler: GradScaler | None,
        backend: Local,
        models: Sequence[nn.Module] = (),
        *,
        reads: bool = False,  # whether items are read from the graph of a loss, where they are not given
        # The micro-batches of a window (or a function that returns them), if dividing a loss by them is a mistake.
        steps: int | Callable[[], int] | None = None,
    ) -> None:
        self.is_mean = reduction == "mean"
        self._divides = reduction != "total"
        self._reads = reads and self._divides
        self._steps = steps
        self._scaler = scaler
        self._group = backend.group
        is_half = any(p.dtype == torch.float16 for model in models for p in model.parameters())
        self._shrinks = is_half or backend.uses_float16()  # gradients are float16
        self._is_scaled = scaler is not None or self._shrinks

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        multiplier = None if self.mean_items is None else self._multiplier(self.mean_items * num_planned, device)
        totals = Totals(1, weighs=self.is_mean)
        return Window(number, num_planned, device, totals, multiplier, divides=self._divides)

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
        steady = None if repeats else window.steady
        if steady is not None:  # most of them, on a device or on several ranks
            number = steady.items_of(given, items, window.sizes, window.batch, are_samples=are_samples)
            if number and given.device == window.device:
                return Micro(given, torch.full_like(given, number), (given,), (number,), True, window.source)
        return self._combine(given, items, window, repeats=repeats, are_samples=are_samples)

    def _combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool) -> Micro:
        read = items if isinstance(items, Weight) else None  # what an adapter has read of the loss
        if read is not None:
            given, items = given if read.scale is None else given * read.scale, None
        loss, count = checked_loss(given), items
        if loss.is_cpu and window.device.type != "cpu":
            loss = in_order(loss, window.device)
        if type(items) is not int or not 0 <= items <= MOST_ITEMS:
            count = checked_items(items)
            if not window.is_static:  # a recording would freeze the number
                count = items_on_host(count)
        source: Source = "alike" if items is None or are_samples else "given"
        pairs: tuple[Pair, ...] = ()
        unread = None
        if (self._reads or read is not None) and not repeats:
            found = count if source == "given" else None
            steps = self._steps() if callable(self._steps) else self._steps
            weight = read or weigh(loss, found, is_mean=self.is_mean, steps=steps, on_host=not window.is_static)
            if found is None and weight.items is not None:
                source, count = "read", weight.items
                if weight.shape is not None:
                    window.sizes.compare(weight.node, weight.items, weight.shape, window.batch, items)
            unread = weight.unread
            pairs = weight.pairs
            require_fit(pairs, window, self._group)
        if self._is_scaled and self._must_agree(window):
            self._agree(1.0 if count is None else count, window, loss.device)
        if repeats:
            return Micro(loss, torch.zeros_like(loss), counts=False)
        if window.source != source and window.source is not None:
            raise _mixed_in_window(window, source, unread)
        number: Number = 1 if count is None else in_order(count, window.device) if isinstance(count, Tensor) else count
        is_nothing = not isinstance(number, Tensor) and number == 0
        if window.multiplier is None and not is_nothing:
            is_half = self._shrinks or (loss.dtype == torch.float16 and self._group is None)
            is_scaled = self._scaler is not None or is_half
            items = number * window.num_planned
            window.set_multiplier(self._multiplier(items, loss.device) if is_scaled else UNSCALED)
        # A mean over no items is 0 / 0, and must add nothing.
        counts = not (is_nothing and self.is_mean)
        seed = self._seed(loss, number, window)
        steady = None
        if self._reads and read is None and self.is_mean and window.multiplier is UNSCALED and not window.is_static:
            steady = Steady.of(loss, weight.pairs, number)
        return Micro(loss, seed, (loss,), (number,), counts, source, pairs=pairs, unread=unread, steady=steady)

    def _seed(self, loss: Tensor, number: Number, window: Window) -> Tensor:
        """The seed that makes the gradient of a mean that of a sum."""
        weight = UNSCALED if window.multiplier is None else window.multiplier
        if isinstance(weight, Tensor) and loss.dtype == torch.float64:
            weight = weight.double()  # float32 would round a fractional number of items
        if self.is_mean:
            weight = number if weight is UNSCALED else number * weight
        if not isinstance(weight, Tensor):
            return torch.full_like(loss, weight)
        # A new tensor each time: torch may keep a view of it as the gradient of a parameter, and add to that later.
        seed = weight.data.to(loss.device, loss.dtype, non_blocking=True, copy=True)
        return seed if seed.shape == loss.shape else seed.reshape(loss.shape)

    def _multiplier(self, items: Number, device: torch.device) -> float | Tensor:
        shrink = inverse_power_of_two(items)
        return shrink if self._scaler is None else current_scale(self._scaler, device) * shrink

    def _agree(self, items: Number, window: Window, device: torch.device) -> None:
        """Agree on the first number of items. All ranks call this together."""
        self.mean_items = all_reduce_max(items, self._group, device)
        window.set_multiplier(self._multiplier(self.mean_items * window.num_planned, device))

    def _must_agree(self, window: Window) -> bool:
        return self._group is not None and self.mean_items is None and window.multiplier is None

    def catch_up(self, window: Window, device: torch.device) -> None:
        if self._is_scaled and self._must_agree(window):
            self._agree(0, window, device)

    def restore(self, mean_items: float | Tensor | None) -> None:
        self.mean_items = mean_items

    def numbers(self, window: Window) -> dict[str, Tensor]:
        """Where items come from, and the sums that show whether items and counts are in proportion on all ranks."""
        sources = torch.zeros(len(WORDS), device=window.device, dtype=wide(window.device))
        if window.source is not None:
            sources[list(WORDS).index(window.source)] = 1
        return {SOURCES: sources} | ({PROPORTIONS: window.totals.sums_of_pairs(window.device)} if self._reads else {})

    def flags(self, window: Window) -> Flags:
        """Whether ranks mix items, or items or counts are out of proportion. One process mostly knows already."""
        flags: Flags = {}
        if (sources := window.everyone.get(SOURCES)) is not None:
            flags["mixed items"] = Flag((sources > 0).sum() > 1, partial(_mixed_on_ranks, window))
        return flags | proportion_flags(window)

    def learn(self, window: Window) -> None:
        if not self._is_scaled:
            return
        mean = window.mean_items()
        if isinstance(mean, Tensor):  # if it is no positive number, the earlier one
            before = 1.0 if self.mean_items is None else self.mean_items
            earlier = before.to(mean) if isinstance(before, Tensor) else torch.full_like(mean, before)
            self.mean_items = torch.where(torch.isfinite(mean) & (mean > 0), mean, earlier)
        elif mean > 0:
            self.mean_items = mean


def _mixed_in_window(window: Window, source: Source, unread: str | None) -> BatchError:
    now = WORDS[source] + ("" if unread is None else f" (because of {unread})")
    return BatchError(
        f"items must be given for every micro-batch of a window, or for none: earlier in window {window.number} "
        f"they were {WORDS[window.source or source]}, now they are {now}.",
        "Pass items= with every loss.",
        code="mixed items",
    )


def _mixed_on_ranks(window: Window) -> BatchError:
    return BatchError(
        f"items must be given on every rank, or on none: in window {window.number} some ranks gave them, others did "
        "not. Without them a micro-batch counts as 1, or as its samples, beside the tokens of the others."
    )
