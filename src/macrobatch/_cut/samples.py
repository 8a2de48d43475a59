"""Cutting a batch of any kind, as a plan says.

A batch is seen as so many samples (`samples_of`): a tree of tensors with a common first dimension, or a list of samples
with a function that collates some of them. `by_count` and `by_tokens` say how to cut it; what is padding, and may be
trimmed off, says `padding`.
"""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._cut import padding
from macrobatch._cut.padding import TokenGroup
from macrobatch._cut.plans import Part, Row, rounded_up
from macrobatch._cut.trees import (
    Leaf,
    Selection,
    address,
    children,
    count_samples,
    flatten,
    has_fields,
    has_samples,
    rebuild,
)
from macrobatch.errors import BatchError

Collate = Callable[[list[Any]], Any]


class Shape(NamedTuple):
    """What the memory that a sample takes depends on.

    Attributes:
        kind: which tensors there are, and of which type.
        sizes: how large a sample is in each of their dimensions.
    """

    kind: str
    sizes: tuple[int, ...]


class Tree:
    """A batch of tensors with a common first dimension, nested in any way.

    Lists and tuples that are as long, and hold nothing with a first dimension, have one entry a sample too. What has
    neither goes along whole.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.count = count_samples(batch)
        self._lists: dict[int, bool] = {}  # by their ids: whether they have an entry for each sample, or go along whole
        self._leaves = list(flatten(batch, (), "batch", self.count, self._lists))
        self._groups: Sequence[TokenGroup] = ()
        self._rows: list[Row] = []
        first, *others = [leaf for leaf in self._leaves if has_samples(leaf.value)]
        for leaf in others:
            if leaf.value.shape[0] != self.count:
                raise BatchError(
                    f"the tensors of a batch must agree in their first dimension, the samples: {first.path} has "
                    f"{self.count}, but {leaf.path} has {leaf.value.shape[0]}. A list of samples needs collate=; and "
                    "what belongs to no sample does not belong into the batch: let loss_fn have it in another way, "
                    "e.g. with functools.partial."
                )

    @functools.cached_property
    def shape(self) -> Shape:
        tensors = [leaf for leaf in self._leaves if has_samples(leaf.value)]
        kind = " ".join(f"{path}:{value.dtype}:{len(value.shape)}" for _, path, value in tensors)
        return Shape(kind, tuple(int(size) for _, _, value in tensors for size in value.shape[1:]))

    def take(self, part: Part) -> Any:
        """A micro-batch: views where the samples lie together, else copies."""
        groups = zip(self._groups, part.widths, strict=True) if part.widths else ()
        widths = {member: max(width, 1) for group, width in groups if group.trims for member in group.members}
        taken = Selection(part.samples)
        cut = iter([self._taken(value, taken, widths.get(i)) for i, (_, _, value) in enumerate(self._leaves)])
        return rebuild(self._batch, lambda _: next(cut), self._lists)

    def _taken(self, value: Any, taken: Selection, width: int | None) -> Any:
        if has_samples(value):
            return taken.of_tensor(value if width is None else value[:, :width])
        return taken.of_list(value) if self._lists.get(id(value)) else value

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor of a micro-batch lies in the memory of the batch."""
        return address(tensor) in self._addresses

    @functools.cached_property
    def _addresses(self) -> set[int | None]:
        return {address(leaf.value) for leaf in self._leaves if isinstance(leaf.value, Tensor)}

    # ------------------------------------------------------------------------------------------ lengths

    @property
    def _values(self) -> list[Any]:
        return [leaf.value for leaf in self._leaves]

    def _described(self) -> tuple[padding.Named, ...]:
        return padding.described((leaf.keys, leaf.value if has_samples(leaf.value) else None) for leaf in self._leaves)

    def rows(self, length: Callable[[Any], Any] | None) -> list[Row]:
        """How long each sample is without its padding, in each group of tokens."""
        described, values = self._described(), self._values
        if length is not None:
            told = self._told(length)
            group = padding.group_of_width(described, values, max(told, default=0))
            if group is None:
                raise BatchError(self._no_positions(max(told, default=0)))
            padding.require_padding(group, values, [leaf.path for leaf in self._leaves], told)
            self._groups, columns = [group], [told]
        else:
            self._groups = padding.token_groups(described)
            columns = [padding.lengths_of(group, values) for group in self._groups]
            if not any(map(padding.tells_length, described)):
                raise BatchError(
                    "by_tokens cannot tell the lengths of samples: the batch has neither an attention_mask nor labels "
                    "of two dimensions. Say it: by_tokens(budget, length=lambda batch: batch[...])."
                )
        self._rows = list(zip(*columns, strict=True))
        return self._rows

    def _told(self, length: Callable[[Any], Any]) -> list[int]:
        found = length(self._batch)
        numbers = torch.as_tensor(found).reshape(-1).tolist() if _is_numbers(found) else None
        if numbers is None or len(numbers) != self.count:
            raise BatchError(
                f"length= of a batch of tensors gets the batch and must return {self.count} lengths, one a sample: it "
                f"returned {found!r}."
            )
        return [_checked_length(number, index) for index, number in enumerate(numbers)]

    def _no_positions(self, longest: int) -> str:
        shapes = {leaf.path: tuple(leaf.value.shape) for leaf in self._leaves if has_samples(leaf.value)}
        return (
            f"by_tokens cannot tell which dimension holds the positions: a sample is {longest} long, and the second "
            f"dimensions of the tensors are {shapes}. Call one of them attention_mask or labels, or hand over a list "
            "of samples, with collate=."
        )

    def why_untrimmed(self) -> str | None:
        """What keeps padding from being trimmed off, if anything does."""
        paths = [leaf.path for leaf in self._leaves]
        whys = (padding.why_untrimmed(group, self._values, paths) for group in self._groups)
        return next(filter(None, whys), None)

    def trimmed(self) -> Any:
        """The batch without the padding that all of its samples have.

        What lies on a device is not looked at: the host would have to wait for it.
        """
        values = self._values
        self._groups = padding.token_groups(self._described())
        tell = [values[i] for group in self._groups if group.trims for i in (*group.masks, *group.labels)]
        if not tell or not self.count or any(isinstance(value, Tensor) and not value.is_cpu for value in tell):
            return self._batch
        widths = tuple(max(padding.lengths_of(group, values)) for group in self._groups)
        return self.take(Part(range(self.count), widths))

    # ------------------------------------------------------------------------------------------ few shapes

    def widen(self, width: int) -> None:
        """Pad groups of tokens, at most up to `width`, so that their longest sample has one of few lengths.

        The padding is what a sample that is known to have padding holds in its last column.
        """
        for number, group in enumerate(self._groups):
            lengths = [row[number] for row in self._rows]
            shortest = min(range(self.count), key=lengths.__getitem__, default=None)
            if not group.trims or shortest is None or lengths[shortest] >= self._width(group):
                continue
            more = min(width, rounded_up(max(lengths))) - self._width(group)
            members = [self._leaves[member].value for member in group.members]
            is_even = all(isinstance(v, Tensor) and v.shape[1] == members[0].shape[1] for v in members)
            if more > 0 and is_even:
                for member in group.members:
                    keys, path, value = self._leaves[member]
                    last = value[shortest : shortest + 1, -1:].expand(self.count, more, *value.shape[2:])
                    self._leaves[member] = Leaf(keys, path, torch.cat([value, last], 1))

    def widths(self, width: int) -> Row:
        """Of each group of tokens, in a micro-batch whose longest sample is given that width."""
        own = [(self._width(group), group.trims) for group in self._groups]
        return tuple(min(width, widest) if trims else widest for widest, trims in own)

    def _width(self, group: TokenGroup) -> int:
        return padding.width_of(group, self._values)


class Listed:
    """A list of samples; `collate` makes a micro-batch of some of them."""

    def __init__(self, batch: Sequence[Any], collate: Collate) -> None:
        if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
            raise BatchError(
                f"with collate= a batch is a list of samples: got {type(batch).__name__}. Leave collate= out for a "
                "batch of tensors, or let the loader collate with `lambda samples: samples`."
            )
        self._samples = batch
        self._collate = collate
        self.count = len(batch)

    @functools.cached_property
    def shape(self) -> Shape:
        """The largest of all samples: that is what collating fills up to."""
        shapes = [Shape(*_sample_shape(sample)) for sample in self._samples]
        kinds = {shape.kind for shape in shapes}
        if len(kinds) != 1:
            return Shape("samples", ())
        return Shape(kinds.pop(), tuple(map(max, zip(*(shape.sizes for shape in shapes), strict=True))))

    def take(self, part: Part) -> Any:
        """A micro-batch, without the padding that its samples may have brought."""
        collated = self._collate([self._samples[index] for index in part.samples])
        if not part.widths:
            return collated
        try:
            return Tree(collated).trimmed()
        except BatchError:  # it need not be a tree of samples: packed ones are none
            return collated

    def shares_memory(self, tensor: Tensor) -> bool:  # noqa: ARG002 (a collate function may return anything)
        """Whether a tensor of a micro-batch may lie in the memory of a sample."""
        return True

    def why_untrimmed(self) -> None:
        """How much samples are padded is for `collate` to say."""

    def widen(self, width: int) -> None:
        """The same."""

    def widths(self, width: int) -> Row:  # noqa: ARG002
        """The same."""
        return ()

    def rows(self, length: Callable[[Any], Any] | None) -> list[Row]:
        """How long each sample is, in each of its sequences."""
        if length is not None:
            return [(_checked_length(length(sample), index),) for index, sample in enumerate(self._samples)]
        return padding.rows_of([_sample_row(sample) for sample in self._samples])


Samples = Tree | Listed


def samples_of(batch: Any, collate: Collate | None = None) -> Samples:
    """A batch as so many samples; None has none."""
    if batch is None:
        return Listed((), list)
    return Tree(batch) if collate is None else Listed(batch, collate)


def _is_numbers(found: Any) -> bool:
    if isinstance(found, Tensor) or hasattr(found, "dtype"):
        return True
    return isinstance(found, Sequence) and all(isinstance(n, Integral | Tensor) for n in found)


def _checked_length(number: Any, index: int) -> int:
    try:
        length = int(number)
    except (TypeError, ValueError, OverflowError):
        length = -1
    if length < 0 or length != number:
        raise BatchError(f"the length of a sample must be a whole number, 0 or more: sample {index} has {number!r}.")
    return length


def _sample_row(sample: Any) -> tuple[dict[Any, int], dict[Any, int]]:
    """How long a sample of a list is in each of its sequences, where nobody said how to tell it."""
    if isinstance(sample, Mapping | UserDict) or has_fields(sample):
        row = padding.sequences_of(list(_fields_of_sample(sample, ())))
        if row[0]:
            return row
    elif has_samples(sample) or (isinstance(sample, list) and all(isinstance(token, int) for token in sample)):
        return {(): len(sample)}, {}
    raise BatchError(
        f"by_tokens cannot tell the length of a sample of type {type(sample).__name__}: it has neither an "
        "attention_mask nor labels. Say it: by_tokens(budget, length=lambda sample: len(...))."
    )


def _fields_of_sample(sample: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What a sample holds that has a length; lists are no containers here."""
    if isinstance(sample, Mapping | UserDict) or has_fields(sample):
        for key, child in children(sample) or ():
            yield from _fields_of_sample(child, (*keys, key))
    elif has_samples(sample) or isinstance(sample, list | tuple):
        yield keys, sample


def _sample_shape(sample: Any) -> tuple[str, tuple[int, ...]]:
    """The kinds of a sample's tensors, and all their dimensions; a list of numbers has one."""
    if isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return "numbers", (len(sample),)
    branches = children(sample)
    if branches is None:
        shape = tuple(int(size) for size in getattr(sample, "shape", ()))
        return f"{getattr(sample, 'dtype', type(sample).__name__)}:{len(shape)}", shape
    kinds, sizes = zip(*(_sample_shape(child) for _, child in branches), strict=True) if branches else ((), ())
    return f"({' '.join(kinds)})", tuple(size for part in sizes for size in part)
