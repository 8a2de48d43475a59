"""One recorded micro-step, and the totals that all of them add to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Graph
from macrobatch._cudagraph.eligibility import tensors_of
from macrobatch._step.totals import Totals, Window, wide
from macrobatch._torch.tensors import copy_all


class Ledger:
    """The totals that recordings add to, in one place for all of them, and what they read from the window."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device, dtype=wide(device))
        self.multiplier = torch.ones((), device=device, dtype=torch.float32)  # of losses, by the window's scaler
        kinds = (torch.int64, wide(device))
        self._counts = {dtype: torch.zeros(2, device=device, dtype=dtype) for dtype in kinds}  # of items: sum, lowest
        self._used: set[torch.dtype] = set()
        self.replayed: set[Recording] = set()

    def add(self, totals: Totals) -> None:
        """Those of one micro-batch; this is recorded."""
        self.loss += totals.loss
        if totals.items is not None and totals.lowest is not None:
            self._used.add(totals.items.dtype)
            items, lowest = self._counts[totals.items.dtype]
            items += totals.items
            torch.minimum(lowest, totals.lowest, out=lowest)

    def clear(self) -> None:
        """A window begins."""
        self.replayed.clear()
        for total in (self.loss, *self._counts.values()):
            total.zero_()

    def settle(self, window: Window) -> None:
        """Hand the totals over to the window."""
        window.absorb(Totals(self.loss, None, None))
        for dtype in self._used:
            items, lowest = self._counts[dtype]
            window.absorb(Totals(torch.zeros_like(self.loss), items, lowest))


class Recording:
    """The micro-step of one shape.

    Args:
        inputs: where it reads the tensors of a micro-batch.
        reached: the parameters to whose gradients it adds.
        host_items: of a micro-batch of this shape, where the host knows them.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: list[Tensor],
        ledger: Ledger,
        reached: set[nn.Parameter],
        host_items: int | float,
    ) -> None:
        self.reached = reached
        self._graph = graph
        self._inputs = inputs
        self._ledger = ledger
        self._host_items = host_items

    def replay(self, micro_batch: object, window: Window) -> None:
        """Compute a micro-batch, and add it to the window."""
        window.add_recorded(self._host_items, self._ledger.loss)
        if not self._ledger.replayed and isinstance(multiplier := window.multiplier, Tensor):
            self._ledger.multiplier.copy_(multiplier)
        self._ledger.replayed.add(self)
        self.run(micro_batch)

    def run(self, micro_batch: object) -> None:
        """Compute it alone."""
        copy_all(self._inputs, [leaf for _, leaf in tensors_of(micro_batch)])
        self._graph.replay()
