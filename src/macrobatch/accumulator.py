"""`Accumulator`: you drive the micro-batches, it makes one exact optimizer step of each window.

The main path is `batches` -> `backward` -> `step`; everything below it checks a call, or opens and closes a window.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._cudagraph.recording import Recording
from macrobatch._ranks.collectives import all_reduce_later, gathered, largest
from macrobatch._ranks.select import select_backend, wrapping
from macrobatch._step import validation as arguments
from macrobatch._step.closing import Update
from macrobatch._step.epochs import Turn, agreed_turns, exchanged_lengths, planned_turns
from macrobatch._step.gradients import Gradients
from macrobatch._step.graph import (
    UNCONFINED,
    Confinement,
    Reach,
    Walker,
    confinement_of,
    gradients_aside,
    reach_of,
    run_backward,
)
from macrobatch._step.hooks import guarding
from macrobatch._step.lifecycle import Order
from macrobatch._step.lookahead import Epoch, ReadAhead, length_of
from macrobatch._step.parameters import Parameters
from macrobatch._step.snapshot import Snapshot
from macrobatch._step.totals import Window
from macrobatch.errors import BackendError, BatchError, UsageError
from macrobatch.types import Items, NonFinite, Reduction, Remainder, StepResult, When

Batch = TypeVar("Batch")
NO_PARAMETER = (
    "the loss reached no parameter of the given models: its graph belongs to others, or the parameters that it uses "
    "are frozen. Hand over the loss of the model that this Accumulator was made for."
)

logger = logging.getLogger("macrobatch")


class Options(TypedDict, total=False):
    """What `Accumulator` and `MacroStep` both take."""

    scheduler: LRScheduler | Sequence[LRScheduler] | None
    max_norm: float | None
    scaler: GradScaler | None
    reduction: Reduction
    sync: When
    gather: When
    accumulate_dtype: torch.dtype | None
    nonfinite: NonFinite
    process_group: object


class Accumulator:
    """Accumulates gradients over micro-batches and takes exactly the step of the one big batch.

    >>> import torch
    >>> from torch import nn
    >>> from macrobatch import Accumulator
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> loader = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (5, 2, 7, 4, 1)]
    >>> acc = Accumulator(model, optimizer, steps=2, max_norm=1.0)
    >>> for x, y in acc.batches(loader):
    ...     loss = nn.functional.mse_loss(model(x), y)  # a mean over the micro-batch
    ...     acc.backward(loss, items=len(x))
    ...     if result := acc.step():                    # None until the window closes
    ...         print(result.step, result.micro_batches, result.items.item())
    1 2 7
    2 2 11
    3 1 1

    Until `step`, ``.grad`` holds an undivided sum: clipping, unscaling or clearing it by hand is an error.

    Args:
        model: a module, or a list of modules, compiled or not.
        optimizer: one or a list. They may hold parameters of the given models only.
        steps: micro-batches in a window: an int, or ``f(optimizer_step) -> int`` for a ramp.
        scheduler: one or a list, stepped once for each optimizer step that is taken.
        max_norm: clips the norm of all parameters of all given models together.
        scaler: a ``torch.amp.GradScaler``. Its scale stays constant inside a window; an overflow skips the step.
        reduction: "mean" or "sum": what the losses handed to `backward` are.
        sync: "window" or "micro": when gradients travel between ranks. In one process they never do.
        gather: "window" or "micro": how long FSDP2 keeps parameters gathered.
        remainder: what becomes of a short last window: "step" (exactly scaled), "drop", "carry" into the next epoch.
        accumulate_dtype: sums the gradients of lower-precision parameters in this dtype, e.g. ``torch.float32``.
        nonfinite: what an infinite or NaN gradient does. "raise": noticed on the device without stalling it, so there
            the error may come when the next window closes; it names the window, and a fused optimizer does not take
            the poisoned step. "skip": nothing changes, and the result says so. "keep": no check.
        process_group: the ranks to average over.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        steps: int | Callable[[int], int] = 1,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        reduction: Reduction = "mean",
        sync: When = "window",
        gather: When = "micro",
        remainder: Remainder = "step",
        accumulate_dtype: torch.dtype | None = None,
        nonfinite: NonFinite = "raise",
        process_group: object = None,
    ) -> None:
        self._models = arguments.all_of(nn.Module, model, "model")
        self._optimizers = arguments.all_of(Optimizer, optimizer, "optimizer")
        self._steps = steps if callable(steps) else arguments.checked_steps(steps, "steps")
        self._scaler = arguments.checked_scaler(scaler)
        self._reduction: Reduction = arguments.checked_choice("reduction", reduction, Reduction)
        self._remainder: Remainder = arguments.checked_choice("remainder", remainder, Remainder)
        self._accumulate_dtype = arguments.checked_dtype(accumulate_dtype)
        self._sync = select_backend(
            self._models, sync=sync, gather=gather, process_group=process_group, accumulate_dtype=accumulate_dtype
        )
        self._wrapping = wrapping(self._models)
        self._update = Update(
            arguments.checked_optimizers(self._optimizers),
            arguments.checked_schedulers(scheduler, self._optimizers),
            scaler=self._scaler,
            max_norm=arguments.checked_norm(max_norm),
            nonfinite=arguments.checked_choice("nonfinite", nonfinite, NonFinite),
            counts_on_host=callable(steps),
            window_is_open=self._is_accumulating,
        )
        self._parameters = Parameters(self._models, self._optimizers)
        self._shrinks = self._sync.uses_float16() or any(
            p.dtype == torch.float16 for p in self._parameters.named().values()
        )
        self._windows = 0  # how many were closed or discarded
        self._typical_items: float | Tensor | None = None  # of a micro-batch of the last window, for a scaler
        self._window: Window | None = None
        self._gradients: Gradients | None = None
        self._order = Order()
        self._turn = Turn()  # how the current micro-batch was begun
        self._is_last = False
        self._is_repeat = False
        self._before_repeat: Snapshot | None = None
        self._others_go_on = False
        self._may_repeat = False  # whether ranks may repeat batches, so that they must tell each other what they used
        self._used: set[str] = set()  # the parameters that this rank's window has used, where `_may_repeat`
        self._told_of_stale = False
        self._walker = Walker()
        self._is_ordinary = False  # whether the graphs of the window have ended in its own parameters alone
        self._epoch: object = None  # which `batches` is the current one
        self._stream: ReadAhead[Any] | None = None  # the last loader without a length, with what was read of it

    # ------------------------------------------------------------------------------------------ the main path

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of `loader`, each to be followed by its `backward` and by `step`.

        A loader with a length is not read ahead; any other iterable is, by one batch, to know where it ends.
        """
        self._order.require_new_epoch(self._window)
        self._give_up_turn()
        self._epoch = object()
        if length_of(loader) is None:
            loader = self._read_ahead(loader)
        return Epoch(self._iterate(loader, self._epoch), self._num_batches(loader))

    def backward(self, loss: Tensor, items: Items = None) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: of the micro-batch: a mean over its items, or their sum (``reduction``).
            items: what the loss is a mean over: an int, or a tensor with one number, which the host never reads. None
                weighs every micro-batch the same.
        """
        self._order.require_backward(self._window)
        loss, items = arguments.checked_loss(loss), arguments.checked_items(items)
        self._update.check_unscaled(loss)
        self._agree_on_items(loss, items)
        window, gradients = self._open_window(), self._open_gradients()
        self._require_untouched(gradients)
        confinement, awaited = self._look_at_graph(loss, gradients)
        if self._is_repeat:
            seed = window.add_nothing(loss)
        else:
            seed = window.weigh(loss, items)
            window.add(loss, items)
        if self._is_last:
            self._send(window)  # it travels during the backward
        try:
            counts = not (self._is_repeat or window.counts_for_nothing(items))
            if awaited or self._notes_used:
                with self._noting_used(gradients, awaited):
                    self._run_backward(loss, seed, gradients, confinement, counts=counts)
            else:
                self._run_backward(loss, seed, gradients, confinement, counts=counts)
        finally:
            self._end_turn()
        self._order.expects = "step"

    def step(self, now: bool = False) -> StepResult | None:
        """Take the optimizer step if the window is complete, else return None.

        Args:
            now: close the open window as it stands, e.g. after the last epoch under ``remainder="carry"``.
        """
        self._order.require_step(self._window, now)
        if not self._accumulated or not (now or self._is_last):
            self._order.expects = "batch"
            return None
        window, gradients = self._open_window(), self._gradients
        assert gradients is not None, "a window with micro-batches has gradients"
        self._require_untouched(gradients)
        if not self._is_last:
            self._send(window)
        window.receive()
        try:
            if not self._is_due(window):
                return None
            self._sync.finish(gradients.named, gradients.named.keys() - self._used if self._may_repeat else None)
            window.average = self._sync.average
            return self._update.close(window, gradients, shared=self._parameters.shared)
        finally:
            if self._scaler is not None or self._shrinks:
                self._typical_items = window.typical_items()
            self._drop_window()
            self._order.expects = "batch"

    def discard(self) -> None:
        """Drop the open window and its gradients. A batch that has had no `backward` yet begins a new one."""
        self._end_turn()
        self._drop_window()
        self._sync.drop_gradients()
        self._is_last = False
        if self._order.expects == "backward":  # with the model's flags as they are: this may be after an exception
            self._open_window().slots += self._turn.slots
            self._open_gradients()
            is_full = self._open_window().slots >= self._open_window().length
            self._is_last = bool(self._turn.last) if self._turn.is_told else self._turn.ends or is_full
        else:
            self._order.expects = "batch"

    @contextlib.contextmanager
    def micro_batch(self, last: bool | None = None) -> Iterator[None]:
        """The forward and `backward` of one micro-batch, for loops without a loader.

        >>> model = nn.Linear(2, 1)
        >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        >>> for _ in range(2):
        ...     with acc.micro_batch():
        ...         acc.backward(model(torch.ones(4, 2)).mean(), items=4)
        ...     result = acc.step()
        >>> result.items
        tensor(8)

        Args:
            last: whether this one closes the window; None: ``steps`` decides.
        """
        with self._micro_batch(Turn(last, is_told=last is not None)):
            yield

    # ------------------------------------------------------------------------------------------ what one can ask

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch closes the window."""
        return self._is_last

    @property
    def is_repeat(self) -> bool:
        """Whether the current batch is one that this rank has had before, as it ran out and others did not."""
        return self._is_repeat

    @property
    def optimizer_step(self) -> int:
        """How many optimizer steps were taken."""
        return self._update.taken

    def state_dict(self) -> dict[str, int | float]:
        """What to save beside model, optimizer, scheduler and scaler: plain numbers. Only between windows.

        Under a scaler that includes the typical number of items of a micro-batch, by which sums are pre-scaled.
        """
        self._order.require_between_windows(self._window, "state_dict()")
        self._update.settle()
        state: dict[str, int | float] = {"optimizer_step": self._update.taken, "windows": self._windows}
        if self._typical_items is not None:
            state["typical_items"] = float(self._typical_items)
        return state

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from what `state_dict` gave. Only between windows."""
        self._order.require_between_windows(self._window, "load_state_dict()")
        taken, windows, typical = arguments.checked_state(state)
        self._update.taken, self._windows, self._typical_items = taken, windows, typical
        self._window = None  # one that was opened, but holds nothing yet, was numbered by the old state
        self._drop_gradients()

    # ------------------------------------------------------------------------------------------ epochs

    def _iterate(self, loader: Iterable[Batch], epoch: object) -> Iterator[Batch]:
        self._require_epoch(epoch)
        for batch, turn in self._turns(loader):
            self._begin(turn)
            try:
                yield batch
            except GeneratorExit:
                if self._epoch is epoch:
                    self._give_up_turn()
                raise
            self._require_epoch(epoch)
            self._order.require_finished(self._window, self._is_last)
        self._end_epoch()

    def _num_batches(self, loader: Iterable[Batch]) -> int | None:
        """How many of this rank's own batches an epoch hands out; None where that is not known."""
        length = length_of(loader)
        if length is None or self._remainder != "drop":
            return length
        carried = 0 if self._window is None else self._window.slots
        return None if callable(self._steps) else length - (length + carried) % self._steps

    def _read_ahead(self, loader: Iterable[Batch]) -> ReadAhead[Batch]:
        """A loader without a length. One that goes on where it was left begins with the batch read ahead then."""
        if self._stream is None or not self._stream.reads(loader):
            self._stream = ReadAhead(loader)
        return self._stream

    def _turns(self, loader: Iterable[Batch]) -> Iterator[tuple[Batch, Turn]]:
        group, longest, lockstep = self._sync.group, None, self._sync.abilities.lockstep
        self._may_repeat = False
        if group is not None:
            lengths = self._exchange_lengths(loader)
            self._may_repeat = lengths.count(lengths[0]) < len(lengths) or None in lengths
            if None in lengths:
                self._others_go_on = True
                return agreed_turns(
                    loader, self._open_window, lambda: self._others_go_on, lockstep=self._sync.abilities.lockstep
                )
            longest = max(length for length in lengths if length is not None)
        return planned_turns(loader, longest, self._open_window, remainder=self._remainder, lockstep=lockstep)

    def _exchange_lengths(self, loader: Iterable[Batch]) -> list[int | None]:
        group, device = self._sync.group, self._device
        lengths = exchanged_lengths(loader, lambda own: [n for (n,) in gathered([own], group, device)])
        if None in lengths and self._remainder == "carry":
            raise BackendError('remainder="carry" on several ranks needs loaders that know their length.')
        if lengths.count(lengths[0]) < len(lengths) or None in lengths:
            self._require_own_statistics(
                f"loaders of lengths {lengths}: a rank that has run out takes part with a repeated batch, which would "
                "change the others' statistics. Make the lengths equal."
            )
        return lengths

    def _require_own_statistics(self, why: str) -> None:
        """No layer may take its statistics from the micro-batches of all ranks together."""
        if any(isinstance(module, nn.SyncBatchNorm) for model in self._models for module in model.modules()):
            raise BackendError(f"SyncBatchNorm with {why}")

    def _end_epoch(self) -> None:
        self._epoch = None
        self._order.expects, self._is_last = "batch", False
        if self._accumulated and self._remainder == "drop":
            self.discard()
        self._order.carries = self._accumulated
        if not self._order.carries:
            self._update.settle()  # no later window may come to notice it

    # ------------------------------------------------------------------------------------------ one micro-batch

    @contextlib.contextmanager
    def _micro_batch(self, turn: Turn) -> Iterator[None]:
        self._order.require_finished(self._window, self._is_last)
        self._begin(turn)
        try:
            yield
            if self._order.expects == "backward":
                raise UsageError("micro_batch() ended without its backward(): call backward(loss, items) inside it.")
        finally:
            self._give_up_turn()

    def _begin(self, turn: Turn) -> None:
        self._end_turn()
        window = self._open_window()
        self._order.carries = False
        self._turn = turn
        window.slots += turn.slots
        self._is_last = window.slots >= window.length if turn.last is None else turn.last
        self._is_repeat = turn.repeat
        self._before_repeat = Snapshot(self._models) if turn.repeat else None
        self._open_gradients()
        self._sync.begin(self._is_last)
        self._order.expects = "backward"

    def _end_turn(self) -> None:
        """Put back what was set for a micro-batch, and for a repeated one what it changed."""
        self._sync.end()
        if self._before_repeat is not None:
            self._before_repeat.restore()
            self._before_repeat = None

    def _give_up_turn(self) -> None:
        """The micro-batch under way, if any, is as if it had not been."""
        self._end_turn()
        if self._order.expects == "backward":
            self._order.expects = "batch"
            if self._window is not None:
                self._window.slots -= self._turn.slots
            if not self._accumulated:
                self._drop_gradients()

    def _look_at_graph(self, loss: Tensor, gradients: Gradients) -> tuple[Confinement | None, Sequence[str]]:
        """What this backward is to be confined to, and which parameters must turn out to get a gradient in it.

        Every graph is walked: another model may be a part of this one, and none of the last. None: that happens while
        the backward runs.
        """
        if self._may_overlap(loss):
            return None, ()
        if not self._sync.abilities.confines:
            return UNCONFINED, ()
        reach, confinement = reach_of(loss), UNCONFINED
        self._is_ordinary = gradients.are_all_watched(reach.leaves)
        if not self._is_ordinary:
            self._include(reach, gradients)
            confinement = confinement_of(reach, gradients.own)
        if not (reach.may_nest or self._accumulated or any(id(leaf) in gradients.own for leaf in reach.leaves)):
            raise BatchError(NO_PARAMETER)
        return confinement, self._sync.check(set(map(id, reach.leaves)), gradients.named, may_nest=reach.may_nest)

    def _may_overlap(self, loss: Tensor) -> bool:
        """Whether the graph can be walked while its backward runs: those of the window so far were ordinary.

        Where this one turns out not to be, that is an error: its backward was not confined. A CPU gains nothing by it.
        """
        if not loss.is_cuda:
            return False
        is_ordinary = self._is_ordinary and self._accumulated and self._accumulate_dtype is None
        return is_ordinary and self._sync.abilities.confines and not self._sync.will_check

    def _include(self, reach: Reach, gradients: Gradients) -> None:
        """Accumulate parameters of the models that were frozen, or not there yet, when the window began."""
        if any(isinstance(leaf, nn.Parameter) and id(leaf) not in gradients.own for leaf in reach.leaves):
            gradients.adopt(self._parameters.named(anew=True))
        gradients.include(reach.leaves)

    def _require_no_others(self, reach: Reach, gradients: Gradients) -> None:
        """After a backward that was not confined."""
        if gradients.are_all_watched(reach.leaves):
            return
        self._is_ordinary = False
        self._include(reach, gradients)
        others = [leaf for leaf in reach.leaves if id(leaf) not in gradients.own and isinstance(leaf, nn.Parameter)]
        if others:
            self._order.broken = True
            raise UsageError(
                f"this micro-batch reached {len(others)} parameters of another model, the first of shape "
                f"{tuple(others[0].shape)}, where no earlier one of its window did: undivided sums were added to "
                "their gradients. Clear those with zero_grad(), drop this window with discard(), and let all "
                "micro-batches of a window reach the other model, or none: detach() it, or freeze it."
            )

    def _run_backward(
        self, loss: Tensor, seed: Tensor, gradients: Gradients, confinement: Confinement | None, *, counts: bool
    ) -> None:
        """Add the gradients of `loss`. Without a confinement its graph is looked at meanwhile, and judged after it."""
        # A micro-batch without items counts for nothing even where its own gradient is 0 / 0; but what it used has a
        # gradient of zero, not none, as in one big batch.
        hooks = [] if counts else self._sync.zeroing_hooks(gradients.parameters)
        try:
            if gradients.hooked:
                with guarding(gradients.hooked):
                    reach = self._backpropagate(loss, seed, confinement)
            else:
                reach = self._backpropagate(loss, seed, confinement)
        except BaseException:
            self._undo_turn()
            raise
        finally:
            for hook in hooks:
                hook.remove()
        gradients.mark()
        if reach is not None:
            self._require_no_others(reach, gradients)
        if self._sync.abilities.confines and self._open_window().turns == 1 and not gradients.any():
            self._undo_turn()
            raise BatchError(NO_PARAMETER)

    def _backpropagate(self, loss: Tensor, seed: Tensor, confinement: Confinement | None) -> Reach | None:
        """The backward itself; returns what it reached, where that was found out meanwhile."""
        if confinement is UNCONFINED:
            run_backward(loss, seed)
        elif confinement is not None:
            with gradients_aside(confinement.aside):
                run_backward(loss, seed, confinement.inputs)
        else:
            with self._walker.walking(loss) as walk:
                run_backward(loss, seed)
            return walk.result()
        return None

    @property
    def _notes_used(self) -> bool:
        """Whether ranks must tell each other which parameters they have used."""
        return self._may_repeat and self._sync.abilities.confines

    @contextlib.contextmanager
    def _noting_used(self, gradients: Gradients, awaited: Sequence[str]) -> Iterator[None]:
        """Note which parameters a backward uses; an error if one of those awaited is not among them."""
        used: set[str] = set()
        hooks = [
            p.register_hook(lambda _, name=name: used.add(name))  # type: ignore[no-untyped-call]
            for name, p in gradients.named.items()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if not self._is_repeat:
            self._used |= used
        if missing := [name for name in awaited if name not in used]:
            self._order.broken = True
            raise BackendError(
                f"{len(missing)} parameters got no gradient in this rank's last micro-batch of the window, the first "
                f"of them {missing[0]!r}: DistributedDataParallel has not synchronised what they have accumulated. Use "
                "every parameter in every micro-batch, or wrap the model with find_unused_parameters=True, which needs "
                "checkpoint(..., use_reentrant=False)."
            )

    def _undo_turn(self) -> None:
        """A backward failed half-way. Where it was the window's first, the window is as before it."""
        if self._open_window().turns == 1:
            self._undo_first_turn()
        else:
            self._order.broken = True

    def _undo_first_turn(self) -> None:
        """The backward that would have been a window's first failed: the window is as before it."""
        self._window = None
        self._drop_window()
        self._open_window().slots += self._turn.slots
        self._open_gradients()

    def _require_epoch(self, epoch: object) -> None:
        if self._epoch is not epoch:
            raise UsageError("this batches() is over: another one was begun since. Iterate over the newest only.")

    def _require_untouched(self, gradients: Gradients) -> None:
        gradients.check_untouched()
        self._update.check_scaler()

    # ------------------------------------------------------------------------------------------ the window

    def _send(self, window: Window) -> None:
        """Start the totals of a closing window on their way to the other ranks."""
        if (group := self._sync.group) is not None:
            window.send(lambda numbers: all_reduce_later(numbers, group), self._turn.flags)

    def _is_due(self, window: Window) -> bool:
        """Whether a window is closed; with flags, that a short one is dropped may only be known now."""
        if not self._turn.flags or not self._is_last:
            return True
        more, complete = self._turn.flags
        self._others_go_on = bool(more) or window.flag(0) > 0
        return self._remainder != "drop" or bool(complete) or window.flag(1) > 0

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.named().values())).device

    @property
    def _accumulated(self) -> bool:
        """Whether the window holds anything."""
        return self._window is not None and self._window.turns > 0

    def _is_accumulating(self) -> bool:
        return self._accumulated

    def _open_window(self) -> Window:
        if self._window is None:
            self._require_same_wrapping()
            length = self._steps(self._update.taken) if callable(self._steps) else self._steps
            self._window = Window(
                number=self._windows + 1,
                length=arguments.checked_steps(length, "steps(optimizer_step)"),
                reduction=self._reduction,
                scaler=self._scaler,
                typical_items=self._typical_items,
                alone=self._sync.group is None,
                shrinks=self._shrinks,
            )
        return self._window

    def _open_gradients(self) -> Gradients:
        """The gradients of the window, made before its first forward: what is there by then belongs to no window."""
        if self._gradients is None:
            sync = self._sync
            sync.drop_stale_gradients()
            self._gradients = Gradients(
                self._parameters.named(),
                self._accumulate_dtype if sync.abilities.confines else None,
                sync.shards,
                held=None if sync.held_gradients() is None else sync.held_gradients,  # type: ignore[arg-type]
                may_move=sync.abilities.moves_gradients,
                are_views=sync.abilities.shows_views,
            )
            if self._gradients.had_stale and not self._told_of_stale:
                self._told_of_stale = True
                logger.warning("gradients that a backward() outside of any window had left were cleared (told once)")
            self._update.begin()
        return self._gradients

    def _drop_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.clear()
        self._gradients = None

    def _agree_on_items(self, loss: Tensor, items: Items) -> None:
        """Once, under a scaler: what all ranks take for the typical number of items of a micro-batch."""
        if not (self._scaler or self._shrinks) or self._sync.group is None or self._typical_items is not None:
            return
        self._typical_items = largest(1.0 if items is None else items, self._sync.group, loss.device)
        if self._window is not None:
            self._window.typical = self._typical_items

    def _drop_window(self) -> None:
        self._windows += self._accumulated
        self._drop_gradients()
        self._window = None
        self._used = set()
        self._is_ordinary = False
        self._order.carries = self._order.broken = False

    # ------------------------------------------------------------------------------------------ for whole batches

    # What `MacroStep` needs beyond the calls above: it knows a window's micro-batches beforehand, and does it again.

    def _take_part(self) -> None:
        """This rank adds nothing to the window that others fill, but will be there at its close."""
        self._catch_up()
        self._turn, self._is_last, self._is_repeat = Turn(), False, False
        nothing = torch.zeros((), device=self._device, dtype=torch.float32)
        self._open_window().add_nothing(nothing)
        self._open_gradients()

    def _skip(self) -> StepResult:
        """A window in which no rank has anything."""
        window = self._open_window()
        window.add_nothing(torch.zeros((), device=self._device, dtype=torch.float32))
        try:
            return self._update.close(window, self._open_gradients())
        finally:
            self._drop_window()

    def _replay(self, recording: Recording, micro_batch: object) -> None:
        """What `backward` does, for a micro-batch whose forward and backward were recorded."""
        self._order.require_backward(self._window)
        window, gradients = self._open_window(), self._open_gradients()
        if self._may_repeat:
            self._used.update(gradients.own[id(parameter)] for parameter in recording.reached)
        try:
            recording.replay(micro_batch, window)
        finally:
            self._end_turn()
        self._order.expects = "step"

    def expect_repeats(self, may_come: bool) -> None:
        """Whether ranks may repeat micro-batches in this window. All of them must be told the same."""
        self._may_repeat = may_come and self._sync.group is not None

    def _catch_up(self) -> None:
        """What this rank would have done together with the others, had it not failed in the window."""
        self._agree_on_items(torch.zeros((), device=self._device, dtype=torch.float32), 0)

    def _mark(self) -> tuple[int, float | Tensor | None]:
        """Where `_rewind` goes back to."""
        return self._windows, self._typical_items

    def _rewind(self, mark: tuple[int, float | Tensor | None]) -> None:
        """The open window is as if it had not begun."""
        self.discard()
        self._windows, self._typical_items = mark

    def _require_same_wrapping(self) -> None:
        if wrapping(self._models) != self._wrapping:
            raise BackendError(
                "a model was wrapped, or torch.distributed initialized, after this Accumulator was made: it does not "
                "know how gradients travel. Make it last, of the model as it is trained."
            )
