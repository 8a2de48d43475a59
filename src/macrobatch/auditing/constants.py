"""The constant factors that belong to a loss (``0.01 * penalty``), told from those that come from accumulating.

A factor belongs to the loss if it is the same everywhere, and is not made of the number of micro-batches and ranks.
Where a factor may be either, this is said, and the verdict is "unknown".
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from macrobatch.auditing.weights import TOLERANCE, Share, TermWeights, Weighed


def choose_constants(windows: list[Weighed], world: int) -> None:
    """Find the constant factors that belong to the loss, and weigh all terms without them."""
    _join_drawn(windows)
    series: dict[str, list[TermWeights]] = defaultdict(list)
    for one in windows:
        for term in one.terms:
            series[term.name].append(term)
    tolerance = max((one.tolerance for one in windows), default=TOLERANCE)
    common = {name: _common([s.constant for t in terms for s in t.shares]) for name, terms in series.items()}
    for name, terms in series.items():
        own = common[name]
        counts = {max(term.micro_batches for term in terms)}
        references = [other for key, other in common.items() if key != name and other]
        if any(_fits(terms, one, tolerance) for one in _candidates(terms, own, references, counts, world)):
            continue
        if own is None and (separate := _separate(terms)) is not None and not _is_made_of(abs(separate), {1}, world):
            if _is_made_of(abs(separate), counts, world):
                said = (
                    "is multiplied by {:.6g} besides the weights of micro-batches: a constant of the loss, or a mistake"
                )
                windows[0].unknown.append(f"{name} {said.format(separate)}")
            _set_own(terms, separate)
            continue
        doubt = next((said for one, said in _doubtful(terms, counts, world) if _fits(terms, one, tolerance)), None)
        if doubt is not None or _are_plain_sums(terms, world):
            windows[0].unknown.append(f"{name} {doubt or 'is a sum that nothing divides'}")
            continue
        _set_own(terms, _default(terms, own, references, counts, world))
        if own is None and (changing := _own_by_window(series, terms, world)) is not None:
            for term, constant in zip(terms, changing, strict=True):
                _set_own([term], constant)


def _fits(terms: list[TermWeights], own: float, tolerance: float) -> bool:
    """Whether each item counts once if this constant belongs to the loss. The terms are weighed with it."""
    _set_own(terms, own)
    return all(term.is_exact(tolerance) for term in terms)


def _set_own(terms: list[TermWeights], own: float) -> None:
    for term in terms:
        term.own = own
        term.weigh()


def _shares(terms: list[TermWeights]) -> list[Share]:
    return [share for term in terms for share in term.shares]


def _candidates(
    terms: list[TermWeights], own: float | None, references: list[float], counts: set[int], world: int
) -> Iterator[float]:
    """What belongs to the loss for sure if each item counts once with it; each is tried in turn."""
    yield 1.0
    shares = _shares(terms)
    everywhere = [one for one in dict.fromkeys(shares[0].divisors) if all(one in share.divisors for share in shares)]
    divisors = [1.0, *(divisor for divisor in everywhere if not _is_made_of(divisor, counts, world))]
    for divisor in divisors[1:]:
        yield 1 / divisor
    if own is None:
        return
    if (features := _features(shares)) is not None:
        yield features * own
        yield features
    if (written := _beside_division(shares, counts)) is not None:
        yield written
    for divisor in divisors:
        yield math.copysign(1.0, own) / divisor
        if not _is_made_of(abs(own), counts, world):
            yield own / divisor
        for reference in references if abs(own) != 1 else []:  # without a constant, it is not divided either
            yield own / reference / divisor


def _separate(terms: list[TermWeights]) -> float | None:
    """The constant of a loss in micro-batches that are weighed, as by their items; None if it is no such factor.

    Of ``0.5 * loss * n / items`` it is 0.5: what is left of the factors of each micro-batch without those that differ.
    """
    _set_own(terms, 1.0)
    own = _common([term.scale or math.nan for term in terms])
    if own is None or not all(term.is_even(TOLERANCE) for term in terms):
        return None
    return own if all(_is_product(share.written / own, share.constants) for share in _shares(terms)) else None


def _join_drawn(windows: list[Weighed]) -> None:
    """Join terms over the same items whose factors differ between micro-batches, and add up to the same in each.

    So are those of ``share * loss(a) + (1 - share) * loss(b)``, with a share that is drawn in each micro-batch.
    """
    kinds: dict[tuple[object, ...], list[list[TermWeights]]] = defaultdict(list)
    for name in dict.fromkeys(term.name for one in windows for term in one.terms):
        terms = [term for one in windows for term in one.terms if term.name == name]
        if _common([share.constant for share in _shares(terms)]) is None:
            key = [(s.rank, s.place, s.kind, s.count, s.divisors, s.factor) for s in _shares(terms)]
            kinds[len(terms), *key].append(terms)
    for series in kinds.values():
        if len(series) < 2:
            continue
        name = " and ".join(terms[0].name for terms in series)
        joined = [
            TermWeights(name=name, shares=[_sum_of(shares) for shares in zip(*(t.shares for t in terms), strict=True)])
            for terms in zip(*series, strict=True)
        ]
        if _common([share.constant for share in _shares(joined)]) is None and not _fits(joined, 1.0, TOLERANCE):
            continue
        gone = {id(terms[window]): joined[window] for terms in series for window in range(len(joined))}
        for one in windows:
            one.terms = list({id(new): new for term in one.terms for new in [gone.get(id(term), term)]}.values())


def _sum_of(shares: Iterable[Share]) -> Share:
    first, *rest = shares
    return replace(
        first,
        multiplier=math.fsum([first.multiplier, *(share.multiplier for share in rest)]),
        written=math.fsum([first.written, *(share.written for share in rest)]),
    )


def _features(shares: list[Share]) -> float | None:
    """The elements of each sample, if a sum over all elements is divided by the size of its first dimension."""
    if all(share.kind == "sum" and share.count and share.samples in share.divisors for share in shares):
        return _common([(share.count or 0) / (share.samples or 1) for share in shares])
    return None


def _beside_division(shares: list[Share], counts: set[int]) -> float | None:
    """The constant of a loss besides the division by micro-batches, or besides a loss scale that is undone later.

    Of ``0.5 * loss / 2`` and ``0.5 * loss * (1 / 4)`` it is 0.5; of ``0.5 * loss * (1 / 2)`` it is not known.
    """
    written = _common([share.written for share in shares])
    factor = _common([share.factor for share in shares])
    if written is None:
        return None
    if abs(written) < 1 and all(counts & set(share.divisors) for share in shares):
        return written
    for number in (*counts, *([1 / factor] if factor and abs(factor) < 1 else [])):
        inverse = 1 / number if number in counts else number
        if number != 1 and all(_has_once(share, inverse) for share in shares):
            return written / inverse
    return None


def _has_once(share: Share, number: float) -> bool:
    """Whether the constants of a term have this number among them, once. Those of other terms are not counted."""
    others = [one for one in share.constants if not math.isclose(abs(one), number, rel_tol=1e-5)]
    return len(others) < len(share.constants) and _is_product(share.written / number, others)


def _is_product(number: float, constants: Sequence[float]) -> bool:
    """Whether a number is a product of some of these constants, up to its sign."""
    found = [abs(one) for one in constants]
    subsets = (itertools.combinations(found, size) for size in range(min(len(found), 6) + 1))
    return any(
        math.isclose(math.prod(subset), abs(number), rel_tol=1e-5) for subset in itertools.chain.from_iterable(subsets)
    )


def _doubtful(terms: list[TermWeights], counts: set[int], world: int) -> Iterator[tuple[float, str]]:
    """What may belong to the loss, or be the mistake, with a sentence that says so."""
    shares = _shares(terms)
    written = _common([share.written for share in shares])
    factor = _common([share.factor for share in shares])
    if written is not None and abs(written) != 1 and _is_made_of(abs(written), counts, world):
        for number in (1, *counts, world, *(count * world for count in counts)):
            said = f"is multiplied by {written:.6g}: whether {written * number:.6g} belongs to the loss cannot be told"
            yield written * number, said
    is_by_hand = factor is not None and not _is_made_of(abs(factor), counts, world)
    if written is not None and factor is not None and is_by_hand and abs(factor) < 1 < abs(written):
        said = f"is multiplied by {written:.6g}, and gradients by {factor:.6g} later: a loss scale, or a mistake"
        yield written * factor, said
    if all(2.0 in share.divisors for share in shares):
        yield 0.5, "is divided by 2: whether that belongs to the loss cannot be told"
    if all(share.kind == "sum" and share.samples is None and counts & set(share.divisors) for share in shares):
        _set_own(terms, 1.0)
        features = _common([term.scale or math.nan for term in terms if term.micro_batches in counts])
        if features is not None and features > 1:
            yield features, f"is a sum over {features:.6g} times what divides it: features of each item, or a mistake"


def _are_plain_sums(terms: list[TermWeights], world: int) -> bool:
    """Whether the loss of a window is a sum over its items: that of a bound or of returns, or a mean not divided."""
    shares = _shares(terms)
    is_sum = all(share.kind == "sum" and not share.divisors for share in shares)
    if not is_sum or _common([share.part for share in shares]) is None:
        return False
    if shares[0].factor not in (1.0, 1 / world):
        return False
    for term in terms:
        _set_own([term], term.shares[0].part * term.num_items)
    return True


def _own_by_window(series: dict[str, list[TermWeights]], terms: list[TermWeights], world: int) -> list[float] | None:
    """The constants of a term that change from window to window, as that of a penalty that grows; None if none do."""
    found = []
    for term in terms:
        own = _common([share.constant for share in term.shares]) or _separate([term])
        if own is None or _is_made_of(abs(own), {term.micro_batches}, world):
            return None
        found.append(own)
    return found if len(series) > 1 else None


def _default(
    terms: list[TermWeights], own: float | None, references: list[float], counts: set[int], world: int
) -> float:
    """The constant to assume if none makes the program right."""
    if own is None:
        return 1.0
    if (features := _features(_shares(terms))) is not None:
        return features
    if (written := _beside_division(_shares(terms), counts)) is not None and _is_made_of(abs(written), counts, world):
        return written
    if abs(own) == 1 or not _is_made_of(abs(own), counts, world):
        return own
    if references and not math.isclose(abs(own), abs(references[0]), rel_tol=1e-6):
        return own / references[0]
    return math.copysign(1.0, own)


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
