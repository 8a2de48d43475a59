"""The engine of whole batches: windows that are replayed, retried, empty, or have a loss of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._border import order
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import Micro, Source, Totals
from macrobatch._engine.window import UNSCALED, Window
from macrobatch._torch.snapshot import Snapshot
from macrobatch.types import StepResult


class Mark(NamedTuple):
    """The state that `Engine.roll_back` restores."""

    num_windows: int
    mean_items: float | Tensor | None


class Replayable(Protocol):
    """A recorded micro-batch: its forward and backward as one call."""

    reached: set[nn.Parameter]
    totals: Totals
    source: Source | None

    def replay(self, micro_batch: object, window: Window) -> None:
        """Compute a micro-batch of this window."""


class BatchEngine(Engine):
    """An engine whose windows are whole batches."""

    def replay(self, recording: Replayable, micro_batch: object) -> None:
        """Replay the recorded forward and backward of a micro-batch, in place of `backward`."""
        window = order.require_backward(self.window)
        window.begin_replay(recording.totals, recording.source)
        if self.may_repeat:
            self._backward.note_use(recording.reached)
        try:
            with self.spans.of("replay"):
                recording.replay(micro_batch, window)
        finally:
            self._end()
        window.end_backward()

    def mark(self) -> Mark:
        """Remember the state before a window, for `roll_back`. Call it between windows."""
        return Mark(self.num_windows, self.objective.mean_items)

    def roll_back(self, mark: Mark) -> None:
        """Drop the open window, and go back to the state at `mark`."""
        self.discard()
        self.num_windows = mark.num_windows
        self.objective.restore(mark.mean_items)

    def join_empty(self) -> None:
        """Take part in a window without samples: this rank adds nothing, but joins the collectives when it closes."""
        self.catch_up()
        self.is_last = self.is_repeat = False
        self.open_window().join_empty()
        self.open_store()

    def catch_up(self) -> None:
        """Join the collectives that this rank has missed because it failed in the window."""
        self.objective.catch_up(self.open_window(), self.device)

    def close_empty(self) -> StepResult:
        """Close a window in which no rank has samples. No step is taken."""
        window = self.open_window()
        window.join_empty()
        try:
            return self.closing.close(window, self.open_store(), {}, average=1, shared=False)
        finally:
            self._drop_window()

    @contextlib.contextmanager
    def forward_only(self, *, restores: bool = False) -> Iterator[None]:
        """A context for forwards that have no backward of a micro-batch. `restores`: undo what they change."""
        before = Snapshot(self.models) if restores else None
        self.open_store()
        self.backend.begin(last=False)
        try:
            yield
        finally:
            self.backend.end()
            if before is not None:
                before.restore()

    def add_joint(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """Run the backward of a loss that is the same on every rank, inside `forward_only`. It counts no micro-batch.

        It adds the gradients of the parameters that this loss uses directly, once for all ranks together. It also sets
        ``.grad`` of `leaves`. Both are multiplied by the scale of the scaler.
        """
        group, window = self.backend.group, self.open_window()
        ranks = 1 if group is None else dist.get_world_size(group)
        seed = (torch.ones_like(loss) * (window.multiplier or UNSCALED) / ranks).to(loss.dtype)
        micro = Micro(loss, seed, given=(loss,))
        for observe in self.on.before_backward:
            observe(self, micro)
        with self.spans.of("backward", loss), self._backward.noting_use(self._notes_use):
            self._backward.run_joint(loss, seed, leaves)
        for observe in self.on.after_backward:
            observe(self, micro)
        for leaf in leaves if ranks > 1 else ():
            if leaf.grad is not None:
                leaf.grad *= ranks
