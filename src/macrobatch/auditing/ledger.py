"""The ledger: backwards, steps and everything else that changed gradients, in the order of the program.

Between two looks at the gradients, whatever differs is a `Change`. When an optimizer steps, its window is read from the
ledger: which backwards are in its gradient, and by what factor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from macrobatch.auditing import explaining
from macrobatch.auditing.records import Exchange, Micro, Window
from macrobatch.auditing.samples import NOTHING, Leaves, Sample, zeros

MOST_ENTRIES = 1024  # of backwards that no optimizer has used so far
FAILED_BACKWARD = "a backward that failed"
Kind = Literal["unknown", "clip", "clip value"]


@dataclass
class Backward:
    """One backward, or gradients that `torch.autograd.grad` has returned (`is_loose`)."""

    micro: Micro
    leaves: frozenset[int]
    before: Sample = NOTHING
    after: Sample = NOTHING
    local: Tensor | None = None  # what it has added to each leaf on this rank, if hooks or the program have shown it
    is_loose: bool = False
    is_training: bool = True  # whether it reached parameters only; else it may have been for an input
    version: int = 0  # of all its leaves together
    others: tuple[Micro, ...] = ()  # further micro-batches whose gradients were added together with this one
    users: set[int] = field(default_factory=set)  # the optimizers that have stepped with it

    def added(self, count: int) -> Tensor:
        """What it has added to each leaf."""
        if self.local is not None:
            return padded(self.local, count)
        return self.after.matrix(count) - self.before.matrix(count)


@dataclass
class Change:
    """Gradients that changed outside of a backward."""

    before: Sample
    after: Sample
    kind: Kind = "unknown"


@dataclass
class Exchanged:
    """Ranks have exchanged gradients: these are in the place of those."""

    before: Tensor
    after: Tensor
    sharded: frozenset[int] = frozenset()


@dataclass
class SchedulerStep:
    """A scheduler was stepped."""


Entry = Backward | Change | Exchanged | SchedulerStep


class Ledger:
    """What was seen, until no optimizer needs it any more."""

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self.has_ranks = False
        self._entries: list[Entry] = []
        self._first = 0  # the number of the first entry that is still here
        self._begins: dict[int, int] = {}  # by optimizer: the entry after its last step
        self._left: dict[int, Tensor] = {}  # by optimizer: its gradients at its last step
        self._owned: dict[int, frozenset[int]] = {}  # by optimizer: its leaves
        self._mixed: dict[int, tuple[Window, frozenset[int]]] = {}  # by optimizer: see `_note_mixed`
        self._now = NOTHING
        self._held = zeros(0)  # what backwards have added to sharded leaves since the last exchange
        self.has_lost = False

    # ------------------------------------------------------------------------------------------ what happens

    def look(self, kind: Kind = "unknown") -> None:
        """Look at all gradients. If they differ from the last look, something has changed them."""
        before, self._now = self._now, self.leaves.sample()
        if not before.same(self._now):
            self._append(Change(before, self._now, kind))

    def add(self, backward: Backward) -> None:
        """Add a backward that has just ended."""
        if not backward.is_loose:
            backward.before, backward.after = self._now, self.leaves.sample(is_after_backward=True)
            self._now = backward.after
            if backward.micro.unknown == FAILED_BACKWARD and backward.after.same(backward.before):
                return  # before it added anything
        self._append(backward)
        if self.has_ranks and not backward.is_loose:
            self._notice_exchange(backward)

    def _notice_exchange(self, backward: Backward) -> None:
        """Note an exchange of ranks: gradients are not what this rank has added to them.

        `fully_shard` holds what ranks will exchange elsewhere, and adds what came of it to the gradients of the shards.
        """
        count, sharded = len(self.leaves), list(self.leaves.sharded)
        before, now, added = backward.before.matrix(count), self._now.matrix(count), backward.added(count)
        expected, after = before + added, now
        self._held = padded(self._held, count)
        if sharded:
            self._held[sharded] += added[sharded]
            expected[sharded], after = before[sharded], now.clone()
        if explaining.is_close(expected, now):
            return
        if sharded:
            expected[sharded] = self._held[sharded]
            after[sharded] -= before[sharded]
            self._held[sharded] = 0
        self._append(Exchanged(expected, after, frozenset(sharded)))

    def take(self, micros: Sequence[Micro], numbers: Sequence[int]) -> None:
        """Take the gradients as they are now for what these micro-batches have added: somebody else has seen them."""
        before, self._now = self._now, self.leaves.sample(is_after_backward=True)
        self._append(Change(before, NOTHING))  # older gradients are not in the window of an engine
        self._append(Backward(micros[0], frozenset(numbers), after=self._now, others=tuple(micros[1:])))

    def note_scheduler(self) -> None:
        """A scheduler was stepped."""
        if self._entries:
            self._append(SchedulerStep())

    def num_after(self, optimizer: int, places: Collection[str]) -> int:
        """How many backwards from these lines came after the last step of an optimizer, and reached no step."""
        late = self._entries[max(self._begins[optimizer] - self._first, 0) :]
        return sum(
            entry.micro.place in places and entry.is_training and not (entry.is_loose or entry.users)
            for entry in late
            if isinstance(entry, Backward) and entry.leaves & self._owned[optimizer]
        )

    def skip(self, optimizer: int, numbers: Sequence[int]) -> None:
        """A step that was not taken: its window does not count."""
        self.look()
        self._end(optimizer, numbers)

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) > MOST_ENTRIES:
            self.has_lost = True
            del self._entries[: MOST_ENTRIES // 2]
            self._first += MOST_ENTRIES // 2

    def _end(self, optimizer: int, numbers: Sequence[int]) -> None:
        self._begins[optimizer] = self._first + len(self._entries)
        self._left[optimizer] = self._now.matrix(len(self.leaves))[list(numbers)]
        self._owned[optimizer] = frozenset(numbers)
        self._find_mixed()
        owned = frozenset().union(*self._owned.values())
        unneeded = max(0, min(self._begins.values()) - self._first)
        for index, entry in enumerate(self._entries[:unneeded]):
            if isinstance(entry, Backward) and not entry.leaves <= owned:
                unneeded = index  # it may belong to an optimizer that has not stepped so far
                break
        del self._entries[:unneeded]
        self._first += unneeded
        if not self._entries:
            self.leaves.forget_sums()

    # ------------------------------------------------------------------------------------------ the window of a step

    def close(self, optimizer: int, name: str, number: int, numbers: Sequence[int], rounding: float) -> Window:
        """The window of an optimizer that is about to step: what is in the gradients of these leaves."""
        self.look()
        begin = self._begins.get(optimizer, 0) - self._first
        left = self._left.get(optimizer)
        reading = _Reading(list(numbers), rounding, left, len(self.leaves), has_ranks=self.has_ranks)
        for entry in self._entries[max(begin, 0) :]:
            reading.read(entry)
        window = reading.window(optimizer, name, number)
        window.is_adversary = any(factor == 0 and b.users - {optimizer} for b, factor, _ in reading.open)
        self._note_mixed(optimizer, window, [b for b, factor, _ in reading.open if factor != 0])
        if begin < 0 and self.has_lost:
            window.problems.append(f"more than {MOST_ENTRIES} backwards came before this step.")
        self._end(optimizer, numbers)
        return window

    def _note_mixed(self, optimizer: int, window: Window, used: list[Backward]) -> None:
        """Note which leaves some losses of a window reach, and others do not."""
        losses = {(b.micro.expression, b.micro.place, b.micro.caller) for b in used}
        if len(losses) > 1:
            everywhere = frozenset.intersection(*(b.leaves for b in used))
            self._mixed[optimizer] = window, frozenset().union(*(b.leaves for b in used)) - everywhere

    def _find_mixed(self) -> None:
        """Find windows with a loss that may be meant for another optimizer only, as that of a generator is."""
        for optimizer, (window, leaves) in list(self._mixed.items()):
            if any(leaves & owned for other, owned in self._owned.items() if other != optimizer):
                window.problems.append(
                    "a loss that also reaches parameters of another optimizer is added to losses that do not; if it is "
                    "meant for that one only, clear its gradients"
                )
                del self._mixed[optimizer]


class _Reading:
    """Reads the entries of one window in their order."""

    def __init__(self, rows: list[int], rounding: float, left: Tensor | None, count: int, *, has_ranks: bool) -> None:
        self._has_ranks = has_ranks
        self._rows, self._rounding, self._count = rows, rounding, count
        self.open: list[tuple[Backward, float | None, int | None]] = []  # with its factor, and its first exchange
        self._clip = self._hand = 1.0  # since the last backward
        self._was_value_clipped = self._was_clipped = self._was_clipped_scaled = False
        self._left_over: float | None = 1.0 if left is not None and bool(left.any()) else 0.0
        self._foreign = False
        self._problems: list[str] = []
        self._clip_factors: list[float] = []
        self._schedulers = self._pending_schedulers = 0
        self._exchanges: list[Exchange] = []
        self._is_sharded = False

    def read(self, entry: Entry) -> None:
        if isinstance(entry, Backward):
            if entry.leaves.intersection(self._rows):
                self._backward(entry)
        elif isinstance(entry, Change):
            self._change(entry)
        elif isinstance(entry, Exchanged):
            self._exchanged(entry)
        elif any(factor != 0 for _, factor, _ in self.open):
            self._pending_schedulers += 1

    def _of(self, samples: Tensor) -> Tensor:
        return padded(samples, self._count)[self._rows]

    def _of_sample(self, sample: Sample) -> Tensor:
        return sample.matrix(self._count)[self._rows]

    def _backward(self, entry: Backward) -> None:
        if entry.is_loose:
            self.open.append((entry, 0.0, None))
            return
        if any(factor != 0 for _, factor, _ in self.open):
            if self._clip != 1 or self._was_value_clipped:
                self._clip_factors.append(math.nan if self._was_value_clipped else self._clip)
            if self._was_value_clipped:
                self._lose("gradients were clipped between two backwards, not all by one factor")
            self._schedulers += self._pending_schedulers
        self._multiply(self._clip * self._hand)
        self._clip = self._hand = 1.0
        self._was_value_clipped = self._was_clipped = False
        self._pending_schedulers = 0
        self.open.append((entry, 1.0, None))

    def _multiply(self, ratio: float) -> None:
        if ratio != 1:
            self.open = [(b, None if f is None else f * ratio, e) for b, f, e in self.open]
            self._left_over = None if self._left_over is None else self._left_over * ratio

    def _change(self, entry: Change) -> None:
        before, after = self._of_sample(entry.before), self._of_sample(entry.after)
        if same(before, after):
            return
        if not after.any():
            self._clear()
            return
        ratio = None if entry.kind == "clip value" else explaining.ratio_of(before, after, self._rounding)
        if entry.kind != "unknown":
            self._was_clipped_scaled = self._was_clipped_scaled or self._is_scaled()
        if ratio is None and entry.kind != "unknown":  # by value, or of some parameters only
            self._was_value_clipped = self._was_clipped = True
        elif ratio is None:
            self._explain(before, after)
        elif entry.kind == "clip":
            self._was_clipped = True
            self._clip *= ratio
        else:
            self._hand *= ratio

    def _is_scaled(self) -> bool:
        """Whether the gradient still has the loss scale of a GradScaler."""
        scales = [(b.micro.loss_scale, factor) for b, factor, _ in self.open if factor]
        return any(scale > 1 and scale * (self._hand * factor) ** 2 > 1 for scale, factor in scales)

    def _clear(self) -> None:
        self.open = [(b, 0.0, e) for b, _, e in self.open]
        self._left_over, self._foreign, self._problems = 0.0, False, []
        self._clip = self._hand = 1.0
        self._was_value_clipped = self._was_clipped = self._was_clipped_scaled = False
        self._pending_schedulers = self._schedulers = 0
        self._clip_factors = []
        self._exchanges = []

    def _lose(self, problem: str) -> None:
        self._problems.append(problem)
        self._left_over = None if self._left_over else self._left_over
        self.open = [(b, None if f else f, e) for b, f, e in self.open]

    def _explain(self, before: Tensor, after: Tensor) -> None:
        """Explain a change by gradients that the program has kept, or got from `torch.autograd.grad`."""
        if not bool(after.isfinite().all() and before.isfinite().all()):
            self._lose("gradients were infinite or NaN")
            return
        kept = [index for index, (_, factor, _) in enumerate(self.open) if factor == 0]
        found = explaining.combination(
            before, after, [self._of(self.open[index][0].added(self._count)) for index in kept], self._rounding
        )
        if found is None and self._has_ranks and before.any():
            self._exchange(before, after)  # whether it is one shows when all ranks are compared
            return
        if found is None:
            if not before.any():
                self._foreign = True
            self._lose(
                "gradients were changed outside of any backward, other than by one factor: by noise, weight decay, "
                "a clipping of their own, or an exchange of ranks by hand"
            )
            return
        own, coefficients = found
        self._multiply(own)
        for index, coefficient in zip(kept, coefficients, strict=True):
            self.open[index] = (self.open[index][0], coefficient, self.open[index][2])

    def _exchanged(self, entry: Exchanged) -> None:
        before, after = self._of(entry.before), self._of(entry.after)
        self._is_sharded = self._is_sharded or entry.sharded.issuperset(self._rows)
        if not same(before, after):
            self._exchange(before, after)

    def _exchange(self, before: Tensor, after: Tensor) -> None:
        self._exchanges.append(Exchange(before=before.tolist(), after=after.tolist()))
        number = len(self._exchanges) - 1
        self.open = [(b, f, number if e is None else e) for b, f, e in self.open]

    def window(self, optimizer: int, name: str, number: int) -> Window:
        """The window, after all entries were read."""
        used = [(b, f, e) for b, f, e in self.open if f != 0]
        for backward, _, _ in used:
            backward.users.add(optimizer)
        cleared = [b for b, f, _ in self.open if f == 0 and self._was_meant(b, optimizer)]
        places = {backward.micro.place for backward, _, _ in used}
        left_out = [backward for backward in cleared if backward.micro.place in places or not used]
        problems = list(self._problems)
        versions = {b.version for b in left_out} | {b.version for b, _, _ in used[:1]}
        if left_out and len(versions) > 1:
            problems.append("parameters changed between the backwards of one window, so that some were repeated")
            left_out = []
        if self._foreign and not used:
            problems.append("an optimizer stepped with gradients that came from no backward that was seen")
        return Window(
            optimizer=name,
            number=number,
            micros=[replace(m, factor=f, exchange=e) for b, f, e in used for m in (b.micro, *b.others)],
            left_out=[replace(b.micro, factor=0.0) for b in left_out],
            problems=problems,
            clip_factors=self._clip_factors,
            was_clipped=self._was_clipped,
            was_clipped_scaled=self._was_clipped_scaled,
            divided=None if self._hand == 1 else self._hand,
            has_left_over=bool(used) and self._left_over not in (0, None),
            is_repeated=not used and self._left_over not in (0, None) and not self._foreign,
            scheduler_steps=self._schedulers,
            rounding=self._rounding,
            exchanges=self._exchanges,
            is_sharded=self._is_sharded,
        )

    def _was_meant(self, backward: Backward, optimizer: int) -> bool:
        """Whether a backward whose gradients were cleared was meant for this optimizer."""
        is_for_another = bool(backward.users - {optimizer})
        is_finite = bool(backward.added(self._count).isfinite().all())
        return backward.is_training and not backward.is_loose and not is_for_another and is_finite


def padded(samples: Tensor, count: int) -> Tensor:
    """With rows of zeros for leaves that are known only since then."""
    if len(samples) == count:
        return samples
    rows = zeros(count)
    rows[: len(samples)] = samples
    return rows


def same(a: Tensor, b: Tensor) -> bool:
    """Whether they are the same numbers, NaN included."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
