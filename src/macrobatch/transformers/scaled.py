"""Finds losses that a program itself divides by steps or multiplies by ranks: `exact` would scale them once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from macrobatch.errors import UsageError

TOLERANCE = 1e-2
STEPS, RANKS = "gradient_accumulation_steps", "the number of processes"


class _Replaced:
    """An object with other values for some of its attributes."""

    def __init__(self, original: Any, values: dict[str, Any]) -> None:
        vars(self).update(values)
        vars(self)["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)


def require_unscaled(trainer: Any, before: float, loss: Callable[[], float | None]) -> None:
    """Raise if the loss changes with the accumulation steps or, on several ranks, with their number.

    Args:
        trainer: whose ``compute_loss`` computes the loss.
        before: the loss.
        loss: computes it again, without a trace, and in evaluation mode: a factor in training mode alone is not seen.
    """
    steps, ranks = trainer.args.gradient_accumulation_steps, trainer.args.world_size
    for name, arguments, accelerator in (
        (STEPS, {STEPS: 2 * steps}, {STEPS: 2 * steps}),
        (RANKS, {"world_size": 2 * ranks}, {"num_processes": 2 * ranks}),
    ):
        if name == RANKS and ranks == 1:
            continue
        with _replaced(trainer, arguments, accelerator):
            after = loss()
        if after is not None and abs(after - before) > TOLERANCE * abs(before):
            raise UsageError(
                f"the loss of {type(trainer).__name__}.compute_loss changes with {name}: with twice as many it is "
                f"{after / (before or 1.0):.3g} times as large. exact() needs the loss of a batch alone: it divides by "
                "the items of all batches and ranks itself. Leave that factor out of compute_loss."
            )


@contextmanager
def _replaced(trainer: Any, arguments: dict[str, Any], accelerator: dict[str, Any]) -> Iterator[None]:
    """A context in which the program reads other numbers. What the libraries do inside is unchanged."""
    before = trainer.args, trainer.accelerator
    trainer.args, trainer.accelerator = _Replaced(before[0], arguments), _Replaced(before[1], accelerator)
    try:
        yield
    finally:
        trainer.args, trainer.accelerator = before
