"""Trainers of other libraries, which `verify` takes as they stand."""

from __future__ import annotations

import sys
from typing import Any


def case_of_trainer(given: object) -> dict[str, Any] | None:
    """The arguments of `verify` for a trainer, or a module of Lightning; None if it is neither.

    Nothing is imported that the program has not.
    """
    if "transformers.trainer" in sys.modules:
        from macrobatch.transformers.verifying import case_of, is_trainer

        if is_trainer(given):
            return case_of(given)
    if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
        from macrobatch.lightning import verifying

        if verifying.is_of_lightning(given):
            return verifying.case_of(given)
    return None
