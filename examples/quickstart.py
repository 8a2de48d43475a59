"""The same small language model trained three times on the same 8 batches of 64 sequences:

1. with each batch in one piece, in plain torch;
2. in micro-batches of 8 sequences with `macrobatch.Accumulator`: the same weights, and a fraction of the memory;
3. in the same micro-batches with the usual loop by hand, `loss / 8`: the same memory, but other weights. The sequences
   have different lengths, so the mean of eight means is not the mean over all tokens.

Each training runs in its own process, so that its peak memory can be measured.
"""

# mypy: untyped-calls-exclude=torch
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from macrobatch import Accumulator

BATCH, MICRO_BATCH, STEPS = 64, 8, 8  # sequences in a batch, in a micro-batch; optimizer steps
LENGTH, WORDS, WIDTH, PADDING = 128, 512, 64, 0
TOLERANCE = 1e-4  # of the weights after eight steps in float32; rounding alone is less than 1e-6 on a CPU
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- The three trainings. Each yields the loss of every optimizer step. ----------------------------------------------


def one_big_batch(model: nn.Module, data: Tensor) -> Iterator[float]:
    optimizer = make_optimizer(model)
    for batch in data.split(BATCH):
        loss, _ = loss_and_items(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def macrobatch(model: nn.Module, data: Tensor) -> Iterator[float]:
    optimizer = make_optimizer(model)
    acc = Accumulator(model, optimizer, steps=BATCH // MICRO_BATCH, max_norm=1.0)
    for batch in acc.batches(data.split(MICRO_BATCH)):
        loss, items = loss_and_items(model, batch)
        acc.backward(loss, items=items)  # items: the number of tokens that this loss is a mean over
        if result := acc.step():  # None until the window of eight closes
            yield result.loss.item()


def by_hand(model: nn.Module, data: Tensor) -> Iterator[float]:
    optimizer = make_optimizer(model)
    steps = BATCH // MICRO_BATCH
    total = 0.0
    for index, batch in enumerate(data.split(MICRO_BATCH)):
        loss, _ = loss_and_items(model, batch)
        (loss / steps).backward()
        total += loss.item() / steps
        if (index + 1) % steps == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield total
            total = 0.0


# --- What they train: a small transformer that guesses the next word -------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.words(tokens) + self.positions.weight[:length]
        logits: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits


def loss_and_items(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss over the tokens that are not padding, and the number of these tokens."""
    targets = batch[:, 1:]
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
    return loss, (targets != PADDING).sum()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # eps: with the default of 1e-8, AdamW turns the rounding of tiny gradients into visible steps.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)


def make_data() -> Tensor:
    """Sequences of 4 to LENGTH words, padded at the end. Most words determine the next one, so a model can learn."""
    generator = torch.Generator().manual_seed(0)
    shape = (STEPS * BATCH, LENGTH)
    follower = torch.randint(1, WORDS, (WORDS,), generator=generator)
    guessable = torch.rand(shape, generator=generator) < 0.9
    tokens = torch.randint(1, WORDS, shape, generator=generator)
    for position in range(1, LENGTH):
        tokens[:, position] = follower[tokens[:, position - 1]].where(guessable[:, position], tokens[:, position])
    # Most are short, some long: eight sequences may have 150 tokens or 500.
    lengths = (4 * (LENGTH / 4) ** torch.rand(shape[0], 1, generator=generator)).long()
    return tokens.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    losses: list[float]
    weights: list[float]
    peak: float  # MiB above the memory just before training


def measured(train: Callable[[nn.Module, Tensor], Iterator[float]]) -> Run:
    """Train from the same initial weights. It runs in its own process."""
    torch.set_num_threads(1)  # on a busy machine torch's threads would wait for each other
    data = make_data().to(DEVICE)
    next(one_big_batch(LanguageModel().to(DEVICE), data[:1]))  # so that torch's libraries do not count
    torch.manual_seed(0)
    model = LanguageModel().to(DEVICE)
    before = memory("VmRSS")
    losses = []
    for loss in train(model, data):
        losses.append(loss)
        print(".", end="", flush=True)
    peak = memory("VmHWM") - before
    return Run(losses, nn.utils.parameters_to_vector(model.parameters()).tolist(), peak)


def memory(field: str) -> float:
    """The MiB in use now (VmRSS), or the peak so far (VmHWM), on the device."""
    if DEVICE.type == "cuda":
        return (torch.cuda.memory_allocated() if field == "VmRSS" else torch.cuda.max_memory_allocated()) / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # Linux. Not ru_maxrss: a new process inherits that of its parent.
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 2**10
    import resource  # macOS has only the peak, in bytes: the result is how much training adds to it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_own_process(name: str, train: Callable[[nn.Module, Tensor], Iterator[float]]) -> Run:
    print(f"{name:<18}", end="", flush=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        run = pool.apply(measured, (train,))
    print(f" {run.peak:6.0f} MiB", flush=True)
    return run


def main() -> int:
    print(f"{STEPS} steps on {BATCH} sequences each, on {DEVICE.type}; every dot is a step.\n")
    whole = in_own_process("one big batch", one_big_batch)
    ours = in_own_process("Macrobatch", macrobatch)
    naive = in_own_process("loss / 8 by hand", by_hand)

    print(f"\n{'step':<16}{'one big batch':>16}{'Macrobatch':>16}{'loss / 8 by hand':>20}")
    for step, losses in enumerate(zip(whole.losses, ours.losses, naive.losses, strict=True), start=1):
        print(f"{step:<16}{losses[0]:>16.6f}{losses[1]:>16.6f}{losses[2]:>20.6f}")

    difference, naive_difference = largest_difference(ours, whole), largest_difference(naive, whole)
    print(f"{'weights differ':<16}{'':>16}{difference:>16.1e}{naive_difference:>20.1e}")
    print(f"{'peak memory':<16}{whole.peak:>12.0f} MiB{ours.peak:>12.0f} MiB{naive.peak:>16.0f} MiB")

    if difference > TOLERANCE:
        print(f"\nThe weights differ by more than {TOLERANCE:.0e}: this is a bug in Macrobatch.", file=sys.stderr)
        return 1
    print(f"\nThe same weights (to {TOLERANCE:.0e}) with {ours.peak / whole.peak:.0%} of the memory.")
    return 0


def largest_difference(run: Run, reference: Run) -> float:
    return max(abs(own - other) for own, other in zip(run.weights, reference.weights, strict=True))


if __name__ == "__main__":
    sys.exit(main())
