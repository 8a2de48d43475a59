"""Compare how the tests of a suite ended on both sides, and say it in a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from peers.known import reason_for

Ends = dict[str, tuple[str, str]]  # of each test: how it ended, and why
PASSED = "passed"


@dataclass
class Comparison:
    """What came of a suite.

    Attributes:
        stock, ours: how many tests ended how.
        known: the reasons of the tests that pass with their class only, by design.
        unknown: how the other tests that pass with their class only ended with ours.
        only_ours: the tests that pass with our class only.
    """

    stock: dict[str, int]
    ours: dict[str, int]
    known: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    only_ours: list[str] = field(default_factory=list)


def differing(stock: Ends, ours: Ends) -> list[str]:
    """The tests that pass with their class and not with ours."""
    return [test for test in stock if stock[test][0] == PASSED and _end(ours, test)[0] != PASSED]


def compare(suite: str, stock: Ends, ours: Ends) -> Comparison:
    """Compare both sides of a suite, test by test."""
    made = Comparison(_counts(stock), _counts(ours))
    for test in differing(stock, ours):
        reason = reason_for(suite, test)
        if reason is not None:
            made.known[test] = reason
        else:
            end, why = _end(ours, test)
            made.unknown[test] = f"{end}: {why.splitlines()[0] if why else ''}"
    made.only_ours = [test for test in ours if ours[test][0] == PASSED and _end(stock, test)[0] != PASSED]
    return made


def table(comparisons: dict[str, Comparison]) -> str:
    """All suites, a line for each."""
    heading = ("suite", "tests", "pass with theirs", "with ours", "theirs only: known", "unknown", "ours only")
    lines: list[tuple[str, ...]] = [heading]
    for suite, found in comparisons.items():
        numbers = (
            sum(found.stock.values()),
            found.stock.get(PASSED, 0),
            found.ours.get(PASSED, 0),
            len(found.known),
            len(found.unknown),
            len(found.only_ours),
        )
        lines.append((suite, *map(str, numbers)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _end(ends: Ends, test: str) -> tuple[str, str]:
    return ends.get(test, ("not run", "there is no such test on this side"))


def _counts(ends: Ends) -> dict[str, int]:
    return dict(Counter(end for end, _ in ends.values()))
