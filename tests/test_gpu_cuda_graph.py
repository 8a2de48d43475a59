"""Micro-steps recorded as CUDA graphs: what eager ones compute, to the last bit where kernels allow it."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from test_gpu import difference, nccl, no_host_reads
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from macrobatch import MacroStep, by_tokens, causal_lm_loss
from macrobatch.cuda_graph import LIMIT

pytestmark = pytest.mark.gpu
WORDS = 61


class Decoder(nn.Module):
    """A small model of many small kernels, for which a recording pays; embeddings tied, a layer that nothing uses."""

    def __init__(self, width=32, layers=4, dropout=0.0, batch_norm=False, words=WORDS):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(width, width)

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(block(hidden))
        hidden = self.norm(hidden.flatten(0, 1)).view(hidden.shape)
        return self.head(hidden)


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Decoder(**options).to("cuda", dtype)


def batch_of(samples=13, length=12, seed=0, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (samples, length), generator=generator)
    lengths = torch.randint(1, length + 1, (samples,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def trained(model, *, windows=6, cuda_graph, loss_fn=causal_lm_loss, optimizer=None, samples=13, **options):
    """The weights after some windows, the results, and the MacroStep; the random numbers are those of a fresh seed."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, fused=True)
    options = {"micro": 4, "max_norm": 1.0} | options
    train = MacroStep(model, optimizer, loss_fn, cuda_graph=cuda_graph, **options)
    results = [train(batch_of(samples, seed=seed)) for seed in range(windows)]
    return results, train


def recordings(train):
    return [one for one in train._graphs._recordings.values() if one is not None]


def agree(model, **options):
    """Train a model and its twin, recorded and eagerly; returns how far they are apart, and what was recorded."""
    twin = copy.deepcopy(model)
    results, train = trained(model, cuda_graph=True, **options)
    expected, _ = trained(twin, cuda_graph=False, **options)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.items.item() == theirs.items.item()
        assert ours.micro_batches == theirs.micro_batches
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
        if theirs.grad_norm is not None:
            assert ours.grad_norm.item() == pytest.approx(theirs.grad_norm.item(), rel=1e-5)
    assert all(p.grad is None for p in model.parameters())
    return difference(model, twin), recordings(train)


@pytest.fixture(autouse=True)
def always_kept(monkeypatch):
    """Whatever a recording gains: these models are small, and machines are noisy."""
    monkeypatch.setattr("macrobatch.cuda_graph.FASTER", 1e9)


def autocast(dtype):
    def loss_fn(model, batch):
        with torch.autocast("cuda", dtype):
            return causal_lm_loss(model, batch)

    return loss_fn


# ------------------------------------------------------------------------------------------ recorded as eager

SUMS = {"reduction": "sum", "loss_fn": lambda model, batch: causal_lm_loss(model, batch, reduction="sum")}
SAMPLES = {"loss_fn": lambda model, batch: model(batch["input_ids"]).logsumexp(-1).mean()}
CASES = {
    "float32": ({}, {}),
    "float64": ({"dtype": torch.float64}, {}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "wide gradients": ({"dtype": torch.bfloat16}, {"accumulate_dtype": torch.float32}),
    "autocast": ({}, {"loss_fn": autocast(torch.bfloat16)}),
    "dropout": ({"dropout": 0.3}, {}),
    "batch norm": ({"batch_norm": True}, {}),
    "sums": ({}, SUMS),
    "samples as items": ({}, SAMPLES),
    "no clipping": ({}, {"max_norm": None}),
    "skip": ({}, {"nonfinite": "skip"}),
    "auto": ({}, {"micro": "auto"}),
}


@pytest.mark.parametrize("case", CASES)
def test_bitwise_as_eager(case):
    how, options = CASES[case]
    apart, recorded = agree(make(**how), **options)
    assert apart == 0.0
    assert len(recorded) == (1 if case == "auto" else 2)  # of 4 samples and of 1


def test_frozen_parameters_and_a_thaw_between():
    model = make()
    model.embedding.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    for one, cuda_graph in ((model, True), (twin, False)):
        train = MacroStep(
            one, torch.optim.SGD(one.parameters(), lr=0.1), causal_lm_loss, micro=4, cuda_graph=cuda_graph
        )
        for seed in range(4):
            train(batch_of(seed=seed))
        one.embedding.weight.requires_grad_(True)
        for seed in range(4):
            train(batch_of(seed=seed))
        one.eval()  # another mode, other kernels
        for seed in range(3):
            train(batch_of(seed=seed))
        one.train()
    assert difference(model, twin) == 0.0


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


def test_shapes_come_and_go_and_mix_with_eager_ones():
    """Shapes that were seen are replayed, new ones run eagerly in the same window."""
    model = make()
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    sizes = [13, 9, 13, 17, 10, 13, 9, 22, 17, 11, 13, 10]
    for one, cuda_graph in ((model, True), (twin, False)):
        train = MacroStep(
            one, torch.optim.SGD(one.parameters(), lr=0.05), causal_lm_loss, micro=4, cuda_graph=cuda_graph
        )
        for seed, samples in enumerate(sizes):
            train(batch_of(samples, seed=seed))
    assert difference(model, twin) == 0.0


def test_a_parameter_that_nobody_used_keeps_no_gradient():
    """AdamW would move it by its decay, had it a gradient of zero."""
    model = make()
    unused = model.unused.weight.detach().clone()
    _, train = trained(model, cuda_graph=True)
    assert recordings(train)
    assert torch.equal(model.unused.weight, unused)


def test_fresh_random_numbers_in_every_replay():
    seen = []

    def noisy(model, batch):
        loss, items = causal_lm_loss(model, batch)
        noise = torch.rand((), device="cuda")
        return loss + 0 * noise + noise.detach() * 1000, items

    results, train = trained(make(), cuda_graph=True, loss_fn=noisy, windows=8)
    seen = [round(result.loss.item() / 1000, 4) for result in results]
    assert recordings(train)
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
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


def test_inputs_on_the_host_train_as_those_on_the_device():
    model = make()
    twin = copy.deepcopy(model)
    for one, device in ((model, "cpu"), (twin, "cuda")):
        train = MacroStep(one, torch.optim.SGD(one.parameters(), lr=0.1), causal_lm_loss, micro=3)
        for seed in range(5):
            train(batch_of(40, seed=seed, device=device))
    assert difference(model, twin) == 0.0


# ------------------------------------------------------------------------------------------ no trace, and fall-backs


def test_warming_up_leaves_no_trace():
    model = make(dropout=0.2, batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = MacroStep(model, optimizer, causal_lm_loss, micro=4, cuda_graph=True)
    gradients = train._acc._open_gradients()
    cut = train._cut(batch_of())
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.cuda.get_rng_state()
    train._graphs.open(gradients, train._coming(cut), few_shapes=False)
    assert len(recordings(train)) == 2
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert train._graphs._ledger.loss.item() == 0
    train._acc.discard()


def reads(model, batch):
    loss, items = causal_lm_loss(model, batch)
    return loss, int(items.item())


def ends_the_capture(model, batch):
    """What only a capture forbids."""
    torch.cuda.synchronize()
    return causal_lm_loss(model, batch)


@pytest.mark.parametrize("loss_fn", [reads, ends_the_capture])
def test_what_cannot_be_recorded_runs_eagerly_and_says_why_once(loss_fn):
    model = make()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, train = trained(model, cuda_graph=True, loss_fn=loss_fn, windows=6)
    trained(twin, cuda_graph=False, loss_fn=loss_fn, windows=6)
    said = [str(one.message) for one in caught if "cuda_graph" in str(one.message)]
    assert len(said) == 1, said
    assert "run eagerly" in said[0]
    assert not recordings(train)
    assert difference(model, twin) == 0.0
    # and nothing is broken for others
    assert agree(make())[0] == 0.0


@pytest.mark.parametrize("loss_fn", [reads, ends_the_capture])
def test_random_numbers_go_on_after_a_failed_recording(loss_fn):
    model = make(dropout=0.3)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model, cuda_graph=True, loss_fn=loss_fn)
    trained(twin, cuda_graph=False, loss_fn=loss_fn)
    assert difference(model, twin) == 0.0


def with_hook(model):
    model.head.register_forward_hook(lambda *_: None)
    return model


def with_gradient_hook(model):
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize("hook", [with_hook, with_gradient_hook])
def test_hooks_are_not_left_out(hook):
    with pytest.warns(UserWarning, match="has a hook"):
        _, train = trained(hook(make()), cuda_graph=True, windows=3)
    assert not recordings(train)


def test_a_buffer_that_is_replaced_is_seen():
    class Counting(Decoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input_ids):
            self.calls = self.calls + 1
            return super().forward(input_ids)

    model = Counting().cuda()
    with pytest.warns(UserWarning, match="replaces a buffer"):
        trained(model, cuda_graph=True, windows=3)
    assert model.calls.item() == 12


def test_a_shape_that_does_not_gain_stays_eager(monkeypatch):
    monkeypatch.setattr("macrobatch.cuda_graph.FASTER", 0.0)
    _, train = trained(make(), cuda_graph=True)
    assert train._graphs._recordings
    assert not recordings(train)


def test_the_number_of_recordings_is_limited():
    model = make(layers=1)
    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), causal_lm_loss, micro=200, cuda_graph=True)
    sizes = [*range(1, LIMIT + 5)] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for samples in [*sizes, LIMIT + 2, LIMIT + 2]:
            train(batch_of(samples))
    assert [f"{LIMIT} shapes" in str(one.message) for one in caught] == [True]
    assert len(recordings(train)) == LIMIT


def test_checkpointing_falls_back_or_is_right():
    class Checkpointed(Decoder):
        def forward(self, input_ids):
            hidden = self.embedding(input_ids)
            for block in self.blocks:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
            return self.head(hidden)

    torch.manual_seed(0)
    model = Checkpointed().cuda()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model, cuda_graph=True)
        trained(twin, cuda_graph=False)
    assert difference(model, twin) == 0.0


def test_a_nan_is_raised_and_named():
    model = make()
    train = MacroStep(
        model, torch.optim.AdamW(model.parameters(), fused=True), causal_lm_loss, micro=4, max_norm=1.0, cuda_graph=True
    )
    for seed in range(3):
        train(batch_of(seed=seed))
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(Exception, match="window 4"):
        train(batch_of())
        train(batch_of())
    assert torch.equal(weights[-1], list(model.parameters())[-1])


# ------------------------------------------------------------------------------------------ several ranks


@pytest.mark.usefixtures(nccl.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, about a world of one
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_under_ddp(bucket_view, batch_norm):
    model = make(batch_norm=batch_norm)
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    _, train = trained(wrapped, cuda_graph=True)
    trained(twin, cuda_graph=False)
    assert len(recordings(train)) == 2
    assert difference(model, twin) < 1e-6
    batch = batch_of()
    with no_host_reads():
        train(batch)


@pytest.mark.usefixtures(nccl.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp_runs_eagerly_and_says_so():
    model = fully_shard(make())
    with pytest.warns(UserWarning, match="communicate inside micro-steps"):
        _, train = trained(model, cuda_graph=True, windows=2)
    assert train._graphs is None
    assert dist.get_world_size() == 1


# ------------------------------------------------------------------------------------------ memory


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
