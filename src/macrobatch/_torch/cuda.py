"""CUDA: make all threads allocate from one memory pool. ``torch.cuda.use_mem_pool`` affects only the calling one."""

from __future__ import annotations

from typing import Any

import torch


def begin_allocating(device: int, pool: Any) -> None:
    """Start allocating from this pool, on all threads. This adds a reference to the pool."""
    torch._C._cuda_beginAllocateToPool(device, pool)


def end_allocating(device: int, pool: Any) -> None:
    """Stop allocating from this pool. An error if `begin_allocating` was not called."""
    torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: Any) -> None:
    """Remove one reference to a pool. A pool without references is freed."""
    torch._C._cuda_releasePool(device, pool)
