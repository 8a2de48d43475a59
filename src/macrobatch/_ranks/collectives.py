"""Communication besides that of the backends: small sums, and one flat sum of all gradients."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._torch.distributed import abort_process_groups, default_store, has_cpu_backend
from macrobatch._torch.tensors import copy_all

BUCKET = 32 * 2**20  # bytes of gradients that are summed at once
ALIGNED = 16  # bytes: the alignment that suits every dtype
Group = Any  # a torch.distributed.ProcessGroup, which some builds of torch do not have


def all_reduce_flat(named: dict[str, nn.Parameter], group: Group, host: Group, unused: Collection[str]) -> None:
    """Sum all gradients over the ranks, in buckets. Those that every rank lacks, or has not used, become None."""
    absent = {name for name, parameter in named.items() if parameter.grad is None}
    of_none = set(unused_by_all(named, absent.union(unused), host))
    for name, parameter in named.items():
        if name in of_none:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    bucket: list[Tensor] = []
    gradients = [p.grad for p in named.values() if p.grad is not None]
    for gradient, following in itertools.zip_longest(gradients, gradients[1:]):
        bucket.append(gradient)
        full = sum(g.nbytes for g in bucket) >= BUCKET
        if full or following is None or (following.dtype, following.device) != (gradient.dtype, gradient.device):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [g.numel() for g in bucket])
            copy_all(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
            bucket.clear()


def unused_by_all(named: dict[str, nn.Parameter], unused: Collection[str], host: Group) -> list[str]:
    """The parameters that are `unused` on every rank."""
    return tally_use(named, unused, 0, host)[0]


def tally_use(
    named: dict[str, nn.Parameter], unused: Collection[str], number: int, host: Group
) -> tuple[list[str], bool]:
    """The parameters that are `unused` on every rank, and whether all ranks have the same number; in one message."""
    words = [*(name not in unused for name in named), number, ~number]
    largest = torch.tensor(words, dtype=torch.int64, device="cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=host)
    *is_used, highest, inverted_lowest = largest.tolist()
    of_none = [name for name, used in zip(named, is_used, strict=True) if not used]
    return of_none, highest == ~inverted_lowest


def start_named_sum(numbers: Mapping[str, Tensor], group: Group) -> Callable[[], dict[str, Tensor]]:
    """Start to sum numbers over the ranks, which all have the same names. The returned function waits for the sums."""
    names = sorted(numbers)
    sums = torch.cat([numbers[name].reshape(-1) for name in names])
    work = dist.all_reduce(sums, group=group, async_op=True)

    def arrived() -> dict[str, Tensor]:
        work.wait()
        parts = torch.split(sums, [numbers[name].numel() for name in names])
        return {name: part.view(numbers[name].shape) for name, part in zip(names, parts, strict=True)}

    return arrived


def all_gather_numbers(numbers: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """The numbers of every rank, on the host."""
    own = torch.tensor(numbers, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [list(map(int, other)) for other in torch.stack(everyone).tolist()]


def all_gather_objects(value: Any, group: Group) -> list[Any]:
    """The value of every rank. The value and the group must be on the host."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def all_gather_bytes(own: Tensor, sizes: Sequence[int], group: Group) -> list[Tensor]:
    """The bytes of every rank, on the device of `own`. `sizes`: their number on each rank."""
    longest = -(-max(sizes) // ALIGNED) * ALIGNED
    padded = torch.zeros(longest, dtype=torch.uint8, device=own.device)
    padded[: len(own)] = own
    everyone = torch.empty(len(sizes) * longest, dtype=torch.uint8, device=own.device)
    dist.all_gather_into_tensor(everyone, padded, group=group)
    return [part[:size] for part, size in zip(torch.split(everyone, longest), sizes, strict=True)]


def all_reduce_max(number: float | Tensor, group: Group, device: torch.device) -> Tensor:
    """The largest number of all ranks, on the device. The host does not wait for it."""
    largest = torch.as_tensor(number, dtype=torch.float32).reshape(()).to(device, non_blocking=True, copy=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor as a plain one, with its graph. All ranks that hold a part must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def host_group(group: Group) -> Group:
    """A group of the same ranks for data on the host, so that nobody waits for a device."""
    if has_cpu_backend(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def broadcast_object(value: Any, source: int, group: Group) -> Any:
    """The value of rank `source` of the group, on all ranks. It must be on the host."""
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, source), group=group)
    return box[0]


def abort_job(why: str) -> None:
    """End the job on all ranks. The others find the reason in the store when their waiting for this rank fails."""
    with contextlib.suppress(Exception):  # an error here must not hide the reason itself
        default_store().set(_abort_key(), why)
        abort_process_groups()


def abort_reason() -> str | None:
    """The reason why another rank has left, if one has."""
    try:
        store = default_store()
        return store.get(_abort_key()).decode() if store.check([_abort_key()]) else None
    except Exception:  # the store may have been on the rank that left
        return None


def _abort_key() -> str:
    """The key for the reason in the job's store. It holds the restart count, as a restart may use the same store."""
    return f"macrobatch/left/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
