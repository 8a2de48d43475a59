"""`verify`: compare what a training step does with what one big batch would have done, and explain the difference.

The main path is `verify`: watch the step -> compute the reference -> compare window by window -> explain. What happens
inside a step is seen by `witness`, references come from `bigbatch`, explanations from `causes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from macrobatch import arguments
from macrobatch.errors import BatchError, UsageError
from macrobatch.macrostep import MacroStep
from macrobatch.split import ByCount, ByTokens, Tree
from macrobatch.sync import backend_of, sync_for
from macrobatch.verification.bigbatch import BigBatch, LossFunction
from macrobatch.verification.causes import explain
from macrobatch.verification.comparison import Case, Compared, Precision
from macrobatch.verification.gradient import Gradient, Ranks
from macrobatch.verification.keep import Keep, Quiet
from macrobatch.verification.report import ParameterError, Report, WindowReport
from macrobatch.verification.rows import micro_batches_of
from macrobatch.verification.witness import Call, Seen, Step, Window, watch
from macrobatch.window import Reduction

WORST = 5  # parameters that a report names


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    micro: int | ByCount | ByTokens | None = None,
    step: Step | None = None,
    reduction: Reduction = "mean",
) -> Report:
    """Compare the gradient that a training step accumulates with that of one big batch.

    >>> import torch
    >>> from torch import nn
    >>> from macrobatch import verify
    >>> model = nn.Linear(3, 1)
    >>> def loss_fn(model, batch):
    ...     return nn.functional.mse_loss(model(batch[0]), batch[1])
    >>> batch = torch.randn(10, 3), torch.randn(10, 1)
    >>> verify(model, loss_fn, batch).ok           # MacroStep, which is right
    True
    >>> def step(model, batch):                    # a loop by hand, which is not
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     for x, y in zip(*(tensor.split(4) for tensor in batch)):
    ...         loss_fn(model, (x, y)).backward()
    ...     optimizer.step()
    >>> report = verify(model, loss_fn, batch, step=step)
    >>> report.ok, report.causes[0].name
    (False, 'mean of means')

    Afterwards model, gradients, buffers, modes, random numbers, and the state of the optimizers that stepped are as
    they were. Dropout is switched off meanwhile, wherever a module holds its probability.

    Args:
        model: as it is trained: plain, compiled, wrapped for many ranks.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, a mean over its items (or their sum, by ``reduction``), or
            the loss and its items.
        batch: what the step gets; on many ranks, each rank's own share.
        micro: without ``step``: how a `MacroStep` is to cut the batch. None: into three or so, of unequal sizes.
        step: ``step(model, batch)``: any loop, of any library, with its own optimizers. Gradients are taken at each
            optimizer step inside it, or, without any, when it returns.
        reduction: "mean" or "sum": what ``loss_fn`` returns.
    """
    _check(model, loss_fn, step, reduction)
    ranks = Ranks.of(model)
    keep, quiet = Keep(model), Quiet(model)
    try:
        big = BigBatch(model, loss_fn, batch, ranks)
        run = functools.partial(
            watch, step or default_step(loss_fn, micro, reduction), model, batch, keep, entries=big.entries()
        )
        seen = run()
        again = _run_again(run, seen) if step is not None else None
        keep.restore_gradients()
        _enter_modes(model, seen)
        case = compare(seen, again, big, reduction, divides=step is None)
        report: Report = ranks.same(report_of(case, quiet.names))
        return report
    finally:
        quiet.restore()
        _let_go(model)
        keep.restore()


def _check(model: object, loss_fn: object, step: object, reduction: Reduction) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module: got {type(model).__name__}.")
    for name, value in (("loss_fn", loss_fn), ("step", step)):
        if not callable(value) and not (name == "step" and value is None):
            raise UsageError(f"{name} must be a function of the model and a batch: got {type(value).__name__}.")
    arguments.checked_choice("reduction", reduction, Reduction)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: there is nothing to verify.")


# ---------------------------------------------------------------------------------------------- running the step


def default_step(loss_fn: LossFunction, micro: int | ByCount | ByTokens | None, reduction: Reduction) -> Step:
    """A `MacroStep` that moves nothing."""

    def step(model: nn.Module, batch: Any) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        MacroStep(model, optimizer, loss_fn, micro=micro or unequal(Tree(batch).count), reduction=reduction)(batch)

    return step


def unequal(samples: int) -> int:
    """A size that cuts so many samples into a few micro-batches, the last of them smaller than the others.

    >>> [unequal(samples) for samples in (1, 2, 3, 8, 9, 64)]
    [1, 1, 2, 3, 4, 22]
    """
    return 1 if samples < 3 else samples // 3 + 1


def _run_again(run: Callable[[], Seen], seen: Seen) -> Seen | None:
    """Run a step once more where it left gradients behind: does it begin by clearing them?"""
    if not seen.stepped or all(gradient is None for gradient in seen.left.values()):
        return None
    try:
        return run()
    except Exception:  # it cannot be called twice, e.g. as its loader is used up: then that much is not known
        return None


def _enter_modes(model: nn.Module, seen: Seen) -> None:
    """Put the model into the mode in which the step called it."""
    for module, training in zip(model.modules(), seen.modes or (), strict=False):
        module.training = training


def _let_go(model: nn.Module) -> None:
    """Drop what a wrapper holds back of a window that was never closed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and backend_of([model]) is not None:
        sync_for([model], sync="window", gather="micro", process_group=None, accumulate_dtype=None).clear()


# ---------------------------------------------------------------------------------------------- comparing


def compare(seen: Seen, again: Seen | None, big: BigBatch, reduction: Reduction, *, divides: bool) -> Case:
    """Every window with the gradient of one big batch of its samples."""
    case = Case(seen, again, big, reduction, divides, Precision.of(big, seen))
    if not case.in_step:
        return case
    whole = big.calls()
    alone = len(seen.windows) == 1 and not seen.open
    for window in seen.windows:
        parts = _parts(window, whole, big)
        samples = None if alone else _together(parts)
        if samples is None and not alone and len(seen.windows) > 1:
            raise BatchError(
                f"the step took {len(seen.windows)} optimizer steps, but which samples went into which cannot be told: "
                "their rows in the batch were not found in what the model was called with. Hand over a batch for one "
                "optimizer step, or one whose tensors reach the model with the samples as their first dimension."
            )
        case.windows.append(_compared(case, window, parts, samples))
    return case


def _parts(window: Window, whole: list[Call], big: BigBatch) -> list[list[int]] | None:
    """The samples of its micro-batches on this rank; None, on all ranks, where some rank cannot tell."""
    calls = [call for call in window.calls if call.counts]
    parts = None if big.samples is None else micro_batches_of(calls, whole, big.samples.count)
    unknown = big.ranks.largest(float(parts is None)) or not big.ranks.largest(float(bool(calls)))
    return None if unknown else parts


def _together(parts: list[list[int]] | None) -> list[int] | None:
    return None if parts is None else sorted({sample for part in parts for sample in part})


def _compared(case: Case, window: Window, parts: list[list[int]] | None, samples: list[int] | None) -> Compared:
    found = Gradient(window.gradients, case.big.ranks.group).only(window.held)
    right = case.right(samples).only(window.held)
    own = window.micro_batches if parts is None else len(parts)
    return Compared(
        window=window,
        parts=parts,
        samples=samples,
        micro_batches=int(case.big.ranks.largest(own)),
        found=found,
        right=right,
        bound=case.precision.bound,
    )


# ---------------------------------------------------------------------------------------------- reporting


def report_of(case: Case, silenced: list[str]) -> Report:
    """What to tell the user."""
    causes, notes = explain(case)
    if silenced:
        shown = ", ".join(silenced[:3]) + (", ..." if len(silenced) > 3 else "")
        notes.append(f"dropout was switched off for the comparison ({shown})")
    if case.precision.why_not:
        notes.append(f"compared without a float64 copy: {case.precision.why_not}")
    worst = max(case.windows, key=lambda window: window.error, default=None)
    errors = {} if worst is None else worst.errors
    return Report(
        ok=not causes,
        max_relative_error=math.inf if worst is None else worst.error,
        bound=case.precision.bound if worst is None else worst.bound,
        reference=case.precision.reference,
        worst=tuple(
            ParameterError(name, errors[name]) for name in sorted(errors, key=errors.__getitem__)[: -WORST - 1 : -1]
        ),
        windows=tuple(
            WindowReport(
                samples=case.total_samples(window),
                micro_batches=window.micro_batches,
                relative_error=window.error,
                factor=window.factor,
            )
            for window in case.windows
        ),
        causes=tuple(causes),
        notes=tuple(notes),
    )
