"""Joins several batches into one, which may then be cut in another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from macrobatch._cut.token_groups import MASK, name_parts
from macrobatch._cut.trees import Leaf, flatten, has_samples, leaves, replace_leaves
from macrobatch.errors import BatchError


def joined(batches: Sequence[Any], padding: Mapping[Any, int], unknown: int | None = 0) -> Any:
    """Join several batches into one, padded to the widest of them, on the side on which they are padded.

    `padding` has the value by the name of a field, or by the known part of it ("labels" of "chosen_labels"), and
    `unknown` is that of other fields; None: it is an error if one of them needs padding.
    """
    flat = [_flat(batch) for batch in batches]
    for other in flat[1:]:
        if [leaf.keys for leaf in other] != [leaf.keys for leaf in flat[0]]:
            names = [", ".join(leaf.path for leaf in one) or "nothing" for one in (flat[0], other)]
            raise BatchError(f"the batches of a window hold different things: {names[0]}, and {names[1]}.")
    at_left = _is_any_padded_at_left(flat)
    whole = [_join(same, padding, unknown, at_left) for same in zip(*flat, strict=True)]
    return replace_leaves(batches[0], flat[0], whole)


def narrowed(parts: Sequence[Any], batches: Sequence[Any]) -> list[Any]:
    """Parts of a joined batch without the columns that `joined` has padded: each as wide as the batch it came from."""
    flat = [_flat(batch) for batch in batches]
    at_left = _is_any_padded_at_left(flat)
    return [_narrowed(part, before, at_left) for part, before in zip(parts, flat, strict=True)]


def the_only_one(batches: Sequence[Any]) -> Any:
    """A collate function for windows whose batches stay as they are: each one is the only sample of a micro-batch."""
    (batch,) = batches
    return batch


def _flat(batch: Any) -> list[Leaf]:
    """The leaves of a batch, which may have no samples."""
    count = next((len(leaf) for _, leaf in leaves(batch, "") if has_samples(leaf)), 0)
    return list(flatten(batch, count))


def _are_same(some: Any, other: Any) -> bool:
    """Whether two values are equal, or both NaN."""
    if isinstance(some, Tensor) and isinstance(other, Tensor):
        return torch.equal(some, other) or bool(some.isnan().all() and other.isnan().all())
    return bool(some == other or (some != some and other != other))


def _join(same: Sequence[Leaf], padding: Mapping[Any, int], unknown: int | None, at_left: bool) -> Any:
    values = [leaf.value for leaf in same]
    refused = f"the batches of a window cannot be made one: {same[0].path}"
    if all(leaf.has_entries for leaf in same):
        return [entry for value in values for entry in value]
    if not all(isinstance(value, Tensor) for value in values):
        others = [value for value in values[1:] if has_samples(value) or not _are_same(value, values[0])]
        if not others and not has_samples(values[0]):
            return values[0]
        other = others[0] if others else values[-1]
        raise BatchError(f"{refused} is {values[0]!r} and {other!r}.")
    if not values[0].dim():
        if all(_are_same(value, values[0]) for value in values[1:]):
            return values[0]
        raise BatchError(f"{refused} is one number, another in each.")
    shapes = [tuple(value.shape) for value in values]
    if len({shape[2:] for shape in shapes}) > 1 or len(set(map(len, shapes))) > 1:
        raise BatchError(
            f"{refused} has the shapes {shapes}. Only the second dimension, that of the tokens, can be padded. Leave "
            "micro= out, or pad to one size."
        )
    if len({shape[1:2] for shape in shapes}) == 1:
        return torch.cat(values)
    name = same[0].name
    pad = padding.get(name, padding.get(name_parts(name)[0], unknown))
    if pad is None:
        raise BatchError(
            f"{refused} has the shapes {shapes}, and what pads it is not known by its name. Call it input_ids, labels "
            "or attention_mask in a dict, or pad all batches of a window to one width."
        )
    width = max(shape[1] for shape in shapes)
    return torch.cat([padded_columns(value, width - value.shape[1], pad, at_left) for value in values])


def padded_columns(value: Tensor, more: int, pad: int, at_left: bool) -> Tensor:
    """The tensor with so many more columns, at one side, which hold `pad`."""
    if not more:
        return value
    columns = value.new_full((len(value), more, *value.shape[2:]), pad)
    return torch.cat([columns, value] if at_left else [value, columns], 1)


def _narrowed(part: Any, before: Sequence[Leaf], at_left: bool) -> Any:
    """A part that is as wide as these leaves."""
    after = _flat(part)
    narrow = [_narrow(leaf.value, like.value, at_left) for leaf, like in zip(after, before, strict=True)]
    return replace_leaves(part, after, narrow)


def _narrow(value: Any, like: Any, at_left: bool) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] <= like.shape[1]:
        return value
    return (value[:, -like.shape[1] :] if at_left else value[:, : like.shape[1]]).contiguous()


def _is_any_padded_at_left(flat: Sequence[Sequence[Leaf]]) -> bool:
    """Whether any batch has a mask in which the tokens of some row begin after the first column."""
    masks = [leaf.value for leaves in flat for leaf in leaves if name_parts(leaf.name)[0] == MASK]
    masks = [mask for mask in masks if isinstance(mask, Tensor) and mask.dim() == 2]
    return any(mask.shape[1] > 0 and bool((mask[:, 0] == 0).any()) for mask in masks)
