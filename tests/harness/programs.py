"""Programs as people write them for Accelerate: each runs under the real one and under `macrobatch.accelerate`."""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import macrobatch.accelerate

WIDTH = 3


@dataclass(frozen=True)
class Library:
    """What a program imports."""

    Accelerator: Any
    GradientAccumulationPlugin: Any
    is_ours: bool


OURS = Library(macrobatch.accelerate.Accelerator, macrobatch.accelerate.GradientAccumulationPlugin, is_ours=True)
THEIRS = Library(accelerate.Accelerator, accelerate.utils.GradientAccumulationPlugin, is_ours=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Accelerate's own warnings are not ours to repair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def start_anew() -> None:
    """Forget what the process knows from the program before."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    start_anew()
    try:
        with quiet():
            yield
    finally:
        start_anew()


def run_on_cpu(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """As the only program of this process."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with fresh():
        return function()


def plugin(library: Library, exact: bool = True, **options: Any) -> Any:
    """`exact` is a word of ours."""
    if library.is_ours:
        options["exact_remainder"] = exact
    return library.GradientAccumulationPlugin(**options)


# ---------------------------------------------------------------------------------------------------------- the data


def regression(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, WIDTH, generator=draw, dtype=torch.float64)
    y = torch.randn(samples, 1, generator=draw, dtype=torch.float64)
    return TensorDataset(x, y)


class Stream(IterableDataset[Any]):
    """The same samples, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = regression(samples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).double()


# -------------------------------------------------------------------------------------------------------- the programs


@dataclass
class Trace:
    """What a program saw: one entry a micro-batch."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    in_step: list[bool] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def note(self, accelerator: Any, model: nn.Module, loss: Tensor, scheduler: Any, samples: int) -> None:
        self.losses.append(loss.item())
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        self.rates.append(scheduler.get_last_lr()[0])
        self.closed.append(accelerator.sync_gradients)
        self.samples.append(samples)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training as in the guides, with the options that change its course.

    `unsized` reads from an iterable dataset; `breaks` ends the first epoch after so many micro-batches; `nested` goes
    through another loader in the middle of each epoch.
    """

    samples: int = 22
    batch_size: int = 2
    steps: int = 2
    epochs: int = 2
    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    sync_each_batch: bool = False
    sync_with_dataloader: bool = True
    exact: bool = True
    shuffle: bool = False
    drop_last: bool = False
    unsized: bool = False
    breaks: int | None = None
    nested: bool = False
    max_norm: float | None = None
    one_cycle: int | None = None
    counts: bool = False

    def loader(self) -> DataLoader[Any]:
        data = Stream(self.samples) if self.unsized else regression(self.samples)
        return DataLoader(data, batch_size=self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last)

    def run(self, library: Library) -> Trace:
        with fresh():
            set_seed(0)
            accelerator = library.Accelerator(
                cpu=True,
                gradient_accumulation_plugin=plugin(
                    library,
                    num_steps=self.steps,
                    exact=self.exact,
                    sync_each_batch=self.sync_each_batch,
                    sync_with_dataloader=self.sync_with_dataloader,
                ),
                dataloader_config=DataLoaderConfiguration(
                    split_batches=self.split_batches,
                    dispatch_batches=self.dispatch_batches,
                    even_batches=self.even_batches,
                ),
            )
            return self.train(accelerator)

    def train(self, accelerator: Any) -> Trace:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if self.one_cycle is None:
            scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.one_cycle)
        loader, other = self.loader(), DataLoader(regression(5), batch_size=2)
        model, optimizer, loader, other, scheduler = accelerator.prepare(model, optimizer, loader, other, scheduler)
        trace = Trace()
        for epoch in range(self.epochs):
            for index, (x, y) in enumerate(loader):
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(x), y)
                    accelerator.backward(loss, **({"items": len(y)} if self.counts else {}))
                    trace.in_step.append(in_step(model))
                    if accelerator.sync_gradients and self.max_norm is not None:
                        trace.norms.append(accelerator.clip_grad_norm_(model.parameters(), self.max_norm).item())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                trace.note(accelerator, model, loss, scheduler, len(y))
                if self.nested and index == 1:
                    seen = [accelerator.gather_for_metrics(inputs) for inputs, _ in other]
                    assert len(torch.cat(seen)) == 5
                    assert accelerator.gradient_state.active_dataloader is loader
                if epoch == 0 and index + 1 == self.breaks:
                    break
        return trace


def in_step(model: nn.Module) -> bool:
    """Whether all processes hold the same gradients."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return True
    own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return all(torch.equal(own, other) for other in everyone)


def whole_batches(program: Program, world: int = 1) -> list[Tensor]:
    """The weights after each window of a program, trained in plain torch with one big batch a window.

    The loader must not shuffle, and the samples fill its rounds.
    """
    once = world == 1 or program.split_batches
    samples, size = regression(program.samples).tensors, program.batch_size * (1 if once else world)
    assert program.samples % size == 0
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    weights = []
    for _ in range(program.epochs):
        rounds = math.ceil(program.samples / size)
        for begin in range(0, rounds, program.steps):
            window = slice(begin * size, min(begin + program.steps, rounds) * size)
            optimizer.zero_grad()
            F.mse_loss(model(samples[0][window]), samples[1][window]).backward()
            optimizer.step()
            for _ in range(1 if once else world):
                scheduler.step()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return weights


# ----------------------------------------------------------------------------------------- the guides' own examples


def line_fitted(library: Library) -> tuple[float, float]:
    """A line through eight points: the weight after one step of four micro-batches, and after one of all at once."""
    with fresh():
        set_seed(0)
        x = torch.arange(1.0, 9.0)
        y = 2 * x
        loader = DataLoader(TensorDataset(x, y), batch_size=2)
        model = torch.zeros((1, 1), requires_grad=True)
        whole = torch.zeros((1, 1), requires_grad=True)
        optimizer, whole_optimizer = torch.optim.SGD([model], lr=0.02), torch.optim.SGD([whole], lr=0.02)
        accelerator = library.Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(inputs.view(-1, 1) @ model, labels.view(-1, 1))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        F.mse_loss(x.view(-1, 1) @ whole, y.view(-1, 1)).backward()
        whole_optimizer.step()
        return model.item(), whole.item()


class Sentences(Dataset[Any]):
    """The n-th has the numbers from 1 to n, each to be called even or odd."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.arange(1, index + 2, dtype=torch.float32)
        return {"input_ids": numbers, "labels": torch.remainder(numbers, 2)}


def padded(sentences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def column(name: str) -> Tensor:
        columns = [sentence[name] for sentence in sentences]
        return nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=-100)[..., None]

    return {name: column(name) for name in ("input_ids", "labels")}


def tokens_counted(library: Library, *, steps: int, batch_size: int) -> dict[str, Any]:
    """The guide's recipe for samples of variable size: pre-load a window, count its tokens, divide by them."""
    with fresh():
        set_seed(0)
        accelerator = library.Accelerator(gradient_accumulation_steps=steps)
        data = Sentences(batch_size * steps * accelerator.num_processes)
        loader = DataLoader(data, batch_size=batch_size, collate_fn=padded)
        model = nn.Linear(1, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
        initial = model.weight.detach().clone().squeeze()
        model, optimizer = accelerator.prepare(model, optimizer)
        loader = accelerator.prepare_data_loader(loader, device_placement=True)
        iterator = iter(loader)
        window = [next(iterator) for _ in range(len(loader))]
        own = sum((batch["labels"] != -100).sum() for batch in window)
        total = accelerator.gather(own).sum().item()
        for index, batch in enumerate(window):
            is_last = index == len(window) - 1
            travels = contextlib.nullcontext if is_last or accelerator.num_processes == 1 else model.no_sync
            with travels():
                loss = F.cross_entropy(
                    model(batch["input_ids"]).view(-1, 2), batch["labels"].view(-1).long(), reduction="sum"
                )
                accelerator.backward(loss * steps * accelerator.num_processes / total)
        optimizer.step()
        optimizer.zero_grad()
        weight = accelerator.unwrap_model(model).weight.detach().squeeze()
        return {"initial": initial, "items": int(own), "total": int(total), "weight": weight}


def items_handed_over(library: Library, *, steps: int, batch_size: int) -> Tensor:
    """The same in five lines, with nothing pre-loaded: only ours."""
    with fresh():
        set_seed(0)
        accelerator = library.Accelerator(gradient_accumulation_steps=steps)
        data = Sentences(batch_size * steps * accelerator.num_processes)
        model = nn.Linear(1, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
        loader = DataLoader(data, batch_size=batch_size, collate_fn=padded)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["input_ids"]).view(-1, 2), batch["labels"].view(-1).long())
                accelerator.backward(loss, items=(batch["labels"] != -100).sum())
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(model).weight.detach().squeeze()
