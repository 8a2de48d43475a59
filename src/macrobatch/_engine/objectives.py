"""What is differentiated: a mean over all items, or several terms. `_joint/objective.py` has a loss of the whole batch.

An objective turns what the program hands over into one scalar and its seed (`Micro`), and says by the window that it
opens whether denominators are late or early. Nothing else in the engine depends on the kind of loss.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from macrobatch._border.arguments import MOST_ITEMS, checked_items, checked_loss, checked_terms, items_on_host
from macrobatch._engine.totals import Denominators, Micro, Number, Totals
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import all_reduce_max
from macrobatch._ranks.ties import OutputTies
from macrobatch._torch.tensors import in_order
from macrobatch.types import Items, Reduction


class Objective(Protocol):
    """What is differentiated.

    Attributes:
        is_mean: whether losses are means over items, not sums.
        ties: makes backwards reach all outputs of the models, where ranks wait for each other; None if none does.
        mean_items: the mean number of items of a micro-batch, from earlier windows, which is saved; None if not needed.
    """

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

    Args:
        reduction: whether losses are a "mean" or a "sum" over items.
        scaler: the GradScaler, whose scale multiplies the losses.
        backend: how ranks communicate.
        shrinks: whether gradients are float16 at some point.
    """

    ties = None

    def __init__(self, reduction: Reduction, scaler: GradScaler | None, backend: Local, *, shrinks: bool) -> None:
        self.mean_items: float | Tensor | None = None
        self.is_mean = reduction == "mean"
        self._scaler = scaler
        self._group = backend.group
        self._shrinks = shrinks
        self._is_scaled = scaler is not None or shrinks
        self._seeds = Seeds()

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        multiplier = None if self.mean_items is None else self._multiplier(self.mean_items, device)
        return Window(number, num_planned, device, Totals(1, weighs=self.is_mean), multiplier)

    def expect(self, window: Window, denominators: Denominators) -> None:  # noqa: ARG002
        raise AssertionError("a mean is divided when the window closes")

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
        loss, count, is_static = checked_loss(given), items, window.is_static
        if loss.is_cpu and window.device.type != "cpu":
            loss = in_order(loss, window.device)
        if type(items) is not int or not 0 <= items <= MOST_ITEMS:
            count = checked_items(items)
            if not is_static:  # a recording would freeze the number
                count = items_on_host(count)
        if self._is_scaled and self._must_agree(window):
            self._agree(1.0 if count is None else count, window, loss.device)
        if repeats:
            return Micro(loss, torch.zeros_like(loss), counts=False)
        is_counted = items is not None and not are_samples
        if window.is_counted is not is_counted and window.is_counted is not None:
            window.refuse_counting(is_counted)
        number: Number = 1 if count is None else in_order(count, window.device) if isinstance(count, Tensor) else count
        if window.multiplier is UNSCALED and self.is_mean and type(number) is int and number and not is_static:
            return Micro(loss, self._seeds.of(number, loss), (loss,), (number,), True, is_counted, given=(loss,))
        is_nothing = not isinstance(number, Tensor) and number == 0
        if window.multiplier is None and not is_nothing:
            is_half = self._shrinks or (loss.dtype == torch.float16 and self._group is None)
            is_scaled = self._scaler is not None or is_half
            window.set_multiplier(self._multiplier(number, loss.device) if is_scaled else UNSCALED)
        # A mean over no items is 0 / 0, and must add nothing.
        counts = not (is_nothing and self.is_mean)
        seed = self._seed(loss, number, window)
        return Micro(loss, seed, (loss,), (number,), counts, is_counted, given=(loss,))

    def _seed(self, loss: Tensor, number: Number, window: Window) -> Tensor:
        """The seed that makes the gradient of a mean that of a sum."""
        weight = UNSCALED if window.multiplier is None else window.multiplier
        if isinstance(weight, Tensor) and loss.dtype == torch.float64:
            weight = weight.double()  # float32 would round a fractional number of items
        if self.is_mean:
            weight = number if weight is UNSCALED else number * weight
        if not isinstance(weight, Tensor):  # a recording may not read a tensor that is freed when another seed comes
            return torch.full_like(loss, weight) if window.is_static else self._seeds.of(weight, loss)
        # A new tensor each time: torch may keep a view of it as the gradient of a parameter, and add to that later.
        seed = weight.data.to(loss.device, loss.dtype, non_blocking=True, copy=True)
        return seed if seed.shape == loss.shape else seed.reshape(loss.shape)

    def _multiplier(self, items: Number, device: torch.device) -> float | Tensor:
        shrink = inverse_power_of_two(items)
        return shrink if self._scaler is None else scale_of(self._scaler, device) * shrink

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

    def learn(self, window: Window) -> None:
        if not self._is_scaled:
            return
        mean = window.mean_items()
        if isinstance(mean, Tensor):  # if it is no positive number, the earlier one
            before = 1.0 if self.mean_items is None else self.mean_items
            earlier = before.to(mean) if isinstance(before, Tensor) else torch.full_like(mean, before)
            mean = torch.where(torch.isfinite(mean) & (mean > 0), mean, earlier)
        self.mean_items = mean


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

    mean_items = None

    def __init__(
        self, reduction: Reduction, scaler: GradScaler | None, backend: Local, models: Sequence[nn.Module]
    ) -> None:
        self.ties: OutputTies | None = None if backend.group is None else OutputTies(models, backend)
        self.is_mean = reduction == "mean"
        self._scaler = scaler

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        return Window(number, num_planned, device)

    def expect(self, window: Window, denominators: Denominators) -> None:
        scale = UNSCALED if self._scaler is None else scale_of(self._scaler, denominators.own.device)
        window.expect(denominators, scale)

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:  # noqa: ARG002
        terms = checked_terms(given, items, window.names)
        losses = [terms[name][0] if name in terms else None for name in window.names]
        numbers = [_number_of(terms.get(name), window.device) for name in window.names]
        has_items = [isinstance(n, Tensor) or n != 0 for n in numbers]  # an absent term has none
        shares = [
            self._share(loss, n, window.divisor_of(index), window.device)
            if loss is not None and has and not repeats
            else None  # a mean over no items is 0 / 0, and must add nothing
            for index, (loss, n, has) in enumerate(zip(losses, numbers, has_items, strict=True))
        ]
        found = [share for share in shares if share is not None]
        root = functools.reduce(torch.add, found) if found else _sum_of(losses)
        if self.ties is not None:
            root = self.ties.tie(root, lacks=not all(has_items))
        if repeats:
            return Micro(root, None if root is None else torch.zeros_like(root), counts=False)
        seed = None if root is None else torch.ones_like(root)
        if seed is not None and isinstance(window.multiplier, Tensor):
            seed = (seed * window.multiplier).to(seed.dtype)
        parts = [None if share is None else share.detach() for share in shares]
        given = [loss for loss in losses if loss is not None]
        return Micro(root, seed, parts, numbers, counts=bool(found), given=given)

    def _share(self, loss: Tensor, items: Number, divisor: float | Tensor, device: torch.device) -> Tensor:
        """What a loss adds to its mean, at least in float32. It uses few kernels, because they delay small models."""
        if loss.dim() or loss.device != device or loss.dtype.itemsize < torch.float32.itemsize:
            dtype = torch.promote_types(torch.float32, loss.dtype)
            loss = in_order(loss, device).reshape(()).to(device, dtype, non_blocking=True)
        weight = (items if self.is_mean else 1) / divisor
        return loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)

    def catch_up(self, window: Window, device: torch.device) -> None:
        pass  # ranks have agreed on the denominators before

    def learn(self, window: Window) -> None:
        pass  # means are accumulated, so nothing is shrunk

    def restore(self, mean_items: float | Tensor | None) -> None:
        pass


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


# ---------------------------------------------------------------------------------------------- seeds and scales


class Seeds:
    """The seeds of backwards. Copying the last seed takes a third of the time of making a new one."""

    def __init__(self) -> None:
        self._last: tuple[float, Tensor] | None = None

    def of(self, weight: float, loss: Tensor) -> Tensor:
        """A new tensor like `loss` that holds `weight`."""
        if self._last is not None and self._last[0] == weight:
            seed = self._last[1]
            if seed.dtype is loss.dtype and seed.device == loss.device and seed.shape == loss.shape:
                return seed.clone()
        seed = torch.full_like(loss, weight)
        self._last = weight, seed
        return seed.clone()


def scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """The current scale, on the device."""
    return scaler.scale(torch.ones((), device=device, dtype=torch.float32))


def inverse_power_of_two(count: Number) -> float | Tensor:
    """The power of two between 1 / (2 * count) and 1 / count. Multiplying by it changes no digit.

    >>> inverse_power_of_two(1000), inverse_power_of_two(torch.tensor(1000))
    (0.0009765625, tensor(0.0010))
    """
    if isinstance(count, Tensor):
        number = count.detach().reshape(()).to(torch.float32).clamp(min=1)
        return torch.frexp(number).mantissa / number  # mantissa * 2**exponent = number, so this is exact
    return 2.0 ** -math.frexp(ctypes.c_float(max(count, 1)).value)[1]  # rounded as above
