"""CUDA: letting all threads allocate from one pool of memory.

By the functions behind ``torch.cuda.use_mem_pool``, which itself serves the calling thread alone: backwards have
another. Builds of torch without CUDA do not have them.
"""

from __future__ import annotations

from typing import Any

import torch


def begin_allocating(device: int, pool: Any) -> None:
    """From now on memory comes from this pool, whatever the thread. The pool has one more claim on it."""
    torch._C._cuda_beginAllocateToPool(device, pool)


def end_allocating(device: int, pool: Any) -> None:
    """Memory comes from where it came from before. An error where nobody had begun."""
    torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: Any) -> None:
    """Take one claim off a pool: one without any is gone."""
    torch._C._cuda_releasePool(device, pool)
