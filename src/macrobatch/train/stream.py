"""Which samples make which batch: it depends on the seed and the global batch alone, not on ranks or micro-batches.

`Stream` hands out the batch of each optimizer step, for all ranks together; `share` says which part of it is whose.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from macrobatch.errors import UsageError


class Stream:
    """The batches of a run, one after the other, over any number of epochs.

    Every epoch is an order of its own, which follows from the seed and its number. A batch goes on into the next epoch
    where one ends, so that all of them are full; only the very last, where `epochs` says that there is one, may not be.

    >>> stream = Stream([5, 3, 9, 4], seed=0, batch_size=3, epochs=2)
    >>> batches = [stream.next(step) for step in range(4)]
    >>> [len(batch) for batch in batches], sorted(batches[0] + batches[1] + batches[2])
    ([3, 3, 2, 0], [0, 0, 1, 1, 2, 2, 3, 3])

    Args:
        lengths: the tokens of each sample.
        seed: decides the order.
        batch_size: samples in a batch; or
        batch_tokens: the most tokens in a batch. A sample that is longer is a batch of its own.
        ramp: ``ramp(step)`` is how much of that the batch of this optimizer step has, above 0 and at most 1.
        epochs: after how many there are no more batches; None: it goes on for ever.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        seed: int,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        ramp: Callable[[int], float] | None = None,
        epochs: int | None = None,
    ) -> None:
        if (batch_size is None) == (batch_tokens is None):
            raise UsageError(
                f"a batch has so many samples or so many tokens: got batch_size={batch_size!r} and "
                f"batch_tokens={batch_tokens!r}. Give one of them."
            )
        for name, value in {"batch_size": batch_size, "batch_tokens": batch_tokens, "epochs": epochs}.items():
            if value is not None and not _is_count(value):
                raise UsageError(f"{name} must be a whole number, 1 or more: got {value!r}.")
        if not len(lengths):
            raise UsageError("there is no sample to make batches of.")
        self._lengths = lengths
        self._seed = seed
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._ramp = ramp
        self._epochs = epochs
        self._epoch = 0
        self._position = 0  # in the order of this epoch
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """How many epochs are over."""
        return self._epoch

    @property
    def progress(self) -> float:
        """How many times it has gone through the data."""
        return self._epoch + self._position / len(self._lengths)

    def next(self, step: int) -> list[int]:
        """The batch of the optimizer step that comes after `step` others, as indices of samples; empty at the end."""
        fraction = self._fraction(step)
        if self._batch_size is not None:
            return self._next_samples(max(round(self._batch_size * fraction), 1))
        assert self._batch_tokens is not None
        return self._next_tokens(max(round(self._batch_tokens * fraction), 1))

    def num_steps(self, epochs: int) -> int:
        """How many batches there are in so many epochs, counted from the first."""
        if not _is_count(epochs):
            raise UsageError(f"epochs must be a whole number, 1 or more: got {epochs!r}.")
        if self._batch_size is not None and self._ramp is None:
            return math.ceil(epochs * len(self._lengths) / self._batch_size)
        again = Stream(
            self._lengths,
            seed=self._seed,
            batch_size=self._batch_size,
            batch_tokens=self._batch_tokens,
            ramp=self._ramp,
            epochs=epochs,
        )
        step = 0
        while again.next(step):
            step += 1
        return step

    # ---------------------------------------------------------------------------------------------------- where it is

    def state_dict(self) -> dict[str, int]:
        """Where it is, as plain numbers."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "num_samples": len(self._lengths),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there: with the same samples and the same seed, or the batches would not be those of the run."""
        own = self.state_dict()
        if set(state) != set(own) or not all(type(value) is int for value in state.values()):
            raise UsageError(f"this is not what a stream's state_dict returned: {dict(state)!r}.")
        for name in ("seed", "num_samples"):
            if state[name] != own[name]:
                raise UsageError(f"the saved stream has {name} {state[name]}, this one {own[name]}: it cannot go on.")
        if not (state["epoch"] >= 0 and 0 <= state["position"] <= len(self._lengths)):
            raise UsageError(f"the saved stream stands outside of its {len(self._lengths)} samples: {dict(state)!r}.")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    # ------------------------------------------------------------------------------------------------------- batches

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._lengths)))
        random.Random(f"epoch {epoch} of seed {self._seed}").shuffle(order)
        return order

    def _fraction(self, step: int) -> float:
        if self._ramp is None:
            return 1.0
        fraction = self._ramp(step)
        if not 0 < fraction <= 1:
            raise UsageError(
                f"ramp must return how much of the batch to take, above 0 and at most 1: at step {step} it returned "
                f"{fraction!r}."
            )
        return fraction

    def _upcoming(self) -> int | None:
        """The next sample, which is not taken yet; None at the end."""
        if self._position == len(self._order):
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        return self._order[self._position]

    def _next_samples(self, count: int) -> list[int]:
        batch: list[int] = []
        while len(batch) < count and (sample := self._upcoming()) is not None:
            batch.append(sample)
            self._position += 1
        return batch

    def _next_tokens(self, budget: int) -> list[int]:
        batch: list[int] = []
        while (sample := self._upcoming()) is not None:
            budget -= self._lengths[sample]
            if batch and budget < 0:
                break
            batch.append(sample)
            self._position += 1
        return batch


def share(batch: Sequence[int], lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The part of a batch that a rank takes, in the batch's order: all ranks get about equally many tokens.

    The longest sample goes first, and each to the rank that has the least so far. A rank is left without a sample only
    where the batch has fewer than there are ranks.

    >>> [share([0, 1, 2, 3], [9, 4, 3, 3], rank, 2) for rank in (0, 1)]
    [[0], [1, 2, 3]]
    """
    if not (_is_count(world_size) and 0 <= rank < world_size):
        raise UsageError(f"rank must be one of {world_size!r} ranks, counted from 0: got {rank!r}.")
    loads = [(0, 0, other) for other in range(world_size)]  # tokens, samples, rank
    mine: list[int] = []
    # Places in the batch, not samples: at the turn of an epoch a sample may stand in it twice.
    for place in sorted(range(len(batch)), key=lambda place: (-lengths[batch[place]], place)):
        tokens, samples, receiver = min(loads)
        loads[receiver] = (tokens + lengths[batch[place]], samples + 1, receiver)
        if receiver == rank:
            mine.append(place)
    return [batch[place] for place in sorted(mine)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
