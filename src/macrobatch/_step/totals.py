"""One window: how many micro-batches it holds, and the totals of their losses and items. It does not use a backend.

The wanted gradient is ``sum of grad S / sum of n`` over the micro-batches, where S is the summed loss of one and n its
number of items. So a window turns each mean into a sum through the seed of its backward, and adds up losses and items
(`Window.add`). The only division happens when the window closes. Items passed as Python numbers are added on the host,
and items passed as tensors on their device. The host reads nothing from a device here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from macrobatch._step.scaling import FEWEST_ITEMS, Seeds, inverse_power_of_two, number_on_host
from macrobatch.errors import BatchError
from macrobatch.types import Items, Reduction

UNSCALED = 1.0
WITHOUT_ITEMS = 2.0**20  # what a rank without items adds to the sum over ranks; a rank with items adds 1
# The items of a recorded micro-batch that the host knows. For terms: items (None if unknown) and rounding of each.
HostItems = int | float | tuple[tuple[int | float | None, float], ...]


def wide(device: torch.device) -> torch.dtype:
    """The dtype for totals: float64, except on Apple's GPUs, which do not support it."""
    return torch.float32 if device.type == "mps" else torch.float64


class Totals(NamedTuple):
    """The sum of losses of a window on the device, and the sum of those items that are tensors."""

    loss: Tensor
    items: Tensor | None
    lowest: Tensor | None  # the smallest number of items of a micro-batch: a negative one is an error


class Window:
    """The totals of one window, from its first micro-batch to its close.

    >>> window = Window(number=1, length=2, reduction="mean")
    >>> window.add(torch.tensor(2.0), items=3)     # the seed of its backward: a mean over 3 items becomes their sum
    tensor(3.)
    >>> window.add(torch.tensor(6.0), items=torch.tensor(1))
    tensor(1.)
    >>> window.items(), window.loss()              # 4 items; (3 * 2.0 + 1 * 6.0) / 4
    (tensor(4), tensor(3., dtype=torch.float64))

    Args:
        number: the number of this window, counted from 1, for error messages.
        length: the number of micro-batches in the window.
        reduction: whether losses are means over their items, or sums.
        scaler: the GradScaler. Its scale at the first micro-batch multiplies all losses of the window.
        typical_items: the typical number of items per micro-batch, from earlier windows; None to use the first one's.
        alone: whether this is the only process. All ranks must use the same multiplier.
        shrinks: whether gradients are float16 at some point. Sums overflow there although means do not.
        multiplier: the multiplier of the losses, if it is known before.
        seeds: the cache of seeds, shared by all windows.
    """

    def __init__(
        self,
        *,
        number: int,
        length: int,
        reduction: Reduction,
        scaler: GradScaler | None = None,
        typical_items: float | Tensor | None = None,
        alone: bool = True,
        shrinks: bool = False,
        multiplier: float | Tensor | None = None,
        seeds: Seeds | None = None,
    ) -> None:
        self.number = number
        self.length = length
        self.slots = 0  # how many micro-batches of its length have begun; a rank may have fewer batches than that
        self.turns = 0  # backwards, including those that count for nothing
        self.micro_batches = 0
        self.counts_samples = False  # whether samples are counted, because no items were passed
        self.average: float = 1  # what the backend has divided the gradients by
        self._reduction = reduction
        self._scaler = scaler
        self.typical = typical_items
        self._alone = alone
        self._shrinks = shrinks
        self._multiplier = multiplier  # chosen at the first micro-batch that has items
        self._seeds = Seeds() if seeds is None else seeds
        self._is_simple = reduction == "mean" and typical_items is None
        self._counted: bool | None = None  # whether items were passed, as in the first micro-batch
        self._host_items: int | float = 0
        self._device_items: Tensor | None = None
        self._lowest: Tensor | None = None  # the smallest of the items on the device: a negative one is an error
        self._device: torch.device | None = None
        self._host_loss = 0.0  # the sum of losses in the host's memory, if it knows their items
        self._loss: Tensor | None = None  # the sum of the other losses, in a wide dtype, without `_unweighted`
        self._unweighted: list[tuple[Tensor, Tensor]] = []  # loss and items, if only the device knows the items
        self._travelling: Callable[[], Tensor] | None = None
        self._everyone: Tensor | None = None  # sums over ranks: loss, items, micro-batches, who passes items, flags

    # ------------------------------------------------------------------------------------------ one micro-batch

    def add(self, loss: Any, items: Items) -> Tensor:
        """Count a micro-batch. Returns the seed of its backward, which makes the gradient of a mean that of a sum."""
        if self._is_simple and self._multiplier is UNSCALED and self._counted is (items is not None):
            count = 1 if items is None else items
            if type(count) is int and count:  # a fast path for most micro-batches after the first, with the same result
                self.turns += 1
                self.micro_batches += 1
                self._host_items += count
                self._add_loss(loss, count)
                return self._seeds.of(count, loss)
        seed = self._seed(loss, items)
        self._count(loss, items)
        return seed

    def _seed(self, loss: Tensor, items: Items) -> Tensor:
        """The seed: the factor for the gradient of this micro-batch."""
        self._check_counted(items)
        count = 1 if items is None else items
        if not is_zero(items):
            self._choose_multiplier(loss, count)
        weight = self.multiplier
        if isinstance(weight, Tensor) and loss.dtype == torch.float64:
            weight = weight.double()  # float32 would round a fractional number of items
        if self._reduction == "mean":
            weight = count if weight is UNSCALED else count * weight
        # A new tensor each time: torch may keep a view of it as the gradient of a parameter, and add to that later.
        if isinstance(weight, Tensor):
            seed = weight.data.to(loss.device, loss.dtype, non_blocking=True, copy=True)
            return seed if seed.shape == loss.shape else seed.reshape(loss.shape)
        return self._seeds.of(weight, loss)

    def _count(self, loss: Tensor, items: Items) -> None:
        self._counted = items is not None
        self.micro_batches += 1
        self._begin_turn(loss)
        if not isinstance(items, Tensor):
            count = 1 if items is None else items
            self._host_items += count
            if count or self._reduction == "sum":  # a mean over no items is NaN, and adds nothing
                self._add_loss(loss, count if self._reduction == "mean" else 1)
            return
        loss = self._as_number(loss)
        # Copies: the caller may reuse the same buffers for the next micro-batch.
        self._unweighted.append((loss.clone(), self._as_number(items).clone()))
        if len(self._unweighted) == 32:
            self._fold()

    def _add_loss(self, loss: Tensor, weight: int | float) -> None:
        if (number := number_on_host(loss)) is not None:
            self._host_loss += number * weight
        else:
            self._device_loss().add_(self._as_number(loss), alpha=weight)

    def _device_loss(self) -> Tensor:
        if self._loss is None:
            self._loss = torch.zeros((), device=self.device, dtype=wide(self.device))
        return self._loss

    def _total_loss(self) -> Tensor:
        """The sum of this rank's losses."""
        self._fold()
        if self._loss is None:
            return torch.full((), self._host_loss, device=self.device, dtype=wide(self.device))
        return self._loss + self._host_loss if self._host_loss else self._loss

    def add_nothing(self, loss: Tensor) -> Tensor:
        """Count a micro-batch with the weight 0. Returns the seed of its backward."""
        self._begin_turn(loss)
        return torch.zeros_like(loss)

    def add_recorded(self, host_items: HostItems, device_total: Tensor) -> None:
        """Count a recorded micro-batch. The recording keeps its loss, and items that only the device knows."""
        assert not isinstance(host_items, tuple), "those are of a window of terms"
        self._counted = True
        self.micro_batches += 1
        self._begin_turn(device_total)
        self._host_items += host_items

    def absorb(self, totals: Totals) -> None:
        """Add the totals of recordings."""
        self._device_loss().add_(totals.loss)
        if totals.items is not None and totals.lowest is not None:
            self._fold()
            self._add_items(totals.items, totals.lowest)

    def totals(self) -> Totals:
        """The totals of this window on the device."""
        return Totals(self._total_loss(), self._device_items, self._lowest)

    @property
    def host_items(self) -> HostItems:
        """The items that the host knows."""
        return self._host_items

    def _begin_turn(self, loss: Tensor) -> None:
        self.turns += 1
        if self.typical is not None:  # other ranks use this multiplier, so this rank must use it too
            self._choose_multiplier(loss, self.typical)
        if self._device is None:
            self._device = loss.device

    def _as_number(self, tensor: Tensor) -> Tensor:
        """A detached scalar on the window's device."""
        number = tensor.data  # only read after this: cheaper than detach()
        if number.dim():
            number = number.reshape(())
        return number if number.device == self._device else number.to(self._device, non_blocking=True)

    def _fold(self) -> None:
        """Add pending losses and items to the totals. Adding each at once would take three times as many kernels."""
        if not self._unweighted:
            return
        losses, items = (torch.stack(column) for column in zip(*self._unweighted, strict=True))
        self._unweighted.clear()
        losses, items = losses.to(wide(self.device)), items.to(wide_count(items))
        if self._reduction == "mean":  # a mean over no items is NaN, and adds nothing
            losses = losses.masked_fill(items == 0, 0) * items
        self._device_loss().add_(losses.sum())
        self._add_items(items.sum(), items.min())

    def _add_items(self, total: Tensor, lowest: Tensor) -> None:
        self._device_items = total if self._device_items is None else self._device_items + total
        self._lowest = lowest if self._lowest is None else torch.minimum(self._lowest, lowest)

    def counts_for_nothing(self, items: Items) -> bool:
        """Whether the host knows that this is a mean over no items. Its loss is 0 / 0, and must add nothing."""
        return self._reduction == "mean" and is_zero(items)

    def _choose_multiplier(self, loss: Tensor, count: int | float | Tensor) -> None:
        """Choose the scale of the scaler. For float16 it is reduced, because sums overflow although means do not."""
        if self._multiplier is not None:
            return
        is_half = self._shrinks or (loss.dtype == torch.float16 and self._alone)
        if self._scaler is None and not is_half:
            self._multiplier = UNSCALED
            return
        shrink = inverse_power_of_two(count if self.typical is None else self.typical)
        if self._scaler is not None:
            shrink = self._scaler.scale(torch.ones((), device=loss.device, dtype=torch.float32)) * shrink
        self._multiplier = shrink

    def _check_counted(self, items: Items) -> None:
        if self._counted is not None and self._counted != (items is not None):
            earlier, now = ("given", "None") if self._counted else ("None", "given")
            raise BatchError(
                f"items must be given for every micro-batch of a window, or for none: earlier in window {self.number} "
                f"they were {earlier}, now they are {now}. Without them every micro-batch weighs the same."
            )

    # ------------------------------------------------------------------------------------------ between ranks

    def send(self, all_reduce: Callable[[Tensor], Callable[[], Tensor]], flags: Sequence[float] = ()) -> None:
        """Start to exchange the totals with all ranks. Only the last backward of the window may still be missing."""
        items = self._own_items().to(wide(self.device))
        if (bad_items := self._own_bad_items()) is not None:
            items = items.masked_fill(bad_items, math.nan)  # NaN tells all ranks
        gives_items = self._counted and not self.counts_samples
        counts = 0.0 if self._counted is None else 1.0 if gives_items else WITHOUT_ITEMS
        host = [torch.full_like(items, number) for number in (self.micro_batches, counts, *flags)]
        self._travelling = all_reduce(torch.stack([self._total_loss(), items, *host]))

    def receive(self) -> None:
        """Wait for the exchange. After this, the totals are those of all ranks."""
        if self._travelling is not None:
            self._everyone, self._travelling = self._travelling(), None

    def flag(self, index: int) -> float:
        """How many ranks have set this flag. The host waits for the number."""
        assert self._everyone is not None
        return float(self._everyone[4 + index])

    def unlike_ranks(self) -> Tensor | None:
        """Whether some ranks have passed items and others not; None in one process."""
        if self._everyone is None:
            return None
        return (self._everyone[3] >= WITHOUT_ITEMS) & (self._everyone[3] % WITHOUT_ITEMS > 0)

    # ------------------------------------------------------------------------------------------ the totals

    @property
    def multiplier(self) -> float | Tensor:
        """The factor of every loss of the window besides its weight. The division at the close undoes it."""
        return UNSCALED if self._multiplier is None else self._multiplier

    @property
    def knows_multiplier(self) -> bool:
        """Whether the multiplier does not depend on the next micro-batch."""
        return self._scaler is None or self._multiplier is not None or self.typical is not None

    @property
    def device(self) -> torch.device:
        assert self._device is not None, "a window without a micro-batch has no totals"
        return self._device

    @property
    def is_empty(self) -> bool:
        """Whether the host knows that there are no items."""
        return self._host_items == 0 and not self._on_device and self._everyone is None

    @property
    def has_items(self) -> bool:
        """Whether the host knows that there are items, and that all counts are valid."""
        return self._host_items > 0 and not self._on_device

    @property
    def _on_device(self) -> bool:
        """Whether only the device knows this rank's items."""
        return self._device_items is not None or bool(self._unweighted)

    def lacks_items(self) -> Tensor:
        """Whether there are no items, as a tensor on the device."""
        return self.items() == 0

    @property
    def knows_miscount(self) -> bool:
        """Whether the host knows that totals differ from what was announced for the window; for subclasses."""
        return False

    def miscounted(self) -> Tensor | None:
        """The same as a tensor on the device; None if there is nothing to compare."""
        return None

    def miscount(self) -> str:
        """The error message: what differs, and what to do. The host waits for it."""
        return (
            f"items must be given on every rank, or on none: in window {self.number} some ranks gave them, others did "
            "not. Without them a micro-batch counts as 1, or as its samples, beside the tokens of the others."
        )

    def losses(self) -> dict[str, Tensor] | None:
        """The mean loss of each term; None if there is only one loss without a name."""
        return None

    def items(self) -> Tensor:
        """The items of the window, on the device."""
        return self._own_items() if self._everyone is None else self._everyone[1]  # other ranks may have fractions

    def loss(self) -> Tensor:
        """The mean loss over the items of the window, on the device; NaN if there are none."""
        if self._everyone is not None:
            return self._everyone[0] / self._everyone[1]
        if self._loss is None and self.has_items:
            mean = self._host_loss / self._host_items
            return torch.full((), mean, device=self.device, dtype=wide(self.device))
        return self._total_loss() / (self._host_items if self.has_items else self._own_items())

    def divisor(self) -> float | Tensor:
        """The divisor that turns the accumulated gradient into that of the mean; a number if the host knows it."""
        items: float | Tensor
        if self._everyone is not None:
            items = self._everyone[1]
        else:
            items = self._host_items if self.has_items else self._own_items().to(wide(self.device))
        multiplier = self.multiplier
        if isinstance(multiplier, Tensor):
            multiplier = multiplier.to(wide(self.device))
        return items * multiplier / self.average if self.average != 1 else items * multiplier

    def typical_items(self) -> float | Tensor:
        """The mean number of items per micro-batch. If it is not a positive number, the earlier typical number."""
        if self._everyone is not None:
            mean = self._everyone[1] / self._everyone[2]
        elif self.has_items:
            return self._host_items / max(self.micro_batches, 1)
        else:
            mean = self._own_items() / max(self.micro_batches, 1)
        before = (
            self.typical.to(mean) if isinstance(self.typical, Tensor) else torch.full_like(mean, self.typical or 1.0)
        )
        return torch.where(torch.isfinite(mean) & (mean > 0), mean, before)

    def _own_items(self) -> Tensor:
        self._fold()
        dtype = torch.int64 if isinstance(self._host_items, int) else wide(self.device)
        host = torch.full((), self._host_items, dtype=dtype, device=self.device)
        return host if self._device_items is None else host + self._device_items

    def bad_items(self) -> Tensor | None:
        """Whether a count was negative or not finite, on any rank; None if the host knows that none was."""
        return self._own_bad_items() if self._everyone is None else ~torch.isfinite(self._everyone[1])

    def _own_bad_items(self) -> Tensor | None:
        self._fold()
        if self._device_items is None or self._lowest is None:
            return None
        total = self._device_items
        return (self._lowest < 0) | ~((total == 0) | ((total >= FEWEST_ITEMS) & (total <= 1 / FEWEST_ITEMS)))


def is_zero(items: Items) -> bool:
    """Whether the host knows that there are no items."""
    return items is not None and not isinstance(items, Tensor) and items == 0


def wide_count(items: Tensor) -> torch.dtype:
    """The dtype in which counts like `items` can be summed without loss."""
    return wide(items.device) if items.is_floating_point() else torch.int64
