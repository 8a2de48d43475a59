"""Finds out how long each sample is without its padding.

A sample ends at its last position that a mask shows or that has a label; the rest is padding. If `token_groups` finds
no mask for a tensor, nothing is trimmed, and a sample is as long as its tensor is wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from macrobatch._cut.token_groups import Keys, TokenGroup, is_integer, leaf_infos, token_groups
from macrobatch.errors import BatchError

IGNORED = -100  # the label that torch's losses skip
HIDDEN = -9_000.0  # added to a score, it makes exp() 0; -10,000 and less are common, also in bfloat16


def width_of(group: TokenGroup, tensors: Sequence[Any]) -> int:
    """The number of tokens in a sample of a group, padding included."""
    return max(
        math.prod(tensors[i].shape[1:]) if is_integer(tensors[i]) and not group.is_masked else int(tensors[i].shape[1])
        for i in group.members
    )


def lengths_of(group: TokenGroup, tensors: Sequence[Any]) -> list[int]:
    """The length of each sample: up to its last position that a mask shows or that has a label."""
    if not group.can_trim:
        return [width_of(group, tensors)] * len(tensors[group.members[0]])
    shown: dict[torch.device, Tensor] = {}
    for index in (*group.masks, *group.labels):
        used = _content(group, index, tensors[index])
        shown[used.device] = shown[used.device] | used if used.device in shown else used
    lengths = [_last_positions(used) for used in shown.values()]
    return lengths[0] if len(lengths) == 1 else list(map(max, *lengths))


def _content(group: TokenGroup, index: int, tensor: Any) -> Tensor:
    """Where a mask or labels are not padding, shape (samples, positions)."""
    tensor = torch.as_tensor(tensor)
    used = _attended(tensor) if index in group.masks else tensor != IGNORED
    return used if used.dim() == 2 else used.flatten(2).any(2)


def _attended(mask: Tensor) -> Tensor:
    """Where a mask shows a position: where it is not 0, or where a mask that is added to scores does not hide them."""
    if mask.is_floating_point() and not bool((mask > 0).any()):
        return mask > HIDDEN  # it is added; if it is 0 everywhere, it hides nothing
    return mask != 0


def _last_positions(used: Tensor) -> list[int]:
    """For each row, the position of its last True, counted from 1; 0 if there is none."""
    if not used.numel():
        return [0] * len(used)
    positions = torch.arange(1, used.shape[1] + 1, device=used.device, dtype=torch.int32)
    reach: list[int] = (used * positions).amax(1).tolist()
    return reach


def require_padding(group: TokenGroup, tensors: Sequence[Any], paths: Sequence[str], lengths: Sequence[int]) -> None:
    """Raise if there is anything but padding beyond the lengths that the user gave."""
    if group.obstacle is not None:
        raise BatchError(
            f"{paths[group.obstacle]} has the shape {tuple(tensors[group.obstacle].shape)}, but by_tokens trims only "
            "the second dimension of a tensor. Build such a mask in loss_fn, from the micro-batch."
        )
    unnamed = [i for i in group.members if i not in (*group.masks, *group.labels, *group.constants)]
    labels = [i for i in unnamed if _holds_ignored(tensors[i])]
    constants = [i for i in unnamed if torch.as_tensor(tensors[i]).dtype == torch.bool]
    for index in (*group.masks, *group.labels, *labels):
        for sample, reach in enumerate(_last_positions(_content(group, index, tensors[index]))):
            if reach > lengths[sample]:
                what = "an entry that is not 0" if index in group.masks else f"a label that is not {IGNORED}"
                raise BatchError(
                    f"by length=, sample {sample} ends after {lengths[sample]} positions and the rest is padding, but "
                    f"{paths[index]} has {what} at position {reach - 1}. Let length= return lengths that cover all "
                    "tensors."
                )
    for index in (*group.constants, *constants):
        tensor = torch.as_tensor(tensors[index])
        ends = torch.as_tensor(lengths, device=tensor.device)
        cut = tensor[torch.arange(tensor.shape[1], device=tensor.device) >= ends[:, None]]
        if len(cut) and not bool((cut == cut[0]).all()):
            raise BatchError(
                f"{paths[index]} is as wide as the tokens, but holds several values beyond the lengths of length=: "
                "by_tokens cannot tell whether its columns are positions, which it would trim, or features. If they "
                "are positions, pad them with a single value. If they are features, add a dimension, e.g. "
                "features[:, None]."
            )


def _holds_ignored(tensor: Any) -> bool:
    """Whether a tensor holds labels, whatever its name is: nothing else holds -100."""
    tensor = torch.as_tensor(tensor)
    return not tensor.is_floating_point() and tensor.dtype != torch.bool and bool((tensor == IGNORED).any())


def why_untrimmed(group: TokenGroup, tensors: Sequence[Any], paths: Sequence[str]) -> str | None:
    """The warning for a group that is not trimmed though it seems to have padding; None if there is nothing to say."""
    width = width_of(group, tensors)
    if group.obstacle is not None and min(lengths_of(replace(group, obstacle=None), tensors), default=width) < width:
        mask, other = paths[group.first], paths[group.obstacle]
        reason = f"{other} may or may not have a column for each position"
        if other == mask:
            reason = "no other tensor is known to have the same positions"
        return (
            f"the padding in {mask} is not trimmed, because {reason}. Pass the lengths of the samples with length=: "
            "then all tensors of that width are trimmed. Or, if the width is a coincidence, add a dimension to that "
            "tensor, e.g. features[:, None]."
        )
    if not group.is_masked and group.labels:
        reach = [_last_positions(_content(group, index, tensors[index])) for index in group.labels]
        if min((extent for extents in reach for extent in extents), default=width) < width:
            return (
                f"nothing is trimmed where {paths[group.labels[0]]} ends with {IGNORED}: without an attention_mask the "
                "tokens there may not be padding. Add a mask to the batch, or pass the lengths of the samples with "
                "length=."
            )
    return None


# ---------------------------------------------------------------------------------------------- lists of samples

PlaceLengths = dict[Keys, int]  # by the place of each sequence's first tensor


def sequence_lengths(sample: Sequence[tuple[Keys, Any]]) -> tuple[PlaceLengths, PlaceLengths]:
    """The lengths of one sample of a list in each of its sequences, and of labels that joined a sequence."""
    values = [value for _, value in sample]
    sizes = [_sizes(value) for value in values]
    whole = [is_integer(value) or _starts_with_int(value) for value in values]
    lengths, label_lengths = PlaceLengths(), PlaceLengths()
    for group in token_groups(leaf_infos(zip([keys for keys, _ in sample], sizes, whole, strict=True))):
        first = group.first
        full = max(math.prod(sizes[i]) if whole[i] and not group.is_masked else sizes[i][0] for i in group.members)
        lengths[sample[first][0]] = _sample_length(group, values, full) if group.can_trim else full
        label_lengths |= {sample[i][0]: sizes[i][0] for i in group.labels if i != first}
    return lengths, label_lengths


def sample_lengths(samples: Sequence[tuple[PlaceLengths, PlaceLengths]]) -> list[tuple[int, ...]]:
    """The lengths of each sample in all sequences that any sample has; labels are one if any has them apart."""
    places = dict.fromkeys(place for lengths, _ in samples for place in lengths)
    return [tuple(lengths.get(place, labels.get(place, 0)) for place in places) for lengths, labels in samples]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return tuple(value.shape[1:] if len(value.shape) > 1 and value.shape[0] == 1 else value.shape)
    if value and all(isinstance(inner, list | tuple) for inner in value):
        return len(value), max(map(len, value))
    return (len(value),)


def _starts_with_int(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, int)


def _sample_length(group: TokenGroup, values: Sequence[Any], full: int) -> int:
    length = 0
    for index in (*group.masks, *group.labels):
        value, padding = values[index], 0 if index in group.masks else IGNORED
        if isinstance(value, list | tuple) and all(isinstance(entry, int) for entry in value[-1:]):
            length = max(length, next((end for end in range(full, length, -1) if value[end - 1] != padding), 0))
        else:
            length = max(length, *_last_positions(_content(group, index, torch.as_tensor(value).reshape(1, full, -1))))
        if length == full:
            break
    return length
