"""The windows of an `Accelerator`: which micro-batches a gradient holds, and what brings it to their mean.

Accelerate divides every loss by the number of micro-batches that a window should have, and so does this, bit for bit.
A window that turns out to hold another number is brought to its mean when its last micro-batch has been
back-propagated, before the program clips and steps. Where a program counts items, an `Engine` does all of that.

Each prepared optimizer has a window of its own. A micro-batch belongs to the windows of the models that `accumulate()`
was given, and to those of all optimizers whose gradients it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._ranks.collectives import local_tensor
from macrobatch._ranks.ddp import needs_every_parameter, require_all_used
from macrobatch._step.foreach import multiply
from macrobatch._step.graph import reach_of
from macrobatch._step.leaving import LeaveMean
from macrobatch._step.optimizers import StepGuard
from macrobatch._step.scaling import Seeds
from macrobatch._step.validation import checked_loss
from macrobatch._torch.modules import data_parallel_of
from macrobatch._torch.tensors import version_of
from macrobatch.accelerate.items import ItemCounter
from macrobatch.accelerate.prepared import Optimizer, SharedScaler
from macrobatch.errors import BatchError, UsageError
from macrobatch.types import Items

Model = nn.Module | Tensor
SHARDED = ("FSDPModule", "FullyShardedDataParallel")  # the leaves of their graphs are others than their parameters


CALL_PREPARED = (
    "its last micro-batch: call step() of the optimizer that prepare() returned, which leaves out the steps in between."
)


class MicroBatch:
    """A context manager for the forward, the backwards and the steps of one micro-batch.

    Args:
        models: what `accumulate()` was given: modules and tensors, also in lists and the like.
        advance: moves Accelerate's counter on; returns whether this micro-batch closes its windows.
        hold: returns what keeps the gradients of these models from travelling, where they need not.
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
        self.has_items = False  # whether a backward has given items
        self.used: set[int] | None = None  # parameters that closing backwards have reached, where somebody asks
        self.leaves: list[Tensor] = []  # the same, where all are known
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
        self.given, self.models, self.leaves = (), [], []  # a window's last micro-batch keeps no model alive


class Window:
    """What a gradient holds: that of a prepared optimizer, or of all that no such optimizer holds.

    Attributes:
        micro_batches: how many have had a backward.
        closing: where their items are counted; None: they came without.
        is_closed: whether the last of them has had its backward.
        is_stepped, is_cleared: whether the program has asked for a step, or for cleared gradients, since.
        carries: whether the gradient holds more than this window: an earlier one that was neither stepped nor cleared.
        wants_clear: whether it has asked for cleared gradients since, and got none.
        dropped_in: the closing micro-batch in which it asked to clear before the backward.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.optimizer = optimizer
        self.wants_clear = self.carries = False
        self.begin()
        if optimizer is not None:
            StepGuard(optimizer.optimizer, self.counts, CALL_PREPARED)

    def begin(self) -> None:
        """A new window."""
        self.micro_batches = 0
        self.closing: LeaveMean | None = None
        self.is_closed = self.is_stepped = self.is_cleared = False
        self.factor = 1.0  # what the gradient was multiplied with
        self.last: MicroBatch | None = None
        self.dropped_in: MicroBatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether it holds micro-batches and awaits its last."""
        return self.micro_batches > 0 and not self.is_closed

    def counts(self) -> bool:
        """Whether it holds undivided sums, as it counts items."""
        return self.closing is not None and self.is_open

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the optimizer."""
        return [] if self.optimizer is None else self.optimizer.parameters()

    def count(self, micro_batch: MicroBatch) -> None:
        """A backward of that micro-batch was added: its first, or one more."""
        self.micro_batches += micro_batch is not self.last
        self.last = micro_batch
        self.is_closed = micro_batch.closes

    def clear(self) -> None:
        """Clear the gradients themselves."""
        if self.optimizer is not None:
            self.optimizer.optimizer.zero_grad()


class Windows:
    """All windows of an `Accelerator`, and the backwards that fill them.

    Args:
        state: Accelerate's ``GradientState``.
        scaler: tells the scaler of mixed precision, if there is one.
        is_exact: tells whether windows of any length are brought to their mean.
    """

    def __init__(self, state: Any, scaler: Callable[[], Any], is_exact: Callable[[], bool]) -> None:
        self.current: MicroBatch | None = None
        self.latest: MicroBatch | None = None  # the current one, or the last
        self._state = state
        self._scaler = scaler
        self._is_exact = is_exact
        self._shared: SharedScaler | None = None
        self._seeds = Seeds()
        self._steps = 1  # what losses of open windows are divided by
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
        """Models and optimizers were prepared."""
        for one in prepared:
            Optimizer.adopt(one, self)
            if isinstance(one, Optimizer) and self._window(one) is self._rest:
                self._of_optimizers.append(Window(one))
            elif isinstance(one, nn.Module) and not any(module is one for module in self._modules):
                self._modules.append(one)
                self._items.expect(one)

    def restart(self) -> None:
        """Drop what is accumulated: another state was loaded."""
        for window in self._all:
            if window.is_open:
                self._drop(window)
            window.begin()

    def share(self, scaler: Any) -> SharedScaler:
        """The scaler that all prepared optimizers step with."""
        self._shared = self._shared or SharedScaler(scaler, self._others_await_step)
        return self._shared

    @property
    def num_open(self) -> int:
        """How many micro-batches are accumulated that no step can have used."""
        return max(window.micro_batches * window.is_open for window in self._all)

    # ------------------------------------------------------------------------------------------ backwards

    def backward(self, loss: Tensor, items: Items, options: dict[str, Any]) -> None:
        """Add the gradient of a loss."""
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
        """Every micro-batch weighs the same."""
        divisor = self._divisor()
        if micro_batch.closes:
            self._scale(windows, micro_batch, undo=True)  # where an earlier backward of it has closed them
            self._note_reach(loss, micro_batch, windows, divisor)
        others = [window for window in self._of_optimizers if window not in windows]
        before = [_marks(window.parameters) for window in others]
        try:
            self._run(loss, divisor, options)
        except BaseException:  # a part of the gradient was added: of what, nobody knows
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
        """Every item weighs the same."""
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
        """Back-propagate a loss that is divided by so much, bit for bit as Accelerate does."""
        scaler = self._scaler()
        root = loss if scaler is None else scaler.scale(loss)
        torch.autograd.backward(root, self._seeds.of(1 / divisor, root), **options)

    def _begin(self, window: Window, counts: bool, marks: Sequence[tuple[int, int]] | None = None) -> Window:
        """Before a backward, or with the marks from before it; a new window if an earlier micro-batch has closed it."""
        if window.is_closed and window.last is not self.current:
            is_left = not (window.is_stepped or window.is_cleared)
            window.carries = is_left and any(mark[0] for mark in marks or _marks(window.parameters))
            window.begin()
        if window.wants_clear and not window.micro_batches:
            window.clear()  # the program had asked for it, with nothing of this window there
        window.wants_clear, window.dropped_in = False, None
        if window.micro_batches and (window.closing is not None) != counts:
            raise BatchError(
                "items must be given for every micro-batch of a window, or for none: earlier in this one they were "
                f"{'not' if counts else 'given'}. Without them every micro-batch weighs the same."
            )
        return window

    def _divisor(self) -> int:
        """What losses are divided by: the length that windows should have, and the same for all that are open."""
        if not self._is_exact() or not any(window.is_open or window.last is self.current for window in self._all):
            self._steps = self._state.num_steps
        return self._steps

    def _scale(self, windows: Sequence[Window], micro_batch: MicroBatch, *, undo: bool = False) -> None:
        """Bring closed windows to their mean, where they hold another number of micro-batches than was divided by."""
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

    # ------------------------------------------------------------------------------------------ what optimizers ask

    def begin_step(self, optimizer: Optimizer) -> bool:
        """A step is due: returns whether to leave it out, because the window has no items."""
        if self.current is not None:
            require_all_used(self.current.models, self.current.used)
        window = self._window(optimizer)
        self._complete(window)
        window.is_stepped = True
        return window.closing is not None and window.is_closed and window.closing.is_void()

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """These are clipped for a step that is due."""
        clipped = set(map(id, parameters))
        for window in self._of_optimizers:
            if not clipped.isdisjoint(map(id, window.parameters)):
                self._complete(window)

    def _complete(self, window: Window) -> None:
        """The program itself says that an open window is complete: its last micro-batch had no backward."""
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
        """Whether `zero_grad` may clear: not what was accumulated for a step that is still to come."""
        if not self._is_exact():
            return True
        window = self._window(optimizer)
        if not self._state.sync_gradients:  # Accelerate itself leaves it out
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
        """Clear what a window has accumulated."""
        if window.closing is not None:
            self._items.discard(window.closing)
        window.clear()
        window.begin()

    def leave(self, micro_batch: MicroBatch) -> None:
        """A micro-batch ends."""
        require_all_used(micro_batch.models, micro_batch.used)
        for window in self._of_optimizers if micro_batch.closes else ():
            if window.dropped_in is micro_batch:  # no backward came: the program does drop what it has accumulated
                self._drop(window)

    def require_means(self, call: str) -> None:
        """An error if gradients are sums, or a scaler is in the middle of a window."""
        why = ""
        if any(window.is_open and window.closing is not None for window in self._all):
            why = "that counts items: until its last backward the gradients are undivided sums"
        elif self._scaler() is not None and not self._state.sync_gradients:
            why = "under fp16: it would unscale gradients to which scaled ones are added later"
        if why:
            raise UsageError(f"{call} inside a window {why}. Put it under `if accelerator.sync_gradients:`.")

    def _others_await_step(self) -> bool:
        """Whether an optimizer holds scaled gradients that the last micro-batch has completed, and was not stepped."""
        windows = (window for window in self._of_optimizers if window.last is self.latest)
        return any(window.is_closed and not window.is_stepped for window in windows)

    # ------------------------------------------------------------------------------------------ whose gradients

    def _window(self, optimizer: Optimizer) -> Window:
        return next((window for window in self._of_optimizers if window.optimizer is optimizer), self._rest)

    def _windows_of(self, models: Sequence[Model]) -> list[Window]:
        """Those that hold gradients of these models. What no optimizer holds has one together, or the only one's."""
        if len(self._of_optimizers) < 2 or not models:
            return self._of_optimizers or [self._rest]
        own = {id(p) for model in models for p in _parameters_of(model) if p.requires_grad}
        held = [own.intersection(map(id, window.parameters)) for window in self._of_optimizers]
        found = [window for window, shared in zip(self._of_optimizers, held, strict=True) if shared]
        return found if own <= set().union(*held) else [*found, self._rest]

    def _note_reach(self, loss: Tensor, micro_batch: MicroBatch, windows: Sequence[Window], divisor: int) -> None:
        """Before a closing backward: which parameters it reaches, where somebody will ask."""
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
        """An error if the loss trains what `accumulate` was not told of: its gradient would be left out."""
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
    """Those of a module; a tensor is its own."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [owner] if isinstance(owner, Tensor) else []


def _marks(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Changes where a backward adds to a gradient."""
    gradients = (p.grad for p in parameters)
    return [(0, 0) if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]
