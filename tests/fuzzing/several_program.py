"""Random programs whose loss has several terms, each over other items, or compares all samples of a batch.

As a `Program`, with what only such programs have. Of the fields of a Program that are not drawn here, all have their
defaults. One on ranks is a `SeveralRankProgram`.
"""

import dataclasses
from dataclasses import dataclass

from fuzzing.program import Drawing, Program

SEVERAL_DRIVERS = ("terms loop", "terms macrostep", "joint")
KINDS = ("int", "float", "int64", "int32", "float32", "float64", "one element", "mixed")  # of items, for each term
NAMES = ("a", "b", "c", "d")
FIELDS = ("label", "nested", "float32", "half", "sum", "count")  # of an `Encoded`, beside its rows
USES = ("scale", "head")  # parameters of the model that only joint uses
WRAPS = ("ddp", "ddp", "ddp unused", "ddp view", "fsdp2", "fsdp2", "fsdp1")


@dataclass(frozen=True)
class SeveralProgram(Program):
    driver: str = "terms loop"
    # Terms
    terms: tuple[str, ...] = ("int", "int")  # how the items of each term are given
    counted: str = "same"  # how counts= gives them: as the terms do, or all as "int", "float64"
    without: str = "absent"  # a term whose items are the number 0: it is absent, or a mean that is "nan" or "zero"
    sparse: bool = False  # most samples have no items of most terms
    lacking: tuple[tuple[int, int, int], ...] = ()  # epoch, micro-batch, term: no sample there has items of it
    discards: tuple[tuple[int, int], ...] = ()  # micro-batches after whose backward the window is discarded
    # Joint losses
    ordinary: str = ""  # how the items of an ordinary loss are given, if there is one
    fields: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    dropout: bool = False

    @property
    def is_joint(self) -> bool:
        return self.driver == "joint"

    @property
    def is_narrow(self) -> bool:
        return super().is_narrow or bool({"float32", "half"} & set(self.fields))

    def valid(self) -> "SeveralProgram":
        return valid(self)


@dataclass(frozen=True)
class SeveralRankProgram(SeveralProgram):
    wrap: str = "ddp"
    sync: str = "window"
    gather: str = "micro"
    others: tuple[tuple[int, ...], ...] = ((2, 3),)  # the epochs of the second rank
    lacks: tuple[int, ...] = ()  # ranks without any items of the last term
    unsized: bool = False

    def epochs_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return self.others if rank else self.epochs


def draw_several(seed: int) -> SeveralProgram:
    drawing = Drawing(seed)
    return valid(SeveralProgram(**drawn(drawing)))


def drawn(drawing: Drawing) -> dict[str, object]:
    chance = drawing.random
    driver = chance.choice(SEVERAL_DRIVERS)
    epochs = drawing.epochs("loop" if driver == "terms loop" else "macrostep")
    places = [(e, i) for e, sizes in enumerate(epochs) for i in range(len(sizes))]
    dtype = drawing.maybe(0.12, "float32", default="float64")
    terms = drawing.some(1, 4, KINDS)
    training = drawing.training()
    return {
        "seed": drawing.seed,
        "driver": driver,
        "dtype": dtype,
        "accumulate": "float64" if dtype == "float32" and chance.random() < 0.5 else "",
        "optimizer": training["optimizer"],
        "how": training["how"],
        "groups": training["groups"],
        "scheduler": training["scheduler"],
        "steps": drawing.steps(),
        "max_norm": drawing.maybe(0.4, 0.05, 0.5, 100.0, float("inf"), default=None),
        "scaler": drawing.maybe(0.2, (2.0 ** chance.randint(-2, 12), chance.randint(1, 3)), default=None),
        "reduction": drawing.maybe(0.3, "sum", default="mean"),
        "remainder": drawing.maybe(0.3, "drop", default="step"),
        "nonfinite": drawing.maybe(0.4, "skip", "keep", default="raise"),
        "epochs": epochs,
        "loader": drawing.maybe(0.5, "generator", "sized", "DataLoader", default="list"),
        "cut": drawing.maybe(0.6, "by_count", "by_tokens", "by_tokens", "auto", default="int"),
        "size": chance.randint(1, 5),
        "terms": terms,
        "counted": drawing.maybe(0.4, "int", "float64", default="same"),
        "without": drawing.maybe(0.5, "nan", "zero", default="absent"),
        "sparse": drawing.maybe(0.5, True, default=False),
        "lacking": tuple((*place, t) for place in places for t in range(len(terms)) if chance.random() < 0.1),
        "discards": tuple(place for place in places if chance.random() < 0.05),
        "ordinary": drawing.maybe(0.5, *KINDS[:-1], default=""),
        "fields": tuple(field for field in FIELDS if chance.random() < 0.25),
        "uses": tuple(use for use in USES if chance.random() < 0.4),
        "dropout": drawing.maybe(0.3, True, default=False),
    }


def draw_several_on_ranks(seed: int) -> SeveralRankProgram:
    drawing = Drawing(seed)
    program = drawn(drawing)
    chance, epochs = drawing.random, program["epochs"]
    others = tuple(drawing.some(1, 6, (1, 2, 3)) for _ in epochs)
    if program["driver"] != "terms loop":
        others = tuple((drawing.maybe(0.3, 0, default=chance.randint(1, 9)),) for _ in epochs)
        epochs = tuple((drawing.maybe(0.2, 0, default=sizes[0]),) for sizes in epochs)
    wrap = chance.choice(WRAPS)
    return valid(
        SeveralRankProgram(
            **program | {"epochs": epochs, "dropout": False, "discards": ()},
            others=others,
            wrap=wrap,
            sync=drawing.maybe(0.3, "micro", default="window"),
            gather=drawing.maybe(0.5, "window", default="micro") if wrap == "fsdp2" else "micro",
            lacks=drawing.maybe(0.3, (0,), (1,), (0, 1), default=()),
            unsized=drawing.maybe(0.3, True, default=False),
        )
    )


def valid(p: SeveralProgram) -> SeveralProgram:
    """Without what torch, or the documentation, rules out, and without fields that another driver needs."""
    change, default = dataclasses.replace, SeveralProgram()
    if not p.terms:
        p = change(p, terms=default.terms)
    if p.is_joint:
        p = change(p, terms=default.terms, counted="same", without="absent", sparse=False, lacking=())
    else:
        p = change(p, ordinary="", fields=(), uses=(), dropout=False)
    if p.is_joint and not p.ordinary:
        p = change(p, reduction="mean")
    if p.driver == "terms loop":
        p = change(p, cut="int", size=2)
    else:
        p = change(p, steps=(2,), remainder="step", loader="list", discards=())
    if p.counted == "int" and any(kind in p.terms for kind in ("float", "float32", "float64", "one element", "mixed")):
        p = change(p, counted="same")
    may_lack = p.sparse or p.lacking or getattr(p, "lacks", ())
    if may_lack:  # is a parameter used that only a term without items has reached? Both answers are right
        p = change(p, optimizer="SGD", groups=False)
    if isinstance(p, SeveralRankProgram):
        return valid_on_ranks(p)
    return p


def valid_on_ranks(p: SeveralRankProgram) -> SeveralRankProgram:
    change = dataclasses.replace
    p = change(p, loader="list", dropout=False, discards=())
    if p.is_joint:
        p = change(p, lacks=(), wrap="ddp" if p.wrap == "fsdp1" else p.wrap)  # which has no joint losses
    if p.driver != "terms loop":
        p = change(p, unsized=False)
    if p.accumulate and (p.sync == "micro" or p.wrap.startswith("fsdp")):
        p = change(p, accumulate="")
    if p.wrap.startswith("fsdp"):
        p = change(p, how="foreach" if p.how == "fused" else p.how, groups=False)
    if p.wrap != "fsdp2":
        p = change(p, gather="micro")
    if p.cut == "auto":  # documented: memory that runs out under FSDP ends the job
        p = change(p, cut="int")
    return p
