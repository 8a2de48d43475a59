"""What ranks do together besides the backends' own communication: small sums, and one flat sum of all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = Any  # a torch.distributed.ProcessGroup, which some builds of torch do not have


def all_reduce_flat(named: dict[str, nn.Parameter], group: Group, bucket_bytes: int = 32 * 2**20) -> None:
    """Sum all gradients over the ranks, a bucket at a time. One that only other ranks have is made here, of zeros."""
    parameters = list(named.values())
    used = torch.tensor([float(p.grad is not None) for p in parameters]).to(parameters[0].device, non_blocking=True)
    dist.all_reduce(used, group=group)
    if any(p.grad is None for p in parameters):  # only then does the host have to know
        for parameter, ranks in zip(parameters, used.tolist(), strict=True):
            if parameter.grad is None and ranks:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    bucket: list[Tensor] = []
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient, following in zip(gradients, [*gradients[1:], None], strict=True):
        bucket.append(gradient)
        full = sum(g.nbytes for g in bucket) >= bucket_bytes
        if full or following is None or (following.dtype, following.device) != (gradient.dtype, gradient.device):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
            bucket.clear()


def all_reduce_later(numbers: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start a sum over the ranks; the function returned waits for it."""
    work = dist.all_reduce(numbers, group=group, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return numbers

    return arrived


def gathered(number: int, group: Group, device: torch.device) -> list[int]:
    """That number of every rank, on the host."""
    own = torch.tensor([number], device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [int(other) for other in torch.cat(everyone).tolist()]


def largest(number: Tensor, group: Group) -> Tensor:
    """The largest of all ranks' numbers, which the host does not get to know."""
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return number
