"""Memory does not grow with the number of micro-batches in a window. Bytes as the allocator reports them."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from macrobatch import Accumulator

FEATURES, SAMPLES = 128, 64


def peak_bytes(run: Callable[[], None], folder: Path) -> int:
    """The most bytes that were allocated at once while `run` ran, over those allocated before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    first = min(events, key=lambda e: e["Ev Idx"])
    return max(e["Total Allocated"] for e in events) - (first["Total Allocated"] - first["Bytes"])


def one_window(steps: int, *, keep: list[Tensor] | None = None, tensors: bool = False, **options) -> None:
    """`steps` micro-batches and the step; `keep` is where a careless loop keeps losses that nobody back-propagates."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "accumulate_dtype" in options else torch.float32
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    acc = Accumulator(model, optimizer, steps=steps, **options)
    x = torch.randn(SAMPLES, FEATURES, dtype=dtype)
    for _ in acc.batches(range(steps)):
        loss = model(x).square().mean()
        if keep is not None:
            keep.append(model(x).square().mean())
        acc.backward(loss, items=torch.tensor(SAMPLES) if tensors else SAMPLES)
        acc.step()
    assert acc.optimizer_step == 1


@pytest.mark.parametrize("tensors", [False, True], ids=["int items", "tensor items"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"accumulate_dtype": torch.float32}, {"nonfinite": "skip"}])
def test_64_micro_batches_need_no_more_than_2(options, tensors, tmp_path):
    few, many = (peak_bytes(lambda n=n: one_window(n, tensors=tensors, **options), tmp_path) for n in (2, 64))
    assert few > 4 * FEATURES * FEATURES, "the model alone is more than that"
    assert many <= 1.02 * few


def test_losses_kept_with_their_graphs_are_seen(tmp_path):
    few, many = (peak_bytes(lambda n=n: one_window(n, keep=[]), tmp_path) for n in (2, 64))
    assert many > 1.02 * few
