"""Cuts a batch of any kind into the parts of a plan.

`samples_of` wraps a batch: a tree of tensors with a common first dimension, or a list of samples with a collate
function. `by_count` and `by_tokens` plan the parts; `padding` finds the padding that may be trimmed.
"""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._cut import padding, trees
from macrobatch._cut.plans import LengthPerGroup, Part, rounded_up
from macrobatch._cut.token_groups import (
    LABELS,
    MASK,
    LeafInfo,
    TokenGroup,
    group_of_width,
    is_integer,
    leaf_infos,
    token_groups,
)
from macrobatch.errors import BatchError

Collate = Callable[[list[Any]], Any]


class Shape(NamedTuple):
    """The properties of a sample that determine how much memory it takes."""

    kind: str  # the tensors of the sample and their types
    sizes: tuple[int, ...]  # of all their dimensions


class TensorBatch:
    """A batch of tensors with a common first dimension, nested in any way, and of lists with an entry per sample."""

    def __init__(self, batch: Any, containers: set[str] | None = None) -> None:
        self._batch = batch
        self.count = trees.count_samples(batch)
        self._leaves = list(trees.flatten(batch, self.count))
        self._groups: Sequence[TokenGroup] = ()
        self._lengths: list[LengthPerGroup] = []
        first, *others = [leaf for leaf in self._leaves if trees.has_samples(leaf.value)]
        for leaf in others:
            if leaf.value.shape[0] != self.count:
                raise BatchError(
                    f"the tensors of a batch must agree in their first dimension, the samples: {first.path} has "
                    f"{self.count}, but {leaf.path} has {leaf.value.shape[0]}. If the batch is a list of samples, pass "
                    "collate=. If a tensor belongs to no sample, pass it to loss_fn in another way, e.g. with "
                    "functools.partial."
                )
        if self.count > 1:
            self._require_no_hidden_samples()
        trees.require_no_list_of_samples(batch)
        trees.require_told_apart(batch, "batch", self.count, set() if containers is None else containers)

    def _require_no_hidden_samples(self) -> None:
        """Raise an error for an object that holds samples, but cannot be cut."""
        for leaf in self._leaves:
            is_cut = trees.has_samples(leaf.value) or leaf.has_entries
            if not is_cut and trees.has_samples_inside(leaf.value, self.count):
                raise BatchError(
                    f"{leaf.path}, of type {type(leaf.value).__name__}, holds a tensor of {self.count} rows, but it "
                    "cannot be cut: every micro-batch would get all of it. Make it a dataclass, a dict or a named "
                    "tuple, or pass a list of samples with collate=, which builds it for each micro-batch."
                )

    @functools.cached_property
    def shape(self) -> Shape:
        tensors = [leaf for leaf in self._leaves if trees.has_samples(leaf.value)]
        kind = " ".join(f"{leaf.path}:{getattr(leaf.value, 'dtype', None)}:{len(leaf.value.shape)}" for leaf in tensors)
        return Shape(kind, tuple(int(size) for leaf in tensors for size in leaf.value.shape[1:]))

    def take(self, part: Part) -> Any:
        """The micro-batch of a part: views if its samples are adjacent, otherwise copies."""
        groups = zip(self._groups, part.widths, strict=True) if part.widths else ()
        widths = {member: max(width, 1) for group, width in groups if group.can_trim for member in group.members}
        selection = trees.Selection(part.samples)
        cut = [_selected(leaf, selection, widths.get(index)) for index, leaf in enumerate(self._leaves)]
        return trees.replace_leaves(self._batch, self._leaves, cut)

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor of a micro-batch is a view of the batch."""
        return trees.address(tensor) in self._addresses

    @functools.cached_property
    def _addresses(self) -> set[int | None]:
        return {trees.address(leaf.value) for leaf in self._leaves if isinstance(leaf.value, Tensor)}

    # ------------------------------------------------------------------------------------------ lengths

    @property
    def _values(self) -> list[Any]:
        return [leaf.value for leaf in self._leaves]

    def _leaf_infos(self) -> tuple[LeafInfo, ...]:
        sizes = [value.shape[1:] if trees.has_samples(value) else () for value in self._values]
        return leaf_infos(zip([leaf.keys for leaf in self._leaves], sizes, map(is_integer, self._values), strict=True))

    def lengths(self, length: Callable[[Any], Any] | None) -> list[LengthPerGroup]:
        """The length of each sample without its padding, in each group of tokens."""
        infos, values = self._leaf_infos(), self._values
        if length is not None:
            lengths = self._user_lengths(length)
            group = group_of_width(infos, values, max(lengths, default=0))
            if group is None:
                raise BatchError(self._no_positions(lengths))
            padding.require_padding(group, values, [leaf.path for leaf in self._leaves], lengths)
            self._groups, columns = [group], [lengths]
        else:
            self._groups = token_groups(infos)
            columns = [padding.lengths_of(group, values) for group in self._groups]
            if not any(info.sizes and info.stem in (MASK, LABELS) for info in infos):
                raise BatchError(
                    "by_tokens cannot find the lengths of the samples: the batch has neither an attention_mask nor "
                    "labels of two dimensions. Pass them: by_tokens(budget, length=lambda batch: batch[...])."
                )
        self._lengths = list(zip(*columns, strict=True))
        return self._lengths

    def _user_lengths(self, length: Callable[[Any], Any]) -> list[int]:
        found = length(self._batch)
        numbers = None
        if hasattr(found, "dtype") or (
            isinstance(found, Sequence) and all(isinstance(number, Integral | Tensor) for number in found)
        ):
            numbers = torch.as_tensor(found).reshape(-1).tolist()
        if numbers is None or len(numbers) != self.count:
            raise BatchError(
                f"length= gets the whole batch of tensors and must return {self.count} lengths, one per sample: it "
                f"returned {found!r}."
            )
        return [_checked_length(number, index) for index, number in enumerate(numbers)]

    def _no_positions(self, lengths: Sequence[int]) -> str:
        """Why no tensor has the positions that the user's lengths count."""
        shapes = {leaf.path: tuple(leaf.value.shape) for leaf in self._leaves if trees.has_samples(leaf.value)}
        longest, widths = max(lengths, default=0), [shape[1] for shape in shapes.values() if len(shape) > 1]
        if widths and longest > max(widths):
            return (
                f"by length=, sample {lengths.index(longest)} has {longest} positions, but no tensor of the batch is "
                f"wider than {max(widths)}: their shapes are {shapes}. Lengths count the positions of a sample without "
                "its padding, e.g. length=lambda batch: batch['attention_mask'].sum(1)."
            )
        return (
            f"by_tokens cannot tell which dimension holds the positions: the longest sample has {longest}, and the "
            f"shapes of the tensors are {shapes}. Name one of them attention_mask or labels, or pass a list of samples "
            "with collate=."
        )

    def why_untrimmed(self) -> str | None:
        """The reason why padding is not trimmed; None if there is nothing to say."""
        paths = [leaf.path for leaf in self._leaves]
        whys = (padding.why_untrimmed(group, self._values, paths) for group in self._groups)
        return next(filter(None, whys), None)

    def without_padding(self) -> Any:
        """The batch without the columns that are padding in all samples, if the host knows them."""
        values = self._values
        self._groups = token_groups(self._leaf_infos())
        evidence = [values[i] for group in self._groups if group.can_trim for i in (*group.masks, *group.labels)]
        if not evidence or not self.count or any(isinstance(x, Tensor) and not x.is_cpu for x in evidence):
            return self._batch  # the host would have to wait for masks on a device
        widths = tuple(max(padding.lengths_of(group, values)) for group in self._groups)
        return self.take(Part(range(self.count), widths))

    # ------------------------------------------------------------------------------------------ few shapes

    def few_widths(self, widths: Sequence[int]) -> list[LengthPerGroup]:
        """The widths of the groups of tokens in micro-batches that are cut to these widths, if that can be."""
        self._widen(max(widths, default=0))
        own = [(self._width(group), group.can_trim) for group in self._groups]
        return [tuple(min(width, widest) if trims else widest for widest, trims in own) for width in widths]

    def _widen(self, width: int) -> None:
        """Pad groups of tokens, at most to `width`, so that the longest sample gets one of a few lengths."""
        for number, group in enumerate(self._groups):
            lengths = [row[number] for row in self._lengths]
            shortest = min(range(self.count), key=lengths.__getitem__, default=None)
            if not group.can_trim or shortest is None or lengths[shortest] >= self._width(group):
                continue
            more = min(width, rounded_up(max(lengths))) - self._width(group)
            members = [self._leaves[member].value for member in group.members]
            is_even = all(isinstance(v, Tensor) and v.shape[1] == members[0].shape[1] for v in members)
            if more > 0 and is_even:
                for member in group.members:  # the last column of the shortest sample is padding: it is repeated
                    value = self._leaves[member].value
                    last = value[shortest : shortest + 1, -1:].expand(self.count, more, *value.shape[2:])
                    self._leaves[member] = self._leaves[member]._replace(value=torch.cat([value, last], 1))

    def _width(self, group: TokenGroup) -> int:
        return padding.width_of(group, self._values)


class SampleList:
    """A list of samples, and the function that collates some of them into a micro-batch."""

    def __init__(self, batch: Sequence[Any], collate: Collate) -> None:
        if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
            raise BatchError(
                f"with collate= the batch must be a list of samples: got {type(batch).__name__}. For a batch of "
                "tensors leave collate= out. A loader returns lists of samples with collate_fn=lambda samples: samples."
            )
        self._samples = batch
        self._collate = collate
        self.count = len(batch)

    @functools.cached_property
    def shape(self) -> Shape:
        """The largest sizes of all samples, to which collate pads."""
        shapes = [_sample_shape(sample) for sample in self._samples]
        kinds = {shape.kind for shape in shapes}
        if len(kinds) != 1:
            return Shape("samples", ())
        return Shape(kinds.pop(), tuple(map(max, zip(*(shape.sizes for shape in shapes), strict=True))))

    def take(self, part: Part) -> Any:
        """The collated micro-batch of a part, without columns that are padding in all its samples."""
        collated = self._collate([self._samples[index] for index in part.samples])
        if not part.widths:
            return collated
        try:
            return TensorBatch(collated).without_padding()
        except BatchError:  # collate may return anything, e.g. a packed sequence
            return collated

    def shares_memory(self, tensor: Tensor) -> bool:  # noqa: ARG002 (a collate function may return anything)
        """Whether a tensor of a micro-batch may be a view of a sample."""
        return True

    def why_untrimmed(self) -> None:
        """Nothing to say: `collate` decides about padding."""

    def few_widths(self, widths: Sequence[int]) -> list[LengthPerGroup]:
        """No widths: `collate` decides about padding."""
        return [()] * len(widths)

    def lengths(self, length: Callable[[Any], Any] | None) -> list[LengthPerGroup]:
        """The length of each sample in each of its sequences."""
        if length is not None:
            return [(_checked_length(length(sample), index),) for index, sample in enumerate(self._samples)]
        return padding.sample_lengths([_sequence_lengths(sample) for sample in self._samples])


Samples = TensorBatch | SampleList


def samples_of(batch: Any, collate: Collate | None = None, containers: set[str] | None = None) -> Samples:
    """Wrap a batch; None is a batch without samples. `containers` are kept from batch to batch."""
    if batch is None:
        return SampleList((), list)
    return TensorBatch(batch, containers) if collate is None else SampleList(batch, collate)


def _selected(leaf: trees.Leaf, selection: trees.Selection, width: int | None) -> Any:
    """The entries of a leaf for some samples, trimmed to a width if there is one."""
    value = leaf.value
    if not trees.has_samples(value):
        return selection.of_list(value) if leaf.has_entries else value
    if width is None:
        return selection.of_tensor(value)
    trimmed = selection.of_tensor(value[:, :width])
    is_whole = isinstance(value, Tensor) and value.layout == torch.strided and value.is_contiguous()
    return trimmed.contiguous() if is_whole else trimmed  # losses call view()


def _checked_length(number: Any, index: int) -> int:
    try:
        length = int(number)
    except (TypeError, ValueError, OverflowError):
        length = -1
    if length < 0 or length != number:
        raise BatchError(f"the length of a sample must be a whole number, 0 or more: sample {index} has {number!r}.")
    return length


def _sequence_lengths(sample: Any) -> tuple[dict[Any, int], dict[Any, int]]:
    """The lengths of a sample of a list in its sequences; see `padding.sequence_lengths`."""
    if isinstance(sample, Mapping | UserDict) or trees.has_fields(sample):
        row = padding.sequence_lengths(list(_fields_of_sample(sample, ())))
        if row[0]:
            return row
    elif trees.has_samples(sample) or (isinstance(sample, list) and all(isinstance(token, int) for token in sample)):
        return {(): len(sample)}, {}
    raise BatchError(
        f"by_tokens cannot find the length of a sample of type {type(sample).__name__}: it has neither an "
        "attention_mask nor labels. Pass it: by_tokens(budget, length=lambda sample: len(...))."
    )


def _fields_of_sample(sample: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The fields of a sample that have a length; a list is a field, not a container."""
    if isinstance(sample, Mapping | UserDict) or trees.has_fields(sample):
        for key, child in trees.children(sample) or ():
            yield from _fields_of_sample(child, (*keys, key))
    elif trees.has_samples(sample) or isinstance(sample, list | tuple):
        yield keys, sample


def _sample_shape(sample: Any) -> Shape:
    """The kinds of a sample's tensors, and the sizes of all their dimensions; a list of numbers has one dimension."""
    if isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return Shape("numbers", (len(sample),))
    branches = trees.children(sample)
    if branches is None:
        sizes = tuple(int(size) for size in getattr(sample, "shape", ()))
        return Shape(f"{getattr(sample, 'dtype', type(sample).__name__)}:{len(sizes)}", sizes)
    parts = [_sample_shape(child) for _, child in branches]
    return Shape(f"({' '.join(part.kind for part in parts)})", tuple(size for part in parts for size in part.sizes))
