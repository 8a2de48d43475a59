"""Checks of weights and buffers: if they change inside a window, its micro-batches go through different models."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from macrobatch._checks.values import Change, Values, holding
from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._engine.verdict import Flag, Flags, Verdict
from macrobatch._torch.fsdp1 import Stored
from macrobatch._torch.modules import RunningStatistics, buffers_of, modules_of, parameters_of
from macrobatch.errors import BatchError, warn

NOTHING = torch.empty(0)  # in place of a buffer that was taken away


class ChangedParameters(Check):
    """Compares some values of every parameter at the close with those before the first forward, on their device.

    The weights of `nn.Embedding(max_norm=)`, which forwards renormalise, are left out.
    """

    name = "a parameter that changes inside a window"
    sentence = "A parameter is written or replaced inside a window, such as the momentum encoder of a forward."
    cost = "a copy of at most 4,096 values of each parameter per window"
    shows = "changed inside window 1; its step was not taken"
    program = """
        momentum = nn.Linear(2, 1).requires_grad_(False)
        acc = Accumulator([model, momentum], optimizer, steps=2)
        for batch in acc.batches(loader):
            momentum.weight.data.lerp_(model.weight.data, 0.1)
            acc.backward((model(batch) - momentum(batch)).square().mean())
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._named: object = None
        self._values = Values()
        self._has_slots = engine.backend.abilities.leaves_are_parameters  # else forwards swap them
        self._keeps_others = engine.backend.abilities.shows_views  # each forward makes the parameters anew
        self._slots: tuple[list[dict[str, nn.Parameter | None]], list[str]] = [], []
        return True

    def window_begin(self, engine: Engine) -> None:
        if self._keeps_others:
            self._take(engine.backend.stored())
        elif self._named is not engine.store.named:
            self._find(engine)
        self._held = list(map(dict.get, *self._slots))
        self._late: list[Change] = []
        self._values.keep(self._parameters)

    def _find(self, engine: Engine) -> None:
        """Find the parameters, and the places in modules that hold them."""
        free, modules, named = set(), modules_of(engine.models), engine.store.named
        for module in modules:
            if _renormalises(module):
                free.add(id(module.weight))
        of_modules = map(parameters_of, modules) if self._has_slots else ()
        pairs = [(slots, name) for slots in of_modules for name in slots]
        self._slots = [slots for slots, _ in pairs], [name for _, name in pairs]
        self._names = [name for name, p in named.items() if id(p) not in free and not is_lazy(p)]
        self._parameters: list[Tensor] = [named[name] for name in self._names]
        self._owners = self._parameters
        self._named = named if len(self._names) + len(free) == len(named) else None  # until lazy ones have a shape

    def _take(self, stored: Sequence[Stored]) -> None:
        """Compare what this rank keeps of parameters, in place of the parameters."""
        stored = [one for one in stored if not _renormalises(one.holder)]
        self._names, self._owners = [one.name for one in stored], [one.parameter for one in stored]
        self._parameters = [one.values for one in stored]

    def before_close(self, engine: Engine) -> None:
        window = engine.window
        if window is None or engine.objective.num_passes * (window.num_backwards + window.num_skipped) == 1:
            return  # it went through the model once: nothing came in between
        held = list(map(dict.get, *self._slots))
        if not all(map(operator.is_, held, self._held)) and (error := self._replaced(held, engine)) is not None:
            raise error
        if self._keeps_others:
            self._take(engine.backend.stored())
        self._late = self._values.changed(self._parameters)
        if self._late and (known := holding(self._late)):
            raise self._changed(known, engine)

    def flags(self, engine: Engine) -> Flags:
        if not self._late:
            return {}
        holds = torch.stack([change.holds.to(engine.device, non_blocking=True) for change in self._late]).any()
        return {"changed parameters": Flag(holds, partial(self._changed, self._late, engine))}

    def _replaced(self, held: Sequence[object], engine: Engine) -> BatchError | None:
        """The error for a parameter in place of another. A wrapper may take some away in its forward."""
        for now, before, name in zip(held, self._held, self._slots[1], strict=True):
            if now is not before and isinstance(now, nn.Parameter):
                name = engine.store.own.get(id(before), name)
                return BatchError(self._message(name, "was replaced by another", engine.store.named.get(name), engine))
        return None

    def _changed(self, changes: list[Change], engine: Engine) -> BatchError:
        place = next((change.first() for change in changes if change.holds), 0)
        return BatchError(self._message(self._names[place], "changed", self._owners[place], engine))

    def _message(self, name: str, what: str, parameter: Tensor | None, engine: Engine) -> str:
        number = engine.num_windows if engine.window is None else engine.window.number
        is_trained = parameter is not None and parameter.requires_grad
        return (
            f"{name!r}, a parameter{'' if is_trained else ' that is not trained'}, {what} inside window {number}; its "
            "step was not taken. The micro-batches of a window must go through the same model. Update it after the "
            "step, where step() has returned a result, and outside of forwards: a momentum encoder or a codebook moves "
            "once a step then, as in one big batch. (Another optimizer that steps it, or a second Accumulator of the "
            "same model, changes it too.)"
        )


def _renormalises(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether its forwards write to its weight, which is no mistake."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


class ChangedBuffers(Check):
    """Compares some values of every floating-point buffer at the close with those before the first forward.

    Running statistics of batch and instance normalisation are left out: training does not read them. So are windows
    with ``joint=``, whose buffers are put back between its passes.
    """

    name = "a buffer that changes inside a window"
    sentence = "Forwards write to a floating-point buffer, such as a queue, which they may read (a warning)."
    cost = "a copy of at most 4,096 values of each such buffer per window, until it has warned"
    shows = "changes inside a window"
    program = """
        class Centred(nn.Linear):
            def __init__(self):
                super().__init__(2, 1)
                self.register_buffer("centre", torch.zeros(1))

            def forward(self, x):
                y = super().forward(x) - self.centre
                self.centre += 0.1 * y.detach().mean()
                return y

        model = Centred()
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        for batch in acc.batches(loader):
            acc.backward(model(batch).square().mean())
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._named: object = None
        self._values = Values()
        self._slots: list[tuple[Mapping[str, Tensor | None], str]] = []
        self._has_warned = False
        self._pending: tuple[Verdict, list[Change], list[str]] | None = None  # of the last window, on its way
        return any(any(map(_is_float, slots.values())) for slots in self._of(engine))

    def window_begin(self, engine: Engine) -> None:
        self._slots = []
        if self._has_warned:
            return
        if self._named is not engine.store.named:
            self._named, self._of_modules = engine.store.named, self._of(engine)
        self._slots = [(slots, name) for slots in self._of_modules if slots for name in slots]
        if self._slots:
            self._values.keep(self._buffers())

    def before_close(self, engine: Engine) -> None:
        if self._pending is not None:
            (verdict, changes, names), self._pending = self._pending, None
            if verdict.read():
                self._warn(changes, names)
        window = engine.window
        if not self._slots or self._has_warned or window is None or engine.objective.num_passes > 1:
            return
        if window.num_backwards + window.num_skipped == 1 or not (changes := self._values.changed(self._buffers())):
            return
        names = [_name_in(engine, *slot) for slot in self._slots]
        if known := holding(changes):
            self._warn(known, names)
        else:
            flags = {str(index): Flag(change.holds) for index, change in enumerate(changes)}
            self._pending = Verdict(flags).send(), changes, names

    def _of(self, engine: Engine) -> list[dict[str, Tensor | None]]:
        """The buffers of all modules besides those for running statistics, and those of this library."""
        modules = [one for one in modules_of(engine.models) if not isinstance(one, RunningStatistics)]
        return [buffers_of(one) for one in modules if not type(one).__module__.startswith("macrobatch.")]

    def _buffers(self) -> list[Tensor]:
        buffers = (slots.get(name) for slots, name in self._slots)
        return [NOTHING if buffer is None else buffer for buffer in buffers]

    def _warn(self, changes: list[Change], names: list[str]) -> None:
        self._has_warned = True
        name = names[next((change.first() for change in changes if change.holds), 0)]
        warn(
            f"the buffer {name!r} changes inside a window, so its micro-batches may go through different models. If "
            "forwards read it in training mode (a queue, a codebook, a centre, a memory), update it after the step, "
            "outside of forwards, from what all micro-batches of the window have added up. If they only write to it, "
            "nothing is wrong (told once)."
        )


def _is_float(buffer: Tensor | None) -> bool:
    return buffer is not None and (buffer.is_floating_point() or buffer.is_complex())


def _name_in(engine: Engine, slots: Mapping[str, Tensor | None], name: str) -> str:
    """The name of a buffer, with the path of its module."""
    modules = (pair for model in engine.models for pair in model.named_modules())
    path = next((path for path, module in modules if buffers_of(module) is slots), "")
    return f"{path}.{name}" if path else name
