"""Decides what each backward weighs: by the items that its loss states, or the same as all others.

The decision is final only when a window closes: a later loss may not be readable, or that of another process. So as
long as all micro-batches of a window had the same number of items, nothing in it depends on the decision. After that
nothing can be undone, and mixing is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._loss.proportions import Number
from macrobatch._torch.graph import reach_of
from macrobatch._torch.tensors import wide
from macrobatch.accelerate.micro_batch import MicroBatch
from macrobatch.accelerate.ranks import HOST, Ranks, Sharing, sharing_of
from macrobatch.accelerate.reading import Reading, read
from macrobatch.accelerate.weights import factor_of, reference_of
from macrobatch.accelerate.window import Window
from macrobatch.errors import BatchError, UsageError, warn

SEVERAL = "accumulate() had several backward() calls"
CARRIES = "there were gradients already, which no micro-batch of this window has added"
NO_MODELS = "accumulate() was not given the models that it trains"
APART = "accumulate() was not given the models that prepare() returned, so nothing exchanges their gradients"
HIDDEN = "the models are sharded, so it is not known which optimizers a loss belongs to"
OTHERS = "the loss also reaches parameters of an optimizer whose model accumulate() was not given"
CHANGED = "the losses of a window are not the same expression, or add up means whose counts have no fixed proportion"
SCALED = "the program has divided a sum over labels itself in some micro-batches, but not in all"
ELSEWHERE = "another process could not read its loss"


class Backward(NamedTuple):
    """A backward that is about to run."""

    loss: Tensor
    micro_batch: MicroBatch
    windows: Sequence[Window]  # of the models that `accumulate()` got
    others: Sequence[Window]  # of all other optimizers
    models: Sequence[Any]
    steps: int  # the micro-batches that a window should have
    is_first: bool  # whether no window is open
    is_extra: bool  # whether its micro-batch has had a backward already
    sends_each: bool  # whether gradients travel after every micro-batch


class Weigher:
    """Decides what backwards weigh.

    Args:
        scaler: returns the GradScaler, or None.
        rescale: multiplies what a window has accumulated.
    """

    def __init__(self, scaler: Callable[[], Any], rescale: Callable[[Window, MicroBatch, Number], None]) -> None:
        self._scaler = scaler
        self._rescale = rescale
        self._ranks = Ranks()
        self._reference: Number | None = None  # the items of a micro-batch that weighs as much as in Accelerate
        self._largest: Number = 0
        self._has_warned = False

    # ------------------------------------------------------------------------------------------ the main path

    def weigh(self, now: Backward) -> Number:
        """What a backward weighs, as a multiple of its weight in Accelerate. It also counts the items.

        Raises:
            BatchError: the losses of the window so far were weighed by their items, and this one cannot be.
        """
        if now.is_first:
            self._reference = None
        sharing = sharing_of(now.models, sends=now.micro_batch.closes or now.sends_each)
        talks = not now.is_extra and self._talks(now, sharing)
        if now.steps == 1 and now.micro_batch.closes and sharing in (Sharing.ALONE, Sharing.APART):
            return 1  # the whole window, in one process
        if now.is_extra and all(window.is_closed and window.has_weights for window in now.windows):
            return self._add_to_mean(now)
        reading = self._reading(now, sharing)
        is_weighed = reading.items is not None and not reading.reason
        reached = self._reached(now, is_weighed=is_weighed)
        if is_weighed and reached:
            reading, is_weighed = Reading(reason=OTHERS), False
        if talks:
            return self._weigh_together(now, reading, reached, sharing, is_weighed=is_weighed)
        if not is_weighed:
            return self._weigh_alike(now, reading.reason, [*now.windows, *reached], sharing)
        if self._reference is None:
            self._reference = self._new_reference([reading.items])  # type: ignore[list-item]
        self._add(now, reading)
        if now.micro_batch.closes:
            for window in now.windows:
                self._finish(window, now)
        return self._weight(reading)

    def require_items_everywhere(self, now: Backward) -> None:
        """Raise an error on all processes if only some of them give items."""
        sharing = sharing_of(now.models, sends=now.micro_batch.closes or now.sends_each)
        if self._talks(now, sharing, or_first=self._scaler() is not None):
            _require_same(self._ranks.tell([1, 0, 0]))

    def _talks(self, now: Backward, sharing: Sharing, *, or_first: bool = False) -> bool:
        """Whether processes agree before this backward, which communicates on all of them."""
        if sharing in (Sharing.ALONE, Sharing.APART):
            return False
        every = or_first or now.sends_each or sharing is Sharing.SHARDED
        return now.micro_batch.closes or (every and now.is_first)

    def _reading(self, now: Backward, sharing: Sharing) -> Reading:
        """What the loss states, or the reason why it must not be used."""
        reading = read(now.loss)
        if reading.is_scaled:
            for window in now.windows:
                window.is_scaled = True
            return reading
        reason = reading.reason
        if any(window.carries for window in now.windows):
            reason = CARRIES
        elif not now.micro_batch.models:
            reason = NO_MODELS
        elif now.is_extra:
            reason = SEVERAL
        elif sharing is Sharing.APART:
            reason = APART
        elif sharing is Sharing.SHARDED and now.others:
            reason = HIDDEN
        elif not reason and any(w.weights is not None and not w.weights.fits(reading) for w in now.windows):
            reason = CHANGED
        is_read = not reason and all(window.weights is not None for window in now.windows)
        return reading if is_read else Reading(reason=reason)

    def _reached(self, now: Backward, *, is_weighed: bool) -> list[Window]:
        """The other windows that this backward adds to, if that matters: their weights are others."""
        if not now.others or not (is_weighed or any(window.has_weights for window in now.others)):
            return []
        own = {id(p) for window in now.windows for p in window.parameters}
        leaves = set(map(id, reach_of(now.loss).leaves)) - own
        return [window for window in now.others if not leaves.isdisjoint(map(id, window.parameters))]

    # ------------------------------------------------------------------------------------------ by items

    def _new_reference(self, counts: Sequence[Number]) -> Number:
        """Under fp16 it never shrinks: a larger weight than in Accelerate could overflow."""
        reference = reference_of(counts)
        if self._scaler() is not None:
            reference = self._largest = reference_of([reference, self._largest])
        return reference

    def _add(self, now: Backward, reading: Reading) -> None:
        for window in now.windows:
            assert window.weights is not None
            window.weights.add(reading, now.loss.device)

    def _weight(self, reading: Reading) -> Number:
        assert reading.items is not None
        assert self._reference is not None
        if isinstance(reading.items, Tensor):
            return reading.items.detach().to(wide(reading.items.device)) / self._reference
        return reading.items / self._reference

    def _finish(self, window: Window, now: Backward) -> None:
        """Note by which factor a closing window becomes its mean, in one process."""
        assert window.weights is not None
        assert self._reference is not None
        window.due = factor_of(now.steps, self._reference, window.weights.items)
        if window.weights.proportions.on_device:
            window.doubt = window.weights.proportions.broken(window.weights.sums(now.loss.device)).any()

    def finish_early(self, window: Window, steps: int) -> None:
        """The same for a window whose last micro-batch has had no backward."""
        if window.has_weights and self._reference is not None:
            assert window.weights is not None
            window.due = factor_of(steps, self._reference, window.weights.items)

    # ------------------------------------------------------------------------------------------ all the same

    def _weigh_alike(self, now: Backward, reason: str, windows: Sequence[Window], sharing: Sharing) -> Number:
        """Return to Accelerate's arithmetic, where every micro-batch has the same weight."""
        if not reason and any(window.has_weights for window in windows):
            reason = SCALED
        counts = [self._common_count(window, sharing, now) for window in windows]
        if None in counts:
            raise _mixed(reason)
        self._return(now, windows, counts, is_mixed=False)
        self._warn(reason)
        return 1

    def _return(
        self, now: Backward, windows: Iterable[Window], counts: Iterable[float | None], *, is_mixed: bool
    ) -> None:
        for window, count in zip(windows, counts, strict=True):
            if window.has_weights and count is not None and self._reference is not None:
                if isinstance(self._reference, Tensor) or count != self._reference:
                    self._rescale(window, now.micro_batch, self._reference / count)
                window.mixes = True
            window.mixes |= is_mixed
            window.weights = None

    def _common_count(self, window: Window, sharing: Sharing, now: Backward) -> float | None:
        """The items that each micro-batch of a window had; None if they differ, so that nothing can be undone."""
        if not window.has_weights:
            return 1.0
        assert window.weights is not None
        count = window.weights.common_count()
        can_rescale = sharing is not Sharing.SHARDED and not now.sends_each
        return count if can_rescale or count is None or float(self._reference or 1) == count else None

    def _add_to_mean(self, now: Backward) -> Number:
        """One more backward of the micro-batch that has closed a window, whose gradient is a mean already."""
        lengths = {window.micro_batches for window in now.windows}
        if len(lengths) > 1 or any(window.has_weights for window in self._reached(now, is_weighed=True)):
            raise _mixed(SEVERAL)
        for window in now.windows:
            window.mixes = True
        self._warn(SEVERAL)
        return now.steps / lengths.pop()

    def _warn(self, reason: str) -> None:
        if reason and not self._has_warned:
            self._has_warned = True
            warn(
                f"every micro-batch of a window has the same weight, as in Accelerate, because {reason}. That is exact "
                "only if all micro-batches have the same number of items. If they have not, pass it: "
                "accelerator.backward(loss, items=...). Accelerator(exact=False) keeps Accelerate's arithmetic without "
                "this warning. (It is given once.)"
            )

    # ------------------------------------------------------------------------------------------ between processes

    def _weigh_together(
        self, now: Backward, reading: Reading, reached: Sequence[Window], sharing: Sharing, *, is_weighed: bool
    ) -> Number:
        """Agree with all other processes on how the window is weighed, and on its items."""
        is_on_host = not any(window.weights is None or window.weights.is_on_device for window in now.windows)
        rows = self._ranks.tell([0, is_weighed, is_on_host and not reading.is_on_device])
        _require_same(rows)
        is_mixed = any(row[1] for row in rows)
        reason = reading.reason
        if all(row[1] for row in rows):
            weight = self._agree(now, reading, HOST if all(row[2] for row in rows) else now.loss.device)
            if weight is not None:
                return weight
            reason = CHANGED
        elif is_weighed:
            reason = ELSEWHERE
        windows = [*now.windows, *reached]
        counts = [self._common_count(window, sharing, now) for window in windows]
        if any(row[0] for row in self._ranks.tell([None in counts])):
            raise _mixed(reason or ELSEWHERE)
        self._return(now, windows, counts, is_mixed=is_mixed)
        self._warn(reason)
        return 1

    def _agree(self, now: Backward, reading: Reading, device: torch.device) -> Number | None:
        """The weight, if the losses of all processes are the same expression; None if they are not.

        `device`: where the numbers are exchanged.
        """
        assert reading.items is not None
        own = self._reference if self._reference is not None else self._new_reference([reading.items])
        totals = [w.weights.items + reading.items for w in now.windows if w.weights is not None]
        numbers = [torch.as_tensor(n, dtype=wide(device)).to(device).reshape(1) for n in (own, *totals)]
        sums = [w.weights.sums_with(reading, device) for w in now.windows if w.weights is not None]
        everyone = self._ranks.gather(torch.cat([*numbers, *(one.flatten() for one in sums)]))
        references, items = everyone[:, 0], everyone[:, 1 : 1 + len(totals)].sum(0)
        of_pairs = torch.split(everyone[:, 1 + len(totals) :].sum(0), [one.numel() for one in sums])
        doubts = []
        for window, both, one in zip(now.windows, of_pairs, sums, strict=True):
            assert window.weights is not None
            doubts.append(window.weights.proportions.broken(both.view_as(one)).any())
        is_on_host = device.type == "cpu"
        if is_on_host and any(map(bool, doubts)):
            return None
        largest = references.max()
        common: Number = _plain(largest) if is_on_host else largest
        if self._reference is not None and (isinstance(common, Tensor) or common != self._reference):
            for window in now.windows:
                if window.has_weights:
                    self._rescale(window, now.micro_batch, self._reference / common)
        self._reference = common
        if self._scaler() is not None:
            self._largest = common
        self._add(now, reading)
        if now.micro_batch.closes:
            for window, total, doubt in zip(now.windows, items, doubts, strict=True):
                number = _plain(total) if is_on_host else total
                window.due = factor_of(now.steps, common, number, self._ranks.world)
                window.doubt = None if is_on_host else doubt
        return self._weight(reading)


def _plain(number: Tensor) -> int | float:
    """A number of the host, as a whole one if it is."""
    value = float(number)
    return int(value) if value == value // 1 else value


def _require_same(rows: Sequence[Sequence[int]]) -> None:
    """Raise an error on all processes if only some of them give items."""
    without = [index for index, row in enumerate(rows) if not row[0]]
    if 0 < len(without) < len(rows):
        raise UsageError(
            "items were passed to accelerator.backward() on some processes only: process "
            f"{', '.join(map(str, without))} of {len(rows)} passed none. Pass items on all processes, or on none."
        )


def _mixed(reason: str) -> BatchError:
    return BatchError(
        "the losses of this window were weighed by the items that they are means over, but now one cannot be, because "
        f"{reason}. What is accumulated cannot be weighed anew. Pass items with every loss: "
        "accelerator.backward(loss, items=...). Or make the Accelerator with exact=False, where every micro-batch has "
        "the same weight, as in Accelerate."
    )
