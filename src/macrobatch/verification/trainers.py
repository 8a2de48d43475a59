"""Trainers of other libraries, which `verify` takes as they stand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from macrobatch.verification.report import Report
from macrobatch.verification.saved_state import SavedState

Verify = Callable[..., Report]


def verification_of(given: object) -> Callable[[Verify], Report] | None:
    """How `verify` is called for a trainer, or a module of Lightning; None if it is neither.

    Nothing is imported that the program has not.
    """
    if "transformers.trainer" in sys.modules:
        from macrobatch.transformers.verifying import case_of, is_trainer

        if is_trainer(given):
            return lambda verify: verify(**case_of(given))
    if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
        from macrobatch.lightning import verifying

        if verifying.is_of_lightning(given):
            return partial(_verify_lightning, given)
    return None


def _verify_lightning(given: object, verify: Verify) -> Report:
    """Verify while a Trainer of Lightning is in the middle of a fit, then restore its module."""
    from macrobatch.lightning import verifying

    reports: list[Report] = []

    def add_report(notes: Sequence[str], **arguments: Any) -> None:
        report = verify(**arguments)
        reports.append(replace(report, notes=(*report.notes, *notes)))

    before = SavedState(verifying.module_of(given))
    try:
        verifying.run_first_window(given, add_report)
    finally:
        before.restore()
    return reports[0]
