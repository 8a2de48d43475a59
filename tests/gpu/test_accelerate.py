"""The facade on a GPU: the same figures come out, and the host reads nothing until the step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness import programs
from harness.gpu import difference, make_model, no_host_reads
from macrobatch.accelerate import Accelerator

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _process():
    with programs.fresh():
        yield


def make_loader(dtype=torch.float32):
    return DataLoader(TensorDataset(torch.randn(22, 8, dtype=dtype), torch.randn(22, 1, dtype=dtype)), batch_size=2)


def items_of(y, counts):
    return {"none": {}, "int": {"items": len(y)}, "tensor": {"items": torch.full((), len(y), device="cuda")}}[counts]


@pytest.mark.parametrize("counts", ["none", "int", "tensor"])
@pytest.mark.parametrize("fused", [False, True])
def test_trains_as_the_whole_batch(fused, counts):
    loader, model = make_loader(torch.float64), make_model(torch.float64)
    whole = copy.deepcopy(model)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.cpu().parameters(), lr=1e-2, eps=1e-5, fused=fused)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    for x, y in prepared:
        assert x.device.type == "cuda"
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y), **items_of(y, counts))
            optimizer.step()
            optimizer.zero_grad()
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-5)
    x, y = (tensor.cuda() for tensor in loader.dataset.tensors)
    for window in (slice(0, 8), slice(8, 16), slice(16, 22)):
        whole_optimizer.zero_grad()
        F.mse_loss(whole(x[window]), y[window]).backward()
        whole_optimizer.step()
    assert difference(model, whole) < 1e-12


@pytest.mark.parametrize("counts", ["none", "int", "tensor"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_host_reads_nothing_until_the_step(precision, counts):
    accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision=precision)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    data = [(torch.randn(4, 8, device="cuda"), torch.randn(4, 1, device="cuda")) for _ in range(6)]
    given = [items_of(y, counts) for _, y in data]
    for (x, y), items in zip(data, given, strict=True):
        with accelerator.accumulate(model):
            with no_host_reads():
                accelerator.backward(F.mse_loss(model(x), y), **items)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert not accelerator.optimizer_step_was_skipped
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_overflow_is_skipped(tmp_path):
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    before = model.weight.detach().clone()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2, device="cuda")).sum() * 1e30)
        optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(model.weight, before)
    assert accelerator.scaler.get_scale() == 32768
