"""`verify`: compare the gradients of a training step with those of one big batch, and explain the difference.

The main path is `verify`: watch the step (`step_watcher`), compute the reference (`bigbatch`), compare window by window
(`comparison`), explain (`causes`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._border import arguments
from macrobatch._checks.catalogue import turned_on
from macrobatch._cut.fitting import checked_micro
from macrobatch._cut.policies import ByCount, ByTokens
from macrobatch._cut.samples import Collate
from macrobatch._ranks.select import common_wrapper, select_backend
from macrobatch._torch.modules import is_compiled
from macrobatch.errors import BatchError, MacrobatchError, UsageError
from macrobatch.macrostep import MacroStep
from macrobatch.types import Counts, Joint, Reduction
from macrobatch.verification.arguments import require_batch, require_valid_arguments
from macrobatch.verification.bigbatch import BigBatch, LossFunction
from macrobatch.verification.catalogue import name_list
from macrobatch.verification.causes import explain
from macrobatch.verification.comparison import Case, Comparison, Precision
from macrobatch.verification.default_step import default_step
from macrobatch.verification.gradient import Gradient, Ranks
from macrobatch.verification.names import Names
from macrobatch.verification.observation import Observation, ObservedWindow
from macrobatch.verification.outer_state import tensors_held_by
from macrobatch.verification.repeating import repeat_draws
from macrobatch.verification.report import ParameterError, Report, WindowReport, verdict_of
from macrobatch.verification.sample_matching import MatchedSamples, has_common_rows, match_samples
from macrobatch.verification.saved_state import DropoutSwitch, SavedState
from macrobatch.verification.step_watcher import Step, watch
from macrobatch.verification.trainers import verification_of
from macrobatch.verification.whole_loss import WholeLoss

NUM_WORST = 5  # how many parameters a report names


def verify(
    model: nn.Module | Any,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    micro: int | ByCount | ByTokens | None = None,
    step: Step | MacroStep | None = None,
    reduction: Reduction = "mean",
    collate: Collate | None = None,
    counts: Counts | None = None,
    joint: Joint | None = None,
    windows: int | None = None,
) -> Report:
    """Check whether a training step uses the right gradient: that of one big batch. If not, name the cause.

    Use it to test any training loop: your own, one of another library, or one that uses Macrobatch.

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

    `verify` restores everything that the step changes: the model, gradients, buffers, modes, random numbers, and the
    state of its optimizers. While it runs, it sets the dropout probabilities of all modules to 0.

    ``step`` may take several optimizer steps. `verify` compares each of them with one big batch of its own samples. If
    the batch is meant for one optimizer step, pass ``windows=1``: then the report is not ``ok`` if there are more.

    `verify` needs memory for a forward and backward of the whole batch, on a float64 copy of the model. A small batch,
    with a few samples per micro-batch, is enough.

    Args:
        model: the model in the form in which you train it: plain, compiled, or wrapped for several ranks. Or pass a
            trainer as the only argument: a `Trainer` of transformers, or a Trainer of Lightning with its module, or a
            module of Lightning with its Trainer. `verify` then runs the trainer's first window as the trainer does.
        loss_fn: a function ``loss_fn(model, batch)`` that returns the loss, or ``(loss, items)``. The loss is a mean
            over so many items (default: as many as its graph says, else samples), or with ``reduction="sum"`` their
            sum. For a loss of several terms, it returns a dict ``{name: (loss, items)}``, and the means of the terms
            are added up.
        batch: the batch that ``step`` gets; on several ranks, this rank's share. Either tensors whose first dimension
            is the samples, or with ``collate`` a list of samples.
        micro: how `MacroStep` cuts the batch if you pass no ``step``. Default: into about three micro-batches of
            unequal sizes.
        step: the training step to check: a function ``step(model, batch)`` with any training loop and its own
            optimizers, or a `MacroStep` of the same model. `verify` reads the gradients at each optimizer step, or when
            the function returns if it takes none. Default: a `MacroStep` with ``loss_fn``.
        reduction: whether ``loss_fn`` returns a "mean", a "sum" over items, or a "total", which nothing divides.
        collate: a function that makes a batch for ``loss_fn`` from a list of samples. Default: batches of tensors.
        counts: the argument ``counts`` of `MacroStep`, for a loss of several terms if you pass no ``step``.
        joint: the argument ``joint`` of `MacroStep`, for a loss that compares samples with each other. ``loss_fn`` must
            then return an `Encoded`.
        windows: the number of optimizer steps that ``step`` is expected to take, over each sample of the batch once.
            Default: any number, and a note about samples that were left out or used twice.

    Returns:
        A `Report`: whether the gradient is right (``ok``), how large the error is, and its causes, each with the
        evidence and a cure. ``print(report)`` shows all of it.

    Raises:
        UsageError: an argument is invalid, or the model is not ready, because its parameters have no shapes yet or none
            requires a gradient.
        BatchError: ``step`` took several optimizer steps, and `verify` cannot tell which samples belong to which.
        FitError: the whole batch does not fit into memory at once.
    """
    if loss_fn is None and batch is None and (verification := verification_of(model)) is not None:
        if (micro, step, collate, counts, joint, windows, reduction) != (*[None] * 6, "mean"):
            raise UsageError("verify(trainer) takes nothing else: what it does in a window is the trainer's own.")
        return verification(verify)
    if loss_fn is None:
        raise UsageError("verify(model, loss_fn, batch) needs a loss_fn and a batch, unless the first is a trainer.")
    if isinstance(step, MacroStep):
        step = functools.partial(_run_macro_step, step)
    require_valid_arguments(model, loss_fn, step, reduction, collate, windows)
    require_batch(batch)
    if micro is not None:
        checked_micro(micro)
    arguments.checked_joint(joint, arguments.checked_counts(counts))
    ranks = Ranks.of(model)
    if ranks.group is None and (batch is None or (isinstance(batch, Mapping | list | tuple) and not batch)):
        raise UsageError(
            f"no batch was given, or an empty one ({batch!r}): call verify(model, loss_fn, batch), with tensors whose "
            "first dimension is the samples."
        )
    with contextlib.ExitStack() as afterwards:
        afterwards.enter_context(turned_on())
        dropout = DropoutSwitch(model)
        afterwards.callback(dropout.restore)
        saved_state = SavedState(model, batch, is_sharded=ranks.is_sharded)
        afterwards.callback(saved_state.restore)
        afterwards.callback(_drop_held_gradients, model)
        reference, weighed = loss_fn, reduction
        whole_loss = None if joint is None else WholeLoss(loss_fn, joint, reduction, ranks)
        if whole_loss is not None:
            reference, weighed = whole_loss, "mean"
        big = BigBatch(model, reference, batch, ranks, collate, weighed)
        if not ranks.sum(1 if big.samples is None else big.samples.count):  # None: not a batch that can be cut
            raise UsageError("the batch has no samples, so there is nothing to verify.")
        if step is None and (why := next(filter(None, ranks.gather(big.why_uncut)), None)) is not None:
            raise BatchError(why)
        entries, first_loss = _entries_of(big, batch), big.loss
        saved_state.include_leaves(big.foreign_leaves)
        if not ranks.is_sharded:
            saved_state.include_outer(tensors_held_by([loss_fn, step]))
        step_or_default = step or default_step(loss_fn, micro, reduction, collate, counts, joint)
        run = functools.partial(watch, step_or_default, model, batch, saved_state, big.names, entries)
        run = functools.partial(run, has_draws=bool(big.draws) and not is_compiled(model))
        observation = run()
        observation.agree(ranks)
        reruns = _run_again(run, model, observation, ranks) if step is not None else None
        saved_state.restore_gradients()
        has_same_modes = all(module.training == training for module, training in observation.modes.items())
        _enter_modes(big.names, observation)
        case = compare(observation, reruns, big, weighed, divides_by_samples=step is None, expected_windows=windows)
        case.whole_loss = whole_loss
        has_moved = ranks.largest(float(saved_state.has_changed_outer and len(observation.windows) > 1)) > 0
        can_compare = not ranks.largest(float(not has_same_modes))
        case.has_another_loss = lambda: has_moved or (can_compare and big.has_another_loss(first_loss))
        case.run_doubled = functools.partial(_run_doubled, run, saved_state, big.names, observation)
        report: Report = ranks.broadcast(build_report(case, dropout.names))
    return report


def _entries_of(big: BigBatch, batch: object) -> list[nn.Module]:
    """The modules that the loss calls. If it fails for a batch that cannot be cut, say why it cannot."""
    try:
        return big.entries()
    except MacrobatchError:
        raise
    except Exception as error:
        if big.why_uncut is None:
            raise
        what = f"which is a {type(batch).__name__} ({type(error).__name__}: {error}). It cannot be cut: {big.why_uncut}"
        raise BatchError(f"loss_fn failed with the batch, {what}") from error


# ---------------------------------------------------------------------------------------------- running the step


def _run_macro_step(train: MacroStep, _: nn.Module, batch: Any) -> None:
    train(batch)


def _run_again(
    run: Callable[[], Observation], model: nn.Module, observation: Observation, ranks: Ranks
) -> tuple[Observation, Observation] | None:
    """Run a step that left gradients behind twice more: first with other gradients in ``.grad``, then with none.

    The other gradients are scrambled: a step that adds to its own gradients and clips could give the same result. And
    they are as large as gradients are before they are divided or clipped: beside those, small ones would not show.
    """
    has_left = any(gradient is not None for gradient in observation.final_gradients.values())
    if not ranks.largest(float(observation.has_stepped and has_left)):
        return None
    before = max((window.norm_before_step for window in observation.windows), default=0.0)
    after = math.sqrt(sum(float(g.double().norm()) ** 2 for g in observation.final_gradients.values() if g is not None))
    times = before / after if 0 < after < before < math.inf else 1.0
    try:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = _scramble(parameter.grad) * times
        after_others = run()
        for parameter in model.parameters():
            parameter.grad = None
        return after_others, run()
    except Exception:  # the step cannot be called again, e.g. because its loader is used up
        return None


def _scramble(gradient: Tensor) -> Tensor:
    """A gradient of the same norm in another direction."""
    if isinstance(gradient, DTensor):
        return -gradient
    signs = torch.arange(gradient.numel(), device=gradient.device).remainder(2).mul(2).sub(1)
    return (gradient.detach().reshape(-1).roll(1) * signs.to(gradient.dtype)).view_as(gradient)


def _run_doubled(
    run: Callable[..., Observation], saved_state: SavedState, names: Names, observation: Observation
) -> Observation | None:
    """Run a step once more with all gradients doubled; None if it cannot be called again."""
    saved_state.restore()
    try:
        return run(times=2.0)
    except Exception:  # the step cannot be called again
        return None
    finally:
        saved_state.restore_gradients()
        _enter_modes(names, observation)


def _enter_modes(names: Names, observation: Observation) -> None:
    """Give all modules the mode that they had in the step, and make the parameters trainable that the step trained."""
    for module, training in observation.modes.items():
        module.training = training
    for name, parameter in names.parameters().items():
        parameter.requires_grad_(parameter.requires_grad or name in observation.trainable_names)


def _drop_held_gradients(model: nn.Module) -> None:
    """Drop the gradients that a wrapper still holds from a window that was never closed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and common_wrapper([model]) is not None:
        select_backend(
            [model], sync="window", gather="micro", process_group=None, accumulate_dtype=None
        ).drop_gradients()


# ---------------------------------------------------------------------------------------------- comparing


def compare(
    observation: Observation,
    reruns: tuple[Observation, Observation] | None,
    big: BigBatch,
    reduction: Reduction,
    *,
    divides_by_samples: bool,
    expected_windows: int | None,
) -> Case:
    """Compare every window with the gradient of one big batch of its samples."""
    precision = Precision.of(big, observation)
    reduction = "mean" if big.terms else reduction  # one big batch computes the means of terms
    case = Case(observation, reruns, big, reduction, divides_by_samples, expected_windows, precision, big.calls())
    if not case.has_equal_step_counts:
        return case
    repeat_draws(case)
    is_only_window = len(observation.windows) == 1 and not case.is_open
    used: set[int] = set()
    for window in observation.windows:
        rows = _matched_samples(window, case, set(used) if window.is_probe else used)
        samples = None if is_only_window or rows is None else sorted({sample for part in rows.parts for sample in part})
        if samples is None and not is_only_window and len(observation.windows) > 1:
            if case.has_wrong_count:
                return case
            case.has_foreign_leftover = observation.has_foreign_leftover
            case.is_batch_unused = not case.has_foreign_leftover and _uses_no_sample(case)
            if case.has_foreign_leftover or case.is_batch_unused:
                return case
            raise BatchError(
                f"the step took {len(observation.windows)} optimizer steps, but verify cannot tell which samples went "
                "into which: it did not find the rows of the batch among the inputs of the model. Pass a batch for one "
                "optimizer step, or one whose tensors reach the model with the samples as their first dimension."
            )
        case.windows.append(_compare_window(case, window, rows, samples))
    case.is_batch_unused = any(window.is_wrong for window in case.windows) and _uses_no_sample(case)
    return case


def _uses_no_sample(case: Case) -> bool:
    """Whether no row of any call of the model is a row of the batch, though those of one big batch all are."""
    big = case.big
    if big.samples is None or big.ranks.world_size > 1:
        return False
    count = big.samples.count
    calls = [call for call in case.observation.calls if call.has_weight]
    if not calls or match_samples(case.big_batch_calls, case.big_batch_calls, count, set()) is None:
        return False
    return not any(has_common_rows(call, whole, count) for call in calls for whole in case.big_batch_calls)


def _matched_samples(window: ObservedWindow, case: Case, used: set[int]) -> MatchedSamples | None:
    """The samples of a window's calls on this rank; None on all ranks if any rank cannot match them."""
    big, calls = case.big, [call for call in window.calls if call.has_weight]
    rows = None if big.samples is None else match_samples(calls, case.big_batch_calls, big.samples.count, used)
    unknown = big.ranks.largest(float(rows is None)) or not big.ranks.largest(float(bool(calls)))
    return None if unknown else rows


def _compare_window(
    case: Case, window: ObservedWindow, rows: MatchedSamples | None, samples: list[int] | None
) -> Comparison:
    """Compare one window with the gradient of one big batch of its samples (None: of the whole batch)."""
    case.focus(window)
    expected = case.expected_gradient(samples)
    own = window.micro_batches if rows is None else len(rows.parts)
    return Comparison(
        observed=window,
        matches=rows,
        samples=samples,
        micro_batches=int(case.big.ranks.largest(own)),
        actual=Gradient(window.gradients, case.big.ranks.group).only(window.names),
        expected=expected.only(window.names),
        scale=expected.largest or 1.0,
        bound=case.precision.bound,
    )


# ---------------------------------------------------------------------------------------------- reporting


def build_report(case: Case, dropout_names: list[str]) -> Report:
    """The report of a case, with its causes and notes."""
    causes, notes = explain(case)
    if dropout_names:
        notes.append(f"dropout was switched off for the comparison ({name_list(dropout_names)})")
    if case.precision.why_not:
        notes.append(f"compared without a float64 copy: {case.precision.why_not}")
    worst = max(case.windows, key=lambda window: window.error, default=None)
    errors = {} if worst is None else worst.errors
    return Report(
        verdict=verdict_of(causes),
        max_relative_error=math.inf if worst is None else worst.error,
        bound=case.precision.bound if worst is None else worst.bound,
        reference=case.precision.reference,
        worst=tuple(
            ParameterError(name, errors[name]) for name in sorted(errors, key=errors.__getitem__)[: -NUM_WORST - 1 : -1]
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
