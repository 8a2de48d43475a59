"""Decides whether the weights of `fully_shard` stay gathered between the micro-batches of a window."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from macrobatch._ranks.collectives import Group
from macrobatch._torch import fsdp2 as fsdp
from macrobatch.types import When

logger = logging.getLogger("macrobatch")

SHARE = 0.5  # of the free memory: activations and what the optimizer keeps need the rest


def choose_gathering(models: Sequence[Any], group: Group) -> When:
    """Choose ``gather`` by memory, the same on all ranks: the gathered weights and the sums of a window must fit."""
    topology = fsdp.Topology(models)
    weights, sums = fsdp.gathered_bytes(topology)
    device = next(models[0].parameters()).device
    free = free_memory(device)
    fits = torch.tensor(int(weights + sums <= SHARE * free), device=device if device.type != "meta" else "cpu")
    dist.all_reduce(fits, dist.ReduceOp.MIN, group=group)
    chosen: When = "window" if fits.item() else "micro"
    if dist.get_rank(group) == 0:
        logger.info(
            'gather="auto" is gather="%s": the gathered weights take %.3g GiB and the sums of a window %.3g GiB; '
            "%.3g GiB are free on rank 0, of which they may take half, on every rank",
            *(chosen, weights / 2**30, sums / 2**30, free / 2**30),
        )
    return chosen


def free_memory(device: torch.device) -> int:
    """The bytes that a rank can still allocate; 0 if that is not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 0
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here
