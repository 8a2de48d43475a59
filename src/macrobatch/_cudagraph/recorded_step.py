"""One recorded micro-step, and the totals to which all recordings add."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Graph
from macrobatch._cudagraph.eligibility import tensors_of
from macrobatch._step.denominators import Denominators
from macrobatch._step.terms import TermBuffers, TermWindow
from macrobatch._step.totals import HostItems, Totals, Window, wide
from macrobatch._torch.tensors import copy_all


class StaticTotals:
    """The totals of loss and items, at fixed addresses: all recordings add to them."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device, dtype=wide(device))
        self.multiplier = torch.ones((), device=device, dtype=torch.float32)  # of the losses, from the window's scaler
        kinds = (torch.int64, wide(device))
        self._counts = {
            dtype: torch.zeros(2, device=device, dtype=dtype) for dtype in kinds
        }  # sum and lowest of the items
        self._used: set[torch.dtype] = set()
        self.used_recordings: set[Recording] = set()

    def begin(self, window: Window) -> None:
        """Copy the settings of a window that recordings read, before its first replay."""
        if isinstance(multiplier := window.multiplier, Tensor):
            self.multiplier.copy_(multiplier)

    def add(self, window: Window) -> None:
        """Add the totals of one micro-batch. Recordings contain this call."""
        totals = window.totals()
        self.loss += totals.loss
        if totals.items is not None and totals.lowest is not None:
            self._used.add(totals.items.dtype)
            items, lowest = self._counts[totals.items.dtype]
            items += totals.items
            torch.minimum(lowest, totals.lowest, out=lowest)

    def clear(self) -> None:
        """Set all totals to 0 at the beginning of a window."""
        self.used_recordings.clear()
        for total in (self.loss, *self._counts.values()):
            total.zero_()

    def add_to(self, window: Window) -> None:
        """Add the totals to a window."""
        window.absorb(Totals(self.loss, None, None))
        for dtype in self._used:
            items, lowest = self._counts[dtype]
            window.absorb(Totals(torch.zeros_like(self.loss), items, lowest))


class StaticTermTotals(StaticTotals):
    """The buffers of terms, at fixed addresses: recorded windows add to them.

    Args:
        denominators: the denominators of one window. `begin` replaces their values by those of later windows.
    """

    def __init__(self, denominators: Denominators) -> None:
        super().__init__(denominators.own.device)
        self.denominators = denominators
        self.buffers = TermBuffers.of(denominators)

    def begin(self, window: Window) -> None:
        super().begin(window)
        assert isinstance(window, TermWindow)
        self.buffers.divisors.copy_(window.buffers.divisors)

    def add(self, window: Window) -> None:
        """Do nothing: the recorded window has added to the buffers itself."""

    def clear(self) -> None:
        super().clear()
        for buffer in self.buffers[1:]:
            buffer.zero_()

    def add_to(self, window: Window) -> None:
        assert isinstance(window, TermWindow)
        window.absorb_buffers(self.buffers)


class Recording:
    """The recorded micro-step of one shape.

    Args:
        graph: the captured graph.
        inputs: the tensors from which it reads a micro-batch.
        totals: the totals to which it adds.
        reached: the parameters to which it adds gradients.
        host_items: the items of a micro-batch of this shape, if the host knows them.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: list[Tensor],
        totals: StaticTotals,
        reached: set[nn.Parameter],
        host_items: HostItems,
    ) -> None:
        self.reached = reached
        self._graph = graph
        self._inputs = inputs
        self._totals = totals
        self._host_items = host_items

    def replay(self, micro_batch: object, window: Window) -> None:
        """Replay a micro-batch, and add it to the window."""
        window.add_recorded(self._host_items, self._totals.loss)
        if not self._totals.used_recordings:
            self._totals.begin(window)
        self._totals.used_recordings.add(self)
        self.run(micro_batch)

    def run(self, micro_batch: object) -> None:
        """Replay a micro-batch without a window."""
        copy_all(self._inputs, [leaf for _, leaf in tensors_of(micro_batch)])
        self._graph.replay()
