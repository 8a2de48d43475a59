"""Why a gradient is not that of one big batch.

Most mistakes of accumulation are weights: the gradient is a sum over the micro-batches, but one in which they count too
much or too little. So the gradients that known mistakes would give are computed from the very micro-batches that the
step used (`FAMILIES`), each up to a factor, and the first that fits is named; then its factor is. What no weights can
explain (statistics over the batch, losses that couple samples, randomness, rounding, ranks) is tested by itself before.

All ranks take the same path: every decision is made on numbers that were reduced over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from macrobatch.bigbatch import BigBatch, Gradient, Term
from macrobatch.report import Cause
from macrobatch.split import IGNORED, leaves
from macrobatch.window import Reduction
from macrobatch.witness import Call, Seen, Window

FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LIKE_ONE_BIG_BATCH = 3.0  # times the error that one big batch has itself in that precision
MEANINGLESS = 0.3  # no precision excuses more
DIAGNOSED = 4  # windows that are looked into


# ---------------------------------------------------------------------------------------------- what there is to explain


@dataclass(kw_only=True, eq=False)
class Compared:
    """A window, with what it should have been.

    Attributes:
        parts: for each micro-batch of this rank, its samples; None where they cannot be told.
        samples: those of this rank that the window was compared with; None: the whole batch.
        micro_batches: how many it has, on the rank that has most.
        bound: what its error may be.
        clipped: the norm that its gradient was clipped to, if it was.
    """

    window: Window
    parts: list[list[int]] | None
    samples: list[int] | None
    micro_batches: int
    found: Gradient
    right: Gradient
    bound: float
    clipped: float | None = None
    own_factor: float = 1.0  # that is left when the way its micro-batches are weighed is explained

    @cached_property
    def errors(self) -> dict[str, float]:
        """For each parameter, the difference as a share of the largest gradient of the model."""
        scale = self.right.largest or 1.0
        factor = 1.0 if self.clipped is None else self.factor
        return {name: apart / scale / factor for name, apart in self.found.distances(self.right, factor).items()}

    @property
    def error(self) -> float:
        return max(self.errors.values(), default=0.0)

    @cached_property
    def factor(self) -> float:
        """What the right gradient has to be multiplied with to come closest."""
        return self.found.fit(self.right)

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound

    @property
    def tolerance(self) -> float:
        """How well an explanation has to fit."""
        return min(max(10 * self.bound, 1e-9), 0.05)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a step may be off by rounding alone."""

    bound: float
    reference: str
    why_not: str | None  # there is no float64 copy
    autocast: torch.dtype | None

    @staticmethod
    def of(big: BigBatch, seen: Seen) -> Precision:
        dtypes = {p.dtype for p in big.model.parameters() if p.requires_grad}
        lowest = min(dtypes, key=lambda dtype: dtype.itemsize)
        floor = max(FLOOR.get(dtype, FLOOR[torch.bfloat16]) for dtype in dtypes)
        if seen.autocast is not None:
            floor = max(floor, FLOOR[seen.autocast] / 4)
        name = str(seen.autocast or lowest).removeprefix("torch.")
        if dtypes == {torch.float64} and seen.autocast is None:
            return Precision(bound=floor, reference="one big batch in float64", why_not=None, autocast=None)
        why_not = big.copy()
        if why_not is not None:
            floor = floor if lowest.itemsize < 4 else 5 * floor  # the reference is rounded too
            return Precision(
                bound=floor, reference=f"one big batch in {name}", why_not=why_not, autocast=seen.autocast
            )
        return Precision(
            bound=floor,
            reference=f"one big batch in float64 (the step ran in {name})",
            why_not=None,
            autocast=seen.autocast,
        )

    def bound_for(self, case: Case, samples: list[int] | None, right: Gradient) -> float:
        """With what one big batch is off itself, in the step's own precision."""
        if not case.big.copied:
            return self.bound
        with case.big.in_own_precision(self.autocast):
            own = case.right(samples)
        error = own.only(set(right.parts)).distance(right) / (right.largest or 1.0)
        return max(self.bound, min(LIKE_ONE_BIG_BATCH * error, MEANINGLESS))


@dataclass(eq=False)
class Case:
    """All that is known about a step."""

    seen: Seen
    again: Seen | None
    big: BigBatch
    reduction: Reduction
    divides: bool
    precision: Precision
    windows: list[Compared] = field(default_factory=list)

    @cached_property
    def in_step(self) -> bool:
        """Whether all ranks took as many optimizer steps."""
        own = float(len(self.seen.windows))
        return self.big.ranks.largest(own) == -self.big.ranks.largest(-own)

    def whole_calls(self) -> list[Call]:
        return self.big.calls()

    def total_samples(self, window: Compared) -> int | None:
        own = None if window.parts is None else sum(map(len, window.parts))
        if own is None:
            return None
        return int(self.big.ranks.sum(own))

    # ------------------------------------------------------------------------------------------ gradients

    def right(self, samples: list[int] | None) -> Gradient:
        """That of one big batch of these samples (None: all), of all ranks."""
        parts = [samples] if samples is None or samples else []
        if self.big.ranks.group is None and self.reduction == "mean":
            return self.big.gradient([Term(part, 1.0) for part in parts])
        items = self.big.items(parts)
        total = self.big.ranks.sum(sum(items)) or 1.0
        if self.reduction == "mean":
            return self.big.gradient([Term(part, n / total) for part, n in zip(parts, items, strict=True)])
        divisor = total if self.big.counted or self.divides else 1.0
        return self.big.gradient([Term(part, 1 / divisor) for part in parts])

    def weighted(self, parts: Sequence[Sequence[int]], weights: Sequence[float]) -> Gradient:
        """The mean of the parts' mean losses with these weights, of all ranks."""
        total = self.big.ranks.sum(sum(weights)) or 1.0
        items = self.big.items(parts) if self.reduction == "sum" else [1.0] * len(parts)
        return self.big.gradient(
            [Term(part, weight / total / (n or 1.0)) for part, weight, n in zip(parts, weights, items, strict=True)]
        )


# ---------------------------------------------------------------------------------------------- the main path


def explain(case: Case) -> tuple[list[Cause], list[str]]:
    """The causes, the likeliest first, and what else to say. No cause: the step is right."""
    notes: list[str] = []
    if not case.in_step:
        return [_out_of_step(case)], notes
    _measure(case)
    _find_clipping(case, notes)
    if case.seen.stepped and case.seen.unheld:
        notes.append(f"no optimizer that stepped holds {_listed(case.seen.unheld)}: they were not compared")
    wrong = [window for window in case.windows if window.is_wrong]
    causes = list(_of_the_step(case, wrong))
    causes = causes or [cause for window in _to_diagnose(case, wrong) for cause in _of_a_window(case, window)]
    structural = list(_of_the_structure(case))
    unique = {cause.name: cause for cause in reversed([*causes, *structural])}
    return [unique[name] for name in dict.fromkeys(cause.name for cause in [*causes, *structural])], notes


def _measure(case: Case) -> None:
    """Where a window is off by more than the bound: is one big batch, in the step's own precision?"""
    for window in case.windows:
        if window.is_wrong:
            window.bound = case.precision.bound_for(case, window.samples, window.right)


def _to_diagnose(case: Case, wrong: list[Compared]) -> list[Compared]:
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
        if window.found.distance(window.right, window.factor) <= window.tolerance * window.found.largest:
            candidates.append((window, _norm(case, window.found)))
    for window, norm in candidates:
        close = max(2e-5, 0.1 * window.bound)
        alike = [other for _, other in candidates if abs(other / norm - 1) < close]
        if len(alike) > 1 or abs(float(f"{norm:.2g}") / norm - 1) < close:
            window.clipped = norm
            vars(window).pop("errors", None)
            notes.append(
                f"a gradient was clipped to the norm {norm:.4g} (x {window.factor:.4g}): it was compared up to that factor"
            )


def _norm(case: Case, gradient: Gradient) -> float:
    square = gradient.dot(gradient)
    return math.sqrt(square if case.big.ranks.shards else square / case.big.ranks.world)


# ---------------------------------------------------------------------------------------------- of the step as a whole


def _of_the_step(case: Case, wrong: list[Compared]) -> Iterator[Cause]:
    """What makes looking at weights pointless."""
    for find in (_strangers, _unsynchronised, _received_nothing, _nonfinite, _random, _coupled):
        if cause := find(case, wrong):
            yield cause
            return


def _out_of_step(case: Case) -> Cause:
    most = case.big.ranks.largest(len(case.seen.windows))
    fewest = -case.big.ranks.largest(-len(case.seen.windows))
    return Cause(
        name="ranks out of step",
        evidence=f"one rank took {most:.0f} optimizer steps, another {fewest:.0f}.",
        cure="Give every rank as many micro-batches; or let Accumulator.batches(loader) pair them up.",
    )


def _strangers(case: Case, wrong: list[Compared]) -> Cause | None:
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
            evidence = f"no parameter has a gradient when {'the optimizer steps' if case.seen.stepped else 'step returns'}"
        else:
            evidence = f"{_listed(missing)} got no gradient"
        return Cause(
            name="parameters that received nothing",
            evidence=f"{evidence}; one big batch gives up to {most:.2g} there.",
            cure="Look for detach(), no_grad(), zero_grad() before step(), or a frozen, copied or replaced module; train "
            "the very model that step is given.",
        )
    return None


def _nonfinite(case: Case, wrong: list[Compared]) -> Cause | None:
    bad = [window for window in wrong if not math.isfinite(window.found.largest) and math.isfinite(window.right.largest)]
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
    if not wrong:
        return None
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


# ---------------------------------------------------------------------------------------------- samples that see others


def _coupled(case: Case, wrong: list[Compared]) -> Cause | None:
    """Is one big batch a weighted mean of its halves? If not, samples see each other."""
    ranks, samples = case.big.ranks, case.big.samples
    unknown = samples is None or samples.count < 2 or all(window.micro_batches < 2 for window in wrong)
    if not wrong or ranks.largest(float(unknown)):
        return None
    assert samples is not None
    everything = list(range(samples.count))
    halves = everything[: samples.count // 2], everything[samples.count // 2 :]
    # Of the first rank's share alone: between ranks every wrapper takes a mean.
    whole, one, other = (
        case.big.gradient([Term(part, 1.0 if ranks.rank == 0 else 0.0)]) for part in (None, *halves)
    )
    apart = _rest(whole, [one, other]).largest / (whole.largest or 1.0)
    if apart <= wrong[0].tolerance:
        return None
    share = f"one big batch is {apart:.2g} away from any weighted mean of its halves"
    if (layer := ranks.same(_first_layer_that_differs(case, halves[0]))) is not None:
        return Cause(
            name="statistics over the batch",
            evidence=f"{layer} gives a sample another output when other samples are with it; {share}.",
            cure="No cut can agree in training mode: freeze the statistics (module.eval()), or use GroupNorm or "
            "LayerNorm, which look at one sample.",
        )
    return Cause(
        name="loss that couples samples",
        evidence=f"the model's outputs do not depend on the other samples, but the loss does: {share}.",
        cure="Keep what must meet in one micro-batch: cache the embeddings of the whole batch first (GradCache), or let "
        "pairs meet within micro-batches on purpose and verify with loss_fn doing the same.",
    )


def _rest(whole: Gradient, parts: Sequence[Gradient]) -> Gradient:
    """What is left of `whole` when its projection on the others is taken away."""
    for part, weight in zip(parts, _projection(whole, parts), strict=True):
        whole = whole.plus(part, -weight)
    return whole


def _projection(whole: Gradient, parts: Sequence[Gradient]) -> list[float]:
    """The weights with which the parts add up to what is closest to the whole."""
    matrix = torch.tensor([[one.dot(other) for other in parts] for one in parts], dtype=torch.float64)
    vector = torch.tensor([whole.dot(part) for part in parts], dtype=torch.float64)
    return list(torch.linalg.lstsq(matrix, vector, driver="gelsd").solution.tolist())


def _first_layer_that_differs(case: Case, half: list[int]) -> str | None:
    """The first module whose output for the same samples depends on which others are with them."""
    assert case.big.samples is not None
    everything, some = _outputs(case, None, case.big.samples.count), _outputs(case, half, len(half))
    for (name, kind, whole), (other, _, part) in zip(everything, some, strict=False):
        if name != other or whole.shape[1:] != part.shape[1:]:
            continue
        apart = (whole[half].double() - part.double()).abs().max().item()
        if apart > 1e-4 * max(part.abs().max().item(), 1e-30):
            return f"{name or 'the model'} ({kind})"
    return None


def _outputs(case: Case, samples: list[int] | None, count: int) -> list[tuple[str, str, Tensor]]:
    """The outputs of all modules, in the order of their calls, that have a row for each sample."""
    found: list[tuple[str, str, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) % count == 0:
                # Layers may see (samples x positions) rows.
                rows = output.detach().reshape(count, -1)
                found.append((name, type(module).__name__, rows.clone()))

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in case.big.model.named_modules()]
    try:
        case.big.gradient([Term(samples, 0.0)])
    finally:
        for hook in hooks:
            hook.remove()
    return found


# ---------------------------------------------------------------------------------------------- weights of micro-batches


CLEARED = "gradients cleared inside the window"


class Family(NamedTuple):
    """A known way to weigh micro-batches; `gradient` has weights that add up to one."""

    name: str | None  # None: the right one
    gradient: Gradient
    evidence: str = ""
    cure: str = ""


class Fit(NamedTuple):
    """How well a family explains a gradient."""

    family: Family
    factor: float
    rest: float
    left_over: str | None


def _of_a_window(case: Case, window: Compared) -> list[Cause]:
    """The way its micro-batches were weighed, then the factor."""
    fit = _best_fit(case, window)
    if fit is None:
        return [_unexplained(case, window)]
    causes = []
    if fit.left_over:
        causes.append(_left_over(fit.left_over))
    if fit.family.name is not None:
        causes.append(Cause(name=fit.family.name, evidence=fit.family.evidence, cure=fit.family.cure))
    window.own_factor = fit.factor
    if abs(fit.factor - 1) > max(window.bound, 1e-9) and fit.family.name != CLEARED:
        causes.append(_of_a_factor(case, window, fit.factor))
    return causes or [_rounding(case, window)]


def _best_fit(case: Case, window: Compared) -> Fit | None:
    fits: list[Fit] = []
    families = list(_families(case, window))
    for left_over, found in [(None, window.found), *_without_left_over(case, window)]:
        for family in families:
            factor = found.fit(family.gradient)
            rest = found.distance(family.gradient, factor) / (found.largest or 1.0)
            if factor and rest <= window.tolerance and (left_over is None or abs(factor - 1) <= window.tolerance):
                fits.append(Fit(family, factor, rest, left_over))
    best = min((fit.rest for fit in fits), default=0.0)
    return next((fit for fit in fits if fit.rest <= 3 * best + window.bound), None)


def _without_left_over(case: Case, window: Compared) -> list[tuple[str, Gradient]]:
    """The gradient without what may have been there before the window began."""
    index, group = case.windows.index(window), window.found.group
    if index == 0:
        before, what = case.seen.before, "what was in .grad when step was called"
    else:
        before, what = case.windows[index - 1].window.gradients, f"the gradient of window {index}"
    left = Gradient(before, group).only(window.window.held)
    return [(what, window.found.plus(left, -1.0))] if left.largest else []


def _families(case: Case, window: Compared) -> Iterator[Family]:
    yield Family(None, window.right)
    parts, ranks = window.parts, case.big.ranks
    if ranks.largest(float(parts is None)) or not ranks.largest(float(bool(parts))):
        return
    assert parts is not None
    yield from _families_of_samples(case, window, parts)
    held, count, items = window.window.held, len(parts), case.big.items(parts)
    if window.micro_batches > 1:
        yield Family(
            "mean of means",
            case.weighted(parts, [1.0] * count).only(held),
            _unequal(case, window, parts, items),
            "Back-propagate sums and divide once by all items of the window: Accumulator.backward(loss, items=n).",
        )
    if ranks.world > 1:
        yield Family(
            "mean of means",
            case.weighted(parts, _shares(items)).only(held),
            f"every rank counts the same, but their items differ: {sum(items):g} on the first.",
            "Sum the items over all ranks too, and multiply the loss by the number of ranks, which the wrapper divides by.",
        )
    for before, after in _shifted(case, parts):
        yield Family(
            "labels counted before the shift",
            case.weighted(parts, before).only(held),
            f"the micro-batches weigh as if they had {_numbers(before)} items; after the shift they have {_numbers(after)}.",
            "Count what the loss is a mean over: (labels[..., 1:] != -100).sum().",
        )
    if case.big.counted:
        yield Family(
            "items that do not fit the loss",
            case.weighted(parts, items).only(held),
            "the micro-batches weigh as their items say, but one big batch is not the mean over those items.",
            "Let loss_fn return what its loss is a mean over, e.g. (labels != -100).sum() after any shift.",
        )
    if count > 1 and ranks.world == 1:
        yield Family(
            CLEARED,
            case.weighted(parts[-1:], [1.0]).only(held),
            f"only the last of {count} micro-batches counts.",
            "Call zero_grad() once a window, after optimizer.step(), not before every backward.",
        )


def _unequal(case: Case, window: Compared, parts: list[list[int]], items: list[float]) -> str:
    said = f"all {len(parts)} micro-batches count the same, but "
    if case.big.counted:
        return said + f"their items differ: {_numbers(items)}."
    weights = _true_weights(case, window, parts)
    if weights is None:
        return said + "the loss is a mean over items of which they have different numbers."
    return said + f"one big batch weighs them {' '.join(f'{weight:.3f}' for weight in weights)}."


def _true_weights(case: Case, window: Compared, parts: list[list[int]]) -> list[float] | None:
    """How much each micro-batch counts in one big batch: of a few, in one process, that can be solved for."""
    if case.big.ranks.world > 1 or len(parts) > 8:
        return None
    gradients = [case.weighted([part], [1.0]).only(window.window.held) for part in parts]
    return _projection(window.right, gradients)


def _families_of_samples(case: Case, window: Compared, parts: list[list[int]]) -> Iterator[Family]:
    """Where the step did not see each sample of the batch once."""
    assert case.big.samples is not None
    if window.samples is not None:
        return
    everyone, used = case.big.samples.count, [sample for part in parts for sample in part]
    left_out, twice = everyone - len(set(used)), len(used) - len(set(used))
    if case.big.ranks.largest(left_out):
        yield Family(
            "samples left out",
            case.right(sorted(set(used))).only(window.window.held),
            f"{left_out} of {everyone} samples reached no backward.",
            "Look for drop_last=True, a loop that ends too early, or a last micro-batch that is skipped.",
        )
    if case.big.ranks.largest(twice) and case.big.ranks.world == 1:
        yield Family(
            "samples used twice",
            case.weighted(parts, case.big.items(parts)).only(window.window.held),
            f"{twice} samples reached more than one backward.",
            "Look for a sampler or a loader that fills up the last micro-batch.",
        )


def _shares(items: list[float]) -> list[float]:
    return [n / (sum(items) or 1.0) for n in items]


def _shifted(case: Case, parts: list[list[int]]) -> Iterator[tuple[list[float], list[float]]]:
    """For whatever could be labels in the batch: how many each micro-batch has before and after the shift."""
    for path, leaf in leaves(case.big.part(None), "batch"):
        if not isinstance(leaf, Tensor) or leaf.ndim != 2 or leaf.is_floating_point() or leaf.dtype == torch.bool:
            continue
        if leaf.shape[1] < 2 or "mask" in path:
            continue
        before = [float((leaf[part] != IGNORED).sum()) for part in parts]
        after = [float((leaf[part][:, 1:] != IGNORED).sum()) for part in parts]
        if case.big.ranks.largest(sum(before) - sum(after)):
            yield before, after


# ---------------------------------------------------------------------------------------------- factors


def _of_a_factor(case: Case, window: Compared, factor: float) -> Cause:
    """What a factor, the same on all parameters, may come from."""
    close = max(window.tolerance, 1e-6)
    for cause, value in _known_factors(case, window, factor):
        if value and value != 1 and abs(factor / value - 1) <= close:
            return cause
    return Cause(
        name="constant factor",
        evidence=f"the gradient is {factor:.6g} times the right one, on all parameters alike.",
        cure="Look at what the loss is divided by, once for each micro-batch and once for each window.",
    )


def _known_factors(case: Case, window: Compared, factor: float) -> Iterator[tuple[Cause, float]]:
    count, world = window.micro_batches, case.big.ranks.world
    said = f"the gradient is {factor:.4g} times the right one"
    longest = max(case.windows, key=lambda other: other.micro_batches)
    if longest.micro_batches > count and abs(longest.own_factor - 1) <= window.tolerance:
        yield _short_window(said, count, longest.micro_batches), count / longest.micro_batches
    for before, after in _shifted(case, window.parts or []):
        total, right = case.big.ranks.sum(sum(before)), case.big.ranks.sum(sum(after))
        yield (
            Cause(
                name="labels counted before the shift",
                evidence=f"{said}: {right:.0f} labels are left of {total:.0f} when they are shifted.",
                cure="Count what the loss is a mean over: (labels[..., 1:] != -100).sum().",
            ),
            right / total,
        )
    if world > 1:
        for value, how in ((world, "too large"), (1 / world, "too small")):
            yield (
                Cause(
                    name="world size",
                    evidence=f"{said}: {world} times {how}, and there are {world} ranks.",
                    cure="DDP and FSDP divide by the number of ranks: multiply by it exactly where you divide by the "
                    "items of all ranks, and nowhere else.",
                ),
                value,
            )
    not_divided = "Divide once: (loss / number_of_micro_batches).backward(), or better by the items of the window."
    yield Cause(name="not divided", evidence=f"{said}: the number of its micro-batches.", cure=not_divided), count
    divided_twice = "Divide once: a library's backward() or a mean loss divides already."
    yield (
        Cause(name="divided twice", evidence=f"{said}: 1 / {count}, and {count} is the number of micro-batches.", cure=divided_twice),
        1 / count,
    )
    if window.parts is not None:
        samples = case.big.ranks.sum(sum(map(len, window.parts)))
        items = case.big.ranks.sum(sum(case.big.items(window.parts)))
        for number, what in ((items, "items"), (samples, "samples")):
            yield Cause(name="not divided", evidence=f"{said}: the number of its {what}.", cure=not_divided), number
            yield Cause(name="not divided", evidence=f"{said}: {what} / micro-batches.", cure=not_divided), number / count
            yield Cause(name="divided twice", evidence=f"{said}: 1 / {what}.", cure=divided_twice), 1 / number
            yield (
                Cause(name="divided twice", evidence=f"{said}: micro-batches / {what}.", cure=divided_twice),
                count / number,
            )
    if world > 1:
        yield Cause(name="not divided", evidence=f"{said}: micro-batches x ranks.", cure=not_divided), count * world
        yield Cause(name="not divided", evidence=f"{said}: micro-batches / ranks.", cure=not_divided), count / world
    configured = count / factor if factor else 0.0
    if count < round(configured) <= 10_000:
        yield _short_window(said, count, round(configured)), count / round(configured)
    if factor >= 1024:
        yield (
            Cause(
                name="loss scale",
                evidence=f"{said}, a power of two: the scale of a GradScaler.",
                cure="scaler.unscale_(optimizer) before looking at gradients, and scaler.step(optimizer) to step.",
            ),
            2.0 ** round(math.log2(factor)),
        )


def _short_window(said: str, count: int, configured: int) -> Cause:
    return Cause(
        name="short window",
        evidence=f"{said}: divided by {configured}, but the window has {count} micro-batches.",
        cure="Divide by the real number: the last window of an epoch may be short. Accumulator.batches(loader) knows.",
    )


# ---------------------------------------------------------------------------------------------- neither


def _rounding(case: Case, window: Compared) -> Cause:
    return Cause(
        name="sums in too low a precision",
        evidence=f"the gradient is right but for rounding, which is {window.error:.2g} of the largest one, where one big "
        f"batch has at most {window.bound:.2g}.",
        cure="Sum in float32: Accumulator(..., accumulate_dtype=torch.float32), or keep gradients and buffers in it.",
    )


def _unexplained(case: Case, window: Compared) -> Cause:
    cosine = window.found.dot(window.right) / math.sqrt(
        (window.found.dot(window.found) * window.right.dot(window.right)) or 1.0
    )
    if _is_rounded(window) and cosine > 0.9:
        return _rounding(case, window)
    return Cause(
        name="unexplained",
        evidence=f"the gradient is {window.error:.2g} of the largest one away from the right one (cosine {cosine:.4f}, "
        f"factor {window.factor:.4g}), and no known mistake gives it.",
        cure="Does step compute what loss_fn computes, on the same samples? Compare the two on one micro-batch first.",
    )


def _is_rounded(window: Compared) -> bool:
    """Whether it looks like sums in half precision: by its numbers, or by how small the error is."""
    for part in window.found.parts.values():
        if part is not None and part.dtype in (torch.bfloat16, torch.float16):
            return True
    return window.error < 0.03


# ---------------------------------------------------------------------------------------------- windows


def _of_the_structure(case: Case) -> Iterator[Cause]:
    """Windows that never end, or end twice, or run into the next."""
    ranks = case.big.ranks
    is_open = bool(ranks.largest(len(case.seen.open)))
    if case.seen.stepped and is_open:
        count = len({call.micro for call in case.seen.open})
        yield Cause(
            name="window never closed",
            evidence=f"{count} micro-batches came after the last optimizer step: their gradients run into the next window.",
            cure="Step at the end of the epoch too: if (index + 1) % steps == 0 or index + 1 == len(loader).",
        )
    repeats = sum(window.window.repeats for window in case.windows)
    if ranks.largest(repeats):
        yield Cause(
            name="window closed twice",
            evidence=f"an optimizer stepped {repeats} times without a backward since its last step, on old gradients.",
            cure="Call optimizer.step() once a window, and zero_grad() right after it.",
        )
    if not is_open and _runs_on(case):
        yield _left_over("what step left in .grad when it was called before")


def _runs_on(case: Case) -> bool:
    """Whether a second call adds to the gradients that the first left."""
    if case.big.ranks.largest(float(case.again is None)) or case.again is None or not case.windows:
        return False
    group, window = case.big.ranks.group, case.windows[0]
    left = Gradient(case.seen.left, group).only(window.window.held)
    second = Gradient(case.again.windows[0].gradients, group).only(window.window.held)
    close = window.tolerance * max(window.found.largest, left.largest)
    return second.distance(window.found) > close and second.plus(left, -1.0).distance(window.found) <= close


def _left_over(what: str) -> Cause:
    return Cause(
        name="gradients left over",
        evidence=f"the gradient holds {what}, besides that of its own window.",
        cure="optimizer.zero_grad() after every optimizer.step(), or before the first backward of a window.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _numbers(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers[:8]) + (" ..." if len(numbers) > 8 else "")
