"""Random programs in one process: each comes to what one big batch in plain torch comes to. `make fuzz` runs many."""

import logging
import warnings

import pytest
from fuzzing import MismatchError, check, describe, draw_program

SEEDS, PART = 800, 100


@pytest.fixture(autouse=True)
def _quiet():
    """Programs warn on purpose: memory runs out, samples are longer than the budget."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_random_programs(first):
    for seed in range(first, first + PART):
        program = draw_program(seed)
        try:
            check(program)
        except MismatchError as wrong:
            pytest.fail(f"seed {seed}, {wrong}\n{describe(program)}\nA smaller one: make fuzz FIRST={seed} PROGRAMS=1")
