"""The order of calls, and the errors for calls at the wrong moment.

The order is ``batches`` or ``micro_batch``, then ``backward``, then ``step``. Any other order would give a wrong
gradient, so a call out of order raises an error before it changes anything. Only this class changes that state.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from macrobatch._step.totals import Window
from macrobatch.errors import UsageError


class Mark(NamedTuple):
    """The state that `Engine.roll_back` restores."""

    windows: int
    typical_items: float | Tensor | None


class Lifecycle:
    """The state of the calls on one engine: which call it expects next, and whether its window is complete so far.

    Attributes:
        is_broken: whether a backward failed half-way in the window.
    """

    def __init__(self) -> None:
        self._expects: Literal["batch", "backward", "step"] = "batch"  # "step" may be omitted if it has no effect
        self._carries = False  # whether the end of an epoch left the window open
        self.is_broken = False

    @property
    def awaits_backward(self) -> bool:
        """Whether the current micro-batch has had no backward yet."""
        return self._expects == "backward"

    # ------------------------------------------------------------------------------------------ what happens

    def begin_micro_batch(self) -> None:
        self._expects, self._carries = "backward", False

    def end_backward(self) -> None:
        self._expects = "step"

    def end_step(self) -> None:
        self._expects = "batch"

    def break_window(self) -> None:
        """Note that a backward failed half-way, so that the window holds a part of a micro-batch."""
        self.is_broken = True

    def drop_window(self) -> None:
        self._carries = self.is_broken = False

    def end_epoch(self, *, carries: bool) -> None:
        self._expects, self._carries = "batch", carries

    # ------------------------------------------------------------------------------------------ what may come

    def require_new_epoch(self, window: Window | None) -> None:
        """Raise an error if a new `batches` may not begin."""
        if window is not None and window.turns and not self._carries:
            raise UsageError(
                f"batches() over an open window: {window.micro_batches} micro-batches of window {window.number} have "
                "had no step. Close it with step(now=True), or drop it with discard()."
            )

    def require_finished(self, window: Window | None, is_last: bool) -> None:
        """Raise an error if neither a new micro-batch may begin nor the epoch end."""
        if self._expects == "backward":
            raise UsageError(
                "a batch was left without its backward(): every batch of the loader belongs to the window. Filter the "
                "loader instead of skipping batches, or weigh this one with nothing: backward(loss, items=0). "
                "(loss.backward() does not count: call acc.backward(loss, items).)"
            )
        if self._expects == "step" and is_last and window is not None:
            raise UsageError(
                f"window {window.number} is complete, but step() was not called after its last backward(). Call it "
                "after every backward: it returns None until there is something to do."
            )

    def require_backward(self, window: Window | None) -> None:
        """Raise an error unless a micro-batch has begun that has had no backward."""
        if self._expects == "step":
            raise UsageError(
                "a second backward() in one micro-batch. Add the losses up and call it once, or make each its own "
                "micro-batch."
            )
        if self._expects == "batch":
            raise UsageError(
                "backward() outside of a micro-batch. Iterate over acc.batches(loader), or do the forward and the "
                "backward inside `with acc.micro_batch():`."
            )
        self._require_whole(window)

    def require_step(self, window: Window | None, now: bool) -> None:
        """Raise an error if the current micro-batch has had no backward."""
        self._require_whole(window)
        if self._expects == "backward":
            raise UsageError(
                "step() before backward(): the micro-batch under way has not been accumulated yet. Call "
                "acc.backward(loss, items) for it; loss.backward() does not count it."
            )
        if not now and (window is None or not window.turns):
            raise UsageError("step() without a backward(): no window is open. Call it once after each backward().")

    def require_between_windows(self, window: Window | None, call: str) -> None:
        """Raise an error if gradients are accumulated."""
        if window is not None and window.turns:
            raise UsageError(
                f"{call} inside a window: {window.micro_batches} micro-batches of window {window.number} are "
                "accumulated, and gradients are not saved. Call it when step() has returned a result; step(now=True) "
                "closes the window as it stands, discard() drops it."
            )

    def _require_whole(self, window: Window | None) -> None:
        if self.is_broken and window is not None:
            then = "the next batch then begins a new window."
            if self.awaits_backward:
                then = (
                    "the batch under way then begins a new window: call backward() for it again, or, to leave it out, "
                    "backward(loss, items=0) with any loss of the model."
                )
            raise UsageError(
                f"a backward failed half-way in window {window.number}, so its gradients are incomplete. Drop them "
                f"with discard(); {then}"
            )
