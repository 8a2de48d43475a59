"""What is differentiated: a mean over all items, or several terms. `_joint/objective.py` has a loss of the whole batch.

An objective turns what the program hands over into one scalar and its seed (`Micro`), and says by the window that it
opens whether denominators are late or early. Nothing else in the engine depends on the kind of loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from macrobatch._border.arguments import MOST_ITEMS, checked_items, checked_loss, items_on_host
from macrobatch._engine.totals import PROPORTIONS, Denominators, Micro, Source, Totals
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._loss.proportions import Kind, Number, Pair
from macrobatch._loss.weighing import out_of_proportion, weigh
from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import all_reduce_max
from macrobatch._ranks.ties import OutputTies
from macrobatch._torch.optimizers import current_scale
from macrobatch._torch.tensors import in_order, inverse_power_of_two
from macrobatch.errors import BatchError
from macrobatch.types import Reduction


class Objective(Protocol):
    """What is differentiated."""

    is_mean: bool
    ties: OutputTies | None
    mean_items: float | Tensor | None

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        """A new window."""

    def expect(self, window: Window, denominators: Denominators) -> None:
        """Set the early denominators of a window."""

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
        """Check what the program hands over for a micro-batch, and make one scalar of it. This counts nothing yet.

        `repeats`: it has the weight 0. `are_samples`: the program has given no items, so samples are counted.
        """

    def catch_up(self, window: Window, device: torch.device) -> None:
        """Join the collectives that other ranks run in a first backward, if this rank has none."""

    def learn(self, window: Window) -> None:
        """Learn from a window that closes, for the next ones."""

    def restore(self, mean_items: float | Tensor | None) -> None:
        """Restore an earlier `mean_items`."""

    def numbers(self, window: Window) -> dict[str, Tensor]:
        """More numbers that ranks sum when a window closes, by name."""
        return {}

    def flags(self, window: Window) -> Flags:
        """Reasons against the step of a window, from what was said of it before."""
        return {}


class Mean(Objective):
    """The mean over all items of a window: ``sum of S / sum of n``, divided once, when the window closes.

    Sums overflow float16 although means do not. So with a scaler, or float16 gradients, all losses are multiplied by a
    power of two near 1 / `mean_items`. All ranks use the same one: they agree on the first, and the totals of all
    ranks give the next.

    >>> mean = Mean("mean", None, Local(), shrinks=False)
    >>> window = mean.open(1, 2, torch.device("cpu"))
    >>> micro = mean.combine(torch.tensor(2.0, requires_grad=True), 3, window, repeats=False)
    >>> micro.seed                                 # a mean over 3 items becomes their sum
    tensor(3.)
    """

    ties = None

    def __init__(
        self,
        reduction: Reduction,
        scaler: GradScaler | None,
        backend: Local,
        *,
        shrinks: bool,
        reads: bool = False,  # whether items are read from the graph of a loss, where they are not given
        steps: int | None = None,  # the micro-batches of a window, if a loss that was divided by them is a mistake
    ) -> None:
        self.mean_items: float | Tensor | None = None
        self.is_mean = reduction == "mean"
        self._divides = reduction != "total"
        self._reads = reads and self._divides
        self._steps = steps if steps != 1 else None
        self._scaler = scaler
        self._group = backend.group
        self._shrinks = shrinks
        self._is_scaled = scaler is not None or shrinks

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        multiplier = None if self.mean_items is None else self._multiplier(self.mean_items, device)
        totals = Totals(1, weighs=self.is_mean)
        return Window(number, num_planned, device, totals, multiplier, divides=self._divides)

    def expect(self, window: Window, denominators: Denominators) -> None:
        raise AssertionError("a mean is divided when the window closes")

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
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
        if self._reads and not repeats:
            found = count if source == "given" else None
            weight = weigh(loss, found, is_mean=self.is_mean, steps=self._steps, on_host=not window.is_static)
            if found is None and weight.items is not None:
                source, count = "read", weight.items
                if weight.shape is not None:
                    window.compare_sizes(weight, items if are_samples else None)
            unread = weight.unread
            for pair in weight.pairs:
                if not window.proportions.repeats(pair):
                    pairs = (*pairs, self._require_fit(pair, window))
        if self._is_scaled and self._must_agree(window):
            self._agree(1.0 if count is None else count, window, loss.device)
        if repeats:
            return Micro(loss, torch.zeros_like(loss), counts=False)
        if window.source != source and window.source is not None:
            window.refuse_source(source, unread)
        number: Number = 1 if count is None else in_order(count, window.device) if isinstance(count, Tensor) else count
        if window.multiplier is UNSCALED and self.is_mean and type(number) is int and number:
            seed = torch.full_like(loss, number)
            return Micro(loss, seed, (loss,), (number,), True, source, pairs=pairs, unread=unread)
        is_nothing = not isinstance(number, Tensor) and number == 0
        if window.multiplier is None and not is_nothing:
            is_half = self._shrinks or (loss.dtype == torch.float16 and self._group is None)
            is_scaled = self._scaler is not None or is_half
            window.set_multiplier(self._multiplier(number, loss.device) if is_scaled else UNSCALED)
        # A mean over no items is 0 / 0, and must add nothing.
        counts = not (is_nothing and self.is_mean)
        seed = self._seed(loss, number, window)
        return Micro(loss, seed, (loss,), (number,), counts, source, pairs=pairs, unread=unread)

    def _require_fit(self, pair: Pair, window: Window) -> Pair:
        """The pair, or an error if it breaks a proportion. Several ranks learn of that when the window closes."""
        if self._group is None and not window.proportions.fits(pair):
            raise out_of_proportion(pair[0], pair[1:], window.proportions.last.get(pair[0]))
        return pair

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
        window.set_multiplier(self._multiplier(self.mean_items, device))

    def _must_agree(self, window: Window) -> bool:
        return self._group is not None and self.mean_items is None and window.multiplier is None

    def catch_up(self, window: Window, device: torch.device) -> None:
        if self._is_scaled and self._must_agree(window):
            self._agree(0, window, device)

    def restore(self, mean_items: float | Tensor | None) -> None:
        self.mean_items = mean_items

    def numbers(self, window: Window) -> dict[str, Tensor]:
        """The sums that show whether items and counts are in proportion on all ranks."""
        return {PROPORTIONS: window.totals.sums_of_pairs(window.device)} if self._reads else {}

    def flags(self, window: Window) -> Flags:
        """Whether items or counts are out of proportion. In one process the host knows already, if it has all."""
        proportions, sums = window.proportions, window.everyone.get(PROPORTIONS)
        if sums is None:
            if not proportions.on_device:
                return {}
            sums = window.totals.sums_of_pairs(window.device)
        broken = proportions.broken(sums)
        blocks = bool(proportions) or not window.micro_batches  # a rank without samples waits like the others
        return {
            f"{kind.name} out of proportion": Flag(holds, partial(_out_of_proportion, kind, window), blocks)
            for kind, holds in zip(Kind, broken.unbind(), strict=True)
        }

    def learn(self, window: Window) -> None:
        if not self._is_scaled:
            return
        mean = window.mean_items()
        if isinstance(mean, Tensor):  # if it is no positive number, the earlier one
            before = 1.0 if self.mean_items is None else self.mean_items
            earlier = before.to(mean) if isinstance(before, Tensor) else torch.full_like(mean, before)
            mean = torch.where(torch.isfinite(mean) & (mean > 0), mean, earlier)
        self.mean_items = mean


def _out_of_proportion(kind: Kind, window: Window) -> BatchError:
    """The error at the close of a window."""
    return out_of_proportion(kind, window.proportions.last.get(kind), None, window.number)
