"""Memory does not grow with the number of micro-batches, nor from one window to the next."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from macrobatch import Accumulator, MacroStep

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


# ------------------------------------------------------------------------------------------ between windows


def gradients_seen(model: nn.Module, run: Callable[[], object]) -> list[weakref.ref[Tensor]]:
    """The gradients that `run` accumulated, seen by hooks that keep none of them."""
    seen: dict[int, weakref.ref[Tensor]] = {}

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[id(parameter)] = weakref.ref(parameter.grad)

    hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]
    run()
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    return list(seen.values())


def square_sum(model, batch):
    return model(batch).square().sum(), len(batch)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"nonfinite": "keep"}], ids=str)
def test_no_gradient_outlives_its_window(options, fused):
    """One copy of the gradients beside the next window's would be memory that the next batch cannot have."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    train = MacroStep(model, optimizer, square_sum, micro=2, reduction="sum", **options)
    seen = gradients_seen(model, lambda: train(torch.randn(6, 4)))
    assert [gradient() for gradient in seen] == [None, None]


def test_no_gradient_outlives_a_window_that_is_discarded():
    model = nn.Linear(4, 4)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    micro_batches = acc.batches([torch.randn(2, 4) for _ in range(3)])
    seen = gradients_seen(model, lambda: acc.backward(model(next(micro_batches)).square().mean(), items=2))
    acc.discard()
    assert [gradient() for gradient in seen] == [None, None]


def test_gradients_that_are_left_to_a_program_are_its_own():
    accelerate = pytest.importorskip("macrobatch.accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    linear = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))

    def window() -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(2, 4)).square().mean(), items=2)
                optimizer.step()
                optimizer.zero_grad()

    seen = gradients_seen(linear, window)
    assert [gradient() for gradient in seen] == [None, None]
