"""The ranks of a run: started by torchrun or alone, on which device, and what they do together besides training."""

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

HOST = torch.device("cpu")
PATIENCE = timedelta(minutes=30)  # how long ranks wait for one that prepares the data, or saves


class OtherRankError(MacrobatchError):
    """Another rank could not go on, and has said why."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Who this rank is among how many, and where it computes."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    host_group: Any = None  # to exchange what lives on the host; None where there is one rank only

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Those numbers of every rank."""
        return [list(numbers)] if self.size == 1 else collectives.all_gather_numbers(numbers, self.host_group, HOST)

    def told(self, text: str) -> str:
        """What the first rank says, on all."""
        if self.size == 1:
            return text
        sent: str = collectives.broadcast_object(text, 0, self.host_group)
        return sent

    def together(self, action: Callable[[], Result], *, alone_first: bool = False) -> Result:
        """Do it on every rank; where one fails, none goes on, and none is left waiting.

        With `alone_first`, one rank of each host does it before the others, which can use the files that it leaves.
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
            failed = [rank for rank, (status,) in enumerate(self.gathered([failure is not None])) if status]
            if failure is not None and failed[0] == self.rank:
                raise failure
            if failed:
                raise OtherRankError(f"rank {failed[0]} could not go on.")
        return result[0]


@contextmanager
def joined(settings: Settings) -> Iterator[World]:
    """All ranks that torchrun started, connected; or this process alone. A program may have connected them itself."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = _device(settings, local)
    is_connected = dist.is_initialized()
    if not is_connected and "TORCHELASTIC_RUN_ID" not in os.environ and "MASTER_ADDR" not in os.environ:
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
        raise BackendError("--device cuda: torch finds no GPU here. Say --device cpu, or leave it out.")
    if local_rank >= torch.cuda.device_count():
        raise BackendError(
            f"this host has {torch.cuda.device_count()} GPUs, and more ranks than that: lower --nproc-per-node, or say "
            "--device cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _connect(device: torch.device) -> None:
    """Join the process group of this attempt."""
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
    """The name of a space in the store for the ranks of this attempt alone.

    After a restart torchrun's store still holds what the ranks before wrote, and new ones would take it for each
    other's addresses. Its count of restarts does not name an attempt: a host that was replaced counts from 0 again.
    So each rank writes a new number. The first rank names the space after all numbers, and names it anew as long as
    old numbers are among them. Every rank confirms a name that has its own number in it.
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
    """What that rank has written last; nothing so far is no number."""
    key = f"macrobatch/number/{rank}"
    return store.get(key).decode() if store.check([key]) else ""
