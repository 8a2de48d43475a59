"""Which columns of a batch are padding, and known to be.

Only an attention mask tells what is padding, and only for the tensors that belong to it by their names and places:
`token_groups`, a pure function of names and shapes. How far samples reach is then read from masks and labels
(`lengths_of`): up to the last position that a mask shows or that has a label. What lies beyond is padding. Where that
is not known, nothing is trimmed, and a sample is as long as its tensor is wide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch.errors import BatchError

IGNORED = -100  # what torch's losses take for "no label here"

MASK, LABELS, DECODER = "attention_mask", "labels", "decoder"
TOKENS = ("input_ids", "inputs_embeds")
BESIDE_TOKENS = ("token_type_ids", "position_ids", "special_tokens_mask")  # one entry a token, of no use in padding
OTHER_MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # one entry a token, 0 in padding
STEMS = (MASK, LABELS, *TOKENS, *BESIDE_TOKENS, *OTHER_MASKS)

Keys = tuple[Any, ...]


class Named(NamedTuple):
    """What is known of a tensor before anybody looks into it.

    Attributes:
        keys: where it is found in its batch.
        sizes: of its dimensions beyond the samples; none for what is no tensor. Only which are equal matters.
        is_whole: whether it holds whole numbers.
    """

    keys: Keys
    sizes: tuple[int, ...]
    is_whole: bool

    @property
    def name(self) -> Any:
        return self.keys[-1] if self.keys else None

    @property
    def container(self) -> Keys:
        return self.keys[:-1]


@dataclass(frozen=True)
class TokenGroup:
    """Tensors with the same positions in their second dimension, by their places in the list of leaves.

    Attributes:
        members: all of them.
        masks: those that are 0 in padding.
        labels: those that are -100 in padding.
        is_masked: whether an attention mask tells what is padding.
        obstacle: the leaf that keeps the group from being trimmed, as it may have the same positions, or not.
        fillers: those that must hold one single value in padding, where only their width says that they belong here.
    """

    members: tuple[int, ...]
    masks: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    is_masked: bool = False
    obstacle: int | None = None
    fillers: tuple[int, ...] = ()

    @property
    def trims(self) -> bool:
        """Whether padding can be told."""
        return self.is_masked and self.obstacle is None

    @property
    def first(self) -> int:
        """The one that it is named after."""
        return self.masks[0] if self.masks else self.members[0]


def described(leaves: Iterable[tuple[Keys, Any]]) -> tuple[Named, ...]:
    """What `token_groups` wants to know of tensors and arrays; None is neither."""
    return _numbered((keys, () if leaf is None else leaf.shape[1:], _is_whole(leaf)) for keys, leaf in leaves)


def _numbered(leaves: Iterable[tuple[Keys, Sequence[int], bool]]) -> tuple[Named, ...]:
    """With equal numbers for equal sizes, so that batches that differ in length alone look the same; 0 and 1 stay."""
    numbers = {0: 0, 1: 1}
    return tuple(
        Named(keys, tuple([numbers.setdefault(int(size), len(numbers)) for size in sizes]), whole)
        for keys, sizes, whole in leaves
    )


def _is_whole(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    return getattr(getattr(leaf, "dtype", None), "kind", "") in ("i", "u")


# ---------------------------------------------------------------------------------------------- the rule


@functools.lru_cache(maxsize=256)
def token_groups(leaves: tuple[Named, ...]) -> tuple[TokenGroup, ...]:
    """Which tensors of a batch share their positions, and which of these groups can be trimmed.

    >>> ids, mask, image = [Named((name,), sizes, True) for name, sizes in
    ...                     (("input_ids", (9,)), ("attention_mask", (9,)), ("image", (3, 8, 8)))]
    >>> (group,) = token_groups((ids, mask, image))
    >>> group.members, group.trims
    ((0, 1), True)
    """
    masked = {index: _Masked(leaf, index) for index, leaf in enumerate(leaves) if _is_mask(leaf)}
    others = [index for index, leaf in enumerate(leaves) if leaf.sizes and index not in masked]
    for index in others:
        _place(index, leaves, list(masked.values()))
    for group in masked.values():
        group.settle()
    for group in list(masked.values()):
        if group.is_alone and group.affix:  # such as Longformer's global_attention_mask
            _join_plain(group, masked)
    placed = {member for group in masked.values() for member in group.members}
    unmasked = _unmasked(leaves, [index for index in others if index not in placed])
    found = (*(group.done() for group in masked.values()), *unmasked)
    return tuple(group for group in found if len(group.members) > 1 or not group.is_masked) or found


def _is_mask(leaf: Named) -> bool:
    return len(leaf.sizes) == 1 and parsed(leaf.name)[0] == MASK


@functools.lru_cache(maxsize=1024)
def parsed(name: Any) -> tuple[str | None, str]:
    """The known part of a tensor's name, and what is added to it.

    >>> parsed("chosen_input_ids"), parsed("attention_mask_rejected"), parsed("labels"), parsed("pixel_values")
    (('input_ids', 'chosen'), ('attention_mask', 'rejected'), ('labels', ''), (None, ''))
    """
    if not isinstance(name, str):
        return None, ""
    if name in STEMS:
        return name, ""
    for stem in STEMS:
        if name.endswith(f"_{stem}"):
            return stem, name[: -len(stem) - 1]
        if name.startswith(f"{stem}_"):
            return stem, name[len(stem) + 1 :]
    return None, ""


class _Masked:
    """The group of an attention mask, while its members are collected."""

    def __init__(self, mask: Named, index: int) -> None:
        self.container, self.affix, self.width = mask.container, parsed(mask.name)[1], mask.sizes[0]
        self.members, self.masks, self.labels = [index], [index], list[int]()
        self.loose: list[int] = []  # of the same width, but of an unknown name
        self.has_tokens = False
        self.obstacle: int | None = None

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    def join(self, index: int, stem: str | None) -> None:
        self.members.append(index)
        self.has_tokens |= stem in TOKENS or stem is None
        if stem in (MASK, *OTHER_MASKS):
            self.masks.append(index)
        if stem == LABELS:
            self.labels.append(index)

    def block(self, index: int) -> None:
        self.obstacle = index if self.obstacle is None else self.obstacle

    def settle(self) -> None:
        """A mask without tokens of a known name masks the only other tensor of its width; several could be features."""
        if len(self.loose) == 1 and not self.has_tokens:
            self.join(self.loose[0], None)
        elif self.loose:
            self.block(self.loose[0])

    def done(self) -> TokenGroup:
        obstacle = self.members[0] if self.is_alone else self.obstacle  # alone: nobody knows what it masks
        return TokenGroup(tuple(sorted(self.members)), tuple(self.masks), tuple(self.labels), True, obstacle)


def _place(index: int, leaves: tuple[Named, ...], masked: list[_Masked]) -> None:
    """Add a tensor to the group that it belongs to, or let it stand in the way of those it may belong to."""
    leaf = leaves[index]
    stem, affix = parsed(leaf.name)
    near, is_inside = _nearest(leaf, masked)
    if stem == LABELS and not affix and _is_of_decoder(leaf, leaves):
        affix = DECODER
    own = [group for group in near if group.affix == affix] if stem else []
    if named_after := [group for group in near if group.affix and group.affix == leaf.name]:
        own = named_after  # labels_attention_mask belongs to labels
    may_join = is_inside or (stem == LABELS and len(masked) == 1)
    if len(own) == 1 and may_join and stem != MASK:
        (group,) = own
        if leaf.sizes[0] == group.width:
            group.join(index, stem)
            return
        if stem != LABELS:  # such as a mask that is longer than its tokens, by those of a prefix
            group.block(index)
            return
    if stem and affix == DECODER and not own:
        return  # a sequence of its own, without a mask
    _block(index, leaf, stem, near)


def _nearest(leaf: Named, masked: list[_Masked]) -> tuple[list[_Masked], bool]:
    """The groups of the innermost container around a tensor that has any; else all, and it is inside of none."""
    depth = len(leaf.container)
    while depth >= 0:
        if inside := [group for group in masked if group.container == leaf.container[:depth]]:
            return inside, True
        depth -= 1
    return masked, False


def _is_of_decoder(labels: Named, leaves: tuple[Named, ...]) -> bool:
    """Whether labels have the positions of what is handed to a decoder, and not of the encoder's tokens."""
    return any(
        leaf.container == labels.container and parsed(leaf.name)[1] == DECODER and leaf.sizes[:1] == labels.sizes[:1]
        for leaf in leaves
    )


def _block(index: int, leaf: Named, stem: str | None, near: list[_Masked]) -> None:
    """A tensor that may have the positions of some groups, or be as wide by accident."""
    name = str(leaf.name)
    if named := [g for g in near if g.affix and (name.startswith(f"{g.affix}_") or name.endswith(f"_{g.affix}"))]:
        near = named
    suspects = [group for group in near if group.width in leaf.sizes]
    for group in suspects:
        if stem is None and leaf.sizes[0] == group.width and leaf.sizes.count(group.width) == len(suspects) == 1:
            group.loose.append(index)
        else:
            group.block(index)


def _join_plain(alone: _Masked, masked: dict[int, _Masked]) -> None:
    """Let a mask that has no tensors of its own go with those of the plain attention mask beside it."""
    for plain in masked.values():
        if plain.container == alone.container and not plain.affix and plain.width == alone.width:
            plain.join(alone.masks[0], MASK)
            del masked[alone.masks[0]]
            return


def _unmasked(leaves: tuple[Named, ...], indices: Sequence[int]) -> list[TokenGroup]:
    """Tokens and labels for which no mask says what is padding."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for index in indices:
        leaf = leaves[index]
        stem, affix = parsed(leaf.name)
        if stem in TOKENS:
            found.setdefault((leaf.container, affix, leaf.sizes[0]), []).append(index)
    for index in indices:
        leaf = leaves[index]
        stem, affix = parsed(leaf.name)
        if stem == LABELS and leaf.is_whole and leaf.sizes[0] > 1:  # else they are classes, not tokens
            affix = DECODER if not affix and _is_of_decoder(leaf, leaves) else affix
            found.setdefault((leaf.container, affix, leaf.sizes[0]), []).append(index)
    return [
        TokenGroup(tuple(members), labels=tuple(i for i in members if parsed(leaves[i].name)[0] == LABELS))
        for members in found.values()
    ]


def tells_length(leaf: Named) -> bool:
    """Whether somebody who wants tokens counted would expect a tensor to say how long samples are."""
    return bool(leaf.sizes) and parsed(leaf.name)[0] in (MASK, LABELS)


def group_of_width(leaves: tuple[Named, ...], tensors: Sequence[Any], longest: int) -> TokenGroup | None:
    """All tensors with one column for each position, where a user has said how long samples are.

    None, if their widths do not tell which those are.
    """
    wide = [index for index, leaf in enumerate(leaves) if leaf.sizes]
    stems = {index: parsed(leaves[index].name)[0] for index in wide}
    widths = {tensors[index].shape[1] for index in wide if tensors[index].shape[1] >= longest}
    is_named = False
    for names in ((MASK,), (LABELS,), TOKENS):
        if named := [i for i in wide if stems[i] in names and (MASK not in names or len(tensors[i].shape) == 2)]:
            widths, is_named = {tensors[index].shape[1] for index in named}, True
            break
    if (len(widths) != 1 and not is_named) or max(widths) < longest:
        return None
    members = tuple(index for index in wide if tensors[index].shape[1] in widths)
    square = [i for i in wide if stems[i] == MASK and len(tensors[i].shape) > 2 and widths & set(tensors[i].shape[1:])]
    return TokenGroup(
        members,
        obstacle=square[0] if square else None,
        masks=tuple(index for index in members if stems[index] in (MASK, *OTHER_MASKS)),
        labels=tuple(index for index in members if stems[index] == LABELS),
        is_masked=True,
        fillers=_fillers({index: stems[index] for index in members}),
    )


def _fillers(stems: dict[int, str | None]) -> tuple[int, ...]:
    """Tensors of unknown names beside tokens of known ones: they could be features."""
    has_tokens = any(stem in TOKENS for stem in stems.values())
    return tuple(index for index, stem in stems.items() if stem is None) if has_tokens else ()


# ---------------------------------------------------------------------------------------------- what tensors hold


def width_of(group: TokenGroup, tensors: Sequence[Any]) -> int:
    """How many tokens a sample of a group has, padding included."""
    return max(
        math.prod(tensors[i].shape[1:]) if _is_whole(tensors[i]) and not group.is_masked else int(tensors[i].shape[1])
        for i in group.members
    )


def lengths_of(group: TokenGroup, tensors: Sequence[Any]) -> list[int]:
    """How long each sample is: up to its last position that a mask shows, or that has a label."""
    if not group.trims:
        return [width_of(group, tensors)] * len(tensors[group.members[0]])
    shown: dict[torch.device, Tensor] = {}
    for index in (*group.masks, *group.labels):
        used = _used(group, index, tensors[index])
        shown[used.device] = shown[used.device] | used if used.device in shown else used
    reached = [_reach(used) for used in shown.values()]
    return reached[0] if len(reached) == 1 else list(map(max, *reached))


def _used(group: TokenGroup, index: int, tensor: Any) -> Tensor:
    """(samples, positions): where a mask or labels hold something else than padding."""
    tensor = torch.as_tensor(tensor)
    used = _shown(tensor) if index in group.masks else tensor != IGNORED
    return used if used.dim() == 2 else used.flatten(2).any(2)


def _shown(mask: Tensor) -> Tensor:
    """What a mask does not hide: where it is not 0, or, if it is one that is added to scores, where it is."""
    if mask.is_floating_point() and not bool((mask > 0).any()):
        return mask >= 0  # all of it, where it is 0 throughout: it may hide nothing
    return mask != 0


def _reach(used: Tensor) -> list[int]:
    """For each row, the position of the last True, counted from 1; 0 where there is none."""
    if not used.numel():
        return [0] * len(used)
    positions = torch.arange(1, used.shape[1] + 1, device=used.device, dtype=torch.int32)
    reach: list[int] = (used * positions).amax(1).tolist()
    return reach


def require_padding(group: TokenGroup, tensors: Sequence[Any], paths: Sequence[str], lengths: Sequence[int]) -> None:
    """Beyond the lengths that a user has said, there may be nothing but padding."""
    if group.obstacle is not None:
        raise BatchError(
            f"{paths[group.obstacle]} has the shape {tuple(tensors[group.obstacle].shape)}: by_tokens would have to "
            "trim more than its second dimension. Make such a mask in loss_fn, of the micro-batch."
        )
    for index in (*group.masks, *group.labels):
        for sample, reach in enumerate(_reach(_used(group, index, tensors[index]))):
            if reach > lengths[sample]:
                what = "an entry that is not 0" if index in group.masks else f"a label that is not {IGNORED}"
                raise BatchError(
                    f"length= says that sample {sample} ends after {lengths[sample]} positions, and by_tokens would "
                    f"trim off what lies beyond, but {paths[index]} has {what} at position {reach - 1}. Let length= "
                    "return lengths that cover it: of several tensors the longest."
                )
    for index in group.fillers:
        tensor = torch.as_tensor(tensors[index])
        ends = torch.as_tensor(lengths, device=tensor.device)
        cut = tensor[torch.arange(tensor.shape[1], device=tensor.device) >= ends[:, None]]
        if len(cut) and not bool((cut == cut[0]).all()):
            raise BatchError(
                f"{paths[index]} is as wide as the tokens, but does not hold one single value beyond the lengths that "
                "length= says: by_tokens cannot tell whether it has positions, to be trimmed off there, or features. "
                "Fill it up with one value there; or, if its width is an accident, give it another second dimension, "
                "e.g. features[:, None]."
            )


def why_untrimmed(group: TokenGroup, tensors: Sequence[Any], paths: Sequence[str]) -> str | None:
    """What a user should know of a group that is not trimmed though it seems to have padding."""
    width = width_of(group, tensors)
    if group.obstacle is not None and min(lengths_of(replace(group, obstacle=None), tensors), default=width) < width:
        mask, other = paths[group.first], paths[group.obstacle]
        about = f"{other} may have one column for each of its positions, or may not"
        if other == mask:
            about = "no tensor is known to have its positions"
        return (
            f"nothing is trimmed where {mask} shows padding, as {about}. Say how long samples are, with length=: then "
            "all tensors of that width are trimmed. Or, if the width is an accident, give that tensor another second "
            "dimension, e.g. features[:, None]."
        )
    if not group.is_masked and group.labels:
        reach = [_reach(_used(group, index, tensors[index])) for index in group.labels]
        if min((extent for extents in reach for extent in extents), default=width) < width:
            return (
                f"nothing is trimmed where {paths[group.labels[0]]} ends with {IGNORED}: without an attention_mask it "
                "is not known whether the tokens there are padding. Add one to the batch, or say how long samples "
                "are, with length=."
            )
    return None


# ---------------------------------------------------------------------------------------------- lists of samples

Lengths = dict[Keys, int]  # by the place of the first tensor of each sequence


def sequences_of(sample: Sequence[tuple[Keys, Any]]) -> tuple[Lengths, Lengths]:
    """How long one sample of a list is in each of its sequences, and labels that have the positions of another one."""
    values = [value for _, value in sample]
    sizes = [_sizes(value) for value in values]
    whole = [_is_whole(value) or _begins_with_int(value) for value in values]
    lengths, joined = Lengths(), Lengths()
    for group in token_groups(_numbered(zip([keys for keys, _ in sample], sizes, whole, strict=True))):
        first = group.first
        full = max(math.prod(sizes[i]) if whole[i] and not group.is_masked else sizes[i][0] for i in group.members)
        lengths[sample[first][0]] = _length_in(group, values, full) if group.trims else full
        joined |= {sample[i][0]: sizes[i][0] for i in group.labels if i != first}
    return lengths, joined


def rows_of(samples: Sequence[tuple[Lengths, Lengths]]) -> list[tuple[int, ...]]:
    """How long each sample is in each sequence that any has.

    Labels are a sequence of their own as soon as they have other positions than the rest in any sample.
    """
    places = dict.fromkeys(place for lengths, _ in samples for place in lengths)
    return [tuple(lengths.get(place, joined.get(place, 0)) for place in places) for lengths, joined in samples]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return tuple(value.shape[1:] if len(value.shape) > 1 and value.shape[0] == 1 else value.shape)
    if value and all(isinstance(inner, list | tuple) for inner in value):
        return len(value), max(map(len, value))
    return (len(value),)


def _begins_with_int(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, int)


def _length_in(group: TokenGroup, values: Sequence[Any], full: int) -> int:
    length = 0
    for index in (*group.masks, *group.labels):
        value, padding = values[index], 0 if index in group.masks else IGNORED
        if isinstance(value, list | tuple) and all(isinstance(entry, int) for entry in value[-1:]):
            length = max(length, next((end for end in range(full, length, -1) if value[end - 1] != padding), 0))
        else:
            length = max(length, *_reach(_used(group, index, torch.as_tensor(value).reshape(1, full, -1))))
        if length == full:
            break
    return length
