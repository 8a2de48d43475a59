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
from typing import NamedTuple

from torch import Tensor

from macrobatch._loss.reading import NOTHING_KNOWN, Known, NotUnderstoodError, Part, Reading, Step, operands
from macrobatch._loss.reductions import (
    is_cross_entropy_of_probabilities,
    read_loss,
    read_mean_or_sum,
    read_weighted_loss,
    smoothed_cross_entropy,
)
from macrobatch._torch.loss_nodes import (
    ADDITIONS,
    BY_ELEMENT,
    BY_ROW,
    COPIES_OF_ONE,
    MEANS,
    NEGATION,
    PRODUCT_WITH_NUMBER,
    PRODUCTS,
    QUOTIENT_BY_NUMBER,
    QUOTIENTS,
    REVERSED_SUBTRACTION,
    SELECT,
    SINK,
    SUBTRACTIONS,
    SUMS,
    UNDERSTOOD,
    WEIGHTED,
    alpha_of,
    first_of,
    is_sink,
    name_of,
    number_of,
    one_saved_as_second,
    second_of,
    sizes_before,
    sizes_of_plain_mean,
)
from macrobatch._torch.tensors import number_on_host

MOST_NODES = 256  # of the root, where terms are added up


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
    reading, num_read = Reading(known, takes_divisors=takes_divisors), 1
    step = Step(name_of(root), root, loss.output_nr, 1.0, ())
    try:
        _read(step, reading)
        while reading.pending and num_read < MOST_NODES:
            num_read += 1
            step = reading.pending.pop()
            _read(step, reading)
    except NotUnderstoodError as stopped:
        return Anatomy((), stopped.args[0])
    except (RuntimeError, AttributeError):  # what the node has saved is packed, freed or changed; or not there
        return Anatomy((), step.name)
    if reading.pending or not reading.parts:  # too many nodes; or all terms are multiplied by zero
        return Anatomy((), step.name)
    divisors = reading.parts[0].divisors if reading.shared is None else reading.shared
    return Anatomy(tuple(reading.parts), None, divisors)


# ---------------------------------------------------------------------------------------------- from the root down


def _read(step: Step, reading: Reading) -> None:
    """Read a node."""
    if reading.has_known(step):
        return
    try:
        _READERS.get(step.name, _regulariser)(step, reading)
    except (NotUnderstoodError, RuntimeError, AttributeError) as stopped:
        if not reading.takes_divisors:
            raise
        name = stopped.args[0] if isinstance(stopped, NotUnderstoodError) else step.name
        factor = step.total_factor()
        reading.parts.append(Part(name, "unknown", None, False, factor, step.divisors_on_host(), leaf_only=False))


def _regulariser(step: Step, reading: Reading) -> None:
    """Whatever is computed from parameters only needs no more understanding.

    Neither does a sum that the model itself, or a function of the program, has computed, if it was divided by the
    number of items that was given to the program.
    """
    if step.name not in UNDERSTOOD and reading.known_divisor(step.divisors) is not None:
        return reading.add_sum(step, None)
    if not reading.add_regulariser(step):
        raise NotUnderstoodError(step.name)
    return None


def _selection(step: Step, reading: Reading) -> None:
    """``x[0]`` is the same number as ``x`` if there is no other."""
    if math.prod(sizes_before(step.node)) != 1:
        raise NotUnderstoodError(step.name)
    reading.look_through(step)


def _sink(step: Step, reading: Reading) -> None:
    """Each output is one of the inputs."""
    if not is_sink(step.node):
        raise NotUnderstoodError(step.name)
    reading.go_on(step.node.next_functions[step.output], step.factor, step.divisors)


def _negation(step: Step, reading: Reading) -> None:
    reading.go_on(step.node.next_functions[0], -step.factor, step.divisors)


def _product(step: Step, reading: Reading) -> None:
    first, second = operands(step.node)
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


def _quotient(step: Step, reading: Reading) -> None:
    first, second = operands(step.node)
    if second[0] is not None:
        return _regulariser(step, reading)
    if step.name == QUOTIENT_BY_NUMBER:
        divisor: float | Tensor = number_of(step.node)
        if is_cross_entropy_of_probabilities(first[0]):
            return reading.add_mean(step, int(divisor))
    elif (given := one_saved_as_second(step.node, reading.known.divisors)) is not None:
        divisor = given
    else:
        divisor = _on_host(second_of(step.node))
    above = tuple(one for one in step.divisors if isinstance(one, Tensor) or one != 1)
    return reading.go_on(first, step.factor, (*above, divisor))


def _addition(step: Step, reading: Reading) -> None:
    first, second = operands(step.node)
    if second[0] is not None:
        if smoothed := smoothed_cross_entropy(step):
            loss, total, count = smoothed
            read_weighted_loss(loss, reading)
            return reading.add_mean(total, count, is_rest=True)
        if reading.shared is None:
            reading.shared = step.divisors_on_host()
        alpha = alpha_of(step.node)
        sign = -alpha if step.name in SUBTRACTIONS else alpha
        reading.go_on(second, step.factor if sign == 1 else step.factor * sign, step.divisors)
    return reading.go_on(first, step.factor, step.divisors)  # this one is read next


def _reversed_subtraction(step: Step, reading: Reading) -> None:
    """A constant minus ``alpha`` times this."""
    reading.go_on(step.node.next_functions[0], step.factor * -alpha_of(step.node), step.divisors)


def _on_host(constant: Tensor) -> float | Tensor:
    """A constant as a number if the host has it: Python's numbers are saved as tensors."""
    number = number_on_host(constant)
    return constant if number is None else float(number)


_READERS: dict[str, Callable[[Step, Reading], None]] = {
    name: reader
    for names, reader in (
        (WEIGHTED, read_weighted_loss),
        (BY_ELEMENT | BY_ROW, read_loss),
        (MEANS | SUMS, read_mean_or_sum),
        (COPIES_OF_ONE, lambda step, reading: reading.look_through(step)),
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
