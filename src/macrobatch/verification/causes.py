"""Finds the causes why a gradient is not that of one big batch, the likeliest first, or why that cannot be told.

Finders are functions of a case and its wrong windows. The tables `OF_STEPS`, `OF_WRONG_WINDOWS` and `DOUBTS` say which
of them are asked, in which order: the first that finds something wins. All ranks take the same path, because they
decide by numbers that are reduced over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from macrobatch.verification.catalogue import EVERY_WINDOW, cause, name_list
from macrobatch.verification.clipping import allow_clipping, hook_clipping_cause, scaled_clipping_cause
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.coupling import coupling_cause, rank_items_cause
from macrobatch.verification.doubts import (
    alike_samples_cause,
    changing_loss_cause,
    early_random_cause,
    inner_state_cause,
    mixed_weights_cause,
    outer_state_cause,
    random_cause,
    unexplained_random_cause,
    unused_batch_cause,
    update_cause,
)
from macrobatch.verification.draws import UnrepeatableError
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.joint_causes import cut_causes, factor_causes, unexplained
from macrobatch.verification.label_causes import label_causes, loss_padding_cause
from macrobatch.verification.report import Cause
from macrobatch.verification.weighting import causes_of_window, leftover_cause

MAX_DIAGNOSED = 4  # windows
NOISE = 1e-5  # the difference that two float32 sums of the same numbers may have on a GPU
Finder = Callable[[Case, list[Comparison]], Cause | None]


def explain(case: Case) -> tuple[list[Cause], list[str]]:
    """The causes, the likeliest first, and the notes of a case. Without a cause the step is right."""
    notes: list[str] = []
    if not case.has_equal_step_counts:
        return [_step_count_cause(case)], notes
    try:
        found = list(_causes(case, notes))
    except UnrepeatableError as error:
        found = [random_cause(str(error))]
    named: dict[str, Cause] = {}
    for each in sorted(found, key=lambda each: each.certainty == "unknown"):
        named.setdefault(each.name, each)
    return list(named.values()), notes


def _causes(case: Case, notes: list[str]) -> Iterator[Cause]:
    _measure_bounds(case, notes)
    allow_clipping(case, notes)
    _add_notes(case, notes)
    if case.has_wrong_count:
        yield _window_count_cause(case)
    wrong = [window for window in case.windows if window.is_wrong]
    of_samples = _sample_causes(case, notes)
    if case.whole_loss is not None:
        yield from _joint_causes(case, wrong)
        yield from of_samples
        return
    structural = [*_window_causes(case), *of_samples]
    causes = _causes_of_gradients(case, wrong)
    # If samples are unknown and the last window is open, the open window explains the wrong gradient.
    is_blind = any(window.parts is None for window in case.windows)
    yield from [*structural, *causes] if case.is_open and is_blind else [*causes, *structural]
    yield from (found for find in (scaled_clipping_cause, loss_padding_cause) if (found := find(case)) is not None)


def _first(finders: Sequence[Finder], case: Case, wrong: list[Comparison]) -> list[Cause]:
    """What the first of these finders that finds something has found."""
    return next(([found] for find in finders if (found := find(case, wrong)) is not None), [])


def _causes_of_gradients(case: Case, wrong: list[Comparison]) -> list[Cause]:
    """The causes of wrong gradients; those of the whole step win."""
    causes = _first(OF_STEPS, case, wrong) or (_first(OF_WRONG_WINDOWS, case, wrong) if wrong else [])
    causes = causes or (label_causes(case, wrong) if wrong else [])
    causes = causes or [found for window in _windows_to_diagnose(wrong) for found in causes_of_window(case, window)]
    if any(found.name == "unexplained" and found.certainty != "unknown" for found in causes):
        return _first(DOUBTS, case, wrong) or causes
    return causes


def _measure_bounds(case: Case, notes: list[str]) -> None:
    """Raise the bound of wrong windows to what rounding explains in the step's own precision.

    The bound stays if one big batch is not repeatable, or if twice the loss does not have twice the gradient.
    """
    wrong = [window for window in case.windows if window.is_wrong]
    if wrong:
        case.focus(wrong[0].observed)
    if not wrong or not math.isfinite(wrong[0].scale):
        return
    case.repeat_error = _scaling_error(case, wrong[0], 1.0)
    case.scaling_error = 0.0 if case.repeat_error else _scaling_error(case, wrong[0], 2.0)
    is_random = case.unrepeatable and case.big.repetition is None  # other numbers are no rounding
    if case.repeat_error or case.scaling_error or is_random:
        return
    for window in wrong:
        case.focus(window.observed)
        window.bound = case.precision.bound_for(case, window)
    most = max((window.bound for window in wrong), default=0.0)
    if most > max(1e-3, case.precision.bound):
        notes.append(f"one big batch is inexact in the step's precision, so errors up to {most:.2g} were allowed")


def _scaling_error(case: Case, window: Comparison, times: float) -> float:
    """The relative error between the gradient of `times` the loss and `times` the gradient; 0 if it is rounding."""
    again = case.expected_gradient(window.samples, times).only(window.observed.names)
    apart = again.distance(window.expected, times) / (times * window.scale)
    return 0.0 if apart <= max(case.precision.bound, NOISE) else apart


def _windows_to_diagnose(wrong: list[Comparison]) -> list[Comparison]:
    """Some of the wrong windows, the longest first: shorter ones are judged by it."""
    by_length = sorted(wrong, key=lambda window: -window.micro_batches)
    return by_length if len(wrong) <= MAX_DIAGNOSED else [*by_length[: MAX_DIAGNOSED - 1], by_length[-1]]


# ---------------------------------------------------------------------------------------------- notes


def _add_notes(case: Case, notes: list[str]) -> None:
    observation = case.observation
    if observation.has_stepped and observation.unoptimized_names:
        names = name_list(observation.unoptimized_names)
        notes.append(f"no optimizer that stepped holds {names}: they were not compared")
    if observation.added_names:
        names = name_list(observation.added_names)
        notes.append(f"the step gave the model new parameters, {names}: they were not compared")
    if foreign := case.big.foreign_leaves:
        notes.append(f"the loss trains {len(foreign)} tensors outside of the model: they were not compared")
    if observation.partly_trainable_names:
        names = name_list(observation.partly_trainable_names)
        notes.append(f"{names} learned in some micro-batches and were frozen in others")
    if observation.changed_batch_paths:
        notes.append(f"the step changed the batch that it was given: {name_list(observation.changed_batch_paths)}")
    if observation.num_reevaluations:
        times = observation.num_reevaluations
        notes.append(f"an optimizer called its closure {times} times more: only the first call was compared")
    if observation.has_moved_weights:
        notes.append("the weights changed, but no torch.optim.Optimizer stepped: .grad was read when that was noticed")
    if case.windows and all(window.micro_batches == 1 for window in case.windows):
        notes.append("every optimizer step came after a single micro-batch: nothing was accumulated")


# ---------------------------------------------------------------------------------------------- the whole step


def _foreign_optimizer_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    observation = case.observation
    if observation.has_stepped or not observation.num_foreign_steps:
        return None
    said = f"an optimizer stepped {observation.num_foreign_steps} times without any parameter of the model"
    if observation.has_foreign_gradients:
        return cause("optimizer of other tensors", f"{said}, but its tensors have gradients.", certainty="unknown")
    return cause(
        "parameters that received nothing",
        f"{said}.",
        "Create the optimizer after any call that replaces parameters (`fully_shard`, `.to()`, `deepcopy`): "
        "`optimizer = AdamW(model.parameters())`.",
    )


def _replaced_parameter_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    if not case.big.ranks.largest(len(case.observation.replaced_names)):
        return None
    return cause(
        "parameters that received nothing",
        f"an optimizer holds the old {name_list(case.observation.replaced_names)}, which the step replaced.",
        "Create the optimizer after any code that replaces parameters: `optimizer = AdamW(model.parameters())`.",
    )


def _idle_step_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The cause, if the step ran no backward: gradients from before are not its own, even if they are right."""
    observation = case.observation
    before, after = observation.initial_gradients, observation.final_gradients
    changed = any(_differs(gradient, before.get(name)) for name, gradient in after.items())
    if case.big.ranks.largest(float(observation.has_stepped or observation.num_backwards > 0 or changed)):
        return None
    called = f"the step called the model {observation.num_calls} times, but " if observation.num_calls else ""
    return cause(
        "parameters that received nothing",
        f"{called}no backward reached a parameter, and no .grad has changed since step was called.",
        "Train the model that is passed to step, not another one; and let step run until its last backward.",
    )


def _nonfinite_reference_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    bad = [window for window in case.windows if not math.isfinite(window.scale)]
    if not bad:
        return None
    names = [name for name, size in case.expected_gradient(bad[0].samples).sizes().items() if not math.isfinite(size)]
    return cause(
        "not finite",
        f"one big batch itself gives {name_list(names)} an infinite or NaN gradient.",
        "Verify with weights and a batch for which the gradients of the whole batch are finite.",
        "unknown",
    )


def _synchronisation_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    for window in wrong:
        apart = case.spread(window)
        if apart > window.tolerance:
            return cause(
                "gradients not synchronised",
                f"the gradients of the ranks differ by {apart:.2g} of the largest gradient.",
            )
    return None


def _missing_gradient_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    for window in wrong:
        sizes, right = window.actual.sizes(), window.expected.sizes()
        relevant = max(window.bound, 1e-9) * window.expected.largest
        missing = [name for name, size in right.items() if size > relevant and not sizes.get(name)]
        if not missing:
            continue
        most = max(right[name] for name in missing)
        evidence = f"{name_list(missing)} got no gradient; one big batch gives up to {most:.2g} there."
        if len(missing) < len([name for name, size in right.items() if size > relevant]):
            raw, others = Gradient(window.observed.raw), window.observed.names.difference(missing)
            close = window.bound * window.scale
            is_right = raw.only(window.observed.names).distance(window.expected) <= close
            is_right &= window.actual.only(others).distance(window.expected.only(others)) <= close
            if window.observed.raw and is_right:
                evidence += " They had the right one at the end of the last backward, and the others still do."
                return cause("parameters that received nothing", evidence, certainty="unknown")
            return cause("parameters that received nothing", evidence)
        when = "the optimizer steps" if case.observation.has_stepped else "step returns"
        evidence = f"no parameter has a gradient when {when}; one big batch gives up to {most:.2g} there."
        return cause("parameters that received nothing", evidence)
    return None


def _nonfinite_cause(_case: Case, wrong: list[Comparison]) -> Cause | None:
    for window in wrong:
        if not math.isfinite(window.actual.largest) and math.isfinite(window.expected.largest):
            names = [name for name, size in window.actual.sizes().items() if not math.isfinite(size)]
            return cause("not finite", f"{name_list(names)} got an infinite or NaN gradient; one big batch has none.")
    return None


def _dropped_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    number = case.observation.num_dropped
    if not number:
        return None
    evidence = f"{number} backwards were cleared away before any step, after a step of another optimizer."
    return cause("gradients cleared inside the window", evidence)


def _foreign_leftover_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    if not case.has_foreign_leftover:
        return None
    return leftover_cause("what the backward of another optimizer's step left in .grad")


OF_STEPS: tuple[Finder, ...] = (
    _foreign_leftover_cause,
    _dropped_cause,
    _foreign_optimizer_cause,
    _replaced_parameter_cause,
    _idle_step_cause,
    unused_batch_cause,
    _nonfinite_reference_cause,
    rank_items_cause,
    update_cause,
)
OF_WRONG_WINDOWS: tuple[Finder, ...] = (
    _synchronisation_cause,
    _missing_gradient_cause,
    _nonfinite_cause,
    mixed_weights_cause,
    changing_loss_cause,
    hook_clipping_cause,
    early_random_cause,
    coupling_cause,
)


DOUBTS: tuple[Finder, ...] = (outer_state_cause, inner_state_cause, alike_samples_cause, unexplained_random_cause)


# ---------------------------------------------------------------------------------------------- windows


def _sample_causes(case: Case, notes: list[str]) -> list[Cause]:
    """The causes for several windows that do not use each sample once; notes, unless the number of windows was given.

    Without it, a step may go over the batch several times, or drop a short last window.
    """
    ranks, blind = case.big.ranks, any(window.parts is None for window in case.windows)
    windows = [window for window in case.windows if not window.observed.is_probe]
    if len(windows) <= 1 or ranks.largest(float(blind)) or case.big.samples is None:
        return []
    used = [{sample for part in window.parts or () for sample in part} for window in windows]
    left_out = 0.0 if case.is_open else ranks.sum(case.big.samples.count - len(set().union(*used)))
    twice = set()
    for index, window in enumerate(windows if ranks.world_size == 1 else ()):  # ranks repeat with weight 0
        for other, samples in zip(windows[:index], used, strict=False):
            if window.observed.names & other.observed.names:
                twice |= samples & used[index]
    causes = []
    if left_out:
        evidence = f"{left_out:.0f} of {ranks.sum(case.big.samples.count):.0f} samples of the batch reached no backward"
        causes.append(cause("samples left out", f"{evidence}."))
    if twice:
        causes.append(
            cause("samples used twice", f"{len(twice)} samples of the batch reached more than one optimizer step.")
        )
    if case.expected_windows is not None:
        return causes
    notes.extend(f"{found.evidence.removesuffix('.')}: a mistake, if each should be used once" for found in causes)
    return []


def _window_count_cause(case: Case) -> Cause:
    """The cause of a wrong number of optimizer steps."""
    taken = len(case.observation.windows) if case.observation.has_stepped else 0
    were = "was" if case.expected_windows == 1 else "were"
    is_more = case.expected_windows is not None and taken > case.expected_windows
    return cause(
        "number of optimizer steps",
        f"the step took {taken} optimizer steps where {case.expected_windows} {were} expected.",
        f"Step after the last micro-batch of a window: {EVERY_WINDOW}" if is_more else "",
    )


def _step_count_cause(case: Case) -> Cause:
    most = case.big.ranks.largest(len(case.observation.windows))
    fewest = -case.big.ranks.largest(-len(case.observation.windows))
    return cause("ranks out of step", f"one rank took {most:.0f} optimizer steps, another {fewest:.0f}.")


def _joint_causes(case: Case, wrong: list[Comparison]) -> list[Cause]:
    """The causes for a loss of the whole batch."""
    finders = OF_STEPS[:5] + ((_synchronisation_cause, _missing_gradient_cause) if wrong else ())
    early = _first(finders, case, wrong)
    if early or not wrong:
        return early
    changing = _first([changing_loss_cause], case, wrong) or list(factor_causes(case, wrong))[:1]
    changing = changing or _first([early_random_cause], case, wrong)
    return changing or [next(cut_causes(case, wrong[0]), unexplained(wrong[0]))]


def _window_causes(case: Case) -> Iterator[Cause]:
    """The causes of windows that are never closed, closed twice, or not cleared."""
    ranks = case.big.ranks
    if case.is_open:
        count = len({call.first_backward for call in case.observation.open_calls})
        sizes, cure = [window.micro_batches for window in case.windows], ""
        evidence = f"{count} micro-batches came after the last optimizer step, so they leak into the next window."
        if len(sizes) > 1 and sizes[0] == 1 < sizes[1]:
            evidence += f" The first step came after {sizes[0]} micro-batch, the next after {sizes[1]} more."
            cure = f"`index % steps == 0` steps after the first micro-batch of a window. Write {EVERY_WINDOW}"
        yield cause("window never closed", evidence, cure)
    repeats = sum(window.observed.num_repeated_steps for window in case.windows)
    if ranks.largest(repeats):
        yield cause(
            "window closed twice",
            f"an optimizer stepped {repeats} times on old gradients, without a backward since its last step.",
        )
    if not case.is_open and _adds_to_old_gradients(case):
        yield leftover_cause("the gradient that the previous call of step left in .grad")


def _differs(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other))


def _adds_to_old_gradients(case: Case) -> bool:
    """Whether the step adds to gradients from before: a rerun gives the same result only if ``.grad`` was empty."""
    if case.big.ranks.largest(float(case.reruns is None)) or case.reruns is None or not case.windows:
        return False
    window = case.windows[0]
    after_others, clean = (
        Gradient(observation.windows[0].gradients, case.big.ranks.group).only(window.observed.names)
        for observation in case.reruns
    )
    close = window.tolerance * window.actual.largest
    return after_others.distance(window.actual) > close and clean.distance(window.actual) <= close
