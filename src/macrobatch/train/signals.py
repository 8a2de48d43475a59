"""Ctrl-C and SIGTERM: remembered until the window is finished."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

AGAIN = 3.0  # seconds after which a second Ctrl-C is meant: torchrun passes one on to ranks that have had it already


class Signals:
    """Inside, the first signal only sets `received`; one that comes later is as it was before.

    >>> with Signals() as signals:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     signals.received == signal.SIGTERM
    True
    """

    def __init__(self) -> None:
        self.received = 0
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self._when > AGAIN:
            self.__exit__()
            signal.raise_signal(number)
        elif not self.received:
            self.received, self._when = number, now
