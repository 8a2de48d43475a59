"""Memory that runs out, planted anywhere: the result is bitwise that of a run that knew the size from the start."""

import copy
import gc
import json
import os
import pickle
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from macrobatch import MacroStep, StepResult, by_tokens
from macrobatch._cut.memory import FittingSizes, Pressure, is_out_of_memory
from macrobatch._cut.samples import Shape, TensorBatch, samples_of
from macrobatch.errors import FitError, UsageError

FEATURES = 6
WHERES = ("forward", "loss", "backward", "half-way")

GPU_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096000 bytes. Error code 12 (Cannot allocate memory)"
)


def wrapped(cause: BaseException) -> BaseException:
    error = ValueError("the step failed")
    error.__cause__ = cause
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "torch": lambda: torch.OutOfMemoryError(GPU_TEXT),
    "CPU": lambda: RuntimeError(CPU_TEXT),
    "Python": MemoryError,
    "C++": lambda: RuntimeError("std::bad_alloc"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "wrapped": lambda: wrapped(RuntimeError(CPU_TEXT)),
    "wrapped twice": lambda: wrapped(wrapped(torch.OutOfMemoryError(GPU_TEXT))),
}


# --------------------------------------------------------------------------------------------------------- vocabulary


class Token:
    """Something that lives as long as the graph of a micro-batch."""


class Trap(torch.autograd.Function):
    """Does nothing, but may fail in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spring: Callable[[], None], token: Token) -> Tensor:
        ctx.spring, ctx.token = spring, token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.spring()
        return gradient, None, None


@dataclass
class Faults:
    """Says when memory runs out: `due(samples, turn, attempt)`, at one place of a micro-step, with one kind of error.

    It watches that nothing of a failed attempt is alive when the next begins, and notes what was tried.
    """

    due: Callable[[int, int, int], bool] = lambda samples, turn, attempt: False
    where: str = "forward"
    error: str = "torch"
    turn: int = 0
    attempt: int = 0
    samples: int = 0
    tried: list[int] = field(default_factory=list)  # the first micro-batch of every attempt
    alive: list[weakref.ref] = field(default_factory=list)  # of the attempt under way

    def begin_window(self) -> None:
        self.turn = self.attempt = 0
        self.alive = []

    def begin(self, samples: int) -> Token:
        if self.turn == 0:
            assert [ref() for ref in self.alive if ref() is not None] == []
            self.alive = []
            self.tried.append(samples)
        self.turn, self.samples = self.turn + 1, samples
        token = Token()
        self.alive.append(weakref.ref(token))
        return token

    def at(self, where: str) -> None:
        if where == self.where and self.due(self.samples, self.turn - 1, self.attempt):
            self.turn, self.attempt = 0, self.attempt + 1
            raise ERRORS[self.error]()


class Noisy(nn.Module):
    """All that a forward can change: statistics, and the random numbers of torch, Python and numpy."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(2)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(FEATURES, 1)
        self.faults = faults

    def forward(self, x: Tensor) -> Tensor:
        token = self.faults.begin(len(x))
        h = self.norm(self.first(x).view(len(x), 2, -1)).flatten(1)  # one sample has statistics too
        h = torch.tanh(self.dropout(h)) * (1 + random.random() + np.random.rand())
        self.faults.alive.append(weakref.ref(h))
        self.faults.at("forward")
        h = Trap.apply(h, lambda: self.faults.at("half-way"), token)  # by then `last` has its gradient
        return Trap.apply(self.last(h), lambda: self.faults.at("backward"), token)


@dataclass
class Run:
    """A model in training, with all that must be as if nothing had happened."""

    faults: Faults = field(default_factory=Faults)
    micro: Any = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        self.model = Noisy(self.faults)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if self.scaled else None
        self.train = self.make(self.micro)

    def make(self, micro: Any) -> MacroStep:
        options = {"scheduler": self.scheduler, "scaler": self.scaler, "max_norm": 0.5} | self.options
        return MacroStep(self.model, self.optimizer, self.loss, micro=micro, **options)

    def loss(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        self.faults.at("loss")
        return loss, torch.tensor(len(x))

    def __call__(self, batch: Any) -> StepResult:
        self.faults.begin_window()
        self.results.append(self.train(batch))
        return self.results[-1]

    def over(self, batches: Iterable[Any]) -> dict[str, Any]:
        """How all is left after some windows."""
        for given in batches:
            self(given)
        return self.state()

    def cut_by(self, size: int, batch: Tensor) -> StepResult:
        """A window of that size from the start, whatever the ones before were cut by."""
        state, self.train = self.train.state_dict(), self.make(size)
        self.train.load_state_dict(state)
        return self(batch)

    def state(self) -> dict[str, Any]:
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "gradients": [p.grad is None for p in self.model.parameters()],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": dict(self.scheduler.state_dict()),
            "scaler": self.scaler and dict(self.scaler.state_dict()),
            "counts": self.train.state_dict(),
            "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1]), np.random.get_state()[1].copy()],
            "results": list(map(vars, self.results)),
        }


def same(found: Any, expected: Any) -> None:
    """To the last bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
    else:
        assert found == expected


def batch(samples: int, seed: int = 0, features: int = FEATURES) -> Tensor:
    return torch.randn(samples, features, generator=torch.Generator().manual_seed(seed))


def larger_than(size: int) -> Callable[[int, int, int], bool]:
    return lambda samples, turn, attempt: samples > size


def script(*turns: int) -> Callable[[int, int, int], bool]:
    """Attempt after attempt, the turn at which it fails."""
    return lambda samples, turn, attempt: attempt < len(turns) and turn == turns[attempt]


@pytest.fixture(autouse=True)
def _no_collector():
    """What a failed attempt held must be gone by itself, not when the collector of cycles comes along."""
    gc.disable()
    yield
    gc.enable()


# ------------------------------------------------------------------------------------------------- done again, bitwise

# 16 samples are tried whole, then 8 at a time in 2 turns, 4 in 4 turns: where they fail, and the size that is left.
SCRIPTS = {"first": ((0, 0, 0), 2), "middle": ((0, 0, 2), 2), "last": ((0, 1, 3), 2), "only once": ((0,), 8)}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("turn", SCRIPTS)
@pytest.mark.parametrize("where", WHERES)
def test_a_window_is_done_again_as_if_it_had_been_cut_so_from_the_start(where, turn, scaled):
    turns, size = SCRIPTS[turn]
    faults, given = Faults(script(*turns), where), [batch(16, seed) for seed in range(3)]
    run = Run(faults, scaled=scaled)
    first = run.over(given[:1])
    assert faults.attempt == len(turns)
    faults.due = lambda *_: False
    last, other = run.over(given[1:]), Run(micro=size, scaled=scaled)
    same(first, other.over(given[:1]))
    same(last, other.over(given[1:]))


@pytest.mark.parametrize("where", ["forward", "half-way"])
@pytest.mark.parametrize("error", ERRORS)
def test_every_kind_of_error(error, where):
    faults = Faults(larger_than(3), where, error)
    same(Run(faults).over([batch(8)]), Run(micro=2).over([batch(8)]))
    assert faults.tried == [8, 4, 2]


def test_where_samples_are_collated():
    def collate(samples: list[Tensor]) -> Tensor:
        torch.rand(1), random.random(), np.random.rand()
        if len(samples) > 3 and not quiet:
            raise MemoryError
        return torch.stack(samples)

    quiet = False
    found = Run(options={"collate": collate}).over([list(batch(8))])
    quiet = True
    same(found, Run(micro=2, options={"collate": collate}).over([list(batch(8))]))


# ------------------------------------------------------------------------------------------------------------ by tokens

LENGTHS = [5, 1, 3, 6, 2, 6, 4, 1, 2, 3]


def words(lengths: list[int], seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(length, FEATURES, generator=draw) for length in lengths]


@dataclass
class Tokens:
    """Samples of different lengths, in so little memory that a micro-batch has at most `room` tokens with padding."""

    micro: Any
    room: int = 10**9
    sizes: list[tuple[int, int]] = field(default_factory=list)  # samples and width of each micro-batch that was tried
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.train = MacroStep(
            self.model, optimizer, self.loss, micro=self.micro, collate=self.collated, **self.options
        )

    def collated(self, samples: list[Tensor]) -> dict[str, Tensor]:
        x = nn.utils.rnn.pad_sequence(samples, batch_first=True).double()
        self.sizes.append(tuple(x.shape[:2]))
        return {"x": x, "mask": torch.tensor([[k < len(s) for k in range(x.shape[1])] for s in samples])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = model(batch["x"])[..., 0]
        if y.numel() > self.room:
            raise torch.OutOfMemoryError(GPU_TEXT)
        return y.square()[batch["mask"]].mean(), batch["mask"].sum()


def test_the_largest_number_of_tokens_that_fits(caplog):
    """60 tokens with padding in one micro-batch do not fit, nor do 30; 15 do: at 6 wide, two samples at a time."""
    found = Tokens(by_tokens("auto", len), room=20)
    found.train(words(LENGTHS))
    assert found.sizes[0] == (10, 6)
    assert "out of memory with 60 tokens in a micro-batch" in caplog.text
    assert caplog.text.count("out of memory") == 2
    torch.manual_seed(0)
    other = Tokens(by_tokens(15, len))
    other.train(words(LENGTHS))
    assert found.sizes[-len(other.sizes) :] == other.sizes
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), other.model.parameters(), strict=True))
    found.sizes.clear()
    found.train(words(LENGTHS, seed=1))
    assert found.sizes == other.sizes  # it is remembered


def test_a_batch_of_tensors_by_the_tokens_that_fit():
    ids = torch.arange(12).view(4, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]])
    tried: list[tuple[int, int]] = []
    model = nn.Embedding(12, 1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tried.append(tuple(batch["input_ids"].shape))
        if batch["input_ids"].numel() > 4:
            raise torch.OutOfMemoryError(GPU_TEXT)
        return model(batch["input_ids"])[..., 0][batch["attention_mask"].bool()].mean(), batch["attention_mask"].sum()

    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro=by_tokens("auto"))
    result = train({"input_ids": ids, "attention_mask": mask})
    assert tried == [(4, 3), (2, 3), (1, 3), (1, 2), (2, 1)]
    assert result.items.item() == 7


@pytest.mark.parametrize(
    ("room", "shapes"), [(10**9, [(2, 5000), (64, 10)]), (6_000, [(1, 5000), (1, 5000), (64, 10)])]
)
def test_short_samples_are_not_padded_to_the_longest_because_there_is_room(room, shapes):
    found = Tokens(by_tokens("auto", len), room=room)
    found.train(words([5000, 5000, *[10] * 64]))
    assert found.sizes[-len(shapes) :] == shapes
    if room > 6_000:
        assert found.sizes == shapes


def test_what_by_tokens_warns_of_is_said_once(caplog):
    """Not once a window, for each of which the budget is chosen anew."""
    model = nn.Linear(3, 1)
    train = MacroStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: (model(batch["x"]).mean(), len(batch["x"])),
        micro=by_tokens("auto", length=lambda batch: torch.full((4,), 3)),
    )
    with mock.patch.object(TensorBatch, "why_untrimmed", return_value="nothing is trimmed"):
        for _ in range(3):
            train({"x": torch.ones(4, 3)})
    assert caplog.text.count("nothing is trimmed") == 1


def test_more_tokens_are_tried_after_a_while():
    found = Tokens(by_tokens("auto", len), room=50)
    for seed in range(51):
        found.train(words([6] * 10, seed))
    assert set(found.sizes[1:-2]) == {(5, 6)}
    assert max(found.sizes[-2:]) == (7, 6)  # half-way to the 60 that did not fit


def test_sizes_are_forgotten_when_samples_need_less(tmp_path):
    """In the file too, where what others wrote stays."""
    file = tmp_path / "fit.json"
    other = FittingSizes(file)
    other.note_failure(Shape("another model's", ()), 8)
    found = Tokens(by_tokens("auto", len), room=5, options={"fit_file": file})
    with pytest.raises(FitError):
        found.train(words(LENGTHS))
    found.room = 100
    found.train.forget_sizes()
    found.sizes.clear()
    found.train(words(LENGTHS))
    assert found.sizes == [(10, 6)]
    assert [row["kind"] for row in json.loads(file.read_text())["shapes"]] == ["another model's"]


def test_a_sample_that_does_not_fit_alone():
    found = Tokens(by_tokens("auto", len), room=5)
    with pytest.raises(FitError, match="not even one sample fits"):
        found.train(words(LENGTHS))
    assert found.sizes[-1] == (1, 6)


def test_tokens_that_fit_are_kept_in_a_file(tmp_path):
    options = {"fit_file": tmp_path / "fit.json"}
    Tokens(by_tokens("auto", len), room=20, options=options).train(words(LENGTHS))
    again = Tokens(by_tokens("auto", len), room=20, options=options)
    again.train(words(LENGTHS))
    assert max(samples * width for samples, width in again.sizes) <= 15


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: by_tokens("all"), "a whole number, 1 or more, or .auto."),
        (lambda: by_tokens("auto", oversize="raise"), "needs a budget"),
        (lambda: by_tokens("auto").parts(samples_of(torch.zeros(2, 2))), "MacroStep does that"),
        (lambda: Tokens(by_tokens(10), options={"fit_file": "x"}), "leave it out otherwise"),
    ],
)
def test_wrong_calls_of_tokens_that_fit(wrong, says):
    with pytest.raises(UsageError, match=says):
        wrong()


# ------------------------------------------------------------------------------------------------------- comparisons


def test_the_comparison_sees_another_cut_and_another_dropout():
    found = Run(micro=2).over([batch(8)])
    with pytest.raises(AssertionError):
        same(found, Run(micro=4).over([batch(8)]))
    other = Run(micro=2)
    torch.rand(1)
    with pytest.raises(AssertionError):
        same(found, other.over([batch(8)]))


@pytest.mark.parametrize("seed", range(100))
def test_a_fault_at_any_time(seed):
    draw = random.Random(seed)
    faults = Faults(error=draw.choice(["torch", "CPU", "Python", "wrapped"]))
    faults.due = lambda samples, turn, attempt: samples > 1 and attempt < 3 and draw.random() < 0.15
    run, windows = Run(faults, scaled=draw.random() < 0.5), []
    for number in range(4):
        faults.where = draw.choice(WHERES)
        given = batch(draw.randint(1, 12), seed + number)
        run(given)
        windows.append((faults.tried[-1], given))
    found, other = run.state(), Run(scaled=run.scaled)
    for size, given in windows:
        other.cut_by(size, given)
    same(found, other.state())


class Rebinding(Noisy):
    """A buffer that is replaced, not written to."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return super().forward(x)


class Lazy(Noisy):
    """A buffer that the first micro-batch makes."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean() if self.mean is None else self.mean.lerp(x.mean(), 0.1)
        return super().forward(x)


class Expanded(Noisy):
    """A buffer whose elements lie in the same place, which nobody can write to."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.register_buffer("ones", torch.ones(1).expand(3))


@pytest.mark.parametrize("kind", [Rebinding, Lazy, Expanded])
@pytest.mark.filterwarnings("ignore:the buffer .seen. changes inside a window")  # it does
def test_unusual_buffers(kind, monkeypatch):
    monkeypatch.setitem(globals(), "Noisy", kind)
    same(Run(Faults(larger_than(3))).over([batch(8)]), Run(micro=2).over([batch(8)]))


# ------------------------------------------------------------------------------------------- a batch changed in place


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda b: b["x"].mul_(2),
    "behind autograd": lambda b: b["x"].data.mul_(2),
    "through numpy": lambda b: b["x"].numpy().__imul__(2),
    "an array": lambda b: b["y"].__imul__(2),
    "a number": lambda b: b["scale"].mul_(2),
    "taken away": lambda b: b.update(x=2 * b.pop("x")),
}


def doubling(change: str, limit: int) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that doubles something of its micro-batch; above so many samples memory runs out afterwards."""

    def loss_fn(model: nn.Module, micro: Any) -> Tensor:
        CHANGES[change](micro)
        if len(micro["x"]) > limit:
            raise torch.OutOfMemoryError(GPU_TEXT)
        return (model(micro["x"]) - torch.as_tensor(micro["y"])).square().mean() * micro["scale"]

    return loss_fn


def numbers() -> dict[str, Any]:
    return {
        "x": torch.arange(24.0, dtype=torch.float64).view(8, 3) / 24,
        "y": np.arange(8.0)[:, None],
        "scale": torch.tensor(3.0, dtype=torch.float64),
    }


def learnt(loss_fn: Any, given: Any, **options: Any) -> list[Tensor]:
    """What one window changes in the weights."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)(given)
    return [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("limit", [8, 2])
def test_what_a_loss_changes_in_its_batch_is_changed_once_and_only_there(change, limit):
    given, whole = numbers(), numbers()
    CHANGES[change](whole)
    found = learnt(doubling(change, limit), given)
    expected = learnt(lambda m, b: (m(b["x"]) - torch.as_tensor(b["y"])).square().mean() * b["scale"], whole)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    same(given, numbers())


def test_the_same_where_collate_hands_on_what_it_was_given():
    data = numbers()

    def collate(some: list[int]) -> dict[str, Any]:
        return {"x": data["x"][some[0] : some[-1] + 1], "y": data["y"][some[0] : some[-1] + 1], "scale": data["scale"]}

    found = learnt(doubling("in place", 2), list(range(8)), collate=collate)
    torch.testing.assert_close(found, learnt(doubling("in place", 8), numbers()), rtol=1e-12, atol=0)
    same(data, numbers())


def test_a_fixed_size_gets_no_copies():
    given, seen = numbers(), []
    learnt(lambda m, b: seen.append(b["x"].data_ptr()) or m(b["x"]).square().mean(), given, micro=4)
    assert seen == [given["x"].data_ptr(), given["x"][4:].data_ptr()]


# ----------------------------------------------------------------------------------------------- what is not swallowed


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory of the tokenizer"), KeyboardInterrupt()],
    ids=repr,
)
def test_another_error_is_raised_as_it_is(error, where, monkeypatch):
    monkeypatch.setitem(ERRORS, "another", lambda: error)
    run = Run(Faults(script(0), where, "another"))
    with pytest.raises(type(error)) as caught:
        run(batch(8))
    assert caught.value is error
    assert run.faults.tried == [8]
    assert all(p.grad is None for p in run.model.parameters())


def test_what_runs_out_of_memory_at_a_fixed_size_says_so_itself():
    run = Run(Faults(script(0), "half-way"), micro=4)
    with pytest.raises(torch.OutOfMemoryError):
        run(batch(8))
    assert all(p.grad is None for p in run.model.parameters())
    run.faults.due = lambda *_: False
    assert run(batch(8)).step == 1


@pytest.mark.parametrize("text", ["index out of range", "CUDA error: device-side assert triggered", ""])
def test_what_is_no_lack_of_memory(text):
    assert not is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(wrapped(KeyError(text)))


# --------------------------------------------------------------------------------------------------- not even one fits


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize(
    ("error", "asked"),
    [("torch", "2.00 GiB"), ("CPU", "4096000 bytes"), ("Python", "MemoryError"), ("wrapped twice", "2.00 GiB")],
)
def test_not_even_one_sample(error, asked, where, scaled):
    run = Run(Faults(), scaled=scaled)
    run(batch(8))
    before, run.faults.where, run.faults.error = run.state(), where, error
    run.faults.due = larger_than(0)
    with pytest.raises(FitError, match=rf"one sample.*{asked}.*(checkpoint|smaller)"):
        run(batch(8, seed=1))
    assert run.faults.tried == [8, 8, 4, 2, 1]
    same(run.state(), before)
    run.faults.due = lambda *_: False
    assert run(batch(8, seed=1)).step == 2


# ------------------------------------------------------------------------------------------------- what is remembered


def mean_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.flatten(1).mean(1, keepdim=True)).square().mean()


@dataclass
class Memory:
    """A model that fits `capacity` elements of a micro-batch; `tried` is the size of every attempt, by windows."""

    capacity: float
    options: dict[str, Any] = field(default_factory=dict)
    tried: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.train = MacroStep(self.model, optimizer, self.loss, micro="auto", **self.options)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.begins:
            self.tried[-1].append(len(x))
        self.begins = x.numel() > self.capacity
        if self.begins:
            raise torch.OutOfMemoryError(GPU_TEXT)
        return mean_of(model, x)

    def __call__(self, samples: int, *shape: int) -> list[int]:
        """The sizes that were tried in one window, the last of which fitted."""
        self.tried.append([])
        self.begins = True
        self.train(torch.ones(samples, *(shape or (1,))))
        return self.tried[-1]


def test_a_size_is_remembered():
    memory = Memory(capacity=5)
    assert memory(16) == [16, 8, 4]
    assert memory(16) == [4]
    assert memory(40) == [4]
    assert memory(3) == [3]
    assert memory(16) == [4]


def test_longer_samples_start_no_higher_and_shorter_ones_at_what_is_known():
    memory = Memory(capacity=64)
    assert memory(16, 8) == [16, 8]
    assert memory(16, 16) == [8, 4]
    assert memory(16, 4) == [8]
    assert memory(16, 8) == [8], "what was known of these is still known"
    assert memory(16, 16) == [4]
    assert memory(16, 10)[0] <= 8


def test_shorter_samples_start_at_what_longer_ones_were_seen_to_fit():
    memory = Memory(capacity=64)
    assert memory(16, 4) == [16]
    assert memory(16, 32) == [16, 8, 4, 2]
    assert memory(16, 2) == [16], "16 longer ones did fit"


def test_a_small_batch_first_says_nothing_about_a_large_one():
    memory = Memory(capacity=9)
    assert memory(1) == [1]
    assert memory(16) == [16, 8]
    assert memory(16) == [8]


def test_other_kinds_of_batches_do_not_matter():
    memory = Memory(capacity=9)
    assert memory(16) == [16, 8]
    assert memory(16, 1, 1)[0] == 16, "one more dimension: nothing is known of those"


def test_a_longer_list_of_samples_starts_no_higher():
    memory = Memory(capacity=64, options={"collate": lambda s: nn.utils.rnn.pad_sequence(s, batch_first=True)})

    def window(*lengths: int) -> list[int]:
        memory.tried.append([])
        memory.begins = True
        memory.train([torch.ones(length) for length in lengths])
        return memory.tried[-1]

    assert window(8, *[1] * 15) == [16, 8]
    assert window(*[1] * 15, 8) == [8]
    assert window(16, *[1] * 15)[0] <= 8


def test_a_size_that_the_allocator_had_to_struggle_for_is_left(monkeypatch):
    memory = Memory(capacity=float("inf"))
    monkeypatch.setattr(Pressure, "has_risen", lambda pressure: memory.tried[-1][-1] > 5)
    assert [memory(16) for _ in range(4)] == [[16], [8], [4], [4]]


def test_sizes_go_back_up_when_all_was_quiet_for_long():
    memory = Memory(capacity=5)
    assert memory(16) == [16, 8, 4]
    memory.capacity = float("inf")
    assert [memory(16) for _ in range(20)] == [[4]] * 20, "not at once"
    sizes = [memory(16) for _ in range(300)]
    assert sizes[-1] == [16]
    assert all(a[0] <= b[0] for a, b in pairwise(sizes))


def test_sizes_that_fail_again_are_tried_ever_less():
    memory = Memory(capacity=4)
    windows = [memory(16) for _ in range(700)][1:]
    assert {window[-1] for window in windows} == {4}, "whatever is tried, what fits is come back to"
    failed = [i for i, window in enumerate(windows) if len(window) > 1]
    assert 1 <= len(failed) <= 8
    assert failed[0] >= 20
    gaps = [b - a for a, b in pairwise(failed)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0]


def test_a_step_up_that_fails_is_done_again_bitwise():
    faults, given = Faults(larger_than(4)), [batch(8, seed) for seed in range(120)]
    found = Run(faults).over(given)
    assert sum(size > 4 for size in faults.tried) > 1, "not only at the start"
    same(found, Run(micro=4).over(given))


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.fixture
def file(tmp_path):
    return tmp_path / "runs" / "sizes.json"


def test_the_next_run_begins_with_what_this_one_found(file):
    assert Memory(5, {"fit_file": file})(16) == [16, 8, 4]
    assert Memory(5, {"fit_file": str(file)})(16) == [4]
    assert isinstance(json.loads(file.read_text()), dict)
    assert os.listdir(file.parent) == [file.name], "nothing else is left there"


def test_no_file_where_nothing_failed(file):
    Memory(100, {"fit_file": file})(16)
    assert not file.exists()


def test_several_runs_keep_what_others_have_written(file):
    first, second = Memory(5, {"fit_file": file}), Memory(64, {"fit_file": file})
    first(16), second(16, 8)
    assert Memory(5, {"fit_file": file})(16) == [4]
    assert Memory(64, {"fit_file": file})(16, 8) == [8]


def test_even_a_batch_that_does_not_fit_at_all_is_written_down(file):
    with pytest.raises(FitError):
        Memory(0, {"fit_file": file})(16)
    assert Memory(1, {"fit_file": file})(16) == [1]


def test_the_file_is_replaced_as_a_whole(file):
    memory = Memory(5, {"fit_file": file})
    memory(16)
    old, text = file.with_name("old"), file.read_text()
    os.link(file, old)  # what is written into the file itself would show here
    memory.capacity = 1
    memory(16)
    assert old.read_text() == text != file.read_text()
    json.loads(file.read_text())


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("what a file says was run",))


GARBAGE = {
    "empty": b"",
    "half": b'{"shapes": [',
    "a list": b"[]",
    "null": b"null",
    "a number": b'{"shapes": 5}',
    "other keys": b'{"shapes": [{"kind": "x"}]}',
    "a size of none": b'{"shapes": [{"kind": "x", "sizes": [1], "size": 0, "failed": 1}]}',
    "a negative size": b'{"shapes": [{"kind": "x", "sizes": [1], "size": -4, "failed": 8}]}',
    "no text": b"\xff\xfe\x00\x80",
    "pickle": pickle.dumps(Bomb()),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_file_of_something_else(garbage, tmp_path):
    file = tmp_path / "sizes.json"
    file.write_bytes(GARBAGE[garbage])
    with pytest.raises(UsageError, match=r"sizes\.json is not a file of sizes.*(another|delete)"):
        Memory(5, {"fit_file": file})
    assert file.read_bytes() == GARBAGE[garbage], "it may be someone's"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UsageError, match=r"fit_file|is not a file"):
        Memory(5, {"fit_file": tmp_path})
