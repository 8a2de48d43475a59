"""One process, one device: sequences of different lengths, a batch of 32 of them in micro-batches of 4.

python examples/one_device.py
"""

# mypy: untyped-calls-exclude=torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from macrobatch import Accumulator

WORDS, WIDTH, PADDING = 64, 32, 0
STEPS, MICRO_BATCH = 8, 4  # micro-batches in a window, sequences in a micro-batch
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_loader(epoch: int) -> list[Tensor]:
    """Ten micro-batches of sequences that count upwards, padded at the end. The last window is short."""
    generator = torch.Generator().manual_seed(epoch)
    batches = []
    for _ in range(10):
        lengths = torch.randint(3, 30, (MICRO_BATCH, 1), generator=generator)
        positions = torch.arange(int(lengths.max()))
        first = torch.randint(WORDS, (MICRO_BATCH, 1), generator=generator)
        batches.append(((first + positions) % (WORDS - 1) + 1).masked_fill(positions >= lengths, PADDING))
    return batches


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

    acc = Accumulator(model, optimizer, steps=STEPS, scheduler=scheduler, max_norm=1.0)
    for epoch in range(4):
        for tokens in acc.batches(make_loader(epoch)):  # it knows where each window and the epoch end
            tokens = tokens.to(DEVICE)
            targets = tokens[:, 1:]
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
            acc.backward(loss, items=(targets != PADDING).sum())  # the number of tokens that this loss is a mean over
            if result := acc.step():  # None until the window closes
                assert result.grad_norm is not None
                print(
                    f"step {result.step}: loss {result.loss.item():.4f} over {int(result.items.item())} tokens of "
                    f"{result.micro_batches} micro-batches, gradient norm {result.grad_norm.item():.3f}"
                )


if __name__ == "__main__":
    main()
