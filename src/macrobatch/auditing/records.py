"""What was seen of a window, as plain numbers and words: it is written to a file on each rank, and read by others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Term:
    """One mean or sum that a loss adds up."""

    node: str
    kind: str  # "mean", "sum" or "unknown"
    count: float | None  # its items; None if it has not stated them
    samples: int | None = None  # the first dimension of what it adds up, where the loss has saved that
    multiplier: float  # the product of all constants that multiply it, up to the gradient that was handed over
    written: float = 1.0  # those of them that the loss itself is multiplied by, without the scale of a GradScaler
    divisors: tuple[float, ...] = ()  # the constants that divide it, besides the count of a mean
    is_regulariser: bool = False  # whether only parameters are below it


@dataclass(kw_only=True)
class Micro:
    """One backward, as far as it reached the parameters of one optimizer."""

    place: str = ""  # the line of the program that called the backward
    caller: str = ""  # the line that called the function of that line
    loss_place: str | None = None  # the line of the program that called the loss
    terms: tuple[Term, ...] = ()
    unknown: str | None = None  # why the terms are not known
    factor: float | None = 1.0  # what became of its gradient until the step; None if that is not known
    reach: str = ""  # which leaves it reached
    expression: str = ""  # the functions between the loss and the last layers of the model
    constants: tuple[float, ...] = ()  # the numbers that its loss, or a term of that, is multiplied by
    target: tuple[float, float] | None = None  # the least and the largest element of what its loss compares with
    repeats: int = 0  # how many backwards of the window had the same target before
    loss_scale: float = 1.0  # what a GradScaler has multiplied its loss by
    is_again: bool = False  # whether the same loss had a backward before, in the same window
    as_counted: bool = False  # whether this library has counted its items, and weighed it by them
    exchange: int | None = None  # the first exchange of ranks that its gradient took part in


@dataclass(kw_only=True)
class Window:
    """The backwards that one step of an optimizer used."""

    optimizer: str
    number: int
    micros: list[Micro] = field(default_factory=list)
    left_out: list[Micro] = field(default_factory=list)  # whose gradients were cleared before the others began
    problems: list[str] = field(default_factory=list)  # what was not seen
    clip_factors: list[float] = field(default_factory=list)  # of clippings between its backwards
    was_clipped: bool = False  # whether it was clipped before the step
    was_clipped_scaled: bool = False  # whether that was before a GradScaler had divided it
    num_after: int = 0  # backwards after its step that reached no step
    divided: float | None = None  # what an unknown hand multiplied its whole gradient by, just before the step
    norm: float | None = None  # of its gradient after that
    has_left_over: bool = False  # whether gradients of an earlier window were in it
    is_repeated: bool = False  # whether no backward came since the last step
    is_adversary: bool = False  # whether gradients for another optimizer were cleared, as those of a generator are
    scheduler_steps: int = 0  # between its backwards
    rounding: float = 0.0  # of the gradients' dtype
    exchanges: list[Exchange] = field(default_factory=list)
    is_unsynchronised: bool = False  # whether ranks that began alike have exchanged nothing
    parameters: list[float] | None = None  # some elements of them, to compare ranks
    gradient: list[float] | None = None  # and of the gradient of the step
    is_sharded: bool = False  # whether each rank holds a part of the gradient

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


@dataclass(kw_only=True)
class Exchange:
    """The gradients of a rank before and after ranks exchanged them."""

    before: list[list[float]]
    after: list[list[float]]


def window_from(found: dict[str, Any]) -> Window:
    """The inverse of `Window.to_dict`."""
    fields = dict(found)
    for name in ("micros", "left_out"):
        fields[name] = [
            Micro(**{**micro, "terms": tuple(Term(**{**t, "divisors": tuple(t["divisors"])}) for t in micro["terms"])})
            for micro in found[name]
        ]
    fields["exchanges"] = [Exchange(**exchange) for exchange in found["exchanges"]]
    return Window(**fields)
