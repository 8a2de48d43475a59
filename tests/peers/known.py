"""Tests of the peers that pass with their class and not with ours, by design, each with its reason.

A key is a pattern, as of `fnmatch`, for the names of tests ("[" stands for itself).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

KNOWN: dict[str, dict[str, str]] = {
    "transformers": {},
    "trl": {},
    "accelerate": {},
    "lightning": {},
}


def reason_for(suite: str, test: str) -> str | None:
    """Why this test differs; None if that is not known."""
    patterns = KNOWN[suite]
    return next((patterns[one] for one in patterns if fnmatchcase(test, one.replace("[", "[[]"))), None)
