"""Event files of TensorBoard, the default tracker of a run."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from macrobatch.train.trackers import Numbers, State, TrackedRun

EVENTS = "tensorboard"  # a folder inside the run folder


class Events:
    """A folder of events, as a `Tracker`. A resumed run purges the events of the steps that it takes again."""

    id = None

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer: Any = SummaryWriter(str(run.folder / EVENTS), purge_step=purge, flush_secs=10)
        self._step = run.resume_step or 0
        self._excepthook = threading.excepthook
        threading.excepthook = self._thread_failed
        if run.config:
            lines = [f"    {name} = {json.dumps(value)}" for name, value in run.config.items()]  # a block of Markdown
            self._writer.add_text("settings", "\n".join(lines), self._step)

    def add(self, step: int, numbers: Numbers) -> None:
        """Write the numbers of a step."""
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, state: State) -> None:
        """Write pending events, and the final state of the run."""
        with contextlib.ExitStack() as last:
            last.callback(setattr, threading, "excepthook", self._excepthook)
            last.callback(self._writer.close)
            self._writer.add_text("state", state, self._step)

    def _thread_failed(self, thread: threading.ExceptHookArgs) -> None:
        """Print no traceback for the writer's thread: it stores an error, and the next write raises it."""
        if not type(thread.thread).__module__.startswith("tensorboard."):
            self._excepthook(thread)


def numbers_in(row: Mapping[str, Any], prefix: str = "train/") -> list[tuple[str, float]]:
    """The finite numbers of a row, with their names for trackers.

    >>> numbers_in({"step": 3, "loss": 2.5, "grad_norm": math.nan, "time": {"data": 0.5}})
    [('train/loss', 2.5), ('time/data', 0.5)]
    """
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += numbers_in(value, f"{name}/")
        elif isinstance(value, int | float) and name != "step" and math.isfinite(value):
            found.append((prefix + name, value))
    return found
