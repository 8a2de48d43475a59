"""The scenarios of a file of tests, run once on two ranks, and once on four."""

import pytest

from harness.ranks import Outcome, run


@pytest.fixture(scope="module")
def on_two_ranks(request, tmp_path_factory) -> dict[str, list[Outcome]]:
    """By scenario, what each of two ranks returned. A file that says FORKS = False has ranks that share no start-up."""
    forks = getattr(request.module, "FORKS", True)
    return run(request.module.__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("two"), forks=forks)


@pytest.fixture(scope="module")
def on_four_ranks(request, tmp_path_factory) -> dict[str, list[Outcome]]:
    return run(request.module.__name__, "SCENARIOS_ON_FOUR", 4, tmp_path_factory.mktemp("four"))


@pytest.fixture
def on_ranks(request, mode) -> dict[str, list[Outcome]]:
    """On as many ranks as a mode needs."""
    return request.getfixturevalue("on_four_ranks" if mode in request.module.ON_FOUR else "on_two_ranks")
