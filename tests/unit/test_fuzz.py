"""Random programs in one process: each comes to what one big batch in plain torch comes to. `make fuzz` runs many."""

import logging
import warnings

import pytest

from fuzzing import MismatchError, check, describe, draw_program, failure
from fuzzing.several_program import NAMES
from macrobatch import Accumulator, MacroStep

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


class WeighsAlike(Accumulator):
    """Weighs every micro-batch of a term the same."""

    def backward(self, loss, items=None):
        super().backward({name: (mean / (float(n) or 1.0), n) for name, (mean, n) in loss.items()}, items)


class ForgetsATerm(Accumulator):
    """Drops the last of several terms where another one is absent."""

    def backward(self, loss, items=None):
        is_lacking, last = 1 < len(loss) < len(NAMES), list(loss)[-1:]
        super().backward(
            {name: (mean * 0 if is_lacking and name in last else mean, n) for name, (mean, n) in loss.items()}
        )


class Disorders(MacroStep):
    """The loss of the whole batch gets the samples in another order."""

    def __init__(self, *arguments, joint=None, **options):
        def disordered(model, encoded):
            encoded.rows = encoded.rows.flip(0)
            return joint(model, encoded)

        super().__init__(*arguments, joint=joint and disordered, **options)


class CountsTheJointLossTwice(MacroStep):
    def __init__(self, *arguments, joint=None, **options):
        super().__init__(*arguments, joint=joint and (lambda model, encoded: 2 * joint(model, encoded)), **options)


@pytest.mark.parametrize(
    "wrong", [WeighsAlike, ForgetsATerm, Disorders, CountsTheJointLossTwice], ids=lambda wrong: wrong.__name__
)
def test_terms_and_joint_losses_that_are_wrong_are_found_out(wrong, monkeypatch):
    face = Accumulator if issubclass(wrong, Accumulator) else MacroStep
    drivers = ("terms loop",) if face is Accumulator else ("joint",)
    programs = [program for program in map(draw_program, range(800)) if program.driver in drivers]
    with monkeypatch.context() as patch:
        patch.setattr(f"fuzzing.several.{face.__name__}", wrong)
        noticed = next((program for program in programs if failure(program)), None)
    assert noticed is not None
    assert failure(noticed) is None
