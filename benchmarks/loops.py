"""The loops of `gpu.py`: one window of a shape in a loop by hand, with the peers, and with `MacroStep`."""

# mypy: untyped-calls-exclude="torch,transformers,accelerate,lightning"
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from models import DEVICE, IGNORED, Batch, Shape, autocast, cut, items_of, moved, pinned
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from macrobatch import MacroStep, by_tokens

HAND, ACCELERATE, FABRIC, BIG_BATCH = "hand-written", "Accelerate", "Lightning Fabric", "one big batch"
EAGER, GRAPHS = "Macrobatch", "Macrobatch, cuda_graph"
COMPILED, COMPILED_GRAPHS = "Macrobatch, compiled", "Macrobatch, compiled, cuda_graph"
Run = Callable[[int], int]  # trains on the window with this number; returns its number of micro-batches


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of a loop."""

    shape: Shape
    model: nn.Module
    optimizer: Optimizer
    max_norm: float
    windows: Sequence[Batch]
    is_grouped: bool
    is_compiled: bool

    def loaders(self) -> list[Any]:
        """A loader of the peers' micro-batches for each window."""
        size = self.shape.micro_batch
        return [loader(map(pinned, cut(window, size, self.is_grouped))) for window in self.windows]


def loader(batches: Iterable[Batch]) -> Any:
    """Returns batches as they are. It has its own generator, because a loader always draws a seed."""
    return DataLoader(list(batches), collate_fn=itemgetter(0), generator=Generator())  # type: ignore[arg-type]


def hand_written(job: Job) -> Run:
    model, optimizer, loaders = job.model, job.optimizer, job.loaders()

    def run(index: int) -> int:
        window = list(loaders[index])
        items = sum(items_of(job.shape, batch) for batch in window)
        for batch in map(moved, window):
            with autocast(job.is_compiled):
                loss, _ = job.shape.loss(model, batch)
            (loss / items).backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return len(window)

    return run


def accelerate(job: Job) -> Run:
    """Accelerate with `accumulate`; if lengths vary, its recipe for "training samples of variable size"."""
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs, DataLoaderConfiguration

    shape, steps = job.shape, job.shape.micro_batches
    accelerator = Accelerator(
        cpu=DEVICE == "cpu",
        mixed_precision="bf16" if DEVICE == "cuda" else "no",
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=[AutocastKwargs(cache_enabled=False)] if job.is_compiled else None,
    )
    model, optimizer = accelerator.prepare(job.model, job.optimizer)
    loaders = [accelerator.prepare(each) for each in job.loaders()]

    def run(index: int) -> int:
        done = 0
        for batch in loaders[index]:
            with accelerator.accumulate(model):
                loss, items = shape.loss(model, batch)
                accelerator.backward(loss / items)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            done += 1
        return done

    def run_varying(index: int) -> int:
        window = list(loaders[index])
        counted = sum((batch["labels"] != IGNORED).sum() for batch in window)
        items = accelerator.gather(counted).sum().item()
        for batch in window:
            loss, _ = shape.loss(model, batch)
            accelerator.backward(loss * steps / items)
        accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return len(window)

    return run if shape.budget is None else run_varying


def fabric(job: Job) -> Run:
    from lightning.fabric import Fabric

    shape = job.shape
    lightning = Fabric(accelerator=DEVICE, devices=1, precision="bf16-mixed" if DEVICE == "cuda" else "32-true")
    model, optimizer = lightning.setup(job.model, job.optimizer)
    loaders = [lightning.setup_dataloaders(each) for each in job.loaders()]

    def run(index: int) -> int:
        window = list(loaders[index])
        items = sum(items_of(shape, batch) for batch in window)
        for place, batch in enumerate(window):
            with lightning.no_backward_sync(model, enabled=place + 1 < len(window)):
                loss, _ = shape.loss(model, batch)
                lightning.backward(loss / items)
        lightning.clip_gradients(model, optimizer, max_norm=job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return len(window)

    return run


def one_big_batch(job: Job) -> Run:
    return hand_written(replace(job, shape=replace(job.shape, micro_batch=job.shape.samples, micro_batches=1)))


def macro_step(job: Job, cuda_graph: bool = False) -> Run:
    shape = job.shape

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        with autocast(job.is_compiled):
            return shape.loss(model, moved(batch))

    micro: Any = shape.micro_batch if shape.budget is None else by_tokens(shape.budget)
    options: Any = {"micro": micro, "max_norm": job.max_norm, "reduction": "sum", "cuda_graph": cuda_graph}
    train = MacroStep(job.model, job.optimizer, loss_fn, **options)
    loaders = [loader([window]) for window in job.windows]

    def run(index: int) -> int:
        return sum(train(batch).micro_batches for batch in loaders[index])

    return run


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row. The first one among the compiled ones, and among the others, is the loop by hand."""

    name: str
    build: Callable[[Job], Run]
    is_compiled: bool
    is_grouped: bool = False


def ways_of(shape: Shape, is_compiled: bool) -> Iterator[Way]:
    end = ", compiled" if is_compiled else ""
    yield Way(name=HAND + end, build=hand_written, is_compiled=is_compiled)
    yield Way(name=ACCELERATE + end, build=accelerate, is_compiled=is_compiled)
    if shape.budget is not None:
        yield Way(name=f"{HAND}, grouped{end}", build=hand_written, is_compiled=is_compiled, is_grouped=True)
        yield Way(name=f"{ACCELERATE}, grouped{end}", build=accelerate, is_compiled=is_compiled, is_grouped=True)
    yield Way(name=EAGER + end, build=macro_step, is_compiled=is_compiled)
    # Lightning Fabric is the loop by hand with a wrapper around the model, so it is measured only once.
    if not is_compiled and shape.budget is None and shape.section != "sweep":
        yield Way(name=FABRIC, build=fabric, is_compiled=False)
    graphs = f"{EAGER}{end}{GRAPHS.removeprefix(EAGER)}"
    yield Way(name=graphs, build=lambda job: macro_step(job, True), is_compiled=is_compiled)
    is_once = shape.section != "sweep" or shape.micro_batches == 1
    is_worth_it = not is_compiled or shape.section == "fixed"  # compiling it takes half as long as all other loops
    if is_once and is_worth_it and shape.together is None and not shape.depends_on:  # it fits, and is exact
        yield Way(name=BIG_BATCH + end, build=one_big_batch, is_compiled=is_compiled)
