"""Two optimizers in one LightningModule: manual optimization, and one Accumulator for each.

python examples/lightning_two_optimizers.py
"""

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from macrobatch import Accumulator


class Two(LightningModule):  # type: ignore[misc]
    """Two parts, each with its own optimizer and windows of four batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (self.first, self.second)]

    def on_train_start(self) -> None:
        optimizers: Any = self.optimizers()
        first, second = (optimizer.optimizer for optimizer in optimizers)
        self.accumulators = [
            Accumulator(self.first, first, steps=4, max_norm=1.0),
            Accumulator(self.second, second, steps=4),
        ]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # noqa: ARG002
        is_last = self.trainer.is_last_batch or None  # a short last window; else steps decides
        for part, acc in zip((self.first, self.second), self.accumulators, strict=True):
            with acc.micro_batch(last=is_last):
                acc.backward(part(batch).square().mean(), items=len(batch))
            acc.step()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet)
    module = Two()
    trainer.fit(module, DataLoader(torch.randn(44, 4), batch_size=4))  # type: ignore[arg-type]
    print("optimizer steps:", [acc.optimizer_step for acc in module.accumulators])
    assert [acc.optimizer_step for acc in module.accumulators] == [3, 3]
