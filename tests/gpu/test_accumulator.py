"""What only a GPU can show: nothing waits for the host, and the same figures come out."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from harness.gpu import difference, make_data, make_model, no_host_reads
from macrobatch import Accumulator
from macrobatch.errors import NonFiniteError

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, eps=1e-5, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=1e-2, momentum=0.9, **how),
}
HOW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ITEMS = {
    "int": len,
    "tensor": lambda x: torch.full((), len(x), device="cuda"),
    "host tensor": lambda x: torch.tensor(len(x)),
}


def train(acc, model, data, items=len, autocast=None):
    results = []
    for x, y in acc.batches(data):
        with torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext():
            loss = nn.functional.mse_loss(model(x), y)
        acc.backward(loss, items=items(x))
        if result := acc.step():
            results.append(result)
    return results


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["one loss", "terms"])
def test_numbers_on_their_way_to_the_host_are_not_read_before_they_are_there(kind, scaled):
    """What the device is to copy there lies behind a long queue of other work."""
    work = torch.ones(4096, 4096, device="cuda")

    def travelling(number):
        for _ in range(20):
            torch.mm(work, work)
        return number.to("cpu", non_blocking=True)

    def trained(send):
        torch.manual_seed(0)
        model, data = make_model(torch.float32), make_data(torch.float32)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
        named = {"counts": lambda batch: {"mse": send(torch.tensor(len(batch[0]), device="cuda"))}}
        options = named if kind == "terms" else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acc = Accumulator(model, optimizer, steps=len(data), scaler=scaler, **options)
        for x, y in acc.batches(data):
            loss = send(nn.functional.mse_loss(model(x), y))
            items = send(torch.tensor(len(x), device="cuda"))
            acc.backward({"mse": (loss, items)}) if kind == "terms" else acc.backward(loss, items=items)
            result = acc.step()
        return model, result

    (model, late), (other, early) = trained(travelling), trained(lambda number: number)
    assert difference(model, other) < 1e-6
    assert late.items.item() == early.items.item()
    assert abs(late.loss.item() - early.loss.item()) < 1e-6


def train_whole(model, optimizer, data, steps, max_norm):
    for start in range(0, len(data), steps):
        x, y = (torch.cat(part) for part in zip(*data[start : start + steps], strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_trains_as_the_whole_batch(dtype, bound, kind, how, items, max_norm):
    model, data = make_model(dtype), make_data(dtype)
    whole = copy.deepcopy(model)
    acc = Accumulator(model, OPTIMIZERS[kind](model.parameters(), **HOW[how]), steps=4, max_norm=max_norm)
    train(acc, model, data * 3, ITEMS[items])
    train_whole(whole, OPTIMIZERS[kind](whole.parameters(), **HOW[how]), data * 3, 4, max_norm)
    assert difference(model, whole) < bound


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision(dtype, how, items, max_norm):
    """The factor is float32, whatever the gradients are: what differs from the whole batch is their own rounding."""
    model, data = make_model(dtype), make_data(dtype)
    whole = copy.deepcopy(model)
    acc = Accumulator(model, OPTIMIZERS["SGD"](model.parameters(), **HOW[how]), steps=4, max_norm=max_norm)
    train(acc, model, data, ITEMS[items])
    train_whole(whole, OPTIMIZERS["SGD"](whole.parameters(), **HOW[how]), data, 4, max_norm)
    assert difference(model, whole) < 2e-2


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("items", ["int", "tensor"])
@pytest.mark.parametrize("how", HOW)
def test_no_host_reads(how, items, max_norm):
    """Whole windows with their steps. (What is read after a step comes by a pinned copy and an event.)"""
    model, data = make_model(), make_data()
    acc = Accumulator(model, OPTIMIZERS["AdamW"](model.parameters(), **HOW[how]), steps=2, max_norm=max_norm)
    train(acc, model, data, ITEMS[items])
    torch.cuda.synchronize()
    with no_host_reads():
        results = train(acc, model, data, ITEMS[items])
    assert [result.step for result in results] == [4, 5, 6]


def test_the_watch_sees_a_host_read():
    with pytest.raises(RuntimeError, match="synchronizing"), no_host_reads():
        torch.ones((), device="cuda").item()


def test_scaler_without_a_host_read():
    model, data = make_model(), make_data()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)  # overflows until it has come down
    acc = Accumulator(model, OPTIMIZERS["AdamW"](model.parameters(), fused=True), steps=2, scaler=scaler)
    before = copy.deepcopy(model)
    with no_host_reads():
        results = train(acc, model, data, autocast=torch.float16)
        unchanged = copy.deepcopy(model)
        for _ in range(8):
            results += train(acc, model, data, autocast=torch.float16)
    skipped = [bool(result.skipped) for result in results]
    assert skipped[:3] == [True, True, True]
    assert difference(unchanged, before) == 0.0
    assert not skipped[-1]
    assert [int(result.step) for result in results] == [n - sum(skipped[:n]) for n in range(1, len(results) + 1)]
    assert acc.optimizer_step == skipped.count(False)
    assert scaler.get_scale() == 2.0 ** (24 - sum(skipped))


@pytest.mark.parametrize("how", HOW)
def test_scaler_with_a_scheduler(how):
    model, data = make_model(), make_data()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), **HOW[how])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    acc = Accumulator(model, optimizer, steps=2, scaler=scaler, scheduler=scheduler)
    results = [result for _ in range(6) for result in train(acc, model, data, autocast=torch.float16)]
    assert all(type(result.skipped) is bool for result in results)
    taken = sum(not result.skipped for result in results)
    assert 0 < taken < len(results)
    assert scheduler.last_epoch == taken == acc.optimizer_step


@pytest.mark.parametrize("how", HOW)
def test_raise_names_the_window(how):
    model, data = make_model(), make_data()
    acc = Accumulator(model, OPTIMIZERS["AdamW"](model.parameters(), **HOW[how]), steps=2)
    train(acc, model, data)
    before = copy.deepcopy(model)
    poisoned = [(x * math.inf, y) for x, y in data[:2]]
    with pytest.raises(NonFiniteError, match="window 4 "):
        train(acc, model, poisoned)
    if how == "fused":
        assert difference(model, before) == 0.0
        assert acc.optimizer_step == 3


@pytest.mark.parametrize("how", HOW)
def test_skip_leaves_everything_as_it_was(how):
    model, data = make_model(), make_data()
    optimizer = OPTIMIZERS["SGD"](model.parameters(), **HOW[how])
    acc = Accumulator(model, optimizer, steps=2, nonfinite="skip")
    before = copy.deepcopy(model)
    (result,) = train(acc, model, [(x * math.nan, y) for x, y in data[:2]])
    assert result.skipped is True
    assert difference(model, before) == 0.0
    train_whole(before, OPTIMIZERS["SGD"](before.parameters(), **HOW[how]), data, 2, None)
    train(acc, model, data)
    assert difference(model, before) < 2e-6


def test_accumulate_dtype():
    model = nn.Linear(64, 64, bias=False).to("cuda", torch.bfloat16)
    data = torch.randn(64, 16, 64, device="cuda", dtype=torch.bfloat16)
    acc = Accumulator(
        model, OPTIMIZERS["AdamW"](model.parameters(), fused=True), steps=64, accumulate_dtype=torch.float32
    )
    total = torch.zeros(64, 64, device="cuda")
    for x in acc.batches(data):
        (gradient,) = torch.autograd.grad(model(x).float().square().sum(), model.weight)
        total += gradient.float()
        acc.backward(model(x).float().square().sum(), items=1)
        if acc.is_last:
            error = (model.weight.grad - total).abs().max() / total.abs().max()
            assert error < 1e-6
        acc.step()
    assert acc.optimizer_step == 1


@pytest.mark.filterwarnings("ignore")  # torch has several for whoever compiles
def test_compiled():
    model, data = make_model(), make_data(sizes=(4, 4, 4, 4))
    whole = copy.deepcopy(model)
    compiled = torch.compile(model)
    train(Accumulator(compiled, OPTIMIZERS["AdamW"](model.parameters(), fused=True), steps=2), compiled, data)
    train_whole(whole, OPTIMIZERS["AdamW"](whole.parameters(), fused=True), data, 2, None)
    assert difference(model, whole) < 2e-6


def test_memory_does_not_grow_with_steps():
    peaks = []
    for steps in (2, 2, 64):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
        acc = Accumulator(model, OPTIMIZERS["AdamW"](model.parameters(), fused=True), steps=steps, max_norm=1.0)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        for _ in range(2 * steps):
            with acc.micro_batch():
                acc.backward(model(torch.ones(256, 512, device="cuda")).square().mean(), items=256)
            acc.step()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del model, acc
    assert peaks[2] <= 1.02 * peaks[1]


def test_memory_is_that_of_the_loop_by_hand():
    """Also when one window follows another: no gradient of the first is left then."""

    def peak(is_by_hand: bool) -> int:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), fused=True)
        acc = Accumulator(model, optimizer, steps=2, max_norm=1.0, reduction="sum")
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        for number in range(6):
            x = torch.ones(256, 1024, device="cuda")
            if not is_by_hand:
                with acc.micro_batch():
                    acc.backward(model(x).square().sum(), items=256)
                acc.step()
                continue
            (model(x).square().sum() / 512).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - base

    peak(True), peak(False)  # workspaces
    assert peak(False) <= 1.02 * peak(True)


WRAPPED = {
    "DDP": lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[0]),
    "FSDP2": fully_shard,
    "FSDP1": lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=0),
}


@pytest.mark.usefixtures("nccl")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, about a world of one
@pytest.mark.parametrize("options", [{}, {"sync": "micro"}, {"gather": "window"}], ids=str)
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_ranks_without_host_reads(wrapper, options):
    """One rank, but over the real backend: what travels does so without the host."""
    if "gather" in options and wrapper != "FSDP2":
        pytest.skip("an option of FSDP2")
    model, data = make_model(), make_data()
    whole = copy.deepcopy(model)
    wrapped = WRAPPED[wrapper](model)
    acc = Accumulator(wrapped, OPTIMIZERS["AdamW"](wrapped.parameters(), fused=True), steps=3, max_norm=0.1, **options)
    results = train(acc, wrapped, data)
    batches = acc.batches(data)
    x, y = next(batches)  # the lengths are exchanged here
    torch.cuda.synchronize()
    with no_host_reads():
        for _ in range(3):
            acc.backward(nn.functional.mse_loss(wrapped(x), y), items=len(x))
            acc.step()
            x, y = next(batches)
    acc.discard()
    assert [result.step for result in results] == [1, 2]
    train_whole(whole, OPTIMIZERS["AdamW"](whole.parameters(), fused=True), data + data[:3], 3, 0.1)
    assert difference(model, whole) < 2e-6


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_another_default_dtype(default_dtype, default, how, max_norm):
    """A step is exact, and a NaN is never read as fine: the number that tells it is a float32 whatever the default."""
    torch.manual_seed(0)
    model, data = make_model(), make_data(sizes=(4, 2))
    whole = copy.deepcopy(model)
    default_dtype(default)
    acc = Accumulator(model, OPTIMIZERS["AdamW"](model.parameters(), **HOW[how]), steps=2, max_norm=max_norm)
    train(acc, model, data)
    default_dtype(torch.float32)
    train_whole(whole, OPTIMIZERS["AdamW"](whole.parameters()), data, 2, max_norm)
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    default_dtype(default)
    with pytest.raises(NonFiniteError):
        for x, y in acc.batches(data):
            acc.backward(nn.functional.mse_loss(model(x), y) * math.nan, items=len(x))
            acc.step()
        acc.state_dict()


@pytest.mark.parametrize("items", ITEMS)
def test_one_element_parameters_through_views(items):
    """Their gradients are taken over from the seed of the backward, which must not be used again."""

    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.offsets = nn.Linear(8, 1), nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(2))

        def forward(self, x):
            return self.net(x)

    model = Offset().cuda().double()
    whole, data = copy.deepcopy(model), make_data(torch.float64, sizes=(5, 2, 7))
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3, max_norm=math.inf)
    for x, y in acc.batches(data):
        loss = nn.functional.mse_loss(model(x), y) + sum(offset.squeeze() for offset in model.offsets)
        acc.backward(loss, items=ITEMS[items](x))
        acc.step()
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    (nn.functional.mse_loss(whole(x), y) + sum(offset.squeeze() for offset in whole.offsets)).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
