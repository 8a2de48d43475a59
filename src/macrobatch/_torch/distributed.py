"""Process groups: their backends, the store of a job, and ending all of it at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def has_cpu_backend(group: Any) -> bool:
    """Whether tensors on the host can travel in this group."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def default_store() -> Any:
    """The store that all ranks of the job share."""
    return dist.distributed_c10d._get_default_store()


def abort_process_groups() -> None:
    """End all groups of this process now: collectives under way fail, also those of other ranks that wait for it."""
    dist.distributed_c10d._abort_process_group()


def flattened(mesh: Any) -> Any:
    """A mesh of one dimension over the same ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()
