"""The obvious loop over whole batches, which runs of `macrobatch train` are compared with.

Every batch is all of the data, so that the order of samples does not count; `FLAGS` makes a run of that kind.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, BATCH = 4, 12
FLAGS = ("--steps", STEPS, "--batch-size", BATCH, "--validation", 0, "--schedule", "constant", "--warmup", 0)


def samples(data: Path, tokenizer: Path) -> list[Tensor]:
    """The texts in a file as ids, each with the token that ends it."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tokenizer)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    assert len(texts) == BATCH
    return [torch.tensor([*found(text)["input_ids"], found.eos_token_id]) for text in texts]


def losses(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], samples: Sequence[Tensor]) -> list[float]:
    """The loss of each step; gradients are clipped to norm 1."""
    found = []
    for _ in range(STEPS):
        sums = [F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="sum") for one in samples]
        loss = torch.stack(sums).sum() / sum(len(one) - 1 for one in samples)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found
