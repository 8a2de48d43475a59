"""A loop for Fabric: it launches, wraps and distributes; the Accumulator does the rest.

python examples/lightning_fabric.py
"""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from macrobatch import Accumulator


def wrapped(model: nn.Module) -> nn.Module:
    """What Fabric has wrapped inside its own module, or the module itself on one rank."""
    parts = (part for part in model.modules() if isinstance(part, DistributedDataParallel | FSDPModule))
    return next(parts, model)


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    plain = nn.Linear(4, 1)
    made: Any = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    model, optimizer = made
    batches: Any = fabric.setup_dataloaders(DataLoader(torch.randn(44, 4), batch_size=4))  # type: ignore[arg-type]

    acc = Accumulator(wrapped(model), optimizer.optimizer, steps=4, max_norm=1.0)
    for batch in acc.batches(batches):
        acc.backward(model(batch).square().mean(), items=len(batch))
        if result := acc.step():
            print(result.step, result.micro_batches, int(result.items.item()))
    assert acc.optimizer_step == 3
