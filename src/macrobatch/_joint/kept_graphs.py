"""Graphs of a first pass that are kept in memory. Their micro-batches need no forward in the second pass.

With ``micro="auto"`` on a GPU, the last micro-batch of the first pass keeps its graph: the second pass would need that
memory anyway. More of the last micro-batches keep their graphs if enough memory is free. If memory runs out, the window
is retried without kept graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from macrobatch._cut.policies import Cut
from macrobatch.types import Encoded

SHARE = 0.8  # of the free memory: the rest allows for fragmentation
SPARE = 3  # the memory that a backward needs besides its graph, in units of graphs


class Room:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """How many bytes this process could still allocate."""
        cached = torch.cuda.memory_reserved(self._device) - self.allocated()
        return torch.cuda.mem_get_info(self._device)[0] + cached

    def allocated(self) -> int:
        """How many bytes the tensors of this process use now."""
        return torch.cuda.memory_allocated(self._device)


ROOMS: dict[str, type[Room]] = {"cuda": Room}  # devices that report their memory; tests add CPUs


class KeptGraphs:
    """Chooses the micro-batches of a window that keep their graphs, and holds them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._graphs: dict[int, Encoded] = {}  # by index of the micro-batch
        self._bytes: dict[int, int] = {}  # the size of a graph, by number of samples
        self._too_large: int | None = None  # the smallest size of micro-batches for which a kept graph did not fit
        self._first = 0
        self.has_kept = False  # whether the window has kept any

    def begin_window(self, cut: Cut) -> None:
        """Choose how many of the last micro-batches keep their graphs."""
        self.drop()
        self.has_kept = False
        count = 0 if self._too_large is not None and cut.size >= self._too_large else 1
        if count and (size := self._bytes.get(cut.size)):
            count += max(0, int(SHARE * self._room.free() / size) - SPARE)
        self._first = len(cut.parts) - count

    def keeps(self, index: int) -> bool:
        """Whether this micro-batch keeps its graph."""
        return index >= self._first

    @contextlib.contextmanager
    def measuring(self, samples: int) -> Iterator[None]:
        """Measure how much memory a forward whose graph is kept leaves allocated."""
        before = self._room.allocated()
        yield
        self._bytes[samples] = max(self._room.allocated() - before, 1)

    def keep(self, index: int, encoded: Encoded) -> None:
        """Hold encodings with their graph."""
        self._graphs[index] = encoded
        self.has_kept = True

    def take(self, index: int) -> Encoded | None:
        """Return the kept encodings of a micro-batch and forget them; None if they were not kept."""
        return self._graphs.pop(index, None)

    def drop(self) -> None:
        """Free all kept graphs."""
        self._graphs.clear()

    def refuse(self, size: int) -> None:
        """After memory ran out: micro-batches of this size or larger keep no graph in later windows."""
        self._too_large = size if self._too_large is None else min(self._too_large, size)


def kept_graphs_for(device: torch.device) -> KeptGraphs | None:
    """The kept graphs for a device; None if the device does not report its free memory."""
    room = ROOMS.get(device.type)
    return None if room is None else KeptGraphs(room(device))
