"""`Clock` measures how much time each part of a training step takes.

At every moment, time counts for one part: the one that began last and has not ended. A part inside another one takes
the time from it, so the parts of a lap add up to the lap. The rest is "other". On a CUDA device the moments are events
in its stream, and nobody waits for them: they are read together with the numbers of the step. There, a part is the time
that the device computed or waited between its events.

"communication" is the time in which this rank waited and did nothing else: for the agreement of the ranks before a
window, for the slowest rank after its own last backward, and for reductions when the window closes. Reductions that
overlap with the backward cost a step nothing, and are not included. The gathers and scatters of FSDP are included as
far as a rank waits for them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from macrobatch._torch.autograd import queue_callback
from macrobatch.macrostep import MacroStep

DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, OTHER = PARTS = (
    "data",
    "forward",
    "backward",
    "communication",
    "update",
    "other",
)

Moment = float | torch.cuda.Event


class Lap:
    """The time between two calls of `Clock.lap`."""

    def __init__(self, seconds: float, marks: list[tuple[str, Moment]], end: Moment) -> None:
        self.seconds = seconds
        self._marks = marks
        self._end = end

    def parts(self) -> dict[str, float]:
        """The seconds of each part. It waits for the device, unless a number of that step has been read already."""
        parts = dict.fromkeys(PARTS, 0.0)
        if isinstance(self._end, torch.cuda.Event):
            self._end.synchronize()
        ends = [moment for _, moment in self._marks[1:]] + [self._end]
        for (part, begin), end in zip(self._marks, ends, strict=True):
            parts[part] = parts.get(part, 0.0) + _seconds(begin, end)
        return parts


class Clock:
    """Measures laps, and the parts of each.

    >>> clock = Clock(torch.device("cpu"))
    >>> with clock.part("data"):
    ...     batch = list(range(10_000))
    >>> lap = clock.lap()                      # everything since the last lap, or since the clock was made
    >>> parts = lap.parts()
    >>> parts["data"] > 0, parts["forward"], abs(sum(parts.values()) - lap.seconds) < 1e-9
    (True, 0.0, True)

    A training loop has a lap for each step::

        clock.watch(train)                     # a MacroStep: its data, forward, backward, communication, update
        while ...:
            with clock.part("data"):
                batch = ...
            result = train(batch)
            row = {..., "loss": result.loss.item(), "seconds": (lap := clock.lap()).seconds, "time": lap.parts()}
            with clock.aside("validation"):    # in the parts of the next lap, but not in its seconds
                ...
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = 0.0  # seconds of this lap that belong to no step
        self._begun = [OTHER]  # the current parts, the innermost last
        now = self._moment()
        self._start = now if isinstance(now, float) else time.perf_counter()
        self._marks: list[tuple[str, Moment]] = [(OTHER, now)]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as this part, except for parts inside of it. Any name is allowed."""
        depth = len(self._begun)
        self._begin(name)
        try:
            yield
        finally:
            del self._begun[depth:]  # also those that an error left behind
            self._mark()

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Count the time inside as a part that belongs to no step. It is not in the seconds of the lap."""
        begin = time.perf_counter()
        with self.part(name):
            yield
        self._aside += time.perf_counter() - begin

    def lap(self) -> Lap:
        """End a lap, and begin the next."""
        end = self._moment()
        now = end if isinstance(end, float) else time.perf_counter()
        lap = Lap(now - self._start - self._aside, self._marks, end)
        self._start, self._aside, self._marks = now, 0.0, [(self._begun[-1], end)]
        return lap

    def watch(self, train: MacroStep) -> None:
        """Measure the phases of this `MacroStep` as parts, from now on."""
        train.observe(self._span)

    @contextlib.contextmanager
    def _span(self, name: str, loss: Tensor | None) -> Iterator[None]:
        with self.part(name):
            if loss is not None and dist.is_available() and dist.is_initialized():
                self._watch_waiting(loss)
            yield

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _moment(self) -> Moment:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _begin(self, part: str) -> None:
        self._begun.append(part)
        self._mark()

    def _mark(self) -> None:
        """Begin to count time for the innermost part."""
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return  # such an event would belong to the graph
        self._marks.append((self._begun[-1], self._moment()))

    def _watch_waiting(self, loss: Tensor) -> None:
        """Count the end of the backward of `loss`, after its own gradients are computed, as waiting for other ranks.

        A backward ends with its callbacks, in the order in which they were queued. Our first callback is queued when
        the backward begins, so it runs first. The callbacks of DDP and FSDP wait for their reductions. Then our second
        callback runs.
        """

        def has_gradients() -> None:
            self._begin(COMMUNICATION)
            queue_callback(has_all)

        def has_all() -> None:
            self._begun.pop()
            self._mark()

        def begins(_gradient: Tensor) -> None:
            queue_callback(has_gradients)

        loss.register_hook(begins)  # type: ignore[no-untyped-call]


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float):
        return cast(float, end) - begin
    return float(begin.elapsed_time(cast(torch.cuda.Event, end))) / 1000
