"""Microseconds that a library adds to one micro-step of a hand-written accumulation loop.

The model is one 32x32 Linear, so that almost only Python is timed. All loops run in one process on the same data. In
every round each of them passes over the data once, in a new random order, so that none always follows the same other
one, whose code is still in the caches. Time is that of the thread: what others run on the machine does not count. A
loop's overhead is the median, over the rounds, of its time minus that of the hand-written loop in the same round, so
that slow phases of the machine affect both. The final weights of every loop are compared with those of the
hand-written one.

    python benchmarks/overhead.py                    # prints a table, writes results/overhead.json
    python benchmarks/overhead.py --loader list      # without the DataLoader: smaller times, less noise
"""

# mypy: untyped-calls-exclude=torch
import argparse
import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import macrobatch.accelerate
from macrobatch import Accumulator

WIDTH = 32  # input and output size of the Linear
LEARNING_RATE = 0.01  # so small that no loop converges, and a wrongly scaled gradient is visible in the weights
TOLERANCE = 1e-4  # relative to the change of the weights, in float32 over some thousand steps
TARGET = 0.25  # wanted part of Lightning Fabric's overhead
FACADE_TARGET = 0.5  # wanted part of Accelerate's overhead, for macrobatch.accelerate, which runs the same program
FABRIC = "Lightning Fabric"
ACCELERATE = "Accelerate"
FACADE = "macrobatch.accelerate"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the run. `micro_batches`: those of one pass. Every loop makes one pass per round."""

    steps: int
    micro_batches: int
    rounds: int
    loader: str
    samples: int = 8  # in one micro-batch

    def __post_init__(self) -> None:
        if min(self.steps, self.micro_batches, self.rounds) < 1:
            raise SystemExit("--steps, --micro-batches and --rounds must be at least 1.")
        if self.micro_batches % self.steps:
            raise SystemExit(
                f"--micro-batches {self.micro_batches} is not a multiple of --steps {self.steps}: the peers scale a "
                "short last window wrongly, and there would be no common gradient to compare."
            )


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One row: `run` passes over the data once; `against` names the hand-written loop that does the same."""

    name: str
    model: nn.Module
    run: Callable[[], None]
    against: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Microseconds per micro-step: the median and its quartiles."""

    name: str
    against: str
    time: float
    overhead: float
    overhead_quartiles: tuple[float, float]
    to_fabric: float | None  # overhead divided by Fabric's
    gradient_error: float

    @property
    def exact(self) -> bool:
        return self.gradient_error <= TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# The loops. Each is written as its library's documentation recommends.


def problem(settings: Settings) -> tuple[nn.Linear, torch.optim.SGD, Any]:
    """The same weights, optimizer and data for every loop."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(settings.micro_batches * settings.samples, WIDTH, generator=generator)
    y = 4 * x @ torch.randn(WIDTH, WIDTH, generator=generator)  # so large that max_norm=1.0 clips every window
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if settings.loader == "list":
        return model, optimizer, list(zip(x.split(settings.samples), y.split(settings.samples), strict=True))
    return model, optimizer, DataLoader(TensorDataset(x, y), batch_size=settings.samples)


def hand_written(settings: Settings, name: str = "hand-written", max_norm: float | None = None) -> Loop:
    model, optimizer, loader = problem(settings)
    steps = settings.steps

    def run() -> None:
        for index, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            (loss / steps).backward()
            if (index + 1) % steps == 0:
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(name=name, model=model, run=run, against=name)


def accumulator(settings: Settings, name: str, against: str, items: Tensor | None = None, **options: Any) -> Loop:
    """`items`: this tensor is passed as items; if None, an int is."""
    model, optimizer, loader = problem(settings)
    acc = Accumulator(model, optimizer, steps=settings.steps, **options)

    def run() -> None:
        for x, y in acc.batches(loader):
            loss = F.mse_loss(model(x), y)
            acc.backward(loss, items=len(y))
            acc.step()

    def run_with_tensor() -> None:
        for x, y in acc.batches(loader):
            loss = F.mse_loss(model(x), y)
            acc.backward(loss, items=items)
            acc.step()

    return Loop(name=name, model=model, run=run if items is None else run_with_tensor, against=against)


def accelerate(settings: Settings, name: str, against: str, accelerator_class: Any) -> Loop:
    """The same loop for Accelerate and for macrobatch.accelerate, which is made for that."""
    accelerator = accelerator_class(cpu=True, gradient_accumulation_steps=settings.steps)
    plain_model, plain_optimizer, plain_loader = problem(settings)
    model, optimizer = accelerator.prepare(plain_model, plain_optimizer)
    loader = accelerator.prepare(plain_loader) if settings.loader == "dataloader" else plain_loader

    def run() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(name=name, model=plain_model, run=run, against=against)


def fabric(settings: Settings, against: str) -> Loop:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    plain_model, plain_optimizer, loader = problem(settings)
    model, optimizer = lightning.setup(plain_model, plain_optimizer)
    if settings.loader == "dataloader":
        loader = lightning.setup_dataloaders(loader)
    steps = settings.steps

    def run() -> None:
        for index, (x, y) in enumerate(loader):
            is_accumulating = (index + 1) % steps != 0
            with lightning.no_backward_sync(model, enabled=is_accumulating):
                loss = F.mse_loss(model(x), y)
                lightning.backward(loss / steps)
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()

    return Loop(name=FABRIC, model=plain_model, run=run, against=against)


def all_loops(settings: Settings) -> list[Loop]:
    from accelerate import Accelerator

    plain = hand_written(settings)
    clipped = hand_written(settings, name="hand-written, clipped", max_norm=1.0)
    items = torch.tensor(settings.samples)
    return [
        plain,
        accumulator(settings, "Macrobatch", plain.name),
        fabric(settings, plain.name),
        accelerate(settings, ACCELERATE, plain.name, Accelerator),
        accelerate(settings, FACADE, plain.name, macrobatch.accelerate.Accelerator),
        accumulator(settings, "Macrobatch, tensor items", plain.name, items=items),
        accumulator(settings, 'Macrobatch, "keep"', plain.name, nonfinite="keep"),
        clipped,
        accumulator(settings, "Macrobatch, max_norm=1", clipped.name, max_norm=1.0),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


def measure(loops: Sequence[Loop], rounds: int, tick: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds of one pass of each loop, one number per round. The first pass is a warm-up."""
    times: dict[str, list[float]] = {loop.name: [] for loop in loops}
    for loop in loops:
        loop.run()
        tick()
    gc.collect()
    gc.freeze()  # objects of the peers' imports would slow down every later collection
    order = random.Random(0)
    for _ in range(rounds):
        for loop in order.sample(loops, len(loops)):
            begin = time.thread_time_ns()
            loop.run()
            times[loop.name].append((time.thread_time_ns() - begin) / 1000)
            tick()
    return times


def gradient_error(loop: Loop, reference: Loop, start: Tensor) -> float:
    """The largest difference to the final weights of `reference`, relative to how far these have changed."""
    found, expected = weights(loop.model), weights(reference.model)
    return float((found - expected).abs().max() / (expected - start).abs().max())


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def evaluate(loops: Sequence[Loop], times: dict[str, list[float]], micro_batches: int, start: Tensor) -> list[Figures]:
    by_name = {loop.name: loop for loop in loops}

    def overheads(loop: Loop) -> list[float]:
        pairs = zip(times[loop.name], times[loop.against], strict=True)
        return [(own - hand) / micro_batches for own, hand in pairs]

    to_beat = statistics.median(overheads(by_name[FABRIC]))
    rows = []
    for loop in loops:
        median, lower, upper = record.quartiles(overheads(loop))
        is_reference = loop.against == loop.name
        rows.append(
            Figures(
                name=loop.name,
                against=loop.against,
                time=round(statistics.median(times[loop.name]) / micro_batches, 2),
                overhead=round(median, 2),
                overhead_quartiles=(round(lower, 2), round(upper, 2)),
                to_fabric=None if is_reference else round(median / to_beat, 3),
                gradient_error=gradient_error(loop, by_name[loop.against], start),
            )
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Reporting.


def report(settings: Settings, rows: Sequence[Figures]) -> dict[str, Any]:
    by_name = {row.name: row for row in rows}
    macrobatch_row = by_name["Macrobatch"]
    assert macrobatch_row.to_fabric is not None
    to_accelerate = round(by_name[FACADE].overhead / by_name[ACCELERATE].overhead, 3)
    what = "microseconds of the thread a micro-step over the hand-written loop, all loops interleaved in one process"
    return {
        **record.stamp(what, "torch", "accelerate", "lightning"),
        "device": "cpu",
        "processor": record.machine(),
        "threads": torch.get_num_threads(),
        "model": f"Linear({WIDTH}, {WIDTH}), float32, SGD",
        "settings": asdict(settings),
        "rows": [{**asdict(row), "exact": row.exact} for row in rows],
        "target": {
            "at_most_of_fabric": TARGET,
            "found": macrobatch_row.to_fabric,
            "reached": macrobatch_row.to_fabric <= TARGET,
        },
        "facade_target": {
            "at_most_of_accelerate": FACADE_TARGET,
            "found": to_accelerate,
            "reached": to_accelerate <= FACADE_TARGET,
        },
    }


def cells(row: Figures) -> list[str]:
    """A row of the printed table."""
    time = f"{row.time:.1f}"
    if row.to_fabric is None:
        return [row.name, time, "", "", "", "reference"]
    lower, upper = row.overhead_quartiles
    gradient = f"{'ok' if row.exact else 'WRONG'}, {row.gradient_error:.0e}"
    return [row.name, time, f"{row.overhead:.1f}", f"{lower:.0f} - {upper:.0f}", f"{row.to_fabric:.2f}", gradient]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="micro-batches in a window (default: 8)")
    parser.add_argument("--micro-batches", type=int, default=160, help="in one pass of one loop (default: 160)")
    parser.add_argument("--rounds", type=int, default=80, help="passes of each loop (default: 80)")
    parser.add_argument("--loader", choices=("dataloader", "list"), default="dataloader", help="default: dataloader")
    record.add_output(parser, "overhead")
    arguments = parser.parse_args()
    settings = Settings(
        steps=arguments.steps,
        micro_batches=arguments.micro_batches,
        rounds=arguments.rounds,
        loader=arguments.loader,
    )

    warnings.filterwarnings("ignore")  # of the peers, about workers and loggers
    torch.set_num_threads(1)
    start = weights(problem(settings)[0])
    try:
        loops = all_loops(settings)
    except ImportError as missing:
        print(f"{missing}. The peers come with an extra: pip install -e '.[bench]'", file=sys.stderr)
        return 2

    with record.progress("measuring", (settings.rounds + 1) * len(loops)) as tick:
        times = measure(loops, settings.rounds, tick)
    rows = evaluate(loops, times, settings.micro_batches, start)
    result = report(settings, rows)

    title = f"Microseconds a micro-step ({settings.steps} a window, {settings.rounds} rounds, {settings.loader})"
    where = f"{result['processor']}; {record.in_words(result['versions'])}"
    headings = ["loop", "time", "over", "quartiles", "/ Fabric", "gradient"]
    record.show(title, headings, list(map(cells, rows)), f"over: over the loop by hand, median. {where}")
    for key, peer, most in (("target", FABRIC, TARGET), ("facade_target", ACCELERATE, FACADE_TARGET)):
        outcome = "reached" if result[key]["reached"] else "missed"
        print(f"Target, at most {most:.2f} of {peer}'s overhead: {outcome} ({result[key]['found']:.2f}).")

    record.save(result, arguments.output)
    print(f"Written to {arguments.output}")
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
