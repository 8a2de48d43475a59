"""Random programs on several ranks, each compared with one process that has the batches of all of them.

Every program is a scenario of harness/ranks.py: many of them run in one launch, each with a process group and a
time-out of its own.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fuzzing.drawing import draw_rank_program
from fuzzing.loop import Loop, Sized
from fuzzing.mistakes import SPOILS
from fuzzing.model import Batch, Net, make_batch, micro_loss
from fuzzing.program import Program
from fuzzing.rank_program import RankProgram
from fuzzing.reference import Expected
from fuzzing.run import MismatchError, SpoiledError
from fuzzing.several_on_ranks import SEVERAL_ON_RANKS
from fuzzing.whole import Whole, pack
from harness import ranks
from macrobatch.errors import NonFiniteError

RANKS = 2


# ------------------------------------------------------------------------------------------------------- one program


class Task(nn.Module):
    """Model and loss in one: under DDP all parameters are used inside the forward."""

    def __init__(self, p: Program, net: Net) -> None:
        super().__init__()
        self.p, self.net = p, net

    def forward(self, batch: Batch) -> Tensor:
        return micro_loss(self.p, self.net, batch)


def wrap(p: RankProgram, net: Net) -> nn.Module:
    task = Task(p, net)
    match p.wrap:
        case "ddp" | "ddp unused" | "ddp view":
            unused, view = p.wrap == "ddp unused", p.wrap == "ddp view"
            return DistributedDataParallel(task, find_unused_parameters=unused, gradient_as_bucket_view=view)
        case "fsdp1":
            sharded = FullyShardedDataParallel(task, use_orig_params=True, device_id=torch.device("cpu"))
            net.named = dict(net.named_parameters())
            return sharded
        case "fsdp2 blocks":
            for piece in net.body:
                if any(True for _ in piece.parameters()):
                    fully_shard(piece)
    fully_shard(task)
    net.named = dict(net.named_parameters())
    return task


class OnRanks:
    """What the drivers on ranks have in common: a wrapped model, and one rank on which gradients are infinite."""

    def __init__(self, p: RankProgram) -> None:
        net = Net(p, plain=False)
        self.wrapped, self.rank = wrap(p, net), dist.get_rank()
        super().__init__(p, net=net)

    def models(self) -> Any:
        return self.wrapped

    def options(self) -> dict[str, Any]:
        return super().options() | {"sync": self.p.sync, "gather": self.p.gather}

    @property
    def is_spiked(self) -> bool:
        return self.rank == self.p.seed % RANKS

    def loss(self, batch: Batch, events: Sequence[str] = ()) -> Tensor:
        loss = self.wrapped(batch)
        if self.is_spiked and not POISONS.isdisjoint(events):
            return loss * float("nan" if "nan" in events else "inf")
        return loss + float("inf") if "infinite loss" in events else loss

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self.wrapped(batch)

    def weights(self) -> dict[str, Tensor]:
        if self.p.wrap != "fsdp1":
            return super().weights()
        with FullyShardedDataParallel.summon_full_params(self.wrapped, writeback=False):
            return {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()}

    def state(self) -> list[dict[str, Tensor]]:
        return [{}, {}] if self.p.wrap == "fsdp1" else super().state()  # there, pieces of it, in no order


POISONS = {"nan", "inf"}


class RankLoop(OnRanks, Loop):
    """`batches` on every rank. A window holds the same places of all loaders, as far as these reach."""

    def run(self) -> None:
        self.acc = self.accumulator()
        self.carried: list[tuple[int, int]] = []  # places of the open window that belong to an earlier epoch
        for epoch in range(len(self.p.epochs)):
            lengths = [len(self.p.epochs_of(rank)[epoch]) for rank in range(RANKS)]
            self.here, self.begin, self.end = epoch, 0, max(lengths)
            own = [self.batch(self.rank, epoch, i) for i in range(lengths[self.rank])]
            with self.guarded():
                self.rank_epoch(own)
        with self.guarded():
            if (
                self.carried and self.p.wrap == "fsdp1"
            ):  # documented: it cannot close a window that has no more backward
                self.discard()
            elif self.carried:
                self.begin = self.end
                self.step(self.end - 1, now=True)
        self.finish()

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        return make_batch(self.p, epoch, index, self.p.epochs_of(rank)[epoch][index], rank)

    def discard(self) -> None:
        super().discard()
        self.carried = []

    def rank_epoch(self, own: list[Batch]) -> None:
        index = -1
        for batch in self.acc.batches(Sized(own) if self.p.loader == "sized" else iter(own)):
            if not self.acc.is_repeat:
                index += 1
                self.expect(batch, own, index)
                if index >= self.begin + self.missing():
                    raise MismatchError("silent", f"batch {index} is in a window that ought to be closed")
            self.turn_of(index, batch, [] if self.acc.is_repeat else self.p.events_at(self.here, index))
        is_short = self.end - self.begin < self.missing()
        if index < len(own) - 1 and not (is_short and self.p.remainder == "drop"):
            raise MismatchError("silent", f"only {index + 1} of {len(own)} batches were handed out")
        if self.p.remainder == "step" and self.begin < self.end:
            raise MismatchError("silent", "the last window of an epoch was not closed")
        self.carried += [(self.here, i) for i in range(self.begin, self.end)] if self.p.remainder == "carry" else []

    def missing(self) -> int:
        """How many places of this epoch the open window takes."""
        return self.p.steps_at(self.reference.taken) - len(self.carried)

    def turn_of(self, index: int, batch: Batch, events: list[str]) -> None:
        is_late, is_sized = self.p.seed % 2 == 0, self.p.loader == "sized"  # else a window that is dropped ends early
        is_open = index > self.begin or bool(self.carried)  # before this batch
        if "evaluate" in events:
            self.evaluate(batch)
        if "idle forward" in events and not self.p.wrap.startswith("fsdp"):
            self.loss(batch)
        if not is_late and is_open:
            self.spoil(events, batch)
        loss = self.mistaken_loss(batch, events)
        self.acc.backward(loss, items=self.items(batch))
        if "second backward" in events:  # without another forward: after that, FSDP2 goes on with weights from before
            self.must_raise(lambda: self.acc.backward(loss, items=self.items(batch)), "a second backward")
        if is_late:
            self.spoil(events, batch)
        if "discard after" in events:
            self.discard()
            self.begin = index + 1
        elif "no step" in events:
            self.suspect = "no step"
        elif not self.step(index, now="now" in events) and {"new batches", "state_dict"} & set(events) and is_sized:
            self.must_raise(lambda: self.acc.batches([batch]), "batches() over an open window")
            self.must_raise(self.acc.state_dict, "state_dict() inside a window")

    def mistaken_loss(self, batch: Batch, events: list[str]) -> Tensor:
        """The loss; perhaps of a forward that DDP does not know of, or will not synchronise."""
        if "past the wrapper" in events:
            self.suspect = "past the wrapper"
            return self.wrapped.module(batch)
        if "no_sync" in events:
            self.suspect = "no_sync"
            with self.wrapped.no_sync():
                return self.loss(batch, events)
        return self.loss(batch, events)

    def spoil(self, events: list[str], batch: Batch) -> None:
        for event in events:
            if event in SPOILS and any(q.grad is not None for q in self.net.named.values()):
                self.suspect = event
                SPOILS[event](self)

    def step(self, index: int, now: bool) -> bool:
        """Whether a window has closed."""
        end = index + 1 if now else min(self.begin + self.missing(), self.end)
        places = self.carried + [(self.here, i) for i in range(self.begin, end)]
        try:
            result = self.acc.step(now=now)
        except NonFiniteError:
            self.fill(places)
            if not self.may_raise():
                raise
            self.discard()
            self.same_state()
        else:
            if result is None:
                return False
            self.compare_window(result, places)
        self.begin, self.carried, self.suspect = end, [], ""
        self.between([what for place in places for what in self.p.events_at(*place)])
        return True

    def may_raise(self) -> bool:
        return self.reference.is_poisoned and self.own.scaler is None and self.p.nonfinite == "raise"

    def compare_window(self, result: Any, places: list[tuple[int, int]]) -> None:
        self.fill(places)
        if self.may_raise():
            raise MismatchError("silent", "a gradient that is not finite")
        expected = self.reference.close()
        expected.micro_batches = result.micro_batches  # with repeats, on this rank
        self.compare(result, expected)

    def fill(self, places: list[tuple[int, int]]) -> None:
        """The window that closes holds these places of every rank's loader."""
        for epoch, index in places:
            events = self.p.events_at(epoch, index)
            for rank in range(RANKS):
                if index < len(self.p.epochs_of(rank)[epoch]):
                    is_poisoned = rank == self.p.seed % RANKS and not POISONS.isdisjoint(events)
                    addend = math.inf if "infinite loss" in events else 0.0
                    self.reference.add(self.batch(rank, epoch, index), None, is_poisoned=is_poisoned, addend=addend)


class RankWhole(OnRanks, Whole):
    """MacroStep on every rank, each with a share of its own, or with none."""

    def run(self) -> None:
        self.train = self.macro_step()
        for window in range(len(self.p.epochs)):
            self.events = self.p.events_at(window, 0)
            self.everywhere = [
                make_batch(self.p, window, 0, self.p.epochs_of(rank)[window][0], rank) for rank in range(RANKS)
            ]
            self.batch = self.everywhere[self.rank]
            self.handed_over = pack(self.p.container, self.batch) if len(self.batch.ids) else None
            self.window()
            self.between(self.events)
        self.finish()

    def same_samples(self) -> None:
        """A micro-batch that only keeps other ranks company may come more than once."""
        found = sorted({number for part, _ in self.parts for number in part.ids.tolist()})
        if len(self.batch.ids) and found != self.batch.ids.tolist():
            raise MismatchError("silent", f"samples {found} were trained on, not {self.batch.ids.tolist()}")

    def compare(self, result: Any, expected: Expected) -> None:
        expected.micro_batches = result.micro_batches
        super().compare(result, expected)

    def account(self) -> None:
        for rank, batch in enumerate(self.everywhere):
            if len(batch.ids):
                is_poisoned = rank == self.p.seed % RANKS and not POISONS.isdisjoint(self.events)
                self.reference.add(batch, None, is_poisoned=is_poisoned)


# ------------------------------------------------------------------------------------------------------ many of them


ON_RANKS = {"loop": RankLoop, "macrostep": RankWhole}


def check_on_ranks(p: RankProgram) -> None:
    """Raise MismatchError, on any rank, unless the program comes to what it should."""
    torch.manual_seed(p.seed)
    with contextlib.suppress(SpoiledError):
        (ON_RANKS | SEVERAL_ON_RANKS)[p.driver](p).run()


def run_program(seed: int) -> dict[str, Any]:
    """As a scenario of harness/ranks.py: what went wrong on this rank."""
    check_on_ranks(draw_rank_program(seed))
    return {}


class Scenarios(dict[str, Callable[[], dict[str, Any]]]):
    """Every seed has one, "program 17"; those that are named here are run."""

    def __missing__(self, name: str) -> Callable[[], dict[str, Any]]:
        return partial(run_program, int(name.split()[1]))


SCENARIOS = Scenarios()


def run_programs(seeds: Iterable[int], directory: Path) -> dict[int, list[str]]:
    """Run the programs of these seeds on two ranks; what went wrong, rank by rank, for those that failed."""
    complaints = launch(seeds, directory / "together")
    for seed in [seed for seed in complaints if complaints[seed][0].startswith("died")]:
        complaints[seed] = launch([seed], directory / str(seed)).get(seed, [])  # it may have died of the one before
    return {seed: said for seed, said in complaints.items() if said}


def launch(seeds: Iterable[int], directory: Path) -> dict[int, list[str]]:
    directory.mkdir()
    SCENARIOS.clear()
    SCENARIOS.update({f"program {seed}": partial(run_program, seed) for seed in seeds})
    outcomes = ranks.run("fuzzing.on_ranks", "SCENARIOS", RANKS, directory)
    said = {int(name.split()[1]): [complaint(outcome) for outcome in many] for name, many in outcomes.items()}
    return {seed: complaints for seed, complaints in said.items() if any(complaints)}


def complaint(outcome: ranks.Outcome) -> str:
    if "died" in outcome:
        return f"died, or hung: {outcome['died'][-1000:]}"
    if "raised" not in outcome:
        return ""
    kinds, message = outcome["raised"], outcome["message"]
    if "MismatchError" in kinds:
        return message
    return f"{'alarm' if 'MacrobatchError' in kinds else 'crash'}: {kinds[0]}: {message}"
