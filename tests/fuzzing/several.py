"""Programs with a loss of several terms, by an Accumulator and by a MacroStep, and with a loss of the whole batch."""

from typing import Any

import torch
from torch import nn

from fuzzing.loop import Sized
from fuzzing.model import LENGTH, Trainee
from fuzzing.reference import SeveralReference
from fuzzing.run import MismatchError, Run
from fuzzing.several_model import Batch, SeveralNet, counts_of, encode, joint_loss, make_batch, terms_of
from fuzzing.several_program import SeveralProgram
from macrobatch import Accumulator, MacroStep, by_count, by_tokens


class Several(Run):
    def __init__(self, p: SeveralProgram, net: SeveralNet | None = None) -> None:
        self.p, self.net = p, SeveralNet(p) if net is None else net
        self.own = Trainee(p, self.net)
        self.reference = SeveralReference(p, Trainee(p, SeveralNet(p)))
        self.watched = []
        self.turn = 0

    def models(self) -> nn.Module:
        return self.net

    def batch(self, epoch: int, index: int, rank: int = 0) -> Batch:
        batch = make_batch(self.p, epoch, index, self.sizes(rank)[epoch][index], rank)
        self.watch(*batch.values())
        return batch

    def sizes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return self.p.epochs

    def counts(self, batch: Batch) -> dict[str, Any]:
        return counts_of(self.p, batch)

    def terms(self, model: Any, batch: Batch) -> dict[str, Any]:
        self.turn += 1
        return terms_of(self.p, model, batch, self.turn)


class TermLoop(Several):
    """`batches` with counts=."""

    def run(self) -> None:
        p = self.p
        steps = p.steps[0] if len(p.steps) == 1 else p.steps_at
        options = self.options() | {"steps": steps, "remainder": p.remainder, "counts": self.counts}
        self.acc = Accumulator(self.models(), self.optimizers(), **options)
        for epoch in range(len(p.epochs)):
            self.epoch(epoch)
        self.finish()

    def epoch(self, epoch: int) -> None:
        own = [self.batch(epoch, index) for index in range(len(self.p.epochs[epoch]))]
        index = -1
        for index, batch in enumerate(self.acc.batches(self.loader(own))):
            if index >= len(own) or not torch.equal(batch["ids"], own[index]["ids"]):
                raise MismatchError("silent", f"batch {index} was not the next one of the loader")
            self.micro_batch(batch, is_final=index == len(own) - 1)
            if (epoch, index) in self.p.discards and self.reference.window:
                self.acc.discard()
                self.reference.discard()
        missing = len(own) - 1 - index
        is_short = len(self.reference.window) + missing < self.p.steps_at(self.reference.taken)
        if missing and not (is_short and self.p.remainder == "drop"):
            raise MismatchError("silent", f"only {index + 1} of {len(own)} batches were handed out")
        if self.p.remainder == "drop":
            self.reference.discard()
        if self.reference.window:
            raise MismatchError("silent", "the last window of an epoch was not closed")

    def loader(self, own: list[Batch]) -> Any:
        match self.p.loader:
            case "generator":
                return iter(own)
            case "sized":
                return Sized(own)
            case "DataLoader":
                return torch.utils.data.DataLoader(own, batch_size=None, generator=torch.Generator())
        return own

    def micro_batch(self, batch: Batch, is_final: bool) -> None:
        is_full = len(self.reference.window) + 1 == self.p.steps_at(self.reference.taken)
        closes = is_full or (is_final and self.p.remainder == "step")
        if self.acc.is_last != closes:
            raise MismatchError("silent", f"is_last is {self.acc.is_last}")
        self.acc.backward(self.terms(self.models(), batch))
        self.reference.append(batch)
        result = self.acc.step()
        if closes:
            self.compare(result, self.reference.close())
        elif result is not None:
            raise MismatchError("silent", f"step() closed a window after {result.micro_batches} micro-batches")


class Whole(Several):
    """A MacroStep that gets whole batches."""

    def run(self) -> None:
        self.train = self.macro_step()
        for window in range(len(self.p.epochs)):
            batch = self.batch(window, 0)
            self.parts: list[Batch] = []
            result = self.train(batch)
            self.account(batch)
            expected = self.reference.close()
            expected.micro_batches = len(self.parts)
            self.compare(result, expected)
        self.finish()

    def macro_step(self) -> MacroStep:
        p = self.p
        micro: Any = {"int": p.size, "by_count": by_count(p.size), "auto": "auto"}.get(p.cut)
        if p.cut == "by_tokens":
            micro = by_tokens(max(LENGTH, p.size * LENGTH // 2))
        options = self.options() | self.objective()
        return MacroStep(self.models(), self.optimizers(), self.loss_fn, micro=micro, **options)

    def note(self, batch: Batch) -> None:
        """A micro-batch goes through; in the second of two passes it is known already."""
        if not any(torch.equal(batch["ids"], part["ids"]) for part in self.parts):
            self.parts.append(batch)

    def account(self, batch: Batch) -> None:
        """Hand the reference what went through, and require that it is the whole batch."""
        found = sorted(number for part in self.parts for number in part["ids"].tolist())
        if found != batch["ids"].tolist():
            raise MismatchError("silent", f"samples {found} were trained on, not {batch['ids'].tolist()}")
        for part in self.parts:
            self.reference.append(part)


class TermWhole(Whole):
    def objective(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def loss_fn(self, model: Any, batch: Batch) -> dict[str, Any]:
        self.note(batch)
        return self.terms(model, batch)


class JointWhole(Whole):
    def objective(self) -> dict[str, Any]:
        return {"joint": self.joint}

    def loss_fn(self, model: Any, batch: Batch) -> Any:
        self.note(batch)
        return encode(self.p, model, batch)

    def joint(self, model: Any, encoded: Any) -> Any:
        return joint_loss(self.p, model, encoded)
