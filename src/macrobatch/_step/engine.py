"""The engine: it accumulates the gradients of one window after another, and closes each with one exact step.

For each micro-batch, call `begin`, run the forward, and call `backward` (or `replay` for a recorded one), which ends
the micro-batch; `give_up` ends it without a backward. `close` closes a window, `discard` drops it. To be able to retry
a window, take a `mark` before it, and pass the mark to `roll_back`. A rank without samples for a window calls
`join_empty`. `Accumulator` feeds the engine from a data loader, `MacroStep` from the batches that it cuts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import start_all_reduce
from macrobatch._ranks.select import require_same_wrapping, wrapping
from macrobatch._step import validation
from macrobatch._step.backward import Backward, Replayable, UnsynchronisedError, record_use
from macrobatch._step.closing import Closing
from macrobatch._step.denominators import Denominators
from macrobatch._step.frozen import Frozen
from macrobatch._step.gradients import Gradients
from macrobatch._step.graph import Confinement
from macrobatch._step.joint_window import FirstPass, JointWindow, Pulled, Share
from macrobatch._step.lifecycle import Lifecycle, Mark
from macrobatch._step.means import MeanWindow
from macrobatch._step.parameters import GradientSource, Parameters
from macrobatch._step.scaling import Seeds, TypicalItems, in_order, is_on_its_way
from macrobatch._step.snapshot import Snapshot
from macrobatch._step.spans import Spans
from macrobatch._step.terms import TermWindow, Weighed
from macrobatch._step.ties import OutputTies
from macrobatch._step.totals import Window
from macrobatch._step.turns import Turn
from macrobatch._step.verdict import Verdict, verdict_on_ranks
from macrobatch.errors import BatchError, UsageError
from macrobatch.types import Items, Reduction, StepResult, Terms


class Engine:
    """Accumulates windows of micro-batches, and closes them.

    Args:
        models: the models whose gradients are accumulated.
        optimizers: the optimizers. They hold only parameters of these models.
        backend: how ranks exchange gradients.
        closing: what to do with the gradients of a complete window.
        steps: the number of micro-batches in a window, or a function of the number of steps taken so far.
        reduction: whether losses are a "mean" or a "sum" over items.
        scaler: the GradScaler whose scale multiplies the losses.
        accumulate_dtype: the dtype in which gradients are summed.
        drops_short: whether to drop a window that has too few micro-batches on all ranks.
        has_terms: whether losses are dicts of terms. Their denominators are set before a window (`expect`).
        has_joint: whether there is a loss of the whole batch. Its gradients are set before a window (`expect_second`).

    Attributes:
        is_last: whether the current micro-batch is the last one of the window.
        is_repeat: whether the current micro-batch is a repeat with weight 0, for a rank that has no more batches.
        weighs_alike: whether the last micro-batch was a mean without items, so that it has the weight of any other.
        others_go_on: whether another rank had batches left when the last window closed.
        may_repeat: whether ranks may repeat micro-batches. If so, they tell each other which parameters they used.
        spans: the observers of the phases of a window, for measurements.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        backend: Local,
        closing: Closing,
        *,
        steps: int | Callable[[int], int] = 1,
        reduction: Reduction = "mean",
        scaler: GradScaler | None = None,
        accumulate_dtype: torch.dtype | None = None,
        drops_short: bool = False,
        has_terms: bool = False,
        has_joint: bool = False,
    ) -> None:
        self.models = models
        self.backend = backend
        self.closing = closing
        self.reduction: Reduction = reduction
        self.scaler = scaler
        self.steps = steps
        self.spans = Spans()
        self.is_last = self.is_repeat = self.weighs_alike = False
        self.others_go_on = self.may_repeat = False
        self._drops_short = drops_short
        self._wrapping = wrapping(models)
        self._parameters = Parameters(models, optimizers)
        self._source = GradientSource(self._parameters, backend, accumulate_dtype)
        is_half = any(p.dtype == torch.float16 for p in self._parameters.named().values())
        self._means: type[MeanWindow] | None = TermWindow if has_terms else JointWindow if has_joint else None
        weighs = self._means is not None  # then means are accumulated, not sums
        shrinks = (is_half or backend.uses_float16()) and not weighs
        self._typical = TypicalItems(None if weighs else scaler, backend.group, shrinks=shrinks)
        self._ties: OutputTies | None = None if backend.group is None or not weighs else OutputTies(models)
        self._backward = Backward(backend, self._parameters, accumulate_dtype)
        self._lifecycle = Lifecycle()
        self._windows = 0  # how many were closed or discarded
        self._window: Window | None = None
        self._gradients: Gradients | None = None
        self._seeds = Seeds()
        self._turn = Turn()  # how the current micro-batch was begun
        self._before_repeat: Snapshot | None = None
        self._counting: Verdict | None = None  # whether all ranks count items alike: being copied to the host
        self._used: set[str] = set()  # the parameters that this rank has used in the window, if it records that
        closing.guard_steps(self._is_accumulating, self._holds_cleared)

    # ------------------------------------------------------------------------------------------ one micro-batch

    @contextlib.contextmanager
    def micro_batch(self, turn: Turn) -> Iterator[None]:
        """The forward and the backward of one micro-batch."""
        self.require_finished()
        self.begin(turn)
        try:
            yield
            if self._lifecycle.awaits_backward:
                raise UsageError("micro_batch() ended without its backward(): call backward(loss, items) inside it.")
        finally:
            self.give_up()

    def begin(self, turn: Turn, *, after_forward: bool = False) -> None:
        """Begin a micro-batch, before its forward. After it, if the caller has kept ranks from exchanging gradients."""
        self._end()
        window = self.window
        self._turn = turn
        window.slots += turn.slots
        self.is_last = window.slots >= window.length if turn.last is None else turn.last
        self.is_repeat, self.weighs_alike = turn.repeat, False
        self._before_repeat = Snapshot(self.models) if turn.repeat else None
        self.open_gradients()
        (self.backend.begin_backward if after_forward else self.backend.begin)(self.is_last)
        if self._ties is not None:
            self._ties.begin()
        self._lifecycle.begin_micro_batch()

    def backward(self, loss: Tensor | Terms | Share, items: Items = None) -> None:
        """Run the backward of a micro-batch, add its gradient to the window, and end the micro-batch."""
        self._lifecycle.require_backward(self._window)
        root: Tensor | None
        counted: Any
        if self._means is not None:
            root, counted = self._weigh(loss, items)
        else:
            root, counted = self._checked(loss, items)
            self.weighs_alike = counted is None and self.reduction == "mean"
            self.closing.check_loss(root)
            self._typical.agree(counted, root.device, self._window)
        window, gradients = self.window, self.open_gradients()
        gradients.check_untouched()
        self.closing.check_untouched()
        if root is None:  # no term, and no other rank that waits for a backward
            window.add(root, counted)
            if self.is_last:
                self._send(window)
            self._end()
            self._lifecycle.end_backward()
            return
        confinement, awaited = self._backward.plan(root, gradients, is_first=not window.turns)
        if self.is_repeat:
            seed, counts = window.add_nothing(root), False
        else:
            seed, counts = window.add(root, counted), not window.counts_for_nothing(counted)
        if self.is_last:
            self._send(window)  # ranks exchange it during the backward
        try:
            self._run_backward(root, seed, gradients, confinement, counts=counts, awaited=awaited)
        finally:
            self._end()
        self._lifecycle.end_backward()

    def _checked(self, loss: object, items: Items) -> tuple[Tensor, Items]:
        """The checked loss and items: numbers if the host has them, tensors on the device otherwise."""
        root = validation.checked_loss(loss)
        if is_on_its_way(root):
            root = in_order(root, self.device)
        counted = validation.items_on_host(validation.checked_items(items))
        if isinstance(counted, Tensor) and is_on_its_way(counted):
            counted = in_order(counted, self.device)
        return root, counted

    def _weigh(self, terms: object, items: Items) -> tuple[Tensor | None, Weighed | Pulled]:
        """The weighted sum of all terms; None if there is no term, and no other rank waits for this backward."""
        window = self.window
        weighed: Weighed | Pulled
        if isinstance(window, JointWindow):
            assert isinstance(terms, Share)
            weighed = window.weigh(terms, repeats=self.is_repeat)
        else:
            assert isinstance(window, TermWindow)
            checked = validation.checked_terms(terms, items, window.names)
            for loss, _ in checked.values():
                self.closing.check_loss(loss)
            weighed = window.weigh(checked, repeats=self.is_repeat)
        # Under FSDP all ranks must reach the same modules, in every micro-batch; under DDP all that its reducer awaits.
        is_awaited = weighed.lacks and self.backend.will_check
        if self._ties is None or not (is_awaited or not self.backend.abilities.confines):
            return weighed.loss, weighed
        root = self._ties.tie(weighed.loss)
        if root is None:
            raise BatchError(
                "a micro-batch has no term at all, and has not called the model, but all ranks must run the same "
                "backward. Call the model, or return a term with its loss and 0 items."
            )
        return root, weighed

    def replay(self, recording: Replayable, micro_batch: object) -> None:
        """Replay the recorded forward and backward of a micro-batch, in place of `backward`."""
        self._lifecycle.require_backward(self._window)
        window, gradients = self.window, self.open_gradients()
        if self.may_repeat:
            self._used.update(gradients.own[id(parameter)] for parameter in recording.reached)
        try:
            with self.spans.of("replay"):
                recording.replay(micro_batch, window)
        finally:
            self._end()
        self._lifecycle.end_backward()

    @contextlib.contextmanager
    def apart(self, *, repeats: bool = False) -> Iterator[None]:
        """A context for forwards without a backward of a micro-batch. `repeats`: restore what they change."""
        before = Snapshot(self.models) if repeats else None
        self.open_gradients()
        self.backend.begin(last=False)
        try:
            yield
        finally:
            self.backend.end()
            if before is not None:
                before.restore()

    def backward_joint(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """Run the backward of the loss of the whole batch, which is the same on every rank. Call it inside `apart`.

        It adds the gradients of the parameters that this loss uses directly, once for all ranks together. It also sets
        ``.grad`` of `leaves`, the encodings. Both are multiplied by the scale of the scaler.
        """
        window, gradients = self.window, self.open_gradients()
        assert isinstance(window, JointWindow)
        if any(leaf.grad is not None for leaf in leaves):
            raise UsageError(
                "a backward() ran inside joint: its gradients would count twice. Return the loss alone, whose backward "
                "comes then. torch.autograd.grad() may be used inside."
            )
        gradients.check_untouched()
        self.closing.check_untouched()
        self.closing.check_loss(loss)
        group = self.backend.group
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        window.note_joint(loss, rank, ranks)
        seed = torch.ones_like(loss) * window.multiplier / ranks
        with self.spans.of("backward", loss), self._noting_use(gradients, ()) as used:
            self._backward.run_joint(loss, seed.to(loss.dtype), gradients, leaves)
        self._used.update(used)
        for leaf in leaves if ranks > 1 else ():
            if leaf.grad is not None:
                leaf.grad *= ranks

    def give_up(self) -> None:
        """Drop the current micro-batch, if there is one."""
        self._end()
        if self._lifecycle.awaits_backward:
            self._lifecycle.end_step()
            if self._window is not None:
                self._window.slots -= self._turn.slots
            if not self.has_accumulated:
                self._drop_gradients()

    def _end(self) -> None:
        """Reset what was set for a micro-batch. After a repeat, also restore the buffers that it changed."""
        self.backend.end()
        if self._ties is not None:
            self._ties.end()
        if self._before_repeat is not None:
            self._before_repeat.restore()
            self._before_repeat = None

    def _run_backward(
        self,
        loss: Tensor,
        seed: Tensor,
        gradients: Gradients,
        confinement: Confinement | None,
        *,
        counts: bool,
        awaited: Sequence[str],
    ) -> None:
        """Run a backward. If it fails in the first micro-batch of a window, restore the window as it was before."""
        is_first = self.window.turns == 1
        try:
            with self.spans.of("backward", loss):
                if not (awaited or self._notes_use):
                    self._backward.run(loss, seed, gradients, confinement, counts=counts, is_first=is_first)
                    return
                with self._noting_use(gradients, awaited) as used:
                    self._backward.run(loss, seed, gradients, confinement, counts=counts, is_first=is_first)
        except BaseException as error:
            if is_first and not isinstance(error, UnsynchronisedError):
                self._undo_first_turn()
            else:
                self._lifecycle.break_window()
            raise
        if not self.is_repeat:
            self._used.update(used)

    def _noting_use(
        self, gradients: Gradients, awaited: Sequence[str]
    ) -> contextlib.AbstractContextManager[Collection[str]]:
        """A context that notes the names of the parameters that a backward uses, except for those already noted."""
        if not (awaited or self._notes_use):
            return contextlib.nullcontext(())
        known = set() if awaited else self._used
        leaves = self.backend.leaves({name: p for name, p in gradients.named.items() if name not in known})
        return record_use(leaves, awaited)

    def _undo_first_turn(self) -> None:
        failed, self._window = self._window, None
        self._drop_window()
        self.window.slots += self._turn.slots
        if isinstance(failed, TermWindow) and failed.denominators is not None:
            self.expect(failed.denominators)
        self.open_gradients()

    # ------------------------------------------------------------------------------------------ one window

    @property
    def window(self) -> Window:
        """The open window, or a new one."""
        if self._window is None:
            require_same_wrapping(self.models, self._wrapping)
            length = self.steps(self.closing.taken) if callable(self.steps) else self.steps
            number, length = self._windows + 1, validation.checked_steps(length, "steps(optimizer_step)")
            if self._means is not None:
                self._window = self._means(number=number, length=length, reduction=self.reduction, scaler=self.scaler)
                return self._window
            self._window = Window(
                number=number,
                length=length,
                reduction=self.reduction,
                scaler=self.scaler,
                typical_items=self._typical.items,
                alone=self.backend.group is None,
                shrinks=self._typical.shrinks,
                seeds=self._seeds,
            )
        return self._window

    def expect(self, denominators: Denominators) -> None:
        """Set the denominators of the terms, before the first micro-batch of a window."""
        window = self.window
        assert isinstance(window, TermWindow), "denominators are for windows of terms"
        window.expect(denominators)

    def expect_second(self, first: FirstPass) -> None:
        """Set the counts of the first pass over the batch, before the second pass."""
        window = self.window
        assert isinstance(window, JointWindow), "two passes are for windows with a loss of the whole batch"
        window.expect(first, self.device)

    def note_frozen(self, frozen: Frozen) -> None:
        """Register the frozen parameters, to check that the first pass and the joint loss have not changed them."""
        window = self.window
        assert isinstance(window, JointWindow)
        window.note_frozen(frozen)

    @property
    def awaits_denominators(self) -> bool:
        """Whether the window has terms whose denominators are not set yet."""
        return (
            self._means is TermWindow and isinstance(window := self.window, TermWindow) and window.denominators is None
        )

    @property
    def has_accumulated(self) -> bool:
        """Whether the window has had a micro-batch."""
        return self._window is not None and self._window.turns > 0

    @property
    def is_open(self) -> bool:
        """Whether a window was begun, with or without a micro-batch in it."""
        return self._window is not None

    @property
    def is_broken(self) -> bool:
        """Whether a backward failed half-way in the window. Then only `discard` is possible."""
        return self._lifecycle.is_broken

    @property
    def open_slots(self) -> int:
        """How many of the window's micro-batches have begun."""
        return 0 if self._window is None else self._window.slots

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self._parameters.named().values())).device

    def close(self, now: bool = False) -> StepResult | None:
        """Close the window and return its result, if it is complete or with `now`. Otherwise return None."""
        self._lifecycle.require_step(self._window, now)
        if not self.has_accumulated or not (now or self.is_last):
            self._lifecycle.end_step()
            return None
        window, gradients = self.window, self.open_gradients()
        gradients.check_untouched()
        self.closing.check_untouched()
        if not self.is_last:
            self._send(window)
        window.receive()
        try:
            self._require_same_counting(window)
            if not self._is_due(window):
                return None
            unused = gradients.named.keys() - self._used if self._tells_use else None
            with self.spans.of("communication"):
                self.backend.finish(gradients.named, unused)
            window.average = self.backend.average
            with self.spans.of("update"):
                return self.closing.close(window, gradients, shared=self._parameters.shared)
        finally:
            self._typical.update(window)
            if self.closing.leaves_gradients:
                gradients.let_go()
                self._gradients = None
            self._drop_window()
            self._lifecycle.end_step()

    def discard(self) -> None:
        """Drop the open window and its gradients. A micro-batch without a `backward` begins a new window."""
        self._end()
        self._drop_window()
        self.backend.drop_gradients()
        self.is_last = self.weighs_alike = False
        if not self._lifecycle.awaits_backward:
            self._lifecycle.end_step()
            return
        window = self.window  # with the model's flags as they are: this may be after an exception
        window.slots += self._turn.slots
        self.open_gradients()
        turn, is_full = self._turn, window.slots >= window.length
        self.is_last = bool(turn.last) if turn.is_told else turn.ends or is_full

    def end_epoch(self, *, drops: bool) -> None:
        """End an epoch. Drop a window that is still open, or carry it into the next epoch."""
        self._lifecycle.end_step()
        self.is_last = False
        if self.has_accumulated and drops:
            self.discard()
        self._lifecycle.end_epoch(carries=self.has_accumulated)
        if not self.has_accumulated:
            self.closing.settle()  # no later window may come to notice it

    # ------------------------------------------------------------------------------------------ windows done again

    def mark(self) -> Mark:
        """Remember the state before a window, for `roll_back`. Call it between windows."""
        return Mark(self._windows, self._typical.items)

    def roll_back(self, mark: Mark) -> None:
        """Drop the open window, and go back to the state at `mark`."""
        self.discard()
        self._windows, self._typical.items = mark

    def join_empty(self) -> None:
        """Take part in a window without samples: this rank adds nothing, but joins the collectives when it closes."""
        self.catch_up()
        self._turn, self.is_last, self.is_repeat = Turn(), False, False
        self.window.add_nothing(torch.zeros((), device=self.device, dtype=torch.float32))
        self.open_gradients()

    def skip(self) -> StepResult:
        """Close a window in which no rank has samples. No step is taken."""
        self.window.add_nothing(torch.zeros((), device=self.device, dtype=torch.float32))
        try:
            return self.closing.close(self.window, self.open_gradients(), shared=False)
        finally:
            self._drop_window()

    def catch_up(self) -> None:
        """Join the collectives that this rank has missed because it failed in the window."""
        self._typical.agree(0, self.device, self._window)

    def expect_repeats(self, may_come: bool) -> None:
        """Set whether ranks may repeat micro-batches from now on. All ranks must set the same."""
        self.may_repeat = may_come and self.backend.group is not None

    @property
    def _tells_use(self) -> bool:
        """Whether ranks tell each other, when a window closes, which parameters they have used."""
        return self.may_repeat or self.backend.abilities.exchanges_use

    @property
    def _notes_use(self) -> bool:
        """Whether each backward notes which parameters it uses. Under FSDP1, the leaves of graphs are no parameters."""
        abilities = self.backend.abilities
        return abilities.exchanges_use or (self.may_repeat and abilities.confines)

    # ------------------------------------------------------------------------------------------ what may be called

    def require_new_epoch(self) -> None:
        """Raise an error if a window is open that was not carried over from the last epoch."""
        self._lifecycle.require_new_epoch(self._window)

    def require_finished(self) -> None:
        """Raise an error if the last micro-batch has had no backward, or if a complete window has had no step."""
        self._lifecycle.require_finished(self._window, self.is_last)

    def state(self) -> dict[str, int | float]:
        """The state to save, as plain numbers. Call it between windows."""
        self._lifecycle.require_between_windows(self._window, "state_dict()")
        self.closing.settle()
        state: dict[str, int | float] = {"optimizer_step": self.closing.taken, "windows": self._windows}
        if self._typical.items is not None:
            state["typical_items"] = float(self._typical.items)
        return state

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an Accumulator or a MacroStep cannot be copied or pickled: it belongs to its model and its optimizers. "
            "Keep it outside of the model, and save its state_dict()."
        )

    def load_state(self, state: Mapping[str, int | float]) -> None:
        """Restore what `state` returned. Call it between windows."""
        self._lifecycle.require_between_windows(self._window, "load_state_dict()")
        taken, windows, typical = validation.checked_state(state)
        self.closing.taken, self._windows, self._typical.items = taken, windows, typical
        self._window = None  # one that was opened, but holds nothing yet, was numbered by the old state
        self._drop_gradients()

    # ------------------------------------------------------------------------------------------ inside

    def _send(self, window: Window) -> None:
        """Start to exchange the totals of a closing window with the other ranks."""
        if (group := self.backend.group) is not None:
            window.send(lambda numbers: start_all_reduce(numbers, group), self._turn.flags)

    def _require_same_counting(self, window: Window) -> None:
        """Raise an error on all ranks if some pass items and others do not.

        The host checks every window whose numbers are in its memory. If they are on a device, it checks only the first
        window, when the second one closes.
        """
        earlier, self._counting = self._counting, None
        verdict = verdict_on_ranks(window)
        if verdict is not None and verdict.on_host:
            earlier = verdict
        elif verdict is not None and window.number == 1:
            self._counting = verdict.send()
        if earlier is not None and (error := earlier.error(earlier.read())) is not None:
            raise error

    def _is_due(self, window: Window) -> bool:
        """Whether to close a window. Whether a short one is dropped may be known only now, from other ranks' flags."""
        if not self._turn.flags or not self.is_last:
            return True
        more, complete = self._turn.flags
        self.others_go_on = bool(more) or window.flag(0) > 0
        return not self._drops_short or bool(complete) or window.flag(1) > 0

    def _is_accumulating(self) -> bool:
        return self.has_accumulated

    def _holds_cleared(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters whose gradients a window has used or cleared."""
        if not (self._windows or self.has_accumulated):
            return False
        own = set(map(id, self._parameters.named().values()))
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def open_gradients(self) -> Gradients:
        """The gradients of the window. They are made before its first forward; older gradients do not belong to it."""
        if self._gradients is None:
            self._gradients = self._source.begin_window()
            self.closing.begin_window()
        return self._gradients

    def _drop_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.clear()
        self._gradients = None

    def _drop_window(self) -> None:
        self._windows += self.has_accumulated
        self._drop_gradients()
        self._window = None
        self._used = set()
        self._backward.begin_window()
        self._lifecycle.drop_window()
