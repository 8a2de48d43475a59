"""A model whose micro-steps are worth recording, and how the tests of CUDA graphs train it.

Without a GPU, captures are pretended: what is to be replayed is run again. So all but what CUDA itself does is tested
everywhere: which shapes are recorded and when, gradients, totals, refusals.
"""

import contextlib
import copy
import inspect
from typing import ClassVar

import pytest
import torch
from test_gpu import difference
from torch import nn

from macrobatch import MacroStep, causal_lm_loss

WORDS = 61
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DROPOUT = 0.3 if DEVICE == "cuda" else 0.0  # on a CPU, the host draws for it


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
    return Decoder(**options).to(DEVICE, dtype)


def batch_of(samples=13, length=12, seed=0, device=DEVICE):
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


class Pretence:
    """Stands for what surrounds a capture; `under_way` is what is going on."""

    under_way: ClassVar[list[str]] = []

    def __init__(self, *_):
        self.device = torch.device(DEVICE)

    def __enter__(self):
        self.under_way.append("recording")
        return self

    def __exit__(self, *_):
        self.under_way.remove("recording")

    allocating = staticmethod(contextlib.nullcontext)


class PretendedGraph:
    def __init__(self, run):
        self._run = run
        self._leaves = inspect.getclosurevars(run).nonlocals["leaves_of"].values()

    def replay(self):
        """As a real one does: torch does not notice what it writes to."""
        gradients = tuple(leaf.grad for leaf in self._leaves if leaf.grad is not None)
        with torch.autograd._unsafe_preserve_version_counter(gradients):
            self._run()


def pretended_capture(run, *_):
    Pretence.under_way.append("capturing")
    try:
        return PretendedGraph(run), run()
    finally:
        Pretence.under_way.remove("capturing")


def pretended_milliseconds(run, _):
    run()
    return 1.0


def is_capturing():
    return torch.cuda.is_current_stream_capturing() if DEVICE == "cuda" else "capturing" in Pretence.under_way


def is_recording():
    """Warming up, or capturing."""
    if DEVICE == "cuda":
        return torch.cuda.current_stream() != torch.cuda.default_stream()
    return "recording" in Pretence.under_way


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


gpu = pytest.mark.gpu  # what only a real capture shows


def autocast(dtype):
    def loss_fn(model, batch):
        with torch.autocast(DEVICE, dtype):
            return causal_lm_loss(model, batch)

    return loss_fn


def said(caught):
    """The warnings about recordings, of all that were caught."""
    return [str(one.message) for one in caught if "cuda_graph" in str(one.message)]


def beside_eager(model, run):
    """Do the same with a model, recorded, and with its twin; returns how far they are apart, and what came of it."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    found = run(model, True)
    torch.manual_seed(1)
    run(twin, False)
    return difference(model, twin), found
