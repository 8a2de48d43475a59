"""How parameters are distributed over ranks, and how to compute a norm over all of them.

Along each dimension of its mesh, ranks hold parts of a DTensor, copies of it, or terms of a sum (`Partial`). A norm
must include all parts, count copies once, and add up sums first. For a plain tensor, only its wrapper knows how it is
distributed.
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
    """The groups of ranks that hold other parts of a parameter, and those that hold copies of this rank's part."""

    shards: tuple[Group, ...] = ()
    copies: tuple[Group, ...] = ()


def layout_of(parameter: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """The mesh of a parameter and its placements; None for a plain tensor."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    hidden = layout_before_ddp(parameter)
    return None if hidden is None else (hidden.mesh, hidden.placements)


def ranks_of(parameters: Iterable[Tensor]) -> list[int]:
    """All ranks that hold a part or a copy of one of these parameters; an empty list for plain tensors."""
    meshes = {layout[0] for parameter in parameters if (layout := layout_of(parameter)) is not None}
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def sharing_ranks(parameters: Iterable[Tensor], group: Group) -> list[int]:
    """The ranks outside of the data-parallel group that hold a part or a copy of the model. They get the same data."""
    if not (ranks := ranks_of(parameters)):
        return []
    own = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return [rank for rank in ranks if rank not in own]


def spread_over(mesh: Any, placements: Iterable[Any], name: str) -> Spread:
    """The groups of ranks for such a layout. `name` is for error messages."""
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
    """Whether ranks hold parts of the tensor, split along one of its dimensions."""
    # `is_shard` is false in some versions of torch, if tensor parallelism and `fully_shard` split the same dimension.
    return not placement.is_partial() and isinstance(getattr(placement, "dim", None), int)


def redistribute_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the placements of its parameter. Terms of a sum (`Partial`) are added here, once per window."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


# ---------------------------------------------------------------------------------------------- norms


def norm_over_ranks(norms: dict[Spread, Tensor], order: float, flag: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of all gradients from this rank's norms, one for each `Spread`; and whether any rank has set its flag.

    All ranks get the same bits, and a NaN even if only one of them has it. They must pass the same spreads in the same
    order, because each group sums the results of the group before.
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
        return norm, flag  # one all-reduce gives the same bits on all its ranks
    # Ranks may have summed the same numbers in different groups, and so in a different order.
    largest, is_nan = largest_over(everyone, torch.stack([norm, norm.isnan().to(norm.dtype)]))
    return largest.masked_fill(is_nan.bool(), math.nan), flag


def largest_over(groups: Iterable[Group], number: Tensor) -> Tensor:
    """The largest number of all ranks. NaN becomes infinite, because a maximum may ignore NaN."""
    for group in groups:
        number = number.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return number
