"""Why a gradient is not that of one big batch: the causes, the likeliest first.

What no weights of micro-batches can explain (ranks, randomness, parameters that get nothing, samples that see each
other) is tested by itself, first. All ranks take the same path: they decide on numbers that were reduced over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from macrobatch.verification.comparison import Case, Compared
from macrobatch.verification.coupling import coupled
from macrobatch.verification.gradient import Gradient
from macrobatch.verification.report import Cause
from macrobatch.verification.weights import causes_of_window, left_over

DIAGNOSED = 4  # windows that are looked into


def explain(case: Case) -> tuple[list[Cause], list[str]]:
    """The causes, the likeliest first, and what else to say. No cause: the step is right."""
    notes: list[str] = []
    if not case.in_step:
        return [_out_of_step(case)], notes
    _measure(case)
    _find_clipping(case, notes)
    if case.seen.stepped and case.seen.unheld:
        notes.append(f"no optimizer that stepped holds {_listed(case.seen.unheld)}: they were not compared")
    _mention_samples(case, notes)
    wrong = [window for window in case.windows if window.is_wrong]
    structural = list(_of_the_structure(case))
    causes = list(_of_the_step(case, wrong))
    causes = causes or [cause for window in _to_diagnose(wrong) for cause in causes_of_window(case, window)]
    # A window that lacks samples which cannot be told is wrong because it was not closed after them.
    blind = any(window.parts is None for window in case.windows)
    ordered = [*structural, *causes] if case.is_open and blind else [*causes, *structural]
    named: dict[str, Cause] = {}
    for cause in ordered:
        named.setdefault(cause.name, cause)
    return list(named.values()), notes


def _mention_samples(case: Case, notes: list[str]) -> None:
    """Of several windows each is right for its own samples, whatever becomes of the others."""
    used = {sample for window in case.windows for part in window.parts or () for sample in part}
    blind = any(window.parts is None for window in case.windows)
    if len(case.windows) == 1 or blind or case.is_open or case.big.samples is None:
        return
    if left_out := case.big.ranks.sum(case.big.samples.count - len(used)):
        notes.append(f"{left_out:.0f} samples of the batch reached no backward")


def _measure(case: Case) -> None:
    """Where a window is off by more than the bound: is one big batch, in the step's own precision?"""
    for window in case.windows:
        if window.is_wrong:
            window.bound = case.precision.bound_for(case, window.samples, window.right)


def _to_diagnose(wrong: list[Compared]) -> list[Compared]:
    """The longest first: the others are judged by it."""
    by_length = sorted(wrong, key=lambda window: -window.micro_batches)
    return by_length if len(wrong) <= DIAGNOSED else [*by_length[: DIAGNOSED - 1], by_length[-1]]


# ---------------------------------------------------------------------------------------------- clipping is no mistake


def _find_clipping(case: Case, notes: list[str]) -> None:
    """Clipped gradients are compared up to the factor that clipping brings in."""
    candidates = []
    for window in case.windows:
        if not window.is_wrong or not 0 < window.factor < 1:
            continue
        norm = _norm(case, window.found)
        fits = window.found.distance(window.right, window.factor) <= window.tolerance * window.found.largest
        if fits and _was_reduced(case, window, norm):
            candidates.append((window, norm))
    clipped = []
    for window, norm in candidates:
        close = max(2e-5, 0.1 * window.bound)
        alike = any(
            abs(other_norm / norm - 1) < close and abs(other.factor / window.factor - 1) > 1e-3
            for other, other_norm in candidates
        )
        rounded = float(f"{norm:.{2 if close < 1e-4 else 1}g}")  # nobody clips to 0.9137
        if alike or abs(rounded / norm - 1) < close or _was_right(case, window):
            window.clipped = norm
            vars(window).pop("errors", None)  # they are smaller now
            clipped.append(norm)
    if clipped:
        notes.append(
            f"gradients were clipped, to a norm of {clipped[0]:.4g}: they were compared up to that factor. Verify "
            "without clipping to see their size too"
        )


def _was_reduced(case: Case, window: Compared, norm: float) -> bool:
    """Whether the gradient became smaller after the last backward, or may have."""
    before = window.window.size_before
    return not case.big.ranks.largest(float(0 < before < 1.001 * norm))


def _was_right(case: Case, window: Compared) -> bool:
    """Whether the gradient had the right size when the last backward ended, so that it was made smaller on purpose."""
    apart = window.window.size_before / (_norm(case, window.right) or 1.0) - 1
    return not case.big.ranks.largest(float(abs(apart) > max(window.bound, 1e-6)))


def _norm(case: Case, gradient: Gradient) -> float:
    square = gradient.dot(gradient)
    return math.sqrt(square if case.big.ranks.shards else square / case.big.ranks.world)


# ---------------------------------------------------------------------------------------------- of the step as a whole


def _of_the_step(case: Case, wrong: list[Compared]) -> Iterator[Cause]:
    """What makes looking at weights pointless."""
    if (cause := _strangers(case)) or (wrong and (cause := _of_wrong_windows(case, wrong))):
        yield cause


def _of_wrong_windows(case: Case, wrong: list[Compared]) -> Cause | None:
    return (
        _unsynchronised(case, wrong)
        or _received_nothing(case, wrong)
        or _nonfinite(wrong)
        or _random(case, wrong)
        or coupled(case, wrong)
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
    """Does one big batch agree with itself under another seed?"""
    first = case.right(None)
    torch.manual_seed(torch.initial_seed() % 2**31 + 1)
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
    """Whether a second call adds to the gradients that the first left."""
    if case.big.ranks.largest(float(case.again is None)) or case.again is None or not case.windows:
        return False
    group, window = case.big.ranks.group, case.windows[0]
    left = Gradient(case.seen.left, group).only(window.window.held)
    second = Gradient(case.again.windows[0].gradients, group).only(window.window.held)
    close = window.tolerance * max(window.found.largest, left.largest)
    return second.distance(window.found) > close and second.plus(left, -1.0).distance(window.found) <= close


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
