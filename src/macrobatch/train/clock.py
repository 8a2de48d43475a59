"""`Clock`: where the time of a training step went.

At every moment one part has the time: the one that was begun last and has not ended. What is begun inside another takes
the time from it, so the parts of a lap add up to the lap, and what no part had is "other". On a CUDA device the moments
are events in its stream, which nobody waits for: they are read with the numbers of the step, when those have arrived.
There, a part has what the device did, or waited for, between them.

"communication" is what this rank waited, doing nothing else: for the ranks' agreement before a window, for the slowest
of them after its own last backward, and for sums that travel at the close. Sums that travel during the backward cost a
step nothing, and are not in it. What FSDP gathers and scatters in between is in it as far as a rank waits for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from macrobatch._ranks.fsdp2 import param_groups
from macrobatch.macrostep import MacroStep

DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, OTHER = PARTS = (
    "data",
    "forward",
    "backward",
    "communication",
    "update",
    "other",
)
REPLAY = "replay"  # forward and backward at once, where they were recorded

Moment = float | torch.cuda.Event


class Lap:
    """One round of the clock.

    Attributes:
        seconds: by the host's clock, without what was done aside.
    """

    def __init__(self, seconds: float, marks: list[tuple[str, Moment]], end: Moment) -> None:
        self.seconds = seconds
        self._marks = marks
        self._end = end

    def parts(self) -> dict[str, float]:
        """The seconds of each part. Waits for the device, unless a number of that step has been read already."""
        parts = dict.fromkeys(PARTS, 0.0)
        if isinstance(self._end, torch.cuda.Event):
            self._end.synchronize()
        ends = [moment for _, moment in self._marks[1:]] + [self._end]
        for (part, begin), end in zip(self._marks, ends, strict=True):
            parts[part] = parts.get(part, 0.0) + _seconds(begin, end)
        return parts


class Clock:
    """Measures laps, and what they were spent on.

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

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = 0.0  # seconds of this lap that belong to no step
        self._begun = [OTHER]  # the parts that are under way, the innermost last
        now = self._moment()
        self._start = now if isinstance(now, float) else time.perf_counter()
        self._marks: list[tuple[str, Moment]] = [(OTHER, now)]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside counts as that part, but for parts inside of it. Any name will do."""
        depth = len(self._begun)
        self._begin(name)
        try:
            yield
        finally:
            del self._begun[depth:]  # also those that an error left behind
            self._mark()

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """What happens inside belongs to no step: a part of its own, whose time is not in the seconds of the lap."""
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
        """From now on, count the parts of this `MacroStep`'s windows; for as long as it lives."""
        accumulator, sync = train._acc, train._acc._sync
        for owner, method, part in (
            (train, "_exchanged", COMMUNICATION),  # what ranks agree on before a window, and vote on after it
            (train, "_voted", COMMUNICATION),
            (train, "_taken", DATA),  # a micro-batch is sliced, or collated
            (train, "_loss", FORWARD),
            (accumulator, "_replay", REPLAY),
            (sync, "finish", COMMUNICATION),  # what no backward has sent
            (accumulator._update, "close", UPDATE),
        ):
            self._time(owner, method, part)
        self._time(accumulator, "_run_backward", BACKWARD, inside=self._watch_waiting if sync.group else None)
        for group in param_groups(accumulator._models):  # of fully_shard
            for method in ("unshard", "wait_for_unshard", "post_backward"):
                self._time(group, method, COMMUNICATION)

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
        """From here on the time belongs to the innermost part."""
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return  # such an event would belong to the graph
        self._marks.append((self._begun[-1], self._moment()))

    def _time(self, owner: Any, method: str, part: str, inside: Callable[[Tensor], None] | None = None) -> None:
        """Let every call of that method of one object count as that part."""
        function = getattr(owner, method)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                if inside is not None:
                    inside(args[0])
                return function(*args, **kwargs)

        setattr(owner, method, timed)

    def _watch_waiting(self, loss: Tensor) -> None:
        """What the backward of `loss` does when its own gradients are made is waiting for those of others.

        A backward ends with its callbacks, in the order in which they were queued. Ours is the first, as it is queued
        when the backward begins; DDP and FSDP have theirs wait for what they sent; then comes a last one of ours.
        """
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def has_gradients() -> None:
            self._begin(COMMUNICATION)
            queue(has_all)

        def has_all() -> None:
            self._begun.pop()
            self._mark()

        def begins(_gradient: Tensor) -> None:
            queue(has_gradients)

        loss.register_hook(begins)  # type: ignore[no-untyped-call]


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float):
        return cast(float, end) - begin
    return float(begin.elapsed_time(cast(torch.cuda.Event, end))) / 1000
