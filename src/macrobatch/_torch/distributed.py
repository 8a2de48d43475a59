"""Process groups: their backends, the store of a job, and aborting all groups at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def has_cpu_backend(group: Any) -> bool:
    """Whether this group can exchange tensors on the host."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def default_store() -> Any:
    """The store that all ranks of the job share."""
    return dist.distributed_c10d._get_default_store()


def abort_process_groups() -> None:
    """Abort all groups of this process now. Running collectives fail, also those of ranks that wait for this one."""
    dist.distributed_c10d._abort_process_group()


def flattened(mesh: Any) -> Any:
    """A mesh of one dimension over the same ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()
