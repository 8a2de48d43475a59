"""The windows of an `Accelerator`: which micro-batches a gradient contains, and how it becomes their mean.

Accelerate divides every loss by the number of micro-batches that a window should have, and so does this module, bit for
bit. If a window has another number, its gradient is corrected to the mean after the last backward, before the program
clips and steps. If a program passes items, an `Engine` does all of that.

Each prepared optimizer has its own window. A micro-batch belongs to the windows of the models that were passed to
`accumulate()`, and to those of all optimizers whose gradients it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._border.arguments import checked_loss
from macrobatch._checks.steps import StepGuard
from macrobatch._engine.closing import LeaveMean
from macrobatch._ranks.collectives import local_tensor
from macrobatch._ranks.ddp import needs_every_parameter, require_all_used
from macrobatch._torch.foreach import multiply
from macrobatch._torch.graph import reach_of
from macrobatch._torch.modules import data_parallel_of
from macrobatch._torch.tensors import version_of
from macrobatch.accelerate.items import ItemCounter
from macrobatch.accelerate.prepared import Optimizer, SharedScaler
from macrobatch.errors import BatchError, UsageError
from macrobatch.types import Items

Model = nn.Module | Tensor
SHARDED = ("FSDPModule", "FullyShardedDataParallel")  # the leaves of their graphs are not their parameters


CALL_PREPARED = (
    "its last micro-batch: call step() of the optimizer that prepare() returned, which leaves out the steps in between."
)


class MicroBatch:
    """A context manager for the forward, the backwards and the steps of one micro-batch.

    Args:
        windows: the windows of the `Accelerator`.
        models: the arguments of `accumulate()`: modules and tensors, also in lists and dicts.
        advance: advances Accelerate's counter, and returns whether this micro-batch closes its windows.
        hold: returns a context in which processes do not exchange the gradients of these models; None if they should.
    """

    def __init__(
        self,
        windows: Windows,
        models: Sequence[Any],
        advance: Callable[[], bool],
        hold: Callable[[MicroBatch], AbstractContextManager[object] | None],
    ) -> None:
        self.given, self.models = models, _flattened(models)
        self.closes = False
        self.has_items = False  # whether a backward had items
        self.used: set[int] | None = None  # ids of the parameters that the closing backwards reach, if needed
        self.leaves: list[Tensor] = []  # these parameters themselves, if all are known
        self._windows = windows
        self._advance = advance
        self._hold = hold
        self._held: AbstractContextManager[object] | None = None
        self._outer: MicroBatch | None = None
        self._is_over = False

    def __enter__(self) -> None:
        if self._is_over:
            raise UsageError("what accumulate() returned was entered twice: call accumulate() for every micro-batch.")
        self._is_over = True
        self.closes = self._advance()
        if (held := self._hold(self)) is not None:
            held.__enter__()
            self._held = held
        self._outer, self._windows.current = self._windows.current, self
        self._windows.latest = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._windows.current, self._outer = self._outer, None
        if self._held is not None:
            self._held.__exit__(None, None, None)
        if kind is None:
            self._windows.leave(self)
        self.given, self.models, self.leaves = (), [], []  # so that a window's last micro-batch keeps no model alive


class Window:
    """The contents of the gradients of a prepared optimizer, or of all parameters without a prepared optimizer.

    Attributes:
        micro_batches: the number of micro-batches with a backward.
        closing: counts their items; None: they have no items.
        is_closed: whether the last micro-batch has had its backward.
        is_stepped, is_cleared: whether the program has called `step` or `zero_grad` since then.
        carries: whether the gradients also contain an earlier window that was neither stepped nor cleared.
        wants_clear: whether the program has called `zero_grad` since then, without effect.
        dropped_in: the closing micro-batch in which the program called `zero_grad` before the backward.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.optimizer = optimizer
        self.wants_clear = self.carries = False
        self.begin()
        if optimizer is not None:
            StepGuard(optimizer.optimizer, self.counts, CALL_PREPARED)

    def begin(self) -> None:
        """Begin a new window."""
        self.micro_batches = 0
        self.closing: LeaveMean | None = None
        self.is_closed = self.is_stepped = self.is_cleared = False
        self.factor = 1.0  # the factor that was applied to the gradient
        self.last: MicroBatch | None = None
        self.dropped_in: MicroBatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has micro-batches, but not its last one."""
        return self.micro_batches > 0 and not self.is_closed

    def counts(self) -> bool:
        """Whether its gradients are undivided sums, because it counts items."""
        return self.closing is not None and self.is_open

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [] if self.optimizer is None else self.optimizer.parameters()

    def count(self, micro_batch: MicroBatch) -> None:
        """Count a backward of a micro-batch: its first, or one more."""
        self.micro_batches += micro_batch is not self.last
        self.last = micro_batch
        self.is_closed = micro_batch.closes

    def clear(self) -> None:
        """Clear the gradients of the optimizer."""
        if self.optimizer is not None:
            self.optimizer.optimizer.zero_grad()


class Windows:
    """All windows of an `Accelerator`, and the backwards that fill them.

    Args:
        state: Accelerate's ``GradientState``.
        scaler: returns the GradScaler, or None.
        is_exact: returns whether windows of any length are corrected to their mean.
    """

    def __init__(self, state: Any, scaler: Callable[[], Any], is_exact: Callable[[], bool]) -> None:
        self.current: MicroBatch | None = None
        self.latest: MicroBatch | None = None  # the current micro-batch, or else the last one
        self._state = state
        self._scaler = scaler
        self._is_exact = is_exact
        self._shared: SharedScaler | None = None
        self._steps = 1  # the divisor of the losses of open windows
        self.forget()

    def forget(self) -> None:
        """Forget all models and optimizers."""
        self._rest = Window()
        self._of_optimizers: list[Window] = []
        self._modules: list[nn.Module] = []
        self._items = ItemCounter(self._state, self._scaler)

    @property
    def _all(self) -> list[Window]:
        return [self._rest, *self._of_optimizers]

    def adopt(self, prepared: Iterable[object]) -> None:
        """Register prepared models and optimizers."""
        for one in prepared:
            Optimizer.adopt(one, self)
            if isinstance(one, Optimizer) and self._window(one) is self._rest:
                self._of_optimizers.append(Window(one))
            elif isinstance(one, nn.Module) and not any(module is one for module in self._modules):
                self._modules.append(one)
                self._items.expect(one)

    def restart(self) -> None:
        """Drop all accumulated gradients, because another state was loaded."""
        for window in self._all:
            if window.is_open:
                self._drop(window)
            window.begin()

    def share(self, scaler: Any) -> SharedScaler:
        """The scaler that all prepared optimizers share."""
        self._shared = self._shared or SharedScaler(scaler, self._others_await_step)
        return self._shared

    @property
    def num_open(self) -> int:
        """The number of accumulated micro-batches that no step has used."""
        return max(window.micro_batches * window.is_open for window in self._all)

    # ------------------------------------------------------------------------------------------ backwards

    def backward(self, loss: Tensor, items: Items, options: dict[str, Any]) -> None:
        """Run the backward of a loss, and add its gradient to the windows."""
        loss, micro_batch = checked_loss(loss), self.current
        if self._shared is not None and not self._others_await_step():
            self._shared.catch_up()
        if micro_batch is None:
            if items is not None:
                raise UsageError("backward(loss, items=...) outside of accumulate(), which knows where a window ends.")
            self._run(loss, self._state.num_steps, options)
            return
        windows = [self._begin(window, items is not None) for window in self._windows_of(micro_batch.models)]
        if items is None:
            self._add(loss, micro_batch, windows, options)
        else:
            self._add_counted(loss, items, micro_batch, windows)

    def _add(self, loss: Tensor, micro_batch: MicroBatch, windows: list[Window], options: dict[str, Any]) -> None:
        """Add a loss without items: every micro-batch has the same weight."""
        divisor = self._divisor()
        if micro_batch.closes:
            self._scale(windows, micro_batch, undo=True)  # if an earlier backward of this micro-batch has closed them
            self._note_reach(loss, micro_batch, windows, divisor)
        others = [window for window in self._of_optimizers if window not in windows]
        before = [_marks(window.parameters) for window in others]
        try:
            self._run(loss, divisor, options)
        except BaseException:  # an unknown part of the gradient was added
            for window in windows if self._is_exact() else ():
                self._drop(window)
            raise
        for window, marks in zip(others, before, strict=True):
            if _marks(window.parameters) != marks:
                windows.append(self._begin(window, False, marks))
        for window in windows:
            window.count(micro_batch)
        if micro_batch.closes:
            self._scale(windows, micro_batch)

    def _add_counted(self, loss: Tensor, items: Items, micro_batch: MicroBatch, windows: list[Window]) -> None:
        """Add a loss with items: every item has the same weight."""
        if micro_batch.has_items:
            raise UsageError("a second backward(loss, items=...) in one accumulate(): add the losses up, call it once.")
        models = micro_batch.models or self._modules
        self._require_given(loss, models)
        closing = self._items.add(loss, items, models, closes=micro_batch.closes)
        micro_batch.has_items = True
        for window in windows:
            window.closing = closing
            window.count(micro_batch)

    def _run(self, loss: Tensor, divisor: int, options: dict[str, Any]) -> None:
        """Run the backward of a loss divided by `divisor`, bit for bit as Accelerate does."""
        scaler = self._scaler()
        root = loss if scaler is None else scaler.scale(loss)
        torch.autograd.backward(root, torch.full_like(root, 1 / divisor), **options)

    def _begin(self, window: Window, counts: bool, marks: Sequence[tuple[int, int]] | None = None) -> Window:
        """Prepare a window for a backward, or for one that is over, with the `marks` from before it."""
        if window.is_closed and window.last is not self.current:
            is_left = not (window.is_stepped or window.is_cleared)
            window.carries = is_left and any(mark[0] for mark in marks or _marks(window.parameters))
            window.begin()
        if window.wants_clear and not window.micro_batches:
            window.clear()  # the program has called zero_grad before this window
        window.wants_clear, window.dropped_in = False, None
        if window.micro_batches and (window.closing is not None) != counts:
            raise BatchError(
                "items must be given for every micro-batch of a window, or for none: earlier in this one they were "
                f"{'not' if counts else 'given'}. Without them every micro-batch weighs the same."
            )
        return window

    def _divisor(self) -> int:
        """The divisor of losses: the length that windows should have, the same for all open windows."""
        if not self._is_exact() or not any(window.is_open or window.last is self.current for window in self._all):
            self._steps = self._state.num_steps
        return self._steps

    def _scale(self, windows: Sequence[Window], micro_batch: MicroBatch, *, undo: bool = False) -> None:
        """Correct closed windows to their mean, if they have another number of micro-batches than the divisor."""
        seen: set[int] = set()  # optimizers may share parameters
        for window in windows if self._is_exact() else ():
            factor = 1.0 if undo or window.carries else self._steps / window.micro_batches
            if factor == window.factor:
                continue
            parameters = window.parameters
            if window is windows[0]:
                held = {id(p) for other in self._of_optimizers for p in other.parameters}
                trained = [p for model in micro_batch.models for p in _parameters_of(model)] + micro_batch.leaves
                parameters += [p for p in trained if id(p) not in held]
            gradients = {id(p): local_tensor(p.grad) for p in parameters if p.grad is not None and id(p) not in seen}
            seen.update(gradients)
            multiply(list(gradients.values()), factor / window.factor)
            window.factor = factor

    # ------------------------------------------------------------------------------------------ steps and zero_grad

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Prepare a step, and return whether to skip it, because the window has no items."""
        if self.current is not None:
            require_all_used(self.current.models, self.current.used)
        window = self._window(optimizer)
        self._complete(window)
        window.is_stepped = True
        return window.closing is not None and window.is_closed and window.closing.is_void()

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Complete the windows of these parameters, which are clipped for a step."""
        clipped = set(map(id, parameters))
        for window in self._of_optimizers:
            if not clipped.isdisjoint(map(id, window.parameters)):
                self._complete(window)

    def _complete(self, window: Window) -> None:
        """Close an open window, because the program steps or clips: its last micro-batch had no backward."""
        if not (window.is_open and self._is_exact()):
            return
        assert self.latest is not None, "a window is open since a micro-batch"
        if window.closing is not None:
            raise UsageError(
                "step() inside an open window that counts items: its gradients are undivided sums. A micro-batch from "
                "which nothing is to be learnt needs its backward too: backward(loss, items=0)."
            )
        window.is_closed = True
        self._scale([window], self.latest)

    def may_clear(self, optimizer: Optimizer) -> bool:
        """Whether `zero_grad` may clear: not the gradients that are accumulated for a later step."""
        if not self._is_exact():
            return True
        window = self._window(optimizer)
        if not self._state.sync_gradients:  # Accelerate itself clears nothing here
            window.wants_clear = self.current is not None and not window.is_open
            return True
        if window.is_open and self.current is not None and self.current.closes:
            window.dropped_in = self.current
            return False
        window.is_cleared = True
        if window.is_open:
            self._drop(window)
        return True

    def _drop(self, window: Window) -> None:
        """Drop the accumulated gradients of a window."""
        if window.closing is not None:
            self._items.discard(window.closing)
        window.clear()
        window.begin()

    def leave(self, micro_batch: MicroBatch) -> None:
        """End a micro-batch."""
        require_all_used(micro_batch.models, micro_batch.used)
        for window in self._of_optimizers if micro_batch.closes else ():
            if window.dropped_in is micro_batch:  # no backward came: the program wants to drop the gradients
                self._drop(window)

    def require_means(self, call: str) -> None:
        """Raise an error if gradients are undivided sums, or if a scaler is in the middle of a window."""
        why = ""
        if any(window.is_open and window.closing is not None for window in self._all):
            why = "that counts items: until its last backward the gradients are undivided sums"
        elif self._scaler() is not None and not self._state.sync_gradients:
            why = "under fp16: it would unscale gradients to which scaled ones are added later"
        if why:
            raise UsageError(f"{call} inside a window {why}. Put it under `if accelerator.sync_gradients:`.")

    def _others_await_step(self) -> bool:
        """Whether an optimizer has complete scaled gradients of the last micro-batch, and has not stepped."""
        windows = (window for window in self._of_optimizers if window.last is self.latest)
        return any(window.is_closed and not window.is_stepped for window in windows)

    # ---------------------------------------------------------------------------------------- windows of models

    def _window(self, optimizer: Optimizer) -> Window:
        return next((window for window in self._of_optimizers if window.optimizer is optimizer), self._rest)

    def _windows_of(self, models: Sequence[Model]) -> list[Window]:
        """The windows with gradients of these models. Parameters without an optimizer have a common window."""
        if len(self._of_optimizers) < 2 or not models:
            return self._of_optimizers or [self._rest]
        own = {id(p) for model in models for p in _parameters_of(model) if p.requires_grad}
        held = [own.intersection(map(id, window.parameters)) for window in self._of_optimizers]
        found = [window for window, shared in zip(self._of_optimizers, held, strict=True) if shared]
        return found if own <= set().union(*held) else [*found, self._rest]

    def _note_reach(self, loss: Tensor, micro_batch: MicroBatch, windows: Sequence[Window], divisor: int) -> None:
        """Before a closing backward, note which parameters it reaches, if that is needed later."""
        lengths = {window.micro_batches + (window.last is not micro_batch) for window in windows}
        is_irregular = self._is_exact() and lengths != {divisor}
        if not is_irregular and (lengths == {1} or not needs_every_parameter(micro_batch.models)):
            return
        reach = reach_of(loss)
        if not reach.may_nest:
            micro_batch.used = (micro_batch.used or set()) | set(map(id, reach.leaves))
        if not any(isinstance(model, nn.Module) and data_parallel_of(model) in SHARDED for model in micro_batch.models):
            micro_batch.leaves += reach.leaves

    def _require_given(self, loss: Tensor, models: Iterable[object]) -> None:
        """Raise an error if the loss trains a model that `accumulate` did not get: its gradient would be missing."""
        given = {id(p) for model in models for p in _parameters_of(model)}
        others = {id(p) for window in self._of_optimizers for p in window.parameters} - given
        if others and any(id(leaf) in others for leaf in reach_of(loss).leaves):
            raise UsageError(
                "the loss reaches parameters of a prepared optimizer whose model accumulate() was not given, and whose "
                "gradient a window with items would leave out. Hand that model to accumulate() too, or freeze it."
            )


def _flattened(models: Iterable[Any]) -> list[Model]:
    found: list[Model] = []
    for one in models:
        if isinstance(one, nn.Module | Tensor):
            found.append(one)
        elif isinstance(one, Iterable) and not isinstance(one, str):
            found += _flattened(one.values() if isinstance(one, dict) else one)
    return found


def _parameters_of(owner: object) -> list[Tensor]:
    """The parameters of a module; a tensor is its own parameter."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [owner] if isinstance(owner, Tensor) else []


def _marks(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Identity and version of each gradient, which change when a backward adds to it."""
    gradients = (p.grad for p in parameters)
    return [(0, 0) if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]
