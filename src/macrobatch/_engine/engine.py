"""The engine: it accumulates the gradients of one window after another, and closes each with one exact step.

For each micro-batch, call `begin`, run the forward, and call `backward`, which ends it; `give_up` ends it without a
backward. `close` closes a window, `discard` drops it. `Accumulator` feeds the engine from a data loader.

An exception at any line leaves the state before the call, or a broken window that only `discard` helps: a window is
marked as broken before a call changes it, and as whole after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch._border import order
from macrobatch._border.arguments import checked_state, checked_steps
from macrobatch._border.parameters import Parameters
from macrobatch._border.spans import Spans
from macrobatch._border.uncopied import Uncopied
from macrobatch._engine.backward import Backward
from macrobatch._engine.closing import TOUCHED, Closing
from macrobatch._engine.events import Check, Events
from macrobatch._engine.objective import Objective
from macrobatch._engine.reporting import NOBODY, auditors
from macrobatch._engine.store import GradientStore
from macrobatch._engine.totals import Denominators, Micro, MicroPlan
from macrobatch._engine.usual import UsualStep
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._engine.window import Window
from macrobatch._ranks.backend import Local, UnsynchronisedError
from macrobatch._ranks.collectives import start_named_sum
from macrobatch._torch.graph import UNCONFINED, Reach, reach_of
from macrobatch._torch.snapshot import Snapshot
from macrobatch.errors import MacrobatchError, UsageError
from macrobatch.types import Items, StepResult, Terms


class Engine(Uncopied):
    """Accumulates windows of micro-batches, and closes them."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        backend: Local,
        closing: Closing,
        objective: Objective,
        *,
        steps: int | Callable[[int], int] = 1,
        store: Callable[[Parameters, Local, torch.dtype | None], GradientStore] = GradientStore,
        checks: Sequence[Check] = (),
        accumulate_dtype: torch.dtype | None = None,
        drops_short: bool = False,
    ) -> None:
        self.models, self.optimizers, self.backend = models, optimizers, backend
        self.objective, self.closing, self.steps = objective, closing, steps
        self.spans, self.parameters = Spans(), Parameters(models, optimizers)
        self.store = store(self.parameters, backend, accumulate_dtype)
        self.window: Window | None = None
        self._reach: Reach | None = None  # of the backward that is about to run, if somebody has asked
        self.is_last = self.is_repeat = self.is_closing = False
        self.unread: str | None = None  # the node that kept the items of the last loss from being read
        self.num_windows, self._drops_short = 0, drops_short
        self._backward = Backward(backend, self.store, accumulate_dtype)
        self._is_store_open = False
        self._before_repeat: Snapshot | None = None
        self.begin_epoch(may_repeat=False)
        self._has_settings = backend.has_settings or self.objective.ties is not None
        self.checks = [check for check in checks if check.watch(self)]
        self.on = Events(self.checks)
        self._usual = UsualStep() if UsualStep.may_serve(self) else None

    # ------------------------------------------------------------------------------------------ one micro-batch

    def begin(self, plan: MicroPlan, batch: object = None, *, after_forward: bool = False) -> None:
        """Begin a micro-batch, before its forward. After it, if the caller has kept ranks from exchanging gradients.

        `batch`: its samples, if they are known.
        """
        window = self.window or self.open_window()
        if window.plan is not None:
            self.give_up()
        is_last = window.is_full_with(plan) if plan.last is None else plan.last
        try:
            self._before_repeat = Snapshot(self.models) if plan.repeat else None
            if not self._is_store_open:
                self.open_store()
            if self._has_settings:
                (self.backend.begin_backward if after_forward else self.backend.begin)(is_last)
            if self.objective.ties is not None:
                self.objective.ties.begin()
        except BaseException:
            self._end()
            self._clear_unused_store()
            raise
        self.is_last, self.is_repeat, self.unread = is_last, plan.repeat, None
        window.begin(plan, batch)

    def backward(self, given: Tensor | Terms | Any, items: Items = None, *, are_samples: bool = False) -> None:
        """Run the backward of a micro-batch, add its gradient to the window, and end the micro-batch.

        `are_samples`: the program has given no items, and these are samples.
        """
        window = self.window
        if window is None or window.plan is None or window.is_broken:
            window = order.require_backward(window)
        is_first = not window.num_backwards
        try:
            if self._usual is not None and self._usual.run(self, window, given, items, are_samples=are_samples):
                return
            micro = self.objective.combine(given, items, window, repeats=self.is_repeat, are_samples=are_samples)
            root = micro.root
            for observe in self.on.before_backward:
                observe(self, micro)
            confinement = None if root is None else self._backward.confine(root, self._reach)
            window.begin_backward(micro)  # broken until it has ended
            if self.is_last:
                self._send(window)  # ranks exchange it during the backward
            if root is not None:  # else no term, and no other rank that waits for a backward
                notes_use = self._notes_use and not self.is_repeat
                if notes_use or self.spans.observers:
                    with self.spans.of("backward", root), self._backward.noting_use(notes_use):
                        self._backward.run(micro, confinement)
                elif confinement is UNCONFINED and micro.counts and micro.seed is not None:  # most of them
                    self.backend.backward(root, micro.seed, None)
                else:
                    self._backward.run(micro, confinement)
                self.accept_gradients(micro)
                if is_first:
                    for look in self.on.after_first:
                        look(self)
            self.unread = micro.unread
            if self._has_settings:
                self._end()
        except BaseException as error:
            self._reach = None
            if window.is_broken:  # otherwise nothing has changed
                if is_first and not isinstance(error, UnsynchronisedError):
                    self._restart(window)
                self._end()
            raise
        window.end_backward()

    def reach(self, root: Tensor) -> Reach:
        """What the backward that is about to run reaches. Its graph is walked once, and only if somebody asks."""
        if self._reach is None:
            self._reach = reach_of(root)
        return self._reach

    def skip(self) -> None:
        """End the current micro-batch without a backward: it adds nothing, but its turn counts."""
        window = order.require_skip(self.window, can_skip=self.backend.abilities.can_skip)
        window.begin_skip()
        try:
            self.objective.catch_up(window, self.device)
            if self.is_last:
                self._send(window)
            self.backend.join_backward()
            self.accept_gradients()
        finally:
            self._end()
        window.end_backward()

    def give_up(self) -> None:
        """Drop the current micro-batch, if there is one."""
        self._end()
        if self.window is not None and self.window.plan is not None:
            self.window.give_up()
            self.is_last = False  # it was the one that would have closed the window
            self._clear_unused_store()

    def _end(self) -> None:
        """Reset what was set for a micro-batch. After a repeat, also restore the buffers that it changed."""
        self._reach = None
        self.backend.end()
        if self.objective.ties is not None:
            self.objective.ties.end()
        if self._before_repeat is not None:
            before, self._before_repeat = self._before_repeat, None
            before.restore()

    def _restart(self, failed: Window) -> None:
        """After a failed first backward: a new window in place of the failed one, with the same micro-batch begun."""
        assert failed.plan is not None
        for observe in self.on.window_end:
            observe(self)
        self._clear_store()
        window = self.objective.open(failed.number, failed.num_planned, self.device)
        if failed.denominators is not None:
            self.objective.expect(window, failed.denominators)
        self.open_store()
        window.begin(failed.plan, failed.batch)
        self._backward.begin_window()
        self.window = window

    @contextlib.contextmanager
    def micro_batch(self, plan: MicroPlan) -> Iterator[None]:
        """The forward and the backward of one micro-batch."""
        order.require_finished(self.window, self.is_last)
        try:
            self.begin(plan)
            yield
            if self.window is not None and self.window.plan is not None and not self.window.plan.may_lapse:
                raise UsageError("micro_batch() ended without its backward(): call backward(loss, items) inside it.")
        finally:
            self.give_up()

    # ------------------------------------------------------------------------------------------ one window

    def open_window(self) -> Window:
        """The open window, or a new one."""
        if self.window is None:
            steps = self.steps
            if callable(steps):
                steps = checked_steps(steps(self.closing.taken), "steps(optimizer_step)")
            self.window = self.objective.open(self.num_windows + 1, steps, self.device)
        return self.window

    def open_store(self) -> GradientStore:
        """The gradients of the window. They begin before its first forward; older gradients do not belong to it."""
        if not self._is_store_open:
            self.store.begin()
            self.closing.begin_window()
            for observe in self.on.window_begin:
                observe(self)
            self._is_store_open = True
        return self.store

    def expect(self, denominators: Denominators) -> None:
        """Set early denominators, before the first micro-batch."""
        self.objective.expect(self.open_window(), denominators)

    def close(self, now: bool = False) -> StepResult | None:
        """Close the window and return its result, if it is complete or with `now`. Otherwise return None."""
        window = self.window
        if window is None or window.plan is not None or window.is_broken or not window.is_under_way:
            order.require_step(window, now)
            return None
        if not (now or self.is_last):
            return None
        for observe in self.on.before_close:
            observe(self)
        window.begin_close()
        try:
            if self.backend.group is not None:
                if not self.is_last:
                    self._send(window)
                window.receive()
            self.objective.learn(window)
            if self._usual is not None:
                self._usual.remember(window)
            with auditors[-1].closing(self, window) if auditors else NOBODY:
                result = self._close(window)
        except MacrobatchError:  # a reason against the step: the window is dropped, and the next one may begin
            self._drop_window()
            raise
        self._drop_window(leaves_gradients=self.closing.leaves_gradients)
        return result

    def _close(self, window: Window) -> StepResult | None:
        if not self._is_due(window):
            return None
        self.store.settle()
        if self._has_settings or self.spans.observers:
            tells_use = self.may_repeat or self.backend.abilities.exchanges_use
            unused = self.store.named.keys() - self._backward.used if tells_use else None
            with self.spans.of("communication"):
                self.backend.finish(self.store.named, unused)
                self.backend.finish_others(self.parameters.strays, unused)
        self.is_closing = True
        try:
            with self.spans.of("update"):
                flags, average, shared = self._flags(window), self.backend.average, self.parameters.shared
                return self.closing.close(window, self.store, flags, average=average, shared=shared)
        finally:
            self.is_closing = False

    def discard(self) -> None:
        """Drop the open window and its gradients. A micro-batch without a `backward` begins a new window."""
        self._end()
        plan, batch = (None, None) if self.window is None else (self.window.plan, self.window.batch)
        self._drop_window()
        self.backend.drop_gradients()
        self.is_last, self.unread = False, None
        if plan is not None:
            window = self.open_window()  # with the model's flags as they are: this may be after an exception
            self.open_store()
            self.is_last = bool(plan.last) if plan.is_told else plan.ends or window.is_full_with(plan)
            window.begin(plan._replace(may_lapse=True), batch)

    def begin_epoch(self, *, may_repeat: bool, others_go_on: bool = False, steps: int | None = None) -> None:
        """Set whether ranks may repeat micro-batches, and whether others have batches. All ranks set the same.

        `steps`: the micro-batches of a window, if their number changes.
        """
        self.steps = self.steps if steps is None else steps
        self.may_repeat = may_repeat and self.backend.group is not None
        self.others_go_on = others_go_on
        # Under FSDP1, the leaves of graphs are no parameters, and all ranks use the same.
        abilities = self.backend.abilities
        self._notes_use = abilities.exchanges_use or (self.may_repeat and abilities.leaves_are_parameters)

    def end_epoch(self, *, drops: bool) -> None:
        """End an epoch. Drop a window that is still open, or carry it into the next epoch."""
        self.is_last = False
        if self.window is not None and self.window.is_under_way and drops:
            self.discard()
        if self.window is not None and self.window.is_under_way:
            self.window.carry()
        else:
            self.closing.settle()  # no later window may come to notice it

    def accept_gradients(self, micro: Micro | None = None) -> None:
        """Take the gradients as they are now for those of the window. Without `micro`, others have set some."""
        self.store.absorb()
        for observe in self.on.after_backward:
            observe(self, micro)

    @property
    def has_accumulated(self) -> bool:
        """Whether the window has had a micro-batch."""
        return self.window is not None and self.window.num_backwards > 0

    @property
    def num_begun(self) -> int:
        """How many of the window's planned micro-batches have begun."""
        return 0 if self.window is None else self.window.num_begun

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.parameters.named().values())).device

    def state(self) -> dict[str, int | float]:
        """The state to save, as plain numbers. Call it between windows."""
        order.require_between_windows(self.window, "state_dict()")
        self.closing.settle()
        typical = {} if (items := self.objective.mean_items) is None else {"typical_items": float(items)}
        return {"optimizer_step": self.closing.taken, "windows": self.num_windows, **typical}

    def load_state(self, state: Mapping[str, int | float]) -> None:
        """Restore what `state` returned. Call it between windows."""
        order.require_between_windows(self.window, "load_state_dict()")
        taken, windows, mean_items = checked_state(state)
        self.closing.restore(taken)
        self.objective.restore(mean_items)
        self.num_windows = windows
        self.window = None  # one that was opened, but holds nothing yet, was numbered by the old state
        self._clear_store()

    def _send(self, window: Window) -> None:
        """Start to exchange the totals of a closing window with the other ranks."""
        if (group := self.backend.group) is not None:
            window.send(lambda numbers: start_named_sum(numbers, group), self.objective.numbers(window))

    def _is_due(self, window: Window) -> bool:
        """Whether to close a window. Whether a short one is dropped may be known only now, from other ranks."""
        if (plan := window.last_plan) is None or plan.more is None or not self.is_last:
            return True
        self.others_go_on = plan.more or bool(window.everyone["more"] > 0)
        return not self._drops_short or bool(plan.complete) or bool(window.everyone["complete"] > 0)

    def _flags(self, window: Window) -> Flags:
        """The reasons against the step that the objective and the checks have found."""
        flags = self.objective.flags(window)
        for observe in self.on.flags:
            flags |= observe(self)
        if self.store.tells_by_norm and TOUCHED not in flags:  # ranks exchange it, whether they check or not
            flags[TOUCHED] = Flag(torch.zeros((), device=self.device))
        return flags

    def _clear_store(self) -> None:
        if self._is_store_open:  # False first: what an exception leaves is cleared when the next one begins
            self._is_store_open = False
            self.store.clear()

    def _clear_unused_store(self) -> None:
        """Forget gradients that begin no window: those of a program that does something else now are its own."""
        if not self.has_accumulated:
            self._clear_store()

    def _drop_window(self, *, leaves_gradients: bool = False) -> None:
        """Forget the window, and clear its gradients unless they are left to the program."""
        for observe in self.on.window_end:
            observe(self)
        if leaves_gradients:
            self._is_store_open = False
            self.store.let_go()
        else:
            self._clear_store()
        self._backward.begin_window()
        is_under_way = self.window is not None and self.window.is_under_way
        self.num_windows, self.window = self.num_windows + is_under_way, None
