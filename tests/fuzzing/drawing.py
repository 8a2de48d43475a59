"""The program of a seed: with one loss, or with a loss of several terms or of the whole batch."""

import random

from fuzzing.program import Drawing, Program
from fuzzing.rank_program import draw_plain_on_ranks
from fuzzing.several_program import draw_several, draw_several_on_ranks


def has_several(seed: int) -> bool:
    """Every third seed, about."""
    return random.Random(f"several {seed}").random() < 1 / 3


def draw_program(seed: int) -> Program:
    return draw_several(seed) if has_several(seed) else Drawing(seed).program()


def draw_rank_program(seed: int) -> Program:
    return draw_several_on_ranks(seed) if has_several(seed) else draw_plain_on_ranks(seed)
