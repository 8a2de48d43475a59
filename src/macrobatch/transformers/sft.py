"""The logs of SFTTrainer, if the batches of a window are run together.

Its ``compute_loss`` waits for the GPU five times per micro-batch, to log entropy and accuracy. An operation that waits
cannot be recorded. So this module keeps the sums on the device, and reads them once per window. The logged values are
then means over the tokens of the window, not means of means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from macrobatch.transformers.meaning import Inputs
from macrobatch.transformers.private import add_tokens, every_position_scored, unlogged
from macrobatch.transformers.trl import is_one_of

SUMS = ("label_mask", "entropy", "is_top1")  # outputs of the model with one number per token


class LoggedSums:
    """Collects the logged values of the micro-batches of a window.

    Args:
        trainer: an SFTTrainer.
        is_recorded: whether micro-batches are recorded as CUDA graphs.
    """

    def __init__(self, trainer: Any, *, is_recorded: bool) -> None:
        self._trainer = trainer
        self._is_recorded = is_recorded
        self._sums = torch.zeros(len(SUMS) + 2, device=trainer.args.device, dtype=torch.float64)

    @contextmanager
    def of_window(self, batches: Sequence[Inputs]) -> Iterator[None]:
        """A context for a window, in which ``compute_loss`` itself logs nothing, and does not wait for the device."""
        accelerator = self._trainer.accelerator
        self._sums.zero_()
        accelerator.gather_for_metrics = _nothing  # only for this object and this context
        try:
            with unlogged(self._trainer) as logged, every_position_scored() if self._is_recorded else nullcontext():
                yield
        finally:
            del accelerator.gather_for_metrics
        assert logged is not None, "SFTTrainer logs"
        self._log(logged, batches)

    def note(self, outputs: Any) -> None:
        """Add the model's outputs for a micro-batch to the sums."""
        with torch.no_grad():
            for place, name in enumerate(SUMS):
                if isinstance(value := getattr(outputs, name, None), Tensor):
                    self._sums[place].add_(value.sum())
            if isinstance(aux := getattr(outputs, "aux_loss", None), Tensor):
                self._sums[-2].add_(aux.detach())
                self._sums[-1].add_(1)

    def _log(self, logged: dict[str, list[float]], batches: Sequence[Inputs]) -> None:
        own = torch.stack([_tokens_of(batch).to(self._sums) for batch in batches]).sum()
        totals = self._trainer.accelerator.reduce(torch.cat([self._sums, own.reshape(1)]), "sum").tolist()
        shown, entropy, correct, aux, times, tokens = totals
        for name, total in (("entropy", entropy), ("mean_token_accuracy", correct)):
            logged[name].append(total / shown if shown else 0.0)
        logged["num_tokens"] = [add_tokens(self._trainer, int(tokens))]
        if times:
            logged["aux_loss"].append(aux / times)


def logged_sums_of(trainer: Any, *, is_recorded: bool) -> LoggedSums | None:
    """The `LoggedSums` of an SFTTrainer; None for other trainers."""
    return LoggedSums(trainer, is_recorded=is_recorded) if is_one_of(trainer, {"SFTTrainer"}) else None


def _nothing(value: Tensor) -> Tensor:
    return torch.zeros(value.shape)  # on the host, so that nothing waits for the device


def _tokens_of(batch: Inputs) -> Tensor:
    if "attention_mask" in batch:
        return torch.as_tensor(batch["attention_mask"].sum())
    return torch.tensor(batch["position_ids"].shape[1])
