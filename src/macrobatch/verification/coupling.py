"""Samples that see each other: through a layer that looks at the whole batch, or through the loss.

No cut of a batch can have the gradient of the whole then, however its micro-batches are weighed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from macrobatch.verification.bigbatch import Term
from macrobatch.verification.comparison import Case, Compared, tolerance_for
from macrobatch.verification.gradient import Gradient, projection
from macrobatch.verification.report import Cause
from macrobatch.verification.witness import removed


def coupled(case: Case, wrong: list[Compared]) -> Cause | None:
    """Is one big batch a weighted mean of its halves? If not, samples see each other."""
    ranks, halves = case.big.ranks, _halves(case)
    if halves is None or ranks.largest(float(all(window.micro_batches < 2 for window in wrong))):
        return None
    apart = _beyond_weights(case, halves)
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
        cure="Keep what must meet in one micro-batch; or compute the embeddings of the whole batch first, without a "
        "graph, and let every micro-batch meet those.",
    )


def items_of_ranks(case: Case) -> Cause | None:
    """Between ranks one big batch is a mean of the ranks' losses, weighed by items: are they means over those?

    If so, the loss of a rank's share is the mean of those of its halves, weighed in the same way.
    """
    halves = _halves(case)
    if case.reduction != "mean" or case.big.ranks.world == 1 or halves is None:
        return None
    items = case.big.items(halves)
    cut = case.big.gradient([Term(half, n / (sum(items) or 1.0)) for half, n in zip(halves, items, strict=True)])
    whole = case.big.gradient([Term(None, 1.0)])
    apart, tolerance = whole.distance(cut) / (whole.largest or 1.0), tolerance_for(case.precision.bound)
    if not tolerance < apart < math.inf or _beyond_weights(case, halves) > tolerance:
        return None
    counted = "items" if case.big.counted else "samples"
    return Cause(
        name="items that do not fit the loss",
        evidence=f"ranks are weighed by their {counted}, but the loss is no mean over those: that of a rank's share is "
        f"{apart:.2g} away from the mean of its halves.",
        cure="Let loss_fn return the loss and what it is a mean over: loss, (labels != -100).sum() after any shift.",
    )


def _halves(case: Case) -> list[list[int]] | None:
    """Those of this rank's share; None, on all ranks, where some rank has none."""
    samples = case.big.samples
    if case.big.ranks.largest(float(samples is None or samples.count < 2)):
        return None
    assert samples is not None
    everything = list(range(samples.count))
    return [everything[: samples.count // 2], everything[samples.count // 2 :]]


def _beyond_weights(case: Case, halves: list[list[int]]) -> float:
    """What no weights of the halves explain of the whole, as a share of it.

    Of the first rank's share alone: between ranks every wrapper takes a mean.
    """
    weight = 1.0 if case.big.ranks.rank == 0 else 0.0
    whole, one, other = (case.big.gradient([Term(part, weight)]) for part in (None, *halves))
    if not math.isfinite(one.largest + other.largest):  # a half without items, perhaps
        return 0.0
    return _rest(whole, [one, other]).largest / (whole.largest or 1.0)


def _rest(whole: Gradient, parts: Sequence[Gradient]) -> Gradient:
    """What is left of `whole` when its projection on the others is taken away."""
    for part, weight in zip(parts, projection(whole, parts), strict=True):
        whole = whole.plus(part, -weight)
    return whole


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
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) % count == 0:
                # Layers may see (samples x positions) rows.
                rows = output.detach().reshape(count, -1)
                found.append((name, type(module).__name__, rows.clone()))

        return hook

    with removed([module.register_forward_hook(note(name)) for name, module in case.big.model.named_modules()]):
        case.big.gradient([Term(samples, 0.0)])
    return found
