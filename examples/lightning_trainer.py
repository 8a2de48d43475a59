"""Lightning's Trainer with exact gradient accumulation over 8 batches: sequences of different lengths.

python examples/lightning_trainer.py
torchrun --nproc-per-node=2 examples/lightning_trainer.py
"""

# mypy: untyped-calls-exclude=torch
import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from macrobatch.lightning import ExactStrategy

WORDS, WIDTH, PADDING = 64, 32, 0


class Sequences(Dataset[Tensor]):
    """Sequences of 3 to 30 tokens that count upwards."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, number: int) -> Tensor:
        return torch.arange(number, number + 3 + number * 7 % 28) % (WORDS - 1) + 1


def pad(sequences: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=PADDING)


class Counter(LightningModule):  # type: ignore[misc]
    """A model that learns to count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))

    def training_step(self, tokens: Tensor, batch_idx: int) -> dict[str, Tensor]:  # noqa: ARG002
        targets = tokens[:, 1:]
        logits = self.net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        return {"loss": loss, "items": (targets != PADDING).sum()}  # the number of tokens that this loss is a mean over

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        result = self.trainer.strategy.result  # the result of the window that this step closes, over all ranks
        self.log("window_loss", result.loss)
        if self.trainer.is_global_zero:
            print(
                f"step {result.step}: loss {result.loss.item():.4f} over {int(result.items.item())} tokens of "
                f"{result.micro_batches} batches"
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches  # windows, not batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=ExactStrategy("auto", steps=8),  # in place of accumulate_grad_batches=8
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        accelerator="cpu",
        max_epochs=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Counter(), DataLoader(Sequences(), batch_size=4, collate_fn=pad))


if __name__ == "__main__":
    main()
