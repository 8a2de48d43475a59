"""Why a gradient is not that of one big batch: the causes, the likeliest first.

What no weights of micro-batches can explain (ranks, randomness, parameters that get nothing, samples that see each
other) is tested by itself, first. All ranks take the same path: they decide on numbers that were reduced over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from macrobatch.verification.aims import causes_of_aims, padding_in_the_loss
from macrobatch.verification.clipping import clipped_by_hooks, find_clipping
from macrobatch.verification.comparison import Case, Compared
from macrobatch.verification.coupling import coupled, items_of_ranks
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.report import Cause
from macrobatch.verification.rows import lookalikes
from macrobatch.verification.weights import causes_of_window, left_over

DIAGNOSED = 4  # windows that are looked into
NOISE = 1e-5  # what sums in float32 may be off from one time to the next, on a GPU


def explain(case: Case) -> tuple[list[Cause], list[str]]:
    """The causes, the likeliest first, and what else to say. No cause: the step is right."""
    notes: list[str] = []
    if not case.in_step:
        return [_out_of_step(case)], notes
    _measure(case, notes)
    find_clipping(case, notes)
    _mention(case, notes)
    wrong = [window for window in case.windows if window.is_wrong]
    structural = list(_of_the_structure(case))
    causes = list(_of_the_step(case, wrong))
    causes = causes or (causes_of_aims(case, wrong) if wrong else [])
    causes = causes or [cause for window in _to_diagnose(wrong) for cause in causes_of_window(case, window)]
    # A window that lacks samples which cannot be told is wrong because it was not closed after them.
    blind = any(window.parts is None for window in case.windows)
    ordered = [*structural, *causes] if case.is_open and blind else [*causes, *structural]
    if case.has_wrong_count:
        ordered.insert(0, _wrong_count(case))
    if (cause := padding_in_the_loss(case)) is not None:
        ordered.append(cause)
    named: dict[str, Cause] = {}
    for cause in ordered:
        named.setdefault(cause.name, cause)
    return list(named.values()), notes


def _measure(case: Case, notes: list[str]) -> None:
    """Where a window is off by more than the bound: is one big batch, in the step's own precision?

    Not by rounding where it changes from one time to the next, or where twice the loss has not twice the gradient.
    """
    wrong = [window for window in case.windows if window.is_wrong]
    if not wrong or not math.isfinite(wrong[0].scale):
        return
    case.unrepeatable = _apart(case, wrong[0], 1.0)
    case.unlinear = 0.0 if case.unrepeatable else _apart(case, wrong[0], 2.0)
    if case.unrepeatable or case.unlinear:
        return
    for window in wrong:
        window.bound = case.precision.bound_for(case, window)
    most = max((window.bound for window in wrong), default=0.0)
    if most > max(1e-3, case.precision.bound):
        notes.append(f"one big batch is itself inexact in the step's precision: errors up to {most:.2g} were allowed")


def _apart(case: Case, window: Compared, times: float) -> float:
    """How far one big batch, so many times its loss, is from so many times its gradient; 0 if that is rounding."""
    again = case.right(window.samples, times).only(window.window.held)
    apart = again.distance(window.right, times) / (times * window.scale)
    return 0.0 if apart <= max(case.precision.bound, NOISE) else apart


def _to_diagnose(wrong: list[Compared]) -> list[Compared]:
    """The longest first: the others are judged by it."""
    by_length = sorted(wrong, key=lambda window: -window.micro_batches)
    return by_length if len(wrong) <= DIAGNOSED else [*by_length[: DIAGNOSED - 1], by_length[-1]]


# ---------------------------------------------------------------------------------------------- what else to say


def _mention(case: Case, notes: list[str]) -> None:
    seen = case.seen
    if seen.stepped and seen.unheld:
        notes.append(f"no optimizer that stepped holds {_listed(seen.unheld)}: they were not compared")
    if seen.added:
        notes.append(f"the step gave the model new parameters, {_listed(seen.added)}: they were not compared")
    if foreign := case.big.foreign:
        notes.append(f"the loss trains {len(foreign)} tensors outside of the model: they were not compared")
    if seen.changing:
        notes.append(f"{_listed(seen.changing)} learned in some micro-batches and were frozen in others")
    if seen.changed:
        notes.append(f"the step changed the batch that it was given: {_listed(seen.changed)}")
    if seen.evaluations:
        notes.append(f"an optimizer called its closure {seen.evaluations} times more: the first call was compared")
    if seen.moved:
        notes.append("the weights changed, but no torch.optim.Optimizer stepped: .grad was taken when step returned")
    if len(case.windows) > 1 and all(window.micro_batches == 1 for window in case.windows):
        notes.append("every optimizer step came after a single micro-batch: nothing was accumulated")
    _mention_samples(case, notes)


def _mention_samples(case: Case, notes: list[str]) -> None:
    """Of several windows each is right for its own samples, whatever becomes of the others."""
    used = {sample for window in case.windows for part in window.parts or () for sample in part}
    blind = any(window.parts is None for window in case.windows)
    if len(case.windows) <= 1 or blind or case.big.samples is None:
        return
    left_out = 0.0 if case.is_open else case.big.ranks.sum(case.big.samples.count - len(used))
    if left_out:
        notes.append(f"{left_out:.0f} samples of the batch reached no backward")
    if not any(window.is_wrong for window in case.windows):
        return
    if case.big.ranks.largest(lookalikes(case.whole, case.big.part(None), case.big.samples.count)):
        notes.append(
            "some samples are the same to the model, but not in the rest of the batch, e.g. in their labels. Which of "
            "them went into which optimizer step cannot be told: it was taken to be in the batch's order"
        )


# ---------------------------------------------------------------------------------------------- of the step as a whole


def _of_the_step(case: Case, wrong: list[Compared]) -> Iterator[Cause]:
    """What makes looking at weights pointless."""
    cause = _strangers(case) or _replaced(case) or _did_nothing(case) or _without_reference(case)
    cause = cause or items_of_ranks(case) or (_of_wrong_windows(case, wrong) if wrong else None)
    if cause is not None:
        yield cause


def _of_wrong_windows(case: Case, wrong: list[Compared]) -> Cause | None:
    return (
        _unsynchronised(case, wrong)
        or _received_nothing(case, wrong)
        or _nonfinite(wrong)
        or _random(case, wrong)
        or clipped_by_hooks(case)
        or coupled(case, wrong)
    )


def _wrong_count(case: Case) -> Cause:
    """Another number of optimizer steps than was asked for."""
    taken = len(case.seen.windows) if case.seen.stepped else 0
    were = "was" if case.expected == 1 else "were"
    if case.expected is not None and taken > case.expected:
        cure = "Step after the last micro-batch of a window: if (index + 1) % steps == 0 or index + 1 == len(loader)."
    else:
        cure = "Step at the end of every window; or hand over a batch for as many optimizer steps as you expect."
    return Cause(
        name="number of optimizer steps",
        evidence=f"the step took {taken} optimizer steps where {case.expected} {were} expected.",
        cure=cure,
    )


def _out_of_step(case: Case) -> Cause:
    most = case.big.ranks.largest(len(case.seen.windows))
    fewest = -case.big.ranks.largest(-len(case.seen.windows))
    return Cause(
        name="ranks out of step",
        evidence=f"one rank took {most:.0f} optimizer steps, another {fewest:.0f}.",
        cure="Give every rank as many micro-batches; or let Accumulator.batches(loader) pair them up.",
    )


def _strangers(case: Case) -> Cause | None:
    if case.seen.stepped or not case.seen.strangers:
        return None
    return Cause(
        name="parameters that received nothing",
        evidence=f"an optimizer stepped {case.seen.strangers} times, but it holds no parameter of the model.",
        cure="Make the optimizer after whatever replaces parameters (fully_shard, .to(), deepcopy): "
        "optimizer = AdamW(model.parameters()).",
    )


def _replaced(case: Case) -> Cause | None:
    if not case.big.ranks.largest(len(case.seen.replaced)):
        return None
    return Cause(
        name="parameters that received nothing",
        evidence=f"an optimizer holds the old {_listed(case.seen.replaced)}: the step gave the model others.",
        cure="Make the optimizer after whatever replaces parameters: optimizer = AdamW(model.parameters()).",
    )


def _did_nothing(case: Case) -> Cause | None:
    """Gradients that were there before a step are not its own, however right they are."""
    seen = case.seen
    changed = any(_is_other(gradient, seen.before.get(name)) for name, gradient in seen.left.items())
    if case.big.ranks.largest(float(seen.stepped or seen.backwards > 0 or changed)):
        return None
    return Cause(
        name="parameters that received nothing",
        evidence="no backward reached a parameter, and every .grad is what it was when step was called.",
        cure="Train the very model that step is given.",
    )


def _is_other(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other))


def _without_reference(case: Case) -> Cause | None:
    bad = [window for window in case.windows if not math.isfinite(window.scale)]
    if not bad:
        return None
    names = [name for name, size in case.right(bad[0].samples).sizes().items() if not math.isfinite(size)]
    return Cause(
        name="not finite",
        evidence=f"one big batch itself gives {_listed(names)} an infinite or NaN gradient: nothing can be compared.",
        cure="Verify with weights and a batch whose loss, over the whole batch, has finite gradients.",
    )


def _unsynchronised(case: Case, wrong: list[Compared]) -> Cause | None:
    ranks = case.big.ranks
    if ranks.group is None or ranks.shards:
        return None
    for window in wrong:
        apart = window.found.spread() / (window.right.largest or 1.0)
        if apart > window.tolerance:
            return Cause(
                name="gradients not synchronised",
                evidence=f"the ranks step with different gradients: they are {apart:.2g} of the largest one apart.",
                cure="Call backward of the window's last micro-batch outside of no_sync(), through the wrapped model; "
                "no_sync() is read at the forward.",
            )
    return None


def _received_nothing(case: Case, wrong: list[Compared]) -> Cause | None:
    for window in wrong:
        sizes, right = window.found.sizes(), window.right.sizes()
        relevant = max(window.bound, 1e-9) * window.right.largest
        missing = [name for name, size in right.items() if size > relevant and not sizes.get(name)]
        if not missing:
            continue
        most = max(right[name] for name in missing)
        if len(missing) == len([name for name, size in right.items() if size > relevant]):
            evidence = (
                f"no parameter has a gradient when {'the optimizer steps' if case.seen.stepped else 'step returns'}"
            )
        else:
            evidence = f"{_listed(missing)} got no gradient"
        return Cause(
            name="parameters that received nothing",
            evidence=f"{evidence}; one big batch gives up to {most:.2g} there.",
            cure="Look for detach(), no_grad(), zero_grad() before step(), or a frozen, copied or replaced module; "
            "train the very model that step is given.",
        )
    return None


def _nonfinite(wrong: list[Compared]) -> Cause | None:
    bad = [
        window for window in wrong if not math.isfinite(window.found.largest) and math.isfinite(window.right.largest)
    ]
    if not bad:
        return None
    names = [name for name, size in bad[0].found.sizes().items() if not math.isfinite(size)]
    return Cause(
        name="not finite",
        evidence=f"{_listed(names)} got an infinite or NaN gradient; one big batch has none.",
        cure="Look for a micro-batch without items, whose mean is 0 / 0: back-propagate sums, and divide once.",
    )


def _random(case: Case, wrong: list[Compared]) -> Cause | None:
    """Does one big batch agree with itself, and under another seed?"""
    if case.unrepeatable:
        return Cause(
            name="dropout that differs",
            evidence=f"one big batch differs from itself by {case.unrepeatable:.2g} when it is computed twice, so no "
            "cut of it can agree.",
            cure="Compare without what changes from call to call: random numbers of a generator outside of the model, "
            "or state that a forward changes.",
        )
    first = case.right(None)
    case.big.reseed(torch.initial_seed() % 2**31 + 1)
    apart = case.right(None).distance(first) / (first.largest or 1.0)
    if apart <= wrong[0].tolerance:
        return None
    return Cause(
        name="dropout that differs",
        evidence=f"one big batch differs from itself by {apart:.2g} under another seed, so no cut of it can agree.",
        cure="Compare without randomness: verify with model.eval(), or with the probability of F.dropout set to 0.",
    )


# ---------------------------------------------------------------------------------------------- windows


def _of_the_structure(case: Case) -> Iterator[Cause]:
    """Windows that never end, or end twice, or run into the next."""
    ranks = case.big.ranks
    if case.is_open:
        count = len({call.micro for call in case.seen.open})
        yield Cause(
            name="window never closed",
            evidence=f"{count} micro-batches came after the last optimizer step: they run into the next window.",
            cure="Step at the end of the epoch too: if (index + 1) % steps == 0 or index + 1 == len(loader).",
        )
    repeats = sum(window.window.repeats for window in case.windows)
    if ranks.largest(repeats):
        yield Cause(
            name="window closed twice",
            evidence=f"an optimizer stepped {repeats} times without a backward since its last step, on old gradients.",
            cure="Call optimizer.step() once a window, and zero_grad() right after it.",
        )
    if not case.is_open and _runs_on(case):
        yield left_over("what step left in .grad when it was called before")


def _runs_on(case: Case) -> bool:
    """Whether a call adds to the gradients that an earlier one left: it comes to the same only where none were left."""
    if case.big.ranks.largest(float(case.again is None)) or case.again is None or not case.windows:
        return False
    window = case.windows[0]
    disturbed, clean = (
        Gradient(seen.windows[0].gradients, case.big.ranks.group).only(window.window.held) for seen in case.again
    )
    close = window.tolerance * window.found.largest
    return disturbed.distance(window.found) > close and clean.distance(window.found) <= close


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
