import pytest
import torch

from harness.recorded import DEVICE, PretendedCapturer
from macrobatch._cudagraph.capture import CAPTURERS


@pytest.fixture
def nccl(tmp_path):
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def captures(monkeypatch):
    """All recordings are kept, whatever they gain: these models are small, and machines are noisy."""
    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_TIME_SHARE", 1e9)
    if DEVICE == "cpu":
        monkeypatch.setitem(CAPTURERS, "cpu", PretendedCapturer)
