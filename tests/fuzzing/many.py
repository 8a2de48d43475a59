"""Many random programs, one after the other, in a process that may be one of several."""

import logging
import warnings
from collections import Counter
from typing import Any

import torch

from fuzzing import MismatchError, Program, describe, draw_program, failure, shrink

SHRUNK = 20  # failures that are made smaller; a fault that hits every other program would take hours

Failed = dict[str, Any]


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # memory runs out often here
    torch.set_num_threads(1)


def in_one_process(seeds: range) -> tuple[Counter[str], list[Failed]]:
    counts: Counter[str] = Counter()
    failures: list[Failed] = []
    for seed in seeds:
        program = draw_program(seed)
        count(counts, program)
        wrong = failure(program)
        if wrong is not None:
            small = smaller(program, wrong) if len(failures) < SHRUNK else program
            failures.append({"seed": seed, "wrong": str(wrong), "program": describe(small)})
    return counts, failures


def count(counts: Counter[str], program: Program) -> None:
    counts[program.driver] += 1
    counts.update({f"with {what!r}" for *_, what in program.events})


def smaller(program: Program, wrong: MismatchError) -> Program:
    """One that fails in the same way."""
    words = wrong.what.split()[:4]

    def fails(candidate: Program) -> bool:
        found = failure(candidate)
        return found is not None and found.kind == wrong.kind and found.what.split()[:4] == words

    return shrink(program, fails)
