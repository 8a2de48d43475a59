"""How much each item of a window counted, from what was seen of it. Pure functions of plain numbers.

The weight of an item is its coefficient in the gradient that the optimizer got, times the number of items of the window
on all ranks: 1 is exact. A loss may have constant factors of its own (``0.01 * penalty``), which belong to what is
minimised. A factor is one of these if it is the same everywhere, and is not made of the number of micro-batches and
ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from macrobatch.auditing.records import Micro, Term, Window

TOLERANCE = 2e-5
LOSS_SCALE = 8.0  # the least factor on a loss that is taken for a scale of float16, if gradients are divided later
# The lines of the backward and what it reached ("" for all), the place in the loss, the node.
Key = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True)
class Share:
    """One term of one micro-batch."""

    rank: int
    place: str
    kind: str
    count: float | None
    multiplier: float  # the constants that multiply it
    written: float  # those in the loss itself
    factor: float  # what became of the gradient
    divisors: tuple[float, ...]

    @property
    def part(self) -> float:
        """What all items of it count together, if they are a mean; else its coefficient."""
        return self.multiplier * self.factor / math.prod(self.divisors)

    @property
    def coefficient(self) -> float | None:
        """What one item of it counts."""
        if self.kind == "sum":
            return self.part
        return self.part / self.count if self.count else None


@dataclass(kw_only=True)
class TermWeights:
    """The weights of one term in one window."""

    name: str
    shares: list[Share]
    own: float = 1.0  # the constant factor that belongs to the loss
    weights: list[float | None] = field(default_factory=list)
    scale: float | None = None

    @property
    def items(self) -> list[float | None]:
        return [share.count for share in self.shares]

    @property
    def num_items(self) -> float:
        return sum(share.count or 0.0 for share in self.shares)

    @property
    def micro_batches(self) -> int:
        """Those of the rank that has most."""
        return max(Counter(share.rank for share in self.shares).values(), default=0)

    def weigh(self) -> None:
        """Compute the weights and their mean."""
        total = self.num_items
        weights = (None if (c := s.coefficient) is None else c * total / self.own for s in self.shares)
        self.weights = [None if w is None or math.isnan(w) else w for w in weights]
        known = [(w, s.count) for w, s in zip(self.weights, self.shares, strict=True) if w is not None and s.count]
        self.scale = sum(w * n for w, n in known) / total if total else None

    def is_exact(self, tolerance: float) -> bool:
        """Whether each item counts once."""
        return all(w is None or abs(w - 1) <= tolerance for w in self.weights)

    def is_even(self, tolerance: float) -> bool:
        """Whether all items count the same."""
        known = [w for w in self.weights if w is not None]
        return not known or max(known) - min(known) <= tolerance * max(map(abs, known))


@dataclass(kw_only=True)
class Weighed:
    """One window with the weights of its terms."""

    windows: list[Window]  # of all ranks
    terms: list[TermWeights] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    is_single: bool = False  # one backward on one rank: nothing is accumulated
    is_by_place: bool = False  # whether backwards from several lines were taken for the parts of one loss

    @property
    def tolerance(self) -> float:
        """Two micro-batches that differ by less count the same."""
        is_measured = any(share.factor != 1 for term in self.terms for share in term.shares)
        return max(TOLERANCE, 2 * max(w.rounding for w in self.windows) if is_measured else 0.0)


def weigh(windows: Sequence[Sequence[Window]], factors: Sequence[Sequence[Sequence[float | None]]]) -> list[Weighed]:
    """Weigh all windows of one optimizer: for each, one record per rank, and the factors of its micro-batches."""
    world = max((len(ranks) for ranks in windows), default=1)
    together = [_shares(ranks, of_ranks, by_place=False) for ranks, of_ranks in zip(windows, factors, strict=True)]
    first = _weighed(windows, together, world)
    if all(_is_exact(one) for one in first):
        return first
    by_place = [_shares(ranks, of_ranks, by_place=True) for ranks, of_ranks in zip(windows, factors, strict=True)]
    is_again = any(micro.is_again for ranks in windows for window in ranks for micro in window.micros)
    if is_again or not _are_several_losses(by_place):
        return first
    second = _weighed(windows, by_place, world)
    is_each_single = all(len(term.shares) == len(one.windows) for one in second for term in one.terms)
    is_divided = any(
        abs(divisor - sum(len(term.shares) for term in one.terms)) < 0.5
        for one in second
        for term in one.terms
        for share in term.shares
        for divisor in share.divisors
    )
    if is_each_single and (is_divided or not all(_is_exact(one) for one in second)):
        return first
    for one in second:
        one.is_by_place = True
    return second


def _is_exact(one: Weighed) -> bool:
    return not one.unknown and all(term.is_exact(one.tolerance) for term in one.terms)


def _are_several_losses(windows: list[dict[Key, list[Share]]]) -> bool:
    """Whether each window has as many backwards from each line: the parts of one loss, one after the other.

    A loop that runs its last backward in another line, outside of `no_sync`, has not.
    """
    for shares in windows:
        counts: dict[tuple[int, str], list[int]] = defaultdict(list)
        for (_, index, node), found in shares.items():
            counts[index, node].append(len(found))
        if any(len(set(found)) > 1 for found in counts.values()):
            return False
    return any(len({place for place, _, _ in shares}) > 1 for shares in windows)


def _shares(
    ranks: Sequence[Window], factors: Sequence[Sequence[float | None]], *, by_place: bool
) -> dict[Key, list[Share]]:
    """The terms of all micro-batches of a window, by what they are a term of."""
    found: dict[Key, list[Share]] = defaultdict(list)
    for rank, (window, of_rank) in enumerate(zip(ranks, factors, strict=True)):
        cleared: list[tuple[Micro, float | None]] = [(micro, 0.0) for micro in window.left_out]
        for micro, factor in [*cleared, *zip(window.micros, of_rank, strict=True)]:
            for index, term in enumerate(micro.terms):
                key = (f"{micro.place} {micro.caller} {micro.reach}" if by_place else "", index, term.node)
                found[key].append(_share(term, rank, micro.place, math.nan if factor is None else factor))
    return found


def _share(term: Term, rank: int, place: str, factor: float) -> Share:
    is_counted = not term.is_regulariser
    return Share(
        rank=rank,
        place=place,
        kind=term.kind if is_counted else "mean",
        count=term.count if is_counted else 1.0,
        multiplier=term.multiplier,
        written=term.written,
        factor=factor,
        divisors=term.divisors,
    )


# ---------------------------------------------------------------------------------------------- what is unknown


def _weighed(
    windows: Sequence[Sequence[Window]], shares: Sequence[dict[Key, list[Share]]], world: int
) -> list[Weighed]:
    names = _names(list(dict.fromkeys(key for found in shares for key in found)))
    found = []
    for ranks, of_keys in zip(windows, shares, strict=True):
        counts = [len(window.micros) + len(window.left_out) for window in ranks]
        one = Weighed(windows=list(ranks), unknown=_unknown(ranks))
        one.terms = [TermWeights(name=names[key], shares=of_keys[key]) for key in of_keys]
        one.is_single = counts == [1] and world == 1
        if not one.is_single:
            one.unknown += [said for term in one.terms if (said := _unknown_term(term)) is not None]
            one.terms = [term for term in one.terms if _unknown_term(term) is None]
        found.append(one)
    if found and all(one.is_single for one in found):
        for one in found:
            _weigh_single(one)
        return found
    for one in found:
        is_unread = any(micro.unknown for window in one.windows for micro in (*window.micros, *window.left_out))
        if is_unread or any(math.isnan(share.factor) for term in one.terms for share in term.shares):
            one.terms = []  # the number of its items is not known
    _choose_own(found, world)
    return found


def _unknown(ranks: Sequence[Window]) -> list[str]:
    """What was not seen of a window."""
    is_single = len(ranks) == 1 and len(ranks[0].micros) == 1 and not ranks[0].left_out
    found = [problem for window in ranks for problem in window.problems]
    for window in ranks:
        for micro in window.micros:
            if micro.unknown is not None and not is_single:
                found.append(f"the loss at {micro.place} ends in {micro.unknown}")
            if micro.factor is None and not window.problems:
                found.append(f"what became of the gradient from {micro.place} is not known")
    return list(dict.fromkeys(found))


def _unknown_term(term: TermWeights) -> str | None:
    """Why the weights of a term cannot be known."""
    parts = {share.part for share in term.shares}
    each = f"{parts.pop():.6g}" if len(parts) == 1 else "different factors"
    if any(share.kind == "unknown" for share in term.shares):
        return (
            f"a term of the loss ends in {term.name}, which is not understood; it is multiplied by {each} in each of "
            f"{len(term.shares)} micro-batches"
        )
    if any(share.count is None for share in term.shares):
        return (
            f"{term.name} does not state how many items it has: it is divided by a number that only the program knows"
        )
    return None


def _weigh_single(one: Weighed) -> None:
    """A step after one backward of one process: its loss is that of the whole batch, whatever it is."""
    for term in one.terms:
        term.weights, term.scale = [1.0] * len(term.shares), 1.0
        share = term.shares[0]
        term.own = share.part if share.part else 1.0


def _names(keys: list[Key]) -> dict[Key, str]:
    """A name for each term, after the function that made its node."""
    plain = {key: _SHORT.get(key[2], key[2]) for key in keys}
    repeated = {name for name in plain.values() if list(plain.values()).count(name) > 1}
    numbers: dict[str, Iterator[int]] = {name: itertools.count(1) for name in repeated}
    return {key: f"{name} {next(numbers[name])}" if name in repeated else name for key, name in plain.items()}


_SHORT = {
    "NllLossBackward0": "cross_entropy",
    "NllLoss2DBackward0": "cross_entropy",
    "MseLossBackward0": "mse_loss",
    "HuberLossBackward0": "huber_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "MeanBackward0": "mean",
    "MeanBackward1": "mean",
    "SumBackward0": "sum",
    "SumBackward1": "sum",
}


# ---------------------------------------------------------------------------------------------- constants of the loss


def _choose_own(windows: list[Weighed], world: int) -> None:
    """Find the constant factors that belong to the loss, and weigh all terms without them."""
    series: dict[str, list[TermWeights]] = defaultdict(list)
    for one in windows:
        for term in one.terms:
            series[term.name].append(term)
    tolerance = max((one.tolerance for one in windows), default=TOLERANCE)
    common = {name: _constant([share for t in terms for share in t.shares]) for name, terms in series.items()}
    for name, terms in series.items():
        own = common[name]
        counts = {max(term.micro_batches for term in terms)}
        of_features = _items_of_each(terms, counts)
        references = [other for key, other in common.items() if key != name and other]
        for candidate in (*_candidates(terms, own, references, counts, world), *of_features):
            _set_own(terms, candidate)
            if all(term.is_exact(tolerance) for term in terms):
                break
        else:
            _set_own(terms, of_features[0] if of_features else _default(own, references, counts, world))
            if own is None and (changing := _own_by_window(series, terms, world)) is not None:
                for term, constant in zip(terms, changing, strict=True):
                    _set_own([term], constant)


def _items_of_each(terms: list[TermWeights], counts: set[int]) -> list[float]:
    """How many items each sample has, if a sum over all of them is divided by samples, and by the micro-batches.

    That is a constant of the loss: the sum over features of a mean over samples. The list has this number, or is empty.
    """
    shares = [share for term in terms for share in term.shares]
    if not all(share.kind == "sum" and counts & set(share.divisors) for share in shares):
        return []
    _set_own(terms, 1.0)
    number = _common([term.scale or math.nan for term in terms if term.micro_batches in counts])
    is_number = number is not None and number >= 2 and math.isclose(number, round(number), rel_tol=1e-5)
    return [float(round(number))] if number is not None and is_number else []


def _own_by_window(series: dict[str, list[TermWeights]], terms: list[TermWeights], world: int) -> list[float] | None:
    """The constants of a term that change from window to window, as that of a penalty that grows; None if none do."""
    found = []
    for term in terms:
        own = _constant(term.shares)
        if own is None or _is_made_of(abs(own), {term.micro_batches}, world):
            return None
        found.append(own)
    return found if len(series) > 1 else None


def _set_own(terms: list[TermWeights], own: float) -> None:
    for term in terms:
        term.own = own
        term.weigh()


def _candidates(
    terms: list[TermWeights], own: float | None, references: list[float], counts: set[int], world: int
) -> Iterator[float]:
    """What may be a constant of the loss; each is tried in turn."""
    yield 1.0
    divisors = [1.0]
    for divisor in dict.fromkeys(terms[0].shares[0].divisors):
        is_everywhere = all(divisor in share.divisors for term in terms for share in term.shares)
        if is_everywhere and not _is_made_of(divisor, counts, world):
            divisors.append(divisor)
    for divisor in divisors[1:]:
        yield 1 / divisor
    if own is None:
        return
    # 0.5 * loss / 2 in two micro-batches: it is divided by their number, so the other factor belongs to the loss.
    shares = [share for term in terms for share in term.shares]
    written = _common([share.written for share in shares])
    if written is not None and abs(written) < 1 and all(counts & set(share.divisors) for share in shares):
        yield written
    for divisor in divisors:
        yield math.copysign(1.0, own) / divisor
        if not _is_made_of(abs(own), counts, world):
            yield own / divisor
        for reference in references:
            yield own / reference / divisor


def _default(own: float | None, references: list[float], counts: set[int], world: int) -> float:
    """The constant to assume if no candidate makes the program right."""
    if own is None:
        return 1.0
    if not _is_made_of(abs(own), counts, world):
        return own
    if references and not math.isclose(abs(own), abs(references[0]), rel_tol=1e-6):
        return own / references[0]
    return math.copysign(1.0, own)


def _constant(shares: list[Share]) -> float | None:
    """The constant that multiplies a term everywhere, without the loss scale of float16, which is undone later."""
    written = _common([share.multiplier for share in shares])
    if written is None or abs(written) >= LOSS_SCALE:
        return _common([share.multiplier * share.factor for share in shares])
    return written


def _common(numbers: list[float]) -> float | None:
    """The number, if all are the same up to rounding."""
    first = numbers[0] if numbers else math.nan
    if not math.isfinite(first) or first == 0:
        return None
    return first if all(math.isclose(number, first, rel_tol=1e-5) for number in numbers) else None


def _is_made_of(number: float, counts: set[int], world: int) -> bool:
    """Whether a factor comes from accumulating: a product of powers of the micro-batches of a window, and of ranks."""
    for count in counts:
        for a, b in itertools.product(range(-2, 3), repeat=2):
            if math.isclose(number, float(count) ** a * float(world) ** b, rel_tol=1e-5):
                return True
    return False
