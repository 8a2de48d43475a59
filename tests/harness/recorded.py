"""A model whose micro-steps are worth recording, and how the tests of CUDA graphs train it.

Without a GPU, captures are pretended: what is to be replayed is run again. So all but what CUDA itself does is tested
everywhere: which shapes are recorded and when, gradients, totals, refusals.
"""

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

from harness.gpu import difference
from macrobatch import MacroStep, StepResult, causal_lm_loss
from macrobatch._cudagraph.cache import RecordingCache
from macrobatch._cudagraph.capture import Capturer, Graph
from macrobatch._cudagraph.recorded_step import Recording

T = TypeVar("T")

WORDS = 61
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DROPOUT = 0.3 if DEVICE == "cuda" else 0.0  # on a CPU, the host draws for it


class Decoder(nn.Module):
    """A small model of many small kernels, for which a recording pays; embeddings tied, a layer that nothing uses."""

    def __init__(
        self, width: int = 32, layers: int = 4, dropout: float = 0.0, batch_norm: bool = False, words: int = WORDS
    ) -> None:
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

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(block(hidden))
        hidden = self.norm(hidden.flatten(0, 1)).view(hidden.shape)
        return self.head(hidden)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).to(DEVICE, dtype)


def batch_of(samples: int = 13, length: int = 12, seed: int = 0, device: str = DEVICE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (samples, length), generator=generator)
    lengths = torch.randint(1, length + 1, (samples,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def trained(
    model: nn.Module,
    *,
    windows: int = 6,
    cuda_graph: bool,
    loss_fn: Any = causal_lm_loss,
    optimizer: torch.optim.Optimizer | None = None,
    samples: int = 13,
    **options: Any,
) -> tuple[list[StepResult], MacroStep]:
    """Train for some windows; returns the results, and the MacroStep. The random numbers are those of a fresh seed."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, fused=True)
    options = {"micro": 4, "max_norm": 1.0} | options
    train = MacroStep(model, optimizer, loss_fn, cuda_graph=cuda_graph, **options)
    results = [train(batch_of(samples, seed=seed)) for seed in range(windows)]
    return results, train


def recordings(train: MacroStep) -> list[Recording]:
    assert isinstance(train._graphs, RecordingCache)
    return [one for one in train._graphs._recordings.values() if one is not None]


def agree(model: nn.Module, **options: Any) -> tuple[float, list[Recording]]:
    """Train a model and its twin, recorded and eagerly; returns how far they are apart, and what was recorded."""
    twin = copy.deepcopy(model)
    results, train = trained(model, cuda_graph=True, **options)
    expected, _ = trained(twin, cuda_graph=False, **options)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.items.item() == theirs.items.item()
        assert ours.micro_batches == theirs.micro_batches
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
        if theirs.grad_norm is not None:
            assert ours.grad_norm is not None
            assert ours.grad_norm.item() == pytest.approx(theirs.grad_norm.item(), rel=1e-5)
    assert all(p.grad is None for p in model.parameters())
    return difference(model, twin), recordings(train)


class PretendedCapturer(Capturer):
    """Captures on a CPU: what is to be replayed is run again. `under_way` is what is going on."""

    under_way: ClassVar[list[str]] = []

    def new_pool(self) -> object:
        return object()

    @contextlib.contextmanager
    def claim(self, pool: object) -> Iterator[Any]:
        with self._going_on("recording"), numbers_on_device():
            yield PretendedClaim()

    def warming_up(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], T], pool: object) -> tuple[Graph, T]:
        with self._going_on("capturing"), Writes() as writes:
            returned = run()
        return PretendedGraph(run, writes), returned

    def milliseconds(self, run: Callable[[], object]) -> float:
        run()
        return 1.0

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        self.under_way.append(what)
        try:
            yield
        finally:
            self.under_way.remove(what)


class TwinsCapturer(PretendedCapturer):
    """Under DDP, recordings are of twins of the parameters: what is run again must find them in the `model`."""

    model: ClassVar[nn.Module]

    def capture(self, run: Callable[[], T], pool: object) -> tuple[Graph, T]:
        places = [(part._parameters, dict(part._parameters)) for part in self.model.modules()]

        def run_with_twins() -> T:
            before = [(own, dict(own)) for own, _ in places]
            for own, twins in places:
                own.update(twins)
            try:
                return run()
            finally:
                for own, parameters in before:
                    own.update(parameters)

        return super().capture(run_with_twins, pool)


class PretendedClaim:
    allocating = staticmethod(contextlib.nullcontext)


class Writes(TorchDispatchMode):
    """Notes the tensors that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = named.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    self._seen[id(tensor)] = weakref.ref(tensor)
        return func(*args, **(kwargs or {}))

    def lasting(self) -> tuple[Tensor, ...]:
        """Those that somebody still holds."""
        return tuple(tensor for one in self._seen.values() if (tensor := one()) is not None)


class PretendedGraph:
    def __init__(self, run: Callable[[], object], writes: Writes) -> None:
        self._run, self._writes = run, writes

    def replay(self) -> None:
        """As a real one does: torch does not notice what it writes to."""
        with numbers_on_device(), _unsafe_preserve_version_counter(self._writes.lasting()):
            self._run()


def numbers_on_device() -> contextlib.AbstractContextManager[object]:
    """Read no tensor on the host, as if it were on a GPU: a capture would freeze its value."""
    return mock.patch("macrobatch._border.arguments.number_on_host", return_value=None)


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing() if DEVICE == "cuda" else "capturing" in PretendedCapturer.under_way


def is_recording() -> bool:
    """Warming up, or capturing."""
    if DEVICE == "cuda":
        return torch.cuda.current_stream() != torch.cuda.default_stream()
    return "recording" in PretendedCapturer.under_way


gpu = pytest.mark.gpu  # what only a real capture shows


def autocast(dtype: torch.dtype) -> Any:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE, dtype):
            return causal_lm_loss(model, batch)

    return loss_fn


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    """The warnings about recordings, of all that were caught."""
    return [str(one.message) for one in caught if "cuda_graph" in str(one.message)]


def beside_eager(model: nn.Module, run: Callable[[Any, bool], T]) -> tuple[float, T]:
    """Do the same with a model, recorded, and with its twin; returns how far they are apart, and what came of it."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    found = run(model, True)
    torch.manual_seed(1)
    run(twin, False)
    return difference(model, twin), found
