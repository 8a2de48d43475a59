"""Names parameters by their place in the plain model, whatever the model is wrapped in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from macrobatch._torch.modules import CHILD_OF, wrapper_of


class Place(NamedTuple):
    """A parameter with its full name, and its name without the parts of wrappers."""

    full: str
    short: str
    parameter: nn.Parameter


class Names:
    """Maps names to the parameters of a model. Copies of the model have the same names.

    >>> model = nn.Linear(2, 1)
    >>> model.module = nn.Linear(1, 1, bias=False)
    >>> list(Names(model).parameters())
    ['weight', 'bias', 'module.weight']

    Args:
        model: a plain or a sharded model.
        fixed: whether to keep the parameters that the model has now. Sharded models show others during a forward.
    """

    def __init__(self, model: nn.Module, *, fixed: bool = False) -> None:
        self._model = model
        places = list(_places(model))
        unique = len({place.short for place in places}) == len(places)
        self._names = {place.full: place.short if unique else place.full for place in places}
        self._fixed = self.parameters_of(model) if fixed else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the model has now: a module may have replaced some."""
        return self.parameters_of(self._model) if self._fixed is None else self._fixed

    def parameters_of(self, copy: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a copy of the model."""
        return {self._names[place.full]: place.parameter for place in _places(copy) if place.full in self._names}

    def unknown_names(self) -> list[str]:
        """The names of parameters that were added to the model later."""
        return [place.full for place in _places(self._model) if place.full not in self._names]


def _places(model: nn.Module) -> Iterator[Place]:
    """Every parameter once, in the order of `named_parameters`."""
    seen: set[int] = set()
    pending = [("", "", model)]
    while pending:
        full, short, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Place(full + name, short + name, parameter)
        wrapper = wrapper_of(module)
        wrapped = None if wrapper is None else CHILD_OF[wrapper]
        children = [
            (f"{full}{name}.", short if name == wrapped else f"{short}{name}.", child)
            for name, child in module.named_children()
        ]
        pending += reversed(children)
