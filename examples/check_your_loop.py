"""Check your own training loop: `verify` finds the classic mistakes, and says how to fix them.

python examples/check_your_loop.py
"""

# mypy: untyped-calls-exclude=torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from macrobatch import Accumulator, verify

WORDS, WIDTH, PADDING = 64, 32, -100
MICRO_BATCH, STEPS = 4, 4  # samples in a micro-batch, micro-batches in a window

Batch = dict[str, Tensor]


def make_batch() -> Batch:
    """40 sentences of very different lengths: 10 micro-batches, so the third window is short."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (40, 1), generator=generator)
    tokens = torch.randint(WORDS, (40, 30), generator=generator)
    return {"tokens": tokens, "labels": tokens.masked_fill(torch.arange(30) >= lengths, PADDING)}


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, a mean over the words that are not padding, and the number of these words."""
    logits = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PADDING)
    return loss, (batch["labels"] != PADDING).sum()


def micro_batches(batch: Batch) -> list[Batch]:
    parts = (tensor.split(MICRO_BATCH) for tensor in batch.values())
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


def the_loop_everyone_writes(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = micro_batches(batch)
    for index, micro_batch in enumerate(loader):
        loss, _ = loss_fn(model, micro_batch)
        (loss / STEPS).backward()
        if (index + 1) % STEPS == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def the_loop_that_is_right(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    acc = Accumulator(model, optimizer, steps=STEPS)
    for micro_batch in acc.batches(micro_batches(batch)):
        loss, items = loss_fn(model, micro_batch)
        acc.backward(loss, items)
        acc.step()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    batch = make_batch()

    for loop in (the_loop_everyone_writes, the_loop_that_is_right):
        report = verify(model, loss_fn, batch, step=loop)
        print(f"{loop.__name__.replace('_', ' ')}\n\n{report}\n")
        if report.ok != (loop is the_loop_that_is_right):
            raise SystemExit("This is a bug in Macrobatch.")


def check() -> tuple[object, ...]:
    """The arguments of `verify`, for `macrobatch verify check_your_loop:check` in this folder."""
    return (
        nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)),
        loss_fn,
        make_batch(),
        the_loop_everyone_writes,
    )


if __name__ == "__main__":
    main()
