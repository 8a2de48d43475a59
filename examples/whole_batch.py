"""Pass the whole batch: the same 64 sequences of very different lengths, cut in three ways, have the same gradient.

python examples/whole_batch.py
"""

# mypy: untyped-calls-exclude=torch
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch import MacroStep, by_tokens, causal_lm_loss

WORDS, WIDTH, LONGEST = 64, 32, 200
MEMORY = 4000  # how many tokens, with padding, this simulated device can hold


def make_batch() -> dict[str, Tensor]:
    """Sequences that count upwards, a few long ones among many short ones, padded at the end."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(64, 1, generator=generator).pow(4).mul(LONGEST).long() + 4
    positions = torch.arange(int(lengths.max()))
    first = torch.randint(WORDS, (64, 1), generator=generator)
    mask = positions < lengths
    return {"input_ids": ((first + positions) % WORDS).masked_fill(~mask, 0), "attention_mask": mask}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and the number of tokens that it is a mean over; on a simulated device with little memory."""
    if batch["input_ids"].numel() > MEMORY:
        raise torch.OutOfMemoryError(f"Tried to allocate {batch['input_ids'].numel()} bytes")
    return causal_lm_loss(model, batch)


def main() -> None:
    batch = make_batch()
    print(f"64 sequences, {int(batch['attention_mask'].sum())} tokens, padded {batch['input_ids'].numel()}")
    ways: dict[str, Any] = {"8 at a time": 8, "by tokens": by_tokens(MEMORY), "what fits": "auto"}
    for name, micro in ways.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
        train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, micro=micro, max_norm=1.0)
        result = train(batch)
        assert result.grad_norm is not None
        print(
            f"{name:12} {result.micro_batches:2} micro-batches, loss {result.loss.item():.6f} over "
            f"{int(result.items.item())} tokens, gradient norm {result.grad_norm.item():.6f}"
        )


if __name__ == "__main__":
    main()
