"""Micro-batches on their way to the device: copied from pinned memory on a stream of their own, one ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from macrobatch._cut.trees import map_tensors

T = TypeVar("T")


class Prefetcher:
    """Brings what lies in host memory to a CUDA device, without the host or the device waiting.

    On any other device, what is taken is handed on as it is.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def each(self, takes: Sequence[Callable[[], tuple[Any, T]]], device: torch.device) -> Iterator[tuple[Any, T]]:
        """What each of `takes` returns, with its tensors on the device; the next is on its way before one is used."""
        if device.type != "cuda":
            for take in takes:
                yield take()
            return
        ahead: list[Transfer[T]] = []
        for take in takes:
            ahead.append(self._sent(*take(), device))
            if len(ahead) == 2:
                yield ahead.pop(0).arrived(device)
        for sent in ahead:
            yield sent.arrived(device)

    def one(self, take: Callable[[], tuple[Any, T]], device: torch.device) -> tuple[Any, T]:
        """The same for a single one."""
        return next(self.each([take], device))

    def _sent(self, micro_batch: Any, about: T, device: torch.device) -> Transfer[T]:
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copies: list[Tensor] = []
        usual = torch.cuda.current_stream(device)

        def copied(leaf: Tensor) -> Tensor:
            if leaf.device.type != "cpu":
                return leaf
            if leaf.layout != torch.strided:
                with torch.cuda.stream(usual):  # its parts cannot be recorded for another one
                    return leaf.to(device)
            pinned = leaf.contiguous().pin_memory()  # each a copy only where needed
            copies.append(pinned.to(device, non_blocking=True))
            return copies[-1]

        with torch.cuda.stream(self._stream):
            return Transfer(map_tensors(micro_batch, copied), about, copies, self._stream.record_event())


@dataclass(frozen=True)
class Transfer(Generic[T]):
    """A micro-batch on its way."""

    micro_batch: Any
    about: T
    copies: list[Tensor]
    event: torch.cuda.Event

    def arrived(self, device: torch.device) -> tuple[Any, T]:
        """Ready for whatever the device is given to do from now on."""
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.event)
        for copy in self.copies:
            copy.record_stream(stream)  # its memory belongs to the other stream, which must not use it anew meanwhile
        return self.micro_batch, self.about
