"""Mistakes with several terms of a loss: one of them is divided by something else than its own items.

Each mistake is a hypothesis: the gradient that it gives for the step's own micro-batches if the other terms are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from macrobatch.verification.bigbatch import Weighted
from macrobatch.verification.catalogue import number_list
from macrobatch.verification.comparison import Case, Comparison, Hypothesis

OWN_ITEMS = "Give each term its own items: {name: (loss, items)}, with counts= of MacroStep or Accumulator."
ONCE = (
    "DDP and FSDP divide by the number of ranks. Multiply each term by it where you divide by the items of all ranks, "
    "and nowhere else."
)


class Mistake(NamedTuple):
    """A wrong way to weight a term: its weight in each micro-batch of this rank."""

    cause: str
    weights: list[float]
    evidence: str
    cure: str = OWN_ITEMS


def term_hypotheses(case: Case, window: Comparison, parts: Sequence[Sequence[int]]) -> Iterator[Hypothesis]:
    """The hypotheses that one term, or all but the first, are weighted wrongly."""
    if len(case.big.terms) < 2:
        return
    right = case.shares(parts)
    mistakes = {name: list(_mistakes(case, window, parts, name)) for name in case.big.terms}
    together = [list(each) for each in zip(*list(mistakes.values())[1:], strict=True)] if len(mistakes) > 2 else []
    for wrong in [[(name, mistake)] for name in mistakes for mistake in mistakes[name]] + [
        list(zip(case.big.terms[1:], each, strict=True)) for each in together
    ]:
        weights = [dict(share) for share in right]
        for name, mistake in wrong:
            for share, weight in zip(weights, mistake.weights, strict=True):
                share[name] = weight
        gradient = case.big.gradient([Weighted(part, w) for part, w in zip(parts, weights, strict=True)])
        name, mistake = wrong[0]
        names = " and ".join(repr(name) for name, _ in wrong)
        evidence = f"the term {names} {mistake.evidence}; " + (
            "the others are" if len(mistakes) > 2 else "the other is"
        )
        yield Hypothesis(
            mistake.cause,
            gradient.only(window.observed.names),
            f"{evidence} right.",
            mistake.cure,
            allows_factor=False,
        )


def _mistakes(case: Case, window: Comparison, parts: Sequence[Sequence[int]], name: str) -> Iterator[Mistake]:
    """The known mistakes with a term; equally many, in the same order, for every term and on every rank."""
    items, ranks = case.big.items_of_terms(parts), case.big.ranks
    totals = {term: ranks.sum(sum(own[term] for own in items)) or 1.0 for term in case.big.terms}
    count, own = ranks.sum(len(parts)), [each[name] for each in items]
    if window.micro_batches > 1:
        steps = count / ranks.world_size
        yield Mistake(
            "term not divided",
            [1 / ranks.world_size] * len(parts),
            f"is added to the loss of each micro-batch without a division, so that it counts {steps:g} times",
            f"Divide it as the rest of the loss: by the number of micro-batches, if they are equal. {OWN_ITEMS}",
        )
        yield Mistake(
            "term divided by the micro-batch's own count",
            [1 / count] * len(parts),
            f"is a mean of the micro-batches' means, but they have different numbers of its items: {number_list(own)}",
        )
    for other in case.big.terms:
        if other == name:
            continue
        others = [each[other] for each in items]
        yield Mistake(
            "one count for two terms",
            [n / totals[other] for n in own],
            f"is divided by the {totals[other]:g} items of {other!r} instead of its own {totals[name]:g}",
        )
        yield Mistake(
            "one count for two terms",
            [n / totals[other] for n in others],
            f"is weighted by the items of {other!r}, {number_list(others)}, instead of its own, {number_list(own)}",
        )
    if ranks.world_size > 1:
        for factor, how in ((1 / ranks.world_size, "divided"), (ranks.world_size, "multiplied")):
            yield Mistake(
                "term and world size",
                [factor * n / totals[name] for n in own],
                f"is {how} by the number of ranks, {ranks.world_size}, once too often",
                ONCE,
            )
