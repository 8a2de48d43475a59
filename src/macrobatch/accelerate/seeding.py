"""`set_seed`: every random number generator, from one number."""

from __future__ import annotations

import random
import sys

import torch

from macrobatch.accelerate.state import AcceleratorState


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's (where it is in use) and torch's generators.

    Args:
        seed: the same number gives the same run.
        device_specific: let every process have its own.
        deterministic: let torch use deterministic algorithms only.
    """
    if device_specific:
        seed += AcceleratorState().process_index
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
