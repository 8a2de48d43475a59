"""One recorded micro-step, and the window at fixed addresses to which all recordings add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Graph
from macrobatch._cudagraph.eligibility import tensors_of
from macrobatch._engine.totals import Denominators, Source, Sums, Totals
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._torch.tensors import copy_all, wide, zero_all


class StaticWindow:
    """The sums of a window, its multiplier and its early denominators, at fixed addresses."""

    def __init__(
        self,
        device: torch.device,
        denominators: Denominators | None,  # of any window; None if they are late. `begin` copies those of later ones
        *,
        weighs: bool,  # whether losses are means over their items, with late denominators
        has_scaler: bool,
        notes: Mapping[str, Tensor],  # zeros for the numbers that micro-batches note
    ) -> None:
        columns = 1 if denominators is None else len(denominators.names) * denominators.are_terms
        self.used: set[Recording] = set()  # those that the current window has replayed
        self._device = device
        self._weighs = weighs and denominators is None
        self._sums = Sums.zeros(columns, device)
        self._notes = dict(notes)
        self._multiplier = torch.ones((), device=device, dtype=torch.float32) if has_scaler else UNSCALED
        num_divisors = 1 if denominators is None else len(denominators.names)
        self._divisors = torch.ones(num_divisors, device=device, dtype=wide(device))
        self._denominators = denominators and denominators._replace(divisors=self._divisors.unbind())

    def window(self) -> Window:
        """A window for one recorded micro-batch, which adds to the sums."""
        totals = Totals(len(self._sums.items), weighs=self._weighs, static=self._sums, notes=self._notes)
        return Window(0, 1, self._device, totals, self._multiplier, self._denominators)

    def clear(self) -> None:
        """Set all sums to 0 at the beginning of a window."""
        self.used.clear()
        zero_all([*self._sums, *self._notes.values()])

    def begin(self, window: Window) -> None:
        """Copy what recordings read of a window, before its first replay."""
        if isinstance(window.multiplier, Tensor) and isinstance(self._multiplier, Tensor):
            self._multiplier.copy_(window.multiplier)
        total = self._divisors if window.denominators is None else window.denominators.total
        if total.shape == self._divisors.shape:  # without an ordinary loss, that of a whole batch has no divisor
            self._divisors.copy_(torch.where(total == 0, 1, total))

    def add_to(self, window: Window) -> None:
        """Add the sums to a window."""
        window.totals.add_sums(self._sums, self._notes)


class Recorded(NamedTuple):
    """What the host knows of a recorded micro-batch."""

    totals: Totals = Totals(0, weighs=False)  # of its items
    source: Source | None = None  # where its items come from
    output: Callable[[], Any] | None = None  # returns what a replay has left at fixed addresses, until the next one


class Recording:
    """The recorded micro-step of one shape."""

    def __init__(
        self,
        graph: Graph,
        inputs: list[Tensor],  # from which it reads a micro-batch
        static: StaticWindow | None,  # to which it adds
        reached: set[nn.Parameter],  # to which it adds gradients
        recorded: Recorded,
    ) -> None:
        self.reached = reached
        self.totals, self.source, self.output = recorded
        self._graph = graph
        self._inputs = inputs
        self._static = static

    def replay(self, micro_batch: object, window: Window) -> None:
        """Replay a micro-batch of this window."""
        assert self._static is not None
        if not self._static.used:
            self._static.begin(window)
        self._static.used.add(self)
        self.run(micro_batch)

    def run(self, micro_batch: object) -> None:
        """Replay a micro-batch without a window."""
        copy_all(self._inputs, [leaf for _, leaf in tensors_of(micro_batch)])
        self._graph.replay()
