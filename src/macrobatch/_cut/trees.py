"""Walks and rebuilds batches that are nested in any way.

Dicts and other mappings, lists, tuples, named tuples and dataclasses are containers; everything else is a leaf. In
`flatten`, a list with one entry per sample is a leaf too.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import UserDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from macrobatch.errors import BatchError


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All leaves of a tree, with their paths as a user would write them, such as batch['x'][0]."""
    branches = children(tree)
    if branches is None:
        yield path, tree
    else:
        for key, child in branches:
            yield from leaves(child, _child_path(tree, path, key))


def _child_path(tree: Any, path: str, key: Any) -> str:
    return f"{path}.{key}" if has_fields(tree) else f"{path}[{key!r}]"


class Leaf(NamedTuple):
    """A leaf of a batch."""

    keys: tuple[Any, ...]
    path: str  # as a user would write it
    value: Any
    has_entries: bool = False  # whether it is a list with one entry per sample

    @property
    def name(self) -> Any:
        """Its last key, or None."""
        return self.keys[-1] if self.keys else None


def flatten(tree: Any, count: int, keys: tuple[Any, ...] = (), path: str = "batch") -> Iterator[Leaf]:
    """The leaves of a batch of `count` samples. A list without tensors and containers is a leaf too."""
    _require_cuttable(tree, path)
    branches, has_entries = children(tree), False
    if isinstance(tree, list | tuple) and not has_fields(tree):
        has_entries = _has_entries(tree, count)
        if has_entries or not any(children(entry) is not None or has_samples(entry) for entry in tree):
            branches = None
    if branches is None:
        yield Leaf(keys, path, tree, has_entries)
    else:
        for key, child in branches:
            yield from flatten(child, count, (*keys, key), _child_path(tree, path, key))


def replace_leaves(tree: Any, leaves: Sequence[Leaf], values: Iterable[Any]) -> Any:
    """A tree of the same types with other values for its leaves, which `flatten` has found."""
    following = iter(values)
    return rebuild(tree, lambda _: next(following), {id(leaf.value) for leaf in leaves})


def require_told_apart(tree: Any, path: str, count: int, containers: set[str]) -> None:
    """Raise an error for a list in a batch that may be a list of samples: `count` tensors with `count` rows each."""
    # `containers` has the paths of lists that were longer or shorter than an earlier batch: they are containers. Two
    # tensors, and the tensors of a tuple, count as parts of the batch, such as a pair.
    for key, child in children(tree) or ():
        inner = _child_path(tree, path, key)
        if isinstance(child, list) and child and all(_first_with_samples(entry) is not None for entry in child):
            if len(child) != count or not _are_alike(child):
                containers.add(inner)
            elif count > 2 and inner not in containers:
                raise BatchError(
                    f"{inner} is a list of {count} tensors with {count} rows each, in a batch of {count} samples: has "
                    "it one tensor a sample, or is each tensor to be cut? Pass a list of samples with collate= in the "
                    "first case, and a tuple in place of the list in the second."
                )
        require_told_apart(child, inner, count, containers)


def require_no_list_of_samples(batch: Any) -> None:
    """Raise an error for a batch that may be a list of samples: three or more similar dicts, tuples or objects."""
    # Two entries, and the entries of a tuple, count as parts of the batch, such as a pair.
    if not isinstance(batch, list) or len(batch) < 3 or any(children(entry) is None for entry in batch):
        return
    if all(_first_with_samples(entry) is not None for entry in batch) and _are_alike(batch):
        raise BatchError(
            f"the batch is a list of {len(batch)} entries alike: is each of them a sample, or has each of them a part "
            "of all samples? Pass collate= in the first case, which makes a micro-batch of a list of samples, and a "
            "tuple in place of the list in the second."
        )


def _are_alike(entries: Sequence[Any]) -> bool:
    """Whether all entries have the same structure and dtypes, as samples have."""
    kinds = {tuple((path, str(getattr(leaf, "dtype", type(leaf)))) for path, leaf in leaves(e, "")) for e in entries}
    return len(kinds) == 1


def _require_cuttable(leaf: Any, path: str) -> None:
    kind = None
    if isinstance(leaf, PackedSequence):
        kind = "packed sequence"
    elif isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo)):
        kind = "nested tensor" if leaf.is_nested else f"tensor of layout {leaf.layout}"
    if kind is not None:
        raise BatchError(
            f"{path} is a {kind}, which cannot be cut. Pass a list of samples, and build the {kind} in collate=. Or "
            "pass a padded tensor with an attention mask."
        )


MOST_OBJECTS = 1000  # that a search looks at: an object may refer to a whole dataset
PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)


def has_samples_inside(leaf: Any, count: int) -> bool:
    """Whether an object that is no container holds a tensor with a row for each of `count` samples."""
    found: dict[int, Any] = {id(leaf): leaf}
    pending = [leaf]
    for one in pending:  # the list grows while it is read
        if isinstance(one, Tensor):
            if one.dim() > 0 and one.shape[0] == count:
                return True
            continue
        if one is None or isinstance(one, PLAIN) or hasattr(one, "dtype"):
            continue
        branches = children(one)
        inner = _attributes(one) if branches is None else [child for _, child in branches[:MOST_OBJECTS]]
        fresh = {id(other): other for other in inner if id(other) not in found}
        found |= fresh
        pending += fresh.values()
        if len(pending) > MOST_OBJECTS:
            return False
    return False


def _attributes(thing: object) -> list[Any]:
    slots = (name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()))
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]


def _has_entries(tree: Any, count: int) -> bool:
    """Whether a list or tuple has one entry per sample, such as a text; one with tensors is a container."""
    if len(tree) != count or isinstance(tree, torch.Size):
        return False
    if count and all(isinstance(entry, list | tuple) and len(entry) == count for entry in tree):
        return False  # `default_collate` turns samples that are tuples of texts into a list with one tuple per field
    return _first_with_samples(tree) is None


def count_samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor."""
    first = _first_with_samples(batch)
    if first is None:
        raise BatchError(
            f"the batch has no tensor that could be cut: got {type(batch).__name__}. Pass tensors with a common first "
            "dimension, in dicts, lists, tuples or dataclasses; or a list of samples with collate=."
        )
    return int(first.size(0) if isinstance(first, Tensor) else first.shape[0])


def _first_with_samples(tree: Any) -> Any:
    """The first leaf with a first dimension, or None."""
    return next((leaf for _, leaf in leaves(tree, "") if has_samples(leaf)), None)


def cuts_itself(tree: Any) -> bool:
    """Whether a container has a size of its own, and is cut by indexing, such as a TensorDict."""
    return isinstance(getattr(tree, "batch_size", None), torch.Size) and hasattr(tree, "__getitem__")


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values of a container; None for a leaf."""
    if cuts_itself(tree):
        return None
    if isinstance(tree, Mapping | UserDict):
        return list(tree.items())
    if has_fields(tree):
        names = getattr(tree, "_fields", ()) or [field.name for field in dataclasses.fields(tree)]
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    return None


def has_fields(tree: Any) -> bool:
    """Whether a value is a dataclass instance or a named tuple."""
    return not isinstance(tree, type | Mapping) and (
        dataclasses.is_dataclass(tree) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))
    )


def rebuild(tree: Any, change: Callable[[Any], Any], whole: Container[int] = ()) -> Any:
    """A tree of the same types with changed leaves; containers whose ids are in `whole` are leaves too."""
    branches = None if id(tree) in whole else children(tree)
    if branches is None:
        return change(tree)
    changed = {key: rebuild(child, change, whole) for key, child in branches}
    if isinstance(tree, list | tuple):
        return sequence_like(tree, list(changed.values()))
    if type(tree) is dict or not (has_fields(tree) or hasattr(tree, "__setitem__")):
        return changed
    other = copy.copy(tree)  # keeps its other attributes
    for key, value in changed.items():
        if has_fields(tree):
            object.__setattr__(other, key, value)  # works for frozen dataclasses too
        else:
            other[key] = value
    return other


def sequence_like(tree: list[Any] | tuple[Any, ...], entries: list[Any]) -> Any:
    """A list or tuple of the same type with other entries."""
    if type(tree) is list:
        return entries
    if isinstance(tree, torch.Size):
        return torch.Size(entries)
    if isinstance(tree, tuple):
        return tuple.__new__(type(tree), entries)  # whatever arguments the subclass takes
    other = copy.copy(tree)
    other[:] = entries
    return other


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree of the same types with all tensors changed."""
    return rebuild(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def copy_shared(tree: Any, shares_memory: Callable[[Tensor], bool]) -> Any:
    """A tree with copies of its arrays, and of its tensors that share memory with others."""

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_with_layout(leaf) if shares_memory(leaf) else leaf
        return leaf.copy() if has_samples(leaf) and hasattr(leaf, "copy") else leaf

    return rebuild(tree, copy_leaf)


ALIGNED = 256  # bytes: no kernel depends on a coarser alignment


def copy_with_layout(tensor: Tensor) -> Tensor:
    """A copy with the same memory alignment: kernels choose their code by it, which changes the last bits of results.

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
    """Whether a leaf is a tensor or an array with a first dimension."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0  # a nested tensor has no shape
    return (hasattr(leaf, "dtype") or cuts_itself(leaf)) and len(getattr(leaf, "shape", ())) > 0


def address(tensor: Tensor) -> int | None:
    """The address of a strided tensor's storage; None for others."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None


class Selection:
    """Selects the same samples from each leaf."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._is_contiguous = samples[-1] + 1 - samples[0] == len(samples)
        self._index = slice(samples[0], samples[-1] + 1) if self._is_contiguous else list(samples)
        self._rows: dict[torch.device, Tensor] = {}

    def of_tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and (not self._is_contiguous or leaf.layout != torch.strided):
            return leaf.index_select(0, self._rows_on(leaf.device))
        leaf = getattr(leaf, "iloc", leaf)  # a pandas column would index by its labels
        return leaf[self._index]

    def of_list(self, leaf: list[Any] | tuple[Any, ...]) -> Any:
        return sequence_like(leaf, [leaf[sample] for sample in self._samples])

    def _rows_on(self, device: torch.device) -> Tensor:
        if device not in self._rows:
            rows = torch.tensor(self._samples)
            if device.type == "cuda":
                rows = rows.pin_memory()  # otherwise the host would wait for the copy
            self._rows[device] = rows.to(device, non_blocking=True)
        return self._rows[device]
