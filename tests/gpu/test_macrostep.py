"""MacroStep on a GPU: nothing waits for the host, and sizes stay clear of the edge of a real limit."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.gpu import difference, make_data, make_model, no_host_reads
from macrobatch import MacroStep, by_tokens, verify
from macrobatch._cut.samples import samples_of
from macrobatch.errors import BatchError, FitError

pytestmark = pytest.mark.gpu

MiB = 2**20


def mean_square(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"])


def whole_batch(samples=22):
    ((x, y),) = make_data(sizes=(samples,))
    return {"x": x, "y": y}


@pytest.mark.parametrize("micro", [5, "auto"])
def test_no_host_reads(micro):
    model = make_model()
    train = MacroStep(model, torch.optim.AdamW(model.parameters(), fused=True), mean_square, micro=micro, max_norm=1.0)
    batch = whole_batch()
    train(batch)
    torch.cuda.synchronize()
    with no_host_reads():
        results = [train(batch) for _ in range(3)]
    assert [result.step for result in results] == [2, 3, 4]


def test_by_tokens_reads_the_lengths_and_trains_as_the_whole_batch():
    model, results = make_model(torch.float64), []
    batch = {"x": torch.randn(9, 6, 8, device="cuda", dtype=torch.float64), "attention_mask": None, "y": None}
    lengths = torch.tensor([6, 1, 4, 2, 6, 3, 5, 2, 1], device="cuda")
    batch["attention_mask"] = torch.arange(6, device="cuda") < lengths[:, None]
    batch["y"] = torch.randn(9, 6, 1, device="cuda", dtype=torch.float64)

    def masked(model, batch):
        losses = (model(batch["x"]) - batch["y"])[..., 0] ** 2 * batch["attention_mask"]
        return losses.sum() / batch["attention_mask"].sum(), batch["attention_mask"].sum()

    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        micro = by_tokens(12, length=lambda batch: batch["attention_mask"].sum(1))
        results.append(MacroStep(model, optimizer, masked, micro=micro)(batch))

    report = verify(model, masked, batch, step=step)
    assert report.ok, str(report)
    assert results[0].items.item() == 30
    assert results[0].micro_batches <= 4


@pytest.mark.parametrize("where", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")])
def test_padding_is_told_by_masks_and_labels_wherever_they_are(where):
    mask = torch.arange(6) < torch.tensor([[2], [5], [3], [4]])
    labels = torch.where(torch.arange(6) < torch.tensor([[4], [1], [3], [5]]), 7, -100)
    batch = {
        "input_ids": torch.arange(24).view(4, 6),
        "attention_mask": mask.to(where[0]),
        "labels": labels.to(where[1]),
    }
    samples = samples_of(batch)
    assert samples.lengths(None) == [(4,), (5,), (3,), (5,)]
    assert samples.lengths(lambda batch: [4, 5, 3, 5]) == [(4,), (5,), (3,), (5,)]
    with pytest.raises(BatchError, match="label that is not -100"):
        samples.lengths(lambda batch: batch["attention_mask"].sum(1))
    parts = [samples.take(part) for part in by_tokens(10).parts(samples)]
    assert [tuple(part["labels"].shape) for part in parts] == [tuple(part["input_ids"].shape) for part in parts]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_uneven_labels_are_read_once(device):
    model = make_model()
    labels = torch.where(torch.rand(22, 6, device=device) < 0.5, -100, 3)
    batch = {"x": whole_batch()["x"].to(device), "labels": labels}

    def unread(model, batch):
        output = model(batch["x"])
        return output.sum() / output.numel()

    train = MacroStep(model, torch.optim.AdamW(model.parameters(), fused=True), unread, micro=5)
    with pytest.warns(UserWarning, match="loss_fn returned a loss without its items"):
        train(batch)
    even = MacroStep(model, torch.optim.AdamW(model.parameters(), fused=True), unread, micro=5)
    even(batch | {"labels": torch.ones_like(labels)})
    torch.cuda.synchronize()
    with no_host_reads():
        even(batch | {"labels": torch.ones_like(labels)})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_batch_changed_in_place_is_changed_once(device):
    def doubling(model, batch):
        batch["x"].mul_(2)
        if len(batch["x"]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_square(model, batch)

    model = make_model()
    twin = copy.deepcopy(model)
    batch = {name: leaf.to(device) for name, leaf in whole_batch().items()}
    before = batch["x"].clone()
    MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), doubling)(batch)
    assert torch.equal(batch["x"], before)
    MacroStep(twin, torch.optim.SGD(twin.parameters(), lr=0.1), mean_square, micro=5)(batch | {"x": 2 * before})
    assert difference(model, twin) < 1e-6


def test_sparse_batches_travel():
    model = make_model()
    x = torch.eye(8).to_sparse()
    train = MacroStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b["x"].to_dense()).mean(), micro=3
    )
    assert train({"x": x}).micro_batches == 3


@pytest.fixture
def limited():
    """A process that may have so many MiB of the device, beyond what it has already."""

    def limit(megabytes):
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + megabytes * MiB) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def wide_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1)).cuda()


def test_a_batch_that_does_not_fit_trains_and_stays_clear_of_the_edge(limited):
    """65536 samples want more than 3 GiB of activations; 1 GiB is there. In the end the allocator never tries twice."""
    batch = {"x": torch.randn(65536, 64, device="cuda"), "y": torch.randn(65536, 1, device="cuda")}
    model, twin = wide_model(), wide_model()
    train = MacroStep(model, torch.optim.AdamW(model.parameters(), fused=True, eps=1e-5), mean_square)
    limited(1024)
    results = [train(batch) for _ in range(6)]
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    results += [train(batch) for _ in range(4)]
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
    counts = [result.micro_batches for result in results]
    assert counts[0] > 1
    assert counts[-4:] == [counts[-1]] * 4
    again = MacroStep(twin, torch.optim.AdamW(twin.parameters(), fused=True, eps=1e-5), mean_square, micro=2048)
    for _ in range(10):
        again(batch)
    assert difference(model, twin) < 1e-4


def test_one_sample_that_does_not_fit(limited):
    model = wide_model()
    train = MacroStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b["x"]).flatten(1).mean(1).sum()
    )
    limited(64)
    with pytest.raises(FitError, match=r"not even one sample fits into memory: .*[MG]iB more"):
        train({"x": torch.zeros(2, 16384, 64, device="cuda")})
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("nccl")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, about a world of one
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_vote_does_not_wait_for_the_device(wrap):
    """NCCL with a world of one: rows and votes travel on the host, and a window that ran out is done again in place."""
    if wrap == "fsdp2" and not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        pytest.skip("this torch cannot clear away an aborted backward")
    plain = make_model()
    model = copy.deepcopy(plain)
    model = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)
    options = {"gather": "window"} if wrap == "fsdp2" else {}
    tries = []

    def fragile(model, batch):
        tries.append(len(batch["x"]))
        if len(batch["x"]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_square(model, batch)

    batch = whole_batch()
    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), fragile, **options)
    results = [train(batch) for _ in range(4)]  # two held ones, and two in which DDP arranges its buckets
    twin = MacroStep(plain, torch.optim.SGD(plain.parameters(), lr=0.1), mean_square, micro=5)
    for _ in range(4):
        twin(batch)
    assert tries[:3] == [22, 11, 5]
    assert [result.micro_batches for result in results] == [5] * 4
    assert difference(model, plain) < 1e-6
    assert dist.get_backend(train._engine.backend.host_group()) == "gloo"
    with no_host_reads():
        train(batch)
