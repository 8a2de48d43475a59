"""The windows of an `Accelerator`: which micro-batches a gradient contains, and how it becomes their mean.

Accelerate divides every loss by the number of micro-batches that a window should have, and so does this module, bit for
bit, as long as all micro-batches have the same number of items. If a window has another number of micro-batches, its
gradient is corrected to the mean after the last backward, before the program clips and steps. If micro-batches have
different numbers of items, which their losses state, each is weighed by its own (`weighing.py`). If a program passes
items, an `Engine` does all of that.

Each prepared optimizer has its own window. A micro-batch belongs to the windows of the models that were passed to
`accumulate()`, and to those of all optimizers whose gradients it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._border.arguments import checked_loss
from macrobatch._loss.proportions import Number
from macrobatch._ranks.ddp import needs_every_parameter, require_all_used
from macrobatch._torch.foreach import multiply
from macrobatch._torch.graph import reach_of
from macrobatch._torch.modules import data_parallel_of
from macrobatch.accelerate.items import ItemCounter
from macrobatch.accelerate.micro_batch import MicroBatch, Model, parameters_of
from macrobatch.accelerate.prepared import Optimizer, SharedScaler
from macrobatch.accelerate.ranks import require_known_graphs
from macrobatch.accelerate.weighing import CHANGED, Backward, Weigher
from macrobatch.accelerate.weights import seed_of
from macrobatch.accelerate.window import Window, gradients_of, marks_of
from macrobatch.errors import BatchError, UsageError
from macrobatch.types import Items

SHARDED = ("FSDPModule", "FullyShardedDataParallel")  # the leaves of their graphs are not their parameters


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
        self._is_sharded = False  # whether some of them hold gradients elsewhere than in ``.grad``
        self._items = ItemCounter(self._state, self._scaler)
        self._weigher = Weigher(self._scaler, self._rescale)

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
                self._is_sharded |= data_parallel_of(one) in SHARDED
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
        require_known_graphs(micro_batch.models)
        is_first = not self._has_open
        windows = self._windows_of(micro_batch.models)
        for window in windows:
            self._begin(window, items is not None)
        divisor = self._divisor()
        others = [window for window in self._of_optimizers if window not in windows]
        now = Backward(
            loss,
            micro_batch,
            windows,
            others,
            micro_batch.models or self._modules,
            divisor,
            is_first,
            is_extra=any(window.last is micro_batch for window in windows),
            sends_each=bool(self._state.plugin_kwargs.get("sync_each_batch")),
        )
        if items is None:
            self._add(now, options)
        else:
            self._add_counted(now, items)

    def _add(self, now: Backward, options: dict[str, Any]) -> None:
        """Add a loss without items. They are read from it; otherwise every micro-batch has the same weight."""
        micro_batch, windows = now.micro_batch, list(now.windows)
        weight = self._weigher.weigh(now) if self._is_exact() else 1
        if micro_batch.closes:
            self._scale(windows, micro_batch, undo=True)  # if an earlier backward of this micro-batch has closed them
            self._note_reach(now)
        before = [marks_of(window.parameters) for window in now.others]
        try:
            self._run(now.loss, now.steps, options, weight)
        except BaseException:  # an unknown part of the gradient was added
            for window in windows if self._is_exact() else ():
                self._drop(window)
            raise
        for window, marks in zip(now.others, before, strict=True):
            if marks_of(window.parameters) != marks:
                window.prepare(self.current, False, marks)
                window.weights = None
                windows.append(window)
        for window in windows:
            window.count(micro_batch)
        if micro_batch.closes:
            self._scale(windows, micro_batch)

    def _add_counted(self, now: Backward, items: Items) -> None:
        """Add a loss with items: every item has the same weight."""
        micro_batch = now.micro_batch
        if micro_batch.has_items:
            raise UsageError("a second backward(loss, items=...) in one accumulate(): add the losses up, call it once.")
        self._require_given(now.loss, now.models)
        self._weigher.require_items_everywhere(now)
        keeps = any(window.carries for window in now.windows)
        closing = self._items.add(now.loss, items, now.models, closes=micro_batch.closes, keeps=keeps)
        micro_batch.has_items = True
        for window in now.windows:
            window.closing = closing
            window.count(micro_batch)

    def _run(self, loss: Tensor, divisor: int, options: dict[str, Any], weight: Number = 1) -> None:
        """Run the backward of a loss divided by `divisor`: bit for bit as Accelerate does, if its weight is 1."""
        scaler = self._scaler()
        root = loss if scaler is None else scaler.scale(loss)
        torch.autograd.backward(root, seed_of(root, weight, divisor), **options)

    def _begin(self, window: Window, counts: bool) -> None:
        """Prepare a window for a backward."""
        if window.is_open and not self._is_sharded and self._is_exact() and window.was_cleared():
            self._drop(window)  # the program wants to begin anew
        window.prepare(self.current, counts)

    @property
    def _has_open(self) -> bool:
        return any(window.is_open or window.last is self.current for window in self._all)

    def _divisor(self) -> int:
        """The divisor of losses: the length that windows should have, the same for all open windows."""
        if not (self._is_exact() and self._has_open):
            self._steps = self._state.num_steps
        return self._steps

    def _scale(self, windows: Sequence[Window], micro_batch: MicroBatch, *, undo: bool = False) -> None:
        """Make the gradients of closed windows means, if they are not."""
        seen: set[int] = set()  # optimizers may share parameters
        for window in windows if self._is_exact() else ():
            if window.is_mean or (undo and window.due is not None):
                continue
            factor: Number = 1.0
            if window.due is not None:
                factor, window.is_mean = window.due, True
            elif not (undo or window.carries or window.is_scaled):
                factor = self._steps / window.micro_batches
            if isinstance(factor, Tensor) or factor != window.factor:
                gradients = self._gradients(window, micro_batch, is_first=window is windows[0], but=seen)
                seen.update(gradients)
                multiply(list(gradients.values()), factor / window.factor)
                window.factor = factor

    def _rescale(self, window: Window, micro_batch: MicroBatch, factor: Number) -> None:
        """Multiply what a window has accumulated."""
        gradients = self._gradients(window, micro_batch, is_first=True)
        multiply(list(gradients.values()), factor)

    def _gradients(
        self, window: Window, micro_batch: MicroBatch, *, is_first: bool, but: Iterable[int] = ()
    ) -> dict[int, Tensor]:
        """The gradients of a window, by the ids of their parameters. With the first one go those of no optimizer."""
        parameters = window.parameters
        if is_first:
            held = {id(p) for other in self._of_optimizers for p in other.parameters}
            trained = [p for model in micro_batch.models for p in parameters_of(model)] + micro_batch.leaves
            parameters = parameters + [p for p in trained if id(p) not in held]
        return gradients_of(parameters, set(but))

    # ------------------------------------------------------------------------------------------ steps and zero_grad

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Prepare a step, and return whether to skip it, because the window has no items."""
        if self.current is not None:
            require_all_used(self.current.models, self.current.used)
        window = self._window(optimizer)
        self._complete(window)
        window.is_stepped = True
        if window.doubt is not None and bool(window.doubt):
            raise BatchError(
                f"no step was taken, because {CHANGED}. Pass items=, the number of items, with every loss."
            )
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
        self._weigher.finish_early(window, self._steps)
        self._scale([window], self.latest)

    def may_clear(self, optimizer: Optimizer) -> bool:
        """Whether `zero_grad` may clear: not the gradients that are accumulated for a later step."""
        if not self._is_exact():
            return True
        window = self._window(optimizer)
        if not self._state.sync_gradients:  # Accelerate itself clears nothing here
            if self.current is not None and window.is_closed:
                window.clear()  # a program that clears before the backward
                window.is_cleared = True
            return True
        if window.is_open and self.current is not None and self.current.closes:
            window.dropped_in = self.current
            return False
        window.is_cleared = True
        if window.is_open:
            self._drop(window)
        return True

    def note_zeros(self, optimizer: Optimizer) -> None:
        """Note that `zero_grad` has cleared the gradients of an optimizer."""
        if self._is_exact():
            self._window(optimizer).note_zeros()

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
        own = {id(p) for model in models for p in parameters_of(model) if p.requires_grad}
        held = [own.intersection(map(id, window.parameters)) for window in self._of_optimizers]
        found = [window for window, shared in zip(self._of_optimizers, held, strict=True) if shared]
        return found if own <= set().union(*held) else [*found, self._rest]

    def _note_reach(self, now: Backward) -> None:
        """Before a closing backward, note which parameters it reaches, if that is needed later."""
        micro_batch = now.micro_batch
        lengths = {window.micro_batches + (window.last is not micro_batch) for window in now.windows}
        is_due = any(isinstance(w.due, Tensor) or w.due not in (None, 1) for w in now.windows)
        is_irregular = self._is_exact() and (is_due or lengths != {now.steps})
        if not is_irregular and (lengths == {1} or not needs_every_parameter(micro_batch.models)):
            return
        reach = reach_of(now.loss)
        if not reach.may_nest:
            micro_batch.used = (micro_batch.used or set()) | set(map(id, reach.leaves))
        if not any(isinstance(model, nn.Module) and data_parallel_of(model) in SHARDED for model in micro_batch.models):
            micro_batch.leaves += reach.leaves

    def _require_given(self, loss: Tensor, models: Iterable[object]) -> None:
        """Raise an error if the loss trains a model that `accumulate` did not get: its gradient would be missing."""
        given = {id(p) for model in models for p in parameters_of(model)}
        others = {id(p) for window in self._of_optimizers for p in window.parameters} - given
        if others and any(id(leaf) in others for leaf in reach_of(loss).leaves):
            raise UsageError(
                "the loss reaches parameters of a prepared optimizer whose model accumulate() was not given, and whose "
                "gradient a window with items would leave out. Hand that model to accumulate() too, or freeze it."
            )
