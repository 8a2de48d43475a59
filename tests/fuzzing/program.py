"""Random programs: what one is, and how it is drawn from a seed.

A `Program` is a plain record whose defaults are the simplest program. Its text, `describe(program)`, has only what
differs from them, and is Python: `fuzzing.check(Program(...))` runs it again.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

Event = tuple[int, int, str]  # epoch, micro-batch, what happens there


@dataclass(frozen=True)
class Program:
    seed: int = 0  # of weights and data
    driver: str = "loop"  # one of DRIVERS
    # What is trained
    dtype: str = "float64"
    pieces: tuple[str, ...] = ()
    stem: str = "trained"  # or "frozen"
    offset: str = ""
    split: bool = False  # the model is passed as a list of two
    other: bool = False  # another model in the graph, which must receive nothing
    input_grad: bool = False
    # What trains it
    optimizer: str = "SGD"
    how: str = "default"
    optimizers: int = 1
    groups: bool = False
    shared: bool = False  # all optimizers hold all parameters
    partial: bool = False  # the last parameter is in no optimizer
    hook: str = ""  # of optimizer.step
    writing_hook: bool = False  # on a gradient, whenever something was added to it
    scheduler: str = ""
    # Options
    steps: tuple[int, ...] = (2,)  # a ramp where there are several
    max_norm: float | None = None
    scaler: tuple[float, int] | None = None  # scale, growth interval
    reduction: str = "mean"
    readable: bool = False  # whether the graph of a mean says what it is over
    remainder: str = "step"
    accumulate: str = ""
    nonfinite: str = "raise"
    default_dtype: str = "float32"
    # Data
    items: str = "int"
    fractional: bool = False
    epochs: tuple[tuple[int, ...], ...] = ((2, 3),)  # samples of every micro-batch
    empty: tuple[tuple[int, int], ...] = ()  # micro-batches without items
    loader: str = "list"
    says_last: bool = False  # micro_batch(last=True or False), and windows are one longer than `steps`
    events: tuple[Event, ...] = ()
    # MacroStep: every micro-batch above is a whole batch
    cut: str = "int"  # or by_count, by_tokens, auto
    size: int = 2  # of a micro-batch, or what fits
    container: str = "dict"

    @property
    def is_read(self) -> bool:
        """Whether the library reads the items, which the program does not give."""
        picks = self.offset == "expand"  # one of several elements, which data might choose: no regulariser for sure
        return self.items == "none" and self.readable and self.reduction == "mean" and not picks

    @property
    def is_sequence(self) -> bool:
        return self.driver == "macrostep" and self.cut == "by_tokens"

    @property
    def in_parts(self) -> bool:
        """Whether a window differs from one big batch: by dropout, statistics, parameters frozen in between."""
        changing = any(what in ("freeze", "thaw") for *_, what in self.events)
        return changing or "dropout" in self.pieces or "statistics" in self.pieces

    @property
    def is_narrow(self) -> bool:
        """Whether some of it is less precise than float64."""
        return self.dtype != "float64" or "float32 gain" in self.pieces

    def valid(self) -> "Program":
        """Without what torch, or the documentation, rules out."""
        return valid(self)

    def steps_at(self, taken: int) -> int:
        return self.steps[min(taken, len(self.steps) - 1)]

    def events_at(self, epoch: int, index: int) -> list[str]:
        return [what for e, i, what in self.events if (e, i) == (epoch, index)]


DRIVERS = ("loop", "micro", "macrostep", "pair")
PIECES = (
    "linear",
    "norm",
    "batchnorm",
    "statistics",
    "dropout",
    "tied",
    "flat",
    "weight norm",
    "complex",
    "in place",
    "gain",
    "float32 gain",
    "scalar",
    "unused",
    "frozen",
    "detached",
    "expert",
    "parameter hook",
    "activation hook",
    "module hook",
    "penalty",
    "checkpoint",
    "reentrant checkpoint",
    "custom checkpoint",
)
OFFSETS = ("scalar", "squeeze", "view", "reshape", "select", "expand")
ITEMS = ("int", "float", "none", "int64", "int32", "int16", "float32", "float64", "one element", "reused", "mixed")
LOADERS = ("list", "generator", "sized", "DataLoader", "stream", "same iterator", "buffer", "too long", "fails",
           "unknown length", "stream of a DataLoader")  # fmt: skip
CONTAINERS = ("dict", "tuple", "named tuple", "dataclass", "nested", "samples", "numpy", "labels", "language")

# Events that belong in a right program
RIGHT = (
    "now",  # step(now=True)
    "last",  # micro_batch(last=True)
    "discard before",  # the forward
    "discard after",  # the backward
    "forward fails, discard, again",
    "forward fails, again",
    "forward fails, discard, leave out",
    "backward fails, discard, again",
    "backward fails, discard, leave out",
    "freeze",
    "thaw",
    "nan",  # a gradient
    "inf",  # a gradient
    "infinite loss",  # with a finite gradient
    "evaluate",
    "idle forward",  # which no backward follows
    "own grad",  # torch.autograd.grad
    "halve lr",
    "zero_grad between",  # after a window
    "discard between",
    "reload optimizer",
    "load weights",
    "freeze between",
    "thaw between",
    "changes its batch",  # MacroStep
    "restart",  # a new Accumulator from a state_dict, between epochs
    "break",
    "nothing",  # MacroStep: an empty batch
)
# Mistakes: either a MacrobatchError, or the right result
WRONG = (
    "zero_grad",
    "zero_grad to zeros",
    "clip",
    "scale gradients",
    "drop a gradient",
    "replace a gradient",
    "optimizer.step",
    "plain backward before",
    "plain backward after",
    "plain backward after step",
    "plain backward between",
    "second backward",
    "step twice",
    "no step",
    "no backward",
    "new batches",
    "backward outside",
    "micro_batch inside",
    "same weights",  # loaded again, inside a window
    "scaled loss",
    "backward fails, again",
    "negative items",
    "nan items",
    "infinite items",
    "items of two elements",
    "items as text",
    "items mixed with None",
    "loss of two elements",
    "loss without a graph",
    "loss of nothing",
    "state_dict",
    "load_state_dict",
    "unscale",
    "update scaler",
    "other length",  # MacroStep: of one tensor of a batch
)


class Drawing:
    """The random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)

    def maybe(self, chance: float, *others: Any, default: Any) -> Any:
        return self.random.choice(others) if self.random.random() < chance else default

    def some(self, least: int, most: int, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self.random.choice(choices) for _ in range(self.random.randint(least, most)))

    def program(self) -> Program:
        driver = self.random.choices(DRIVERS, (10, 5, 6, 2))[0]
        p = Program(seed=self.seed, driver=driver, epochs=self.epochs(driver), steps=self.steps())
        p = dataclasses.replace(p, **self.model(driver), **self.training(), **self.options(p))
        p = dataclasses.replace(p, **self.data(p))
        p = dataclasses.replace(p, events=self.events(p))
        return valid(p)

    def epochs(self, driver: str) -> tuple[tuple[int, ...], ...]:
        if driver == "macrostep":
            return tuple((self.random.randint(1, 9),) for _ in range(self.random.randint(1, 3)))
        if self.random.random() < 0.01:
            return (self.some(35, 40, (1,)),)
        return tuple(self.some(1, 6, (1, 2, 3)) for _ in range(self.random.randint(1, 3)))

    def steps(self) -> tuple[int, ...]:
        return self.some(1, 1, (1, 2, 3, 4, 40)) if self.random.random() < 0.8 else self.some(2, 3, (1, 2, 3))

    def model(self, driver: str) -> dict[str, Any]:
        return {
            "dtype": self.maybe(0.12, "float32", "float32", "float32", "bfloat16", default="float64"),
            "pieces": self.some(0, 3, PIECES),
            "stem": self.maybe(0.1, "frozen", default="trained"),
            "offset": self.maybe(0.3, *OFFSETS, default=""),
            "split": self.maybe(0.15, True, default=False),
            "other": driver in ("loop", "micro", "macrostep") and self.maybe(0.1, True, default=False),
            "input_grad": self.maybe(0.1, True, default=False),
        }

    def training(self) -> dict[str, Any]:
        optimizer = self.maybe(0.6, "momentum", "AdamW", "Adam", "Adagrad", "RMSprop", default="SGD")
        hows = ("plain", "foreach") if optimizer == "RMSprop" else ("plain", "foreach", "fused", "fused")
        return {
            "optimizer": optimizer,
            "how": self.maybe(0.7, *hows, default="default"),
            "optimizers": self.maybe(0.15, 2, default=1),
            "shared": self.maybe(0.03, True, default=False),
            "groups": self.maybe(0.15, True, default=False),
            "partial": self.maybe(0.05, True, default=False),
            "writing_hook": self.maybe(0.02, True, default=False),
            "hook": self.maybe(0.6, "watch", "watch", "clip values", default=""),
            "scheduler": self.maybe(0.3, "exponential", "lambda", "one cycle", default=""),
        }

    def options(self, p: Program) -> dict[str, Any]:
        scale = 2.0 ** self.random.randint(-2, 12)
        return {
            "max_norm": self.maybe(0.4, 0.05, 0.5, 100.0, float("inf"), default=None),
            "scaler": self.maybe(0.15, (scale, self.random.randint(1, 3)), default=None),
            "reduction": self.maybe(0.2, "sum", default="mean"),
            "readable": self.maybe(0.4, True, default=False),
            "remainder": self.maybe(0.4, "drop", "carry", default="step"),
            "nonfinite": self.maybe(0.4, "skip", "keep", default="raise"),
            "default_dtype": self.maybe(0.1, "float64", "bfloat16", default="float32"),
        }

    def data(self, p: Program) -> dict[str, Any]:
        items = self.maybe(0.6, *ITEMS, default="int")
        places = [(e, i) for e, sizes in enumerate(p.epochs) for i in range(len(sizes))]
        empty = tuple(place for place in places if self.random.random() < 0.15) if self.random.random() < 0.3 else ()
        return {
            "items": items,
            "fractional": items in FRACTIONS and self.maybe(0.5, True, default=False),
            "empty": empty,
            "accumulate": self.maybe(0.5, WIDER[p.dtype], default="") if p.dtype in WIDER else "",
            "loader": self.maybe(0.5, *LOADERS, default="list"),
            "says_last": p.driver == "micro" and self.maybe(0.2, True, default=False),
            "cut": self.maybe(0.7, "by_count", "by_tokens", "auto", "auto", default="int"),
            "size": self.random.randint(1, 5),
            "container": self.maybe(0.6, *CONTAINERS, default="dict"),
        }

    def events(self, p: Program) -> tuple[Event, ...]:
        def place() -> tuple[int, int]:
            epoch = self.random.randrange(len(p.epochs))
            return epoch, self.random.randrange(len(p.epochs[epoch]))

        right = [(*place(), self.random.choice(RIGHT)) for _ in range(self.maybe(0.5, 1, 2, 3, default=0))]
        wrong = [(*place(), self.random.choice(WRONG)) for _ in range(self.maybe(0.3, 1, default=0))]
        return tuple(sorted({(e, i): (e, i, what) for e, i, what in (*right, *wrong)}.values()))


FREEZES = {"freeze", "thaw", "freeze between", "thaw between"}
WIDER = {"float32": "float64", "bfloat16": "float32"}
FRACTIONS = ("float", "float32", "float64", "one element", "reused")


def valid(p: Program) -> Program:
    """Without what torch, or the documentation, rules out."""
    pieces, change = p.pieces, dataclasses.replace
    reentrant = {"reentrant checkpoint", "custom checkpoint"} & set(pieces)
    if not p.shared or p.optimizers == 1 or p.scaler:  # unscale_() would divide by the scale twice
        p = change(p, shared=False)
    if p.dtype == "bfloat16" or (p.dtype == "float32" and not p.accumulate):
        pieces = tuple(piece for piece in pieces if piece not in ("complex", "float32 gain"))
        p = change(p, pieces=pieces)
    if p.dtype == "bfloat16" and p.container == "numpy":  # which has no such dtype
        p = change(p, container="dict")
    if p.dtype == "bfloat16":  # too narrow for scales, and for what divides by small numbers
        p = change(p, scaler=None, optimizer="SGD" if p.optimizer in ("Adagrad", "RMSprop") else p.optimizer)
    if "float32 gain" in pieces and p.how == "fused":
        p = change(p, how="foreach")
    if {"thaw", "thaw between"} & {what for *_, what in p.events} and pieces:
        pieces = (*pieces[:-1], "frozen")
        p = change(p, pieces=pieces)
    if "complex" in pieces:  # torch has neither fused kernels nor scalers for these
        p = change(p, scaler=None, how="foreach" if p.how == "fused" else p.how)
        p = change(p, hook="watch" if p.hook == "clip values" else p.hook)
    if p.other and reentrant:  # torch cannot confine such a backward: the documentation says to freeze the other model
        p = change(p, other=False)
    if reentrant:  # torch refuses torch.autograd.grad there, or it adds to .grad
        p = change(p, events=tuple(event for event in p.events if event[2] != "own grad"))
    if "expert" in pieces:  # is a parameter used that was used for no items only? Both answers are right
        p = change(p, empty=())
    if p.stem == "frozen":
        kept = tuple(event for event in p.events if event[2] not in FREEZES and "fails" not in event[2])
        p = change(p, pieces=tuple(piece for piece in pieces if piece != "tied"), events=kept)
    if p.items == "none":  # then every micro-batch counts
        p = change(p, empty=(), reduction="total" if p.reduction == "sum" else p.reduction)
    if p.items not in FRACTIONS:
        p = change(p, fractional=False)
    if p.fractional:
        p = change(p, readable=False)
    comes_later = "expert" in pieces or FREEZES & {what for *_, what in p.events}
    if p.optimizer == "momentum" and p.how == "fused" and comes_later:  # torch fails where only some have momentum yet
        p = change(p, how="foreach")
    if p.items not in ("int", "float") or p.reduction == "sum":  # 0 x NaN is NaN where the host does not see the zero
        p = change(p, empty=tuple(place for place in p.empty if not {"nan", "inf"} & set(p.events_at(*place))))
    p = change(p, empty=tuple(place for place in p.empty if "infinite loss" not in p.events_at(*place)))
    if p.driver == "pair":
        p = change(p, events=(), empty=(), stem="trained", split=False, loader="list", remainder="step", offset="",
                   partial=False, pieces=tuple(q for q in pieces if q not in NOT_IN_PAIRS))  # fmt: skip
    if p.driver not in ("loop", "micro"):
        p = change(p, writing_hook=False)
    if p.driver == "macrostep":
        allowed = [what for what in IN_MACROSTEP if not p.in_parts or what in MOVES_NOTHING]
        p = change(p, steps=(2,), remainder="step", loader="list", split=False, empty=())
        p = change(p, events=tuple(event for event in p.events if event[2] in allowed))
        if p.items == "none":  # a plain loss: its items are the samples
            p = change(p, fractional=False, cut="int" if p.cut == "by_tokens" else p.cut)
        if p.cut != "auto":  # micro-batches may be views
            p = change(p, events=tuple(event for event in p.events if event[2] != "changes its batch"))
    else:
        p = change(p, cut="int", size=2, container="dict")
    if p.driver == "micro":
        p = change(p, loader="list", events=tuple(e for e in p.events if e[2] not in ("break", "new batches")))
    else:
        p = change(p, says_last=False)
    if p.driver in ("loop", "micro"):
        p = change(p, events=tuple(e for e in p.events if e[2] not in ("other length", "nothing", "changes its batch")))
    if p.loader == "buffer" and any("again" in what for *_, what in p.events):
        p = change(p, loader="generator")
    return p


NOT_IN_PAIRS = ("reentrant checkpoint", "custom checkpoint", "dropout")
IN_MACROSTEP = ("changes its batch", "freeze between", "thaw between", "reload optimizer", "load weights",
                "other length", "nothing",
                "nan", "inf", "evaluate", "idle forward", "own grad", "halve lr", "forward fails, again",
                "zero_grad", "clip", "scale gradients", "drop a gradient", "optimizer.step", "plain backward before",
                "negative items", "nan items", "items of two elements", "items as text", "loss of two elements",
                "loss without a graph", "restart", "zero_grad between")  # fmt: skip
MOVES_NOTHING = ("nan", "inf", "halve lr", "restart", "zero_grad between")  # neither random numbers nor buffers
