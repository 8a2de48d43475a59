"""Records micro-batches as CUDA graphs, once for each shape, and replays them.

A micro-step is the forward and backward of one micro-batch. Its replay takes microseconds of host time, while Python
takes milliseconds. The inputs, gradients and sums (`StaticWindow`) of a recording have fixed addresses. Everything
else is in one memory pool that all recordings share, because no two run at the same time.

Shapes are recorded before a window begins, when no gradient exists yet. So the warm-up changes only random number
generators and buffers, which are restored. The first few shapes, and all shapes of a plan with few, are recorded at
once. Any other shape is recorded when it comes for the second time. If something cannot be recorded, it runs eagerly,
and one warning says why.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Capturer, Graph, PoolClaim, capturer_for, no_autocast_cache, pause_gc
from macrobatch._cudagraph.eligibility import (
    NotRecordableError,
    SideEffects,
    all_buffers,
    copy_tensors,
    gradient_leaves,
    model_state,
    owner_of_hook,
    reached_parameters,
    require_leaves,
    require_no_side_effects,
    signature,
    tensors_of,
)
from macrobatch._cudagraph.recorded_step import Recording, StaticWindow
from macrobatch._cut.memory import is_out_of_memory, release_cached_memory
from macrobatch._engine.engine import Engine
from macrobatch._engine.objectives import Objective
from macrobatch._engine.totals import Denominators, Micro, Totals
from macrobatch._engine.window import Window
from macrobatch._torch.graph import confinement_of, reach_of, run_confined
from macrobatch._torch.modules import modules_of
from macrobatch._torch.snapshot import Snapshot
from macrobatch._torch.tensors import version_of, zero_all
from macrobatch.errors import warn

MAX_SHAPES = 64  # a recording holds the launch parameters of thousands of kernels
MAX_AT_ONCE = 8  # shapes that are recorded when they first come
MAX_WAITING = 256  # shapes that came once: with more of them, hardly any comes again
WARM_UPS = 3
MAX_TIME_SHARE = 0.9  # of the eager time: slower recordings are not worth their memory

MicroBatch = tuple[Any, int]  # a micro-batch on the device, with its number of samples
LossFunction = Callable[[Any, Callable[[], int]], tuple[Any, Any, bool]]


class Slot(NamedTuple):
    """The micro-batches that a recording can replay.

    Attributes:
        shape: the signature of the micro-batches.
        samples: their number of samples; None for any number, if the loss does not depend on it.
    """

    shape: Hashable
    samples: int | None


class Recorded(NamedTuple):
    """What the host knows of the items of a recorded micro-batch, and whether the program gives them."""

    totals: Totals
    is_counted: bool | None = None


class _RestartError(Exception):
    """The recordings so far must be dropped."""


class _NoItemsError(Exception):
    """A micro-batch has no items, so that an eager micro-step would skip it."""


class RecordingCache:
    """Holds the recordings of a model's micro-steps.

    Args:
        models: the models that are trained.
        loss_of: ``loss_of(micro_batch, samples)`` returns what the objective gets, its items, and whether these are
            samples. It must call the models without DDP (`without_ddp`), whose Python code a replay would leave out. If
            it calls ``samples()``, for the number of samples, a recording serves this number of samples only.
        objective: what is differentiated.
        has_scaler: whether a scaler multiplies the losses.
        capturer: the capturer for the models' device.
        denominators: returns the denominators of the window that begins, if losses are dicts of terms.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss_of: LossFunction,
        objective: Objective,
        *,
        has_scaler: bool,
        capturer: Capturer,
        denominators: Callable[[], Denominators] | None = None,
    ) -> None:
        self._models = models
        self._loss_of = loss_of
        self._objective = objective
        self._has_scaler = has_scaler
        self._denominators = denominators
        self._capturer = capturer
        self._model_state: object = None
        self._counts_samples = False  # whether the loss of the last recording depends on the number of samples
        self._is_disabled = False  # whether recording has been given up
        self._warms_up_outside_pool = False  # whether each shape warms up outside of the pool first
        self._messages_shown: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Drop all recordings and their memory."""
        self._recordings: dict[Slot, Recording | None] = {}  # None: this shape stays eager
        self._waiting: dict[Slot, Hashable] = {}  # shapes that came once, by their keys
        self._examined: set[Hashable] = set()  # the keys of micro-batches that were examined
        self._ran_out = False  # whether recording a shape of this window ran out of memory
        self._release_memory()

    def _release_memory(self) -> None:
        self._buffers: dict[int, Tensor] = {}  # the gradients, by id of the parameter
        self._versions: dict[int, int] = {}
        self._static: StaticWindow | None = None
        self._pool: Any = None  # exists as long as a recording in it

    @property
    def has_recordings(self) -> bool:
        """Whether there is any recording."""
        return any(recording is not None for recording in self._recordings.values())

    # ------------------------------------------------------------------------------------------ a window

    def open(
        self,
        engine: Engine,
        upcoming: Sequence[tuple[Hashable, Callable[[], MicroBatch]]],
        *,
        few_shapes: bool,
        layout: Any = None,  # noqa: ARG002
    ) -> None:
        """Record shapes of the window that begins, if it is worth it, and attach the gradient buffers.

        Args:
            engine: the engine. No gradient of its window exists yet.
            upcoming: for each micro-batch its key (`Part.key`), and a function that returns it.
            few_shapes: whether the plan of the window has few different shapes.
            layout: what encodings look like, for recordings of first passes.
        """
        parameters = engine.open_store().parameters
        self._check_model(parameters)
        if not self._is_disabled and not self._is_full:
            self._record_upcoming(parameters, upcoming, few_shapes)
        if self._is_disabled and self._buffers:
            self.forget()
        if self._static is not None:
            self._static.clear()
        self._attach_buffers(parameters)
        engine.accept_gradients()

    def find(self, micro_batch: Any, samples: int, key: Hashable) -> Recording | None:
        """The recording for a micro-batch; None if it must run eagerly."""
        if self._is_disabled:
            return None
        try:
            slot = self._slot_of(micro_batch, samples)
        except NotRecordableError as why:
            self.refuse(str(why))
            return None
        if slot in self._recordings:
            return self._recordings[slot]
        if not self._is_full:
            self._waiting[slot] = key
        if self._is_full:
            self._warn(self._why_full())
        return None

    def _slot_of(self, micro_batch: Any, samples: int) -> Slot:
        """The slot of the recording for a micro-batch, if there is one, or of a new one."""
        shape = signature(micro_batch, self._capturer.device.type)
        return Slot(shape, None) if Slot(shape, None) in self._recordings else Slot(shape, samples)

    @property
    def _is_full(self) -> bool:
        return len(self._recordings) >= MAX_SHAPES or len(self._waiting) >= MAX_WAITING

    def _why_full(self) -> str:
        if len(self._recordings) < MAX_SHAPES:
            return (
                f"cuda_graph=True: {MAX_WAITING} shapes of micro-batches came only once, so other shapes run eagerly. "
                "Each new number or text in a batch counts as another shape: put numbers into tensors."
            )
        replayed = sum(recording is not None for recording in self._recordings.values())
        return (
            f"cuda_graph=True: {MAX_SHAPES} shapes of micro-batches have been tried, and {replayed} of them are "
            "replayed; others run eagerly. Use fewer shapes: by_tokens rounds the lengths of a batch of tensors, and "
            "your collate= can pad to one of a few lengths."
        )

    def close(self, engine: Engine) -> None:
        """Add the sums to the window after its last micro-batch, and detach the buffers that it never used."""
        if self._ran_out:  # the window itself fitted: it would have failed otherwise
            self._ran_out = False
            self._warn("cuda_graph=True: there is not enough memory to record a shape. It runs eagerly.")
        if self._static is None or engine.window is None:
            return
        added_to = {id(p) for recording in self._static.used for p in recording.reached}
        if added_to:
            self._static.add_to(engine.window)
        for parameter in engine.store.parameters:
            buffer = self._buffers.get(id(parameter))
            if buffer is None or parameter.grad is not buffer or id(parameter) in added_to:
                continue
            if version_of(buffer) == self._versions[id(parameter)]:  # no eager micro-step wrote to it
                parameter.grad = None
        engine.accept_gradients()

    def _attach_buffers(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set ``.grad`` of all recorded parameters to their zeroed buffers; eager micro-steps add to them too."""
        with_buffers = [p for p in parameters if id(p) in self._buffers]
        if not with_buffers:
            return
        zero_all([self._buffers[id(p)] for p in with_buffers])
        for parameter in with_buffers:
            parameter.grad = self._buffers[id(parameter)]
            self._versions[id(parameter)] = version_of(self._buffers[id(parameter)])

    def _check_model(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop all recordings if the models have changed since."""
        modules = modules_of(self._models)
        now = model_state(modules)
        if now != self._model_state:
            self.forget()
            self._model_state = now
            self._follow_device(parameters[0].device)
        if not self._is_disabled and (what := owner_of_hook(modules, parameters)) is not None:
            self.refuse(f"{what} has a hook, which a replay would skip")

    def _follow_device(self, device: torch.device) -> None:
        """Use the capturer of the models' device."""
        if device != self._capturer.device:
            if (capturer := capturer_for(device)) is None:
                self.refuse(f"the model is on {device}")
            else:
                self._capturer = capturer

    # ------------------------------------------------------------------------------------------ recording

    def _record_upcoming(
        self,
        parameters: Sequence[nn.Parameter],
        upcoming: Sequence[tuple[Hashable, Callable[[], MicroBatch]]],
        few_shapes: bool,
    ) -> None:
        found: dict[Slot, MicroBatch] = {}
        awaited = set(self._waiting.values())
        for key, take in upcoming:
            at_once = key not in self._examined and (few_shapes or len(self._recordings) + len(found) < MAX_AT_ONCE)
            if not (key in awaited or at_once):
                continue
            with _restoring(self._models):  # taking a micro-batch may draw random numbers
                micro_batch, samples = take()
            try:
                slot = self._slot_of(micro_batch, samples)
            except NotRecordableError as why:
                self.refuse(str(why))
                return
            if slot not in self._recordings and (at_once or slot in self._waiting):
                found.setdefault(slot, (micro_batch, samples))
        self._examined.update(key for key, _ in upcoming)
        if not found:
            return
        device = self._capturer.device
        release_cached_memory(device)
        for slot, micro in sorted(found.items(), key=lambda item: -_numel(item[1][0])):
            is_there = Slot(slot.shape, None) in self._recordings  # made for another number of samples, in this loop
            if not is_there and not self._is_disabled and len(self._recordings) < MAX_SHAPES:
                recording = self._try_to_record(parameters, *micro)  # may drop all other recordings
                self._recordings[slot if self._counts_samples else Slot(slot.shape, None)] = recording
            self._waiting.pop(slot, None)
        release_cached_memory(device)

    def _try_to_record(self, parameters: Sequence[nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        """Record a shape; None if that fails, or if the recording is not faster."""
        recording, must_restart, refusal = None, False, None
        try:
            with _restoring(self._models), no_autocast_cache(), gradient_leaves(self._models, parameters) as leaves_of:
                recording = self._record(leaves_of, micro_batch, samples)
        except _RestartError:
            must_restart = True
        except _NoItemsError:
            pass
        except NotRecordableError as error:
            refusal = str(error)
        except Exception as error:
            self._ran_out = is_out_of_memory(error)
            refusal = None if self._ran_out else f"recording failed: {_first_line(error)}"
        # Outside of the except blocks, whose tracebacks keep tensors alive.
        for parameter in parameters:
            parameter.grad = None
        if must_restart:
            self.forget()
            self._warms_up_outside_pool = True
            return self._try_to_record(parameters, micro_batch, samples)
        if refusal is not None:
            self.forget()  # earlier recordings may share what failed
            self.refuse(refusal)
        elif recording is None and not self.has_recordings:
            self._release_memory()
        return recording

    def _record(self, leaves_of: dict[nn.Parameter, nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        capturer = self._capturer
        self._counts_samples = False
        static_window = self._static = self._static or self._new_static()
        pool = self._pool = self._pool or capturer.new_pool()
        static = copy_tensors(micro_batch)

        def micro_step() -> Recorded:
            return self._micro_step(static, samples, static_window, leaves_of)

        with pause_gc(), capturer.claim(pool) as claim:
            for parameter, leaf in leaves_of.items():
                leaf.grad = self._buffer_of(parameter)
            with capturer.warming_up():
                added_to, eager = self._warm_up(micro_step, leaves_of, claim)
            for parameter in leaves_of.keys() - added_to:  # it needs no buffer
                leaves_of[parameter].grad = None
                if not self._is_reached(parameter):
                    del self._buffers[id(parameter)]
            graph, recorded = capturer.capture(micro_step, pool)
        inputs = [leaf for _, leaf in tensors_of(static)]
        recording = self._recording(graph, inputs, static_window, added_to, recorded)
        replayed = min(capturer.milliseconds(lambda: recording.run(micro_batch)) for _ in range(2))
        return recording if replayed < MAX_TIME_SHARE * eager else None

    def _recording(
        self, graph: Graph, inputs: list[Tensor], static: StaticWindow, reached: set[nn.Parameter], recorded: Recorded
    ) -> Recording:
        return Recording(graph, inputs, static, reached, *recorded)

    def _new_static(self) -> StaticWindow:
        denominators = None if self._denominators is None else self._denominators()
        is_mean, has_scaler = self._objective.is_mean, self._has_scaler
        return StaticWindow(self._capturer.device, denominators, weighs=is_mean, has_scaler=has_scaler)

    def _warm_up(
        self, micro_step: Callable[[], object], leaves_of: dict[nn.Parameter, nn.Parameter], claim: PoolClaim
    ) -> tuple[set[nn.Parameter], float]:
        """Run a micro-step a few times. Returns the parameters it adds gradients to, and its time in milliseconds.

        It uses the memory of the pool, to save memory. But if the model keeps a tensor from there, such as a mask for a
        length, earlier recordings would overwrite it. In this case everything is recorded again.
        """
        device = self._capturer.device
        buffers_before = all_buffers(self._models)
        is_first = not self.has_recordings  # a capture may need other sizes than the warm-up, which uses normal memory
        uses_own_memory = is_first or self._warms_up_outside_pool
        with contextlib.nullcontext() if uses_own_memory else claim.allocating():
            effects = SideEffects(device)
            added_to = reached_parameters(micro_step, leaves_of)
            if effects.has_kept_memory() and not uses_own_memory:
                raise _RestartError
        times, left = [], []
        with contextlib.nullcontext() if is_first else claim.allocating():
            for _ in range(WARM_UPS - 1):
                effects = SideEffects(device)
                times.append(self._capturer.milliseconds(micro_step))
                left.append(effects.since_start())
        require_no_side_effects(left)
        if not all(map(operator.is_, buffers_before, all_buffers(self._models))):
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
        self, micro_batch: Any, samples: int, static: StaticWindow, leaves_of: dict[nn.Parameter, nn.Parameter]
    ) -> Recorded:
        """Run one micro-step as an eager one would, and add it to the static sums."""
        window = static.window()
        micro = self._combine(micro_batch, samples, window)
        if not micro.counts or micro.root is None or micro.seed is None:
            raise _NoItemsError
        if micro.root.dtype == torch.float16 and not self._has_scaler:
            raise NotRecordableError("the loss is in float16, whose sums need an extra scale; return it in float32")
        require_leaves(micro.root, leaves_of)
        confinement = confinement_of(reach_of(micro.root), set(map(id, leaves_of.values())))
        run_confined(micro.root, micro.seed, confinement)
        window.totals.add(micro, window.device)
        return Recorded(window.totals, micro.is_counted)

    def _combine(self, micro_batch: Any, samples: int, window: Window) -> Micro:
        given, items, are_samples = self._loss_of(micro_batch, partial(self._count, samples))
        return self._objective.combine(given, items, window, repeats=False, are_samples=are_samples)

    def _count(self, samples: int) -> int:
        """The number of samples, for a loss that depends on it."""
        self._counts_samples = True
        return samples

    # ------------------------------------------------------------------------------------------ warnings

    def refuse(self, why: str) -> None:
        """Stop recording and replaying, and warn why."""
        self._is_disabled = True
        self._warn(eager_message(why))

    def _warn(self, message: str) -> None:
        if message not in self._messages_shown:
            self._messages_shown.add(message)
            warn(message)


def eager_message(why: str) -> str:
    """The warning when micro-steps run eagerly."""
    return f"cuda_graph=True has no effect: micro-steps run eagerly, because {why}."


def _numel(micro_batch: Any) -> int:
    return sum(leaf.numel() for _, leaf in tensors_of(micro_batch))


@contextlib.contextmanager
def _restoring(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore random numbers and buffers when the block ends."""
    before = Snapshot(models)
    try:
        yield
    finally:
        before.restore()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
