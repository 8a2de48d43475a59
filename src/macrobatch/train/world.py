"""The ranks of a run, started by torchrun or alone: their device, and what they exchange besides gradients."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from macrobatch._ranks import collectives
from macrobatch.errors import BackendError, MacrobatchError
from macrobatch.train.settings import Settings

Result = TypeVar("Result")

LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # set by torchrun and other launchers
HOST = torch.device("cpu")
PATIENCE = timedelta(minutes=30)  # how long ranks wait for one that prepares the data or saves


class OtherRankError(MacrobatchError):
    """Another rank has failed, and reports the reason itself."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The number of this rank, the number of ranks, and the device of this rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    host_group: Any = None  # the process group for data on the host; None if there is only one rank

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank."""
        return [list(numbers)] if self.size == 1 else collectives.all_gather_numbers(numbers, self.host_group, HOST)

    def broadcast(self, text: str) -> str:
        """The text of the first rank, on all ranks."""
        if self.size == 1:
            return text
        sent: str = collectives.broadcast_object(text, 0, self.host_group)
        return sent

    def on_all_ranks(self, action: Callable[[], Result], *, alone_first: bool = False) -> Result:
        """Run a function on every rank. If it fails on one rank, raise an error on all of them.

        With `alone_first`, one rank of each host runs it before the others, which can then use the files that it
        writes.
        """
        turns = [self.local_rank == 0, self.local_rank != 0] if alone_first else [True]
        result: list[Result] = []
        for is_mine in turns:
            failure: Exception | None = None
            try:
                if is_mine:
                    result.append(action())
            except Exception as error:
                failure = error
            failed = [rank for rank, (status,) in enumerate(self.gather([failure is not None])) if status]
            if failure is not None and failed[0] == self.rank:
                raise failure
            if failed:
                raise OtherRankError(f"rank {failed[0]} failed.")
        return result[0]


@contextmanager
def join_ranks(settings: Settings) -> Iterator[World]:
    """A context that connects all ranks of torchrun, unless the program has done so; or this process alone."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = _device(settings, local)
    is_connected = dist.is_initialized()
    if not is_connected and not os.environ.keys() >= LAUNCHED:  # MASTER_ADDR alone may be left in an environment
        yield World(rank=0, size=1, local_rank=0, local_size=1, device=device)
        return
    if not is_connected:
        _connect(device)
    try:
        group = dist.group.WORLD
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=local,
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            device=device,
            host_group=collectives.host_group(group) if dist.get_world_size() > 1 else None,
        )
    finally:
        if not is_connected:
            dist.destroy_process_group()


def _device(settings: Settings, local_rank: int) -> torch.device:
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return HOST
    if not torch.cuda.is_available():
        raise BackendError("--device cuda: torch finds no GPU. Pass --device cpu, or leave the flag out.")
    if local_rank >= torch.cuda.device_count():
        raise BackendError(
            f"this host has {torch.cuda.device_count()} GPUs, but more ranks. Lower --nproc-per-node, or pass --device "
            "cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _connect(device: torch.device) -> None:
    """Join the process group of this start of torchrun."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", rank, size, timeout=PATIENCE))
    dist.init_process_group(
        backend,
        store=PrefixStore(agree_on_space(store, rank, size), store),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )


def agree_on_space(store: Store, rank: int, size: int, patience: timedelta = PATIENCE) -> str:
    """Agree on a prefix in the store for the ranks of this start only.

    After a restart, torchrun's store still holds the values of the earlier ranks, and new ranks would use them as
    addresses of each other. The number of restarts is no suitable prefix: a host that was replaced counts from 0 again.
    So each rank writes a new random number. The first rank makes the prefix of all numbers, and makes it again as long
    as old numbers are among them. Every rank confirms a prefix that contains its own number.
    """
    number, deadline = secrets.token_hex(8), time.monotonic() + patience.total_seconds()
    store.set(f"macrobatch/number/{rank}", number)
    while time.monotonic() < deadline:
        if rank == 0:
            name = "-".join(_number_of(store, other) for other in range(size))
            store.set("macrobatch/space", name)
        else:
            name = store.get("macrobatch/space").decode() if store.check(["macrobatch/space"]) else ""
        if name.split("-")[rank : rank + 1] == [number]:
            store.set(f"{name}/confirmed/{rank}", "")
            if store.check([f"{name}/confirmed/{other}" for other in range(size)]):
                return name
        time.sleep(0.02)
    raise BackendError(f"rank {rank} of {size} has waited {patience} for the other ranks. Did all hosts start?")


def _number_of(store: Store, rank: int) -> str:
    """The last number that a rank has written; empty if there is none."""
    key = f"macrobatch/number/{rank}"
    return store.get(key).decode() if store.check([key]) else ""
