"""The order of calls: ``batches`` or ``micro_batch``, then ``backward``, then ``step``.

Any other order would give a wrong gradient, so a call out of order raises an error before it changes anything. The
state itself belongs to the window: whether a micro-batch awaits its backward (`Window.plan`), whether a step may
follow, whether a call failed half-way.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from macrobatch.errors import BackendError, UsageError


class Window(Protocol):
    """The state of a window that decides what may come next."""

    number: int
    micro_batches: int
    is_broken: bool
    is_closing: bool
    is_carried: bool
    denominators: Any  # those known before the first micro-batch, or None
    plan: Any  # of the micro-batch that awaits its backward, or None
    last_plan: Any  # of the last one that has had it

    @property
    def is_under_way(self) -> bool:
        """Whether a micro-batch has ended."""


W = TypeVar("W", bound=Window)


def require_new_epoch(window: Window | None) -> None:
    """Raise an error if a new `batches` may not begin."""
    if window is not None and window.is_under_way and not window.is_carried:
        raise UsageError(
            f"batches() over an open window: {window.micro_batches} micro-batches of window {window.number} have "
            "had no step. Close it with step(now=True), or drop it with discard()."
        )


def require_finished(window: Window | None, is_last: bool) -> None:
    """Raise an error if neither a new micro-batch may begin nor the epoch end."""
    if window is None:
        return
    if window.plan is not None:
        raise UsageError(
            "a batch was left without its backward(): every batch of the loader belongs to the window. To leave one "
            "out, call acc.skip() in place of backward(). (loss.backward() does not count: call acc.backward(loss).)"
        )
    if window.is_under_way and is_last:
        if window.is_closing:
            require_whole(window)
        raise UsageError(
            f"window {window.number} is complete, but step() was not called after its last backward(). Call it "
            "after every backward: it returns None until there is something to do."
        )


def require_backward(window: W | None) -> W:
    """The open window, or an error unless a micro-batch has begun that has had no backward."""
    if window is not None and window.plan is not None:
        require_whole(window)
        return window
    if window is not None and window.last_plan is not None and not window.is_carried:
        raise UsageError(
            "a second backward() in one micro-batch. Add the losses up and call it once, or make each its own "
            "micro-batch."
        )
    raise UsageError(
        "backward() outside of a micro-batch. Iterate over acc.batches(loader), or do the forward and the "
        "backward inside `with acc.micro_batch():`."
    )


def require_skip(window: W | None, *, can_skip: bool) -> W:
    """The open window, or an error unless a micro-batch has begun that has added nothing, and may be left out."""
    if window is not None and window.plan is not None:
        require_whole(window)
        if window.denominators is not None:
            raise UsageError(
                "skip() cannot go with counts=: the gradients of this window are divided by numbers of items that "
                "include those of this batch. Drop the window with discard(), or leave the batch out of the loader."
            )
        if not can_skip:
            raise BackendError(
                "skip() is not possible under FSDP: forwards are collective, so the other ranks wait for this one. "
                "Call discard() on all ranks, which drops the window."
            )
        return window
    if window is not None and window.last_plan is not None and not window.is_carried:
        raise UsageError(
            "skip() of a micro-batch that has had its backward() or skip() already. Call it once, in place of "
            "backward(); discard() drops the whole window."
        )
    raise UsageError("skip() outside of a micro-batch: call it in place of a backward().")


def require_step(window: Window | None, now: bool) -> None:
    """Raise an error if the current micro-batch has had no backward."""
    if window is not None:
        require_whole(window)
        if window.plan is not None:
            raise UsageError(
                cure="step() before backward(): the micro-batch under way has not been accumulated yet. Call "
                "acc.backward(loss, items) for it; loss.backward() does not count it.",
                code="step before backward",
            )
    if not now and (window is None or not window.is_under_way):
        raise UsageError("step() without a backward(): no window is open. Call it once after each backward().")


def require_between_windows(window: Window | None, call: str) -> None:
    """Raise an error if gradients are accumulated."""
    if window is not None and window.is_under_way:
        require_whole(window)
        raise UsageError(
            f"{call} inside a window: {window.micro_batches} micro-batches of window {window.number} are "
            "accumulated, and gradients are not saved. Call it when step() has returned a result; step(now=True) "
            "closes the window as it stands, discard() drops it."
        )


def require_whole(window: Window) -> None:
    """Raise an error if a call has failed half-way in this window."""
    if not window.is_broken:
        return
    then = "the next batch then begins a new window."
    if window.plan is not None:
        then = "the batch under way then begins a new window: call backward() for it again, or skip() to leave it out."
    if window.is_closing:
        raise UsageError(
            f"step() failed half-way in window {window.number}, so the window can be neither closed nor continued. "
            "Drop it with discard(); the next batch then begins a new window."
        )
    raise UsageError(
        f"a backward failed half-way in window {window.number}, so its gradients are incomplete. Drop them "
        f"with discard(); {then}"
    )
