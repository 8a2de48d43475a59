"""The totals of a window: columns of losses and items, summed on the host or on the device.

Items given as Python numbers are added on the host, tensors on their device. The host reads nothing from a device here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from macrobatch._loss.proportions import Number, Pair, Proportions
from macrobatch._loss.steady import Steady
from macrobatch._torch.tensors import number_on_host, rounding_of, scalar_on, vector_of, wide

PROPORTIONS = "proportions"  # the name of their sums on the device
MAX_PENDING = 32  # micro-batches whose items only the device knows, before they are added up


Source = Literal["given", "read", "alike"]  # where items come from. "alike": nowhere, so all micro-batches weigh alike


class MicroPlan(NamedTuple):
    """What is known of a micro-batch before its forward."""

    last: bool | None = None
    ends: bool = False
    repeat: bool = False
    num_planned: int = 1
    more: bool | None = None
    complete: bool | None = None
    is_told: bool = False
    may_lapse: bool = False  # whether the program may go on without its backward, because it has called `discard`


IN_BETWEEN = MicroPlan(last=False)
LAST_OF_ALL = MicroPlan(last=True, ends=True)


class Micro(NamedTuple):
    """One micro-batch after its forward, ready for its backward."""

    root: Tensor | None
    seed: Tensor | None
    losses: Sequence[Tensor | None] = ()
    items: Sequence[Number] = ()
    counts: bool = True
    source: Source | None = None
    notes: Mapping[str, Tensor] = {}
    given: Sequence[Tensor] = ()
    pairs: Sequence[Pair] = ()  # numbers that must keep their proportion over the window
    unread: str | None = None  # the node that keeps its items from being read, if it has none
    steady: Steady | None = None  # how it was weighed, if others of its window may be weighed alike


class Denominators(NamedTuple):
    """The early denominators of a window, one for each column."""

    names: tuple[str, ...]
    host: tuple[int | float | None, ...]
    own: Tensor
    total: Tensor
    divisors: Sequence[float | Tensor]
    rounding: Sequence[float]
    are_terms: bool = True


class Sums(NamedTuple):
    """The sums of a window on the device: in each vector one number per column, in a wide dtype."""

    losses: Tensor
    items: Tensor
    bad: Tensor

    @classmethod
    def zeros(cls, columns: int, device: torch.device) -> Sums:
        return cls(*torch.zeros(3, columns, device=device, dtype=wide(device)).unbind())


class Totals:
    """The sums of losses and items of a window on this rank.

    >>> totals = Totals(1, weighs=True)
    >>> totals.add(Micro(None, None, [torch.tensor(2.0)], [3]), torch.device("cpu"))
    >>> totals.add(Micro(None, None, [torch.tensor(6.0)], [torch.tensor(1)]), torch.device("cpu"))
    >>> totals.sums(torch.device("cpu")).losses          # 3 * 2.0 + 1 * 6.0
    tensor([12.], dtype=torch.float64)
    """

    def __init__(
        self, columns: int, *, weighs: bool, static: Sums | None = None, notes: dict[str, Tensor] | None = None
    ) -> None:
        self.host_items: list[int | float] = [0] * columns
        self.on_device = [False] * columns
        self.rounding = [0.0] * columns
        self.notes: dict[str, Tensor] = {} if notes is None else notes
        self.proportions = Proportions(columns)
        self._host_losses = [0.0] * columns
        self._weighs = weighs
        self.is_static = static is not None
        self._sums = static
        self._pending: list[tuple[int, Tensor | None, Tensor]] = []  # column, loss, items

    def add(self, micro: Micro, device: torch.device) -> None:
        """Add a micro-batch."""
        for column, (loss, items) in enumerate(zip(micro.losses, micro.items, strict=True)):
            if type(items) is not int:
                self.rounding[column] = max(self.rounding[column], rounding_of(items))
            if isinstance(items, Tensor):
                self.on_device[column] = True
                # Copies: the caller may reuse the same buffers for the next micro-batch.
                own = None if loss is None else scalar_on(device, loss).clone()
                self._pending.append((column, own, scalar_on(device, items).clone()))
            else:
                self.host_items[column] += items
                if loss is None or (self._weighs and not items):  # a mean over no items is NaN, and adds nothing
                    continue
                weight = items if self._weighs else 1
                if self.is_static or (number := number_on_host(loss)) is None:
                    self._on(device).losses[column].add_(scalar_on(device, loss), alpha=weight)
                else:
                    self._host_losses[column] += number * weight
        for name, note in micro.notes.items():
            self.note(name, note)
        for pair in micro.pairs:
            self.proportions.add(pair, device)
        if self.is_static or len(self._pending) >= MAX_PENDING:
            self._fold(device)

    def add_usual(self, loss: float, items: int) -> None:
        """Add a micro-batch that is like the first one, in a window of one column."""
        self.host_items[0] += items
        self._host_losses[0] += loss * items

    def note(self, name: str, number: Tensor) -> None:
        """Add to a number for checks."""
        if name in self.notes:
            self.notes[name].add_(number)
        else:
            self.notes[name] = number.to(wide(number.device), copy=True)

    def add_sums(self, sums: Sums, notes: Mapping[str, Tensor]) -> None:
        """Add what recordings have summed. Those of a loss of the whole batch have no columns."""
        for total, more in zip(self._on(sums.items.device), sums, strict=True) if len(sums.items) else ():
            total.add_(more)
        for name, number in notes.items():
            self.note(name, number)

    def count_replay(self, recorded: Totals) -> None:
        """Count the replay of a micro-batch that was recorded with these totals: what the host knows of its items."""
        if not recorded.host_items:
            return
        self.host_items = [a + b for a, b in zip(self.host_items, recorded.host_items, strict=True)]
        self.on_device = [a or b for a, b in zip(self.on_device, recorded.on_device, strict=True)]
        self.rounding = list(map(max, self.rounding, recorded.rounding))
        self.proportions.merge(recorded.proportions)

    def _on(self, device: torch.device) -> Sums:
        if self._sums is None:
            self._sums = Sums.zeros(len(self.host_items), device)
        return self._sums

    def _fold(self, device: torch.device) -> None:
        """Add pending micro-batches to the sums. Adding each at once would take three times as many kernels."""
        if (of_pairs := self.proportions.fold()) is not None:
            self.note(PROPORTIONS, of_pairs)
        pending, self._pending = self._pending, []
        if not pending:
            return
        sums, dtype = self._on(device), wide(device)
        for column in {column for column, _, _ in pending}:
            items = torch.stack([n for other, _, n in pending if other == column]).to(dtype)
            losses = [loss for other, loss, _ in pending if other == column and loss is not None]
            if losses:
                weighted = torch.stack(losses).to(dtype)
                if self._weighs:  # a mean over no items is NaN, and adds nothing
                    weighted = weighted.masked_fill(items == 0, 0) * items
                sums.losses[column].add_(weighted.sum())
            sums.items[column].add_(items.sum())
            sums.bad[column].add_((~(items.isfinite() & (items >= 0))).sum())

    def sums_of_pairs(self, device: torch.device) -> Tensor:
        """The sums of all pairs of this rank, on the device."""
        self._fold(device)
        of_host = self.proportions.of_host(device)
        return of_host + self.notes[PROPORTIONS] if PROPORTIONS in self.notes else of_host

    def sums(self, device: torch.device) -> Sums:
        """All sums of this rank, as tensors on the device."""
        self._fold(device)
        numbers = (self._host_losses, self.host_items)
        losses, items = (vector_of(column, device) for column in numbers)
        if self._sums is None:
            return Sums(losses, items, torch.zeros_like(items))
        return Sums(self._sums.losses + losses, self._sums.items + items, self._sums.bad)

    @property
    def host_losses(self) -> list[float] | None:
        """The sums of losses, if the host knows all of them."""
        return self._host_losses if self._sums is None and not self._pending else None
