"""The cost of two terms on a GPU, each with its own denominator, compared with the same loss as one.

Both train the same model on the same batches, and compute the same two losses: cross-entropy over the tokens, and a
penalty over the sequences. `one` adds them and returns one loss with one count, as is usual (its gradient differs if
sequences have different lengths); `two` returns a dict. Windows are timed in turns, so that slow phases of the machine
affect both. The gradient of `two` is compared with one big batch in plain torch, in float64 on a small model. torch's
own debug mode for synchronisations counts the reads of the host, over a whole window with its step.

    python benchmarks/terms.py            # prints a table, and writes results/terms.json
    python benchmarks/terms.py --tiny     # a tiny model, on a CPU too: does it run?
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from macrobatch import MacroStep

MOST = 1.01  # the largest time relative to one loss
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        parts = self.qkv(self.first(hidden)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        grown: Tensor = self.down(F.gelu(self.up(self.second(hidden))))
        return hidden + grown


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    width: int
    layers: int
    heads: int
    samples: int  # in a micro-batch
    length: int
    micro_batches: int
    words: int = 32_000

    def model(self, device: str) -> Decoder:
        torch.manual_seed(0)
        return Decoder(self.width, self.layers, self.heads, self.words).to(device)

    def batch(self, device: str, seed: int = 0) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        count = self.samples * self.micro_batches
        lengths = torch.randint(self.length // 8, self.length + 1, (count, 1), generator=draw)
        tokens = torch.randint(0, self.words, (count, self.length), generator=draw)
        batch = {"tokens": tokens, "mask": torch.arange(self.length) < lengths}
        return {name: tensor.to(device) for name, tensor in batch.items()}


CASES = (
    Case(name="110M, 1 x 512 x 16", width=768, layers=12, heads=12, samples=1, length=512, micro_batches=16),
    Case(name="41M, 2 x 256 x 16", width=512, layers=8, heads=8, samples=2, length=256, micro_batches=16),
    Case(name="110M, 4 x 1024 x 8", width=768, layers=12, heads=12, samples=4, length=1024, micro_batches=8),
)
TINY = Case(name="tiny", width=32, layers=2, heads=2, samples=2, length=16, micro_batches=4, words=64)


def losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over the tokens, their number, and the mean over the sequences."""
    device = batch["tokens"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits, mask = model(batch["tokens"]), batch["mask"]
        each = F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none").view_as(mask)
    items = mask.sum()
    penalty = (each.square() * mask).sum(1) / mask.sum(1)
    return (each * mask).sum() / items, items, 0.01 * penalty.mean()


def one(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    tokens, items, penalty = losses(model, batch)
    return tokens + penalty, items


def two(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor | int]]:
    tokens, items, penalty = losses(model, batch)
    return {"tokens": (tokens, items), "sequences": (penalty, len(batch["mask"]))}


def counts(batch: Batch) -> dict[str, Tensor | int]:
    return {"tokens": batch["mask"].sum(), "sequences": len(batch["mask"])}


def trainer(case: Case, device: str, loss_fn: Any, *, cuda_graph: bool) -> Callable[[Batch], object]:
    model = case.model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    options: dict[str, Any] = {"counts": counts} if loss_fn is two else {}
    return MacroStep(model, optimizer, loss_fn, micro=case.samples, max_norm=1.0, cuda_graph=cuda_graph, **options)


def milliseconds(step: Callable[[Batch], object], batch: Batch) -> float:
    synchronise(batch)
    started = time.perf_counter()
    step(batch)
    synchronise(batch)
    return 1e3 * (time.perf_counter() - started)


def synchronise(batch: Batch) -> None:
    if batch["tokens"].is_cuda:
        torch.cuda.synchronize()


def host_reads(step: Callable[[Batch], object], batch: Batch) -> int | None:
    """The number of synchronisations in one window; None on a CPU, where there are none."""
    if not batch["tokens"].is_cuda:
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught)


def error_of_two(device: str) -> float:
    """Max |difference| / max |gradient|, against one big batch in plain torch, in float64."""
    model, batch = TINY.model(device).double(), TINY.batch(device)
    tokens, _, penalty = losses(model, batch)
    expected = torch.autograd.grad(tokens + penalty, list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    MacroStep(model, optimizer, two, micro=3, counts=counts)(batch)
    found = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    apart = max((f - e).abs().max().item() for f, e in zip(found, expected, strict=True))
    return apart / max(e.abs().max().item() for e in expected)


def measured(case: Case, device: str, *, cuda_graph: bool, windows: int) -> dict[str, Any]:
    batch = case.batch(device)
    steps = {loss_fn: trainer(case, device, loss_fn, cuda_graph=cuda_graph) for loss_fn in (one, two)}
    for step in steps.values():
        for _ in range(3):
            step(batch)
    times: dict[Any, list[float]] = {loss_fn: [] for loss_fn in steps}
    for _ in range(windows):
        for loss_fn, step in steps.items():
            times[loss_fn].append(milliseconds(step, batch))
    ratio = statistics.median(b / a for a, b in zip(times[one], times[two], strict=True))
    return {
        "case": case.name,
        "cuda_graph": cuda_graph,
        "one_ms": statistics.median(times[one]),
        "two_ms": statistics.median(times[two]),
        "target": {"found": ratio, "at_most": MOST, "reached": ratio <= MOST},
        "host_reads_one": host_reads(steps[one], batch),
        "host_reads_two": host_reads(steps[two], batch),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--windows", type=int, default=40, help="to time, of each (default: 40)")
    record.add_output(parser, "terms")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() or arguments.tiny):
        print("this needs a GPU; --tiny runs on a CPU, and says nothing about speed.", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [TINY] if arguments.tiny else CASES
    graphs = [False, True] if device == "cuda" else [False]
    error = error_of_two(device)
    rows = [measured(case, device, cuda_graph=graph, windows=arguments.windows) for case in cases for graph in graphs]
    result = record.stamp("two terms beside one", "torch") | {
        "machine": record.machine(device),
        "gradient": {"error": error, "exact": error <= 1e-12},
        "rows": rows,
    }
    cells = [
        [
            row["case"] + (", graphs" if row["cuda_graph"] else ""),
            f"{row['one_ms']:.2f}",
            f"{row['two_ms']:.2f}",
            f"{row['target']['found']:.4f}",
            f"{row['host_reads_one']} / {row['host_reads_two']}",
        ]
        for row in rows
    ]
    where = f"{result['machine']}; {record.in_words(result['versions'])}; gradient of two terms: {error:.1e}"
    record.show("Milliseconds a window", ["case", "one loss", "two terms", "ratio", "host reads"], cells, where)
    output = arguments.output if not arguments.tiny else Path(arguments.output).with_name("terms_tiny.json")
    record.save(result, output)
    print(f"Written to {output}")
    return 0 if error <= 1e-12 else 1


if __name__ == "__main__":
    sys.exit(main())
