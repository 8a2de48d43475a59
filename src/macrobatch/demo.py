"""`macrobatch demo`: what a mean of means does to a model, and what Macrobatch does instead, in a few seconds.

A small model learns to spell the names of emoji, which Python's standard library has. Everything that is printed is
computed here, in float64, and needs nothing but torch.
"""

# mypy: untyped-calls-exclude=torch
from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from macrobatch.accumulator import Accumulator
from macrobatch.macrostep import MacroStep

MICRO, STEPS, EPOCHS, HELD_OUT, IGNORED = 8, 4, 2, 100, -100
LEARNING_RATE = 3e-3
RED, BLUE, GREY, BOLD = "31", "34", "2", "1"
HEIGHT, LOWEST = 12, 1e-16  # of the plot: its lines, and the least that it shows

USUAL = """loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
(loss / 4).backward()
if (i + 1) % 4 == 0 or i + 1 == len(loader):
    optimizer.step()
    optimizer.zero_grad()"""
EXACT = """acc = Accumulator(model, optimizer, steps=4)
for x, y in acc.batches(loader):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    acc.backward(loss)
    acc.step()"""

# -------------------------------------------------------------------------------------------------- what is trained

LETTERS = " " + "".join(map(chr, range(ord("A"), ord("Z") + 1))) + "-"
Batch = tuple[Tensor, Tensor]  # letters and, at each of them, the next one


def emoji_names() -> list[str]:
    """The names of emoji, in a random but fixed order."""
    found = [unicodedata.name(chr(code), "") for code in range(0x1F300, 0x1F650)]
    names = [name for name in found if name and set(name) <= set(LETTERS)]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    return [names[index] for index in order.tolist()]


def padded(names: Sequence[str]) -> Batch:
    """One row per name. Padding is ignored by `cross_entropy`."""
    width = max(map(len, names)) - 1
    numbers = [[LETTERS.index(letter) for letter in name] for name in names]
    x = torch.tensor([row[:-1] + [0] * (width - len(row) + 1) for row in numbers])
    y = torch.tensor([row[1:] + [IGNORED] * (width - len(row) + 1) for row in numbers])
    return x, y


def micro_batches(names: Sequence[str]) -> list[Batch]:
    """Of each 32 names, sorted by length as usual, four micro-batches of 8."""
    parts = []
    for start in range(0, len(names), MICRO * STEPS):
        window = sorted(names[start : start + MICRO * STEPS], key=len)
        parts += [padded(window[index : index + MICRO]) for index in range(0, len(window), MICRO)]
    return parts


class Speller(nn.Module):
    """Scores for the next letter, at every letter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 32)
        self.memory = nn.GRU(32, 48, batch_first=True)
        self.head = nn.Linear(48, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        scores: Tensor = self.head(self.memory(self.embed(letters))[0])
        return scores


def new_speller() -> Speller:
    torch.manual_seed(0)
    return Speller().double()


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the letters that are not padding."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# -------------------------------------------------------------------------------------------------- the three loops

Loop = Callable[[nn.Module, torch.optim.Optimizer, Sequence[str]], Iterator[None]]


def one_big_batch(model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Iterator[None]:
    """All samples of a window at once."""
    for start in range(0, len(names), MICRO * STEPS):
        mean_loss(model, padded(names[start : start + MICRO * STEPS])).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def usual_loop(model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Iterator[None]:
    """The loop that most people write."""
    loader = micro_batches(names)
    for index, batch in enumerate(loader):
        (mean_loss(model, batch) / STEPS).backward()
        if (index + 1) % STEPS == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            yield


def exact_loop(model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Iterator[None]:
    """The same with Macrobatch."""
    acc = Accumulator(model, optimizer, steps=STEPS)
    for batch in acc.batches(micro_batches(names)):
        acc.backward(mean_loss(model, batch))
        if acc.step():
            yield


class Trained(NamedTuple):
    """What a loop made of the model."""

    weights: list[Tensor]  # after each optimizer step
    loss: float  # on names that it has never seen


def trained(loop: Loop, names: Sequence[str], unseen: Sequence[str]) -> Trained:
    model = new_speller()
    # eps: with the default, AdamW turns the rounding of tiny gradients into visible steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-5)
    steps = (step for _ in range(EPOCHS) for step in loop(model, optimizer, names))
    weights = [nn.utils.parameters_to_vector(model.parameters()).detach() for _ in steps]
    with torch.no_grad():
        return Trained(weights, mean_loss(model, padded(unseen)).item())


def distances(found: Trained, reference: Trained) -> list[float]:
    """How far the weights are from those of one big batch, after each step: relative to their norm."""
    pairs = zip(found.weights, reference.weights, strict=True)
    return [((own - other).norm() / other.norm()).item() for own, other in pairs]


# ------------------------------------------------------------------------------------------------- the memory it takes


class Measured(NamedTuple):
    """One optimizer step on all names, in a process of its own."""

    weights: list[float]
    peak: float  # MiB above what the process took before


def measured(micro: int) -> Measured:
    """`micro`: the number of names in a micro-batch; 0: all at once, in plain torch."""
    torch.set_num_threads(1)
    batch, model = padded(emoji_names()), new_speller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss(model, (batch[0][:1], batch[1][:1])).backward()  # so that torch's libraries do not count
    optimizer.zero_grad()
    before = _memory("VmRSS")
    if micro:
        MacroStep(model, optimizer, mean_loss, micro=micro)(batch)
    else:
        mean_loss(model, batch).backward()
        optimizer.step()
    weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return Measured(weights, _memory("VmHWM") - before)


def _memory(field: str) -> float:
    """The MiB that this process takes now (VmRSS), or took at most (VmHWM); NaN where the system does not say it."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux. Not ru_maxrss: a new process inherits that of its parent
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 2**10
    if sys.platform == "darwin":
        import resource  # only the peak, in bytes: the difference is what the step adds to it

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return math.nan


# ---------------------------------------------------------------------------------------------------- what is printed


def run() -> None:
    """Run the demo, and print it as it goes on."""
    torch.set_num_threads(1)
    names = emoji_names()
    unseen, names = names[:HELD_OUT], names[HELD_OUT:]
    with multiprocessing.get_context("spawn").Pool(2) as pool:  # they measure while this process trains
        measuring = [pool.apply_async(measured, (micro,)) for micro in (0, MICRO * STEPS)]
        print_mistake(micro_batches(names[: MICRO * STEPS]), names[: MICRO * STEPS])
        print_training(names, unseen)
        print_memory(measuring)
    print_next()


def print_mistake(window: Sequence[Batch], names: Sequence[str]) -> None:
    """How much a letter of each micro-batch counts, in the usual loop and with Macrobatch."""
    _title("1. The mistake")
    print("32 names make one batch. They do not fit at once, so the usual loop takes 8 at a time, and divides by 4:\n")
    print(_coloured(_indented(USUAL), RED))
    print("\nIt looks right, but it is a mean of means: a letter counts more if the names beside it are short.\n")
    counts = [int((y != IGNORED).sum()) for _, y in window]
    width = max(sum(counts) / len(counts) / count for count in counts)
    print(f"  {'micro-batch':<13}{'letters':>7}   how much each letter counts")
    for number, count in enumerate(counts, start=1):
        weight = sum(counts) / len(counts) / count
        bar = _coloured(_bar(weight / width), RED)
        print(f"  {number:<13}{count:>7}   {bar} {weight:.2f}")
    exact = _coloured(_bar(1 / width), BLUE)
    print(f"  {'one big batch':<20}   {exact} 1.00")
    whole = _gradient(lambda model: mean_loss(model, padded(names)).backward())
    usual = _gradient(lambda model: [(mean_loss(model, batch) / STEPS).backward() for batch in window])
    ours = _gradient(lambda model: MacroStep(model, None, mean_loss, micro=MICRO)(padded(names)))
    print("\nThe gradient, compared with that of one big batch (the largest difference, by the largest gradient):")
    print(f"  the usual loop  {_coloured(f'{_error(usual, whole):.0%}', RED)}")
    print(f"  Macrobatch      {_coloured(f'{_error(ours, whole):.0e}', BLUE)}\n")


def print_training(names: Sequence[str], unseen: Sequence[str]) -> None:
    """Train with all three loops, and plot how far they are apart."""
    _title("2. What it does to a training")
    print("The same loop with Macrobatch. What each loss is a mean over is read from the loss:\n")
    print(_coloured(_indented(EXACT), BLUE))
    print(f"\nTraining three times on {len(names)} names ...", end="", flush=True)
    whole, usual, ours = (trained(loop, names, unseen) for loop in (one_big_batch, usual_loop, exact_loop))
    print(f" {len(whole.weights)} optimizer steps each.\n\nHow far the weights are from those of one big batch:\n")
    for line in plot({"u": distances(usual, whole), "m": distances(ours, whole)}):
        print("  " + line.replace("u", _coloured(_mark("●", "u"), RED)).replace("m", _coloured(_mark("●", "m"), BLUE)))
    print(f"\n  {'':16}loss on {len(unseen)} names that it has never seen")
    for name, found, colour in (
        ("one big batch", whole, GREY),
        ("the usual loop", usual, RED),
        ("Macrobatch", ours, BLUE),
    ):
        print(f"  {name:<16}{_coloured(f'{found.loss:.6f}', colour)}")
    print()


def print_memory(measuring: Sequence[AsyncResult[Measured]]) -> None:
    """One step on all names: at once, and in micro-batches."""
    _title("3. The batch that does not fit")
    whole, ours = (found.get(timeout=300) for found in measuring)
    print(f"All {len(emoji_names())} names in one optimizer step, by MacroStep, which cuts the batch for you:\n")
    apart = max(abs(own - other) for own, other in zip(ours.weights, whole.weights, strict=True))
    if math.isnan(whole.peak):
        print("  (memory cannot be measured on this system)")
    else:
        share = ours.peak / whole.peak
        print(f"  at once          {_coloured(_bar(1), GREY)} {whole.peak:.0f} MiB")
        print(f"  MacroStep(...)   {_coloured(_bar(share), BLUE)} {ours.peak:.0f} MiB: {share:.0%} of the memory")
    print(f"  the weights after the step differ by {apart:.0e}\n")


def print_next() -> None:
    _title("Your turn")
    print("  macrobatch audit train.py     is your own training program right? It is run as it is")
    print("  macrobatch verify MODULE:F    compare a training step with one big batch")
    print("  acc.batches(loader), acc.backward(loss), acc.step()     three calls in your loop\n")


def plot(curves: dict[str, list[float]]) -> list[str]:
    """Lines of text: values over steps on a logarithmic scale, each curve drawn with its key.

    >>> plot({"a": [1.0, 1.0]})[0]
    '    1  aa'
    """
    columns = min(60, max(map(len, curves.values())))
    rows = [[" "] * columns for _ in range(HEIGHT)]
    for key, values in curves.items():
        for column in range(columns):
            depth = math.log(max(values[column * len(values) // columns], LOWEST)) / math.log(LOWEST)
            rows[max(0, round(depth * (HEIGHT - 1)))][column] = key
    labels = ["1", *[""] * (HEIGHT - 2), f"{LOWEST:.0e}"]
    return [f"{label:>5}  {''.join(row)}" for label, row in zip(labels, rows, strict=True)]


def _gradient(backward: Callable[[nn.Module], object]) -> Tensor:
    model = new_speller()
    backward(model)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _error(found: Tensor, right: Tensor) -> float:
    return ((found - right).abs().max() / right.abs().max()).item()


def _title(text: str) -> None:
    print(_coloured(text, BOLD))
    print(_coloured(_mark("─", "-") * min(78, shutil.get_terminal_size().columns), GREY))


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())


def _bar(share: float) -> str:
    return _mark("█", "#") * max(1, round(30 * share))


def _mark(symbol: str, plain: str) -> str:
    """A symbol, if the terminal can show it."""
    try:
        symbol.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return plain
    return symbol


def _coloured(text: str, code: str) -> str:
    """Text in a colour, if somebody looks at it on a terminal that has colours (https://no-color.org)."""
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if has_colours else text
