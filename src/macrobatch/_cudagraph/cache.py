"""Decides which micro-batches are recorded as CUDA graphs, once for each shape, and finds their recordings.

A micro-step is the forward and backward of one micro-batch. Its replay takes microseconds of host time, while Python
takes milliseconds.

Shapes are recorded before a window begins, when no gradient exists yet. So the warm-up changes only random number
generators and buffers, which are restored. The first few shapes, and all shapes of a plan with few, are recorded at
once. Any other shape is recorded when it comes for the second time. If something cannot be recorded, it runs eagerly,
and one warning says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import nn

from macrobatch._cudagraph.capture import Capturer, capturer_for
from macrobatch._cudagraph.eligibility import (
    NotRecordableError,
    is_compiled_around_ddp,
    model_state,
    owner_of_hook,
    signature,
    tensors_of,
)
from macrobatch._cudagraph.recorded_step import Recording
from macrobatch._cudagraph.recorder import NoItemsError, Recorder, RestartError, restoring
from macrobatch._cut.memory import is_out_of_memory, release_cached_memory
from macrobatch._engine.engine import Engine
from macrobatch._torch.modules import modules_of
from macrobatch.errors import warn

MAX_SHAPES = 64  # a recording holds the launch parameters of thousands of kernels
MAX_AT_ONCE = 8  # shapes that are recorded when they first come
MAX_WAITING = 256  # shapes that came once: with more of them, hardly any comes again
MAX_TIME_SHARE = 0.9  # of the eager time: slower recordings are not worth their memory

MicroBatch = tuple[Any, int]  # a micro-batch on the device, with its number of samples
Upcoming = Sequence[tuple[Hashable, Callable[[], MicroBatch]]]  # for each its key (`Part.key`), and how to take it


class Slot(NamedTuple):
    """The micro-batches that a recording can replay."""

    shape: Hashable  # their signature
    samples: int | None  # None for any number, if the loss does not depend on it


class RecordingCache:
    """Holds the recordings of a model's micro-steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._model_state: object = None
        self._is_disabled = False  # whether recording has been given up
        self._messages_shown: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Drop all recordings and their memory."""
        self._recordings: dict[Slot, Recording | None] = {}  # None: this shape stays eager
        self._waiting: dict[Slot, Hashable] = {}  # shapes that came once, by their keys
        self._examined: set[Hashable] = set()  # the keys of micro-batches that were examined
        self._ran_out = False  # whether recording a shape of this window ran out of memory
        self._recorder.release_memory()

    @property
    def has_recordings(self) -> bool:
        """Whether there is any recording."""
        return bool(self._replayed())

    def _replayed(self) -> list[Recording]:
        return [recording for recording in self._recordings.values() if recording is not None]

    # ------------------------------------------------------------------------------------------ a window

    def open(self, engine: Engine, upcoming: Upcoming, *, few_shapes: bool) -> None:
        """Before a window: record some of its shapes, if it is worth it, and attach the gradient buffers.

        `few_shapes`: whether the plan of the window has few different shapes.
        """
        parameters = engine.open_store().parameters
        self._check_model(parameters)
        if not self._is_disabled and not self._is_full:
            self._record_upcoming(parameters if self._recorder.has_backward else [], upcoming, few_shapes)
        if self._is_disabled:
            self.forget()
        self._recorder.begin_window(parameters)
        if self._recorder.has_backward:
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

    def close(self, engine: Engine) -> None:
        """Add what was replayed to the window, after its last micro-batch."""
        if self._ran_out:  # the window itself fitted: it would have failed otherwise
            self._ran_out = False
            self._warn("cuda_graph=True: there is not enough memory to record a shape. It runs eagerly.")
        self._recorder.end_window(engine)

    def _slot_of(self, micro_batch: Any, samples: int) -> Slot:
        """The slot of the recording for a micro-batch, if there is one, or of a new one."""
        shape = signature(micro_batch, self._recorder.capturer.device.type)
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
        return (
            f"cuda_graph=True: {MAX_SHAPES} shapes of micro-batches have been tried, and {len(self._replayed())} of "
            "them are replayed; others run eagerly. Use fewer shapes: by_tokens rounds the lengths of a batch of "
            "tensors, and your collate= can pad to one of a few lengths."
        )

    def _check_model(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop all recordings if the models have changed since, and use the capturer of their device."""
        modules, device = modules_of(self._recorder.models), parameters[0].device
        now = model_state(modules)
        if now != self._model_state:
            self.forget()
            self._model_state = now
            if device != self._recorder.capturer.device:
                if (capturer := capturer_for(device)) is None:
                    self.refuse(f"the model is on {device}")
                else:
                    self._recorder.capturer = capturer
        if not self._is_disabled and (what := owner_of_hook(modules, parameters)) is not None:
            self.refuse(f"{what} has a hook, which a replay would skip")

    # ------------------------------------------------------------------------------------------ recording

    def _record_upcoming(self, parameters: Sequence[nn.Parameter], upcoming: Upcoming, few_shapes: bool) -> None:
        found: dict[Slot, MicroBatch] = {}
        awaited = set(self._waiting.values())
        for key, take in upcoming:
            at_once = key not in self._examined and (few_shapes or len(self._recordings) + len(found) < MAX_AT_ONCE)
            if not (key in awaited or at_once):
                continue
            with restoring(self._recorder.models):  # taking a micro-batch may draw random numbers
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
        device = self._recorder.capturer.device
        release_cached_memory(device)
        for slot, micro in sorted(found.items(), key=lambda item: -_numel(item[1][0])):
            is_there = Slot(slot.shape, None) in self._recordings  # made for another number of samples, in this loop
            if not is_there and not self._is_disabled and len(self._recordings) < MAX_SHAPES:
                recording = self._try_to_record(parameters, *micro)  # may drop all other recordings
                self._recordings[slot if self._recorder.counts_samples else Slot(slot.shape, None)] = recording
            self._waiting.pop(slot, None)
        release_cached_memory(device)

    def _try_to_record(self, parameters: Sequence[nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        """Record a shape; None if that fails, or if the recording is not faster."""
        recording, must_restart, refusal, failure = None, False, None, None
        try:
            found, replayed, eager = self._recorder.record(parameters, micro_batch, samples, self._replayed())
            recording = found if replayed < MAX_TIME_SHARE * eager else None
        except RestartError:
            must_restart = True
        except NoItemsError:
            pass
        except NotRecordableError as error:
            refusal = str(error)
        except Exception as error:
            self._ran_out = is_out_of_memory(error)
            failure = None if self._ran_out else _first_line(error)
        # Outside of the except blocks, whose tracebacks keep tensors alive.
        for parameter in parameters:
            parameter.grad = None
        if must_restart:
            self.forget()
            return self._try_to_record(parameters, micro_batch, samples)
        if failure is not None:
            if self._recorder.fused.is_on:
                return self._record_unfused(parameters, micro_batch, samples, failure)
            refusal = f"recording failed: {failure}"
        if refusal is not None:
            self.forget()  # earlier recordings may share what failed
            self.refuse(refusal)
        elif recording is None and not self.has_recordings:
            self._recorder.release_memory()
        return recording

    def _record_unfused(
        self, parameters: Sequence[nn.Parameter], micro_batch: Any, samples: int, why: str
    ) -> Recording | None:
        """Record without fused accumulation from now on, because that failed."""
        self.forget()
        self._recorder.fused.is_on = False
        recording = self._try_to_record(parameters, micro_batch, samples)
        if not self._is_disabled:
            self._warn(f"fuse=True has no effect: micro-steps are recorded without it, because it failed: {why}.")
        return recording

    # ------------------------------------------------------------------------------------------ warnings

    def refuse(self, why: str) -> None:
        """Stop recording and replaying, and warn why."""
        self._is_disabled = True
        self._warn(_eager_message(why))

    def _warn(self, message: str) -> None:
        if message not in self._messages_shown:
            self._messages_shown.add(message)
            warn(message)


def capturer_or_warning(engine: Engine, *, shares_model: bool) -> Capturer | None:
    """The capturer for an engine. If its micro-batches cannot be recorded: None, and a warning that says why."""
    capturer = capturer_for(engine.device)
    if capturer is None:
        why = f"the model is on {engine.device}"
    elif shares_model:
        why = "ranks that share a model communicate inside micro-steps"
    elif not engine.backend.abilities.can_record:
        why = "ranks communicate inside micro-steps. DistributedDataParallel with sync='window' does not"
    elif any(map(is_compiled_around_ddp, engine.models)):
        why = (
            "the model is compiled around DistributedDataParallel, which cannot be left out then. "
            "DistributedDataParallel(torch.compile(model)) can be recorded"
        )
    else:
        return capturer
    warn(_eager_message(why))
    return None


def _eager_message(why: str) -> str:
    return f"cuda_graph=True has no effect: micro-steps run eagerly, because {why}."


def _numel(micro_batch: Any) -> int:
    return sum(leaf.numel() for _, leaf in tensors_of(micro_batch))


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
