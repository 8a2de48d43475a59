"""Which samples are in which batch. It depends only on the seed and the global batch, not on ranks or micro-batches.

`Stream` returns the batch of each optimizer step, for all ranks together; `share` returns the part of one rank.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from macrobatch.errors import UsageError


@dataclass(frozen=True)
class Mixture:
    """Several sources, of which an epoch has samples in given shares. An epoch has as many samples as all sources.

    From a source with a small share an epoch takes only some samples, and the next epoch goes on with the others. From
    one with a large share it takes samples several times.

    >>> Mixture([[0, 1, 2, 3, 4, 5], [6, 7]], [1, 3]).counts
    [2, 6]
    """

    members: Sequence[Sequence[int]]  # the samples of each source
    weights: Sequence[float]  # the share of each source, relative to the others

    @property
    def counts(self) -> list[int]:
        """The number of samples of each source in an epoch."""
        size, total = sum(map(len, self.members)), sum(self.weights)
        exact = [size * weight / total for weight in self.weights]
        found = [math.floor(count) for count in exact]
        for source in sorted(range(len(exact)), key=lambda number: (found[number] - exact[number], number))[
            : size - sum(found)
        ]:
            found[source] += 1
        return found

    def draw(self, epoch: int, seed: int) -> list[int]:
        """The samples of an epoch, source after source."""
        drawn: list[int] = []
        for source, (members, count) in enumerate(zip(self.members, self.counts, strict=True)):
            passes: dict[int, list[int]] = {}
            for place in range(epoch * count, (epoch + 1) * count):
                number, index = divmod(place, len(members))
                if number not in passes:
                    passes[number] = list(members)
                    random.Random(f"pass {number} of source {source} of seed {seed}").shuffle(passes[number])
                drawn.append(passes[number][index])
        return drawn


class Stream:
    """The batches of a run, one after the other, over any number of epochs.

    Every epoch has its own order, which depends on the seed and the number of the epoch. A batch at the end of an epoch
    continues with samples of the next one, so that all batches are full. Only the very last one may be smaller.

    >>> stream = Stream([5, 3, 9, 4], seed=0, batch_size=3, epochs=2)
    >>> batches = [stream.next(step) for step in range(4)]
    >>> [len(batch) for batch in batches], sorted(batches[0] + batches[1] + batches[2])
    ([3, 3, 2, 0], [0, 0, 1, 1, 2, 2, 3, 3])

    A longer sample than `batch_tokens` is a batch of its own. ``ramp(step)`` is the fraction of the batch at a
    step.
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
        mixture: Mixture | None = None,
    ) -> None:
        if (batch_size is None) == (batch_tokens is None):
            raise UsageError(f"pass batch_size or batch_tokens, not both: got {batch_size!r} and {batch_tokens!r}.")
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
        self._mixture = mixture
        self._epoch = 0
        self._position = 0  # in the order of this epoch
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The number of complete epochs."""
        return self._epoch

    @property
    def progress(self) -> float:
        """The number of passes over the data so far, with fractions."""
        return self._epoch + self._position / len(self._lengths)

    def next(self, step: int) -> list[int]:
        """The batch after `step` optimizer steps, as indices of samples. It is empty at the end."""
        fraction = self._fraction(step)
        if self._batch_size is not None:
            return self._next_samples(max(round(self._batch_size * fraction), 1))
        assert self._batch_tokens is not None
        return self._next_tokens(max(round(self._batch_tokens * fraction), 1))

    def extent(self, epochs: int) -> tuple[int, int]:
        """The number of batches in `epochs` epochs, from the first batch on, and the samples in the last of them."""
        if not _is_count(epochs):
            raise UsageError(f"epochs must be a whole number, 1 or more: got {epochs!r}.")
        if self._batch_size is not None and self._ramp is None:
            whole, rest = divmod(epochs * len(self._lengths), self._batch_size)
            return (whole + 1, rest) if rest else (whole, self._batch_size)
        again = copy.copy(self)
        again._epochs, again._epoch, again._position, again._order = epochs, 0, 0, self._order_of(0)
        step = last = 0
        while batch := again.next(step):
            step, last = step + 1, len(batch)
        return step, last

    # ------------------------------------------------------------------------------------------- saving and restoring

    def state_dict(self) -> dict[str, int]:
        """The position in the data, as plain numbers."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "num_samples": len(self._lengths)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the position. Refuses a state with another seed or number of samples, whose batches would differ."""
        own = self.state_dict()
        if set(state) != set(own) or not all(type(value) is int for value in state.values()):
            raise UsageError(f"this is not what a stream's state_dict returned: {dict(state)!r}.")
        for name in ("seed", "num_samples"):
            if state[name] != own[name]:
                raise UsageError(
                    f"the checkpoint has {name} {state[name]}, this run {own[name]}: it cannot be resumed."
                )
        if not (state["epoch"] >= 0 and 0 <= state["position"] <= len(self._lengths)):
            raise UsageError(
                f"the checkpoint's position is past the end of the {len(self._lengths)} samples: {dict(state)!r}."
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    # ------------------------------------------------------------------------------------------------------- batches

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._lengths))) if self._mixture is None else self._mixture.draw(epoch, self._seed)
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

    def _next_sample(self) -> int | None:
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
        while len(batch) < count and (sample := self._next_sample()) is not None:
            batch.append(sample)
            self._position += 1
        return batch

    def _next_tokens(self, budget: int) -> list[int]:
        batch: list[int] = []
        while (sample := self._next_sample()) is not None:
            budget -= self._lengths[sample]
            if batch and budget < 0:
                break
            batch.append(sample)
            self._position += 1
        return batch


def share(batch: Sequence[int], lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The part of a batch for one rank, in the batch's order. All ranks get about equally many tokens.

    The longest samples are assigned first, each to the rank that has the fewest tokens so far. A rank gets no sample
    only if the batch has fewer samples than there are ranks.

    >>> [share([0, 1, 2, 3], [9, 4, 3, 3], rank, 2) for rank in (0, 1)]
    [[0], [1, 2, 3]]
    """
    if not (_is_count(world_size) and 0 <= rank < world_size):
        raise UsageError(f"rank must be one of {world_size!r} ranks, counted from 0: got {rank!r}.")
    loads = [(0, 0, other) for other in range(world_size)]  # tokens, samples, rank
    mine: list[int] = []
    # Sort positions in the batch, not samples: at the end of an epoch a sample may be in it twice.
    for place in sorted(range(len(batch)), key=lambda place: (-lengths[batch[place]], place)):
        tokens, samples, receiver = min(loads)
        loads[receiver] = (tokens + lengths[batch[place]], samples + 1, receiver)
        if receiver == rank:
            mine.append(place)
    return [batch[place] for place in sorted(mine)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
