import contextlib

import pytest
import torch

from harness.recorded import DEVICE, Pretence, pretended_capture, pretended_milliseconds


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
    monkeypatch.setattr("macrobatch._cudagraph.cache.FASTER", 1e9)
    if DEVICE == "cuda":
        return
    monkeypatch.setattr("macrobatch.macrostep.MacroStep._why_eager", lambda _: None)
    monkeypatch.setattr("macrobatch._cudagraph.recordable._require_plain", lambda *_: None)
    monkeypatch.setattr("macrobatch._cudagraph.cache.captured", pretended_capture)
    monkeypatch.setattr("macrobatch._cudagraph.cache.milliseconds", pretended_milliseconds)
    monkeypatch.setattr("macrobatch._cudagraph.cache.Claim", Pretence)
    monkeypatch.setattr("macrobatch._cudagraph.cache.joined", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
