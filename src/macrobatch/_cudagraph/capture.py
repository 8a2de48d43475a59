"""What it takes to capture a CUDA graph: memory of one pool, nothing freed meanwhile, and an end to failed ones."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class Claim:
    """Lets warming up use the memory of the recordings, which would else lie there beside it, and idle.

    By the functions behind ``torch.cuda.use_mem_pool``, which itself serves the calling thread alone: backwards have
    another. A pool that nobody claims any more is gone, so this lasts until the recording itself is there to claim it.
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
        torch._C._cuda_beginAllocateToPool(self._index, self._pool)
        self._claims += 1
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._index, self._pool)

    def __exit__(self, *exception: object) -> None:
        for _ in range(self._claims):
            torch._C._cuda_releasePool(self._index, self._pool)


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


def captured(
    run: Callable[[], T], pool: Any, stream: torch.cuda.Stream, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, T]:
    """What `run` does, as a graph, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),  # is put back where the next one fails to
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            returned = run()
    except BaseException:
        _end_failed_capture(pool, device)
        raise
    return graph, returned


def _end_failed_capture(pool: Any, device: torch.device) -> None:
    """What torch leaves undone when a capture cannot be ended: allocator and generator would take it for underway."""
    index = _index(device)
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except Exception:  # it could be ended: what failed was something else
        return
    torch._C._cuda_releasePool(index, pool)
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


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """What the device needs for it, waiting for the host included."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
