"""A window whose losses have several terms: each term is divided by its own denominator, before its backward.

The wanted gradient is ``sum over terms of (sum of grad S / sum of n)``, where S is the summed loss of a term in one
micro-batch and n its number of items. The sums of n are known before the window (`Denominators`). So each micro-batch
combines its terms into one scalar, each mean with the weight n / total. At the close only two divisors remain: the
scale of a scaler, and the number of ranks over which a backend averages. The window still counts the items, to check
that they add up to the denominators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._step.denominators import Denominators, rounding_of
from macrobatch._step.means import MeanWindow
from macrobatch._step.scaling import in_order
from macrobatch._step.totals import UNSCALED, HostItems, is_zero, wide
from macrobatch.types import Items


class Weighed(NamedTuple):
    """The terms of one micro-batch, combined.

    Attributes:
        loss: one scalar, whose gradient is the micro-batch's part of the window's; None if no term has a loss.
        shares: what each term adds to its mean, on the device; None for a term that adds nothing.
        items: the items of each term; a tensor on the device if the host does not know them.
        host: the items of each term that the host knows; None for those that it does not know.
        rounding: the relative error that the items of each term may have; 0 for whole numbers.
        lacks: whether a term is absent, or has no items as far as the host knows.
    """

    loss: Tensor | None
    shares: tuple[Tensor | None, ...]
    items: tuple[int | float | Tensor, ...]
    host: tuple[int | float | None, ...]
    rounding: tuple[float, ...]
    lacks: bool


class TermBuffers(NamedTuple):
    """The sums of a window of terms, one number per term, on the device.

    Attributes:
        divisors: the denominators over all ranks; 1 for a term without items, which adds nothing.
        means: the sums of what micro-batches add to each mean.
        items: the sums of items.
        fewest: the smallest number of items in a micro-batch. A negative one is an error.
    """

    divisors: Tensor
    means: Tensor
    items: Tensor
    fewest: Tensor

    @classmethod
    def of(cls, denominators: Denominators) -> TermBuffers:
        divisors = torch.where(denominators.total == 0, 1, denominators.total)
        return cls(divisors, *(torch.zeros_like(divisors) for _ in range(3)))


class TermWindow(MeanWindow):
    """The totals of one window of terms.

    >>> window = TermWindow(number=1, length=1, reduction="mean")
    >>> both = torch.tensor([4.0, 2.0], dtype=torch.float64)
    >>> window.expect(Denominators(("tokens", "samples"), (4, 2), both, both, (0.0, 0.0)))
    >>> weighed = window.weigh({"tokens": (torch.tensor(1.5), 4), "samples": (torch.tensor(8.0), torch.tensor(2))})
    >>> weighed.loss, window.add(weighed.loss, weighed)   # the sum of the means, and the seed of its backward
    (tensor(9.5000), tensor(1.))
    >>> window.losses()["samples"], window.items(), window.miscounted()
    (tensor(8., dtype=torch.float64), tensor(4), tensor([False, False]))

    Args:
        options: the arguments of `Window`: number, length, reduction, scaler, multiplier.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.denominators: Denominators | None = None
        self._pending: list[Weighed] = []  # micro-batches that are not in the buffers yet

    def expect(self, denominators: Denominators, buffers: TermBuffers | None = None) -> None:
        """Set the denominators, before the first micro-batch; and the buffers for the sums, if not new ones."""
        self.denominators = denominators
        self._buffers = TermBuffers.of(denominators) if buffers is None else buffers
        self._is_static = buffers is not None  # buffers of recordings: divisors change between windows
        self._divisors: Sequence[Tensor] = self._buffers.divisors.unbind()
        self._pending.clear()
        self._begin_on(denominators.own.device)
        self._host: list[int | float | None] = [0] * len(denominators.names)
        self._rounding = list(denominators.rounding)

    @property
    def buffers(self) -> TermBuffers:
        """The sums so far."""
        self._fold()
        return self._buffers

    @property
    def names(self) -> tuple[str, ...]:
        assert self.denominators is not None, "denominators come before the first micro-batch"
        return self.denominators.names

    # ------------------------------------------------------------------------------------------ one micro-batch

    def weigh(self, terms: Mapping[str, tuple[Tensor, Items]], *, repeats: bool = False) -> Weighed:
        """Combine the terms into one scalar. This counts nothing yet.

        `repeats`: the micro-batch and all of its losses have the weight 0.
        """
        given = [terms.get(name) for name in self.names]
        items = [_count_of(term) for term in given]
        counts = [term is not None and not is_zero(n) for term, n in zip(given, items, strict=True)]
        host = tuple(None if isinstance(n, Tensor) else n for n in items)
        lacks, rounding = not all(counts), tuple(map(rounding_of, items))
        if repeats or not any(counts):  # as without items: used parameters get a gradient of zero
            return Weighed(_sum_of(given), (None,) * len(given), (0,) * len(given), host, rounding, lacks)
        numbers = tuple(self._number(n) if isinstance(n, Tensor) else n for n in items)
        shares = [
            self._share(index, term[0], n) if term is not None and is_counted else None
            for index, (term, n, is_counted) in enumerate(zip(given, numbers, counts, strict=True))
        ]
        total = functools.reduce(torch.add, (share for share in shares if share is not None))
        detached = tuple(None if share is None else share.detach() for share in shares)
        return Weighed(total, detached, numbers, host, rounding, lacks)

    def _share(self, index: int, loss: Tensor, items: int | float | Tensor) -> Tensor:
        """What a loss adds to its mean, at least in float32. It uses few kernels, because they delay small models."""
        if loss.dim() or loss.device != self.device or loss.dtype.itemsize < torch.float32.itemsize:
            dtype = torch.promote_types(torch.float32, loss.dtype)
            loss = in_order(loss, self.device).reshape(()).to(self.device, dtype, non_blocking=True)
        weight = (items if self._reduction == "mean" else 1) / self._divisor(index)
        return loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)

    def _divisor(self, index: int) -> float | Tensor:
        """The divisor of a term: a number if the host knows it."""
        assert self.denominators is not None
        known = self.denominators.host[index]
        if known is None or self._is_static or self.denominators.total is not self.denominators.own:
            return self._divisors[index]
        return known or 1

    def _number(self, count: Tensor) -> Tensor:
        """A copy of a count, because the caller may reuse the same buffer for the next micro-batch."""
        number = in_order(count.detach(), self.device).reshape(())
        return number.to(self.device, wide(self.device), non_blocking=True, copy=True)

    def add(self, loss: Tensor | None, items: Any) -> Tensor:
        """Count a micro-batch after `weigh`. Returns the seed of its backward."""
        self._note(items.host, items.rounding)
        if not self.counts_for_nothing(items):
            self._pending.append(items)
        if self._is_static or len(self._pending) == 32:
            self._fold()
        like = torch.ones((), device=self.device) if loss is None else torch.ones_like(loss)
        return like if self.multiplier is UNSCALED else (like * self.multiplier).to(like.dtype)

    def _fold(self) -> None:
        """Add pending micro-batches to the buffers. Adding each at once would take many more kernels."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        shares = zip(*(one.shares for one in pending), strict=True)
        items = list(zip(*(one.items for one in pending), strict=True))
        _, means, sums, fewest = self._buffers
        means.add_(torch.stack([self._sum([share for share in column if share is not None]) for column in shares]))
        totals = lowest = torch.stack([self._sum(_tensors(column), sum(_numbers(column))) for column in items])
        sums.add_(totals)
        if len(pending) > 1:  # counts on the host are never negative, so only tensors matter
            columns = map(_tensors, items)
            lowest = torch.stack([torch.stack(column).amin() if column else self._sum([]) for column in columns])
        torch.minimum(fewest, lowest, out=fewest)

    def _sum(self, column: Sequence[Tensor], more: float = 0) -> Tensor:
        """The sum of these tensors and of `more`, in a wide dtype, with few kernels."""
        dtype = wide(self.device)
        if not column:
            return torch.full((), more, device=self.device, dtype=dtype)
        total = column[0].to(dtype) if len(column) == 1 else torch.stack([n.to(dtype) for n in column]).sum()
        return total + more if more else total

    def add_nothing(self, loss: Tensor) -> Tensor:
        self.turns += 1
        return torch.zeros_like(loss)

    def _note(self, host: Sequence[int | float | None], rounding: Sequence[float]) -> None:
        self.turns += 1
        self.micro_batches += 1
        self._host = [None if a is None or b is None else a + b for a, b in zip(self._host, host, strict=True)]
        self._rounding = list(map(max, self._rounding, rounding))

    def counts_for_nothing(self, items: Any) -> bool:
        return all(share is None for share in items.shares)

    # ------------------------------------------------------------------------------------------ recorded ones

    @property
    def host_items(self) -> HostItems:
        return tuple(zip(self._host, self._rounding, strict=True))

    def add_recorded(self, host_items: Any, device_total: Tensor) -> None:  # noqa: ARG002
        host, rounding = zip(*host_items, strict=True)
        self._note(host, rounding)

    def absorb_buffers(self, buffers: TermBuffers) -> None:
        """Add sums that recordings kept in buffers of their own."""
        self.buffers.means.add_(buffers.means)
        self.buffers.items.add_(buffers.items)
        torch.minimum(self.buffers.fewest, buffers.fewest, out=self.buffers.fewest)

    # ------------------------------------------------------------------------------------------ between ranks

    def send(self, all_reduce: Callable[[Tensor], Callable[[], Tensor]], flags: Sequence[float] = ()) -> None:
        buffers, dtype = self.buffers, self.buffers.means.dtype
        bad = self._own_bad().to(dtype).reshape(1)
        more = [torch.full((1,), number, device=self.device, dtype=dtype) for number in flags]
        own = [buffers.means, buffers.items, self._own_miscounts().to(dtype), bad, *more]
        self._travelling = all_reduce(torch.cat(own))

    def flag(self, index: int) -> float:
        assert self._everyone is not None
        return float(self._everyone[3 * len(self.names) + 1 + index])

    def _of_all(self) -> tuple[Tensor, Tensor]:
        """The means and the items, of all ranks if they were exchanged."""
        if self._everyone is None:
            return self.buffers.means, self.buffers.items
        count = len(self.names)
        return self._everyone[:count], self._everyone[count : 2 * count]

    # ------------------------------------------------------------------------------------------ the totals

    @property
    def is_empty(self) -> bool:
        assert self.denominators is not None
        known = (*self.denominators.host, *self._host)
        return self._everyone is None and all(number == 0 for number in known)

    @property
    def has_items(self) -> bool:
        assert self.denominators is not None
        return any(self.denominators.host)

    def lacks_items(self) -> Tensor:
        return (self._of_all()[1] == 0).all()

    def items(self) -> Tensor:
        """The items of the first term."""
        first: Tensor = self._of_all()[1][:1].sum()  # 0 if no rank ever had a sample, because then no name is known
        return first.to(torch.int64) if self._everyone is None and not any(self._rounding[:1]) else first

    def losses(self) -> dict[str, Tensor]:
        means, items = self._of_all()
        return dict(zip(self.names, means.masked_fill(items == 0, torch.nan).unbind(), strict=True))

    def loss(self) -> Tensor:
        means, items = self._of_all()
        total: Tensor = means.sum()  # a term without items has added nothing
        return total.masked_fill((items == 0).all(), torch.nan)

    def bad_items(self) -> Tensor | None:
        assert self.denominators is not None
        if self._everyone is not None:
            return self._everyone[3 * len(self.names)] != 0
        if None not in (*self._host, *self.denominators.host):
            return None
        return self._own_bad()

    def _own_bad(self) -> Tensor:
        assert self.denominators is not None
        numbers = torch.cat([self.buffers.fewest, self.buffers.items, self.denominators.own])
        return ~(torch.isfinite(numbers) & (numbers >= 0)).all()

    # ------------------------------------------------------------------------------------------ what was said before

    @property
    def knows_miscount(self) -> bool:
        """Whether the host knows that this rank's items do not add up to the denominators."""
        assert self.denominators is not None
        pairs = zip(self.denominators.host, self._host, self._rounding, strict=True)
        return any(said is not None and found is not None and not _agree(said, found, r) for said, found, r in pairs)

    def miscounted(self) -> Tensor | None:
        """For each term, whether items and denominator differ on any rank; None if the host knows that all agree."""
        assert self.denominators is not None
        if self._everyone is not None:
            count = len(self.names)
            return self._everyone[2 * count : 3 * count] != 0
        if None not in (*self._host, *self.denominators.host) and not self.knows_miscount:
            return None
        return self._own_miscounts()

    def _own_miscounts(self) -> Tensor:
        assert self.denominators is not None
        said, found = self.denominators.own, self.buffers.items
        apart, largest = (said - found).abs(), torch.maximum(said.abs(), found.abs())
        differs = apart != 0
        if any(self._rounding):  # whole numbers must agree exactly, if they are small enough for floats to represent
            rounding = torch.tensor(self._rounding, device="cpu").to(said, non_blocking=True)
            is_whole = (said == said.round()) & (found == found.round()) & (largest * rounding < 64)
            differs &= is_whole | ~(apart <= rounding * largest)
        return differs

    def miscount(self) -> str:
        """The error message, with the term and both numbers. The host waits for them."""
        assert self.denominators is not None
        miscounted = self.miscounted()
        assert miscounted is not None
        index = int(miscounted.int().argmax())
        where, said, found = "", self.denominators.own[index].item(), self.buffers.items[index].item()
        if self._everyone is not None and not self._own_miscounts()[index]:
            where = ", with those of the other ranks,"
            said, found = self.denominators.total[index].item(), self._of_all()[1][index].item()
        mistake = (
            f"the items of the term {self.names[index]!r}{where} add up to {found:.12g}, but counts= said {said:.12g}"
        )
        if said == found:
            mistake = f"the items of the term {self.names[index]!r} do not add up to what counts= said on another rank"
        return (
            f"{mistake}, in window {self.number}; its step was not taken. What loss_fn returns as items of a term must "
            "add up, over all micro-batches, to what counts(batch) says of the batch: count both in the same way, "
            "after any shift of labels."
        )


def _tensors(column: Iterable[int | float | Tensor]) -> list[Tensor]:
    return [number for number in column if isinstance(number, Tensor)]


def _numbers(column: Iterable[int | float | Tensor]) -> list[int | float]:
    return [number for number in column if not isinstance(number, Tensor)]


def _count_of(term: tuple[Tensor, Items] | None) -> int | float | Tensor:
    if term is None:
        return 0
    return 1 if term[1] is None else term[1]


def _sum_of(given: Sequence[tuple[Tensor, Items] | None]) -> Tensor | None:
    """A scalar whose backward reaches everything that the losses reach; None if no loss has a graph."""
    total = None
    for term in given:
        if term is not None and term[0].requires_grad:
            loss = term[0].reshape(())
            total = loss if total is None else total + loss.to(total.device)
    return total


def _agree(said: float, found: float, rounding: float) -> bool:
    if said == found:
        return True
    largest = max(abs(said), abs(found))
    is_whole = said == round(said) and found == round(found) and largest * rounding < 64
    return not is_whole and abs(said - found) <= rounding * largest
