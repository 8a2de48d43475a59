"""One window: its micro-batches, the totals of their losses and items, and which call may come next.

A window has columns of (loss, items), one for each term of the loss; a plain loss is one column. It must agree with
`macrobatch.reference`: the gradient is the sum over the columns of ``sum of grad S / sum of n``, where S is the summed
loss of a micro-batch and n its number of items. The denominators, the sums of n, are *late* or *early*:

- late (one column): each backward is seeded with n, and the gradient is divided once, when the window closes;
- early (terms, a loss of the whole batch): they are known before the first backward, each micro-batch weighs n / N, and
  nothing is left to divide by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from macrobatch._border.arguments import FEWEST_ITEMS
from macrobatch._engine.reporting import auditors
from macrobatch._engine.totals import Denominators, Micro, MicroPlan, Source, Sums, Totals
from macrobatch._loss.sizes import FirstSizes
from macrobatch._loss.steady import Steady
from macrobatch._torch.tensors import wide

UNSCALED = 1.0


class Window:
    """One window, from its first micro-batch to its close."""

    plan: MicroPlan | None = None  # of the micro-batch that awaits its backward
    last_plan: MicroPlan | None = None  # of the last one that has had it
    is_broken = is_closing = is_carried = False
    num_backwards = num_skipped = micro_batches = num_taken = 0
    source: Source | None = None  # where its items come from
    batch: object = None  # of the micro-batch that awaits its backward, if somebody has told it
    _travelling: Callable[[], dict[str, Tensor]] | None = None
    steady: Steady | None = None  # how its first micro-batch was weighed, if others may be weighed alike

    def __init__(
        self,
        number: int,
        num_planned: int,
        device: torch.device,
        totals: Totals | None = None,
        multiplier: float | Tensor | None = None,
        denominators: Denominators | None = None,
        *,
        divides: bool = True,
    ) -> None:
        self.number = number
        self.num_planned = num_planned
        self.multiplier = multiplier
        self.denominators = denominators
        self.divides = divides  # whether its loss is a mean; else a total
        self.everyone: dict[str, Tensor] = {}
        self.device = device
        self.is_static = totals is not None and totals.is_static  # whether recordings add to it
        self._totals = totals
        self.sizes = FirstSizes()

    # ------------------------------------------------------------------------------------------ its micro-batches

    @property
    def num_begun(self) -> int:
        """How many of the planned micro-batches have begun. A rank may have fewer batches than that."""
        return self.num_taken + (0 if self.plan is None else self.plan.num_planned)

    def is_full_with(self, plan: MicroPlan) -> bool:
        """Whether a micro-batch would be the last one that is planned."""
        return self.num_taken + plan.num_planned >= self.num_planned

    def begin(self, plan: MicroPlan, batch: object = None) -> None:
        """Begin a micro-batch, whose backward comes next. These are plain assignments: no exception can split them."""
        self.batch, self.plan, self.is_carried = batch, plan, False

    def give_up(self) -> None:
        """Drop the micro-batch that awaits its backward."""
        self.plan = self.batch = None

    def begin_backward(self, micro: Micro) -> None:
        """Count a micro-batch. Until `end_backward`, the window is broken: an exception leaves it so."""
        self.is_broken = True
        if micro.root is not None and not self.num_backwards:
            self.device = micro.root.device
        if micro.losses or micro.counts:
            self.source = micro.source
            self.micro_batches += 1
            (self._totals or self.totals).add(micro, self.device)
            for auditor in auditors:
                auditor.micro_batch(self, micro.losses, micro.items)
            if self.steady is None:
                self.steady = micro.steady
        self.num_backwards += 1

    def begin_usual(self, loss: float, items: int, steady: Steady) -> None:
        """Count a micro-batch that is weighed like an earlier one, with a loss that the host knows."""
        self.is_broken = True
        if self.steady is None:
            self.steady, self.multiplier = steady, UNSCALED
            self.source = "given" if steady.is_given else "read"
            self.totals.proportions.add(steady.pair)
        self.num_backwards += 1
        self.micro_batches += 1
        self.totals.add_usual(loss, items)
        for auditor in auditors:
            auditor.micro_batch(self, (), (items,))

    def begin_replay(self, recorded: Totals, source: Source | None) -> None:
        """Count a recorded micro-batch. The recordings keep its loss, and items that only the device knows."""
        self.is_broken = True
        self.source = source
        self.num_backwards += 1
        self.micro_batches += 1
        self.totals.count_replay(recorded)

    def end_backward(self) -> None:
        """End a micro-batch: the window is whole again, and a step may follow."""
        plan = self.plan
        taken = self.num_taken + (0 if plan is None else plan.num_planned)
        self.batch, self.plan, self.last_plan, self.num_taken, self.is_broken = None, None, plan, taken, False

    def begin_skip(self) -> None:
        """Count a micro-batch that adds nothing. Until `end_backward`, the window is broken."""
        self.is_broken = True
        self.num_skipped += 1

    @property
    def is_under_way(self) -> bool:
        """Whether a micro-batch of it has ended."""
        return self.num_backwards > 0 or self.num_skipped > 0

    def join_empty(self) -> None:
        """Take part without samples."""
        self.num_backwards += 1

    def carry(self) -> None:
        """Stay open at the end of an epoch."""
        self.is_carried = True

    def begin_close(self) -> None:
        """Begin to close the window. From here on it is broken: an exception leaves it so."""
        self.is_broken = self.is_closing = True

    # ------------------------------------------------------------------------------------------ what is known before

    def expect(self, denominators: Denominators, multiplier: float | Tensor) -> None:
        """Set early denominators, before the first micro-batch."""
        self.denominators, self.multiplier = denominators, multiplier
        self._totals = Totals(len(denominators.names), weighs=False)
        self.device = denominators.own.device

    def know(self, sums: Mapping[str, Tensor]) -> None:
        """Set sums over all ranks that are known already."""
        self.everyone |= sums

    def set_multiplier(self, multiplier: float | Tensor) -> None:
        """Set the factor of all losses besides their weight. All ranks must use the same."""
        self.multiplier = multiplier

    @property
    def totals(self) -> Totals:
        assert self._totals is not None, "denominators come before the first micro-batch"
        return self._totals

    @property
    def awaits_denominators(self) -> bool:
        """Whether early denominators must be set before the next micro-batch."""
        return self._totals is None

    @property
    def early(self) -> Denominators:
        """The early denominators."""
        assert self.denominators is not None, "denominators come before the first micro-batch"
        return self.denominators

    # ------------------------------------------------------------------------------------------ between ranks

    def send(
        self, start_sum: Callable[[dict[str, Tensor]], Callable[[], dict[str, Tensor]]], more: Mapping[str, Tensor]
    ) -> None:
        """Start to sum the numbers of this window, and more, over all ranks. Only the last backward may be missing."""
        numbers = {**({} if self._totals is None else self._totals.notes), **more}
        if "items" not in self.everyone and self._totals is not None:
            numbers |= self._totals.sums(self.device)._asdict()
            numbers |= self._numbers(micro_batches=self.micro_batches)
        plan = self.plan or self.last_plan
        if plan is not None and plan.more is not None:
            numbers |= self._numbers(more=plan.more, complete=bool(plan.complete))
        if numbers:
            self._travelling = start_sum(numbers)

    def _numbers(self, **numbers: float) -> dict[str, Tensor]:
        return {
            name: torch.full((), number, device=self.device, dtype=wide(self.device))
            for name, number in numbers.items()
        }

    def receive(self) -> None:
        """Wait for the exchange."""
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            self.everyone |= travelling()

    # ------------------------------------------------------------------------------------------ the results

    def _sums(self) -> Sums:
        """The sums of all ranks, if they were exchanged; else those of this rank."""
        if "items" in self.everyone:
            return Sums(self.everyone["losses"], self.everyone["items"], self.everyone["bad"])
        return self.totals.sums(self.device)

    @property
    def is_empty(self) -> bool:
        """Whether the host knows that there are no items."""
        if self.has_items:
            return False
        if self._totals is None:
            return True
        counts = self._totals.host_items if self.denominators is None else (*self.denominators.host, *self.host_items)
        return "items" not in self.everyone and not any(self._totals.on_device) and not any(counts)

    @property
    def has_items(self) -> bool:
        """Whether the host knows that there are items, and that all counts are valid."""
        if self.denominators is not None:
            return any(self.denominators.host)
        return self._totals is not None and self._totals.host_items[0] > 0 and not self._totals.on_device[0]

    @property
    def host_items(self) -> list[int | float | None]:
        """This rank's items of each column; None where only the device knows."""
        return [None if hides else n for n, hides in zip(self.totals.host_items, self.totals.on_device, strict=True)]

    def items(self) -> Tensor:
        """The items of the first column, on the device."""
        if self._totals is None or not self._totals.host_items:  # no rank ever had a sample, so no name is known
            return torch.zeros((), device=self.device, dtype=torch.int64)
        is_whole = not (self._totals.rounding[0] or (self.denominators is not None and self.denominators.rounding[0]))
        if "items" not in self.everyone and not self._totals.on_device[0]:
            dtype = torch.int64 if is_whole else wide(self.device)
            return torch.full((), self._totals.host_items[0], device=self.device, dtype=dtype)
        items = self._sums().items[0]
        return items.to(torch.int64) if is_whole and "micro_batches" not in self.everyone else items  # ranks may differ

    def losses(self) -> dict[str, Tensor] | None:
        """The mean loss of each column that the user has named."""
        if self.denominators is None or not self.denominators.are_terms:
            return None
        sums = self._sums()
        return dict(
            zip(self.denominators.names, sums.losses.masked_fill(sums.items == 0, torch.nan).unbind(), strict=True)
        )

    def loss(self) -> Tensor:
        """The loss of the window, on the device; NaN if there are no items."""
        if self._totals is None:
            return torch.full((), torch.nan, device=self.device, dtype=wide(self.device))
        if self.denominators is not None:
            sums = self._sums()
            return sums.losses.masked_fill(sums.items == 0, 0).sum().masked_fill((sums.items == 0).all(), torch.nan)
        if self.has_items and not self.everyone and (losses := self._totals.host_losses) is not None:
            mean = losses[0] / self._totals.host_items[0] if self.divides else losses[0]
            return torch.full((), mean, device=self.device, dtype=wide(self.device))
        sums = self._sums()
        return sums.losses[0] / sums.items[0] if self.divides else sums.losses[0]

    def divisor(self, average: float) -> float | Tensor:
        """The divisor that turns the accumulated gradient into the window's; a number if the host knows it.

        `average`: what the backend has divided the gradients by.
        """
        multiplier = UNSCALED if self.multiplier is None else self.multiplier
        if isinstance(multiplier, Tensor):
            multiplier = multiplier.to(wide(self.device))
        if self.denominators is not None or not self.divides:
            return multiplier / average
        is_known = self._totals is not None and self.has_items and not self.everyone
        items = self._totals.host_items[0] if is_known and self._totals is not None else self._sums().items[0]
        return items * multiplier / average if average != 1 else items * multiplier

    def mean_items(self) -> float | Tensor:
        """The mean number of items of a micro-batch, in a window with late denominators."""
        if self.everyone:
            return self.everyone["items"][0] / self.everyone["micro_batches"]
        if self.has_items:
            return self.totals.host_items[0] / max(self.micro_batches, 1)
        return self._sums().items[0] / max(self.micro_batches, 1)

    # ------------------------------------------------------------------------------------------ what must not be

    def noted(self, name: str) -> Tensor | None:
        """A number for checks, of all ranks if it was exchanged; None if nobody has noted it."""
        return self.everyone.get(name, None if self._totals is None else self._totals.notes.get(name))

    def lacks_items(self) -> Tensor:
        """Whether there are no items, as a tensor on the device."""
        return (self._sums().items == 0).all()

    def bad_items(self) -> Tensor | None:
        """Whether a count was negative or not finite, on any rank; None if the host knows that none was."""
        known = () if self.denominators is None else self.denominators.host
        on_device = () if self._totals is None else self._totals.on_device
        if not (self.everyone or True in on_device or None in known):
            return None
        _, items, bad = self._sums()
        is_count = (items == 0) | ((items >= FEWEST_ITEMS) & (items <= 1 / FEWEST_ITEMS))
        found = (bad != 0).any() | ~is_count.all()
        if self.denominators is not None:
            found = found | ~(self.denominators.own.isfinite() & (self.denominators.own >= 0)).all()
        return found
