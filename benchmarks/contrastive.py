"""Contrastive training on a GPU with batches that do not fit: pairs per second and memory, compared with other ways.

It trains a BERT-like encoder under bfloat16 autocast with AdamW, and with a loss in which each text finds its partner
among all texts. The ways are:

- Macrobatch: `MacroStep(joint=...)` with `contrastive_loss`, eagerly, and with `cuda_graph=True`;
- by hand: the two passes of GradCache, with the same random numbers in both, and the matrix of all pairs;
- cached loss: the method of sentence-transformers' CachedMultipleNegativesRankingLoss (the loss by blocks of rows, the
  second pass in a hook of its backward), written here, so that only torch is needed;
- one big batch, if it fits.

The gradients of all ways are checked: ours against one big batch in float64 on a tiny model, and each of them against
the loop by hand on the case itself, in its own precision.

    python benchmarks/contrastive.py              # prints tables, and writes results/contrastive.json
    python benchmarks/contrastive.py --only sizes # three sizes, with the other ways; `--only pairs`: 1,024 to 65,536;
                                                  # `--only kept`: what keeping the graphs that fit saves
    python benchmarks/contrastive.py --tiny       # tiny models, on a CPU too: does it run?
    python benchmarks/contrastive.py --figure     # docs/figures/retrieval.png, from examples/contrastive.py, on a CPU
"""

# mypy: untyped-calls-exclude=torch
import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from macrobatch import Encoded, MacroStep, contrastive_loss
from macrobatch._joint import kept_graphs

SCALE = 20.0
Batch = dict[str, Tensor]
Step = Callable[[Batch], object]
Gradients = list[Tensor]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(samples, length, width)
        hidden = self.first(hidden + F.dropout(self.out(mixed), self.dropout, self.training))
        grown = F.dropout(self.down(F.gelu(self.up(hidden))), self.dropout, self.training)
        normed: Tensor = self.second(hidden + grown)
        return normed


class Encoder(nn.Module):
    """Encodes texts of token ids, (samples, length), as one row each."""

    def __init__(self, width: int, layers: int, heads: int, length: int, words: int, dropout: float) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.words(tokens) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        pooled: Tensor = hidden.mean(1)
        return pooled


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    layers: int
    pairs: int
    length: int
    micro: int
    width: int = 768
    heads: int = 12
    words: int = 30_000
    dropout: float = 0.1

    def model(self, device: str) -> Encoder:
        torch.manual_seed(0)
        sizes = self.width, self.layers, self.heads, self.length, self.words, self.dropout
        return Encoder(*sizes).to(device).train()

    def batch(self, device: str, seed: int = 0) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        shape = self.pairs, self.length
        return {side: torch.randint(0, self.words, shape, generator=draw).to(device) for side in ("a", "b")}

    def parts(self, batch: Batch) -> list[Batch]:
        starts = range(0, self.pairs, self.micro)
        return [{side: rows[start : start + self.micro] for side, rows in batch.items()} for start in starts]


# The three sizes at which other libraries were measured before, with the wanted speed relative to the cached loss.
SIZES = (
    (Case(name="12 layers, 1,024 pairs of 64, micro 16", layers=12, pairs=1024, length=64, micro=16), 3.5),
    (Case(name="12 layers, 4,096 pairs of 64, micro 64", layers=12, pairs=4096, length=64, micro=64), 1.7),
    (Case(name="6 layers, 2,048 pairs of 32, micro 8", layers=6, pairs=2048, length=32, micro=8), 6.0),
)
# One size of micro-batch, with more and more pairs: memory should only grow by the encodings.
PAIRS = tuple(
    Case(name=f"6 layers, {pairs:,} pairs of 32, micro 256", layers=6, pairs=pairs, length=32, micro=256)
    for pairs in (1024, 4096, 16_384, 65_536)
)
LARGE = Case(name="6 layers, 4,096 pairs of 32, micro 2,048", layers=6, pairs=4096, length=32, micro=2048)
MOST_OF_ONE_BIG_BATCH = 1.4  # the largest time relative to one big batch, at large micro-batches
MOST_MEMORY = 1.3  # the largest memory: so many times that at 1,024 pairs, plus the encodings
TINY = Case(name="tiny", layers=2, pairs=24, length=8, micro=5, width=32, heads=2, words=50, dropout=0.1)


# ---------------------------------------------------------------------------------------------- the ways


def encode(model: Encoder, batch: Batch) -> tuple[Tensor, Tensor]:
    device = batch["a"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and model.positions.dtype == torch.float32):
        return model(batch["a"]), model(batch["b"])


def unit(rows: Tensor) -> Tensor:
    """Rows of length 1, in float32 or wider."""
    return F.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)))


def cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """The loss with the matrix of all pairs."""
    logits = SCALE * unit(a) @ unit(b).T
    return F.cross_entropy(logits, torch.arange(len(logits), device=a.device))


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def ours(
    case: Case, model: Encoder, optimizer: torch.optim.Optimizer, *, cuda_graph: bool = False, auto: bool = False
) -> Step:
    def loss_fn(model: Encoder, batch: Batch) -> Encoded:
        a, b = encode(model, batch)
        return Encoded(a=a, b=b)

    def joint(_: Encoder, encoded: Encoded) -> Tensor:
        return contrastive_loss(encoded.a, encoded.b, scale=SCALE, symmetric=False)

    micro: Any = "auto" if auto else case.micro
    return MacroStep(model, optimizer, loss_fn, joint=joint, micro=micro, cuda_graph=cuda_graph)


def recorded(case: Case, model: Encoder, optimizer: torch.optim.Optimizer) -> Step:
    return ours(case, model, optimizer, cuda_graph=True)


def whatever_fits(case: Case, model: Encoder, optimizer: torch.optim.Optimizer) -> Step:
    """Macrobatch that keeps as many graphs of the first pass as fit, which need no second forward."""
    return ours(case, model, optimizer, auto=True)


def whatever_fits_twice(case: Case, model: Encoder, optimizer: torch.optim.Optimizer) -> Step:
    """The same with every micro-batch run twice."""
    with mock.patch.dict(kept_graphs.ROOMS, clear=True):
        return ours(case, model, optimizer, auto=True)


@contextmanager
def random_numbers(states: tuple[Tensor, ...]) -> Iterator[None]:
    """A context with the random states of an earlier moment."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state)
        yield


def states_now() -> tuple[Tensor, ...]:
    on_gpu = (torch.cuda.get_rng_state(),) if torch.cuda.is_available() else ()
    return (torch.get_rng_state(), *on_gpu)


def first_pass(case: Case, model: Encoder, batch: Batch) -> tuple[list[Batch], list[Any], list[tuple[Tensor, Tensor]]]:
    parts, states, encoded = case.parts(batch), [], []
    with torch.no_grad():
        for part in parts:
            states.append(states_now())
            encoded.append(encode(model, part))
    return parts, states, encoded


def by_hand(case: Case, model: Encoder, optimizer: torch.optim.Optimizer) -> Step:
    """The two passes of GradCache."""

    def step(batch: Batch) -> None:
        parts, states, encoded = first_pass(case, model, batch)
        a, b = (torch.cat(rows).requires_grad_() for rows in zip(*encoded, strict=True))
        cross_entropy(a, b).backward()
        assert a.grad is not None
        assert b.grad is not None
        gradients = zip(a.grad.split(case.micro), b.grad.split(case.micro), strict=True)
        for part, state, (of_a, of_b) in zip(parts, states, gradients, strict=True):
            with random_numbers(state):
                rows_a, rows_b = encode(model, part)
            ((rows_a * of_a).sum() + (rows_b * of_b).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cached_loss(case: Case, model: Encoder, optimizer: torch.optim.Optimizer) -> Step:
    """The method of sentence-transformers."""

    def step(batch: Batch) -> None:
        parts, states, encoded = first_pass(case, model, batch)
        rows = [[one.detach().requires_grad_() for one in pair] for pair in encoded]
        a, b = (torch.cat(list(column)) for column in zip(*rows, strict=True))
        total = torch.zeros((), device=a.device)
        for start in range(0, len(a), case.micro):
            block = slice(start, start + case.micro)
            logits = SCALE * unit(a[block]) @ unit(b).T
            answers = torch.arange(start, start + len(logits), device=a.device)
            loss = F.cross_entropy(logits, answers) * len(logits) / len(a)
            loss.backward(retain_graph=True)
            total += loss.detach()
        value = total.requires_grad_()

        def encode_again(gradient: Tensor) -> None:
            for part, state, leaves in zip(parts, states, rows, strict=True):
                with torch.enable_grad(), random_numbers(state):
                    found = encode(model, part)
                    pairs = zip(found, leaves, strict=True)
                    dots = [(one * leaf.grad).sum() for one, leaf in pairs if leaf.grad is not None]
                    ((dots[0] + dots[1]) * gradient).backward()

        value.register_hook(encode_again)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def one_big_batch(_: Case, model: Encoder, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> None:
        cross_entropy(*encode(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[[Case, Encoder, torch.optim.Optimizer], Step]] = {
    "Macrobatch": ours,
    "Macrobatch, cuda_graph": recorded,
    "by hand": by_hand,
    "cached loss": cached_loss,
    "one big batch": one_big_batch,
}
KEEPING = {"auto": whatever_fits, "auto, all of it twice": whatever_fits_twice}


# ---------------------------------------------------------------------------------------------- measuring


def fresh(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(case: Case, name: str, device: str, seconds: float) -> dict[str, Any]:
    """Pairs per second over at least two windows, and the peak of reserved memory."""
    fresh(device)
    row: dict[str, Any] = {"case": case.name, "way": name, "pairs_per_second": None, "reserved_gib": None, "error": ""}
    try:
        model, batch = case.model(device), case.batch(device)
        step = (WAYS | KEEPING)[name](case, model, optimizer_for(model))
        for _ in range(3):  # with graphs, the second window records
            step(batch)
        synchronise(device)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 2 or time.perf_counter() - began < seconds:
            started = time.perf_counter()
            step(batch)
            synchronise(device)
            times.append(time.perf_counter() - started)
        row["pairs_per_second"] = case.pairs / statistics.median(times)
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else None
    except torch.OutOfMemoryError as error:
        row["error"] = f"does not fit: {str(error).splitlines()[0][:80]}"
    return row


def gradients_of(case: Case, name: str, device: str, dtype: torch.dtype = torch.float32, windows: int = 1) -> Gradients:
    """The gradients that the optimizer gets in the last of some equal windows, with a learning rate of 0."""
    model, batch = case.model(device).to(dtype), case.batch(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: Gradients = []

    def note(*_: Any) -> None:
        found[:] = [p.grad.detach().double().cpu() for p in model.parameters() if p.grad is not None]

    optimizer.register_step_pre_hook(note)
    step = WAYS[name](case, model, optimizer)
    for _ in range(windows):
        torch.manual_seed(1)
        step(batch)
    return found


def apart(found: Gradients, expected: Gradients) -> float:
    largest = max(e.abs().max().item() for e in expected)
    return max((f - e).abs().max().item() for f, e in zip(found, expected, strict=True)) / largest


def exactness(device: str) -> float:
    """The error of ours against one big batch, in float64, without dropout."""
    case = replace(TINY, dropout=0.0)
    return apart(*(gradients_of(case, name, device, torch.float64) for name in ("Macrobatch", "one big batch")))


def differences(case: Case, device: str) -> dict[str, float]:
    """The error of each way against the loop by hand, with the same dropout. (One big batch has other masks.)"""
    expected = gradients_of(case, "by hand", device)
    names = ["Macrobatch", "cached loss", *["Macrobatch, cuda_graph"] * (device == "cuda")]
    return {name: apart(gradients_of(case, name, device, windows=3), expected) for name in names}


# ---------------------------------------------------------------------------------------------- the tables


def sizes_table(device: str, seconds: float, cases: Any = SIZES) -> dict[str, Any]:
    rows, targets = [], []
    for case, times in cases:
        ways = [name for name in WAYS if device == "cuda" or "graph" not in name]
        own = [measured(case, name, device, seconds) for name in ways]
        found = {row["way"]: row["pairs_per_second"] for row in own}
        best = found.get("Macrobatch, cuda_graph") or found["Macrobatch"]
        ratio = best / found["cached loss"]
        targets.append({"case": case.name, "found": ratio, "at_least": times, "reached": ratio >= times})
        rows += own
    return {"rows": rows, "targets": targets, "gradients": differences(cases[0][0], device)}


def pairs_table(device: str, seconds: float, cases: Any = PAIRS, large: Case = LARGE) -> dict[str, Any]:
    ways = ["Macrobatch", "Macrobatch, cuda_graph"] if device == "cuda" else ["Macrobatch"]
    rows = [measured(case, name, device, seconds) for case in cases for name in ways]
    targets = []
    for name in ways:
        own = [row for row in rows if row["way"] == name]
        if device == "cuda" and all(row["reserved_gib"] for row in own):
            encodings = 2 * cases[-1].pairs * cases[-1].width * 2 / 2**30  # both sides, in bfloat16
            most = MOST_MEMORY * own[0]["reserved_gib"] + 2 * encodings  # with their gradients
            found = own[-1]["reserved_gib"]
            targets.append({"case": f"memory, {name}", "found": found, "at_most": most, "reached": found <= most})
    both = [measured(large, name, device, seconds) for name in ("Macrobatch", "one big batch")]
    rows += both
    if all(row["pairs_per_second"] for row in both):
        ratio = both[1]["pairs_per_second"] / both[0]["pairs_per_second"]
        most = MOST_OF_ONE_BIG_BATCH
        targets.append({"case": f"time, {large.name}", "found": ratio, "at_most": most, "reached": ratio <= most})
    return {"rows": rows, "targets": targets}


def kept_table(device: str, seconds: float, cases: Any) -> dict[str, Any]:
    """How much time it saves to keep the graphs that fit. There is no target: how much fits depends on the machine."""
    rows = [measured(case, name, device, seconds) for case in cases for name in KEEPING]
    for kept, twice in zip(rows[::2], rows[1::2], strict=True):
        if kept["pairs_per_second"] and twice["pairs_per_second"]:
            kept["saved"] = 1 - twice["pairs_per_second"] / kept["pairs_per_second"]
    return {"rows": rows, "targets": []}


def show(title: str, table: dict[str, Any], where: str) -> None:
    cells = [
        [
            row["case"],
            row["way"],
            "" if row["pairs_per_second"] is None else f"{row['pairs_per_second']:,.0f}",
            "" if row["reserved_gib"] is None else f"{row['reserved_gib']:.1f}",
            row["error"],
        ]
        for row in table["rows"]
    ]
    record.show(title, ["case", "way", "pairs a second", "reserved, GiB", ""], cells, where)
    for target in table["targets"]:
        bound = f"at least {target['at_least']:.2f}" if "at_least" in target else f"at most {target['at_most']:.2f}"
        print(f"  {target['case']}: {target['found']:.2f}, {bound}: {'reached' if target['reached'] else 'MISSED'}")
    for name, error in table.get("gradients", {}).items():
        print(f"  gradient of {name}, against by hand: {error:.1e}")


def draw_retrieval(output: Path) -> None:
    """Draw the accuracy of the example over the batch size, with the same memory and the same number of steps."""
    import matplotlib.pyplot as plt

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    example: Any = importlib.import_module("contrastive")  # the example of this name, not this file
    sizes = [32, 64, 128, 256, 512, 1024, 2048]
    figure, panel = plt.subplots(figsize=(6, 3.6))
    for steps, colour in ((40, "#9ecae1"), (120, "#1f6fb4")):
        found = [100 * example.train(size, steps) for size in sizes]
        panel.plot(sizes, found, marker="o", color=colour, label=f"{steps} steps")
        print(f"{steps} steps: " + ", ".join(f"{size} {value:.1f} %" for size, value in zip(sizes, found, strict=True)))
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.set_ylim(bottom=0)
    panel.set_xlabel(f"pairs in the batch; {example.MICRO} in memory at a time")
    panel.set_ylabel("images that find their text, %")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--only", choices=["sizes", "pairs", "kept"], help="one of the tables")
    parser.add_argument("--seconds", type=float, default=8.0, help="to time each way for, at least (default: 8)")
    parser.add_argument("--figure", action="store_true", help="draw the figure of the documentation instead")
    record.add_output(parser, "contrastive")
    arguments = parser.parse_args()
    if arguments.figure:
        draw_retrieval(Path(__file__).parents[1] / "docs" / "figures" / "retrieval.png")
        return 0
    if not (torch.cuda.is_available() or arguments.tiny):
        print("this needs a GPU; --tiny runs on a CPU, and says nothing about speed.", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds, error = (0.0 if arguments.tiny else arguments.seconds), exactness(device)
    result = record.stamp("contrastive training", "torch") | {
        "machine": record.machine(device),
        "gradient": {"error": error, "exact": error <= 1e-12},
    }
    where = f"{result['machine']}; {record.in_words(result['versions'])}; our gradient in float64: {error:.1e}"
    if arguments.only in (None, "sizes"):
        result["sizes"] = sizes_table(device, seconds, [(TINY, 0.0)] if arguments.tiny else SIZES)
        show("Beside other ways", result["sizes"], where)
    if arguments.only in (None, "kept"):
        result["kept"] = kept_table(device, seconds, [TINY] if arguments.tiny else [case for case, _ in SIZES])
        show("Graphs that fit are kept", result["kept"], where)
    if arguments.only in (None, "pairs"):
        cases, large = ([TINY], TINY) if arguments.tiny else (PAIRS, LARGE)
        result["pairs"] = pairs_table(device, seconds, cases, large)
        show("More and more pairs", result["pairs"], where)
    output = arguments.output if not arguments.tiny else Path(arguments.output).with_name("contrastive_tiny.json")
    record.save(result, output)
    print(f"Written to {output}")
    return 0 if error <= 1e-12 else 1


if __name__ == "__main__":
    sys.exit(main())
