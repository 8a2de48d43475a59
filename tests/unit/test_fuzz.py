"""Random programs in one process: each comes to what one big batch in plain torch comes to. `make fuzz` runs many."""

import logging
import warnings

import pytest

from fuzzing import MismatchError, check, describe, draw_program, failure
from macrobatch import Accumulator

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


# --------------------------------------------------------------------------------------- the programs notice mistakes


class Miscounts(Accumulator):
    def backward(self, loss, items=None):
        super().backward(loss, items + 1 if isinstance(items, int) and items > 0 else items)


class NeverDiscards(Accumulator):
    def discard(self):
        pass


class ForgetsSchedule(Accumulator):
    def __init__(self, *arguments, scheduler=None, **options):
        super().__init__(*arguments, **options)


@pytest.mark.parametrize("wrong", [Miscounts, NeverDiscards, ForgetsSchedule], ids=lambda wrong: wrong.__name__)
def test_a_library_that_is_wrong_is_found_out(wrong, monkeypatch):
    loops = [program for program in map(draw_program, range(400)) if program.driver in ("loop", "micro")]
    with monkeypatch.context() as patch:
        patch.setattr("fuzzing.loop.Accumulator", wrong)
        noticed = next((program for program in loops if failure(program)), None)
    assert noticed is not None
    assert failure(noticed) is None
