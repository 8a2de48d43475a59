"""Programs that drive micro-batches themselves: `Accumulator.batches` and `micro_batch`, with events and mistakes."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuzzing.mistakes import BAD, SPOILS
from fuzzing.model import Batch, PlannedError, make_batch
from fuzzing.run import MismatchError, Run, SpoiledError
from macrobatch import Accumulator, MacrobatchError
from macrobatch.errors import NonFiniteError


class Loop(Run):
    suspect = ""  # the mistake that was made, until it is known to have done no harm

    def run(self) -> None:
        torch.set_default_dtype(getattr(torch, self.p.default_dtype))
        try:
            self.acc = self.accumulator()
        except MacrobatchError:
            if self.p.shared:
                raise SpoiledError from None
            raise
        for epoch, sizes in enumerate(self.p.epochs):
            batches = [make_batch(self.p, epoch, i, samples) for i, samples in enumerate(sizes)]
            for batch in batches:
                self.watch(batch.x.requires_grad_(self.p.input_grad), batch.y, batch.w)
            with self.guarded():
                self.epoch(epoch, batches)
            is_open = self.reference.window or self.suspect
            if "restart" in self.p.events_at(epoch, len(sizes) - 1) and not is_open:
                state = self.acc.state_dict()
                self.acc = self.accumulator()
                self.acc.load_state_dict(state)
        with self.guarded():
            if self.reference.window:
                self.settle(now=True)
        self.finish()

    def accumulator(self) -> Accumulator:
        p = self.p
        steps = p.steps[0] if len(p.steps) == 1 else p.steps_at
        return Accumulator(self.models(), self.optimizers(), steps=steps, remainder=p.remainder, **self.options())

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A mistake may be noticed. Then nothing has changed, and the next window is as good as any."""
        try:
            yield
        except MacrobatchError:
            if not self.suspect and not self.p.writing_hook and self.p.loader not in ("buffer", "too long"):
                raise
            if self.suspect == "optimizer.step":
                raise SpoiledError from None
            self.suspect = ""
            self.discard()
            self.same_state()

    def discard(self) -> None:
        self.acc.discard()
        self.reference.discard()

    # ----------------------------------------------------------------------------------------------------- an epoch

    def epoch(self, epoch: int, batches: list[Batch]) -> None:
        if self.p.driver == "micro":
            for index, batch in enumerate(batches):
                self.body(epoch, index, batch, is_last=False)
            return
        loader, index = self.loader(batches), -1
        rest = self.acc.batches(loader)
        try:
            for batch in rest:
                index += 1
                self.expect(batch, batches, index)
                self.body(epoch, index, batches[index], is_last=index == len(batches) - 1)
                if "break" in self.p.events_at(epoch, index):
                    break
        except PlannedError:
            self.discard()
            return
        is_read = self.p.remainder != "drop" and "break" not in self.p.events_at(epoch, index)
        if self.p.loader == "too long" and is_read:  # what is dropped need not be read
            raise MismatchError("silent", "a loader with fewer batches than its length")
        if "break" in self.p.events_at(epoch, index):
            self.go_on(epoch, batches, index, loader, rest)
        else:
            self.expect_all(batches, index)
        if self.p.remainder == "drop":
            self.reference.discard()

    def expect_all(self, batches: list[Batch], index: int) -> None:
        """Every batch was handed out, but for those of a window that is dropped."""
        missing = len(batches) - 1 - index
        is_short = len(self.reference.window) + missing < self.p.steps_at(self.reference.taken)
        if missing and not (is_short and self.p.remainder == "drop"):
            raise MismatchError("silent", f"only {index + 1} of {len(batches)} batches were handed out")

    def go_on(self, epoch: int, batches: list[Batch], index: int, loader: Any, rest: Iterator[Batch]) -> None:
        """After a break: with the same iterator, with another one over the same stream, or not at all."""
        if self.p.loader != "same iterator":
            self.discard()
            if self.p.loader != "stream" or index == len(batches) - 1:
                return
            rest = self.acc.batches(loader)
        for batch in rest:
            index += 1
            self.expect(batch, batches, index)
            self.body(epoch, index, batches[index], is_last=index == len(batches) - 1)
        self.expect_all(batches, index)

    def expect(self, batch: Batch, batches: list[Batch], index: int) -> None:
        if index >= len(batches) or not torch.equal(batch.x.detach(), batches[index].x.detach()):
            raise MismatchError("silent", f"batch {index} was not the next one of the loader")

    def loader(self, batches: list[Batch]) -> Any:
        match self.p.loader:
            case "generator":
                return (batch for batch in batches)
            case "stream":
                return iter(batches)
            case "sized":
                return Sized(batches)
            case "DataLoader":
                return torch.utils.data.DataLoader(batches, batch_size=None, generator=torch.Generator())
            case "buffer":
                return refilled(batches)
            case "too long":
                return Sized(batches, more=1)
            case "unknown length":
                return Unknown(batches)
            case "stream of a DataLoader":
                return torch.utils.data.DataLoader(Stream(batches), batch_size=None, generator=torch.Generator())
            case "fails":
                return failing(batches[: 1 + self.p.seed % len(batches)])
        return batches

    def closes(self, is_last: bool) -> bool:
        """Whether the micro-batch that is under way closes its window."""
        is_full = len(self.reference.window) + 1 >= self.p.steps_at(self.reference.taken)
        return is_full or (is_last and self.p.remainder == "step" and self.p.loader not in ("too long", "fails"))

    # ------------------------------------------------------------------------------------------------ a micro-batch

    def around(self, last: bool | None) -> Any:
        return self.acc.micro_batch(last) if self.p.driver == "micro" else contextlib.nullcontext()

    def says_last(self, events: list[str]) -> bool | None:
        """What micro_batch is told."""
        if self.p.driver == "micro" and "last" in events:
            return True
        return len(self.reference.window) >= self.p.steps_at(self.reference.taken) if self.p.says_last else None

    def body(self, epoch: int, index: int, batch: Batch, is_last: bool) -> None:
        events = self.p.events_at(epoch, index)
        is_late = (self.p.seed + index) % 2 == 0  # whether gradients are spoiled after the backward, or before it
        if not self.try_first(events, batch):
            return
        last = self.says_last(events)
        with self.around(last):
            if "discard before" in events:
                self.discard()
            closes = self.closes(is_last) if last is None else last
            if self.acc.is_last != closes and not self.suspect:
                raise MismatchError("silent", f"is_last is {self.acc.is_last}")
            self.change(events, batch)
            if not is_late:
                self.spoil(events, batch)
            if "micro_batch inside" in events:
                self.suspect = "micro_batch inside"
                with self.acc.micro_batch():
                    self.reference.forward(batch)
                    self.refuses(self.loss(batch), self.items(batch))
                raise MismatchError("silent", "micro_batch() inside of a micro-batch")
            if "no backward" in events:
                self.suspect = "no backward"
                return
            self.backward(events, batch)
        self.nothing_elsewhere()
        if is_late:
            self.spoil(events, batch)
        if "discard after" in events:
            self.discard()
        elif "no step" in events:
            self.suspect = self.suspect or "no step"
        elif closes or "now" in events:
            self.settle(now="now" in events)
            self.between(events)
            if "plain backward between" in events:
                self.plain_backward("plain backward between", batch)
        elif (result := self.acc.step()) is not None:
            raise MismatchError("silent", f"step() closed a window after {result.micro_batches} micro-batches")
        self.overstep(events, batch)

    def try_first(self, events: list[str], batch: Batch) -> bool:
        """An attempt that fails. Returns whether the batch is still to be trained on."""
        event = next((event for event in events if "fails" in event), "")
        if not event:
            return True
        try:
            with self.around(self.says_last(events)):
                self.net.fails = PlannedError() if event.startswith("backward") else None
                loss = self.loss(batch)
                self.reference.forward(batch)
                if self.net.fails is None:
                    raise PlannedError
                self.acc.backward(loss, items=self.items(batch))
        except PlannedError:
            pass
        else:
            raise MismatchError("silent", "an exception in a backward was lost")
        finally:
            self.net.fails = None
        is_kept = event == "backward fails, again"
        is_left = self.p.driver == "loop" and "leave out" in event  # a batch without its backward
        if is_kept or is_left:
            self.suspect = event
        if "discard" in event:
            self.discard()
        return "again" in event

    def backward(self, events: list[str], batch: Batch) -> None:
        """Forward and backward, here and there."""
        losses = self.reference.forward(batch)
        loss, items = self.loss(batch, events), self.items(batch)
        mistake = next((event for event in events if event in BAD), None)
        if mistake == ("loss of nothing" if self.reference.window else "items mixed with None"):
            mistake = None  # a loss may be constant in some micro-batches of a window
        if mistake == "scaled loss" and (self.own.scaler is None or self.own.scaler.get_scale() == 1.0):
            mistake = None
        if mistake is not None:
            self.suspect = mistake
            bad = BAD[mistake](loss, items)
            if mistake == "scaled loss":
                bad = self.own.scaler.scale(loss), items
            if self.refuses(*bad):  # then the right call comes after it
                losses, loss, mistake = self.reference.forward(batch), self.loss(batch, events), None
        if mistake is None:
            self.acc.backward(loss, items=items)
        is_poisoned, addend = "nan" in events or "inf" in events, math.inf if "infinite loss" in events else 0.0
        self.reference.add(batch, losses, is_poisoned=is_poisoned, addend=addend)
        if "second backward" in events:
            self.suspect = "second backward"
            self.reference.forward(batch)
            if not self.refuses(self.loss(batch), items):
                raise MismatchError("silent", "a second backward in one micro-batch")

    def refuses(self, loss: Any, items: Any) -> bool:
        try:
            self.acc.backward(loss, items=items)
        except MacrobatchError:
            return True
        return False

    def settle(self, now: bool = False) -> None:
        """The window closes here and there."""
        reference = self.reference
        may_raise = reference.is_poisoned and self.p.nonfinite == "raise" and self.own.scaler is None
        try:
            result = self.acc.step(now=now)
        except NonFiniteError:
            if not may_raise:
                raise
            self.discard()
            self.same_state()
        else:
            if may_raise:
                raise MismatchError("silent", "a gradient that is not finite")
            self.compare(result, reference.close())
            same = self.acc.optimizer_step == reference.taken
            if not same:
                raise MismatchError("silent", f"optimizer_step is {self.acc.optimizer_step}")
        self.suspect = ""

    # ------------------------------------------------------------------------------------------------------- events

    def spoil(self, events: list[str], batch: Batch) -> None:
        """Mistakes with gradients, in an open window."""
        for event in events:
            if event in ("plain backward before", "plain backward after"):
                self.plain_backward(event, batch)
            elif event in SPOILS and self.reference.window:
                self.suspect = event
                try:
                    SPOILS[event](self)
                except RuntimeError:  # torch's own answer, e.g. to a step with gradients of another dtype
                    raise SpoiledError from None

    def plain_backward(self, event: str, batch: Batch) -> None:
        self.suspect = event
        self.reference.forward(batch)
        try:
            self.loss(batch).backward()
        finally:  # a check may raise inside of it
            batch.x.grad = None
            for other in self.net.others:
                other.zero_grad()

    def overstep(self, events: list[str], batch: Batch) -> None:
        """Mistakes after step()."""
        if "step twice" in events:
            self.suspect = self.suspect or "step twice"
            self.acc.step()
        if "backward outside" in events and self.p.driver == "micro":
            self.reference.forward(batch)
            self.must_raise(lambda: self.acc.backward(self.loss(batch), items=self.items(batch)), "backward() outside")
        if not self.reference.window:
            return
        if "same weights" in events:
            self.suspect = "same weights"
            self.net.load_state_dict(copy.deepcopy(self.net.state_dict()))
        if "plain backward after step" in events:
            self.plain_backward("plain backward after step", batch)
        if "new batches" in events:
            self.suspect = "new batches"
            self.must_raise(lambda: next(iter(self.acc.batches([batch]))), "batches() over an open window")
        if "state_dict" in events:
            self.must_raise(self.acc.state_dict, "state_dict() inside a window")
        if "load_state_dict" in events:
            fresh = self.accumulator().state_dict()
            self.must_raise(lambda: self.acc.load_state_dict(fresh), "load_state_dict() inside a window")

    def must_raise(self, call: Callable[[], Any], what: str) -> None:
        try:
            call()
        except MacrobatchError:
            return
        raise MismatchError("silent", what)


class Sized:
    """A loader with a length."""

    def __init__(self, batches: Sequence[Batch], more: int = 0) -> None:
        self.batches, self.more = batches, more

    def __len__(self) -> int:
        return len(self.batches) + self.more

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Unknown(Sized):
    """A loader that has no answer to `len`."""

    def __len__(self) -> int:
        raise NotImplementedError


class Stream(torch.utils.data.IterableDataset[Batch]):
    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def failing(batches: Sequence[Batch]) -> Iterator[Batch]:
    """A loader that fails in the middle of an epoch."""
    yield from batches
    raise PlannedError


def refilled(batches: Sequence[Batch]) -> Iterator[Batch]:
    """A loader without a length that fills the same memory anew for every batch."""
    memory = torch.empty(max(batch.x.numel() for batch in batches), dtype=batches[0].x.dtype)
    for batch in batches:
        x = memory[: batch.x.numel()].view(batch.x.shape).copy_(batch.x.detach())
        yield Batch(x, batch.y, batch.w, batch.ids)
