"""All private names of transformers and TRL that this package uses. No other file uses any."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def prepared(trainer: Any, inputs: Any) -> Any:
    """The batch as ``training_step`` passes it to ``compute_loss``: on the device, and with the trainer's additions."""
    return trainer._prepare_inputs(inputs)


def items_in(trainer: Any, inputs: Any) -> Any:
    """The ``num_items_in_batch`` that the trainer itself counts; None if it does not count."""
    return trainer._get_num_items_in_batch([inputs], trainer.args.device)


@contextmanager
def unlogged(trainer: Any) -> Iterator[dict[str, list[float]] | None]:
    """A context in which TRL's ``compute_loss`` runs for another purpose: what it logs is dropped.

    Yields what TRL has collected to log in training; None for other trainers.
    """
    collected = getattr(trainer, "_metrics", None)
    before: Any = copy.deepcopy(collected)
    tokens = getattr(trainer, "_total_train_tokens", None)
    try:
        yield None if collected is None else collected["train"]
    finally:
        if collected is not None:
            for mode, values in before.items():
                collected[mode].clear()
                collected[mode].update(values)
        if tokens is not None:
            trainer._total_train_tokens = tokens


def add_tokens(trainer: Any, tokens: int) -> int:
    """Add to the number of tokens that TRL has counted, and return the total."""
    trainer._total_train_tokens += tokens
    return int(trainer._total_train_tokens)


@contextmanager
def every_position_scored() -> Iterator[None]:
    """A context in which TRL's head computes all positions, as on devices without Triton, not only those with labels.

    Otherwise the host would have to read the number of labels, and an operation that waits for the device cannot be
    recorded. The kernels stay the same.
    """
    utilities: Any = sys.modules.get("trl.trainer.utils")
    if not hasattr(utilities, "_use_triton"):
        yield  # another version: if it cannot be recorded, a warning says so
        return
    before, utilities._use_triton = utilities._use_triton, lambda _: False
    try:
        yield
    finally:
        utilities._use_triton = before
