"""`verify`: compare what a training step does with what one big batch would have done, and explain the difference.

The main path is `verify`: watch the step -> compute the reference -> compare window by window -> explain. What happens
inside a step is seen by `witness`, references come from `bigbatch`, explanations from `causes`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._cut.policies import ByCount, ByTokens
from macrobatch._cut.samples import Collate, samples_of
from macrobatch._ranks.select import common_wrapper, select_backend
from macrobatch._step import validation as arguments
from macrobatch.errors import BatchError, UsageError
from macrobatch.macrostep import MacroStep
from macrobatch.types import Reduction
from macrobatch.verification.bigbatch import BigBatch, LossFunction
from macrobatch.verification.causes import explain
from macrobatch.verification.comparison import Case, Compared, Precision
from macrobatch.verification.gradient import Gradient, Ranks
from macrobatch.verification.keep import Keep, Quiet
from macrobatch.verification.names import Names
from macrobatch.verification.report import ParameterError, Report, WindowReport
from macrobatch.verification.rows import Rows, rows_of
from macrobatch.verification.seen import Seen, Window
from macrobatch.verification.witness import Step, watch

WORST = 5  # parameters that a report names


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    micro: int | ByCount | ByTokens | None = None,
    step: Step | None = None,
    reduction: Reduction = "mean",
    collate: Collate | None = None,
    windows: int | None = None,
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

    A step may hold several optimizer steps: each is compared with one big batch of its own samples, and the report says
    how many there were. ``windows=1`` makes more than one an error, for a batch that is meant for one optimizer step.

    Args:
        model: as it is trained: plain, compiled, wrapped for many ranks.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, a mean over its items (or their sum, by ``reduction``), or
            the loss and its items.
        batch: what the step gets; on many ranks, each rank's own share. Tensors with a common first dimension, the
            samples; or, with ``collate``, a list of samples.
        micro: without ``step``: how a `MacroStep` is to cut the batch. None: into three or so, of unequal sizes.
        step: ``step(model, batch)``: any loop, of any library, with its own optimizers. Gradients are taken at each
            optimizer step inside it, or, without any, when it returns.
        reduction: "mean" or "sum": what ``loss_fn`` returns.
        collate: makes a batch, as ``loss_fn`` gets it, of a list of samples.
        windows: how many optimizer steps the step must take; None: any number.

    Returns:
        A `Report`: ``ok``, the errors, and the causes with their evidence and cure.

    Raises:
        UsageError: an argument is not what it should be, or the model is not ready.
        BatchError: it cannot be told which samples went into which of several optimizer steps.
        FitError: the whole batch does not fit into memory at once.
    """
    _check(model, loss_fn, step, reduction, collate, windows)
    ranks = Ranks.of(model)
    with contextlib.ExitStack() as afterwards:
        quiet = Quiet(model)
        afterwards.callback(quiet.restore)
        keep = Keep(model, batch, shards=ranks.shards)
        afterwards.callback(keep.restore)
        afterwards.callback(_let_go, model)
        big = BigBatch(model, loss_fn, batch, ranks, collate)
        entries = big.entries()
        keep.include_leaves(big.foreign)
        step_or_default = step or default_step(loss_fn, micro, reduction, collate)
        run = functools.partial(watch, step_or_default, model, batch, keep, big.names, entries)
        seen = run()
        again = _run_again(run, model, seen) if step is not None else None
        keep.restore_gradients()
        _enter_setting(big.names, seen)
        case = compare(seen, again, big, reduction, divides=step is None, expected=windows)
        case.run_doubled = functools.partial(_run_doubled, run, keep, big.names, seen)
        report: Report = ranks.same(report_of(case, quiet.names))
    return report


def _check(
    model: object, loss_fn: object, step: object, reduction: Reduction, collate: object, windows: object
) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module: got {type(model).__name__}.")
    for name, value in (("loss_fn", loss_fn), ("step", step)):
        if not callable(value) and not (name == "step" and value is None):
            raise UsageError(f"{name} must be a function of the model and a batch: got {type(value).__name__}.")
    if collate is not None and not callable(collate):
        raise UsageError(f"collate must be a function of a list of samples: got {type(collate).__name__}.")
    if windows is not None and (isinstance(windows, bool) or not isinstance(windows, int) or windows < 1):
        raise UsageError(f"windows must be a number of optimizer steps, at least 1, or None: got {windows!r}.")
    arguments.checked_choice("reduction", reduction, Reduction)
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(
            "the model has parameters without a shape yet (lazy modules): call it once with a batch before verifying."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: there is nothing to verify.")


# ---------------------------------------------------------------------------------------------- running the step


def default_step(
    loss_fn: LossFunction, micro: int | ByCount | ByTokens | None, reduction: Reduction, collate: Collate | None
) -> Step:
    """A `MacroStep` that moves nothing."""

    def step(model: nn.Module, batch: Any) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        size = micro or unequal(samples_of(batch, collate).count)
        MacroStep(model, optimizer, loss_fn, micro=size, reduction=reduction, collate=collate)(batch)

    return step


def unequal(samples: int) -> int:
    """A size that cuts so many samples into a few micro-batches, the last of them smaller than the others.

    >>> [unequal(samples) for samples in (1, 2, 3, 8, 9, 64)]
    [1, 1, 2, 3, 4, 22]
    """
    return 1 if samples < 3 else samples // 3 + 1


def _run_again(run: Callable[[], Seen], model: nn.Module, seen: Seen) -> tuple[Seen, Seen] | None:
    """Run a step twice more where it left gradients behind, with others there, and with none: does it clear them?

    Not those that it left: a step that clips would come to the same direction, and the same norm, once more.
    """
    if not seen.stepped or all(gradient is None for gradient in seen.left.values()):
        return None
    try:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = _disturbed(parameter.grad)
        disturbed = run()
        for parameter in model.parameters():
            parameter.grad = None
        return disturbed, run()
    except Exception:  # it cannot be called twice, e.g. as its loader is used up: then that much is not known
        return None


def _disturbed(gradient: Tensor) -> Tensor:
    """As large, in another direction."""
    if isinstance(gradient, DTensor):
        return -gradient
    signs = torch.arange(gradient.numel(), device=gradient.device).remainder(2).mul(2).sub(1)
    return (gradient.detach().reshape(-1).roll(1) * signs.to(gradient.dtype)).view_as(gradient)


def _run_doubled(run: Callable[..., Seen], keep: Keep, names: Names, seen: Seen) -> Seen | None:
    """Run a step once more, with gradients twice as large: are they clipped to the same?"""
    keep.restore()
    try:
        return run(times=2.0)
    except Exception:  # it cannot be called twice
        return None
    finally:
        keep.restore_gradients()
        _enter_setting(names, seen)


def _enter_setting(names: Names, seen: Seen) -> None:
    """Put the model into the mode in which the step called it, and let it learn what the step let it learn."""
    for module, training in seen.modes.items():
        module.training = training
    for name, parameter in names.parameters().items():
        parameter.requires_grad_(parameter.requires_grad or name in seen.learning)


def _let_go(model: nn.Module) -> None:
    """Drop what a wrapper holds back of a window that was never closed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and common_wrapper([model]) is not None:
        select_backend(
            [model], sync="window", gather="micro", process_group=None, accumulate_dtype=None
        ).drop_gradients()


# ---------------------------------------------------------------------------------------------- comparing


def compare(
    seen: Seen,
    again: tuple[Seen, Seen] | None,
    big: BigBatch,
    reduction: Reduction,
    *,
    divides: bool,
    expected: int | None,
) -> Case:
    """Every window with the gradient of one big batch of its samples."""
    case = Case(seen, again, big, reduction, divides, expected, Precision.of(big, seen), big.calls())
    if not case.in_step:
        return case
    alone = len(seen.windows) == 1 and not case.is_open
    used: set[int] = set()
    for window in seen.windows:
        rows = _rows(window, case, used)
        samples = None if alone or rows is None else sorted({sample for part in rows.parts for sample in part})
        if samples is None and not alone and len(seen.windows) > 1:
            if case.has_wrong_count:
                return case
            raise BatchError(
                f"the step took {len(seen.windows)} optimizer steps, but which samples went into which cannot be told: "
                "their rows in the batch were not found in what the model was called with. Hand over a batch for one "
                "optimizer step, or one whose tensors reach the model with the samples as their first dimension."
            )
        case.windows.append(_compared(case, window, rows, samples))
    return case


def _rows(window: Window, case: Case, used: set[int]) -> Rows | None:
    """The samples of its calls on this rank; None, on all ranks, where some rank cannot tell."""
    big, calls = case.big, [call for call in window.calls if call.counts]
    rows = None if big.samples is None else rows_of(calls, case.whole, big.samples.count, used)
    unknown = big.ranks.largest(float(rows is None)) or not big.ranks.largest(float(bool(calls)))
    return None if unknown else rows


def _compared(case: Case, window: Window, rows: Rows | None, samples: list[int] | None) -> Compared:
    found = Gradient(window.gradients, case.big.ranks.group).only(window.held)
    right = case.right(samples)
    own = window.micro_batches if rows is None else len(rows.parts)
    return Compared(
        window=window,
        rows=rows,
        samples=samples,
        micro_batches=int(case.big.ranks.largest(own)),
        found=found,
        right=right.only(window.held),
        scale=right.largest or 1.0,
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
