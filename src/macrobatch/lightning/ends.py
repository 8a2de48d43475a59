"""Check that the loaders of all ranks end together: otherwise Lightning's Trainer hangs."""

from __future__ import annotations

import math
from typing import Any

import torch

from macrobatch.errors import UsageError
from macrobatch.lightning import private

GOES_ON = -1.0


class LoaderEnds:
    """Compares the loaders of all ranks: their lengths or, if one has no length, batch by batch.

    Args:
        strategy: the strategy of these ranks.
        trainer: the Trainer that is about to train.

    Raises:
        UsageError: the ranks have different numbers of batches. All ranks raise it.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy = strategy
        self._loop = trainer.fit_loop
        has_lengths = all(map(_has_length, private.fetcher_of(self._loop).combined_loader.flattened))
        lengths, sized = zip(*self._gather(trainer.num_training_batches, has_lengths), strict=True)
        self._exchanges = strategy.world_size > 1 and not all(sized)
        if len(set(lengths)) > 1:
            shown = [int(number) if number < math.inf else number for number in lengths]
            raise UsageError(
                f"the ranks have different numbers of batches, {shown}: some would wait for the others forever. "
                "Lightning's Trainer needs as many on each: leave use_distributed_sampler on, or set "
                f"limit_train_batches={min(shown)}."
            )
        if self._exchanges:
            _tell_of_end(private.fetcher_of(self._loop), lambda: self.exchange(ends=True))

    def exchange(self, *, ends: bool) -> None:
        """Exchange with the other ranks, once per batch, whether it is the last one, or there is no batch at all."""
        if not self._exchanges:
            return
        numbers = [number for (number,) in self._gather(self._loop.batch_idx + 1.0 if ends else GOES_ON)]
        if len(set(numbers)) == 1:
            return
        shortest = int(min(number for number in numbers if number != GOES_ON))
        ended = [rank for rank, number in enumerate(numbers) if number == shortest]
        raise UsageError(
            f"no batch is left after {shortest} on the ranks {ended}, while the others go on: they would wait for each "
            "other forever. Lightning's Trainer needs as many batches on each rank: let the loaders end together, or "
            f"set limit_train_batches={shortest}."
        )

    def _gather(self, *numbers: float) -> list[list[float]]:
        """The numbers of all ranks."""
        own = torch.tensor(numbers, device=self._strategy.root_device, dtype=torch.float32)
        found: list[list[float]] = self._strategy.all_gather(own).reshape(-1, len(numbers)).tolist()
        return found


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _tell_of_end(fetcher: Any, tell: Any) -> None:
    """Call `tell` if the fetcher is asked for a batch that it does not have."""
    kind: Any = type(fetcher)

    def fetch(self: Any) -> Any:
        try:
            return kind.__next__(self)
        except StopIteration:
            tell()
            raise

    fetcher.__class__ = type(kind.__name__, (kind,), {"__next__": fetch})
