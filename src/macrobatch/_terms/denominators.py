"""The denominators of the terms of a loss: counted before the first backward of a window, and summed over all ranks.

Several terms cannot share one division at the window's close, so their denominators must be known before. Python
numbers stay on the host and tensors on their device; the host reads nothing from a device here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from macrobatch._border.arguments import checked_count
from macrobatch._cut.policies import Cut
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import Denominators
from macrobatch._ranks.collectives import all_gather_objects, start_named_sum
from macrobatch._torch.tensors import in_order, rounding_of, wide
from macrobatch.errors import BatchError

Count = int | float | Tensor
Counted = tuple[Count, ...]  # the counts of a batch, one number per term


class TermCounter:
    """Calls `counts` for the denominators of windows, and sums them over the ranks."""

    def __init__(self, counts: Callable[[Any], Mapping[str, Count]], engine: Engine) -> None:
        self._counts = counts
        self._engine = engine
        self._names: tuple[str, ...] | None = None
        self._is_agreed = engine.backend.group is None

    def count(self, batch: Any) -> Counted:
        """The counts of a batch. An error if their names differ from those of earlier batches."""
        counted = self._counts(batch)
        if not isinstance(counted, Mapping) or not counted:
            raise BatchError(
                "counts(batch) must return the number of items of each term, by name: got "
                f"{'an empty dict' if isinstance(counted, Mapping) else type(counted).__name__}. For example "
                '{"policy": mask.sum(), "kl": len(mask)}.'
            )
        names = tuple(counted)
        if self._names is not None and names != self._names:
            _raise_for_names(self._names, names, "before", "now")
        numbers = tuple(self._kept(checked_count(name, number)) for name, number in counted.items())
        self._names = names
        return numbers

    def _kept(self, number: Count) -> Count:
        """A copy of a tensor, because the caller may reuse the same buffer for the next batch."""
        if not isinstance(number, Tensor):
            return number
        return in_order(number, self._engine.device).detach().clone()

    def agree_on_names(self) -> None:
        """Tell the names to ranks without samples, once before the first window. All ranks call this together."""
        if self._is_agreed:
            return
        everyone: list[tuple[str, ...] | None] = all_gather_objects(self._names, self._engine.backend.host_group())
        known = [(rank, names) for rank, names in enumerate(everyone) if names is not None]
        assert known, "called where some rank has samples"
        for rank, names in known[1:]:
            if names != known[0][1]:
                _raise_for_names(known[0][1], names, f"on rank {known[0][0]}", f"on rank {rank}")
        self._names, self._is_agreed = known[0][1], True

    def total(self, counted: Sequence[Counted]) -> Denominators:
        """The denominators of a window with batches of these counts. All ranks call this."""
        names = self._names if self._names is not None and self._is_agreed else ()  # else no rank has a sample
        columns = [list(column) for column in zip(*counted, strict=True)] or [[0] for _ in names]
        own = _vector(columns, self._engine.device)
        total, group = own, self._engine.backend.group
        if group is not None and names:
            total = start_named_sum({"counts": own}, group)()["counts"]
        rounding = tuple(max(map(rounding_of, column)) for column in columns)
        host = tuple(map(_host_sum, columns))
        divisors = [  # without items on any rank, a term adds nothing
            (known or math.inf) if known is not None and total is own else divisor
            for known, divisor in zip(host, torch.where(total == 0, math.inf, total).unbind(), strict=True)
        ]
        return Denominators(names, host, own, total, divisors, rounding)


def _host_sum(column: Iterable[Count]) -> int | float | None:
    numbers = [count for count in column if not isinstance(count, Tensor)]
    return None if any(isinstance(count, Tensor) for count in column) else sum(numbers)


def _vector(columns: Sequence[Sequence[Count]], device: torch.device) -> Tensor:
    """The sum of each column, on the device. One copy moves all numbers of the host."""
    dtype = wide(device)
    host = [sum(count for count in column if not isinstance(count, Tensor)) for column in columns]
    vector = torch.tensor(host, dtype=dtype, device="cpu").to(device, non_blocking=True)
    parts = [[count for count in column if isinstance(count, Tensor)] for column in columns]
    if not any(parts):
        return vector
    nothing = torch.zeros((), dtype=dtype, device=device)
    moved = [
        torch.stack([c.reshape(()).to(device, dtype, non_blocking=True) for c in part]).sum() if part else nothing
        for part in parts
    ]
    return vector + torch.stack(moved)


def _raise_for_names(expected: tuple[str, ...], found: tuple[str, ...], there: str, here: str) -> NoReturn:
    """Raise an error that names the first term that differs between `expected` and `found`."""
    lists = f"{there}: {', '.join(expected)}; {here}: {', '.join(found)}"
    for name in (*expected, *found):
        if (name in expected) != (name in found):
            only = there if name in expected else here
            raise BatchError(
                f"counts(batch) must return the same names on every call and rank: the term {name!r} came {only} only "
                f"({lists}). Return 0 for a term that has no items in a batch."
            )
    name = next(name for name, other in zip(found, expected, strict=True) if name != other)
    raise BatchError(
        f"counts(batch) must return the same names in the same order on every call and rank: the term {name!r} came at "
        f"another place ({lists})."
    )


# ---------------------------------------------------------------------------------------------- of a whole batch


class BatchTerms:
    """Tells an engine the denominators of each window, which is one batch."""

    def __init__(self, counts: Callable[[Any], Mapping[str, Count]], engine: Engine) -> None:
        self._engine = engine
        self._counter = TermCounter(counts, engine)
        self.begin_window()

    def begin_window(self) -> None:
        """Begin the window of a new batch."""
        self._counted: Counted | None = None
        self._denominators: Denominators | None = None

    def count(self, batch: Any) -> None:
        """Call `counts` for a batch that has samples; only once per window."""
        if self._counted is None:
            self._counted = self._counter.count(batch)

    def expect(self, cut: Cut) -> None:
        """Tell the engine the denominators of the window. All ranks call this together."""
        if self._denominators is None:
            if not cut.is_empty:
                self._counter.agree_on_names()
            self._denominators = self._counter.total([] if self._counted is None else [self._counted])
        self._engine.expect(self._denominators)

    def denominators(self) -> Denominators:
        """The denominators of the current window."""
        assert self._denominators is not None, "they are known before its first micro-batch"
        return self._denominators
