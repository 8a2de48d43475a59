"""Batches nested in any way: what is in them, and the same tree with other leaves.

Dicts and other mappings, lists, tuples, named tuples and dataclasses are containers; everything else is a leaf. In a
batch of so many samples (`flatten`), a list with an entry for each of them is a leaf too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from macrobatch.errors import BatchError


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in a tree that is no container, with the path that a user would write.

    >>> [path for path, _ in leaves({"x": [1, 2]}, "batch")]
    ["batch['x'][0]", "batch['x'][1]"]
    """
    branches = children(tree)
    if branches is None:
        yield path, tree
    else:
        for key, child in branches:
            yield from leaves(child, _written(tree, path, key))


def _written(tree: Any, path: str, key: Any) -> str:
    return f"{path}.{key}" if has_fields(tree) else f"{path}[{key!r}]"


class Leaf(NamedTuple):
    """What is in a batch, where, and how a user would write that."""

    keys: tuple[Any, ...]
    path: str
    value: Any


def flatten(tree: Any, keys: tuple[Any, ...], path: str, count: int, lists: dict[int, bool]) -> Iterator[Leaf]:
    """The leaves of a batch of so many samples.

    Lists that are leaves are noted in `lists` by their ids, with whether they have an entry for each sample.
    """
    _require_cuttable(tree, path)
    branches = children(tree)
    if isinstance(tree, list | tuple) and not has_fields(tree):
        has_entries = _has_entries(tree, count)
        if has_entries or not any(children(entry) is not None or has_samples(entry) for entry in tree):
            lists[id(tree)] = has_entries
    if branches is None or id(tree) in lists:
        yield Leaf(keys, path, tree)
    else:
        for key, child in branches:
            yield from flatten(child, (*keys, key), _written(tree, path, key), count, lists)


def _require_cuttable(leaf: Any, path: str) -> None:
    kind = None
    if isinstance(leaf, PackedSequence):
        kind = "packed sequence"
    elif isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo)):
        kind = "nested tensor" if leaf.is_nested else f"tensor of layout {leaf.layout}"
    if kind is not None:
        raise BatchError(
            f"{path} is a {kind}, which cannot be cut. Hand over a list of samples, and make it of some of them in "
            "collate=; or a padded tensor, with an attention mask."
        )


def _has_entries(tree: Any, count: int) -> bool:
    """Whether it is a list or tuple with an entry for each sample, such as their texts.

    One that holds tensors is a container. So is one of lists that are all as long: `default_collate` makes a list of
    tuples, one a field, of samples that are tuples of texts.
    """
    if len(tree) != count or isinstance(tree, torch.Size):
        return False
    if count and all(isinstance(entry, list | tuple) and len(entry) == count for entry in tree):
        return False
    return _first_with_samples(tree) is None


def count_samples(batch: Any) -> int:
    """How many samples a batch has, by the first tensor that has any."""
    first = _first_with_samples(batch)
    if first is None:
        raise BatchError(
            f"the batch has no tensor that could be cut: got {type(batch).__name__}. Hand over tensors with a common "
            "first dimension, in dicts, lists, tuples or dataclasses; or a list of samples, with collate=."
        )
    return int(first.size(0) if isinstance(first, Tensor) else first.shape[0])


def _first_with_samples(tree: Any) -> Any:
    """The first leaf that has a first dimension, or None."""
    branches = children(tree)
    if branches is None:
        return tree if has_samples(tree) else None
    return next((found for _, child in branches if (found := _first_with_samples(child)) is not None), None)


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """What a container holds, by its keys; None for a leaf."""
    if isinstance(tree, Mapping | UserDict):
        return list(tree.items())
    if has_fields(tree):
        return [(name, getattr(tree, name)) for name in _fields(tree) if hasattr(tree, name)]
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    return None


def has_fields(tree: Any) -> bool:
    """Whether it is a dataclass or a named tuple."""
    return not isinstance(tree, type | Mapping) and (
        dataclasses.is_dataclass(tree) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))
    )


def _fields(tree: Any) -> list[str]:
    return list(getattr(tree, "_fields", ())) or [field.name for field in dataclasses.fields(tree)]


def rebuild(tree: Any, change: Callable[[Any], Any], whole: Container[int] = ()) -> Any:
    """The same tree of the same types, with its leaves changed; containers whose ids are in `whole` are leaves too."""
    branches = None if id(tree) in whole else children(tree)
    if branches is None:
        return change(tree)
    changed = {key: rebuild(child, change, whole) for key, child in branches}
    if isinstance(tree, list | tuple):
        return same_kind(tree, list(changed.values()))
    if type(tree) is dict or not (has_fields(tree) or hasattr(tree, "__setitem__")):
        return changed
    other = copy.copy(tree)  # keeps what it carries besides
    for key, value in changed.items():
        if has_fields(tree):
            object.__setattr__(other, key, value)  # frozen ones too
        else:
            other[key] = value
    return other


def same_kind(tree: list[Any] | tuple[Any, ...], entries: list[Any]) -> Any:
    """A list or tuple of the same type with other entries."""
    if type(tree) is list:
        return entries
    if isinstance(tree, torch.Size):
        return torch.Size(entries)
    if isinstance(tree, tuple):
        return tuple.__new__(type(tree), entries)  # whatever a subclass, such as a named tuple, wants to be made of
    other = copy.copy(tree)
    other[:] = entries
    return other


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with all its tensors changed."""
    return rebuild(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def copy_shared(tree: Any, shares_memory: Callable[[Tensor], bool]) -> Any:
    """The same tree, with copies of its arrays, and of those tensors that share memory with others."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_with_layout(leaf) if shares_memory(leaf) else leaf
        return leaf.copy() if has_samples(leaf) and hasattr(leaf, "copy") else leaf

    return rebuild(tree, copied)


ALIGNED = 256  # bytes: no kernel looks at more


def copy_with_layout(tensor: Tensor) -> Tensor:
    """A copy that is aligned in memory as the tensor is: kernels go by that, and their results differ in the last bits.

    >>> rows = torch.randn(4, 3)[1:]
    >>> torch.equal(rows, copy_with_layout(rows)), (rows.data_ptr() - copy_with_layout(rows).data_ptr()) % ALIGNED
    (True, 0)
    """
    is_plain = type(tensor) is Tensor and not tensor.requires_grad and tensor.is_contiguous()
    if not is_plain or tensor.data_ptr() % ALIGNED == 0:
        return tensor.clone()
    size = tensor.element_size()
    memory = torch.empty(tensor.numel() + ALIGNED // size, dtype=tensor.dtype, device=tensor.device)
    start = (tensor.data_ptr() - memory.data_ptr()) % ALIGNED // size
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def has_samples(leaf: Any) -> bool:
    """Whether it has a first dimension: a tensor, or an array."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0  # a nested one has no shape
    return hasattr(leaf, "dtype") and len(getattr(leaf, "shape", ())) > 0


def address(tensor: Tensor) -> int | None:
    """Where its memory begins, if it has any of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None


class Selection:
    """Some samples, out of one leaf after the other."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._start, self._end = samples[0], samples[-1] + 1
        self._lie_together = self._end - self._start == len(samples)
        self._rows: dict[torch.device, Tensor] = {}

    def of_tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and (not self._lie_together or leaf.layout != torch.strided):
            return leaf.index_select(0, self._rows_on(leaf.device))
        leaf = getattr(leaf, "iloc", leaf)  # a column of pandas goes by its labels otherwise
        return leaf[self._start : self._end] if self._lie_together else leaf[list(self._samples)]

    def of_list(self, leaf: list[Any] | tuple[Any, ...]) -> Any:
        return same_kind(leaf, [leaf[sample] for sample in self._samples])

    def _rows_on(self, device: torch.device) -> Tensor:
        if device not in self._rows:
            rows = torch.tensor(self._samples)
            if device.type == "cuda":
                rows = rows.pin_memory()  # else the host would wait for the copy
            self._rows[device] = rows.to(device, non_blocking=True)
        return self._rows[device]
