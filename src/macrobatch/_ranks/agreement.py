"""What ranks tell each other before a window of whole batches, and after one that may have failed on some ranks."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from macrobatch._ranks import collectives
from macrobatch._ranks.backend import Local

HOST = torch.device("cpu")


class Row(NamedTuple):
    """What a rank tells the others before a window."""

    samples: int = 0
    parts: int = 0  # the number of micro-batches
    size: int = 0  # the size of the largest micro-batch
    proposed: int = 2**62  # the size that this rank wants to use; no limit by default
    proven: int = 0  # the largest size known to fit
    has_spare: int = 0  # whether it has a spare micro-batch, to take part without samples
    failed: int = 0  # whether its batch cannot be cut


class Status(IntEnum):
    """How a rank's part of a window ended. Ranks exchange this before any gradient of the window."""

    DONE = 0
    RAN_OUT = 1
    TOO_LARGE = 2
    FAILED = 3


class Agreement:
    """Exchanges rows and votes between the ranks of a backend, through the host, without waiting for a device."""

    def __init__(self, backend: Local) -> None:
        self._backend = backend

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._backend.group is None

    def exchange(self, row: Row) -> list[Row]:
        """The rows of all ranks."""
        if self.is_alone:
            return [row]
        return [Row(*numbers) for numbers in collectives.all_gather_numbers(row, self._backend.host_group(), HOST)]

    def vote(self, status: Status) -> list[Status]:
        """The status of every rank's part of the window."""
        votes = collectives.all_gather_numbers([status], self._backend.host_group(), HOST)
        return [Status(vote) for (vote,) in votes]

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank `source`, on all ranks. It must be on the host."""
        return collectives.broadcast_object(value, source, self._backend.host_group())
