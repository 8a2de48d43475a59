"""Finds the reasons why a step cannot be judged: random numbers, state, updates by hand, data of its own."""

from __future__ import annotations

import torch

from macrobatch.verification.catalogue import cause, doubtful_update
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.readings import unequal_means
from macrobatch.verification.report import Cause
from macrobatch.verification.sample_matching import num_indistinguishable


def unused_batch_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The reason, if the model got no row of the batch."""
    if not case.is_batch_unused:
        return None
    return cause(
        "step that does not use the batch",
        "no row of what the step gives the model is a row of the batch.",
        certainty="unknown",
    )


def update_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The cause, if weights were changed by hand, and not by a multiple of the gradient."""
    for window in case.windows:
        update = window.observed.update
        if update is None or window.observed.is_probe or not window.observed.is_cleared or window.is_wrong:
            continue
        moved, names = Gradient(update), window.observed.names
        received = Gradient(window.observed.gradients).only(names)
        rounding = 4 * max(
            torch.finfo(p.dtype).eps * float(p.detach().abs().max()) for p in case.big.trained_model.parameters()
        )
        if moved.distance(received, moved.fit(received)) > max(window.tolerance * moved.largest, rounding):
            return doubtful_update("what is subtracted from the weights is no multiple of the gradient")
    return None


def mixed_weights_cause(_case: Case, wrong: list[Comparison]) -> Cause | None:
    """The reason, if the micro-batches of a window had different weights."""
    if not any(window.observed.has_mixed_weights for window in wrong):
        return None
    return doubtful_update("the micro-batches of a window had different weights")


def early_random_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    """The cause, if random numbers cannot be repeated. What the losses say is certain even then."""
    if not case.unrepeatable or case.big.repetition is not None:
        return None
    means = next((found for window in wrong if (found := unequal_means(window)) is not None), None)
    return cause("mean of means", means, certainty="read") if means else random_cause(case.unrepeatable)


def random_cause(why: str) -> Cause:
    """The reason that random numbers are."""
    return cause(
        "random numbers that differ", f"one big batch cannot repeat what the step draws: {why}.", certainty="unknown"
    )


def changing_loss_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The reason, if one big batch is not the same twice."""
    if not case.repeat_error:
        return None
    if case.unrepeatable:
        return random_cause(case.unrepeatable)
    evidence = f"two runs of one big batch differ by {case.repeat_error:.2g}, so no cut of it can agree."
    return cause("loss that keeps state", evidence, certainty="unknown")


def outer_state_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The reason, if the step changed what the loss depends on outside of the model."""
    if not case.has_another_loss():
        return None
    evidence = "the step changes what the loss depends on outside of the model: the loss of the whole batch is another "
    evidence += "one after the step or a window of it, with the weights and buffers of before."
    return cause("loss that keeps state", evidence, certainty="unknown")


def inner_state_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    """The reason, if a forward changes what the next one gives."""
    if all(window.micro_batches < 2 for window in wrong) and len(case.windows) < 2:
        return None
    error = case.big.state_error()
    if not error:
        return None
    evidence = f"one big batch has another gradient, by {error:.2g}, if a forward came before it."
    return cause("loss that keeps state", evidence, certainty="unknown")


def alike_samples_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The reason, if samples cannot be told apart by the inputs of the model."""
    number = _num_alike(case) if len(case.windows) > 1 else 0
    if not number:
        return None
    evidence = f"{number} samples have the same inputs as another. verify assumed the order of the batch."
    return cause("samples that look alike", evidence, certainty="unknown")


def unexplained_random_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The reason, if nothing else explains a gradient of a loss that draws random numbers."""
    if not case.big.draws and not case.unrepeatable:
        return None
    return random_cause(case.unrepeatable or "with the same numbers, its gradient differs in a way that is unexplained")


def _num_alike(case: Case) -> float:
    """The number of samples that cannot be told apart by the inputs of the model."""
    samples = case.big.samples
    if samples is None:
        return 0.0
    return case.big.ranks.largest(num_indistinguishable(case.big_batch_calls, case.big.part(None), samples.count))
