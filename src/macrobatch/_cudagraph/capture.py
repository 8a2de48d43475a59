"""Captures CUDA graphs: it allocates from one pool, frees nothing meanwhile, and cleans up after a failed capture."""

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


class PoolClaim:
    """Lets the warm-up allocate from the pool of the recordings, to save memory.

    CUDA frees a pool that nobody uses, so the claim lasts until the recording uses the pool.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.device = device
        self._pool = pool
        self._index = _index(device)
        self._claims = 0

    def __enter__(self) -> PoolClaim:
        return self

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate from the pool inside the block, on all threads."""
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
def pause_gc() -> Iterator[None]:
    """Pause Python's garbage collector inside the block: it might free something that a capture must not free."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache inside the block: weights that were cast earlier would not be recorded."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run the captured kernels on the current values at the same addresses."""


class Capturer:
    """All operations of CUDA that recordings need. Tests without a GPU replace it by one for CPUs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One stream for all captures: libraries keep memory for each stream that they run on."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def new_pool(self) -> Any:
        """The handle of a memory pool, which exists as long as a capture in it."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def claim(self, pool: Any) -> Iterator[PoolClaim]:
        """Order the capture stream after the current one, and claim the pool, inside the block."""
        with order_streams(self._stream, self.device), PoolClaim(pool, self.device) as claim:
            yield claim

    def warming_up(self) -> contextlib.AbstractContextManager[object]:
        """Run on the capture stream inside the block."""
        return torch.cuda.stream(self._stream)

    def capture(self, run: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        """Capture `run()` as a graph; return the graph and the result."""
        graph = torch.cuda.CUDAGraph()
        try:
            current = torch.cuda.current_stream(self.device)
            with (
                torch.cuda.stream(current),  # restores the stream if the next line fails to
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                returned = run()
        except BaseException:
            _end_failed_capture(pool, self.device)
            raise
        return graph, returned

    def milliseconds(self, run: Callable[[], object]) -> float:
        """The time of `run()` on the device, including its waiting for the host."""
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end))


CAPTURERS: dict[str, type[Capturer]] = {"cuda": Capturer}  # by type of device that can capture


def capturer_for(device: torch.device) -> Capturer | None:
    """The capturer of a device; None if this type of device cannot capture."""
    capturer = CAPTURERS.get(device.type)
    return None if capturer is None else capturer(device)


def _end_failed_capture(pool: Any, device: torch.device) -> None:
    """Reset the allocator and the generator: torch leaves them in the state of a running capture if a capture fails."""
    index = _index(device)
    try:
        end_allocating(index, pool)
    except Exception:  # the capture did end: something else failed
        return
    release_pool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    torch.cuda.synchronize(device)


@contextlib.contextmanager
def order_streams(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Make `stream` wait for the current stream at the start of the block, and the other way round at its end."""
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(stream)
