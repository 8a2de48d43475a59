"""What must keep its proportion over a window: the items of each column, and what its losses are means over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from macrobatch._border.arguments import items_on_host
from macrobatch._engine.totals import PROPORTIONS
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._engine.window import Window
from macrobatch._loss.proportions import Kind, Number, Pair
from macrobatch._loss.weighing import Weight, out_of_proportion, weigh
from macrobatch._ranks.collectives import Group
from macrobatch.errors import BatchError


def in_column(column: int, pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """The pairs of one term, told from those of the others by their keys."""
    return tuple((column * len(Kind) + key, a, b) for key, a, b in pairs)


def require_fit(pairs: Sequence[Pair], window: Window, group: Group) -> None:
    """Raise an error if pairs break a proportion, as far as the host knows. Ranks learn of it at the close."""
    for pair in pairs if group is None else ():
        if not window.totals.proportions.fits(pair):
            raise _error(pair[0], window, pair)


def weight_of(loss: Tensor, items: Number | None, window: Window, *, is_mean: bool) -> Weight:
    """What a loss weighs, beside the items given. A recording freezes no number."""
    on_host = not window.is_static
    return weigh(loss, items_on_host(items) if on_host else items, is_mean=is_mean, steps=None, on_host=on_host)


def proportion_flags(window: Window) -> Flags:
    """Whether items or counts are out of proportion, if only the device or other ranks know."""
    proportions, sums = window.totals.proportions, window.everyone.get(PROPORTIONS)
    if sums is None:
        if not proportions.on_device:
            return {}
        sums = window.totals.sums_of_pairs(window.device)
    broken = proportions.broken(sums)
    blocks = bool(proportions) or not window.micro_batches  # a rank without samples waits like the others
    return {"out of proportion": Flag(broken.any(), lambda: _error(int(broken.int().argmax()), window), blocks)}


def _error(key: int, window: Window, pair: Pair | None = None) -> BatchError:
    """The error of one proportion: of a pair, or at the close of a window. The host waits for it."""
    column, kind = divmod(key, len(Kind))
    last = window.totals.proportions.last.get(key)
    make = partial(out_of_proportion, Kind(kind))
    error = make(last, None, window.number) if pair is None else make(pair[1:], last)
    if window.denominators is None or not window.denominators.are_terms:
        return error
    return BatchError(f"the term {window.early.names[column]!r}: {error}", code=error.code)
