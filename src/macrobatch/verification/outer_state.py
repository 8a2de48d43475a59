"""Finds the tensors outside of the model that a loss or a step uses: other models, a running centre."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

MOST_OBJECTS = 1_000


def tensors_held_by(functions: Iterable[object]) -> Iterator[Tensor]:
    """The tensors in closures, defaults, arguments and global names of functions, and in functions and modules there.

    >>> target = nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     return (model(batch) - target(batch)).square().mean()
    >>> [tuple(tensor.shape) for tensor in tensors_held_by([loss_fn])]
    [(1, 2), (1,)]
    """
    pending: list[object] = list(functions)
    seen: set[int] = set()
    while pending and len(seen) < MOST_OBJECTS:
        held = pending.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            yield held
        elif isinstance(held, nn.Module):
            yield from (*held.parameters(), *held.buffers())
        else:
            pending += _parts_of(held)


def _parts_of(held: Any) -> list[object]:
    if isinstance(held, functools.partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, MethodType):
        return [held.__func__, held.__self__]
    if isinstance(held, dict | list | tuple) and len(held) < 100:
        return list(held.values()) if isinstance(held, dict) else list(held)
    if not isinstance(held, FunctionType):
        return []
    cells = [cell.cell_contents for cell in held.__closure__ or () if _is_filled(cell)]
    named = [held.__globals__[name] for name in held.__code__.co_names if name in held.__globals__]
    return [*cells, *named, *(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False
