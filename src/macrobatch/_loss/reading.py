"""What is found of a loss while its graph is read: its parts, and what the caller knows of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from macrobatch._loss.below import slices_of_parameters
from macrobatch._torch.loss_nodes import COPIES, QUOTIENT, Edge, Node, name_of
from macrobatch._torch.tensors import number_on_host


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


class NotUnderstoodError(Exception):
    """Its argument is the name of a node."""


class Step(NamedTuple):
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
                raise NotUnderstoodError(QUOTIENT)
            factor = factor / divisor
        return factor

    def divisors_on_host(self) -> tuple[float, ...]:
        """Those that the host knows."""
        return tuple(one for one in self.divisors if not isinstance(one, Tensor))


class Reading:
    """What was found so far, and the nodes that are still to be read: the last one first."""

    __slots__ = ("known", "known_nodes", "parts", "pending", "shared", "takes_divisors")

    def __init__(self, known: Known, *, takes_divisors: bool) -> None:
        self.known, self.takes_divisors = known, takes_divisors
        self.known_nodes: list[tuple[Edge, Any]] = [(_source_of(mean), count) for mean, count in known.means]
        if known.other is not None:
            self.known_nodes.append((_source_of(known.other), None))
        self.parts: list[Part] = []
        self.shared: tuple[float, ...] | None = None  # the divisors above the first addition
        self.pending: list[Step] = []

    def look_through(self, step: Step) -> None:
        """Read on below a node that only copies."""
        self.go_on(step.node.next_functions[0], step.factor, step.divisors)

    def go_on(self, edge: Edge, factor: float | Tensor, divisors: tuple[float | Tensor, ...]) -> None:
        """Read on at the other end of an edge, unless there are constants only."""
        node, output = edge
        if node is not None:
            self.pending.append(Step(name_of(node), node, output, factor, divisors))

    def has_known(self, step: Step) -> bool:
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
        step: Step,
        count: int | Tensor,
        shape: tuple[int, ...] = (),
        *,
        is_rest: bool = False,
    ) -> None:
        """Add a mean over `count`."""
        from_shape = type(count) is int
        if self.known_divisor(step.divisors) is not None:  # no sum
            raise NotUnderstoodError(QUOTIENT)
        if not from_shape and not isinstance(count, Tensor):  # the sizes of nested tensors are symbols
            raise NotUnderstoodError(step.name)
        factor, divisors = (step.total_factor(), step.divisors_on_host()) if step.divisors else (step.factor, ())
        self.parts.append(Part(step.name, "mean", count, from_shape, factor, divisors, False, shape, None, is_rest))

    def add_regulariser(self, step: Step) -> bool:
        """Add a term of parameters only, which is the same in every micro-batch, if it is one."""
        slices = slices_of_parameters(step.node)
        if slices is not None:
            factor, divisors = step.total_factor(), step.divisors_on_host()
            self.parts.append(Part(step.name, "sum", None, False, factor, divisors, True, slices=slices))
        return slices is not None

    def add_sum(self, step: Step, count: int | Tensor | None, shape: tuple[int, ...] = ()) -> None:
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
                raise NotUnderstoodError(QUOTIENT)
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


def operands(node: Node) -> tuple[Edge, Edge]:
    """The two operands. That of a constant has no node."""
    edges = node.next_functions
    return edges[0], edges[1] if len(edges) == 2 else (None, 0)
