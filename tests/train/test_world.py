"""Ranks that meet in a store that torchrun keeps over restarts, and over hosts that were replaced."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from macrobatch.errors import BackendError
from macrobatch.train.settings import Settings
from macrobatch.train.world import agree_on_space, join_ranks

RANKS = 3
SOON = timedelta(seconds=20)


@pytest.fixture
def server():
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=SOON)


def attempt(server: TCPStore, late: int | None = None) -> list[str]:
    """What every rank of an attempt agrees on, where one may come late."""
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        store = TCPStore("localhost", server.port, is_master=False, timeout=SOON)
        time.sleep(0.5 if rank == late else 0)
        names[rank] = agree_on_space(store, rank, RANKS)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON.total_seconds())
    return [names[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_attempt_has_a_space_of_its_own(server, late):
    """The ranks before have left their names and numbers, and a late rank's old ones look as if it were there."""
    spaces = [attempt(server), attempt(server, late), attempt(server, late)]
    assert [len(set(names)) for names in spaces] == [1, 1, 1]
    assert len({names[0] for names in spaces}) == 3


@pytest.mark.parametrize("left", [("MASTER_ADDR",), ("MASTER_ADDR", "MASTER_PORT"), ("RANK",)])
def test_what_a_launcher_left_in_the_environment_is_no_launch(monkeypatch, left):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in left:
        monkeypatch.setenv(name, "1")
    with join_ranks(Settings(device="cpu")) as world:
        assert (world.rank, world.size) == (0, 1)


def test_a_rank_that_never_comes(server):
    attempt(server)
    store = TCPStore("localhost", server.port, is_master=False, timeout=SOON)
    with pytest.raises(BackendError, match="rank 0 of 3 has waited"):
        agree_on_space(store, 0, RANKS, patience=timedelta(seconds=0.5))
