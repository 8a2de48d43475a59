"""Samples per second and memory on a GPU: Llama, GPT-2, LoRA, ViT, ResNet, BERT and 1.1B, in turns with the peers.

Every shape is trained by a loop written by hand, by Accelerate, and by `MacroStep` without and with CUDA graphs, each
eager and with `torch.compile(model)`; by eager Lightning Fabric, if all samples have the same length; and as one
big batch, if that fits and has the same gradient. All train on the same windows under bf16 autocast with float32
weights, clip at 1.0, and step with fused AdamW. The data are in pinned host memory. For the peers they are cut and
padded in advance; `MacroStep` gets the whole window, and its cutting is timed. Samples of different lengths (BERT,
chats) are cut by tokens. The peers use micro-batches of as many samples as fit if all have the longest length (8 and
2), in the original order and, "grouped", sorted by length inside the window.

Each loop first runs alone: two windows to measure the reserved memory; then again, with a learning rate of 0, for its
gradients of two windows, before clipping. These are compared with one big batch in float32. The error is max
|difference| / max |gradient|. It may be three times the error of one big batch under the same autocast. With BatchNorm
the gradient depends on the cut, so the reference is cut in the same way. With dropout it also depends on random
numbers; and in a deep network with random weights, rounding may change the gradient completely. Then the reference is
the loop by hand with the same seeds, compiled for compiled loops. After that, all loops of a shape are timed in turns,
window by window, in an order that rotates. Ratios are computed within a round.

    python benchmarks/gpu.py                            # everything, to results/gpu.json; the sweep to gpu_sweep.json
    python benchmarks/gpu.py --only bert 1.1B --add     # some shapes; the others stay in the file as they are
    python benchmarks/gpu.py --add --memory Macrobatch  # only its memory again, for existing rows; the rest stays
    python benchmarks/gpu.py --within 500 --compile-within 300      # later shapes are not compiled, or skipped
    python benchmarks/gpu.py --tiny                     # tiny models, on a CPU too: does it run?
"""

# mypy: untyped-calls-exclude="torch,transformers,accelerate,lightning"
import argparse
import contextlib
import gc
import importlib.metadata
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import models
import record
import torch
from cases import Results
from loops import ACCELERATE, GRAPHS, HAND, Job, Run, Way, hand_written, ways_of
from models import DEVICE, Shape, autocast, cut, items_of, moved, pinned
from runner import plain_table
from torch import Tensor, nn

MAX_NORM = 1.0
ALLOWED = 3.0  # the largest error, relative to that of one big batch under autocast
TOO_FAR = 0.2  # above this error of one big batch, loops are compared with each other instead
AMONG_LOOPS = 0.05  # the largest error then: all loops run the same operations
FLOOR = 1e-6  # a smaller error always counts as rounding (Llama always normalises in float32)
WINDOWS = 2  # different windows per shape
ORDER = (0, 1, 0)  # of windows when a loop runs alone: a graph is replayed with other data, and with the same
Gradients = list[Tensor]
LATE = "not run: no time was left to compile it"


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(kw_only=True)
class Row:
    """The results of one loop. `agrees`: whether its gradient is right; None: not compared, see `note`."""

    name: str
    per_second: float | None = None  # median over the windows
    quartiles: tuple[float, float] | None = None
    windows: int = 0  # number of timed windows
    over_accelerate: float | None = None  # speed relative to Accelerate, compiled if this is; median over the rounds
    over_hand: float | None = None  # the same relative to the loop by hand
    reserved_gib: float | None = None  # peak while it runs alone
    micro_batches: int | None = None
    first_window_seconds: float | None = None  # compiling and capturing included
    gradient_error: float | None = None
    gradient_scale: float | None = None  # of the window in which it is farthest from 1
    agrees: bool | None = None
    note: str = ""
    error: str = ""


@dataclass(frozen=True)
class Difference:
    """The difference between two gradients of a whole model."""

    error: float  # max |difference| / max |gradient|
    scale: float  # the best factor between them: rounding averages out here, so that a small wrong factor is visible


def difference(found: Iterable[Tensor], expected: Gradients) -> Difference:
    differences, sizes, along, length = [], [], [], []
    for own, theirs in zip(found, expected, strict=True):
        own, there = own.to(DEVICE), theirs.to(DEVICE)
        differences.append((own - there).abs().max())
        sizes.append(there.abs().max())
        along.append((own * there).sum(dtype=torch.float64))
        length.append(there.square().sum(dtype=torch.float64))
    # Unlike Python's, torch's max keeps a NaN.
    error = torch.stack(differences).max() / torch.stack(sizes).max()
    return Difference(error.item(), (torch.stack(along).sum() / torch.stack(length).sum()).item())


@dataclass
class Bench:
    """One shape with its windows. References are computed before loops are judged."""

    shape: Shape
    rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.windows = [pinned(self.shape.window(index)) for index in range(WINDOWS)]
        self.sizes = [models.size_of(window) for window in self.windows]

    def take_references(self) -> None:
        precise = torch.float32 if DEVICE == "cuda" else torch.float64
        exact = [self._reference(index, precise) for index in range(WINDOWS)]
        own = max(difference(self._reference(index, None), exact[index]).error for index in range(WINDOWS))
        self.allowed = max(ALLOWED * own, FLOOR)
        self.expected: dict[bool, list[Gradients]] = {False: exact, True: exact}  # by whether a loop is compiled
        if own > TOO_FAR:
            self.allowed = AMONG_LOOPS
        if self.shape.depends_on == "dropout" or own > TOO_FAR:
            self.expected = {False: [], True: []}  # filled when the loop by hand has run

    def _reference(self, index: int, precise: torch.dtype | None) -> Gradients:
        """The gradient of a window in plain torch, without dropout; under autocast if `precise` is None."""
        shape, window = self.shape, self.windows[index]
        model = shape.model(precise or torch.float32)
        if shape.depends_on == "dropout":
            model.eval()
        size = shape.micro_batch if shape.depends_on == "BatchNorm" else shape.together or shape.samples
        items = sum(items_of(shape, batch) for batch in cut(window, shape.samples))
        for batch in map(moved, cut(window, size, is_grouped=True)):
            if precise is not None:
                batch = {name: t.to(precise) if t.is_floating_point() else t for name, t in batch.items()}
            with autocast() if precise is None else contextlib.nullcontext():
                loss, _ = shape.loss(model, batch)
            (loss / items).backward()
        return [gradient.cpu() for gradient in gradients_of(model)]  # what they leave free between them would not count

    def run(self, ways: Sequence[Way], windows: int, deadline: float) -> None:
        """Judge each loop alone, then time all that ran, in turns. An error of a loop goes into its row."""
        for way in ways:
            row = self.rows[way.name] = Row(name=way.name)
            with self._catching(row):
                row.reserved_gib, row.first_window_seconds = self.weigh(way)
                self._judge(way, row)
            print(said_of(row, self.allowed), flush=True)
        fresh()
        self._time([way for way in ways if not self.rows[way.name].error], windows, deadline)
        fresh()

    @contextlib.contextmanager
    def _catching(self, row: Row) -> Iterator[None]:
        """A context that writes errors of a loop, and its warnings about graphs, into its row."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message="cuda_graph")
            try:
                yield
            except Exception as error:
                traceback.print_exc()
                row.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if caught:
            row.note = row.note or str(caught[0].message).rstrip(".")

    def _job(self, way: Way, learning_rate: float, max_norm: float) -> Job:
        model: Any = self.shape.model()
        if way.is_compiled:  # on a CPU it only has to run
            backend = "inductor" if DEVICE == "cuda" else "eager"
            model = torch.compile(model, dynamic=self.shape.budget is not None, backend=backend)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=learning_rate, fused=True)
        options: Any = {"windows": self.windows, "is_grouped": way.is_grouped, "is_compiled": way.is_compiled}
        return Job(shape=self.shape, model=model, optimizer=optimizer, max_norm=max_norm, **options)

    def weigh(self, way: Way) -> tuple[float | None, float]:
        """The GiB that a loop reserves in normal use, without a check of its gradients; and the seconds of its first
        window.

        Both include compiling and capturing.
        """
        fresh()
        before = torch.cuda.memory_reserved() if DEVICE == "cuda" else 0
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = way.build(self._job(way, learning_rate=1e-4, max_norm=MAX_NORM))
        began = now()
        run(0)
        seconds = round(now() - began, 3)
        for window in ORDER[1:]:
            run(window)
        return round((torch.cuda.max_memory_reserved() - before) / 2**30, 3) if DEVICE == "cuda" else None, seconds

    def _judge(self, way: Way, row: Row) -> None:
        """Compare the gradients of a loop, with a learning rate of 0."""
        fresh()
        job = self._job(way, learning_rate=0.0, max_norm=math.inf)
        run, found, seen = way.build(job), list[Difference](), list[Gradients]()
        expected = self.expected[way.is_compiled]
        is_reference = not expected and way.build is hand_written
        window = 0

        def look(*_: object) -> None:
            divisor = getattr(job.optimizer, "grad_scale", None)  # a fused optimizer divides by it in its own kernel
            own = (gradient if divisor is None else gradient / divisor for gradient in gradients_of(job.model))
            if is_reference:
                seen.append([gradient.cpu().clone() for gradient in own])  # on the host: device memory is measured
            elif expected:
                found.append(difference(own, expected[window]))

        job.optimizer.register_step_pre_hook(look)
        for window in ORDER:
            torch.manual_seed(100 + window)
            row.micro_batches = run(window)
        if is_reference:
            self.expected[way.is_compiled] = seen
            row.note = f"not compared: with {self.shape.depends_on or 'its rounding'} it is the reference of the others"
        elif not expected:
            row.note = "not compared: the loop by hand failed, which is the reference"
        elif len(found) != len(ORDER):
            raise RuntimeError(f"{len(ORDER)} windows were handed over, and {len(found)} optimizer steps taken")
        else:
            # Unlike Python's, torch's max keeps a NaN.
            row.gradient_error = torch.tensor([each.error for each in found], dtype=torch.float64).max().item()
            row.gradient_scale = round(max(found, key=lambda each: abs(each.scale - 1)).scale, 6)
            row.agrees = row.gradient_error <= self.allowed

    def _time(self, ways: Sequence[Way], windows: int, deadline: float) -> None:
        """Time the loops window by window, in turns, after each has run all windows once. Stop at the deadline."""
        run: Run | None
        runs: dict[str, Run] = {}
        seconds: dict[str, list[float]] = {}
        for way in ways:
            with self._catching(self.rows[way.name]):
                run = way.build(self._job(way, learning_rate=1e-4, max_norm=MAX_NORM))
                for index in range(WINDOWS):
                    run(index)
                runs[way.name], seconds[way.name] = run, []
            run = None  # so that nothing of a failed loop stays in memory
        gc.collect()
        for number in range(windows):
            if number and time.perf_counter() > deadline:
                break
            first = number % max(len(seconds), 1)
            for name in [*list(seconds)[first:], *list(seconds)[:first]]:
                with self._catching(self.rows[name]):
                    began = now()
                    runs[name](number % WINDOWS)
                    seconds[name].append(now() - began)
                if self.rows[name].error:
                    del seconds[name], runs[name]
        for way in ways:
            if way.name in seconds:
                row, own, end = self.rows[way.name], seconds[way.name], ", compiled" if way.is_compiled else ""
                median, *around = record.quartiles([self.sizes[n % WINDOWS] / took for n, took in enumerate(own)])
                row.per_second, row.windows = round(median, 1), len(own)
                row.quartiles = round(around[0], 1), round(around[1], 1)
                row.over_accelerate = ratio_of(own, seconds.get(ACCELERATE + end))
                row.over_hand = ratio_of(own, seconds.get(HAND + end))


def ratio_of(own: list[float], theirs: list[float] | None) -> float | None:
    """The median ratio of the times of two loops within a round: above 1 if the first one is faster."""
    if theirs is None:
        return None
    return round(record.quartiles([their / mine for mine, their in zip(own, theirs, strict=True)])[0], 3)


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """The gradients of the trained parameters."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            yield parameter.grad


def fresh() -> None:
    """Clear everything that a loop has left, before the next one."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # small, but they would keep large blocks from being freed
        torch.cuda.empty_cache()


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ----------------------------------------------------------------------------------------------------------- reporting


def said_of(row: Row, allowed: float) -> str:
    """The line to print after a loop has run alone."""
    if row.error:
        return f"  {row.name}: FAILED, {row.error}"
    words = {True: "ok", False: "WRONG", None: "not compared"}[row.agrees]
    error = "" if row.gradient_error is None else f" {row.gradient_error:.1e} of {allowed:.1e}"
    memory = "" if row.reserved_gib is None else f", {row.reserved_gib:.2f} GiB"
    note = f" ({row.note})" if row.note else ""
    return f"  {row.name}: first window {row.first_window_seconds:.2f} s{memory}, gradient {words}{error}{note}"


def cells_of(row: Row) -> list[str]:
    if row.per_second is None or row.quartiles is None:
        return [row.name, "failed" if row.error else "not run", "", "", "", ""]
    memory = "" if row.reserved_gib is None else f"{row.reserved_gib:.2f}"
    times = "" if row.over_accelerate is None else f"{row.over_accelerate:.2f}"
    around = " - ".join(f"{quartile:,.0f}" for quartile in row.quartiles)
    verdict = {True: "ok", False: "WRONG", None: "not compared"}[row.agrees]
    return [row.name, f"{row.per_second:,.0f}", around, times, memory, verdict]


def measure(shape: Shape, windows: int, compiles: bool, deadline: float) -> dict[str, Any]:
    """Measure the rows of a shape, in groups whose models fit into memory."""
    print(f"\n{shape.title}", flush=True)
    described: dict[str, Any] = {
        "name": shape.title,
        "shape": shape.name,
        "section": shape.section,
        "date": record.today(),
        "source": record.source(),
        "unit": shape.unit,
        "micro_batch": shape.micro_batch,
        "micro_batches": shape.micro_batches,
        "largest_micro_batch": shape.budget,
        "rows": [],
        "error": "",
    }
    began = time.perf_counter()
    fresh()
    try:
        bench = Bench(shape)
        bench.take_references()
    except Exception as error:  # e.g. a package that is not installed
        traceback.print_exc()
        return described | {"error": f"{type(error).__name__}: {error}"[:200]}
    compiled = list(ways_of(shape, is_compiled=True)) if shape.section != "sweep" else []
    ways = [*ways_of(shape, is_compiled=False), *(compiled if compiles else [])]
    for start in range(0, len(ways), shape.alive):
        bench.run(ways[start : start + shape.alive], windows, deadline)
    rows = [*bench.rows.values(), *(Row(name=way.name, note=LATE) for way in compiled if not compiles)]
    torch._dynamo.reset()
    headings = ["", f"{shape.unit}/s", "quartiles", "/ Accelerate", "GiB", "gradient"]
    print(f"\n{plain_table(headings, [cells_of(row) for row in rows])}", flush=True)
    return described | {
        "size_of_a_window": round(sum(bench.sizes) / len(bench.sizes)),
        "gradient_error_allowed": bench.allowed,
        "seconds": round(time.perf_counter() - began),
        "rows": [asdict(row) for row in rows],
    }


def weigh(shape: Shape, case: dict[str, Any], loops: Sequence[str], compiles: bool) -> dict[str, Any]:
    """Measure the memory of some loops again. Everything else in their rows stays."""
    print(f"\n{shape.title}", flush=True)
    bench, rows = Bench(shape), {row["name"]: row for row in case["rows"]}
    for is_compiled in (False, True) if compiles and shape.section != "sweep" else (False,):
        for way in ways_of(shape, is_compiled):
            row = rows.get(way.name)
            if row is not None and row["per_second"] is not None and way.name.replace(", compiled", "") in loops:
                before, (memory, _) = row["reserved_gib"], bench.weigh(way)
                row["reserved_gib"] = memory
                print(f"  {way.name}: {memory} GiB, {before} before", flush=True)
    fresh()
    torch._dynamo.reset()
    return case


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(shape.name for shape in [*models.SHAPES, *models.TINY]))
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of: {', '.join(names)}"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too: does it run?")
    parser.add_argument("--windows", type=int, default=10, help="to time, of each loop (default: 10)")
    parser.add_argument(
        "--compile-within", type=float, default=math.inf, metavar="SECONDS", help="of the start; later nothing is"
    )
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS", help="of the start; then no more is timed"
    )
    loops = list(dict.fromkeys(way.name for shape in models.SHAPES for way in ways_of(shape, is_compiled=False)))
    parser.add_argument(
        *("--memory",),
        nargs="+",
        choices=loops,
        default=[],
        metavar="ROW",
        help=f"only the memory of these, anew, such as {GRAPHS!r}",
    )
    parser.add_argument("--add", action="store_true", help="keep the other shapes that the file of results has")
    record.add_output(parser, "gpu")
    arguments = parser.parse_args()
    if arguments.memory and not arguments.add:
        parser.error("--memory needs --add: the rows must be there")
    if arguments.windows < 1:
        parser.error(f"--windows must be at least 1: got {arguments.windows}")
    if arguments.tiny and arguments.output.name == "gpu.json":
        arguments.output = arguments.output.with_name("gpu_tiny.json")
    return arguments


def load_peers() -> list[str]:
    """Import all peers before anything is timed: objects of later imports would slow down garbage collection."""
    loaded = []
    for name in ("torch", "transformers", "accelerate", "lightning", "peft"):
        with contextlib.suppress(ImportError):  # its shapes and loops will report it
            importlib.import_module(name)
            importlib.metadata.version(name)
            loaded.append(name)
    gc.collect()
    gc.freeze()
    return loaded


def main() -> int:
    arguments, began = parsed(), time.perf_counter()
    if DEVICE == "cpu" and not arguments.tiny:
        print("It needs a CUDA device; --tiny shows that it runs.", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")  # of the peers
    torch.set_float32_matmul_precision("highest")  # no TF32 in the reference; under autocast nothing is float32
    torch.backends.cudnn.allow_tf32 = False
    head: dict[str, Any] = {
        **record.stamp("samples a second and memory, all loops of a shape in turns in one process", *load_peers()),
        "device": DEVICE,
        "processor": record.machine(DEVICE),
        "host": record.machine(),
        "precision": "bf16 autocast, float32 weights" if DEVICE == "cuda" else "float32",
        "optimizer": f"fused AdamW, gradients clipped at {MAX_NORM}",
    }
    swept = arguments.output.with_stem(f"{arguments.output.stem}_sweep")
    files = {is_swept: Results(swept if is_swept else arguments.output, head) for is_swept in (False, True)}
    for results in files.values():
        if arguments.add and results.output.exists():
            results.read()
    print(f"{head['processor']}; {record.in_words(head['versions'])}")
    for shape in models.TINY if arguments.tiny else models.SHAPES:
        if shape.name in arguments.only and time.perf_counter() < (deadline := began + arguments.within):
            compiles, results = time.perf_counter() - began < arguments.compile_within, files[shape.section == "sweep"]
            if arguments.memory:
                results.add(weigh(shape, results.case_of(shape.name), arguments.memory, compiles))
            else:
                results.add(measure(shape, arguments.windows, compiles, deadline))
    for each in (target for results in files.values() for target in results.targets):
        bound = f"at least {each['at_least']}" if "at_least" in each else f"at most {each['at_most']}"
        print(f"{'reached' if each['reached'] else 'MISSED '}  {each['name']}: {bound}, found {each['found']}")
    written = " and ".join(str(results.output) for results in files.values() if results.ran)
    print(f"Written to {written or 'no file'}, after {time.perf_counter() - began:.0f} s")
    ran = [case for results in files.values() for case in results.ran]
    rows = [row for case in ran for row in case["rows"]]
    return int(any(case["error"] for case in ran) or any(row["error"] or row["agrees"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
