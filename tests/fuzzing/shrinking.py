"""A failing program as text, made small."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from fuzzing.program import Program


def describe(program: Program) -> str:
    fields = dataclasses.fields(program)
    given = {f.name: getattr(program, f.name) for f in fields if getattr(program, f.name) != f.default}
    return f"{type(program).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 400) -> Program:
    """A smaller program that still fails: fields go back to their defaults, tuples lose their elements."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in reductions(program):
            tries -= 1
            if candidate.valid() == candidate and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def reductions(program: Program) -> Iterator[Program]:
    for f in dataclasses.fields(program):
        value = getattr(program, f.name)
        if value == f.default:
            continue
        if f.name != "epochs":
            yield dataclasses.replace(program, **{f.name: f.default})
        if isinstance(value, tuple) and f.name != "scaler":
            for index in range(len(value)):
                yield from shorter(program, f.name, value, index)


def shorter(program: Program, name: str, value: tuple[Any, ...], index: int) -> Iterator[Program]:
    without = value[:index] + value[index + 1 :]
    if name == "epochs":
        if index == len(value) - 1 and without and all(e != index for e, *_ in (*program.events, *program.empty)):
            yield dataclasses.replace(program, epochs=without)
        last = len(value[index]) - 1
        if last and all((e, i) != (index, last) for e, i, *_ in (*program.events, *program.empty)):
            yield dataclasses.replace(program, epochs=(*value[:index], value[index][:-1], *value[index + 1 :]))
        fewer = tuple(max(1, samples - 1) for samples in value[index])
        if fewer != value[index]:
            yield dataclasses.replace(program, epochs=(*value[:index], fewer, *value[index + 1 :]))
    elif without or name != "steps":
        yield dataclasses.replace(program, **{name: without})
