"""Cutting a batch of any kind, as a plan says.

A batch is seen as so many samples (`samples_of`): a tree of tensors with a common first dimension, or a list of samples
with a function that collates some of them. `by_count` and `by_tokens` say how to cut it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from macrobatch.errors import BatchError, UsageError
from macrobatch.plan import plan_by_count, plan_by_tokens, plan_few_shapes

IGNORED = -100  # what torch's losses take for "no label here"
Collate = Callable[[list[Any]], Any]


# ---------------------------------------------------------------------------------------------- how to cut


class Part(NamedTuple):
    """A micro-batch to be."""

    samples: Sequence[int]
    width: int | None = None  # padding beyond it is trimmed; None: nothing is

    @property
    def key(self) -> tuple[int, int | None]:
        """What is known of its shape beforehand."""
        return len(self.samples), self.width


@dataclass(frozen=True)
class ByCount:
    """What `by_count` returns."""

    size: int

    def __post_init__(self) -> None:
        _check_whole(self.size, "a micro-batch must have a whole number of samples, 1 or more")

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:  # noqa: ARG002 (they are few)
        """The plan for these samples."""
        return [Part(indices) for indices in plan_by_count(samples.count, self.size)]


@dataclass(frozen=True)
class ByTokens:
    """What `by_tokens` returns."""

    budget: int
    length: Callable[[Any], Any] | None = None
    oversize: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        _check_whole(self.budget, "a token budget must be a whole number, 1 or more")
        if self.length is not None and not callable(self.length):
            raise UsageError(f"length must be a function that tells the lengths of samples: got {self.length!r}.")
        if self.oversize not in ("warn", "raise"):
            raise UsageError(f'oversize must be "warn" or "raise": got {self.oversize!r}.')

    def parts(self, samples: Samples, few_shapes: bool = False) -> list[Part]:
        """The plan for these samples, with widths that are rounded up where few different shapes are wanted."""
        lengths = samples.lengths(self.length)
        longest = max(lengths, default=0)
        if longest > self.budget:
            found = f"sample {lengths.index(longest)} has {longest} tokens, which is above the budget of {self.budget}"
            if self.oversize == "raise":
                raise BatchError(f"{found}. Truncate it, raise the budget, or let it be a micro-batch of its own.")
            warnings.warn(f"{found}: it is a micro-batch of its own.", stacklevel=4)
        # What was told of listed samples may be the length of something else than what is collated: nothing is trimmed.
        # Nor where few shapes are wanted: how far it pads is then for the one who collates to say.
        trims = isinstance(samples, Tree) or (self.length is None and not few_shapes)
        samples.find_positions(longest)
        if few_shapes:
            plan, widths = plan_few_shapes(lengths, self.budget)
            samples.widen(max(widths, default=0), lengths)
            return [Part(*part) for part in zip(plan, widths if trims else [None] * len(plan), strict=True)]
        plan = plan_by_tokens(lengths, self.budget)
        return [Part(indices, max(lengths[sample] for sample in indices) if trims else None) for indices in plan]


def by_count(n: int) -> ByCount:
    """Micro-batches of `n` samples, in the order they come in. An int says the same.

    >>> batch = samples_of(torch.zeros(5, 3))
    >>> [len(batch.take(part)) for part in by_count(2).parts(batch)]
    [2, 2, 1]
    """
    return ByCount(n)


def by_tokens(
    budget: int, length: Callable[[Any], Any] | None = None, *, oversize: Literal["warn", "raise"] = "warn"
) -> ByTokens:
    """Micro-batches of samples of about the same length, none with more than `budget` tokens, padding included.

    >>> batch = {"input_ids": torch.ones(4, 9), "attention_mask": torch.arange(9) < torch.tensor([[2], [9], [3], [8]])}
    >>> samples = samples_of(batch)
    >>> [tuple(samples.take(part)["input_ids"].shape) for part in by_tokens(18).parts(samples)]
    [(2, 9), (2, 3)]

    Args:
        budget: the largest number of samples x longest of a micro-batch. A longer sample is alone in its own.
        length: the length of a sample of a list, or, of a batch of tensors, those of all its samples: what is beyond
            is trimmed off. Without it, the last position that the attention mask shows tells; without a mask, the last
            that has a label.
        oversize: what a sample above the budget does: "warn" or "raise".
    """
    return ByTokens(budget, length, oversize)


def _check_whole(number: object, what: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageError(f"{what}: got {number!r}.")


# ---------------------------------------------------------------------------------------------- batches


class Shape(NamedTuple):
    """What the memory that a sample takes depends on.

    Attributes:
        kind: which tensors there are, and of which type.
        sizes: how large a sample is in each of their dimensions.
    """

    kind: str
    sizes: tuple[int, ...]


class Tree:
    """A batch of tensors with a common first dimension, nested in any way. What has no dimension goes along whole."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._leaves = [(path, leaf) for path, leaf in leaves(batch, "batch") if _has_samples(leaf)]
        if not self._leaves:
            raise BatchError(
                f"the batch has no tensor that could be cut: got {type(batch).__name__}. Hand over tensors with a "
                "common first dimension, in dicts, lists, tuples or dataclasses; or a list of samples, with collate=."
            )
        path, leaf = self._leaves[0]
        self.count = int(leaf.shape[0])
        self._positions = 0  # the size of the dimension that holds them
        for other, different in self._leaves:
            if different.shape[0] != self.count:
                raise BatchError(
                    f"the tensors of a batch must agree in their first dimension, the samples: {path} has "
                    f"{self.count}, but {other} has {different.shape[0]}. A list of samples needs collate=; and what "
                    "belongs to no sample does not belong into the batch: let loss_fn have it in another way, e.g. "
                    "with functools.partial."
                )

    @functools.cached_property
    def shape(self) -> Shape:
        kind = " ".join(f"{path}:{leaf.dtype}:{len(leaf.shape)}" for path, leaf in self._leaves)
        return Shape(kind, tuple(int(size) for _, leaf in self._leaves for size in leaf.shape[1:]))

    def take(self, part: Part) -> Any:
        """A micro-batch: views where the samples lie together, else copies."""
        taken = _Taken(part, self._positions)
        return _rebuilt(self._batch, lambda leaf: taken.of(leaf) if _has_samples(leaf) else leaf)

    def lengths(self, length: Callable[[Any], Any] | None) -> list[int]:
        """How long each sample is without its padding."""
        if length is not None:
            return self._told(length)
        if (mask := self._named("attention_mask")) is not None:
            return _extents(mask != 0)
        if (labels := self._named("labels")) is not None:
            return _extents(labels != IGNORED)
        raise BatchError(
            "by_tokens cannot tell the lengths of samples: the batch has neither an attention_mask nor labels of two "
            "dimensions. Say it: by_tokens(budget, length=lambda batch: batch[...])."
        )

    def _told(self, length: Callable[[Any], Any]) -> list[int]:
        found = length(self._batch)
        numbers = torch.as_tensor(found).reshape(-1).tolist() if _is_numbers(found) else None
        if numbers is None or len(numbers) != self.count:
            raise BatchError(
                f"length= of a batch of tensors gets the batch and must return {self.count} lengths, one a sample: it "
                f"returned {found!r}."
            )
        return [_checked_length(number, index) for index, number in enumerate(numbers)]

    def trimmed(self) -> Any:
        """The batch without the columns at its end in which the attention mask shows nothing, if there is such a mask.

        One that lies on a device is not looked at: the host would have to wait for it.
        """
        mask = self._named("attention_mask")
        if mask is None or mask.device.type != "cpu" or not self.count:
            return self._batch
        self._positions = int(mask.shape[1])
        return self.take(Part(range(self.count), max(_extents(mask != 0))))

    def _named(self, name: str) -> Tensor | None:
        """The leaf of that name, if it has one row for each sample and one column for each position."""
        ends = (f"[{name!r}]", f".{name}")
        found = [leaf for path, leaf in self._leaves if path.endswith(ends) and len(leaf.shape) == 2]
        return torch.as_tensor(found[0]) if found else None

    def find_positions(self, width: int) -> None:
        """Which second dimension is that of positions: padding beyond `width` is trimmed off wherever it stands."""
        for name in ("attention_mask", "labels", "input_ids"):
            if (leaf := self._named(name)) is not None:
                widths = {int(leaf.shape[1])}
                break
        else:
            widths = {int(leaf.shape[1]) for _, leaf in self._leaves if len(leaf.shape) > 1 and leaf.shape[1] >= width}
        if len(widths) == 1 and max(widths) >= width:
            self._positions = widths.pop()
            return
        raise BatchError(
            f"by_tokens cannot tell which dimension holds the positions: a sample is {width} long, and the second "
            f"dimensions of the tensors are { {path: tuple(leaf.shape) for path, leaf in self._leaves} }. Call one of "
            "them attention_mask or labels, or hand over a list of samples, with collate=."
        )

    def widen(self, width: int, lengths: Sequence[int]) -> None:
        """Pad all samples to `width`, if they are shorter: with what stands in the last column of one with padding."""
        more, shortest = width - self._positions, min(range(self.count), key=lengths.__getitem__, default=None)
        if more <= 0 or shortest is None or lengths[shortest] == self._positions:
            return

        def padded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[1] != self._positions:
                return leaf
            padding = leaf[shortest : shortest + 1, -1:]
            return torch.cat([leaf, padding.expand(leaf.shape[0], more, *leaf.shape[2:])], 1)

        self._batch = _rebuilt(self._batch, padded)
        self._positions = width


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
        if part.width is None:
            return collated
        try:
            return Tree(collated).trimmed()
        except BatchError:  # it need not be a tree of samples: packed ones are none
            return collated

    def find_positions(self, width: int) -> None:
        """What is collated tells by itself."""

    def widen(self, width: int, lengths: Sequence[int]) -> None:
        """How far samples are padded is for `collate` to say."""

    def lengths(self, length: Callable[[Any], Any] | None) -> list[int]:
        """How long each sample is."""
        tell = length or _sample_length
        return [_checked_length(tell(sample), index) for index, sample in enumerate(self._samples)]


Samples = Tree | Listed


def samples_of(batch: Any, collate: Collate | None = None) -> Samples:
    """A batch as so many samples; None has none."""
    if batch is None:
        return Listed((), list)
    return Tree(batch) if collate is None else Listed(batch, collate)


# ---------------------------------------------------------------------------------------------- trees


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in a tree that is no container, with the path that a user would write.

    >>> [path for path, _ in leaves({"x": [1, 2]}, "batch")]
    ["batch['x'][0]", "batch['x'][1]"]
    """
    branches = _branches(tree)
    if branches is None:
        yield path, tree
    else:
        for key, child in branches:
            inner = f"{path}.{key}" if _has_fields(tree) else f"{path}[{key!r}]"
            yield from leaves(child, inner)


def _branches(tree: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(tree, Mapping | UserDict):
        return list(tree.items())
    if _has_fields(tree):
        return [(name, getattr(tree, name)) for name in _fields(tree)]
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    return None


def _has_fields(tree: Any) -> bool:
    """Whether it is a dataclass or a named tuple."""
    return not isinstance(tree, type | Mapping) and (
        dataclasses.is_dataclass(tree) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))
    )


def _fields(tree: Any) -> list[str]:
    return list(getattr(tree, "_fields", ())) or [field.name for field in dataclasses.fields(tree)]


def _rebuilt(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree of the same types, with its leaves changed."""
    branches = _branches(tree)
    if branches is None:
        return change(tree)
    changed = {key: _rebuilt(child, change) for key, child in branches}
    if isinstance(tree, tuple):
        return type(tree)(*changed.values()) if hasattr(tree, "_fields") else tuple(changed.values())
    if isinstance(tree, list):
        return list(changed.values())
    if _has_fields(tree):
        rebuilt = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(rebuilt, name, value)  # frozen ones too
        return rebuilt
    if type(tree) is dict or not hasattr(tree, "__setitem__"):
        return changed
    rebuilt = copy.copy(tree)  # keeps what such a mapping carries besides its items
    for key, value in changed.items():
        rebuilt[key] = value
    return rebuilt


def transformed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with all its tensors changed."""
    return _rebuilt(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def _has_samples(leaf: Any) -> bool:
    """Whether it has a first dimension: a tensor, or an array."""
    return hasattr(leaf, "dtype") and len(getattr(leaf, "shape", ())) > 0


class _Taken:
    """The samples of a part, out of one leaf after the other."""

    def __init__(self, part: Part, positions: int) -> None:
        self._part = part
        self._positions = positions
        self._rows: dict[torch.device, Tensor] = {}

    def of(self, leaf: Any) -> Any:
        samples, width = self._part
        if width is not None and len(leaf.shape) > 1 and leaf.shape[1] == self._positions:
            leaf = leaf[:, : max(width, 1)]
        start, end = samples[0], samples[-1] + 1
        if end - start == len(samples):
            return leaf[start:end]
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, self._rows_on(leaf.device))
        return leaf[list(samples)]

    def _rows_on(self, device: torch.device) -> Tensor:
        if device not in self._rows:
            rows = torch.tensor(self._part.samples)
            if device.type == "cuda":
                rows = rows.pin_memory()  # else the host would wait for the copy
            self._rows[device] = rows.to(device, non_blocking=True)
        return self._rows[device]


# ---------------------------------------------------------------------------------------------- lengths


def _extents(shown: Tensor) -> list[int]:
    """For each row, the position of the last True, counted from 1; 0 where there is none."""
    positions = torch.arange(1, shown.shape[1] + 1, device=shown.device)
    extents: list[int] = (shown * positions).amax(1).tolist() if shown.numel() else [0] * len(shown)
    return extents


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


def _sample_length(sample: Any) -> int:
    """The length of a sample of a list, where nobody said how to tell it."""
    if isinstance(sample, Mapping | UserDict):
        if "attention_mask" in sample:
            return _extents(torch.as_tensor(sample["attention_mask"]).reshape(1, -1) != 0)[0]
        for name in ("labels", "input_ids"):
            if name in sample and (_has_samples(sample[name]) or isinstance(sample[name], Sequence)):
                return len(sample[name])
    elif _has_samples(sample) or (isinstance(sample, list) and all(isinstance(token, int) for token in sample)):
        return len(sample)
    raise BatchError(
        f"by_tokens cannot tell the length of a sample of type {type(sample).__name__}: it has neither an "
        "attention_mask nor labels. Say it: by_tokens(budget, length=lambda sample: len(...))."
    )


def _sample_shape(sample: Any) -> tuple[str, tuple[int, ...]]:
    """The kinds of a sample's tensors, and all their dimensions; a list of numbers has one."""
    if isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return "numbers", (len(sample),)
    branches = _branches(sample)
    if branches is None:
        shape = tuple(int(size) for size in getattr(sample, "shape", ()))
        return f"{getattr(sample, 'dtype', type(sample).__name__)}:{len(shape)}", shape
    kinds, sizes = zip(*(_sample_shape(child) for _, child in branches), strict=True) if branches else ((), ())
    return f"({' '.join(kinds)})", tuple(size for part in sizes for size in part)
