"""Handle Ctrl-C, SIGTERM, SIGHUP, a closed output and a killed launcher, so that the current window can finish."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = 0.1  # seconds after which a second signal counts: `timeout` sends two at once
AGAIN_BY_TORCHRUN = 3.0  # seconds; torchrun also sends a Ctrl-C to ranks that already got it from the terminal


class Signals:
    """A context in which the first signal only sets `received`, and a second one ends the process at once.

    >>> with Signals() as signals:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     signals.received == signal.SIGTERM
    True
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._received = 0
        self._say = say
        self._when = 0.0
        self._handling = _handle_signals(self._handle)
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ
        self._again = AGAIN_BY_TORCHRUN if is_launched else AGAIN
        self._launcher = os.getppid() if is_launched else None

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)

    @property
    def received(self) -> int:
        """The number of the received signal; 0 if there was none. A torchrun that has ended counts as SIGTERM."""
        if not self._received and self._launcher is not None and os.getppid() != self._launcher:
            self.receive(signal.SIGTERM)
        return self._received

    def receive(self, number: int) -> None:
        """Behave as if this signal had been received."""
        if not self._received:
            self._received, self._when = number, time.monotonic()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._received and time.monotonic() - self._when > self._again:
            end_at_once(number)
        elif not self._received:
            self.receive(number)
            name = signal.Signals(number).name
            self._tell(f"{name}: stopping after this step, with a checkpoint. Send it again to stop at once.")

    def _tell(self, text: str) -> None:
        if self._say is None:
            return
        # A handler runs between any two lines of the program, so also while the program is printing.
        with contextlib.suppress(OSError, RuntimeError):
            self._say(text)


def end_at_once(number: int) -> None:
    """End the process as a kill would. All files on the disk are complete at any moment."""
    if os.isatty(1):
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?25h\n")  # show the cursor again, which a progress bar hides
    os._exit(128 + number)


@contextlib.contextmanager
def interruptible(*, is_first: bool = True) -> Iterator[None]:
    """A context outside of steps, in which a signal ends the process with one line, because nothing can be lost.

    A KeyboardInterrupt could be raised in the middle of an import, and would look like any error.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            if is_first:
                text = f"macrobatch: ended by {signal.Signals(number).name}: no step was under way, nothing is lost.\n"
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        end_at_once(number)

    with _handle_signals(end):
        yield


@contextlib.contextmanager
def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A context in which `handler` handles the signals, except for ignored ones: nohup ignores SIGHUP."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
