"""Prefetches micro-batches to the device: copies the next one from pinned memory on a separate stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
        ahead: list[Transfer[T]] = []
        for take in takes:
            ahead.append(self._send(*take(), device))
            if len(ahead) == 2:
                yield ahead.pop(0).wait(device)
        for transfer in ahead:
            yield transfer.wait(device)

    def one(self, take: Callable[[], tuple[Any, T]], device: torch.device) -> tuple[Any, T]:
        """The result of one function with its tensors on the device."""
        return next(self.each([take], device))

    def _send(self, micro_batch: Any, about: T, device: torch.device) -> Transfer[T]:
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
            return Transfer(map_tensors(micro_batch, send_leaf), about, copies, self._stream.record_event())


@dataclass(frozen=True)
class Transfer(Generic[T]):
    """A micro-batch that is being copied."""

    micro_batch: Any
    about: T
    copies: list[Tensor]
    event: torch.cuda.Event

    def wait(self, device: torch.device) -> tuple[Any, T]:
        """Return the micro-batch, and make the current stream wait for the copies."""
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.event)
        for copy in self.copies:
            copy.record_stream(stream)  # the other stream owns its memory and must not reuse it yet
        return self.micro_batch, self.about
