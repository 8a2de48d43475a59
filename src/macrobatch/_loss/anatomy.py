"""Read what a loss is a mean over from the root of its graph.

`cross_entropy(...)`, `0.5 * x.mean()` or `mse_loss(...) + 0.1 * l1_loss(...)` end in reductions that have saved what
they divide by. Everything between the loss and these reductions must be understood: otherwise the loss is unknown, with
the name of the node that was not understood. Nothing is guessed, and nothing is read from a device.

The loss of some programs joins samples inside the model, or between the model and the reduction. The few nodes below a
reduction are searched for that (`below.py`); what is further down cannot be told here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from macrobatch._loss.below import MOST_NODES_BELOW, mixing_below, slices_of_parameters
from macrobatch._torch.loss_nodes import (
    ADDITIONS,
    BY_ELEMENT,
    BY_ROW,
    COPIES,
    COPIES_OF_ONE,
    LOG_SOFTMAX,
    MEAN_ALONG,
    MEANS,
    NEGATION,
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
    UNDERSTOOD,
    WEIGHTED,
    Edge,
    Node,
    alpha_of,
    dimensions_of,
    first_of,
    has_class_weights,
    is_along_samples,
    is_sink,
    name_of,
    number_of,
    one_saved_as_second,
    reduction_of,
    second_of,
    sizes_before,
    sizes_of_plain_mean,
    sizes_of_predictions,
    total_weight_of,
)
from macrobatch._torch.tensors import number_on_host

MOST_NODES = 256  # of the root, where terms are added up


class Part(NamedTuple):
    """One reduction that a loss adds up."""

    node: str  # its name, for example "NllLossBackward0"
    kind: str  # "mean" or "sum"; with `takes_divisors` also "unknown"
    # What a mean divides by; of a sum its own count, None if it has none.
    count: int | Tensor | None  # type: ignore[assignment]
    from_shape: bool  # whether the count is the size of a tensor, not a total weight
    factor: float | Tensor  # the product of the constants that it is multiplied by and divided by
    divisors: tuple[float, ...]  # those constants that divide, as far as the host knows them
    leaf_only: bool  # whether it is certain that only parameters are below it, and no data: a regulariser
    shape: tuple[int, ...] = ()  # of that tensor
    quotient: Tensor | float | None = None  # what a sum that has its own count was divided by, if it was
    is_rest: bool = False  # whether it is the second part of a mean, as label smoothing makes
    slices: tuple[tuple[int, ...], ...] = ()  # of parameters that a regulariser uses


class Known(NamedTuple):
    """What the caller of a program knows about its losses."""

    divisors: tuple[Tensor, ...] = ()  # numbers of items that were given to the program, to divide sums by
    means: tuple[tuple[Tensor, Any], ...] = ()  # means that were computed for the program, with their counts
    other: Tensor | None = None  # a term that the caller computes in another way: it is not read


NOTHING_KNOWN = Known()


class Anatomy(NamedTuple):
    """The reductions that a loss adds up, or the name of a node that was not understood."""

    parts: tuple[Part, ...]  # in the order of the expression; empty if unknown
    unknown: str | None = None
    divisors: tuple[float, ...] = ()  # constants that divide all of it, as far as the host knows them

    @property
    def quotient(self) -> Tensor | float | None:
        """What the first sum that has its own count was divided by, if there is one."""
        return next((part.quotient for part in self.parts if part.quotient is not None), None)


def plain_mean(loss: Tensor) -> Part | None:
    """The anatomy of a loss that is one mean right above the model; None for all others."""
    sizes = sizes_of_plain_mean(loss.grad_fn)
    if sizes is None:
        return None
    return Part(name_of(loss.grad_fn), "mean", math.prod(sizes), True, 1.0, (), False, sizes)


def anatomy_of(loss: Tensor, known: Known = NOTHING_KNOWN, *, takes_divisors: bool = False) -> Anatomy:
    """What a scalar loss is a mean over.

    `takes_divisors`: sums may be divided by any numbers. These are in `factor` and `divisors`, nothing is compared, and
    a sum over all elements has their number as its count. Terms that are not understood are parts too. This says what
    each item weighs, not what it should weigh.

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
        return Anatomy((), "AccumulateGrad" if root is None else name_of(root))
    reading, num_read = _Reading(known, takes_divisors=takes_divisors), 1
    step = _Step(name_of(root), root, loss.output_nr, 1.0, ())
    try:
        reading.read(step)
        while reading.pending and num_read < MOST_NODES:
            num_read += 1
            step = reading.pending.pop()
            reading.read(step)
    except _NotUnderstoodError as stopped:
        return Anatomy((), stopped.args[0])
    except (RuntimeError, AttributeError):  # what the node has saved is packed, freed or changed; or not there
        return Anatomy((), step.name)
    if reading.pending or not reading.parts:  # too many nodes; or all terms are multiplied by zero
        return Anatomy((), step.name)
    divisors = reading.parts[0].divisors if reading.shared is None else reading.shared
    return Anatomy(tuple(reading.parts), None, divisors)


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

    __slots__ = ("known", "known_nodes", "parts", "pending", "shared", "takes_divisors")

    def __init__(self, known: Known, *, takes_divisors: bool) -> None:
        self.known, self.takes_divisors = known, takes_divisors
        self.known_nodes: list[tuple[Edge, Any]] = [(_source_of(mean), count) for mean, count in known.means]
        if known.other is not None:
            self.known_nodes.append((_source_of(known.other), None))
        self.parts: list[Part] = []
        self.shared: tuple[float, ...] | None = None  # the divisors above the first addition
        self.pending: list[_Step] = []

    def read(self, step: _Step) -> None:
        """Read a node."""
        if self.has_known(step):
            return
        try:
            _READERS.get(step.name, _regulariser)(step, self)
        except (_NotUnderstoodError, RuntimeError, AttributeError) as stopped:
            if not self.takes_divisors:
                raise
            name = stopped.args[0] if isinstance(stopped, _NotUnderstoodError) else step.name
            factor = step.total_factor()
            self.parts.append(Part(name, "unknown", None, False, factor, step.divisors_on_host(), leaf_only=False))

    def go_on(self, edge: Edge, factor: float | Tensor, divisors: tuple[float | Tensor, ...]) -> None:
        """Read on at the other end of an edge, unless there are constants only."""
        node, output = edge
        if node is not None:
            self.pending.append(_Step(name_of(node), node, output, factor, divisors))

    def has_known(self, step: _Step) -> bool:
        """Whether this is one of the terms that the caller knows. Then it was added."""
        for (node, output), count in self.known_nodes:
            if node is step.node and output == step.output:
                if count is not None:
                    total = step.total_factor()
                    self.parts.append(Part(step.name, "mean", count, False, total, step.divisors_on_host(), False))
                return True
        return False

    def known_divisor(self, divisors: tuple[float | Tensor, ...]) -> Tensor | None:
        """Which of these divisors was given to the program."""
        return next((one for one in self.known.divisors for other in divisors if one is other), None)

    def add_mean(
        self,
        step: _Step,
        count: int | Tensor,
        shape: tuple[int, ...] = (),
        *,
        is_rest: bool = False,
    ) -> None:
        """Add a mean over `count`."""
        from_shape = type(count) is int
        if self.known_divisor(step.divisors) is not None:  # no sum
            raise _NotUnderstoodError(QUOTIENT)
        if not from_shape and not isinstance(count, Tensor):  # the sizes of nested tensors are symbols
            raise _NotUnderstoodError(step.name)
        factor, divisors = (step.total_factor(), step.divisors_on_host()) if step.divisors else (step.factor, ())
        self.parts.append(Part(step.name, "mean", count, from_shape, factor, divisors, False, shape, None, is_rest))

    def add_regulariser(self, step: _Step) -> bool:
        """Add a term of parameters only, which is the same in every micro-batch, if it is one."""
        slices = slices_of_parameters(step.node)
        if slices is not None:
            factor, divisors = step.total_factor(), step.divisors_on_host()
            self.parts.append(Part(step.name, "sum", None, False, factor, divisors, True, slices=slices))
        return slices is not None

    def add_sum(self, step: _Step, count: int | Tensor | None, shape: tuple[int, ...] = ()) -> None:
        """Add a sum. Only a sum that has its own count may be divided: any other divisor is only a claim."""
        quotient: Tensor | float | None = None
        factor: float | Tensor = step.factor
        divisors: tuple[float, ...] = ()
        if self.takes_divisors:
            factor, divisors = step.total_factor(), step.divisors_on_host()
        elif (given := self.known_divisor(step.divisors)) is not None:
            rest = step._replace(divisors=tuple(one for one in step.divisors if one is not given))
            factor, divisors = rest.total_factor(), rest.divisors_on_host()
            if count is None:
                self.parts.append(Part(step.name, "mean", given, False, factor, divisors, False))
                return
            quotient = given
        elif step.divisors:
            index = _own_divisor(step.divisors, count)
            if index is None:
                raise _NotUnderstoodError(QUOTIENT)
            quotient = step.divisors[index]
            rest = step._replace(divisors=step.divisors[:index] + step.divisors[index + 1 :])
            factor, divisors = rest.total_factor(), rest.divisors_on_host()
        self.parts.append(Part(step.name, "sum", count, False, factor, divisors, False, shape, quotient))


def _own_divisor(divisors: tuple[float | Tensor, ...], count: int | Tensor | None) -> int | None:
    """The place of the divisor that may be the count of a sum. None if it is unknown which one, or if none is."""
    if count is None or len(divisors) == 1:
        return None if count is None else 0
    own = number_on_host(count) if isinstance(count, Tensor) else count
    if own is None:
        on_device = [index for index, divisor in enumerate(divisors) if isinstance(divisor, Tensor)]
        return on_device[0] if len(on_device) == 1 else None
    of_host = {index: divisor for index, divisor in enumerate(divisors) if not isinstance(divisor, Tensor)}
    return next((index for index, divisor in of_host.items() if divisor in (own, max(own, 1))), None)


def _source_of(loss: Tensor) -> Edge:
    """Where a number was computed, before it was copied."""
    node, output = loss.grad_fn, loss.output_nr
    while node is not None and name_of(node) in COPIES:
        node, output = node.next_functions[0]
    return node, output


def _regulariser(step: _Step, reading: _Reading) -> None:
    """Whatever is computed from parameters only needs no more understanding.

    Neither does a sum that the model itself, or a function of the program, has computed, if it was divided by the
    number of items that was given to the program.
    """
    if step.name not in UNDERSTOOD and reading.known_divisor(step.divisors) is not None:
        return reading.add_sum(step, None)
    if not reading.add_regulariser(step):
        raise _NotUnderstoodError(step.name)
    return None


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
    elif (given := one_saved_as_second(step.node, reading.known.divisors)) is not None:
        divisor = given
    else:
        divisor = _on_host(second_of(step.node))
    above = tuple(one for one in step.divisors if isinstance(one, Tensor) or one != 1)
    return reading.go_on(first, step.factor, (*above, divisor))


def _addition(step: _Step, reading: _Reading) -> None:
    first, second = _operands(step.node)
    if second[0] is not None:
        if smoothed := _smoothed_cross_entropy(step):
            loss, total, count = smoothed
            _weighted_loss(loss, reading)
            return reading.add_mean(total, count, is_rest=True)
        if reading.shared is None:
            reading.shared = step.divisors_on_host()
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
    if name_of(source) == LOG_SOFTMAX and not is_along_samples(source):
        edges = source.next_functions
    mixing = mixing_below(edges, has_sizes=True)
    if mixing:
        raise _NotUnderstoodError(mixing)
    if reduction == REDUCTION_MEAN:
        reading.add_mean(step, total_weight_of(step.node))
    elif reduction == REDUCTION_SUM:
        # With class weights, the sum of those is a divisor that only some programs want.
        own = has_class_weights(step.node) and reading.known_divisor(step.divisors) is not None
        reading.add_sum(step, None if own else total_weight_of(step.node))
    else:  # of one sample, without a dimension for samples
        raise _NotUnderstoodError(step.name)


def _loss(step: _Step, reading: _Reading) -> None:
    """The other losses that have nodes of their own."""
    if reading.shared is not None and reading.add_regulariser(step):
        return
    reduction, sizes = reduction_of(step.node), sizes_of_predictions(step.node)
    mixing = mixing_below(step.node.next_functions, has_sizes=bool(sizes))
    if mixing or not reduction:
        raise _NotUnderstoodError(mixing or step.name)
    if reduction == REDUCTION_MEAN:
        reading.add_mean(step, math.prod(sizes[:-1] if step.name in BY_ROW else sizes), shape=sizes)
    else:
        reading.add_sum(step, math.prod(sizes) if reading.takes_divisors else None, shape=sizes)


def _mean_or_sum(step: _Step, reading: _Reading) -> None:
    """A reduction of all elements. Of ``x.mean(0).mean()`` and ``x.mean(0).sum()``, it is that of ``x``."""
    if reading.add_regulariser(step):
        return
    is_mean, sizes = step.name in MEANS, sizes_before(step.node)
    end, means = _through_linear(step.node, sums=not is_mean)
    mixing = mixing_below(end.next_functions, has_sizes=bool(sizes))
    if mixing:
        if math.prod(sizes) != 1:
            raise _NotUnderstoodError(mixing)
        _copy(step, reading)  # the mean and the sum of one number are that number
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


def _smoothed_cross_entropy(step: _Step) -> tuple[_Step, _Step, Tensor] | None:
    """With label smoothing: the steps of the mean over the targets, and of the sum that its own count divides."""
    first, second = (node for node, _ in _operands(step.node))
    if first is None or not name_of(first) == name_of(second) == PRODUCT_WITH_NUMBER:
        return None
    loss, quotient = first.next_functions[0][0], second.next_functions[0][0]
    if name_of(loss) not in WEIGHTED or name_of(quotient) != QUOTIENT:
        return None
    total, divisor = _operands(quotient)
    if total[0] is None or name_of(total[0]) != SUM_OF_ALL or divisor[0] is not None:
        return None
    a, b = (step.factor * number_of(node) for node in (first, second))
    return (
        _Step(name_of(loss), loss, 0, a, step.divisors),
        _Step(SUM_OF_ALL, total[0], 0, b, step.divisors),
        second_of(quotient),
    )


def _is_cross_entropy_of_probabilities(negation: Node) -> bool:
    """Whether its quotient is `cross_entropy` with probabilities as targets, divided by the number of samples."""
    if name_of(negation) != NEGATION:
        return False
    total = negation.next_functions[0][0]
    return bool(name_of(total) == SUM_OF_ALL and name_of(total.next_functions[0][0]) == PRODUCT)


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
