"""Finds the causes why a gradient is not that of one big batch, the likeliest first.

First come the causes that no weights of micro-batches can explain: ranks, randomness, missing gradients, samples that
influence each other. All ranks take the same path, because they decide by numbers that are reduced over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from macrobatch.verification.clipping import allow_clipping, hook_clipping_cause, scaled_clipping_cause
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.coupling import coupling_cause, rank_items_cause
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.joint_causes import cut_causes, factor_causes, unexplained
from macrobatch.verification.label_causes import label_causes, loss_padding_cause
from macrobatch.verification.report import Cause
from macrobatch.verification.sample_matching import num_indistinguishable
from macrobatch.verification.weighting import USE_ALL, USE_ONCE, causes_of_window, leftover_cause

MAX_DIAGNOSED = 4  # windows
NOISE = 1e-5  # the difference that two float32 sums of the same numbers may have on a GPU


def explain(case: Case) -> tuple[list[Cause], list[str]]:
    """The causes, the likeliest first, and the notes of a case. Without a cause the step is right."""
    notes: list[str] = []
    if not case.has_equal_step_counts:
        return [_step_count_cause(case)], notes
    _measure_bounds(case, notes)
    allow_clipping(case, notes)
    _add_notes(case, notes)
    wrong = [window for window in case.windows if window.is_wrong]
    of_samples = _sample_causes(case, notes)
    if case.whole_loss is not None:
        return [*_joint_causes(case, wrong), *of_samples], notes
    structural = [*_window_causes(case), *of_samples]
    causes = list(_step_causes(case, wrong))
    causes = causes or (label_causes(case, wrong) if wrong else [])
    causes = causes or [cause for window in _windows_to_diagnose(wrong) for cause in causes_of_window(case, window)]
    # If samples are unknown and the last window is open, the open window explains the wrong gradient.
    blind = any(window.parts is None for window in case.windows)
    ordered = [*structural, *causes] if case.is_open and blind else [*causes, *structural]
    if case.has_wrong_count:
        ordered.insert(0, _window_count_cause(case))
    named: dict[str, Cause] = {}
    for cause in (*ordered, scaled_clipping_cause(case), loss_padding_cause(case)):
        if cause is not None:
            named.setdefault(cause.name, cause)
    return list(named.values()), notes


def _measure_bounds(case: Case, notes: list[str]) -> None:
    """Raise the bound of wrong windows to what rounding explains in the step's own precision.

    The bound stays if one big batch is not repeatable, or if twice the loss does not have twice the gradient.
    """
    wrong = [window for window in case.windows if window.is_wrong]
    if not wrong or not math.isfinite(wrong[0].scale):
        return
    case.repeat_error = _scaling_error(case, wrong[0], 1.0)
    case.scaling_error = 0.0 if case.repeat_error else _scaling_error(case, wrong[0], 2.0)
    if case.repeat_error or case.scaling_error:
        return
    for window in wrong:
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
        names = _name_list(observation.unoptimized_names)
        notes.append(f"no optimizer that stepped holds {names}: they were not compared")
    if observation.added_names:
        names = _name_list(observation.added_names)
        notes.append(f"the step gave the model new parameters, {names}: they were not compared")
    if foreign := case.big.foreign_leaves:
        notes.append(f"the loss trains {len(foreign)} tensors outside of the model: they were not compared")
    if observation.partly_trainable_names:
        names = _name_list(observation.partly_trainable_names)
        notes.append(f"{names} learned in some micro-batches and were frozen in others")
    if observation.changed_batch_paths:
        notes.append(f"the step changed the batch that it was given: {_name_list(observation.changed_batch_paths)}")
    if observation.num_reevaluations:
        times = observation.num_reevaluations
        notes.append(f"an optimizer called its closure {times} times more: only the first call was compared")
    if observation.has_moved_weights:
        notes.append("the weights changed, but no torch.optim.Optimizer stepped: .grad was read when step returned")
    if case.windows and all(window.micro_batches == 1 for window in case.windows):
        notes.append("every optimizer step came after a single micro-batch: nothing was accumulated")


def _sample_causes(case: Case, notes: list[str]) -> list[Cause]:
    """The causes for several windows that do not use each sample once; notes, unless the number of windows was given.

    Without it, a step may go over the batch several times, or drop a short last window.
    """
    ranks, blind = case.big.ranks, any(window.parts is None for window in case.windows)
    if len(case.windows) <= 1 or ranks.largest(float(blind)) or case.big.samples is None:
        return []
    used = [{sample for part in window.parts or () for sample in part} for window in case.windows]
    left_out = 0.0 if case.is_open else ranks.sum(case.big.samples.count - len(set().union(*used)))
    twice = set()
    for index, window in enumerate(case.windows if ranks.world_size == 1 else ()):  # ranks repeat with weight 0
        for other, samples in zip(case.windows[:index], used, strict=False):
            if window.observed.names & other.observed.names:
                twice |= samples & used[index]
    _note_indistinguishable(case, notes)
    causes = []
    if left_out:
        evidence = f"{left_out:.0f} of {ranks.sum(case.big.samples.count):.0f} samples of the batch reached no backward"
        causes.append(Cause(name="samples left out", evidence=f"{evidence}.", cure=USE_ALL))
    if twice:
        evidence = f"{len(twice)} samples of the batch reached more than one optimizer step"
        causes.append(Cause(name="samples used twice", evidence=f"{evidence}.", cure=USE_ONCE))
    if case.expected_windows is not None:
        return causes
    notes.extend(f"{cause.evidence.removesuffix('.')}: a mistake, if each should be used once" for cause in causes)
    return []


def _note_indistinguishable(case: Case, notes: list[str]) -> None:
    """Add a note on samples that cannot be distinguished, if a window is wrong."""
    if not any(window.is_wrong for window in case.windows):
        return
    assert case.big.samples is not None
    if case.big.ranks.largest(num_indistinguishable(case.big_batch_calls, case.big.part(None), case.big.samples.count)):
        notes.append(
            "some samples are the same to the model, but differ elsewhere in the batch, e.g. in their labels. It is "
            "unknown which of them went into which optimizer step: verify assumed the order of the batch"
        )


# ---------------------------------------------------------------------------------------------- the whole step


def _step_causes(case: Case, wrong: list[Comparison]) -> Iterator[Cause]:
    """The first cause, if any, that weights of micro-batches cannot explain."""
    cause = _foreign_optimizer_cause(case) or _replaced_parameter_cause(case) or _idle_step_cause(case)
    cause = (
        cause
        or _nonfinite_reference_cause(case)
        or rank_items_cause(case)
        or (_cause_of_wrong_windows(case, wrong) if wrong else None)
    )
    if cause is not None:
        yield cause


def _cause_of_wrong_windows(case: Case, wrong: list[Comparison]) -> Cause | None:
    return (
        _synchronisation_cause(case, wrong)
        or _missing_gradient_cause(case, wrong)
        or _nonfinite_cause(wrong)
        or _randomness_cause(case, wrong)
        or hook_clipping_cause(case)
        or coupling_cause(case, wrong)
    )


def _joint_causes(case: Case, wrong: list[Comparison]) -> Iterator[Cause]:
    """The causes for a loss of the whole batch."""
    if case.has_wrong_count:
        yield _window_count_cause(case)
    early = _foreign_optimizer_cause(case) or _replaced_parameter_cause(case) or _idle_step_cause(case)
    if wrong and early is None:
        early = _synchronisation_cause(case, wrong) or _missing_gradient_cause(case, wrong)
    if early is not None:
        yield early
    elif wrong:
        early = _randomness_cause(case, wrong) if case.repeat_error else next(factor_causes(case, wrong), None)
        yield early or _randomness_cause(case, wrong) or next(cut_causes(case, wrong[0]), unexplained(wrong[0]))


def _window_count_cause(case: Case) -> Cause:
    """The cause of a wrong number of optimizer steps."""
    taken = len(case.observation.windows) if case.observation.has_stepped else 0
    were = "was" if case.expected_windows == 1 else "were"
    if case.expected_windows is not None and taken > case.expected_windows:
        cure = "Step after the last micro-batch of a window: if (index + 1) % steps == 0 or index + 1 == len(loader)."
    else:
        cure = "Step at the end of every window, or pass a batch for as many optimizer steps as you expect."
    return Cause(
        name="number of optimizer steps",
        evidence=f"the step took {taken} optimizer steps where {case.expected_windows} {were} expected.",
        cure=cure,
    )


def _step_count_cause(case: Case) -> Cause:
    most = case.big.ranks.largest(len(case.observation.windows))
    fewest = -case.big.ranks.largest(-len(case.observation.windows))
    return Cause(
        name="ranks out of step",
        evidence=f"one rank took {most:.0f} optimizer steps, another {fewest:.0f}.",
        cure="Give all ranks equally many micro-batches, or use Accumulator.batches(loader).",
    )


def _foreign_optimizer_cause(case: Case) -> Cause | None:
    if case.observation.has_stepped or not case.observation.num_foreign_steps:
        return None
    return Cause(
        name="parameters that received nothing",
        evidence=f"an optimizer stepped {case.observation.num_foreign_steps} times without any parameter of the model.",
        cure="Create the optimizer after any call that replaces parameters (fully_shard, .to(), deepcopy): "
        "optimizer = AdamW(model.parameters()).",
    )


def _replaced_parameter_cause(case: Case) -> Cause | None:
    if not case.big.ranks.largest(len(case.observation.replaced_names)):
        return None
    return Cause(
        name="parameters that received nothing",
        evidence=f"an optimizer holds the old {_name_list(case.observation.replaced_names)}, which the step replaced.",
        cure="Create the optimizer after any code that replaces parameters: optimizer = AdamW(model.parameters()).",
    )


def _idle_step_cause(case: Case) -> Cause | None:
    """The cause, if the step ran no backward: gradients from before are not its own, even if they are right."""
    observation = case.observation
    before, after = observation.initial_gradients, observation.final_gradients
    changed = any(_differs(gradient, before.get(name)) for name, gradient in after.items())
    if case.big.ranks.largest(float(observation.has_stepped or observation.num_backwards > 0 or changed)):
        return None
    return Cause(
        name="parameters that received nothing",
        evidence="no backward reached a parameter, and no .grad has changed since step was called.",
        cure="Train the model that is passed to step, not another one.",
    )


def _differs(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other))


def _nonfinite_reference_cause(case: Case) -> Cause | None:
    bad = [window for window in case.windows if not math.isfinite(window.scale)]
    if not bad:
        return None
    names = [name for name, size in case.expected_gradient(bad[0].samples).sizes().items() if not math.isfinite(size)]
    return Cause(
        name="not finite",
        evidence=f"one big batch itself gives {_name_list(names)} an infinite or NaN gradient.",
        cure="Verify with weights and a batch for which the gradients of the whole batch are finite.",
    )


def _synchronisation_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    ranks = case.big.ranks
    if ranks.group is None or ranks.is_sharded:
        return None
    for window in wrong:
        apart = window.actual.spread() / (window.expected.largest or 1.0)
        if apart > window.tolerance:
            return Cause(
                name="gradients not synchronised",
                evidence=f"the gradients of the ranks differ by {apart:.2g} of the largest gradient.",
                cure="Run the forward and backward of the window's last micro-batch outside of no_sync(), through the "
                "wrapped model.",
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
        if len(missing) == len([name for name, size in right.items() if size > relevant]):
            when = "the optimizer steps" if case.observation.has_stepped else "step returns"
            evidence = f"no parameter has a gradient when {when}"
        else:
            evidence = f"{_name_list(missing)} got no gradient"
        return Cause(
            name="parameters that received nothing",
            evidence=f"{evidence}; one big batch gives up to {most:.2g} there.",
            cure="Look for detach(), no_grad(), zero_grad() before step(), or a frozen, copied or replaced module; "
            "train the model that is passed to step.",
        )
    return None


def _nonfinite_cause(wrong: list[Comparison]) -> Cause | None:
    bad = [
        window
        for window in wrong
        if not math.isfinite(window.actual.largest) and math.isfinite(window.expected.largest)
    ]
    if not bad:
        return None
    names = [name for name, size in bad[0].actual.sizes().items() if not math.isfinite(size)]
    return Cause(
        name="not finite",
        evidence=f"{_name_list(names)} got an infinite or NaN gradient; one big batch has none.",
        cure="Look for a micro-batch without items, whose mean is 0 / 0. Back-propagate sums, and divide once.",
    )


def _randomness_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    """The cause, if one big batch changes from one run to the next, or with the seed."""
    if case.repeat_error:
        return Cause(
            name="dropout that differs",
            evidence=f"two runs of one big batch differ by {case.repeat_error:.2g}, so no cut of it can agree.",
            cure="Remove what changes from call to call: random numbers of a generator outside of the model, or state "
            "that a forward changes.",
        )
    first = case.expected_gradient(None)
    case.big.reseed(torch.initial_seed() % 2**31 + 1)
    apart = case.expected_gradient(None).distance(first) / (first.largest or 1.0)
    if apart <= wrong[0].tolerance:
        return None
    return Cause(
        name="dropout that differs",
        evidence=f"one big batch changes by {apart:.2g} with another seed, so no cut of it can agree.",
        cure="Remove the randomness: verify with model.eval(), or set the probability of F.dropout to 0.",
    )


# ---------------------------------------------------------------------------------------------- windows


def _window_causes(case: Case) -> Iterator[Cause]:
    """The causes of windows that are never closed, closed twice, or not cleared."""
    ranks = case.big.ranks
    if case.is_open:
        count = len({call.first_backward for call in case.observation.open_calls})
        yield Cause(
            name="window never closed",
            evidence=f"{count} micro-batches came after the last optimizer step, so they leak into the next window.",
            cure="Step at the end of the epoch too: if (index + 1) % steps == 0 or index + 1 == len(loader).",
        )
    repeats = sum(window.observed.num_repeated_steps for window in case.windows)
    if ranks.largest(repeats):
        yield Cause(
            name="window closed twice",
            evidence=f"an optimizer stepped {repeats} times on old gradients, without a backward since its last step.",
            cure="Call optimizer.step() once per window, and zero_grad() right after it.",
        )
    if not case.is_open and _adds_to_old_gradients(case):
        yield leftover_cause("the gradient that the previous call of step left in .grad")


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


def _name_list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
