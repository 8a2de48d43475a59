"""Decides which tensors of a batch share their token positions, by their names and shapes only.

An attention mask belongs to the tensors beside it that have a known name and the same width. `padding` then reads the
lengths from the masks and labels of each group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MASK, LABELS, DECODER = "attention_mask", "labels", "decoder"
TOKENS = ("input_ids", "inputs_embeds")
BESIDE_TOKENS = ("token_type_ids", "position_ids", "special_tokens_mask")  # one entry per token
OTHER_MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # one entry per token, 0 in padding
STEMS = (MASK, LABELS, *TOKENS, *BESIDE_TOKENS, *OTHER_MASKS)

Keys = tuple[Any, ...]


class LeafInfo(NamedTuple):
    """A tensor of a batch without its values."""

    keys: Keys  # its place in the batch
    sizes: tuple[int, ...]  # of its dimensions after the samples; empty for other leaves. Only their equality matters
    is_integer: bool

    @property
    def name(self) -> Any:
        return self.keys[-1] if self.keys else None

    @property
    def stem(self) -> str | None:
        """The known part of its name."""
        return name_parts(self.name)[0]

    @property
    def container(self) -> Keys:
        return self.keys[:-1]


@dataclass(frozen=True)
class TokenGroup:
    """Tensors with the same token positions in their second dimension, by their indices in the list of leaves."""

    members: tuple[int, ...]
    masks: tuple[int, ...] = ()  # the members that are 0 in padding
    labels: tuple[int, ...] = ()  # the members that are -100 in padding
    is_masked: bool = False  # whether an attention mask shows what is padding
    obstacle: int | None = None  # a leaf that may or may not share the positions, so that nothing can be trimmed
    constants: tuple[int, ...] = ()  # members only by their width, which must hold a single value in padding

    @property
    def can_trim(self) -> bool:
        """Whether the padding is known, so that it can be trimmed."""
        return self.is_masked and self.obstacle is None

    @property
    def first(self) -> int:
        """The member whose place identifies the group."""
        return self.masks[0] if self.masks else self.members[0]


def leaf_infos(leaves: Iterable[tuple[Keys, Sequence[int], bool]]) -> tuple[LeafInfo, ...]:
    """Infos with numbers in place of sizes, so that batches that differ only in length look the same; 0 and 1 stay."""
    numbers = {0: 0, 1: 1}
    return tuple(
        LeafInfo(keys, tuple([numbers.setdefault(int(size), len(numbers)) for size in sizes]), whole)
        for keys, sizes, whole in leaves
    )


def is_integer(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    return getattr(getattr(leaf, "dtype", None), "kind", "") in ("i", "u")


# ---------------------------------------------------------------------------------------------- the rule


@functools.lru_cache(maxsize=256)
def token_groups(leaves: tuple[LeafInfo, ...]) -> tuple[TokenGroup, ...]:
    """Group the tensors of a batch that share their positions, and decide which groups can be trimmed."""
    masked = {
        index: _MaskGroup(leaf, index)
        for index, leaf in enumerate(leaves)
        if len(leaf.sizes) == 1 and leaf.stem == MASK
    }
    others = [index for index, leaf in enumerate(leaves) if leaf.sizes and index not in masked]
    for index in others:
        _assign(index, leaves, list(masked.values()))
    for group in masked.values():
        group.resolve_unnamed()
    for group in list(masked.values()):
        if group.is_alone and group.affix:  # such as Longformer's global_attention_mask
            _join_plain_mask(group, masked)
    placed = {member for group in masked.values() for member in group.members}
    unmasked = _groups_without_mask(leaves, [index for index in others if index not in placed])
    found = (*(group.token_group() for group in masked.values()), *unmasked)
    return tuple(group for group in found if len(group.members) > 1 or not group.is_masked) or found


@functools.lru_cache(maxsize=1024)
def name_parts(name: Any) -> tuple[str | None, str]:
    """The known part of a tensor's name, and its prefix or suffix: ("input_ids", "chosen") of chosen_input_ids."""
    if name in STEMS:
        return name, ""
    for stem in STEMS if isinstance(name, str) else ():
        if name.endswith(f"_{stem}"):
            return stem, name[: -len(stem) - 1]
        if name.startswith(f"{stem}_"):
            return stem, name[len(stem) + 1 :]
    return None, ""


class _MaskGroup:
    """Collects the members of an attention mask's group."""

    def __init__(self, mask: LeafInfo, index: int) -> None:
        self.container, self.affix, self.width = mask.container, name_parts(mask.name)[1], mask.sizes[0]
        self.members, self.masks, self.labels = [index], [index], list[int]()
        self.unnamed: list[int] = []  # tensors of the same width with an unknown name
        self.has_tokens = False
        self.obstacle: int | None = None

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    def add(self, index: int, stem: str | None) -> None:
        self.members.append(index)
        self.has_tokens |= stem in TOKENS or stem is None
        if stem in (MASK, *OTHER_MASKS):
            self.masks.append(index)
        if stem == LABELS:
            self.labels.append(index)

    def block(self, index: int) -> None:
        self.obstacle = index if self.obstacle is None else self.obstacle

    def resolve_unnamed(self) -> None:
        """Add the only unnamed tensor if the mask has no tokens of a known name; several could be features."""
        if len(self.unnamed) == 1 and not self.has_tokens:
            self.add(self.unnamed[0], None)
        elif self.unnamed:
            self.block(self.unnamed[0])

    def token_group(self) -> TokenGroup:
        obstacle = self.members[0] if self.is_alone else self.obstacle  # alone: it is unknown what it masks
        return TokenGroup(tuple(sorted(self.members)), tuple(self.masks), tuple(self.labels), True, obstacle)


def _assign(index: int, leaves: tuple[LeafInfo, ...], masked: list[_MaskGroup]) -> None:
    """Add a tensor to the group that it belongs to, or make it an obstacle of the groups that it may belong to."""
    leaf = leaves[index]
    stem, affix = _stem_and_affix(leaf, leaves)
    near, is_inside = _nearest_groups(leaf, masked)
    own = [group for group in near if group.affix == affix] if stem else []
    if named_after := [group for group in near if group.affix and group.affix == leaf.name]:
        own = named_after  # labels_attention_mask belongs to labels
    may_join = is_inside or (stem == LABELS and len(masked) == 1)
    if len(own) == 1 and may_join and stem != MASK:
        (group,) = own
        if leaf.sizes[0] == group.width:
            group.add(index, stem)
            return
        if stem != LABELS:  # e.g. a mask that also covers a prefix before the tokens
            group.block(index)
            return
    if stem and affix == DECODER and not own:
        return  # a separate sequence without a mask
    _block(index, leaf, stem, near)


def _nearest_groups(leaf: LeafInfo, masked: list[_MaskGroup]) -> tuple[list[_MaskGroup], bool]:
    """The groups in the innermost container around a tensor that has any, and True; otherwise all groups, and False."""
    for depth in range(len(leaf.container), -1, -1):
        if inside := [group for group in masked if group.container == leaf.container[:depth]]:
            return inside, True
    return masked, False


def _stem_and_affix(leaf: LeafInfo, leaves: tuple[LeafInfo, ...]) -> tuple[str | None, str]:
    """The parts of a tensor's name. Labels with the positions of the decoder's inputs belong to the decoder."""
    stem, affix = name_parts(leaf.name)
    place = leaf.container, DECODER, leaf.sizes[:1]
    if (stem, affix) == (LABELS, "") and any(
        (other.container, name_parts(other.name)[1], other.sizes[:1]) == place for other in leaves
    ):
        affix = DECODER
    return stem, affix


def _block(index: int, leaf: LeafInfo, stem: str | None, near: list[_MaskGroup]) -> None:
    """Make a tensor an obstacle, or an unnamed candidate, of the groups whose width it has."""
    name = str(leaf.name)
    if named := [g for g in near if g.affix and (name.startswith(f"{g.affix}_") or name.endswith(f"_{g.affix}"))]:
        near = named
    suspects = [group for group in near if group.width in leaf.sizes]
    for group in suspects:
        if stem is None and leaf.sizes[0] == group.width and leaf.sizes.count(group.width) == len(suspects) == 1:
            group.unnamed.append(index)
        else:
            group.block(index)


def _join_plain_mask(alone: _MaskGroup, masked: dict[int, _MaskGroup]) -> None:
    """Move a mask without other members into the group of the plain attention mask beside it."""
    for plain in masked.values():
        if plain.container == alone.container and not plain.affix and plain.width == alone.width:
            plain.add(alone.masks[0], MASK)
            del masked[alone.masks[0]]
            return


def _groups_without_mask(leaves: tuple[LeafInfo, ...], indices: Sequence[int]) -> list[TokenGroup]:
    """The groups of tokens and labels that have no mask."""
    tokens = [index for index in indices if leaves[index].stem in TOKENS]
    whole = [index for index in indices if leaves[index].is_integer and leaves[index].sizes[0] > 1]
    labels = [index for index in whole if leaves[index].stem == LABELS]  # the others are classes, not tokens
    found: dict[tuple[Any, ...], list[int]] = {}
    for index in (*tokens, *labels):
        leaf, (_, affix) = leaves[index], _stem_and_affix(leaves[index], leaves)
        found.setdefault((leaf.container, affix, leaf.sizes[0]), []).append(index)
    return [TokenGroup(tuple(some), labels=tuple(i for i in some if i in labels)) for some in found.values()]


def group_of_width(leaves: tuple[LeafInfo, ...], tensors: Sequence[Any], longest: int) -> TokenGroup | None:
    """The group of all tensors with a column per position, for the user's lengths; None if several widths could be."""
    stems = {index: leaf.stem for index, leaf in enumerate(leaves) if leaf.sizes}
    wide = list(stems)
    widths = {tensors[index].shape[1] for index in wide if tensors[index].shape[1] >= longest}
    is_named = False
    for names in ((MASK,), (LABELS,), TOKENS):
        if named := [i for i in wide if stems[i] in names and (MASK not in names or len(tensors[i].shape) == 2)]:
            widths, is_named = {tensors[index].shape[1] for index in named}, True
            break
    if (len(widths) != 1 and not is_named) or max(widths) < longest:
        return None
    members = tuple(index for index in wide if tensors[index].shape[1] in widths)
    is_known = any(stems[index] in TOKENS for index in members)  # then members with unknown names could be features
    square = [i for i in wide if stems[i] == MASK and len(tensors[i].shape) > 2 and widths & set(tensors[i].shape[1:])]
    return TokenGroup(
        members,
        obstacle=square[0] if square else None,
        masks=tuple(index for index in members if stems[index] in (MASK, *OTHER_MASKS)),
        labels=tuple(index for index in members if stems[index] == LABELS),
        is_masked=True,
        constants=tuple(index for index in members if is_known and stems[index] is None),
    )
