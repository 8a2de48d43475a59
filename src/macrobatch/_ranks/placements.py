"""How parameters are spread over ranks, and what that means for a norm over all of them.

Along each dimension of its mesh a DTensor lies in parts, or as copies, or as terms of a sum (`Partial`). A norm adds up
parts, counts copies once, and wants sums to be added up first. What a plain tensor is spread over, its wrapper knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from macrobatch._ranks.collectives import Group
from macrobatch._torch.tensors import layout_before_ddp
from macrobatch.errors import BackendError


class Spread(NamedTuple):
    """The groups of ranks that hold other parts of the same parameter, and those that hold copies of this rank's."""

    shards: tuple[Group, ...] = ()
    copies: tuple[Group, ...] = ()


def layout_of(parameter: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """The mesh that a parameter lies on, and how; None for a plain tensor."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    hidden = layout_before_ddp(parameter)
    return None if hidden is None else (hidden.mesh, hidden.placements)


def ranks_of(parameters: Iterable[Tensor]) -> list[int]:
    """All ranks that hold a part or a copy of one of them; none of plain tensors."""
    meshes = {layout[0] for parameter in parameters if (layout := layout_of(parameter)) is not None}
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def sharing_ranks(parameters: Iterable[Tensor], group: Group) -> list[int]:
    """The ranks that hold a part or a copy of the same model, beyond the data-parallel ones: all of them do alike."""
    if not (ranks := ranks_of(parameters)):
        return []
    own = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return [rank for rank in ranks if rank not in own]


def spread_over(mesh: Any, placements: Iterable[Any], name: str) -> Spread:
    """What such a layout means for the parameter of that name."""
    if mesh.get_coordinate() is None:
        raise BackendError(
            f"parameter {name!r} lies on the ranks {mesh.mesh.flatten().tolist()}, and rank {dist.get_rank()} is none "
            "of them: no norm of all gradients can be known here. Give each rank's model only parameters that "
            "the rank has a part of."
        )
    shards, copies = [], []
    for dimension, placement in enumerate(placements):
        if mesh.size(dimension) == 1:
            continue
        if placement.is_replicate():
            copies.append(mesh.get_group(dimension))
        elif _is_cut(placement):
            shards.append(mesh.get_group(dimension))
        else:
            raise BackendError(
                f"parameter {name!r} has the placement {placement!r}: what its ranks hold is neither a part of it nor "
                "a copy, so that no norm of its gradient can be known. Use Shard or Replicate."
            )
    return Spread(tuple(shards), tuple(copies))


def _is_cut(placement: Any) -> bool:
    """Whether ranks hold parts of the tensor, cut along one of its dimensions.

    Not all such placements say so by `is_shard`: that of a parameter which tensor parallelism and `fully_shard` cut
    along the same dimension does in some versions of torch only.
    """
    return not placement.is_partial() and isinstance(getattr(placement, "dim", None), int)


def redistribute_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient, spread as its parameter is. Terms of a sum are added up here, once a window."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


# ---------------------------------------------------------------------------------------------- norms


def norm_over_ranks(norms: dict[Spread, Tensor], order: float, flag: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of all that is spread over ranks, from this rank's norms of what is spread alike.

    A `flag`, a number above 0 if it is set, travels with it: it comes back set where it was on any rank with a part.

    All ranks get the same, to the last bit, and a NaN that only one of them has. They must ask for the same spreads in
    the same order: what one group adds up, the next one adds up further.
    """
    groups = dict.fromkeys(group for spread in norms for group in spread.shards)
    if order == math.inf:
        both = largest_over(groups, torch.stack([torch.stack(list(norms.values())).amax(), flag]))
        return both[0], both[1]
    powers = [norm**order for norm in norms.values()]
    for group in groups:
        ranks = dist.get_world_size(group)
        terms = [p if group in spread.shards else p / ranks for spread, p in zip(norms, powers, strict=True)]
        total = torch.stack([*terms, flag])
        dist.all_reduce(total, group=group)
        *powers, flag = total
    norm = torch.stack(powers).sum() ** (1 / order)
    everyone = dict.fromkeys(group for spread in norms for group in (*spread.shards, *spread.copies))
    if len(everyone) == 1:
        return norm, flag  # one sum was the same on all its ranks
    # Ranks that added up the same numbers in other groups may have done so in another order.
    largest, is_nan = largest_over(everyone, torch.stack([norm, norm.isnan().to(norm.dtype)]))
    return largest.masked_fill(is_nan.bool(), math.nan), flag


def largest_over(groups: Iterable[Group], number: Tensor) -> Tensor:
    """The largest of all ranks' numbers. NaN counts as infinite: the largest of NaN and a number may be the number."""
    for group in groups:
        number = number.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return number
