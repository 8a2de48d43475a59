"""The logs of TRL's trainers, if the batches of a window are run together.

``compute_loss`` of SFTTrainer waits for the GPU five times per micro-batch, to log entropy and accuracy. An operation
that waits cannot be recorded. So this module keeps the sums on the device, and reads them once per window. The logged
values are then means over the tokens of the window, not means of means.

``compute_loss`` of DPOTrainer and RewardTrainer gathers what it logs from all ranks for every micro-batch. Ranks with
different numbers of micro-batches would wait for each other. So ranks exchange these numbers once per window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from macrobatch.transformers.private import add_tokens, every_position_scored, unlogged
from macrobatch.transformers.samples import Inputs
from macrobatch.transformers.trl import PAIRS, has_own_loss, is_one_of

TOKENS = "num_tokens"  # the total since the training began
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
        logged[TOKENS] = [add_tokens(self._trainer, int(tokens))]
        if times:
            logged["aux_loss"].append(aux / times)


class LoggedMeans:
    """Collects what a DPOTrainer or RewardTrainer logs on this rank, and exchanges it once per window."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @contextmanager
    def of_window(self, batches: Sequence[Inputs]) -> Iterator[None]:
        """A context for a window, in which ``compute_loss`` gathers nothing."""
        accelerator = self._trainer.accelerator
        accelerator.gather = accelerator.gather_for_metrics = _unchanged  # only for this object and this context
        try:
            with unlogged(self._trainer) as logged:
                assert logged is not None, "TRL's trainers log"
                before = {name: len(values) for name, values in logged.items()}
                yield
                new = {name: values[before.get(name, 0) :] for name, values in logged.items() if name != TOKENS}
        finally:
            del accelerator.gather, accelerator.gather_for_metrics
        self._log(logged, new, batches)

    def note(self, outputs: Any) -> None:
        """Nothing is needed of the model's outputs."""

    def _log(self, logged: dict[str, list[float]], new: dict[str, list[float]], batches: Sequence[Inputs]) -> None:
        names = sorted(new)
        own = [sum(new[name]) for name in names] + [len(new[name]) for name in names]
        own.append(sum(float(_tokens_of(batch)) for batch in batches))
        numbers = torch.tensor(own, dtype=torch.float64, device=self._trainer.args.device)
        *totals, tokens = self._trainer.accelerator.reduce(numbers, "sum").tolist()
        for name, total, count in zip(names, totals, totals[len(names) :], strict=False):
            logged[name].append(total / count if count else 0.0)
        logged[TOKENS] = [add_tokens(self._trainer, int(tokens))]


def logs_of(trainer: Any, *, is_recorded: bool) -> LoggedSums | LoggedMeans | None:
    """How the logs of a trainer of TRL are collected for a window; None if it logs by itself."""
    if is_one_of(trainer, {"SFTTrainer"}):
        return LoggedSums(trainer, is_recorded=is_recorded)
    has_ranks = trainer.args.world_size > 1
    return LoggedMeans(trainer) if has_ranks and is_one_of(trainer, PAIRS) and has_own_loss(trainer) else None


def _unchanged(value: Tensor) -> Tensor:
    return value


def _nothing(value: Tensor) -> Tensor:
    return torch.zeros(value.shape)  # on the host, so that nothing waits for the device


def _tokens_of(batch: Inputs) -> Tensor:
    if "attention_mask" in batch:
        return torch.as_tensor(batch["attention_mask"].sum())
    return torch.tensor(batch["position_ids"].shape[1])
