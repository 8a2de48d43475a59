"""One model trained by the library and its twin by the reference, and how the two are compared."""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuzzing.model import Batch, Net, Trainee, micro_loss, rates
from fuzzing.program import Program
from fuzzing.reference import Expected, Reference
from macrobatch import StepResult


class MismatchError(AssertionError):
    """What a program did that it ought not to.

    `kind`: "silent" (a wrong result, and no word), "alarm" (an error in a right program) or "crash" (an error that is
    not the library's own).
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind, self.what = kind, what


class SpoiledError(Exception):
    """The program itself has made its weights NaN, stepped by itself or diverged: nothing is left to compare."""


DIVERGED = 1e20  # a loss that will overflow soon, here or there


class Run:
    def __init__(self, p: Program, name: str = "", is_alone: bool = True, net: Net | None = None) -> None:
        self.p, self.net = p, Net(p, plain=False, name=name) if net is None else net
        self.own = Trainee(p, self.net)
        self.reference = Reference(p, Trainee(p, Net(p, plain=True, name=name)), is_alone)
        self.watched: list[tuple[Tensor, Tensor]] = []  # what belongs to the program, with a copy
        self.counter = torch.zeros((), dtype=torch.float64)  # one tensor for the items of all micro-batches
        self.turn = 0

    def options(self) -> dict[str, Any]:
        p, own = self.p, self.own
        return {
            "scheduler": own.schedulers or None,
            "max_norm": p.max_norm,
            "scaler": own.scaler,
            "reduction": p.reduction,
            "nonfinite": p.nonfinite,
            "accumulate_dtype": getattr(torch, p.accumulate) if p.accumulate else None,
        }

    def models(self) -> Any:
        return [self.net.body, self.net.tail] if self.p.split else self.net

    def optimizers(self) -> Any:
        return self.own.optimizers[0] if len(self.own.optimizers) == 1 else self.own.optimizers

    # --------------------------------------------------------------------------------------------- losses and items

    def loss(self, batch: Batch, events: list[str] = (), x: Tensor | None = None) -> Tensor:
        loss = micro_loss(self.p, self.net, batch, x)
        if "nan" in events:
            return loss * math.nan
        if "inf" in events:
            return loss * math.inf
        return loss + math.inf if "infinite loss" in events else loss

    def items(self, batch: Batch) -> Any:
        """As the program gives them."""
        self.turn += 1
        kind = ("int", "int16", "float64")[self.turn % 3] if self.p.items == "mixed" else self.p.items
        count = batch.items
        match kind:
            case "none":
                return None
            case "int":
                return int(count)
            case "float":
                return count
            case "reused":
                return self.counter.fill_(count)
            case "one element":
                items = torch.tensor([count], dtype=torch.float64)
            case _:
                items = torch.tensor(count, dtype=getattr(torch, kind))
        self.watch(items)
        return items

    def watch(self, *tensors: Tensor) -> None:
        self.watched += [(tensor, tensor.detach().clone()) for tensor in tensors]

    # ------------------------------------------------------------------------------------------------------- events

    def change(self, events: list[str], batch: Batch) -> None:
        """What is right before any forward."""
        for event in events:
            if event in ("freeze", "thaw"):
                self.freeze(event == "freeze")
            if event == "evaluate":
                self.evaluate(batch)
            if event == "idle forward":
                self.loss(batch)
                self.reference.forward(batch)
            if event == "own grad":
                self.reference.forward(batch)
                parameters = [q for q in self.net.named.values() if q.requires_grad]
                torch.autograd.grad(self.loss(batch), parameters, allow_unused=True)

    def freeze(self, freezes: bool) -> None:
        for net in (self.net, self.reference.net):
            (net.body[-1] if self.p.pieces else net.tail).requires_grad_(not freezes)

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self.net(batch.x)
            self.reference.forward(batch)

    def between(self, events: list[str]) -> None:
        """What is right between windows."""
        if "zero_grad between" in events:
            for optimizer in self.own.optimizers:
                optimizer.zero_grad()
        if "discard between" in events:
            self.acc.discard()
        if "reload optimizer" in events:
            for optimizer in self.own.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if "load weights" in events:
            for net in (self.net, self.reference.net):
                net.load_state_dict({name: value / 2 for name, value in net.state_dict().items()})
        for event in events:
            if event in ("freeze between", "thaw between"):
                self.freeze(event == "freeze between")
        if "halve lr" in events:
            for optimizer in (*self.own.optimizers, *self.reference.trainee.optimizers):
                for group in optimizer.param_groups:
                    group["lr"] /= 2

    # ---------------------------------------------------------------------------------------------------- comparing

    def compare(self, result: Any, expected: Expected) -> None:
        """What became of a window."""
        bound = tolerance(self.p)
        if not isinstance(result, StepResult):
            raise MismatchError("silent", f"step() gave {result!r} where a window closes")
        if expected.is_poisoned and not expected.skipped:
            raise SpoiledError
        if bool(result.skipped) != expected.skipped:
            raise MismatchError("silent", f"skipped is {bool(result.skipped)}")
        same_number("result.micro_batches", result.micro_batches, expected.micro_batches)
        same_number("result.items", result.items, expected.items)
        same_number("result.step", result.step, self.reference.taken)
        same_number("result.lr", result.lr, expected.lr)
        if expected.losses is not None:
            same_number("the terms", ", ".join(result.losses or ()), ", ".join(expected.losses))
            for name, loss in expected.losses.items():
                same_number(f"result.losses[{name!r}]", result.losses[name], loss, 10 * bound)
        if not expected.is_poisoned:
            same_number("result.loss", result.loss, expected.loss, 10 * bound)
        if not expected.skipped:
            same_number("result.grad_norm", result.grad_norm, expected.grad_norm, 10 * bound)
            self.same_gradients(expected)
        self.same_state()
        if abs(float(expected.loss)) > DIVERGED:
            raise SpoiledError

    def same_gradients(self, expected: Expected) -> None:
        if self.p.hook == "watch":
            theirs = self.reference.trainee.seen[-1]
            same_tensors("the gradient in the optimizer", self.own.seen[-1], theirs, tolerance(self.p))
        for name, parameter in self.net.named.items():
            if expected.gradients[name] is None and parameter.grad is not None:
                raise MismatchError("silent", f"{name} was not used, and has a gradient")

    def same_state(self) -> None:
        """Weights, optimizer state, buffers, schedule and scale."""
        own, twin, bound = self.own, self.reference.trainee, LOOSER[tolerance(self.p)]
        same_tensors("the weight", self.weights(), twin.net.named, bound)
        same_tensors("the buffer", dict(own.net.named_buffers()), dict(twin.net.named_buffers()), bound)
        same_tensors("optimizer state", *self.state(), bound)
        same_number("the learning rate", rates(own), rates(twin))
        for mine, theirs in zip(own.schedulers, twin.schedulers, strict=True):
            same_number("the scheduler's steps", mine.last_epoch, theirs.last_epoch)
        if own.scaler is not None and "update scaler" not in {what for *_, what in self.p.events}:
            mine, theirs = (t.scaler.state_dict() for t in (own, twin))
            same_number("the scaler", tuple(mine.values()), tuple(theirs.values()))

    def weights(self) -> dict[str, Tensor]:
        return self.net.named

    def state(self) -> list[dict[str, Tensor]]:
        """Of the optimizers, here and there."""
        return alike(state_of(self.own), state_of(self.reference.trainee))

    def finish(self) -> None:
        self.same_state()
        self.nothing_elsewhere()
        for tensor, before in self.watched:
            if not torch.equal(tensor.detach(), before):
                raise MismatchError("silent", "a tensor of the program (items, or of a batch) was changed")
        if self.reference.random is not None and not torch.equal(torch.get_rng_state(), self.reference.random):
            raise MismatchError("silent", "the random numbers went another way")

    def nothing_elsewhere(self) -> None:
        if any(q.grad is not None for other in self.net.others for q in other.parameters()):
            raise MismatchError("silent", "another model got a gradient")


def tolerance(p: Program) -> float:
    """Of gradients."""
    if p.dtype == "bfloat16":
        return 0.1
    return 1e-4 if p.is_narrow else 1e-12


LOOSER = {1e-12: 1e-9, 1e-4: 2e-3, 0.1: 0.2}  # for weights: optimizers that divide by gradients magnify rounding


def same_tensors(what: str, found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    """As close as `bound`, as a part of the largest number of all. None must meet None."""
    found = {name: value if value is None else unsharded(value) for name, value in found.items()}
    if found.keys() != expected.keys():
        raise MismatchError("silent", f"{what}: {min(found.keys() ^ expected.keys())} is in one of the two only")
    names = [name for name, value in expected.items() if value is not None]
    if wrong := [name for name in found if (found[name] is None) == (name in names)]:
        raise MismatchError("silent", f"{what} of {wrong[0]} is {'None' if found[wrong[0]] is None else 'there'}")
    if not names:
        return
    all_found, all_expected = (torch.cat([flat(values[name]) for name in names]) for values in (found, expected))
    errors = (all_found - all_expected).abs() / max(all_expected.abs().max().item(), 1e-3)
    if not errors.max().item() <= bound:
        each = errors.split([flat(expected[name]).numel() for name in names])
        worst = max(range(len(names)), key=lambda i: each[i].nan_to_num(torch.inf).max().item())
        raise MismatchError("silent", f"{what} of {names[worst]} is off by {errors.max().item():.1e}")


def unsharded(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().reshape(-1)
    return (torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor).double()


def same_number(what: str, found: Any, expected: Any, bound: float = 0.0) -> None:
    if isinstance(expected, str):
        same = found == expected
    elif isinstance(expected, tuple):
        same = tuple(map(float, found)) == tuple(map(float, expected))
    elif expected is None or found is None:
        same = found is expected
    else:
        found = float(found)
        same = found == expected or (math.isnan(found) and math.isnan(expected))
        same = same or abs(found - expected) <= bound * max(abs(expected), 1e-3)
    if not same:
        raise MismatchError("silent", f"{what} is {found}, not {expected}")


def state_of(trainee: Trainee) -> dict[str, Tensor]:
    return {
        f"{number} {name} {key}": unsharded(value.detach())
        for number, optimizer in enumerate(trainee.optimizers)
        for name, parameter in trainee.net.named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def alike(*states: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What is zero is as good as none: a fused optimizer makes its state before it leaves a step out."""
    named = {name: value for state in states for name, value in state.items()}
    return [{name: state.get(name, torch.zeros_like(value)) for name, value in named.items()} for state in states]
