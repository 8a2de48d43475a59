"""Checks of gradients: nobody else may touch them inside a window."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from macrobatch._engine.closing import TOUCHED
from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._engine.store import GRADIENT_OF, VIEW
from macrobatch._engine.totals import Micro
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.foreach import norm_dtype
from macrobatch._torch.tensors import (
    GRADIENT_HOOKS_OF,
    HOOKS_OF,
    hooks_after_accumulation,
    hooks_on_gradient,
    version_of,
)
from macrobatch.errors import BatchError, UsageError, warn

UNDIVIDED = (
    "Until step() they are undivided sums: leave zero_grad() and clip_grad_norm_() out of the loop (step() clears, and "
    "clips with max_norm=, once a window), and call discard() to drop what was accumulated. To change the gradient of "
    "the window, register a hook of the optimizer, optimizer.register_step_pre_hook(f), which sees the mean. In a "
    "program of Accelerate's, put accelerator.clip_grad_norm_() under `if accelerator.sync_gradients:`."
)


def _changed(found: str) -> UsageError:
    return UsageError(found, UNDIVIDED, code="changed gradients")


class ChangedGradients(Check):
    """Compares identity and version counter of every gradient with those after the last backward.

    Two kinds of writes do not change version counters: writes to a list of DTensors at once, as in clip_grad_norm_, and
    writes to views of what a backend holds. Norms show them, which are compared on the device.
    """

    name = "changed gradients"
    sentence = "Somebody else clips, clears, scales or adds to the gradients inside a window, while they are sums."
    cost = "0.1 us a parameter per micro-batch and window; under FSDP and tensor parallelism, also a norm of each"
    shows = "the gradients of the open window were changed"
    program = """
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._versions: list[int] = []
        self._norms: list[Tensor] = []
        self._writes: Tensor | None = None  # whether a norm shows a write on this rank; on the device
        return True

    def window_begin(self, engine: Engine) -> None:
        self._writes = None
        if engine.store.is_elsewhere or engine.store.tells_by_norm:
            self.after_backward(engine, None)
        else:
            self._versions = [-1] * len(engine.store.left)

    def after_backward(self, engine: Engine, micro: Micro | None) -> None:
        store: Any = engine.store
        self._versions = _versions(store.left) if store.has_gaps else list(map(version_of, store.left))
        if store.tells_by_norm:
            self._norms = self._local_norms(engine)

    def before_backward(self, engine: Engine, micro: Micro | None = None) -> None:
        store = engine.store
        now: list[Any] = store.now() if store.is_elsewhere else list(map(GRADIENT_OF, store.parameters))
        is_same = all(map(operator.is_, now, store.left))
        versions = list(map(version_of, now)) if is_same and not store.has_gaps else _versions(now)
        if is_same and versions == self._versions:
            if store.tells_by_norm:
                self._compare_norms(engine)
            return
        if engine.backend.abilities.shows_views:  # only some ranks may see it: all ranks learn of it at the close
            was_cleared = any(left is VIEW and gradient is None for gradient, left in zip(now, store.left, strict=True))
            cleared = torch.full((), was_cleared, dtype=torch.bool, device=engine.device)
            self._writes = cleared if self._writes is None else self._writes | cleared
            self._compare_norms(engine)
            return
        for index, (gradient, left) in enumerate(zip(now, store.left, strict=True)):
            if gradient is left and versions[index] == self._versions[index]:
                continue
            may_move = engine.backend.abilities.moves_gradients
            if may_move and _was_moved(left, self._versions[index], gradient):
                continue
            raise self._error(engine, index, gradient, left)
        store.absorb()
        self.after_backward(engine, None)

    before_close = before_backward

    def flags(self, engine: Engine) -> Flags:
        if self._writes is None:
            return {}
        number = 0 if engine.window is None else engine.window.number
        found = f"somebody else changed the gradients of the open window {number}, so its step was not taken."
        return {TOUCHED: Flag(self._writes.to(engine.device), lambda: _changed(found))}

    def _error(self, engine: Engine, index: int, gradient: Tensor | None, left: Tensor | None) -> UsageError:
        """The error for a gradient that is not as the last backward left it."""
        seen, store = "", engine.store
        if index < len(store.parameters):
            seen = f" (seen at parameter {store.own[id(store.parameters[index])]!r})"
        if left is None:
            return UsageError(
                f"somebody else's backward() has added gradients to the open window{seen}.",
                "Until step() they are undivided sums, so nothing else may add to them: call acc.backward(loss) "
                "instead of loss.backward(), add several losses up and pass the sum, and freeze this model where "
                "another one is trained through it (under fully_shard, also with set_requires_gradient_sync(False) for "
                "that forward and backward). Two Accumulators may not share a parameter in open windows: give "
                "both models to one. Under fully_shard, a gradient penalty (autograd.grad inside of the loss) adds to "
                "gradients as well, and is not supported. discard() drops what was accumulated.",
                code="another backward",
            )
        what = "cleared" if gradient is None else "changed"
        return _changed(f"the gradients of the open window were {what} since the last backward{seen}.")

    def _local_norms(self, engine: Engine) -> list[Tensor]:
        """The norms of this rank's parts of the gradients whose version counters do not show all writes."""
        store = engine.store
        parts = [local_tensor(gradient) for gradient in store.left if isinstance(gradient, DTensor)]
        if engine.backend.abilities.shows_views:
            nothing = torch.zeros((), device=engine.device)
            parts = [nothing if parameter.grad is None else parameter.grad for parameter in store.parameters]
        with torch.no_grad():
            return [torch.linalg.vector_norm(part, dtype=norm_dtype(part)) for part in parts]

    def _compare_norms(self, engine: Engine) -> None:
        """Compare the norms with the earlier ones, on the device."""
        for now, before in zip(self._local_norms(engine), self._norms, strict=True):
            differs = (now != before) & ~(now.isnan() & before.isnan())
            self._writes = differs if self._writes is None else self._writes | differs.to(self._writes.device)


class HooksThatChange(Check):
    """Runs a hook before and one after all other hooks of a parameter."""

    name = "hooks that change gradients"
    sentence = "A hook of the program changes or clears a gradient after each addition, though it is a sum."
    cost = "a look at each parameter per window; two hooks per micro-batch for each parameter with hooks"
    shows = "a hook that runs after each addition to the gradient"
    program = """
        model.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._handles: list[Any] = []
        return True

    def window_begin(self, engine: Engine) -> None:
        named = engine.store.named
        if any(map(HOOKS_OF, named.values())):
            self._handles = _guard({name: p for name, p in named.items() if hooks_after_accumulation(p)})

    def window_end(self, engine: Engine) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _guard(hooked: Mapping[str, Any]) -> list[Any]:
    """Register the hooks around those of the program."""
    handles = []
    for name, parameter in hooked.items():
        if not parameter.requires_grad:  # its hooks do not run
            continue
        guard = _Guard(name)
        first = parameter.register_post_accumulate_grad_hook(guard.note)
        _run_first(first, hooks_after_accumulation(parameter))
        handles += [first, parameter.register_post_accumulate_grad_hook(guard.check)]
    return handles


class _Guard:
    """Runs before and after all other hooks of one parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def note(self, parameter: Tensor) -> None:
        self._gradient = parameter.grad
        self._version = -1 if parameter.grad is None else version_of(parameter.grad)

    def check(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is self._gradient and (gradient is None or version_of(gradient) == self._version):
            return
        raise UsageError(
            f"a hook that runs after each addition to the gradient of parameter {self._name!r} "
            "(register_post_accumulate_grad_hook) has changed or cleared it. Inside a window it is an undivided sum: "
            "do this once a window, in a hook of the optimizer (register_step_pre_hook), which sees the mean."
        )


class HooksOnSums(Check):
    """Runs a hook before and one after all other hooks that see a gradient before it is added to a parameter's."""

    name = "hooks that change sums"
    sentence = "A hook of the program changes the gradient of a micro-batch, which is one of a sum (a warning)."
    cost = "a look at each parameter per window; two hooks per micro-batch for each parameter with hooks"
    shows = "changes its gradient in every micro-batch"
    program = """
        model.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._handles: list[Any] = []
        self._has_warned = False
        self._seen: tuple[Tensor, int] | None = None
        return True

    def window_begin(self, engine: Engine) -> None:
        if self._has_warned or not any(map(GRADIENT_HOOKS_OF, engine.store.named.values())):
            return
        for name, parameter in engine.store.named.items():
            if parameter.requires_grad and any(map(_is_of_program, hooks_on_gradient(parameter).values())):
                last = parameter.register_hook(partial(self._compare, name))  # type: ignore[no-untyped-call]
                first = parameter.register_hook(self._note)  # type: ignore[no-untyped-call]
                _run_first(first, hooks_on_gradient(parameter))
                self._handles += [first, last]

    def window_end(self, engine: Engine) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, gradient: Tensor) -> None:
        self._seen = gradient, version_of(gradient)

    def _compare(self, name: str, gradient: Tensor) -> None:
        seen, self._seen = self._seen, None
        if self._has_warned or seen is None or (seen[0] is gradient and seen[1] == version_of(gradient)):
            return
        self._has_warned = True
        warn(
            f"a hook of the parameter {name!r} (register_hook) changes its gradient in every micro-batch, where it is "
            "that of a sum over items, not the mean of the window. If the hook is linear (it masks, or multiplies by a "
            "constant), nothing is wrong. If not (it clips, normalises or adds noise), apply it to the window's "
            "gradient instead, in a hook of the optimizer: "
            "optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(weights, 1)) (told once)."
        )


def _is_of_program(hook: Any) -> bool:
    """Whether a hook is not one of this library, such as those with which `verify` watches a step."""
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("macrobatch.")


def _run_first(handle: Any, hooks: dict[int, Any]) -> None:
    """Move a hook before the others. Torch runs them in the order of insertion, which `move_to_end` does not change."""
    own = hooks.pop(handle.id)
    others = dict(hooks)
    hooks.clear()
    hooks[handle.id] = own
    hooks.update(others)


class NoParameter(Check):
    """Looks for a gradient after the first backward of a window."""

    name = "a loss of another model"
    sentence = "The loss reaches no parameter of the given models."
    cost = "a look for one gradient per window"
    shows = "the loss reached no parameter of the given models"
    program = """
        other = nn.Linear(2, 1)
        for batch in acc.batches(loader):
            acc.backward(other(batch).square().mean())
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        return engine.backend.abilities.leaves_are_parameters

    def after_first(self, engine: Engine) -> None:
        if engine.store.has_gaps and not engine.store.exist():
            raise BatchError(
                "the loss reached no parameter of the given models: its graph belongs to others, or the parameters "
                "that it uses are frozen.",
                "Pass the loss of the model that this Accumulator was made for.",
                code="loss of another model",
            )


def _versions(gradients: Sequence[Any]) -> list[int]:
    """The version counters of these tensors, which count writes; -1 if there is no tensor."""
    return [-1 if gradient is None or gradient is VIEW else version_of(gradient) for gradient in gradients]


def _was_moved(left: Tensor | None, version: int, gradient: Tensor | None) -> bool:
    """Whether a gradient was copied to another tensor, but not written to. The host waits to read the comparison."""
    if left is None or gradient is None or gradient is left or version_of(left) != version:
        return False
    return bool(((gradient == left) | (gradient.isnan() & left.isnan())).all())
