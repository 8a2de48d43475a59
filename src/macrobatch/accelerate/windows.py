"""The windows of an `Accelerator`: which micro-batches a gradient holds, and what brings it to their mean.

Accelerate divides every loss by the number of micro-batches that a window should have, and so does this, bit for bit.
A window that turns out to hold another number is brought to its mean when its last micro-batch has been
back-propagated, before the program clips and steps. Where a program counts items, an `Engine` does all of that.

Each prepared optimizer has a window of its own. A micro-batch belongs to the windows of the models that `accumulate()`
was given, and to those of all optimizers whose gradients it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from macrobatch._ranks.collectives import local_tensor
from macrobatch._step.foreach import multiply
from macrobatch._step.graph import reach_of
from macrobatch._step.scaling import Seeds
from macrobatch._step.validation import checked_loss
from macrobatch._torch.modules import data_parallel_of, without_compile
from macrobatch._torch.tensors import version_of
from macrobatch.accelerate.items import ItemCounter
from macrobatch.accelerate.prepared import Optimizer, SharedScaler
from macrobatch.errors import BackendError, BatchError, UsageError
from macrobatch.types import Items


class MicroBatch:
    """What `accumulate()` returns: a context manager for the forward, backwards and steps of one micro-batch.

    Args:
        windows: all of the Accelerator's.
        models: that it was given: modules or tensors, also inside lists and the like.
        advance: moves Accelerate's counter on; returns whether this micro-batch closes its windows.
        hold: enters what keeps the gradients of the models from travelling, where they need not.
    """

    def __init__(
        self,
        windows: Windows,
        models: Iterable[Any],
        advance: Callable[[], bool],
        hold: Callable[[MicroBatch, ExitStack], None],
    ) -> None:
        self.models: list[nn.Module | Tensor] = list(_flattened(models))
        self.closes = False
        self.has_items = False  # whether a backward has given items
        self.used: set[int] | None = None  # parameters that closing backwards have reached, where that is known
        self.strays: list[Tensor] = []  # those of them that belong to no owner
        self._windows = windows
        self._advance = advance
        self._hold = hold
        self._flags = ExitStack()
        self._outer: MicroBatch | None = None

    def __enter__(self) -> None:
        self.closes = self._advance()
        self._hold(self, self._flags)
        self._outer, self._windows.current = self._windows.current, self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._windows.current, self._outer = self._outer, None
        self._flags.close()
        if kind is None:
            self._windows.leave(self)
        self.models, self.strays = [], []  # windows remember which micro-batch was their last, but keep no model alive


class Window:
    """What the gradient of one owner holds: a prepared optimizer, or a prepared model whose parameters none holds.

    Attributes:
        micro_batches: how many have had a backward.
        divisor: what their losses were divided by.
        counts: whether they came with items.
        is_closed: whether the last of them has had its backward.
        is_stepped: whether the program has asked for a step since.
        wants_clear: whether it has asked for cleared gradients since, and got none.
        dropped_in: the closing micro-batch in which it asked to clear before the backward.
    """

    def __init__(self) -> None:
        self.wants_clear = False
        self.begin()

    def begin(self) -> None:
        """A new window."""
        self.micro_batches = 0
        self.divisor = 0
        self.counts = False
        self.is_closed = self.is_stepped = False
        self.factor = 1.0  # what the gradient was multiplied with
        self.last: MicroBatch | None = None
        self.dropped_in: MicroBatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether it holds micro-batches and awaits its last."""
        return self.micro_batches > 0 and not self.is_closed

    def count(self, micro_batch: MicroBatch) -> None:
        """A backward of that micro-batch was added: its first, or one more."""
        self.micro_batches += micro_batch is not self.last
        self.last = micro_batch
        self.is_closed = micro_batch.closes


class Windows:
    """All windows of an `Accelerator`, and the backwards that fill them.

    Args:
        state: Accelerate's ``GradientState``.
        scaler: tells the scaler of mixed precision, if there is one.
        is_exact: tells whether windows of any length are brought to their mean.
    """

    def __init__(self, state: Any, scaler: Callable[[], Any], is_exact: Callable[[], bool]) -> None:
        self.current: MicroBatch | None = None
        self._state = state
        self._scaler = scaler
        self._is_exact = is_exact
        self._shared: SharedScaler | None = None
        self._seeds = Seeds()
        self.forget()

    def forget(self) -> None:
        """Forget all models and optimizers."""
        self._prepared: Any = WeakIdKeyDictionary()  # modules
        self._windows: Any = WeakIdKeyDictionary()  # by owner
        self._known: tuple[list[int], set[int]] | None = None  # modules that are owners, and what that depends on
        self._owned: Any = WeakIdKeyDictionary()  # by model: the ids of owners that hold parameters of it
        self._items = ItemCounter(self._state, self._scaler)

    def restart(self) -> None:
        """Drop what is accumulated: another state was loaded."""
        for owner, window in list(self._windows.items()):
            if window.is_open and isinstance(owner, Optimizer):
                owner.optimizer.zero_grad()
            window.begin()
        self._items.discard()

    def adopt(self, prepared: Iterable[object]) -> None:
        """Models and optimizers were prepared."""
        for one in prepared:
            Optimizer.adopt(one, self)
            if isinstance(one, Optimizer):
                self._window(one)
            elif isinstance(one, nn.Module):
                self._prepared[one] = True
                self._items.expect(one)

    def share(self, scaler: Any) -> SharedScaler:
        """The scaler that all prepared optimizers step with."""
        if self._shared is None:
            self._shared = SharedScaler(scaler, self._others_await_step)
        return self._shared

    @property
    def num_open(self) -> int:
        """How many micro-batches are accumulated that no step can have used."""
        return max((window.micro_batches for window in self._windows.values() if window.is_open), default=0)

    # ------------------------------------------------------------------------------------------ backwards

    def backward(self, loss: Tensor, items: Items, options: dict[str, Any]) -> None:
        """Add the gradient of a loss."""
        loss, micro_batch = checked_loss(loss), self.current
        if self._shared is not None:
            self._shared.catch_up()
        if micro_batch is None:
            if items is not None:
                raise UsageError(
                    "backward(loss, items=...) outside of accumulate(): the items of a window are counted, and only "
                    "accumulate() knows where one begins and ends. Do forward and backward inside it."
                )
            self._run(loss, self._state.num_steps, options)
            return
        windows = [self._begin(owner, counts=items is not None) for owner in self._owners_of(micro_batch.models)]
        if items is None:
            self._add(loss, micro_batch, windows, options)
        else:
            self._add_counted(loss, items, micro_batch, windows, options)

    def _add(self, loss: Tensor, micro_batch: MicroBatch, windows: list[Window], options: dict[str, Any]) -> None:
        """Every micro-batch weighs the same."""
        divisor = self._divisor(windows)
        if micro_batch.closes:
            self._scale(windows, micro_batch, undo=True)  # where an earlier backward of it has closed them
            self._note_reach(loss, micro_batch, windows, divisor)
        others = [owner for owner in self._owners() if self._window(owner) not in windows]
        before = [_marks(self._held_by(owner)) for owner in others]
        self._run(loss, divisor, options)
        pairs = zip(others, before, strict=True)
        changed = [owner for owner, marks in pairs if _marks(self._held_by(owner)) != marks]
        windows += [self._begin(owner, counts=False) for owner in changed or ([] if windows else [self])]
        for window in windows:
            window.divisor = divisor
            window.count(micro_batch)
        if micro_batch.closes:
            self._scale(windows, micro_batch)

    def _add_counted(
        self, loss: Tensor, items: Items, micro_batch: MicroBatch, windows: list[Window], options: dict[str, Any]
    ) -> None:
        """Every item weighs the same."""
        if options:
            raise UsageError(f"backward(loss, items=...) takes no other options: got {', '.join(sorted(options))}.")
        if micro_batch.has_items:
            raise UsageError(
                "a second backward(loss, items=...) inside one accumulate(): its items would count twice. Add the "
                "losses up and call it once."
            )
        models = micro_batch.models or list(self._prepared)
        self._require_given(loss, models)
        self._items.add(loss, items, models, closes=micro_batch.closes)
        micro_batch.has_items = True
        for window in windows:
            window.counts = True
            window.count(micro_batch)

    def _run(self, loss: Tensor, divisor: int, options: dict[str, Any]) -> None:
        """Back-propagate a loss that is divided by so much, bit for bit as Accelerate does."""
        scaler = self._scaler()
        root = loss if scaler is None else scaler.scale(loss)
        torch.autograd.backward(root, self._seeds.of(1 / divisor, root), **options)

    def _begin(self, owner: Any, *, counts: bool) -> Window:
        """The owner's window; a new one if it was closed by an earlier micro-batch."""
        window = self._window(owner)
        if window.is_closed and window.last is not self.current:
            window.begin()
        if window.wants_clear and not window.micro_batches and isinstance(owner, Optimizer):
            owner.optimizer.zero_grad()  # the program had asked for it, with nothing of this window there
        window.wants_clear, window.dropped_in = False, None
        if window.micro_batches and window.counts != counts:
            raise BatchError(
                "items must be given for every micro-batch of a window, or for none: earlier in this one they were "
                f"{'not' if counts else 'given'}. Without them every micro-batch weighs the same."
            )
        return window

    def _divisor(self, windows: Sequence[Window]) -> int:
        """What a loss is divided by: the length that its windows should have, as of their first micro-batch."""
        steps: int = self._state.num_steps
        if not self._is_exact():
            return steps
        divisors = {window.divisor for window in windows if window.micro_batches} or {steps}
        if len(divisors) > 1:
            raise UsageError(
                f"gradient_accumulation_steps was changed inside a window, and this loss belongs to windows of "
                f"{' and '.join(map(str, sorted(divisors)))} micro-batches. Change it where sync_gradients is True."
            )
        return divisors.pop()

    def _scale(self, windows: Sequence[Window], micro_batch: MicroBatch, *, undo: bool = False) -> None:
        """Bring closed windows to their mean, where they hold another number of micro-batches than was divided by."""
        if not self._is_exact():
            return
        owners = {id(window): owner for owner, window in self._windows.items()}
        for window in windows:
            factor = 1.0 if undo or not window.is_closed else window.divisor / window.micro_batches
            if factor != window.factor:
                extras = self._extras(micro_batch) if window is windows[0] else ()
                multiply(self._gradients(owners[id(window)], extras), factor / window.factor)
                window.factor = factor

    # ------------------------------------------------------------------------------------------ what optimizers ask

    def begin_step(self, optimizer: Optimizer) -> bool:
        """A step is due: returns whether to leave it out, because the window has no items."""
        window = self._window(optimizer)
        window.is_stepped = True
        if self.current is not None:
            _require_synchronised(self.current)
        return window.counts and window.is_closed and self._items.are_void(_held_by(optimizer))

    def may_clear(self, optimizer: Optimizer) -> bool:
        """Whether `zero_grad` may clear: not what was accumulated for a step that is still to come."""
        window = self._window(optimizer)
        if self.current is None or not self._is_exact():
            return True
        if not self._state.sync_gradients:  # Accelerate itself leaves it out
            window.wants_clear = not window.is_open
        elif window.is_open:
            window.dropped_in = self.current
            return False
        return True

    def leave(self, micro_batch: MicroBatch) -> None:
        """A micro-batch ends."""
        _require_synchronised(micro_batch)
        for owner, window in list(self._windows.items()) if micro_batch.closes else ():
            if window.dropped_in is micro_batch:  # no backward came: the program does drop what it has accumulated
                owner.optimizer.zero_grad()
                window.begin()

    def require_means(self, call: str) -> None:
        """An error if gradients are sums, or a scaler is in the middle of a window."""
        if any(window.is_open and window.counts for window in self._windows.values()):
            raise UsageError(
                f"{call} inside a window that counts items: until its last backward the gradients are undivided sums. "
                "Put it under `if accelerator.sync_gradients:`."
            )
        if self._scaler() is not None and not self._state.sync_gradients:
            raise UsageError(
                f"{call} inside a window: under mixed_precision='fp16' it would unscale gradients to which scaled ones "
                "are added later. Put it under `if accelerator.sync_gradients:`."
            )

    def _others_await_step(self) -> bool:
        """Whether an optimizer holds scaled gradients of a complete window, and was not stepped."""
        windows = [self._windows[optimizer] for optimizer in self._optimizers()]
        return any(window.is_closed and not window.is_stepped for window in windows)

    # ------------------------------------------------------------------------------------------ whose gradients

    def _window(self, owner: Any) -> Window:
        if (window := self._windows.get(owner)) is None:
            window = self._windows[owner] = Window()
        found: Window = window
        return found

    def _optimizers(self) -> list[Optimizer]:
        return [owner for owner in self._windows if isinstance(owner, Optimizer)]

    def _owners(self) -> list[Any]:
        """The prepared optimizers, and the prepared models with parameters that none of them holds."""
        optimizers, modules = self._optimizers(), list(self._prepared)
        sizes = [len(modules), *(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)]
        if self._known is None or self._known[0] != sizes:
            self._known = sizes, {id(module) for module in modules if self._held_by(module)}
            self._owned = WeakIdKeyDictionary()
        return optimizers + [module for module in modules if id(module) in self._known[1]]

    def _owners_of(self, models: Sequence[nn.Module | Tensor]) -> list[Any]:
        """Those that hold parameters of these models."""
        owners = self._owners()
        if len(owners) < 2 or not models:
            return owners or [self]
        found: set[int] = set()
        for model in models:
            if (known := self._owned.get(model)) is None:
                own = set(map(id, _parameters_of(model)))
                known = {id(owner) for owner in owners if not own.isdisjoint(map(id, self._held_by(owner)))}
                self._owned[model] = known
            found |= known
        return [owner for owner in owners if id(owner) in found]

    def _held_by(self, owner: object) -> list[Tensor]:
        """The parameters whose gradients a window of this owner holds."""
        if isinstance(owner, Optimizer):
            return _held_by(owner)
        held = {id(p) for optimizer in self._optimizers() for p in _held_by(optimizer)}
        return [p for p in _parameters_of(owner) if p.requires_grad and id(p) not in held]

    def _gradients(self, owner: object, extras: Sequence[Tensor]) -> list[Tensor]:
        parameters = [*self._held_by(owner), *extras]
        return [local_tensor(p.grad) for p in {id(p): p for p in parameters}.values() if p.grad is not None]

    def _extras(self, micro_batch: MicroBatch) -> list[Tensor]:
        """What is trained in a micro-batch and belongs to no owner."""
        known = {id(p) for owner in self._owners() for p in self._held_by(owner)}
        trained = [p for model in micro_batch.models for p in _parameters_of(model)] + micro_batch.strays
        return [p for p in trained if id(p) not in known]

    def _note_reach(self, loss: Tensor, micro_batch: MicroBatch, windows: Sequence[Window], divisor: int) -> None:
        """Before a closing backward: which parameters it reaches, where somebody will ask."""
        lengths = {window.micro_batches + (window.last is not micro_batch) for window in windows}
        is_irregular = self._is_exact() and lengths != {divisor}
        if not is_irregular and not (max(lengths, default=1) > 1 and _needs_all(micro_batch.models)):
            return
        reach = reach_of(loss)
        if not reach.may_nest:
            micro_batch.used = (micro_batch.used or set()) | set(map(id, reach.leaves))
        if not any(isinstance(model, nn.Module) and _is_sharded(model) for model in micro_batch.models):
            micro_batch.strays += reach.leaves

    def _require_given(self, loss: Tensor, models: Iterable[Any]) -> None:
        """An error if the loss trains what `accumulate` was not told of: its gradient would be left out."""
        given = {id(p) for model in models for p in _parameters_of(model)}
        others = {id(p) for optimizer in self._optimizers() for p in _held_by(optimizer)} - given
        if others and any(id(leaf) in others for leaf in reach_of(loss).leaves):
            raise UsageError(
                "the loss reaches parameters of a prepared optimizer whose model accumulate() was not given: a window "
                "that counts items would leave their gradient out. Hand that model to accumulate() too, or freeze it "
                "for this loss with requires_grad_(False)."
            )


def _flattened(models: Iterable[Any]) -> Iterator[nn.Module | Tensor]:
    """Modules and tensors, wherever they are: programs hand over lists and generators, too."""
    for one in models:
        if isinstance(one, nn.Module | Tensor):
            yield one
        elif isinstance(one, dict):
            yield from _flattened(one.values())
        elif isinstance(one, Iterable) and not isinstance(one, str):
            yield from _flattened(one)


def _parameters_of(owner: object) -> list[Tensor]:
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [owner] if isinstance(owner, Tensor) else []


def _held_by(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _marks(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Changes where a backward adds to a gradient."""
    gradients = (p.grad for p in parameters)
    return [(0, 0) if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]


def _is_sharded(model: nn.Module) -> bool:
    """Whether the leaves of its graphs are others than its parameters."""
    return data_parallel_of(model) in ("FSDPModule", "FullyShardedDataParallel")


def _needs_all(models: Iterable[object]) -> bool:
    """Whether there is a DDP that synchronises nothing of a bucket until all of it has had its backward."""
    return any(map(_reduces_all, models))


def _reduces_all(model: object) -> bool:
    bare = without_compile(model) if isinstance(model, nn.Module) else model
    return isinstance(bare, DistributedDataParallel) and not (bare.find_unused_parameters or bare.static_graph)


def _require_synchronised(micro_batch: MicroBatch) -> None:
    """An error if the closing backwards left a gradient on this rank alone."""
    if (used := micro_batch.used) is None:
        return
    micro_batch.used = None
    for model in filter(_reduces_all, micro_batch.models):
        missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in used]  # type: ignore[union-attr]
        if missing:
            raise BackendError(
                f"{len(missing)} parameters have no part in this rank's last micro-batch of the window, the first of "
                f"them {missing[0]!r}: DistributedDataParallel has not synchronised what they have accumulated. "
                "Prepare the model with DistributedDataParallelKwargs(find_unused_parameters=True)."
            )
