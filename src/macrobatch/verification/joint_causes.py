"""Finds the causes of a wrong step if the loss is a loss of the whole batch (``joint=``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from macrobatch._torch.snapshot import Snapshot
from macrobatch.verification.bigbatch import Weighted
from macrobatch.verification.catalogue import cause
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.coupling import first_coupling_layer, halves_of
from macrobatch.verification.gradient import Gradient, projection
from macrobatch.verification.report import Cause
from macrobatch.verification.whole_loss import WholeLoss


def factor_causes(case: Case, wrong: list[Comparison]) -> Iterator[Cause]:
    """The causes that a constant factor of the whole gradient, or of some parameters, reveals."""
    for window in wrong[:1]:
        if not window.actual.largest < float("inf"):
            yield cause(
                "not finite",
                "the gradient of the step is infinite or NaN, and that of one big batch is not.",
                "Look for encodings of length zero, or a scale that overflows.",
            )
            return
        whole = window.actual.distance(window.expected, window.factor) / (window.actual.largest or 1.0)
        if whole <= window.tolerance:
            yield _factor_cause(case, window)
            return
        factors = dict(_own_factors(window))
        if factors and None not in factors.values():
            found = ", ".join(f"{name} {factor:.4g}" for name, factor in list(factors.items())[:3])
            yield cause(
                "parameters counted several times",
                f"all gradients are right but for a factor of some parameters ({found}); there are "
                f"{window.micro_batches} micro-batches on {case.big.ranks.world_size} ranks.",
            )
            return


def unexplained(window: Comparison) -> Cause:
    """The cause if no known mistake explains the gradient."""
    return cause(
        "unexplained",
        f"the error is {window.error:.2g} of the largest gradient (factor {window.factor:.4g}), and no "
        "known mistake gives this gradient.",
        "Check that the step and joint compute the same loss of the same samples, that micro-batches are "
        "encoded twice with the same random numbers, and that encodings of other ranks have their gradients.",
    )


def _own_factors(window: Comparison) -> Iterator[tuple[str, float | None]]:
    """The parameters with a wrong gradient, each with the factor that explains it; None if no factor does."""
    for name, error in window.errors.items():
        if error > window.tolerance:
            actual, expected = window.actual.only({name}), window.expected.only({name})
            factor = actual.fit(expected)
            apart = actual.distance(expected, factor) / (actual.largest or 1.0)
            yield name, factor if apart <= max(window.tolerance, 1e-6) else None


def _factor_cause(case: Case, window: Comparison) -> Cause:
    ranks, factor = case.big.ranks.world_size, window.factor
    said = f"the gradient is {factor:.4g} times the right one"
    close = max(window.tolerance, 1e-6)
    if ranks > 1 and min(abs(factor * ranks - 1), abs(factor / ranks - 1)) <= close:
        return cause(
            "world size",
            f"{said}: there are {ranks} ranks.",
            "DDP and FSDP divide by the number of ranks. Where every rank computes the loss of all samples, and "
            "has gradients for its own rows alone, multiply by it.",
        )
    return cause(
        "constant factor",
        f"{said}, on all parameters alike.",
        "Check the divisions of the loss: that of the whole batch is divided by nothing else.",
    )


# ---------------------------------------------------------------------------------------------- how the batch is cut


def cut_causes(case: Case, window: Comparison) -> Iterator[Cause]:
    """The first mistake, if any, in how the step cuts the batch. On several ranks, only layers are checked."""
    whole = case.whole_loss
    assert whole is not None
    causes = [_layer_cause]
    if case.big.ranks.world_size == 1 and window.parts is not None:
        causes += [_micro_losses_cause, _left_out_cause, _items_cause]
    for find in causes:
        if (found := find(case, window, whole)) is not None:
            yield found
            return


def _layer_cause(case: Case, window: Comparison, whole: WholeLoss) -> Cause | None:
    halves = halves_of(case)
    if halves is None or case.big.ranks.largest(float(window.micro_batches < 2)):
        return None

    def encode(samples: list[int] | None) -> None:
        before = Snapshot([case.big.model])
        whole.encode(case.big.model, case.big.part(samples))
        before.restore()

    layer = case.big.ranks.broadcast(first_coupling_layer(case, halves[0], encode))
    if layer is None:
        return None
    return cause(
        "statistics over the batch",
        f"the output of {layer} for a sample depends on the other samples of its micro-batch.",
    )


def _micro_losses_cause(case: Case, window: Comparison, whole: WholeLoss) -> Cause | None:
    parts = window.parts or []
    if len(parts) < 2:
        return None
    by_samples, alike = [len(part) / sum(map(len, parts)) for part in parts], [1 / len(parts)] * len(parts)
    said = f"that of the losses of the {len(parts)} micro-batches, each of its own samples alone"
    tried: list[Gradient] = []
    for weights in (by_samples, alike):
        tried.append(case.big.gradient(_weighted(parts, weights)))
        if _fits(window, tried[-1]):
            return _coupled(f"the gradient is {said}.")
    if whole.encode(case.big.model, case.big.part(None)).loss is None:
        return None
    # The ordinary loss besides the joint one may be right.
    with whole.ordinary_alone():
        ordinary = case.big.gradient([Weighted(None, 1.0)])
        alone = [case.big.gradient(_weighted(parts, weights)) for weights in (by_samples, alike)]
    for both, own in zip(tried, alone, strict=True):
        coupled = both.plus(own, -1.0)
        times, each = projection(window.actual, [ordinary, coupled])
        apart = window.actual.plus(coupled, -each).distance(ordinary, times)
        if apart / (window.actual.largest or 1.0) <= window.tolerance:
            return _coupled(
                f"beside {times:.4g} times the ordinary loss, the gradient is {each:.4g} times {said}: a loss that is "
                "no mean over samples, such as one that balances experts, is computed for each of them."
            )
    return None


def _weighted(parts: Sequence[list[int]], weights: Sequence[float]) -> list[Weighted]:
    return [Weighted(part, weight) for part, weight in zip(parts, weights, strict=True)]


def _coupled(evidence: str) -> Cause:
    return cause(
        "loss that couples samples",
        evidence,
    )


def _left_out_cause(case: Case, window: Comparison, whole: WholeLoss) -> Cause | None:
    used = sorted({sample for part in window.parts or [] for sample in part})
    count = 0 if case.big.samples is None else case.big.samples.count
    if not 0 < len(used) < count:
        return None
    with whole.reaching(used):
        gradient = case.big.gradient([Weighted(None, 1.0)])
    if not _fits(window, gradient):
        return None
    return cause(
        "samples left out",
        f"{count - len(used)} of {count} samples are in the loss, but got no backward.",
        "Run the backward of every micro-batch, from the gradients of its encodings.",
    )


def _items_cause(case: Case, window: Comparison, whole: WholeLoss) -> Cause | None:
    """The cause, if the ordinary loss is not the mean of its parts' losses, weighted by their items."""
    parts = window.parts or []
    if whole.encode(case.big.model, case.big.part(None)).loss is None:
        return None
    with whole.ordinary_alone():
        items = [next(iter(own.values())) for own in case.big.items_of_terms(parts, anew=True)]
        pairs = zip(parts, items, strict=True)
        cut = case.big.gradient([Weighted(part, number / sum(items)) for part, number in pairs if number])
        one = case.big.gradient([Weighted(None, 1.0)])
    apart = one.distance(cut) / (one.largest or 1.0)
    if not window.tolerance < apart < float("inf"):
        return None
    return cause(
        "items that do not fit the loss",
        f"the ordinary loss is not a mean over the items in Encoded(loss, items, ...): that of the batch is "
        f"{apart:.2g} away from the mean of its micro-batches.",
    )


def _fits(window: Comparison, gradient: Gradient) -> bool:
    """Whether the gradient of the step is this gradient times any factor."""
    factor = window.actual.fit(gradient)
    return window.actual.distance(gradient, factor) / (window.actual.largest or 1.0) <= window.tolerance
