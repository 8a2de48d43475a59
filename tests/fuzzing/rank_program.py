"""Random programs for two ranks: what differs from one process, and what is ruled out there."""

import dataclasses
from dataclasses import dataclass

from fuzzing.mistakes import SPOILS
from fuzzing.program import Drawing, Event, Program, valid


@dataclass(frozen=True)
class RankProgram(Program):
    wrap: str = "ddp"
    sync: str = "window"
    gather: str = "micro"
    others: tuple[tuple[int, ...], ...] = ((2, 3),)  # the epochs of the second rank

    def epochs_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return self.others if rank else self.epochs


WRAPS = ("ddp", "ddp", "ddp unused", "ddp unused", "ddp view", "fsdp2", "fsdp2", "fsdp2 blocks", "fsdp1")
NOT_ON_RANKS = {"dropout", "statistics"}  # they see the micro-batch of a rank
NEEDS_UNUSED = {"unused", "detached", "expert"}
NOT_UNDER_FSDP = {"expert", "scalar", "complex", "float32 gain", "tied", "penalty", "parameter hook", "module hook",
                  "reentrant checkpoint", "custom checkpoint"}  # fmt: skip
EVENTS = ("now", "discard after", "nan", "inf", "infinite loss", "evaluate", "idle forward", "halve lr",
          "zero_grad between", "zero_grad", "clip", "scale gradients", "drop a gradient", "second backward", "no step",
          "new batches", "state_dict", "freeze between", "thaw between", "no_sync", "past the wrapper")  # fmt: skip
ONLY_DDP = {"freeze between", "thaw between", "no_sync", "past the wrapper"}


# A rank that has run out is ahead of the others: it waits for their last backward, and raises first.
NOT_WHERE_UNEVEN = {"now", "discard after", "no step", "no_sync", "past the wrapper", *SPOILS}


def draw_plain_on_ranks(seed: int) -> RankProgram:
    drawing = Drawing(seed)
    chance = drawing.random
    driver = chance.choices(("loop", "macrostep"), (3, 1))[0]
    p = Program(seed=seed, driver=driver, epochs=drawing.epochs(driver), steps=drawing.steps())
    p = dataclasses.replace(p, **drawing.model(driver), **drawing.training(), **drawing.options(p))
    p = dataclasses.replace(
        p, **drawing.data(p), stem="trained", split=False, default_dtype="float32", writing_hook=False
    )
    others = tuple(drawing.some(1, 6, (1, 2, 3)) for _ in p.epochs)
    if driver == "macrostep":
        others = tuple((chance.randint(0, 9),) for _ in p.epochs)
    elif chance.random() < 0.4:
        others = p.epochs
    wrap = chance.choice(WRAPS)
    return made_valid(
        RankProgram(
            **{f.name: getattr(p, f.name) for f in dataclasses.fields(Program)},
            others=others,
            wrap=wrap,
            sync=drawing.maybe(0.3, "micro", default="window"),
            gather=drawing.maybe(0.5, "window", default="micro") if wrap.startswith("fsdp2") else "micro",
        ),
        drawing,
    )


def made_valid(p: RankProgram, drawing: Drawing) -> RankProgram:
    """Without what torch, or the documentation, rules out on ranks."""
    change, is_sharded = dataclasses.replace, p.wrap.startswith("fsdp")
    pieces = [piece for piece in p.pieces if piece not in NOT_ON_RANKS]
    if is_sharded:
        barred = NOT_UNDER_FSDP | NEEDS_UNUSED if p.wrap == "fsdp1" else NOT_UNDER_FSDP  # FSDP1 gives these zeros
        pieces = [piece for piece in pieces if piece not in barred]
        how = p.how if p.how != "fused" or p.optimizer in ("AdamW", "Adam") else "foreach"
        p = change(p, how=how, other=False, hook="", partial=False, accumulate="", offset="squeeze" if p.offset else "")
    elif p.wrap == "ddp unused":  # torch does not find what a checkpoint hides
        pieces = [piece for piece in pieces if piece not in ("reentrant checkpoint", "custom checkpoint")]
    else:
        pieces = [piece for piece in pieces if piece not in NEEDS_UNUSED]
    p = change(p, pieces=tuple(pieces))
    if p.accumulate and p.sync == "micro":
        p = change(p, accumulate="")
    sized = p.loader in ("list", "sized", "DataLoader")
    p = change(p, loader=("sized" if sized or p.remainder == "carry" else "generator"), empty=p.empty)
    if p.driver == "macrostep" and p.cut == "auto" and is_sharded and p.gather == "micro":
        p = change(p, cut="int")  # documented: memory that runs out there ends the job
    p = change(p, events=events(p, drawing))
    return valid(p)


def events(p: RankProgram, drawing: Drawing) -> tuple[Event, ...]:
    """The same on all ranks, where all have a batch; but for infinite and NaN gradients."""
    places = [(e, i) for e, sizes in enumerate(p.epochs) for i in range(min(len(sizes), len(p.others[e])))]
    count = drawing.maybe(0.4, 1, 2, default=0) if p.driver == "loop" else drawing.maybe(0.2, 1, default=0)
    are_even = [*map(len, p.epochs)] == [*map(len, p.others)]
    # FSDP1 cannot close a window before its last backward: the documentation says so.
    barred = NOT_WHERE_UNEVEN if not are_even else {"now"} if p.wrap == "fsdp1" else set()
    if not p.wrap.startswith("ddp"):
        barred = barred | ONLY_DDP
    if p.sync == "micro":  # documented: a parameter that is thawed after DDP was made travels with sync="window" only
        barred = barred | {"freeze between", "thaw between"}
    choices = [what for what in EVENTS if what not in barred]
    if p.driver == "macrostep":
        choices = ["nan", "inf", "halve lr", "zero_grad between"]
    drawn = {drawing.random.choice(places): drawing.random.choice(choices) for _ in range(count)}
    return tuple(sorted((*place, what) for place, what in drawn.items()))
