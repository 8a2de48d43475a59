"""Some values of many tensors, to notice that they have changed: on their device, and without a read of the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.tensors import (
    ADDRESS_OF,
    DATA_OF,
    flat,
    has_dense_memory,
    is_observed,
    number_on_host,
    unobserved,
)

Kind = tuple[torch.device, torch.dtype]
MOST = 4096  # values of one tensor that are compared; all of them, if there are no more
MOST_IN_ALL = 2**20


class Change(NamedTuple):
    """The values of some tensors of one device and dtype, which may have changed."""

    holds: Tensor  # whether they have
    group: Group
    before: Tensor | None
    now: Tensor

    def first(self) -> int:
        """The place of the first tensor that has changed. The host waits for it."""
        if self.before is None or len(self.before) != len(self.now):
            return self.group.places[0]
        ends = torch.tensor(self.group.sizes).cumsum(0)
        changed = int(_differ(self.before, self.now).int().argmax())
        return self.group.places[int((ends <= changed).sum())]


class Values:
    """Some values of tensors: all of small ones, every n-th of large ones.

    They show every kind of write: in place, to ``.data``, and ``.data`` that was replaced. Version counters and
    addresses do not, and also change where values stay: weights are swapped out and back, or moved.

    >>> weights, values = [torch.ones(3), torch.ones(2)], Values()
    >>> values.keep(weights)
    >>> weights[1].data.mul_(2)
    tensor([2., 2.])
    >>> [change.first() for change in values.changed(weights)]
    [1]
    """

    def __init__(self) -> None:
        self._groups: dict[Kind, Group] = {}
        self._kept: dict[Kind, Tensor] = {}
        self._addresses: list[int] = []
        self._tensors: Sequence[Tensor] = ()
        self._has_parts = False  # whether some of them are parts of what several ranks hold

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values, to compare later ones with them."""
        if tensors is not self._tensors:
            self._tensors, self._has_parts = tensors, any(isinstance(tensor, DTensor) for tensor in tensors)
        parts = list(map(DATA_OF, tensors))  # without graphs
        if self._has_parts:
            parts = list(map(local_tensor, parts))
        with unobserved():  # an address is no result of a device
            addresses = list(map(ADDRESS_OF, parts))
        if addresses != self._addresses:  # otherwise nothing was moved or converted
            self._addresses, self._groups = addresses, _grouped(parts)
        self._kept = {}
        for kind, group in self._groups.items():
            values = group.values(parts)
            self._kept[kind] = values.clone() if len(group.places) == 1 else values  # then it is a view

    def changed(self, tensors: Sequence[Tensor]) -> list[Change]:
        """What may have changed since `keep`. On the host, it has."""
        groups, found = self._groups, []
        tensors = list(map(DATA_OF, tensors))
        if self._has_parts:
            tensors = list(map(local_tensor, tensors))
        if (is_watched := is_observed()) or list(map(ADDRESS_OF, tensors)) != self._addresses:
            groups = _grouped(tensors)
        for kind, group in groups.items():
            before, now = self._kept.get(kind), flat(tensors) if group.is_whole else group.values(tensors)
            if before is None or len(before) != len(now):
                found.append(Change(torch.ones((), dtype=torch.bool, device=now.device), group, before, now))
            elif not now.is_cpu or is_watched or not torch.equal(before, now):
                holds = _differ(before, now).any()
                if number_on_host(holds) is not False:
                    found.append(Change(holds, group, before, now))
        return found


class Group:
    """Tensors of one device and dtype, by their places in a list. `steps`: how far apart the values of each are."""

    def __init__(self, places: Sequence[int], tensors: Sequence[Tensor], most: int) -> None:
        self.places = places
        numbers = [tensors[place].numel() for place in places]
        # An odd step does not stay in one column of a matrix.
        self._steps = [
            number // most | 1 if number > most and has_dense_memory(tensors[place]) else 1
            for place, number in zip(places, numbers, strict=True)
        ]
        self.sizes = [-(-number // step) for number, step in zip(numbers, self._steps, strict=True)]
        self.is_whole = len(places) == len(tensors) and max(self._steps) == 1

    def values(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values of all of them, in one vector."""
        if self.is_whole:
            return flat(tensors)
        triples = zip([tensors[place] for place in self.places], self.sizes, self._steps, strict=True)
        return flat([t if step == 1 else torch.as_strided(t, (size,), (step,)) for t, size, step in triples])


def _grouped(tensors: Sequence[Tensor]) -> dict[Kind, Group]:
    places: defaultdict[Kind, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if _has_values(tensor):
            places[tensor.device, tensor.dtype].append(place)
    most = max(64, min(MOST, MOST_IN_ALL // max(len(tensors), 1)))
    return {kind: Group(found, tensors, most) for kind, found in places.items()}


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has numbers that can be compared. Whole numbers of quantized weights may change their form."""
    is_number = (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.itemsize > 1
    if tensor.layout != torch.strided or tensor.is_meta or is_lazy(tensor) or type(tensor) is not Tensor:
        return False
    return is_number and tensor.numel() > 0


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Where numbers differ. NaN is the same as NaN."""
    return (one != other) & ((one == one) | (other == other))


def holding(changes: Iterable[Change]) -> list[Change]:
    """Those that the host knows to hold."""
    return [change for change in changes if change.now.is_cpu]
