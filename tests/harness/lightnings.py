"""A module and a Trainer of Lightning for the tests, and what the program sees of them."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from harness import recorded, reference
from harness.reference import BY_COUNT, Attention, Batch, Counting, Trainee
from macrobatch import causal_lm_loss

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OURS: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
OURS |= {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}


class Loader:
    """Batches, of which a checkpoint knows how many were handed out."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = [{"x": b.x, "y": b.y} for b in batches]
        self._begin = self._next = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        begin, self._begin = self._begin, 0
        for number in range(begin % len(self.batches), len(self.batches)):
            self._next = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = state["next"]


class Unsized(Loader):
    """The same, of unknown length."""

    __len__ = None  # type: ignore[assignment]


class Task(LightningModule):  # type: ignore[misc]
    """A model of the reference that learns to predict tokens."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Attention,
        name: str = "SGD",
        how: str = "plain",
        *,
        counting: Counting = BY_COUNT,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        own = reference.trainee(make, name, how, dtype=dtype)
        self.net, self._own, self.counting = own.model, [own], counting
        self.logged: list[float] = []

    @property
    def own(self) -> Trainee:
        return self._own[0]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        micro = Batch(batch["x"], batch["y"])
        loss = self.counting.loss(self.net, micro, batch_idx)
        self.log("loss", loss, prog_bar=True)
        items = self.counting.given(micro, batch_idx)
        return loss if items is None else {"loss": loss, "items": items}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", reference.mean_loss(self.net, Batch(batch["x"], batch["y"])))

    def configure_optimizers(self) -> Any:
        schedule = {"scheduler": self.own.schedulers[0], "interval": "step"}
        return {"optimizer": self.own.optimizers[0], "lr_scheduler": schedule}


class Words(LightningModule):  # type: ignore[misc]
    """A language model, as people write it."""

    rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.net = recorded.make(torch.float64)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, items = causal_lm_loss(self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "items": items}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def sentences(*shapes: tuple[int, int], pad: int = 9) -> list[dict[str, Tensor]]:
    """Batches of different widths; the value of padding is one that would change the loss."""
    found = []
    for seed, (samples, width) in enumerate(shapes):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, recorded.WORDS, (samples, width), generator=draw)
        lengths = torch.randint(2, width + 1, (samples,), generator=draw)
        mask = (torch.arange(width) < lengths[:, None]).long()
        batch = {"input_ids": ids.where(mask == 1, pad), "attention_mask": mask}
        found.append(batch | {"labels": ids.masked_fill(mask == 0, -100)})
    return found


class Given(Loader):
    """Batches as they are."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__(())
        self.batches = list(batches)


def train_words(windows: Sequence[Sequence[dict[str, Tensor]]], rate: float = 0.1) -> tuple[list[Any], Words]:
    """A plain loop, the mean over all tokens of each window: its losses with their tokens, and the module."""
    module, steps = Words(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for window in windows:
        parts = [causal_lm_loss(module.net, {k: v.to(recorded.DEVICE) for k, v in b.items()}) for b in window]
        total = sum(int(items) for _, items in parts)
        loss = torch.stack([loss * items for loss, items in parts]).sum() / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append((loss.item(), total))
    return steps, module.cpu()


def log_words(folder: Path, module: LightningModule, batches: Sequence[Any], **options: Any) -> tuple[Any, Trainer]:
    """Train with a logger; returns the rows that it has written, and the Trainer."""
    logger = CSVLogger(folder, name="logged")
    trainer = fit(module, batches, logger=logger, log_every_n_steps=1, load=Given, **options)
    logger.save()
    text = (folder / "logged" / "version_0" / "metrics.csv").read_text()
    header, *rows = [line.split(",") for line in text.splitlines()]
    return [{key: float(x) for key, x in zip(header, row, strict=True) if x} for row in rows], trainer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lightning warns of much that a small test has on purpose, and uses what torch has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch.jit|typing_extensions")
        yield


def fit(
    module: LightningModule,
    batches: Sequence[Batch],
    *,
    val: Sequence[Batch] = (),
    load: Callable[[Sequence[Batch]], Loader] = Loader,
    **options: Any,
) -> Trainer:
    """Train the module as a program would, for one epoch; returns the Trainer."""
    ckpt_path = options.pop("ckpt_path", None)
    with quiet():
        trainer = Trainer(**OURS | {"max_epochs": 1, "devices": 1} | options)
        trainer.fit(module, load(batches), Loader(val) if val else None, ckpt_path=ckpt_path)
    return trainer
