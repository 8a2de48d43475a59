"""TensorBoard's events of a run. What cannot be written there is in the run's own lines too, and ends nothing."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("macrobatch")


class Events:
    """A folder of events.

    Args:
        folder: where they go.
        resume_step: events of later steps are purged; None: there are none.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        self._excepthook = threading.excepthook
        self._writer = _writer(folder, resume_step)
        if self._writer is not None:
            threading.excepthook = self._thread_failed

    def add(self, step: int, numbers: Iterable[tuple[str, float]]) -> None:
        """Write these numbers; where that fails, none any more."""
        if self._writer is None:
            return
        try:
            for name, value in numbers:
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            logger.warning("TensorBoard's events are no longer written: %s", error.strerror or error)
            self.close()

    def close(self) -> None:
        """Write what is waiting."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
            threading.excepthook = self._excepthook

    def _thread_failed(self, thread: threading.ExceptHookArgs) -> None:
        """Its thread stores what happened, for whoever writes next, and would print a traceback besides."""
        if not type(thread.thread).__module__.startswith("tensorboard."):
            self._excepthook(thread)


def numbers_in(row: Mapping[str, Any], prefix: str = "train/") -> list[tuple[str, float]]:
    """What TensorBoard can draw."""
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += numbers_in(value, f"{name}/")
        elif isinstance(value, int | float) and name != "step" and math.isfinite(value):
            found.append((prefix + name, value))
    return found


def _writer(folder: Path, resume_step: int | None) -> Any:
    """TensorBoard's writer; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed: no events are written. pip install 'macrobatch[train]'")
        return None
    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(folder), purge_step=purge, flush_secs=10)
