"""Read what a loss is a mean over from the root of its graph.

`cross_entropy(...)`, `0.5 * x.mean()` or `mse_loss(...) + 0.1 * l1_loss(...)` end in reductions that have saved what
they divide by. Everything between the loss and these reductions must be understood: otherwise the loss is unknown, with
the name of the node that was not understood. Nothing is guessed, and nothing is read from a device.

The loss of some programs joins samples inside the model, or between the model and the reduction. The few nodes below a
reduction are searched for that (`_Below`); what is further down cannot be told here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from macrobatch._torch.loss_nodes import (
    ADDITIONS,
    ALONG_DIMENSIONS,
    BY_ELEMENT,
    BY_ROW,
    COPIES,
    COPIES_OF_ONE,
    ELEMENTWISE,
    EXPANSION,
    JOINTS,
    LEAF,
    LOG_SOFTMAX,
    LOSSES,
    MEAN_ALONG,
    MEANS,
    NAMES,
    NEGATION,
    OF_ALL_ELEMENTS,
    PRODUCT,
    PRODUCT_WITH_NUMBER,
    PRODUCTS,
    QUOTIENT,
    QUOTIENT_BY_NUMBER,
    QUOTIENTS,
    REDUCTION_MEAN,
    REDUCTION_SUM,
    REVERSED_SUBTRACTION,
    SELECT,
    SINK,
    SUBTRACTIONS,
    SUM_ALONG,
    SUM_OF_ALL,
    SUMS,
    WEIGHTED,
    WITH_DATA,
    Edge,
    Node,
    alpha_of,
    dimensions_of,
    first_of,
    is_along_samples,
    is_parameter,
    is_sink,
    known_name,
    number_of,
    reduction_of,
    second_of,
    sizes_after,
    sizes_before,
    sizes_of_mean,
    sizes_of_predictions,
    total_weight_of,
)
from macrobatch._torch.tensors import number_on_host

MOST_NODES = 256  # of the root, where terms are added up
MOST_NODES_BELOW = 32  # below one reduction


class Part(NamedTuple):
    """One reduction that a loss adds up."""

    node: str  # its name, for example "NllLossBackward0"
    kind: str  # "mean" or "sum"
    # What a mean divides by; of a sum its own count, None if it has none.
    count: int | Tensor | None  # type: ignore[assignment]
    from_shape: bool  # whether the count is the size of a tensor, not a total weight
    factor: float | Tensor  # the product of the constants that it is multiplied by and divided by
    divisors: tuple[float, ...]  # those constants that divide, as far as the host knows them
    leaf_only: bool  # whether it is certain that only parameters are below it, and no data: a regulariser
    shape: tuple[int, ...] = ()  # of that tensor


class Anatomy(NamedTuple):
    """The reductions that a loss adds up, or the name of a node that was not understood."""

    parts: tuple[Part, ...]  # in the order of the expression; empty if unknown
    unknown: str | None = None
    quotient: Tensor | float | None = None  # what the sum that has its own count was divided by, if it was


def mean_at_once(loss: Tensor) -> Part | None:
    """The anatomy of a loss that is one node right above the model; None if more must be read. It saves 5 us."""
    root: Node = loss.grad_fn
    name = None if root is None else NAMES.get(type(root)) or known_name(root)
    if name is None or name not in BY_ELEMENT:
        return None
    for node, _ in root.next_functions:
        if node is not None and (NAMES.get(type(node)) or known_name(node)) in _MIXES:
            return None
    try:
        sizes = sizes_of_mean(root)
    except (RuntimeError, AttributeError):
        return None
    return Part(name, "mean", math.prod(sizes), True, 1.0, (), False, sizes) if sizes else None


def anatomy_of(loss: Tensor) -> Anatomy:
    """What a scalar loss is a mean over.

    >>> import torch
    >>> x = torch.ones(3, 5, requires_grad=True)
    >>> part = anatomy_of(0.5 * x.mean()).parts[0]
    >>> part.node, part.kind, part.count, part.factor
    ('MeanBackward0', 'mean', 15, 0.5)
    >>> anatomy_of(x.sum() / 3).unknown
    'DivBackward0'
    """
    root = loss.grad_fn
    if root is None or loss.numel() != 1:
        return Anatomy((), "AccumulateGrad" if root is None else root.name())
    reading, num_read = _Reading(), 1
    step = _Step(root.name(), root, loss.output_nr, 1.0, ())
    try:
        _READERS.get(step.name, _regulariser)(step, reading)
        while reading.pending and num_read < MOST_NODES:
            num_read += 1
            step = reading.pending.pop()
            _READERS.get(step.name, _regulariser)(step, reading)
    except _NotUnderstoodError as stopped:
        return Anatomy((), stopped.args[0])
    except (RuntimeError, AttributeError):  # what the node has saved is packed, freed or changed; or not there
        return Anatomy((), step.name)
    if reading.pending or not reading.parts:  # too many nodes; or all terms are multiplied by zero
        return Anatomy((), step.name)
    return Anatomy(tuple(reading.parts), None, reading.quotient)


class _NotUnderstoodError(Exception):
    """Its argument is the name of a node."""


# ---------------------------------------------------------------------------------------------- from the root down


class _Step(NamedTuple):
    """A node to read, and the constants between the loss and it."""

    name: str
    node: Node
    output: int
    factor: float | Tensor
    divisors: tuple[float | Tensor, ...]

    def total_factor(self) -> float | Tensor:
        """The product of all constants."""
        factor = self.factor
        for divisor in self.divisors:
            if not isinstance(divisor, Tensor) and divisor == 0:
                raise _NotUnderstoodError(QUOTIENT)
            factor = factor / divisor
        return factor

    def divisors_on_host(self) -> tuple[float, ...]:
        """Those that the host knows."""
        return tuple(one for one in self.divisors if not isinstance(one, Tensor))


class _Reading:
    """What was found so far, and the nodes that are still to be read: the last one first."""

    __slots__ = ("parts", "pending", "quotient")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.quotient: Tensor | float | None = None
        self.pending: list[_Step] = []

    def go_on(self, edge: Edge, factor: float | Tensor, divisors: tuple[float | Tensor, ...]) -> None:
        """Read on at the other end of an edge, unless there are constants only."""
        node, output = edge
        if node is not None:
            self.pending.append(_Step(node.name(), node, output, factor, divisors))

    def add_mean(self, step: _Step, count: int | Tensor, leaf_only: bool = False, shape: tuple[int, ...] = ()) -> None:
        """Add a mean over `count`."""
        from_shape = type(count) is int
        if not from_shape and not isinstance(count, Tensor):  # the sizes of nested tensors are symbols
            raise _NotUnderstoodError(step.name)
        factor, divisors = (step.total_factor(), step.divisors_on_host()) if step.divisors else (step.factor, ())
        self.parts.append(Part(step.name, "mean", count, from_shape, factor, divisors, leaf_only, shape))

    def add_sum(self, step: _Step, count: int | Tensor | None, leaf_only: bool = False) -> None:
        """Add a sum. Only one sum, which has its own count, may be divided: any other divisor is only a claim."""
        factor: float | Tensor = step.factor
        divisors: tuple[float, ...] = ()
        if leaf_only:  # it is the same in every micro-batch, whatever divides it
            factor, divisors = step.total_factor(), step.divisors_on_host()
        elif step.divisors:
            if count is None or len(step.divisors) > 1:
                raise _NotUnderstoodError(QUOTIENT)
            (self.quotient,) = step.divisors
        if isinstance(count, Tensor) and any(isinstance(p.count, Tensor) and p.kind == "sum" for p in self.parts):
            raise _NotUnderstoodError(step.name)  # it would not be known which of them was divided
        self.parts.append(Part(step.name, "sum", count, False, factor, divisors, leaf_only))


def _regulariser(step: _Step, reading: _Reading) -> None:
    """Whatever is computed from parameters only needs no more understanding."""
    if not _below(((step.node, step.output),), has_sizes=False).leaf_only:
        raise _NotUnderstoodError(step.name)
    reading.add_sum(step, None, leaf_only=True)


def _copy(step: _Step, reading: _Reading) -> None:
    reading.go_on(step.node.next_functions[0], step.factor, step.divisors)


def _selection(step: _Step, reading: _Reading) -> None:
    """``x[0]`` is the same number as ``x`` if there is no other."""
    if math.prod(sizes_before(step.node)) != 1:
        raise _NotUnderstoodError(step.name)
    _copy(step, reading)


def _sink(step: _Step, reading: _Reading) -> None:
    """Each output is one of the inputs."""
    if not is_sink(step.node):
        raise _NotUnderstoodError(step.name)
    reading.go_on(step.node.next_functions[step.output], step.factor, step.divisors)


def _negation(step: _Step, reading: _Reading) -> None:
    reading.go_on(step.node.next_functions[0], -step.factor, step.divisors)


def _product(step: _Step, reading: _Reading) -> None:
    first, second = _operands(step.node)
    if step.name == PRODUCT_WITH_NUMBER:
        constant: float | Tensor = number_of(step.node)
    elif second[0] is None:
        constant = _on_host(second_of(step.node))
    elif first[0] is None:
        first, constant = second, _on_host(first_of(step.node))
    else:
        return _regulariser(step, reading)
    if isinstance(constant, Tensor) or constant:  # zero times anything adds nothing to a gradient
        reading.go_on(first, step.factor * constant, step.divisors)
    return None


def _quotient(step: _Step, reading: _Reading) -> None:
    first, second = _operands(step.node)
    if second[0] is not None:
        return _regulariser(step, reading)
    if step.name == QUOTIENT_BY_NUMBER:
        divisor: float | Tensor = number_of(step.node)
        if _is_cross_entropy_of_probabilities(first[0]):
            return reading.add_mean(step, int(divisor))
    else:
        divisor = _on_host(second_of(step.node))
    return reading.go_on(first, step.factor, (*step.divisors, divisor))


def _addition(step: _Step, reading: _Reading) -> None:
    first, second = _operands(step.node)
    if second[0] is not None:
        if smoothed := _smoothed_cross_entropy(step):
            loss, total, count = smoothed
            _weighted_loss(loss, reading)
            return reading.add_mean(total, count)
        alpha = alpha_of(step.node)
        sign = -alpha if step.name in SUBTRACTIONS else alpha
        reading.go_on(second, step.factor if sign == 1 else step.factor * sign, step.divisors)
    return reading.go_on(first, step.factor, step.divisors)  # this one is read next


def _reversed_subtraction(step: _Step, reading: _Reading) -> None:
    """A constant minus ``alpha`` times this."""
    reading.go_on(step.node.next_functions[0], step.factor * -alpha_of(step.node), step.divisors)


def _operands(node: Node) -> tuple[Edge, Edge]:
    """The two operands. That of a constant has no node."""
    edges = node.next_functions
    return edges[0], edges[1] if len(edges) == 2 else (None, 0)


def _on_host(constant: Tensor) -> float | Tensor:
    """A constant as a number if the host has it: Python's numbers are saved as tensors."""
    number = number_on_host(constant)
    return constant if number is None else float(number)


# ---------------------------------------------------------------------------------------------- the reductions


def _weighted_loss(step: _Step, reading: _Reading) -> None:
    """`cross_entropy` and `nll_loss`, also with padding and class weights."""
    reduction, edges = reduction_of(step.node), step.node.next_functions
    source = edges[0][0]
    if source.name() == LOG_SOFTMAX and not is_along_samples(source):
        edges = source.next_functions
    mixing, _ = _below(edges, has_sizes=True)
    if mixing:
        raise _NotUnderstoodError(mixing)
    if reduction == REDUCTION_MEAN:
        reading.add_mean(step, total_weight_of(step.node))
    elif reduction == REDUCTION_SUM:
        reading.add_sum(step, total_weight_of(step.node))
    else:  # of one sample, without a dimension for samples
        raise _NotUnderstoodError(step.name)


def _loss(step: _Step, reading: _Reading) -> None:
    """The other losses that have nodes of their own."""
    reduction, sizes = reduction_of(step.node), sizes_of_predictions(step.node)
    mixing, _ = _below(step.node.next_functions, has_sizes=bool(sizes))
    if mixing or not reduction:
        raise _NotUnderstoodError(mixing or step.name)
    if reduction == REDUCTION_MEAN:
        reading.add_mean(step, math.prod(sizes[:-1] if step.name in BY_ROW else sizes), shape=sizes)
    else:
        reading.add_sum(step, None)


def _mean_or_sum(step: _Step, reading: _Reading) -> None:
    """A reduction of all elements. Of ``x.mean(0).mean()`` and ``x.mean(0).sum()``, it is that of ``x``."""
    is_mean, sizes = step.name in MEANS, sizes_before(step.node)
    end, means = _through_linear(step.node, sums=not is_mean)
    mixing, leaf_only = _below(end.next_functions, has_sizes=bool(sizes))
    if mixing and not leaf_only:
        if math.prod(sizes) != 1:
            raise _NotUnderstoodError(mixing)
        _copy(step, reading)  # the mean and the sum of one number are that number
    elif is_mean:
        sizes = sizes_before(means[-1]) if means else sizes
        reading.add_mean(step, math.prod(sizes), leaf_only, sizes)
    elif means:
        reading.add_mean(step, math.prod(map(_num_joined, means)), leaf_only, sizes_before(means[-1]))
    else:  # the sum of one number knows what it is a mean over, too
        reading.add_sum(step, 1 if math.prod(sizes) == 1 and not step.divisors else None, leaf_only)


def _through_linear(node: Node, *, sums: bool) -> tuple[Node, list[Node]]:
    """The last of the means along dimensions (and sums) that are directly below, and those means along the first."""
    means: list[Node] = []
    for _ in range(MOST_NODES_BELOW):
        source, _output = node.next_functions[0]
        name = source.name()
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


def _smoothed_cross_entropy(step: _Step) -> tuple[_Step, _Step, Tensor] | None:
    """With label smoothing: the steps of the mean over the targets, and of the sum that its own count divides."""
    first, second = (node for node, _ in _operands(step.node))
    if first is None or not first.name() == second.name() == PRODUCT_WITH_NUMBER:
        return None
    loss, quotient = first.next_functions[0][0], second.next_functions[0][0]
    if loss.name() not in WEIGHTED or quotient.name() != QUOTIENT:
        return None
    total, divisor = _operands(quotient)
    if total[0] is None or total[0].name() != SUM_OF_ALL or divisor[0] is not None:
        return None
    a, b = (step.factor * number_of(node) for node in (first, second))
    return (
        _Step(loss.name(), loss, 0, a, step.divisors),
        _Step(SUM_OF_ALL, total[0], 0, b, step.divisors),
        second_of(quotient),
    )


def _is_cross_entropy_of_probabilities(negation: Node) -> bool:
    """Whether its quotient is `cross_entropy` with probabilities as targets, divided by the number of samples."""
    if negation.name() != NEGATION:
        return False
    total = negation.next_functions[0][0]
    return bool(total.name() == SUM_OF_ALL and total.next_functions[0][0].name() == PRODUCT)


# ---------------------------------------------------------------------------------------------- below a reduction


class _Below(NamedTuple):
    """What is computed between the model and a reduction."""

    mixing: str | None  # the name of a node that mixes samples, or may do so
    leaf_only: bool  # whether there are parameters only, and no data


_MODEL_ONLY = _Below(None, leaf_only=False)


def _below(edges: tuple[Edge, ...], *, has_sizes: bool) -> _Below:
    """Look at the nodes below these edges, down to the model. `has_sizes`: what is there is no scalar.

    The first dimension is taken for that of the samples.
    """
    for node, _ in edges:
        if not has_sizes or (node is not None and node.name() in _MIXES):
            break
    else:
        return _MODEL_ONLY  # the usual case
    mixing, leaf_only, may_be_scalar, pending = None, True, not has_sizes, list(edges)
    for node, output in pending:  # this list grows
        if node is None:
            leaf_only = False
            continue
        name = node.name()
        mixes = _MIXES.get(name)
        if mixes is None:  # the model begins here. A scalar of it depends on all samples
            leaf_only = False
            is_mixed = may_be_scalar and not sizes_after(node, output)
        elif name == LEAF:
            leaf_only, is_mixed = leaf_only and is_parameter(node), False
        else:
            leaf_only, is_mixed = leaf_only and name not in WITH_DATA, mixes(node, output)
            sources = node.next_functions
            may_be_scalar = may_be_scalar or len(sources) > 1 or name == EXPANSION  # it was broadcast
            pending += [edge for edge in sources if edge not in pending]
        if is_mixed and mixing is None:
            mixing = name
        if len(pending) > MOST_NODES_BELOW:
            return _Below(mixing, leaf_only=False)
    return _Below(mixing, leaf_only)


# Whether a node mixes samples, by its name. All others are nodes of the model.
_MIXES: dict[str, Callable[[Node, int], bool]] = {
    name: mixes
    for names, mixes in (
        ({LEAF} | ELEMENTWISE, lambda _node, _output: False),
        (LOSSES, lambda node, _output: reduction_of(node) != 0),
        (OF_ALL_ELEMENTS, lambda _node, _output: True),
        (ALONG_DIMENSIONS, lambda node, _output: is_along_samples(node)),
        # A vector of scalars, each of which may be a mean of its own.
        (JOINTS, lambda node, output: len(sizes_after(node, output)) < 2),
    )
    for name in names
}

_READERS: dict[str, Callable[[_Step, _Reading], None]] = {
    name: reader
    for names, reader in (
        (WEIGHTED, _weighted_loss),
        (BY_ELEMENT | BY_ROW, _loss),
        (MEANS | SUMS, _mean_or_sum),
        (COPIES_OF_ONE, _copy),
        ({SELECT}, _selection),
        ({SINK}, _sink),
        ({NEGATION}, _negation),
        (PRODUCTS, _product),
        (QUOTIENTS, _quotient),
        (ADDITIONS | SUBTRACTIONS, _addition),
        ({REVERSED_SUBTRACTION}, _reversed_subtraction),
    )
    for name in names
}
