"""`verify` on real ranks: the reference is one big batch of all ranks' samples, and every rank gets the same report."""

from collections.abc import Callable

import pytest

from harness.ranks import Outcome, all_well, same_on_all
from judged.on_ranks import RIGHT, WRONG, noisy

FORKS = False  # each rank has its own order of a set of strings, as elsewhere
SCENARIOS: dict[str, Callable[[], Outcome]] = {}


SCENARIOS |= RIGHT | {name: scenario for name, (scenario, _) in WRONG.items()} | {"ddp-noise": noisy}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_found_right(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    assert all(outcome["ok"] for outcome in outcomes), outcomes[0]["text"]
    assert all(outcome["kept"] for outcome in outcomes)
    same_on_all(outcomes, "error")
    assert outcomes[0]["questions"] == outcomes[1]["questions"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_found_and_named(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    assert not any(outcome["ok"] for outcome in outcomes)
    assert all(outcome["causes"][0] == WRONG[name][1] for outcome in outcomes), outcomes[0]["text"]
    assert all(outcome["kept"] for outcome in outcomes)
    assert len({outcome["text"] for outcome in outcomes}) == 1
    assert outcomes[0]["questions"] == outcomes[1]["questions"]


def test_random_numbers_that_cannot_be_repeated(on_two_ranks):
    outcomes = all_well(on_two_ranks["ddp-noise"])
    assert all(outcome["text"].startswith("UNKNOWN") for outcome in outcomes), outcomes[0]["text"]
    assert all(outcome["causes"] == ["random numbers that differ"] for outcome in outcomes)
