"""Micro-steps recorded as CUDA graphs: what eager ones compute, to the last bit where kernels allow it."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import macrobatch._cudagraph.cache as cuda_graph_module
from harness.gpu import difference, no_host_reads
from harness.recorded import (
    DEVICE,
    DROPOUT,
    WORDS,
    Decoder,
    agree,
    autocast,
    batch_of,
    beside_eager,
    gpu,
    make,
    recordings,
    trained,
)
from macrobatch import MacroStep, by_tokens, causal_lm_loss
from macrobatch._cudagraph.capture import CAPTURERS

pytestmark = pytest.mark.usefixtures("captures")

# ------------------------------------------------------------------------------------------ recorded as eager

SUMS = {"reduction": "sum", "loss_fn": lambda model, batch: causal_lm_loss(model, batch, reduction="sum")}
SAMPLES = {"loss_fn": lambda model, batch: model(batch["input_ids"]).logsumexp(-1).mean()}
CASES = {
    "float32": ({}, {}),
    "float64": ({"dtype": torch.float64}, {}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "wide gradients": ({"dtype": torch.bfloat16}, {"accumulate_dtype": torch.float32, "fuse": False}),
    "autocast": ({}, {"loss_fn": autocast(torch.bfloat16), "fuse": False}),
    "batch norm": ({"batch_norm": True}, {}),
    "sums": ({}, SUMS),
    "samples as items": ({}, SAMPLES),
    "no clipping": ({}, {"max_norm": None}),
    "skip": ({}, {"nonfinite": "skip"}),
    "auto": ({}, {"micro": "auto"}),
}


@pytest.mark.parametrize("case", [*CASES, pytest.param("dropout", marks=gpu)])  # on a CPU, the host draws for it
@pytest.mark.filterwarnings("ignore:loss_fn returned a loss without its items")  # it has labels, and does not use them
def test_bitwise_as_eager(case):
    how, options = CASES.get(case, ({"dropout": 0.3}, {}))
    apart, recorded = agree(make(**how), **options)
    assert apart == 0.0
    assert len(recorded) == (1 if case == "auto" else 2)  # of 4 samples and of 1


@gpu
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_with_a_scaler(kind):
    def run(model, cuda_graph):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, **{kind: True})
        results, train = trained(
            model, cuda_graph=cuda_graph, loss_fn=autocast(torch.float16), optimizer=optimizer, scaler=scaler
        )
        return [r.loss.item() for r in results], scaler.get_scale(), train

    model = make()
    twin = copy.deepcopy(model)
    losses, scale, train = run(model, True)
    expected, expected_scale, _ = run(twin, False)
    assert len(recordings(train)) == 2
    assert losses == pytest.approx(expected, rel=1e-6)
    assert scale == expected_scale
    assert difference(model, twin) == 0.0


def test_frozen_parameters_a_thaw_and_another_mode():
    def run(model, cuda_graph):
        model.embedding.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=cuda_graph)
        recorded = []
        for change in (lambda: None, lambda: model.embedding.weight.requires_grad_(True), model.eval):
            change()
            for seed in range(3):
                train(batch_of(seed=seed))
            recorded.append(cuda_graph and len(recordings(train)))
        return recorded

    apart, recorded = beside_eager(make(dropout=DROPOUT), run)
    assert recorded == [2, 2, 2]
    assert apart == 0.0


@gpu
def test_autocast_around_the_call():
    """What it has cast before a recording begins must not be taken for a part of it."""

    def run(model, cuda_graph):
        train = MacroStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), causal_lm_loss, micro=4, cuda_graph=cuda_graph
        )
        for seed in range(6):
            with torch.autocast("cuda", torch.bfloat16):
                train(batch_of(seed=seed))
        return cuda_graph and len(recordings(train))

    apart, recorded = beside_eager(make(), run)
    assert recorded == 2
    assert apart == 0.0


def test_shapes_come_and_go_and_mix_with_eager_ones(monkeypatch):
    """Shapes that were seen are replayed, new ones run eagerly in the same window. None is recorded twice."""
    captures = []

    class Counting(CAPTURERS[DEVICE]):
        def capture(self, *what):
            captures.append(what)
            return super().capture(*what)

    monkeypatch.setitem(CAPTURERS, DEVICE, Counting)
    monkeypatch.setattr(cuda_graph_module, "MAX_AT_ONCE", 1)

    def run(model, cuda_graph):
        train = MacroStep(
            model, torch.optim.SGD(model.parameters(), lr=0.05), causal_lm_loss, micro=4, cuda_graph=cuda_graph
        )
        for seed, samples in enumerate([13, 9, 13, 17, 10, 13, 9, 22, 17, 11, 13, 10]):
            train(batch_of(samples, length=10 if seed == 8 else 12, seed=seed))
        return cuda_graph and len(recordings(train))

    apart, recorded = beside_eager(make(), run)
    assert recorded == len(captures) == 3  # of 4, 1 and 2 samples; 3 came once
    assert apart == 0.0


def test_a_parameter_that_nobody_used_keeps_no_gradient():
    """AdamW would move it by its decay, had it a gradient of zero."""
    model = make()
    unused = model.unused.weight.detach().clone()
    _, train = trained(model, cuda_graph=True)
    assert recordings(train)
    assert torch.equal(model.unused.weight, unused)
    assert id(model.unused.weight) not in train._graphs._recorder._buffers  # nor memory for one


def test_a_parameter_that_some_shapes_use():
    """In windows of the others it has no gradient."""

    class Branching(Decoder):
        def forward(self, input_ids):
            hidden = self.embedding(input_ids)
            if input_ids.shape[1] == 12:
                hidden = self.unused(hidden)
            return self.head(self.blocks[0](hidden))

    def run(model, cuda_graph):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5, fused=True)
        train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=cuda_graph)
        for seed, length in enumerate([12, 12, 10, 10, 12, 10, 10, 12]):
            train(batch_of(12, length, seed=seed))
        return cuda_graph and len(recordings(train))

    torch.manual_seed(0)
    apart, recorded = beside_eager(Branching().to(DEVICE), run)
    assert recorded == 2
    assert apart == 0.0


@gpu
def test_fresh_random_numbers_in_every_replay():
    def noisy(model, batch):
        return model(batch["input_ids"]).mean() * 0 + torch.rand((), device="cuda"), len(batch["input_ids"])

    model = make()
    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.0), noisy, micro=4, cuda_graph=True)
    batch = batch_of(12)
    losses = [train(batch).loss.item() for _ in range(8)]
    assert recordings(train)
    assert len(set(losses)) == len(losses)


WEIGHED = {  # what a loss is a mean over, and how many recordings 4 samples and 1, in tensors of one shape, need then
    "samples": (lambda loss, batch: loss, 2),
    "items": (lambda loss, batch: (loss, (batch != 0).sum()), 1),
    "terms, one by samples": (lambda loss, batch: {"a": (loss, (batch != 0).sum()), "b": loss}, 2),
    "terms": (lambda loss, batch: {"a": (loss, (batch != 0).sum())}, 1),
}


@pytest.mark.filterwarnings("ignore:loss_fn returned a loss without its items")
@pytest.mark.parametrize("kind", WEIGHED)
def test_samples_count_where_no_shape_shows_them(kind):
    """Packed into one row of a fixed length, as many samples as there are."""
    returned, needed = WEIGHED[kind]

    def packed(samples):
        row = torch.zeros(64, dtype=torch.long)
        row[: sum(map(len, samples))] = torch.cat(samples)
        return row[None]

    def counts(samples):
        return {"a": sum(map(len, samples)), "b": len(samples)} if "samples" in kind else {"a": sum(map(len, samples))}

    def run(model, cuda_graph):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = MacroStep(
            model,
            optimizer,
            lambda model, batch: returned(model(batch).logsumexp(-1).sum() / 64, batch),  # which nobody can read
            micro=4,
            cuda_graph=cuda_graph,
            collate=packed,
            counts=counts if "terms" in kind else None,
        )
        results = [train([torch.full((9 + n % 3,), n % WORDS + 1) for n in range(13)]) for _ in range(4)]
        items = [result.items.item() for result in results] if "terms" not in kind else None
        return items, cuda_graph and len(recordings(train))

    apart, (items, recorded) = beside_eager(make(), run)
    assert items == {"samples": [13] * 4, "items": [129] * 4}.get(kind)
    assert recorded == needed
    assert apart == 0.0


@pytest.mark.parametrize("place", ["cpu", DEVICE])
def test_by_tokens_rounds_to_few_shapes(place):
    model = make(torch.float64)
    twin = copy.deepcopy(model)
    counts = []
    for one, cuda_graph in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        train = MacroStep(one, optimizer, causal_lm_loss, micro=by_tokens(256), cuda_graph=cuda_graph)
        for seed in range(12):
            train(batch_of(23, 90 + seed, seed=seed, device=place))
        counts.append(train)
    assert difference(model, twin) < 1e-12
    assert 4 < len(recordings(counts[0])) < 24


# ------------------------------------------------------------------------------------------ the published failures


def test_four_accumulated_steps_are_their_sum():
    """What a graphed callable gives under accumulation elsewhere: a quarter of the sum, the last step's alone."""
    model = make(torch.float64)
    twin = copy.deepcopy(model)
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    )
    train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=True)
    batch = batch_of(16)
    for _ in range(4):
        train(batch)
    causal_lm_loss(twin, batch)[0].backward()
    expected = [p.grad for p in twin.parameters() if p.grad is not None]
    assert recordings(train)
    for gradients in seen:
        assert max((a - b).abs().max().item() for a, b in zip(gradients, expected, strict=True)) < 1e-15


def test_outputs_are_not_overwritten_by_a_subsequent_run():
    """Losses of windows that are read long after others have run."""
    model = make()
    twin = copy.deepcopy(model)
    results, _ = trained(model, cuda_graph=True, windows=10)
    expected, _ = trained(twin, cuda_graph=False, windows=10)
    assert [r.loss.item() for r in results] == pytest.approx([r.loss.item() for r in expected], rel=1e-6)
    assert len({r.items.item() for r in results}) > 1


@gpu
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(dynamic):
    model = make()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, dynamic=dynamic)
    results, train = trained(compiled, cuda_graph=True)
    expected, _ = trained(twin, cuda_graph=False)
    assert len(recordings(train)) == 2
    assert [r.loss.item() for r in results] == pytest.approx([r.loss.item() for r in expected], rel=1e-5)
    assert difference(model, twin) < 1e-4  # other kernels, and AdamW


# ------------------------------------------------------------------------------------------ nothing waits


@gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("place", ["cpu", "pinned", "cuda"])
def test_no_host_reads(place, cuda_graph):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train = MacroStep(model, optimizer, causal_lm_loss, micro=4, max_norm=1.0, cuda_graph=cuda_graph)
    batch = batch_of(device="cuda" if place == "cuda" else "cpu")
    if place == "pinned":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    for _ in range(4):
        train(batch)
    torch.cuda.synchronize()
    reads = []

    def loss_fn(model, batch):
        assert all(tensor.device.type == "cuda" for tensor in batch.values())
        return causal_lm_loss(model, batch)

    train._loss_fn = loss_fn
    if cuda_graph:
        assert recordings(train)
    # Items that only the device knows may sum to zero: one flag is read, after the step is queued.
    with no_host_reads():
        reads = [train(batch) for _ in range(3)]
    assert [result.step for result in reads] == [5, 6, 7]


@gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_come_from_pinned_memory_beside_the_computing(pinned):
    """Also those that were trimmed: rows of a pinned tensor that lie apart in it."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(48))
    batch = batch_of(device="cpu")
    by_length = batch["attention_mask"].sum(1).argsort()  # so that micro-batches are views, trimmed
    batch = {name: tensor[by_length] for name, tensor in batch.items()}
    if pinned:
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    train(batch)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities) as profile:
            train(batch)
            torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event for event in on_device if event.name.startswith("Memcpy HtoD")]
    inputs = [event for event in copies if "Pinned" in event.name]
    assert len(inputs) >= 3 * 3  # as many tensors, and at least as many micro-batches
    assert not [event.name for event in copies if "Pageable" in event.name]
    streams = {event.device_resource_id for event in inputs}
    assert len(streams) == 1
    computing = {event.device_resource_id for event in on_device if not event.name.startswith("Mem")}
    assert computing
    assert streams.isdisjoint(computing)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_inputs_on_the_host_train_as_those_on_the_device(cuda_graph):
    model = make()
    twin = copy.deepcopy(model)
    for one, device in ((model, "cpu"), (twin, DEVICE)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        train = MacroStep(one, optimizer, causal_lm_loss, micro=3, cuda_graph=cuda_graph and device == "cpu")
        for seed in range(5):
            train(batch_of(40, seed=seed, device=device))
    assert difference(model, twin) == 0.0


# ------------------------------------------------------------------------------------------ memory


@gpu
def test_reserved_memory_is_that_of_eager_shapes():
    """One pool for all shapes, and nothing left of warming up."""

    def reserved(cuda_graph):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = make(width=512, layers=8, words=8192)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        train = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(8192), cuda_graph=cuda_graph)
        for seed in range(8):
            train(batch_of(128, 256, seed=seed % 3, device="cpu"))
        if cuda_graph:
            assert len(recordings(train)) > 4
        return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()

    with contextlib.suppress(Exception):
        reserved(False)
    eager, eager_peak = reserved(False)
    recorded, recorded_peak = reserved(True)
    print(
        f"reserved: eager {eager / 2**20:.0f} (peak {eager_peak / 2**20:.0f}) MiB, "
        f"recorded {recorded / 2**20:.0f} (peak {recorded_peak / 2**20:.0f}) MiB"
    )
    assert recorded <= 1.15 * eager
    assert recorded_peak <= 1.15 * eager_peak


@gpu
def test_memory_is_given_back():
    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() / 2**20

    before, model = reserved(), make(width=256, layers=8)
    _, train = trained(model, cuda_graph=True, samples=2048, micro=512)
    assert recordings(train)
    held = reserved()
    del train
    assert held - before > 200
    assert reserved() - before < 120  # the model, and workspaces of libraries


@gpu
def test_what_is_not_kept_costs_no_memory(monkeypatch):
    def reserved(cuda_graph):
        gc.collect()
        torch.cuda.empty_cache()
        model = make(width=512, layers=8, words=8192)
        _, train = trained(model, cuda_graph=cuda_graph, samples=512, micro=256, windows=3)
        if cuda_graph:
            assert not recordings(train)
        return torch.cuda.memory_reserved()

    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_TIME_SHARE", 0.0)
    reserved(False)
    assert reserved(True) <= 1.15 * reserved(False)


@gpu
def test_a_recording_is_kept_where_it_pays(monkeypatch):
    """By the real bar: many small kernels gain much, one large one gains nothing."""
    monkeypatch.undo()
    _, train = trained(make(layers=12), cuda_graph=True)
    assert len(recordings(train)) == 2

    def is_kept() -> bool:
        model = nn.Linear(8192, 8192, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = MacroStep(model, optimizer, lambda model, x: model(x).square().mean(), micro=4096, cuda_graph=True)
        for _ in range(2):
            train(torch.randn(8192, 8192, device="cuda"))
        return bool(recordings(train))

    assert not all(is_kept() for _ in range(3))  # other processes on the device can slow the eager runs alone
