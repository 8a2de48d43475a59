"""Prefetches micro-batches to the device: copies the next one from pinned memory on a separate stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from macrobatch._cut.trees import map_tensors

T = TypeVar("T")


class Prefetcher:
    """Copies micro-batches from host memory to a CUDA device, without making the host or the device wait."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def each(self, takes: Sequence[Callable[[], tuple[Any, T]]], device: torch.device) -> Iterator[tuple[Any, T]]:
        """Yield the result of each function with its tensors on the device; the copy of the next one is under way."""
        if device.type != "cuda":  # micro-batches stay as they are
            for take in takes:
                yield take()
            return
        ahead: list[Callable[[], tuple[Any, T]]] = []
        for take in takes:
            ahead.append(self._send(*take(), device))
            if len(ahead) == 2:
                yield ahead.pop(0)()
        for receive in ahead:
            yield receive()

    def one(self, take: Callable[[], tuple[Any, T]], device: torch.device) -> tuple[Any, T]:
        """The result of one function with its tensors on the device."""
        return next(self.each([take], device))

    def _send(self, micro_batch: Any, about: T, device: torch.device) -> Callable[[], tuple[Any, T]]:
        """Begin to copy. The returned function makes the current stream wait for the copies, and returns them."""
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copies: list[Tensor] = []
        usual = torch.cuda.current_stream(device)

        def send_leaf(leaf: Tensor) -> Tensor:
            if leaf.device.type != "cpu":
                return leaf
            if leaf.layout != torch.strided:
                with torch.cuda.stream(usual):  # record_stream does not work for sparse tensors
                    return leaf.to(device)
            pinned = leaf.contiguous().pin_memory()  # each call copies only if needed
            copies.append(pinned.to(device, non_blocking=True))
            return copies[-1]

        with torch.cuda.stream(self._stream):
            sent = map_tensors(micro_batch, send_leaf)
            event = self._stream.record_event()

        def receive() -> tuple[Any, T]:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(event)
            for copy in copies:
                copy.record_stream(stream)  # the other stream owns its memory and must not reuse it yet
            return sent, about

        return receive
