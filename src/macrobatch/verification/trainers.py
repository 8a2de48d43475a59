"""Support for trainers of other libraries, which can be passed to `verify` directly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from macrobatch._cut.joining import narrowed
from macrobatch.verification.report import Cause, Report
from macrobatch.verification.saved_state import SavedState

Verify = Callable[..., Report]
PADDED_ALONE = Cause(
    name="loss that couples samples",
    evidence="the loss of a sample depends on how wide the other samples of its batch are, i.e. on its padding: the "
    "gradient is right if all batches of the window are padded to one width.",
    cure="Leave padded positions out of the loss, pad all batches to the same width, or let Macrobatch pad each window "
    "to one width with micro=.",
)


def verification_of(given: object) -> Callable[[Verify], Report] | None:
    """A function that calls `verify` for a trainer or for a module of Lightning; None if `given` is neither.

    It imports only libraries that the program has already imported.
    """
    if "transformers.trainer" in sys.modules:
        from macrobatch.transformers.verifying import case_of, is_trainer

        if is_trainer(given):
            return lambda verify: verified(verify, **case_of(given))
    if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
        from macrobatch.lightning import verifying

        if verifying.is_of_lightning(given):
            return partial(_verify_lightning, given)
    return None


def verified(
    verify: Verify,
    *,
    batches: Sequence[Any],
    window_of: Callable[[Any], list[Any]],
    run: Callable[[Any, list[Any]], None],
    **arguments: Any,
) -> Report:
    """The report on a window of a trainer, whose batches have the widths that the trainer gives them.

    If it is wrong, the window is run again with all batches as wide as one big batch. That tells why: its samples can
    be identified, and if it is right, the padding makes the difference.

    Args:
        verify: the function `verify`.
        batches: the batches of the window.
        window_of: cuts them out of one big batch, all as wide as that.
        run: runs a window with a model.
        arguments: the other arguments of `verify`.
    """
    report = verify(step=lambda model, batch: run(model, narrowed(window_of(batch), batches)), **arguments)
    if report.ok:  # on all ranks alike
        return report
    wide = verify(step=lambda model, batch: run(model, window_of(batch)), **arguments)
    return replace(report, verdict="wrong", causes=(PADDED_ALONE,)) if wide.ok else wide


def _verify_lightning(given: object, verify: Verify) -> Report:
    """Verify while a Trainer of Lightning is in the middle of a fit, then restore its module."""
    from macrobatch.lightning import verifying

    reports: list[Report] = []

    def add_report(notes: Sequence[str], **arguments: Any) -> None:
        report = verified(verify, **arguments)
        reports.append(replace(report, notes=(*report.notes, *notes)))

    before = SavedState(verifying.module_of(given))
    try:
        verifying.run_first_window(given, add_report)
    finally:
        before.restore()
    return reports[0]
