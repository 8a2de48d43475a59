"""Micro-steps as CUDA graphs: forward, loss and backward are recorded once for each shape, and replayed.

A replay takes the host microseconds where Python takes milliseconds. Everything a recording reads or writes beyond its
own scratch memory has a fixed place: inputs, gradients (`Graphs.buffers`), totals of loss and items (`Ledger`); the
rest lies in one pool that all recordings share, as no two run at once.

Shapes are recorded before a window begins, where no gradient exists yet: warming up then leaves traces in the random
numbers and the buffers alone, and those are put back. The first few, and those of a plan that makes few, are recorded
at once; any other when it comes for the second time. What cannot be recorded runs eagerly, and one warning says why.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Capturer, Claim, capturer_for, uncached_autocast, without_collecting
from macrobatch._cudagraph.eligibility import (
    NotRecordableError,
    Traces,
    buffers_of,
    copied,
    hooked,
    leaves_for,
    reached,
    require_leaves,
    require_no_traces,
    signature,
    situation,
    tensors_of,
)
from macrobatch._cudagraph.recorded_step import Ledger, Recording
from macrobatch._cut.memory import is_out_of_memory, release_cached_memory
from macrobatch._step.gradients import Gradients
from macrobatch._step.graph import confinement_of, reach_of, run_confined
from macrobatch._step.snapshot import Snapshot, modules_of
from macrobatch._step.totals import UNSCALED, Window
from macrobatch._torch.tensors import version_of, zero_all
from macrobatch.types import Items, Reduction

LIMIT = 64  # shapes that are tried: a recording holds the launch parameters of thousands of kernels
AT_ONCE = 8  # of them are recorded when they are first seen
MOST_WAITING = 256  # shapes seen once: with more of them, hardly any comes again
WARM_UPS = 3
FASTER = 0.9  # of the eager time: what a recording may take to be kept. It costs memory, and a host ahead hides more

Micro = tuple[Any, int]  # a micro-batch on the device, with its number of samples
Loss = Callable[[Any, int], tuple[Tensor, Items]]


class _StartOverError(Exception):
    """What was recorded so far cannot stay."""


class _NothingThereError(Exception):
    """A micro-batch without items: an eager micro-step leaves it out."""


class RecordingCache:
    """The recordings of one model's micro-steps.

    Args:
        models: whose parameters are trained.
        loss_of: ``loss_of(micro_batch, samples)`` returns the loss and its items. It must call the models without
            their wrappers (`unwrapped`), which do things in Python that a replay would leave out.
        reduction: what those losses are.
        scaled: whether a scaler multiplies them.
        capturer: of the device that they are on.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss_of: Loss,
        *,
        reduction: Reduction,
        scaled: bool,
        capturer: Capturer,
    ) -> None:
        self._models = models
        self._loss_of = loss_of
        self._reduction: Reduction = reduction
        self._scaled = scaled
        self._capturer = capturer
        self._situation: object = None
        self._refused = False  # nothing is recorded any more
        self._warms_up_apart = False  # whether each shape is warmed up outside of the pool first
        self._warned: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Drop all recordings, and the memory they hold."""
        self._recordings: dict[Hashable, Recording | None] = {}  # None: this shape stays eager
        self._waiting: dict[Hashable, Hashable] = {}  # shapes seen once, with what is known before they are taken
        self._taken: set[Hashable] = set()  # what was known of those that were looked at already
        self._ran_out = False  # whether memory did not suffice to record a shape of this window
        self._let_go()

    def _let_go(self) -> None:
        self._buffers: dict[int, Tensor] = {}  # the gradients, by the parameter's id
        self._versions: dict[int, int] = {}
        self._ledger: Ledger | None = None
        self._pool: Any = None  # lives as long as a recording in it

    @property
    def holds(self) -> bool:
        """Whether there is any recording."""
        return any(recording is not None for recording in self._recordings.values())

    # ------------------------------------------------------------------------------------------ a window

    def open(
        self, gradients: Gradients, coming: Sequence[tuple[Hashable, Callable[[], Micro]]], *, few_shapes: bool
    ) -> None:
        """Before a window: record what comes, if it is worth it; then lay out the gradients.

        Args:
            gradients: of the window, none of which exists yet.
            coming: for each micro-batch what is known of it beforehand, and how to take it.
            few_shapes: whether the plan of the window makes few different ones.
        """
        self._notice_changes(gradients.parameters)
        if not self._refused and not self._is_full:
            self._record_coming(gradients.parameters, coming, few_shapes)
        if self._refused and self._buffers:
            self.forget()
        if self._ledger is not None:
            self._ledger.clear()
        self._lay_out(gradients.parameters)
        gradients.mark()

    def of(self, micro_batch: Any, samples: int, known_before: Hashable) -> Recording | None:
        """The recording for a micro-batch; None: it is to run eagerly."""
        if self._refused:
            return None
        try:
            shape = signature(micro_batch, samples, self._capturer.device.type)
        except NotRecordableError as why:
            self.refuse(str(why))
            return None
        if shape in self._recordings:
            return self._recordings[shape]
        if not self._is_full:
            self._waiting[shape] = known_before
        if self._is_full:
            self._warn(self._why_full())
        return None

    @property
    def _is_full(self) -> bool:
        return len(self._recordings) >= LIMIT or len(self._waiting) >= MOST_WAITING

    def _why_full(self) -> str:
        if len(self._recordings) < LIMIT:
            return (
                f"cuda_graph=True: {MOST_WAITING} shapes of micro-batches never came again: no more are recorded, and "
                "others run eagerly. A number or text in a batch that changes makes another shape of it: put numbers "
                "into tensors."
            )
        kept = sum(recording is not None for recording in self._recordings.values())
        return (
            f"cuda_graph=True: {LIMIT} shapes of micro-batches have been tried, {kept} of which are replayed; others "
            "run eagerly. Let fewer arise: by_tokens rounds the lengths of a batch of tensors; a collate= of your own "
            "can pad to one of a few lengths."
        )

    def close(self, gradients: Gradients, window: Window | None) -> None:
        """After the last micro-batch of a window: its totals, and gradients as eager micro-steps would leave them."""
        if self._ran_out:  # and the same micro-steps fit without a recording, or this window would have failed
            self._ran_out = False
            self._warn("cuda_graph=True: there is not enough memory to record a shape beside the rest: it stays eager.")
        if self._ledger is None or window is None:
            return
        added_to = {id(p) for recording in self._ledger.replayed for p in recording.reached}
        if added_to:
            self._ledger.settle(window)
        for parameter in gradients.parameters:
            buffer = self._buffers.get(id(parameter))
            if buffer is None or parameter.grad is not buffer or id(parameter) in added_to:
                continue
            if version_of(buffer) == self._versions[id(parameter)]:  # no eager one wrote to it either
                parameter.grad = None
        gradients.mark()

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give all parameters that recordings reach their gradients, so that eager micro-steps add to the same."""
        laid_out = [p for p in parameters if id(p) in self._buffers]
        if not laid_out:
            return
        zero_all([self._buffers[id(p)] for p in laid_out])
        for parameter in laid_out:
            parameter.grad = self._buffers[id(parameter)]
            self._versions[id(parameter)] = version_of(self._buffers[id(parameter)])

    def _notice_changes(self, parameters: Sequence[nn.Parameter]) -> None:
        """A recording holds for the models as they were."""
        modules = modules_of(self._models)
        now = situation(modules)
        if now != self._situation:
            self.forget()
            self._situation = now
            self._follow(parameters[0].device)
        if not self._refused and (what := hooked(modules, parameters)) is not None:
            self.refuse(f"{what} has a hook, which a replay would leave out")

    def _follow(self, device: torch.device) -> None:
        """Capture where the models are now."""
        if device != self._capturer.device:
            if (capturer := capturer_for(device)) is None:
                self.refuse(f"the model is on {device}")
            else:
                self._capturer = capturer

    # ------------------------------------------------------------------------------------------ recording

    def _record_coming(
        self,
        parameters: Sequence[nn.Parameter],
        coming: Sequence[tuple[Hashable, Callable[[], Micro]]],
        few_shapes: bool,
    ) -> None:
        found: dict[Hashable, Micro] = {}
        awaited = set(self._waiting.values())
        for known_before, take in coming:
            at_once = known_before not in self._taken and (few_shapes or len(self._recordings) + len(found) < AT_ONCE)
            if not (known_before in awaited or at_once):
                continue
            with _undone(self._models):  # to take a micro-batch may draw random numbers
                micro_batch, samples = take()
            try:
                shape = signature(micro_batch, samples, self._capturer.device.type)
            except NotRecordableError as why:
                self.refuse(str(why))
                return
            if shape not in self._recordings and (at_once or shape in self._waiting):
                found.setdefault(shape, (micro_batch, samples))
        self._taken.update(known_before for known_before, _ in coming)
        if not found:
            return
        device = self._capturer.device
        release_cached_memory(device)
        for shape, micro in sorted(found.items(), key=lambda item: -_numel(item[1][0])):
            if not self._refused and len(self._recordings) < LIMIT:
                recording = self._recorded(parameters, *micro)  # which may forget all others
                self._recordings[shape] = recording
                self._waiting.pop(shape, None)
        release_cached_memory(device)

    def _recorded(self, parameters: Sequence[nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        """The recording of a shape, or None where there is none, or where it does not pay."""
        recording, starts_over, refused = None, False, None
        try:
            with _undone(self._models), uncached_autocast(), leaves_for(self._models, parameters) as leaves_of:
                recording = self._record(leaves_of, micro_batch, samples)
        except _StartOverError:
            starts_over = True
        except _NothingThereError:
            pass
        except NotRecordableError as error:
            refused = str(error)
        except Exception as error:
            self._ran_out = is_out_of_memory(error)
            refused = None if self._ran_out else f"recording failed: {_first_line(error)}"
        # Outside of the except blocks, whose tracebacks kept what was computed alive.
        for parameter in parameters:
            parameter.grad = None
        if starts_over:
            self.forget()
            self._warms_up_apart = True
            return self._recorded(parameters, micro_batch, samples)
        if refused is not None:
            self.forget()  # others, recorded before, may share what failed
            self.refuse(refused)
        elif recording is None and not self.holds:
            self._let_go()
        return recording

    def _record(self, leaves_of: dict[nn.Parameter, nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        capturer = self._capturer
        ledger = self._ledger = self._ledger or Ledger(capturer.device)
        pool = self._pool = self._pool or capturer.new_pool()
        static = copied(micro_batch)

        def micro_step() -> Window:
            return self._micro_step(static, samples, ledger, leaves_of)

        with without_collecting(), capturer.claim(pool) as claim:
            for parameter, leaf in leaves_of.items():
                leaf.grad = self._buffer_of(parameter)
            with capturer.warming_up():
                added_to, eager = self._warmed_up(micro_step, leaves_of, claim)
            for parameter in leaves_of.keys() - added_to:  # it needs no memory for a gradient
                leaves_of[parameter].grad = None
                if not self._is_reached(parameter):
                    del self._buffers[id(parameter)]
            graph, window = capturer.capture(micro_step, pool)
        inputs = [leaf for _, leaf in tensors_of(static)]
        recording = Recording(graph, inputs, ledger, added_to, window.host_items)
        replayed = min(capturer.milliseconds(lambda: recording.run(micro_batch)) for _ in range(2))
        return recording if replayed < FASTER * eager else None

    def _warmed_up(
        self, micro_step: Callable[[], object], leaves_of: dict[nn.Parameter, nn.Parameter], claim: Claim
    ) -> tuple[set[nn.Parameter], float]:
        """Which parameters a micro-step adds to, and how many milliseconds it takes.

        In the memory of the pool, which would else be needed twice. But what is made there and kept, such as the mask
        for a length, would be overwritten by the recordings that are there already.
        """
        device = self._capturer.device
        buffers_before = buffers_of(self._models)
        is_first = not self.holds  # nothing can be overwritten; and what is recorded may need other sizes
        is_apart = is_first or self._warms_up_apart
        with contextlib.nullcontext() if is_apart else claim.allocating():
            traces = Traces(device)
            added_to = reached(micro_step, leaves_of)
            if traces.has_kept() and not is_apart:
                raise _StartOverError
        times, left = [], []
        with contextlib.nullcontext() if is_first else claim.allocating():
            for _ in range(WARM_UPS - 1):
                traces = Traces(device)
                times.append(self._capturer.milliseconds(micro_step))
                left.append(traces.left())
        require_no_traces(left)
        if not all(map(operator.is_, buffers_before, buffers_of(self._models))):
            raise NotRecordableError("a forward replaces a buffer of the model by another tensor")
        return added_to, min(times)

    def _buffer_of(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self._buffers:
            dtype = parameter.grad_dtype or parameter.dtype
            self._buffers[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self._buffers[id(parameter)]

    def _is_reached(self, parameter: nn.Parameter) -> bool:
        return any(parameter in recording.reached for recording in self._recordings.values() if recording is not None)

    def _micro_step(
        self, micro_batch: Any, samples: int, ledger: Ledger, leaves_of: dict[nn.Parameter, nn.Parameter]
    ) -> Window:
        """What is recorded: the same as an eager micro-step, with its totals in the ledger."""
        loss, items = self._loss_of(micro_batch, samples)
        if loss.dtype == torch.float16 and not self._scaled:
            raise NotRecordableError(
                "the loss is in float16, whose sums need a factor of their own; return it in float32"
            )
        multiplier = ledger.multiplier if self._scaled else UNSCALED
        window = Window(number=0, length=1, reduction=self._reduction, multiplier=multiplier)
        if window.counts_for_nothing(items):
            raise _NothingThereError
        require_leaves(loss, leaves_of)
        confinement = confinement_of(reach_of(loss), set(map(id, leaves_of.values())))
        run_confined(loss, window.add(loss, items), confinement)
        ledger.add(window.totals())
        return window

    # ------------------------------------------------------------------------------------------ saying why not

    def refuse(self, why: str) -> None:
        """Record and replay nothing any more, and say why."""
        self._refused = True
        self._warn(eager_message(why))

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=8)


def eager_message(why: str) -> str:
    """What a user is told."""
    return f"cuda_graph=True: micro-steps run eagerly, as without it: {why}."


def _numel(micro_batch: Any) -> int:
    return sum(leaf.numel() for _, leaf in tensors_of(micro_batch))


@contextlib.contextmanager
def _undone(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put back the random numbers and the buffers afterwards."""
    before = Snapshot(models)
    try:
        yield
    finally:
        before.restore()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
