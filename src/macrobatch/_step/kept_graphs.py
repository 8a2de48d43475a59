"""Graphs of a first pass that fit into memory: their micro-batches need no second forward.

With ``micro="auto"`` on a GPU, the last micro-batch of the first pass keeps its graph: a second pass would need that
memory, too. More of the last ones keep theirs as far as memory is free. Where it runs out after all, the window is done
again without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from macrobatch._cut.policies import Cut
from macrobatch.types import Encoded

SHARE = 0.8  # of the free memory, which is fragmented
SPARE = 3  # graphs: what a backward needs beside one


class Room(Protocol):
    """The memory of a device."""

    def __init__(self, device: torch.device) -> None:
        """Of that device."""

    def free(self) -> int:
        """How many bytes this process could get."""

    def allocated(self) -> int:
        """How many bytes its tensors have now."""


class RoomOnGPU(Room):
    """That of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - self.allocated()
        return torch.cuda.mem_get_info(self._device)[0] + cached

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)


ROOMS: dict[str, type[Room]] = {"cuda": RoomOnGPU}  # of the types of devices that tell; tests add CPUs


class KeptGraphs:
    """Chooses the micro-batches of a window that keep their graphs, and holds them.

    Attributes:
        has_kept: whether the window has kept any.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._graphs: dict[int, Encoded] = {}  # by the number of the micro-batch
        self._bytes: dict[int, int] = {}  # of a graph, by the number of samples
        self._too_large: int | None = None  # the smallest size of micro-batches whose graph did not fit beside
        self._first = 0
        self.has_kept = False

    def begin_window(self, cut: Cut) -> None:
        """Choose how many of the last micro-batches keep their graphs."""
        self.drop()
        self.has_kept = False
        count = 0 if self._too_large is not None and cut.size >= self._too_large else 1
        if count and (size := self._bytes.get(cut.size)):
            count += max(0, int(SHARE * self._room.free() / size) - SPARE)
        self._first = len(cut.parts) - count

    def keeps(self, index: int) -> bool:
        """Whether that micro-batch does."""
        return index >= self._first

    @contextlib.contextmanager
    def measuring(self, samples: int) -> Iterator[None]:
        """Around a forward whose graph is kept: what it leaves in memory."""
        before = self._room.allocated()
        yield
        self._bytes[samples] = max(self._room.allocated() - before, 1)

    def keep(self, index: int, encoded: Encoded) -> None:
        """Hold encodings with their graph."""
        self._graphs[index] = encoded
        self.has_kept = True

    def take(self, index: int) -> Encoded | None:
        """Those of a micro-batch, to be used up; None if it has kept none."""
        return self._graphs.pop(index, None)

    def drop(self) -> None:
        """Hold nothing any more."""
        self._graphs.clear()

    def refuse(self, size: int) -> None:
        """Memory ran out: micro-batches of that size, or larger ones, keep nothing from now on."""
        self._too_large = size if self._too_large is None else min(self._too_large, size)


def kept_graphs_for(device: torch.device) -> KeptGraphs | None:
    """None where nobody tells how much memory is free."""
    room = ROOMS.get(device.type)
    return None if room is None else KeptGraphs(room(device))
