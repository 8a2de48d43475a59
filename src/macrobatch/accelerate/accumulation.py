"""The windows of `Accelerator.accumulate`: what a loss is multiplied with, so that the step is that of one big batch.

Accelerate's programs look at ``.grad``, clip it and step by themselves, so the division cannot wait for the optimizer
step, as it does in `Accumulator`. It comes just before the last backward instead: whether a micro-batch closes its
window is known when it begins. What was added up so far is brought to the final scale then, and the last micro-batch
is back-propagated at that scale.

- Without items, losses are divided by the length that the window should have. Only where it turns out shorter is there
  anything to bring to another scale.
- With items, losses become sums (`Window.add`), and the window's items on all ranks are what to divide by.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import all_reduce_max, start_all_reduce
from macrobatch._ranks.select import select_backend
from macrobatch._step.foreach import multiply
from macrobatch._step.graph import reach_of, run_backward
from macrobatch._step.totals import Window
from macrobatch._step.validation import checked_items, checked_loss
from macrobatch.accelerate.state import AcceleratorState, GradientState
from macrobatch.accelerate.wrappers import AcceleratedOptimizer, Scaling
from macrobatch.errors import BatchError, UsageError
from macrobatch.types import Items


class Windows:
    """All that an `Accelerator` accumulates.

    Attributes:
        step: how many micro-batches there were since the loader, or the program, began.
        current: what the innermost `accumulate()` is for.
        optimizers: those that were prepared.
    """

    def __init__(self, scaling: Scaling | None) -> None:
        self.scaling = scaling
        self.state = GradientState()
        self.step = 0
        self.current: Accumulation | None = None
        self.optimizers: list[AcceleratedOptimizer] = []
        self._accumulations: dict[tuple[int, ...], Accumulation] = {}

    def of(self, models: tuple[nn.Module | Tensor, ...]) -> Accumulation:
        """The window that these models share."""
        key = tuple(map(id, models))
        if (found := self._accumulations.get(key)) is None:
            found = self._accumulations[key] = Accumulation(self, models)
        return found

    def forget(self) -> None:
        """Models were prepared: how their gradients travel is to be found out anew."""
        self._accumulations = {key: one for key, one in self._accumulations.items() if one.is_open}

    def restart(self, step: int) -> None:
        """Another state was loaded: what was accumulated for the one before does not belong to it."""
        for one in self._accumulations.values():
            one.drop()
        for optimizer in self.optimizers:
            optimizer.optimizer.zero_grad()
        self.step = step

    def advance(self) -> bool:
        """A micro-batch begins; returns whether it closes the window."""
        state = self.state
        if state.plugin_kwargs["sync_with_dataloader"] and state.end_of_dataloader:
            self.step, closes = 0, True
        else:
            self.step += 1
            closes = self.step % state.plugin_kwargs["num_steps"] == 0
        state.sync_gradients = closes
        return closes

    def backward(self, loss: Tensor, items: Items, options: dict[str, Any]) -> None:
        """Add the gradient of a loss, inside `accumulate()` or not."""
        loss, current, hooks = checked_loss(loss), self.current, []
        if current is not None:
            seed = current.seed(loss, items)
            if items is not None and current.counts_for_nothing(items):
                hooks = current.zeroed()
        elif items is None:
            seed = self.scaled(torch.full_like(loss, 1 / self.state.num_steps), loss)
        else:
            raise UsageError(
                "backward(loss, items=...) outside of accumulate(): the items of a window are counted, and only "
                "accumulate() knows where one begins and ends. Do forward and backward inside it."
            )
        try:
            if options:
                torch.autograd.backward(loss, seed, **options)
            else:
                run_backward(loss, seed)
        finally:
            for hook in hooks:
                hook.remove()

    def scaled(self, seed: Tensor, loss: Tensor) -> Tensor:
        """The seed as the scaler wants it."""
        return seed if self.scaling is None else self.scaling.seed(seed).to(loss.dtype)

    # ------------------------------------------------------------------------------------------ what optimizers ask

    def is_void(self, optimizer: AcceleratedOptimizer) -> bool:
        """A step is due: whether it is to be left out, because the window has no items."""
        void = False
        for one in self._accumulations.values():
            if one.closes:
                one.has_step = True
                void |= one.is_empty() and one.concerns(optimizer)
        return void

    def require_stepped(self, optimizer: AcceleratedOptimizer) -> None:
        """Gradients are about to be cleared: an error if a window would lose what it has accumulated."""
        for one in self._accumulations.values():
            if one.would_lose and one.concerns(optimizer):
                raise UsageError(
                    "zero_grad() before backward() in the micro-batch that closes a window: what the "
                    f"{one.micro_batches - 1} before it have added would be lost. Call zero_grad() after step()."
                )

    def require_means(self, call: str) -> None:
        """An error if gradients are sums, or a scaler is in the middle of a window."""
        if any(one.holds_sums for one in self._accumulations.values()):
            raise UsageError(
                f"{call} inside a window that counts items: until its last backward the gradients are undivided sums. "
                "Put it under `if accelerator.sync_gradients:`."
            )
        if self.scaling is not None and not self.state.sync_gradients:
            raise UsageError(
                f"{call} inside a window: under mixed_precision='fp16' it would unscale gradients to which scaled ones "
                "are added later. Put it under `if accelerator.sync_gradients:`."
            )

    @property
    def num_open(self) -> int:
        """How many micro-batches are accumulated that no step was taken with."""
        return max((one.micro_batches for one in self._accumulations.values() if one.is_open), default=0)


class Accumulation:
    """What `accumulate(*models)` returns: a context manager for one micro-batch, and the window that it belongs to.

    Args:
        windows: all of the Accelerator's.
        models: as they were prepared; or tensors that are trained without a module.

    Attributes:
        micro_batches: how many the window has begun.
        closes: whether the current, or last, one closes it.
        has_step: whether an optimizer was asked to step since.
    """

    def __init__(self, windows: Windows, models: Sequence[nn.Module | Tensor]) -> None:
        self._windows = windows
        self._models = models
        self._modules = [model for model in models if isinstance(model, nn.Module)]
        self._sync = self._choose_sync()
        self._outer: Accumulation | None = None
        self._typical_items: float | Tensor | None = None  # of a micro-batch of the last window, for a scaler
        self._number = 0
        self._begin_window()

    def _begin_window(self) -> None:
        self._number += 1
        self.micro_batches = 0
        self.closes = False
        self.has_step = False
        self._length = 1  # what losses are divided by
        self._has_backward = False  # whether the current micro-batch has had one
        self._counts: bool | None = None  # whether items are given; the first backward decides
        self._window: Window | None = None

    def drop(self) -> None:
        """Forget the window, and gradients that are held anywhere but in ``.grad``."""
        self._begin_window()
        self._sync.drop_gradients()

    # ------------------------------------------------------------------------------------------ one micro-batch

    def __enter__(self) -> None:
        windows = self._windows
        settings = windows.state.plugin_kwargs
        if self.closes:  # the window before is over
            self._begin_window()
        self.closes = windows.advance()
        self.micro_batches += 1
        self._has_backward = False
        if self.micro_batches == 1 or not settings["exact_remainder"]:
            self._length = settings["num_steps"]
        self._sync.begin(self.closes)
        if self.closes and self.micro_batches != self._length and settings["exact_remainder"]:
            self._shorten()
        self._outer, windows.current = windows.current, self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._windows.current, self._outer = self._outer, None
        self._sync.end()

    def _shorten(self) -> None:
        """The closing window holds another number of micro-batches than its losses were divided by."""
        if self.micro_batches > 1 and not self._counts:
            multiply(self._held(), self._length / self.micro_batches)
        self._length = self.micro_batches

    def seed(self, loss: Tensor, items: Items) -> Tensor:
        """What the backward of the current micro-batch starts with."""
        if self._counts is not None and self._counts != (items is not None):
            raise BatchError(
                "items must be given for every micro-batch of a window, or for none: earlier in this one they were "
                f"{'given' if self._counts else 'not'}. Without them every micro-batch weighs the same."
            )
        if self.closes and self.micro_batches > 1 and len(self._modules) == 1:
            trainable = {name: p for name, p in self._modules[0].named_parameters() if p.requires_grad}
            reach = reach_of(loss)
            self._sync.check(set(map(id, reach.leaves)), trainable, may_nest=reach.may_nest)
        if items is None:
            seed = self._windows.scaled(torch.full_like(loss, 1 / self._length), loss)
        elif self._has_backward:
            raise UsageError(
                "a second backward(loss, items=...) inside one accumulate(): its items would count twice. Add the "
                "losses up and call it once."
            )
        else:
            seed = self._weighed(loss, checked_items(items))
        self._counts, self._has_backward = items is not None, True
        return seed

    # ------------------------------------------------------------------------------------------ with items

    def _weighed(self, loss: Tensor, items: Items) -> Tensor:
        if self._sync.group is None and AcceleratorState().num_processes > 1:
            raise UsageError(
                "items are counted over all processes, but accumulate() was not given the model whose gradients they "
                "average: hand it over, as prepare() returned it."
            )
        window = self._open_window(loss, items)
        seed = window.add(loss, items)
        if not self.closes:
            return seed
        if (group := self._sync.group) is not None:
            window.send(lambda numbers: start_all_reduce(numbers, group))
            window.receive()
        window.average = self._sync.average
        if self._windows.scaling is not None:
            self._typical_items = window.typical_items()
        factor = self._factor(window)
        if self.micro_batches > 1:
            multiply(self._held(), factor)
        return (seed * factor).to(loss.dtype)

    def _factor(self, window: Window) -> float | Tensor:
        """What turns the sum that the window will hold into the mean, scaled as the scaler wants it."""
        divisor = window.divisor()
        if isinstance(divisor, Tensor):
            divisor = divisor.masked_fill(divisor == 0, 1)  # without items there is nothing to divide: see `is_empty`
        elif divisor == 0:
            divisor = 1
        if (scaling := self._windows.scaling) is not None:
            divisor = divisor / scaling.scaler.scale(torch.ones((), device=window.device, dtype=torch.float32))
        return 1 / divisor

    def _open_window(self, loss: Tensor, items: Items) -> Window:
        scaling, group = self._windows.scaling, self._sync.group
        if scaling is not None:
            scaling.update()
            if group is not None and self._typical_items is None:  # all ranks must shrink their losses alike
                assert items is not None, "only windows that count items get here"
                self._typical_items = all_reduce_max(items, group, loss.device)
        if self._window is None:
            self._window = Window(
                number=self._number,
                length=self._length,
                reduction="mean",
                scaler=None if scaling is None else scaling.scaler,
                typical_items=self._typical_items,
                alone=group is None,
            )
        return self._window

    def counts_for_nothing(self, items: Items) -> bool:
        """Whether a mean over no items is to be back-propagated, which is 0 / 0 in itself."""
        return self._window is not None and self._window.counts_for_nothing(items)

    def zeroed(self) -> list[RemovableHandle]:
        """Hooks under which a backward adds zeros."""
        return self._sync.zeroing_hooks(self._parameters())  # type: ignore[arg-type]

    def is_empty(self) -> bool:
        """Whether the window that closes has no items at all. Waits for the device where only that knows."""
        window = self._window
        if window is None or window.has_items:
            return False
        if window.is_empty:
            return True
        items, bad = float(window.items()), window.bad_items()
        if items != items or (bad is not None and bool(bad)):
            raise BatchError(
                "items handed over in this window were negative or not finite. They are what the loss is a mean over: "
                "count them, e.g. items=(labels != -100).sum()."
            )
        return items == 0

    # ------------------------------------------------------------------------------------------ what else is asked

    @property
    def is_open(self) -> bool:
        """Whether something is accumulated that no step can have been taken with."""
        return self.micro_batches > 0 and not self.closes

    @property
    def holds_sums(self) -> bool:
        """Whether ``.grad`` holds sums that nothing has divided yet."""
        return self._window is not None and not (self.closes and self._has_backward)

    @property
    def would_lose(self) -> bool:
        """Whether clearing gradients now would drop what earlier micro-batches of the window have added."""
        return self.closes and self.micro_batches > 1 and not self._has_backward and not self.has_step

    def concerns(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether that optimizer steps what is accumulated here."""
        return not self._models or bool(_ids(_held_by(optimizer)) & _ids(self._own()))

    def _own(self) -> list[Tensor]:
        tensors = [model for model in self._models if isinstance(model, Tensor)]
        return tensors + [p for module in self._modules for p in module.parameters()]

    def _parameters(self) -> list[Tensor]:
        """What is accumulated here: the models' own, and what is stepped together with them."""
        together = [
            p for optimizer in self._windows.optimizers if self.concerns(optimizer) for p in _held_by(optimizer)
        ]
        return list({id(p): p for p in (*self._own(), *together) if p.requires_grad}.values())

    def _held(self) -> list[Tensor]:
        return self._sync.accumulated_gradients(self._parameters())

    def _choose_sync(self) -> Local:
        if AcceleratorState().num_processes > 1 and len(self._modules) < len(self._models):
            raise UsageError(
                "accumulate() was given a tensor instead of a module: nothing averages its gradient over the "
                f"{AcceleratorState().num_processes} processes. Make it a parameter of an nn.Module, and prepare that."
            )
        if not any(p.requires_grad for module in self._modules for p in module.parameters()):
            return Local()
        each = self._windows.state.plugin_kwargs["sync_each_batch"]
        return select_backend(
            self._modules, sync="micro" if each else "window", gather="micro", process_group=None, accumulate_dtype=None
        )


def _held_by(optimizer: AcceleratedOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _ids(parameters: Sequence[Tensor]) -> set[int]:
    return set(map(id, parameters))
