"""What it takes to capture a CUDA graph: memory of one pool, nothing freed meanwhile, and an end to failed ones."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from macrobatch._torch.cuda import begin_allocating, end_allocating, release_pool

T = TypeVar("T")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class Claim:
    """Lets warming up use the memory of the recordings, which would else lie there beside it, and idle.

    A pool that nobody claims any more is gone, so this lasts until the recording itself is there to claim it.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.device = device
        self._pool = pool
        self._index = _index(device)
        self._claims = 0

    def __enter__(self) -> Claim:
        return self

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """From that pool, whatever the thread."""
        begin_allocating(self._index, self._pool)
        self._claims += 1
        try:
            yield
        finally:
            end_allocating(self._index, self._pool)

    def __exit__(self, *exception: object) -> None:
        for _ in range(self._claims):
            release_pool(self._index, self._pool)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """What Python's garbage collector frees in between may be something whose freeing a recording forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def uncached_autocast() -> Iterator[None]:
    """Weights that were cast before a recording began are no part of it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Do it again, on the numbers that are in the same places now."""


class Capturer:
    """All that recordings ask of CUDA itself. `CAPTURERS` has one for each kind of device that can capture.

    Tests without a GPU put their own there, for CPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all captures: libraries keep memory for each that they were used on."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def new_pool(self) -> Any:
        """The name of a memory pool, which lives as long as a capture in it."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def claim(self, pool: Any) -> Iterator[Claim]:
        """Around warming up and capturing, whose stream follows on what the current one was given before."""
        with joined(self._stream, self.device), Claim(pool, self.device) as claim:
            yield claim

    def warming_up(self) -> contextlib.AbstractContextManager[object]:
        """On the stream of the captures."""
        return torch.cuda.stream(self._stream)

    def capture(self, run: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        """What `run` does, as a graph, and what it returned."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # is put back where the next one fails to
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                returned = run()
        except BaseException:
            _end_failed_capture(pool, self.device)
            raise
        return graph, returned

    def milliseconds(self, run: Callable[[], object]) -> float:
        """What the device needs for it, waiting for the host included."""
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end))


CAPTURERS: dict[str, type[Capturer]] = {"cuda": Capturer}


def capturer_for(device: torch.device) -> Capturer | None:
    """None where this kind of device cannot capture."""
    capturer = CAPTURERS.get(device.type)
    return None if capturer is None else capturer(device)


def _end_failed_capture(pool: Any, device: torch.device) -> None:
    """What torch leaves undone when a capture cannot be ended: allocator and generator would take it for underway."""
    index = _index(device)
    try:
        end_allocating(index, pool)
    except Exception:  # it could be ended: what failed was something else
        return
    release_pool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    torch.cuda.synchronize(device)


@contextlib.contextmanager
def joined(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Inside, `stream` follows on what the current one was given before; afterwards the current one follows on it."""
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(stream)
