"""Exceptions at any line and any torch operation: the window stays as it was, or an error asks for discard().

`MACROBATCH_FAULTS=all` plants them at every place, not once for each line; so does `python -m harness.faults`.
"""

import copy
import dataclasses
import os

import pytest
import torch
from torch import nn

from harness.faults import LOOPS, PLANTERS, ROOMS, WHOLES, check, noted_calls
from macrobatch import Accumulator, MacroStep
from macrobatch.errors import UsageError

EVERY = os.environ.get("MACROBATCH_FAULTS") == "all"


@pytest.mark.timeout(1800 if EVERY else 300)
@pytest.mark.parametrize("kind", PLANTERS)
@pytest.mark.parametrize("name", [*LOOPS, *WHOLES])
def test_an_exception_at_any_place(name, kind):
    count, failures = check(name, kind, every=EVERY)
    assert not failures, f"{len(failures)} of {count} planted exceptions:\n" + "\n".join(map(str, failures))


@pytest.mark.timeout(1800 if EVERY else 300)
@pytest.mark.skipif(not EVERY, reason="MACROBATCH_FAULTS=all")
@pytest.mark.parametrize("kind", PLANTERS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_discard_after_an_exception_at_any_place(name, kind):
    count, failures = check(name, kind, every=True, recovery="discard")
    assert not failures, f"{len(failures)} of {count} planted exceptions:\n" + "\n".join(map(str, failures))


# ---------------------------------------------------------------------------------------------- the harness finds bugs


@pytest.mark.parametrize("name", [*LOOPS, *WHOLES])
def test_places_are_found_in_every_call(name):
    calls = noted_calls(name, "line")
    names = {"next", "backward", "step"} if name in LOOPS else {"train"}
    assert {call.name for call in calls} == names
    assert all(any(place.startswith(tuple(ROOMS)) for place in call.places) for call in calls)


class CountsTwice(Accumulator):
    """Counts the items of a micro-batch whose backward has failed."""

    def backward(self, loss, items=None):
        try:
            super().backward(loss, items)
        except BaseException:
            self.more = items
            raise

    def step(self, now=False):
        result = super().step(now)
        more = getattr(self, "more", 0)
        return result and dataclasses.replace(result, items=result.items + more)


class NeverDiscards(Accumulator):
    def discard(self):
        pass


class Asserts(Accumulator):
    """Fails with an error of its own where a step comes again."""

    def step(self, now=False):
        try:
            return super().step(now)
        except UsageError:
            raise AssertionError from None


@pytest.mark.parametrize("wrong", [CountsTwice, NeverDiscards, Asserts], ids=lambda wrong: wrong.__name__)
def test_a_library_that_is_wrong_is_found_out(wrong, monkeypatch):
    _, without = check("mean, items as ints", "operation")
    monkeypatch.setattr("harness.faults.Accumulator", wrong)
    _, failures = check("mean, items as ints", "operation")
    assert len(failures) > len(without)


# ------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=lambda copied: copied.__name__)
@pytest.mark.parametrize("face", ["Accumulator", "MacroStep"])
def test_copies_are_refused(face, copied):
    """A copy would share the engine, its window and its hooks with the original."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = (
        Accumulator(model, optimizer)
        if face == "Accumulator"
        else MacroStep(model, optimizer, lambda model, x: model(x).mean(), micro=2)
    )
    with pytest.raises(UsageError, match="cannot be copied"):
        copied(made)
