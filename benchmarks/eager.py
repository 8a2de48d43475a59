"""Tokens per second of eager micro-steps beside a loop by hand, plain and under `fully_shard` on one rank, in turns.

It shows what the library's Python costs where a GPU waits for Python. Under `fully_shard`, one rank communicates
nothing, and the loop by hand switches the reduction off until the last micro-batch, as torch's documentation says.
Plain models run under bf16 autocast; sharded ones have bf16 parameters in forwards and float32 reductions. All have
float32 weights, clip at 1.0 and step with fused AdamW. The gradient norms of the first windows are compared. The loop
by hand runs twice, with two copies of the model: the ratio of the two shows how much of a difference is noise.

    python benchmarks/eager.py                          # on a GPU, to results/eager.json
    python benchmarks/eager.py --tiny                   # tiny models, on a CPU too: does it run?
"""

# mypy: untyped-calls-exclude="torch,transformers"
import argparse
import contextlib
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import models
import record
import torch
import torch.distributed as dist
from models import DEVICE
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from macrobatch import Accumulator, MacroStep

HAND = "by hand"
AGAIN = "by hand, again"  # the same loop with another copy of the model: what this method can tell apart
SHAPES = {  # model, samples in a micro-batch, tokens in a sample, micro-batches in a window, whether it is sharded
    "110M 1x512x16": ("110M", 1, 512, 16, False),
    "41M 2x256x16": ("41M", 2, 256, 16, False),
    "110M 4x1024x8": ("110M", 4, 1024, 8, False),
    "110M 1x512x16, fully_shard": ("110M", 1, 512, 16, True),
    "110M 4x1024x8, fully_shard": ("110M", 4, 1024, 8, True),
    "1.1B 1x2048x8, fully_shard": ("1.1B", 1, 2048, 8, True),
}
TINY = {"tiny": ("tiny", 1, 16, 4, False), "tiny, fully_shard": ("tiny", 1, 16, 4, True)}
TARGET = 0.99  # of the speed of the loop by hand
TOLERANCE = 2e-2  # of gradient norms, in bf16


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    per_second: float
    over_hand: float | None  # the median, over the rounds, of its speed over that by hand
    norm_error: float

    @property
    def agrees(self) -> bool:
        return self.norm_error <= TOLERANCE


def trainee(size: str, length: int, is_sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = models.llama(size, length).to(DEVICE)
    if is_sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = model(batch).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def by_hand(model: Any, optimizer: torch.optim.Optimizer, micro: int) -> Callable[[Tensor], Any]:
    def run(window: Tensor) -> Any:
        batches = window.split(micro)
        for index, batch in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == len(batches) - 1)
            (loss_of(model, batch) / len(batches)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return run


def accumulator(model: Any, optimizer: torch.optim.Optimizer, micro: int, steps: int) -> Callable[[Tensor], Any]:
    acc = Accumulator(model, optimizer, steps=steps, max_norm=1.0)

    def run(window: Tensor) -> Any:
        for batch in acc.batches(window.split(micro)):
            acc.backward(loss_of(model, batch), items=len(batch))
            result = acc.step()
        assert result is not None
        return result.grad_norm

    return run


def macro_step(model: Any, optimizer: torch.optim.Optimizer, micro: int, gather: Any) -> Callable[[Tensor], Any]:
    train = MacroStep(model, optimizer, loss_of, micro=micro, max_norm=1.0, gather=gather)
    return lambda window: train(window).grad_norm


def measure(name: str, rounds: int) -> list[Row]:
    size, micro, length, steps, is_sharded = (SHAPES | TINY)[name]
    words = models.LLAMAS[size][3]
    windows = [torch.randint(words, (micro * steps, length), device=DEVICE) for _ in range(2)]
    runs = {
        HAND: by_hand(*trainee(size, length, is_sharded), micro),
        AGAIN: by_hand(*trainee(size, length, is_sharded), micro),
        "Accumulator": accumulator(*trainee(size, length, is_sharded), micro, steps),
        "MacroStep": macro_step(*trainee(size, length, is_sharded), micro, "micro"),
    }
    if is_sharded:
        runs['MacroStep, gather="window"'] = macro_step(*trainee(size, length, is_sharded), micro, "window")
    norms = {loop: [float(run(window)) for window in windows] for loop, run in runs.items()}
    times: dict[str, list[float]] = {loop: [] for loop in runs}
    order = random.Random(0)
    gc.collect()
    gc.freeze()  # collections would fall on one loop or another
    for number in range(rounds):
        for loop in order.sample(list(runs), len(runs)):
            begin = time.perf_counter()
            runs[loop](windows[number % 2])
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times[loop].append(time.perf_counter() - begin)
    tokens = micro * steps * length
    rows = []
    for loop, taken in times.items():
        ratio = statistics.median([hand / own for hand, own in zip(times[HAND], taken, strict=True)])
        error = max(abs(a - b) / b for a, b in zip(norms[loop], norms[HAND], strict=True))
        speed = round(tokens / statistics.median(taken), 1)
        over = None if loop == HAND else round(ratio, 3)
        rows.append(Row(name=loop, per_second=speed, over_hand=over, norm_error=error))
    return rows


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/rank", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def show(name: str, rows: list[Row]) -> None:
    cells = [
        [row.name, f"{row.per_second:,.0f}", f"{row.over_hand or 1:.3f}", "ok" if row.agrees else "WRONG"]
        for row in rows
    ]
    record.show(name, ["loop", "tokens/s", "/ by hand", "norms"], cells, record.machine(DEVICE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="windows to time, of each loop (default: 10)")
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME", help="some shapes")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too: does it run?")
    record.add_output(parser, "eager")
    arguments = parser.parse_args()
    if DEVICE == "cpu" and not arguments.tiny:
        print("This benchmark needs a GPU. --tiny runs on a CPU too.", file=sys.stderr)
        return 2
    cases = {}
    for name in TINY if arguments.tiny else arguments.only:
        with one_rank():
            cases[name] = measure(name, arguments.rounds)
        show(name, cases[name])
    result = {
        **record.stamp(
            "tokens per second of eager micro-steps, in turns with the loop by hand", "torch", "transformers"
        ),
        "device": DEVICE,
        "processor": record.machine(DEVICE),
        "source": record.source(),
        "cases": [
            {"name": name, "rows": [{**asdict(row), "agrees": row.agrees} for row in rows]}
            for name, rows in cases.items()
        ],
        "targets": [
            {
                "name": f"{name}: {row.name}, speed over the loop by hand",
                "at_least": TARGET,
                "found": row.over_hand,
                "reached": row.over_hand >= TARGET,
            }
            for name, rows in cases.items()
            for row in rows
            if row.over_hand is not None and row.name != AGAIN
        ],
    }
    record.save(result, arguments.output)
    print(f"Written to {arguments.output}")
    return 0 if all(row.agrees for rows in cases.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
