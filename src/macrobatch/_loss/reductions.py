"""The reductions in which losses end, and what each of them is a mean over."""

from __future__ import annotations

import math

from torch import Tensor

from macrobatch._loss.below import MOST_NODES_BELOW, mixing_below
from macrobatch._loss.reading import NotUnderstoodError, Reading, Step, operands
from macrobatch._torch.loss_nodes import (
    BY_ROW,
    COPIES,
    LOG_SOFTMAX,
    MEAN_ALONG,
    MEANS,
    NEGATION,
    PRODUCT,
    PRODUCT_WITH_NUMBER,
    QUOTIENT,
    REDUCTION_MEAN,
    REDUCTION_SUM,
    SUM_ALONG,
    SUM_OF_ALL,
    WEIGHTED,
    Node,
    dimensions_of,
    has_class_weights,
    is_along_samples,
    name_of,
    number_of,
    reduction_of,
    second_of,
    sizes_before,
    sizes_of_predictions,
    total_weight_of,
)


def read_weighted_loss(step: Step, reading: Reading) -> None:
    """`cross_entropy` and `nll_loss`, also with padding and class weights."""
    reduction, edges = reduction_of(step.node), step.node.next_functions
    source = edges[0][0]
    if name_of(source) == LOG_SOFTMAX and not is_along_samples(source):
        edges = source.next_functions
    mixing = mixing_below(edges, has_sizes=True)
    if mixing:
        raise NotUnderstoodError(mixing)
    if reduction == REDUCTION_MEAN:
        reading.add_mean(step, total_weight_of(step.node))
    elif reduction == REDUCTION_SUM:
        # With class weights, the sum of those is a divisor that only some programs want.
        own = has_class_weights(step.node) and reading.known_divisor(step.divisors) is not None
        reading.add_sum(step, None if own else total_weight_of(step.node))
    else:  # of one sample, without a dimension for samples
        raise NotUnderstoodError(step.name)


def read_loss(step: Step, reading: Reading) -> None:
    """The other losses that have nodes of their own."""
    if reading.shared is not None and reading.add_regulariser(step):
        return
    reduction, sizes = reduction_of(step.node), sizes_of_predictions(step.node)
    mixing = mixing_below(step.node.next_functions, has_sizes=bool(sizes))
    if mixing or not reduction:
        raise NotUnderstoodError(mixing or step.name)
    if reduction == REDUCTION_MEAN:
        reading.add_mean(step, math.prod(sizes[:-1] if step.name in BY_ROW else sizes), shape=sizes)
    else:
        reading.add_sum(step, math.prod(sizes) if reading.takes_divisors else None, shape=sizes)


def read_mean_or_sum(step: Step, reading: Reading) -> None:
    """A reduction of all elements. Of ``x.mean(0).mean()`` and ``x.mean(0).sum()``, it is that of ``x``."""
    if reading.add_regulariser(step):
        return
    is_mean, sizes = step.name in MEANS, sizes_before(step.node)
    end, means = _through_linear(step.node, sums=not is_mean)
    mixing = mixing_below(end.next_functions, has_sizes=bool(sizes))
    if mixing:
        if math.prod(sizes) != 1:
            raise NotUnderstoodError(mixing)
        reading.look_through(step)  # the mean and the sum of one number are that number
    elif is_mean:
        sizes = sizes_before(means[-1]) if means else sizes
        reading.add_mean(step, math.prod(sizes), sizes)
    elif means:
        reading.add_mean(step, math.prod(map(_num_joined, means)), sizes_before(means[-1]))
    else:  # the sum of one number knows what it is a mean over, too
        reading.add_sum(step, 1 if math.prod(sizes) == 1 and not step.divisors else None)


def _through_linear(node: Node, *, sums: bool) -> tuple[Node, list[Node]]:
    """The last of the means along dimensions (and sums) that are directly below, and those means along the first."""
    means: list[Node] = []
    for _ in range(MOST_NODES_BELOW):
        source, _output = node.next_functions[0]
        name = name_of(source)
        if name == MEAN_ALONG:
            if is_along_samples(source):
                means.append(source)
        elif name == SUM_ALONG:
            if means or not sums:
                break
        elif name not in COPIES and name != NEGATION:
            break
        node = source
    return node, means


def _num_joined(mean: Node) -> int:
    """How many elements make one element of this mean along dimensions."""
    sizes = sizes_before(mean)
    return math.prod(sizes[dimension] for dimension in dimensions_of(mean))


# Two forms of `cross_entropy` are composed of several nodes. No program has the same ones: `MulBackward1` and
# `DivBackward1` are made by torch's own code, while Python's ``*`` and ``/`` make `MulBackward0` and `DivBackward0`.


def smoothed_cross_entropy(step: Step) -> tuple[Step, Step, Tensor] | None:
    """With label smoothing: the steps of the mean over the targets, and of the sum that its own count divides."""
    first, second = (node for node, _ in operands(step.node))
    if first is None or not name_of(first) == name_of(second) == PRODUCT_WITH_NUMBER:
        return None
    loss, quotient = first.next_functions[0][0], second.next_functions[0][0]
    if name_of(loss) not in WEIGHTED or name_of(quotient) != QUOTIENT:
        return None
    total, divisor = operands(quotient)
    if total[0] is None or name_of(total[0]) != SUM_OF_ALL or divisor[0] is not None:
        return None
    a, b = (step.factor * number_of(node) for node in (first, second))
    return (
        Step(name_of(loss), loss, 0, a, step.divisors),
        Step(SUM_OF_ALL, total[0], 0, b, step.divisors),
        second_of(quotient),
    )


def is_cross_entropy_of_probabilities(negation: Node) -> bool:
    """Whether its quotient is `cross_entropy` with probabilities as targets, divided by the number of samples."""
    if name_of(negation) != NEGATION:
        return False
    total = negation.next_functions[0][0]
    return bool(name_of(total) == SUM_OF_ALL and name_of(total.next_functions[0][0]) == PRODUCT)
