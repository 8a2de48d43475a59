"""What ranks tell each other before a window of whole batches, and after one that may have failed on some of them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from macrobatch._ranks import collectives
from macrobatch._ranks.backend import Local

HOST = torch.device("cpu")


class Row(NamedTuple):
    """What the other ranks must know of one before a window."""

    samples: int = 0
    parts: int = 0  # micro-batches
    size: int = 0  # of the largest one
    proposed: int = 2**62  # the size that it would take; by default no limit
    proven: int = 0  # the size that it knows to fit
    has_spare: int = 0  # whether it has any micro-batch to take part with
    failed: int = 0  # whether its batch cannot be cut at all


class Status(IntEnum):
    """What a rank says of its part of a window that nothing of has travelled yet."""

    DONE = 0
    RAN_OUT = 1
    TOO_LARGE = 2
    FAILED = 3


class Agreement:
    """Exchanges rows and votes between the ranks of a backend; on the host, where no device is waited for."""

    def __init__(self, backend: Local) -> None:
        self._backend = backend

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._backend.group is None

    def exchange(self, row: Row) -> list[Row]:
        """That row of every rank."""
        if self.is_alone:
            return [row]
        return [Row(*numbers) for numbers in collectives.all_gather_numbers(row, self._backend.host_group(), HOST)]

    def vote(self, status: Status) -> list[Status]:
        """What every rank says of its part of the window."""
        votes = collectives.all_gather_numbers([status], self._backend.host_group(), HOST)
        return [Status(vote) for (vote,) in votes]

    def broadcast(self, value: Any, source: int) -> Any:
        """`value` of one rank, on all of them. It must be on the host."""
        return collectives.broadcast_object(value, source, self._backend.host_group())
