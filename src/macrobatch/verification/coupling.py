"""Finds out whether samples influence each other: through a layer that uses the whole batch, or through the loss.

If they do, no weights of micro-batches give the gradient of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from macrobatch.verification.bigbatch import Weight, Weighted
from macrobatch.verification.catalogue import cause
from macrobatch.verification.comparison import Case, Comparison, tolerance_for
from macrobatch.verification.gradient import Gradient, projection
from macrobatch.verification.report import Cause
from macrobatch.verification.step_watcher import temporary_hooks


def coupling_cause(case: Case, wrong: list[Comparison]) -> Cause | None:
    """The cause, if samples influence each other: then one big batch is no weighted mean of its halves."""
    ranks, halves = case.big.ranks, halves_of(case)
    if halves is None or ranks.largest(float(all(window.micro_batches < 2 for window in wrong))):
        return None
    apart = _unexplained_share(case, halves)
    if apart <= wrong[0].tolerance:
        return None
    share = f"one big batch is {apart:.2g} away from any weighted mean of its halves"
    if (layer := ranks.broadcast(first_coupling_layer(case, halves[0]))) is not None:
        return cause(
            "statistics over the batch",
            f"the output of {layer} for a sample depends on the other samples; {share}.",
        )
    if (number := _num_separate_terms(case, halves, wrong[0].tolerance)) > 1:
        return cause(
            "terms with different items",
            f"{share}. But each of the {number} terms that the loss adds up is a weighted mean of its halves, with "
            "other weights than the others.",
            certainty="read",
        )
    return cause(
        "loss that couples samples",
        f"the model's outputs do not depend on the other samples, but the loss does: {share}.",
    )


def _num_separate_terms(case: Case, halves: list[list[int]], tolerance: float) -> int:
    """The number of terms that the loss adds up, if each by itself is a weighted mean of its halves; else 0."""
    if case.big.ranks.world_size > 1 or case.big.terms:
        return 0
    number = case.big.num_added()
    for term in range(number):
        with case.big.only_term(term):
            if _unexplained_share(case, halves) > tolerance:
                return 0
    return number


def rank_items_cause(case: Case, _wrong: list[Comparison]) -> Cause | None:
    """The cause, if the loss of a rank is not a mean over the items that ranks are weighted by.

    If it were one, the loss of a rank's share would be the mean of its halves' losses, weighted by items.
    """
    halves = halves_of(case)
    if case.reduction != "mean" or case.big.ranks.world_size == 1 or halves is None:
        return None
    items = case.big.items_of_terms(halves)
    totals = {name: sum(own[name] for own in items) or 1.0 for name in items[0]}
    weights = [{name: n / totals[name] for name, n in own.items()} for own in items]
    cut = case.big.gradient([Weighted(half, weight) for half, weight in zip(halves, weights, strict=True)])
    whole = case.big.gradient([Weighted(None, 1.0)])
    apart, tolerance = whole.distance(cut) / (whole.largest or 1.0), tolerance_for(case.precision.bound)
    if not tolerance < apart < math.inf or _unexplained_share(case, halves) > tolerance:
        return None
    counted = "items" if case.big.has_items else "samples"
    return cause(
        "items that do not fit the loss",
        f"ranks are weighted by their {counted}, but the loss is not a mean over those: the gradient of a rank's share "
        f"is {apart:.2g} away from the mean of its halves.",
    )


def halves_of(case: Case) -> list[list[int]] | None:
    """The two halves of this rank's share; None on all ranks if any rank has fewer than two samples."""
    samples = case.big.samples
    if case.big.ranks.largest(float(samples is None or samples.count < 2)):
        return None
    assert samples is not None
    everything = list(range(samples.count))
    return [everything[: samples.count // 2], everything[samples.count // 2 :]]


def _unexplained_share(case: Case, halves: list[list[int]]) -> float:
    """The share of the whole gradient that no weighted sum of the halves' gradients explains.

    Only the first rank's samples count: between ranks every wrapper takes a mean.
    """
    weight = 1.0 if case.big.ranks.rank == 0 else 0.0
    whole = case.big.gradient([Weighted(None, weight)])
    weights: list[Weight] = [{name: weight} for name in case.big.terms] or [weight]
    parts = [case.big.gradient([Weighted(half, weight)]) for half in halves for weight in weights]
    if not math.isfinite(sum(part.largest for part in parts)):  # a half without items, perhaps
        return 0.0
    return _residual(whole, parts).largest / (whole.largest or 1.0)


def _residual(whole: Gradient, parts: Sequence[Gradient]) -> Gradient:
    """`whole` minus its projection on the parts."""
    for part, weight in zip(parts, projection(whole, parts), strict=True):
        whole = whole.plus(part, -weight)
    return whole


def first_coupling_layer(
    case: Case, half: list[int], run: Callable[[list[int] | None], object] | None = None
) -> str | None:
    """The first module whose output for a sample depends on the other samples. `run` computes some samples."""
    assert case.big.samples is not None
    everything, some = _outputs(case, None, case.big.samples.count, run), _outputs(case, half, len(half), run)
    for (name, kind, whole), (other, _, part) in zip(everything, some, strict=False):
        if name != other or whole.shape[1:] != part.shape[1:]:
            continue
        apart = (whole[half].double() - part.double()).abs().max().item()
        if apart > 1e-4 * max(part.abs().max().item(), 1e-30):
            return f"{name or 'the model'} ({kind})"
    return None


def _outputs(
    case: Case, samples: list[int] | None, count: int, run: Callable[[list[int] | None], object] | None
) -> list[tuple[str, str, Tensor]]:
    """The outputs of all modules with a row for each sample, in the order of their calls."""
    found: list[tuple[str, str, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) % count == 0:
                # A layer may get (samples x positions) rows.
                rows = output.detach().reshape(count, -1)
                found.append((name, type(module).__name__, rows.clone()))

        return hook

    with temporary_hooks([module.register_forward_hook(note(name)) for name, module in case.big.model.named_modules()]):
        case.big.gradient([Weighted(samples, 0.0)]) if run is None else run(samples)
    return found
