"""Loops of other libraries, as their documentation tells one to write them. They write no files and print nothing."""

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.loops import next_token_loss
from harness.reference import IGNORED, Batch

STEPS, SIZE = 4, 5  # micro-batches in a window, samples in a micro-batch


def loader_of(batch: Batch) -> DataLoader[Any]:
    return DataLoader(TensorDataset(batch.x, batch.y), batch_size=SIZE)


@contextlib.contextmanager
def contained() -> Iterator[str]:
    """A directory to write to, and no word of warning: theirs are not ours to judge."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield directory


@contextlib.contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    with contained():
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        try:
            yield Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **options)
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def accelerate_loop(loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], None]:
    """The loop of its quick tour: mean losses under `accumulate`."""

    def step(model: nn.Module, batch: Batch) -> None:
        with accelerator() as theirs:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model, optimizer, loader = theirs.prepare(model, optimizer, loader_of(batch))
            for x, y in loader:
                with theirs.accumulate(model):
                    theirs.backward(loss(model, Batch(x, y)))
                    optimizer.step()
                    optimizer.zero_grad()

    return step


def accelerate_tokens(count: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batch], None]:
    """Its recipe for tokens: the window loaded beforehand, summed losses divided by all its labels."""

    def step(model: nn.Module, batch: Batch) -> None:
        with accelerator() as theirs:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model, optimizer, loader = theirs.prepare(model, optimizer, loader_of(batch))
            batches = iter(loader)
            remaining = len(loader)
            while remaining:
                window = [next(batches) for _ in range(min(STEPS, remaining))]
                remaining -= len(window)
                items = sum(count(y) for _, y in window)
                for index, (x, y) in enumerate(window):
                    is_last = index == len(window) - 1
                    with contextlib.nullcontext() if is_last else theirs.no_sync(model):
                        loss = next_token_loss(model, Batch(x, y), "sum")
                        theirs.backward(loss * STEPS * theirs.num_processes / items)
                theirs.gradient_state._set_sync_gradients(True)
                optimizer.step()
                optimizer.zero_grad()

    return step


def all_labels(labels: Tensor) -> Tensor:
    """As documented: before the shift."""
    return labels.ne(IGNORED).sum()


def shifted_labels(labels: Tensor) -> Tensor:
    return labels[..., 1:].ne(IGNORED).sum()


def lightning_loop(loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], None]:
    """A Trainer with accumulate_grad_batches."""

    def step(model: nn.Module, batch: Batch) -> None:
        with contained() as directory:
            import lightning

            logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

            class Training(lightning.LightningModule):  # type: ignore[misc]
                def __init__(self) -> None:
                    super().__init__()
                    self.model = model

                def training_step(self, micro: list[Tensor], index: int) -> Tensor:
                    return loss(self.model, Batch(*micro))

                def configure_optimizers(self) -> torch.optim.Optimizer:
                    return torch.optim.AdamW(self.parameters(), lr=0.1)

            trainer = lightning.Trainer(
                max_epochs=1,
                accumulate_grad_batches=STEPS,
                accelerator="cpu",
                barebones=True,
                default_root_dir=directory,
            )
            trainer.fit(Training(), loader_of(batch))

    return step
