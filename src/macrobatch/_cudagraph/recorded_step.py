"""One recorded micro-step, and the window at fixed addresses to which all recordings add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Graph
from macrobatch._cudagraph.eligibility import tensors_of
from macrobatch._engine.totals import Denominators, Sums, Totals
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._torch.tensors import copy_all, wide, zero_all


class StaticWindow:
    """The sums of a window, its multiplier and its early denominators, at fixed addresses.

    Args:
        device: the device of the models.
        denominators: the early denominators of one window; None if they are late. `begin` copies those of later ones.
        weighs: whether losses are means over their items, with late denominators.
        has_scaler: whether a scaler multiplies the losses.
        notes: the names of the numbers for checks that micro-batches note.

    Attributes:
        used: the recordings that the current window has replayed.
    """

    def __init__(
        self,
        device: torch.device,
        denominators: Denominators | None,
        *,
        weighs: bool,
        has_scaler: bool,
        notes: Sequence[str] = (),
    ) -> None:
        columns = 1 if denominators is None else len(denominators.names) * denominators.are_terms
        self.used: set[Recording] = set()
        self._device = device
        self._weighs = weighs and denominators is None
        self._sums = Sums.zeros(columns, device)
        self._notes = {name: torch.zeros((), device=device, dtype=wide(device)) for name in notes}
        self._multiplier = torch.ones((), device=device, dtype=torch.float32) if has_scaler else UNSCALED
        self._divisors = torch.ones(
            1 if denominators is None else len(denominators.names), device=device, dtype=wide(device)
        )
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


class Recording:
    """The recorded micro-step of one shape.

    Args:
        graph: the captured graph.
        inputs: the tensors from which it reads a micro-batch.
        static: the window to which it adds.
        reached: the parameters to which it adds gradients.
        totals: what the host knows of the items of such a micro-batch.
        is_counted: whether the program gives items.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: list[Tensor],
        static: StaticWindow,
        reached: set[nn.Parameter],
        totals: Totals,
        is_counted: bool | None = None,
    ) -> None:
        self.reached = reached
        self.totals = totals
        self.is_counted = is_counted
        self._graph = graph
        self._inputs = inputs
        self._static = static

    def replay(self, micro_batch: object, window: Window) -> None:
        """Replay a micro-batch of this window."""
        if not self._static.used:
            self._static.begin(window)
        self._static.used.add(self)
        self.run(micro_batch)

    def run(self, micro_batch: object) -> None:
        """Replay a micro-batch without a window."""
        copy_all(self._inputs, [leaf for _, leaf in tensors_of(micro_batch)])
        self._graph.replay()
