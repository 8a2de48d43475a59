"""Records one micro-step at a time, and owns the memory that all recordings of a cache share.

The inputs, gradients and sums (`StaticWindow`) of a recording have fixed addresses. Everything else is in one memory
pool that all recordings share, because no two run at the same time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cudagraph.capture import Capturer, PoolClaim, no_autocast_cache, pause_gc
from macrobatch._cudagraph.eligibility import (
    NotRecordableError,
    SideEffects,
    all_buffers,
    copy_tensors,
    gradient_leaves,
    reached_parameters,
    require_leaves,
    require_no_side_effects,
    tensors_of,
)
from macrobatch._cudagraph.fused import FusedWeights
from macrobatch._cudagraph.recorded_step import Recorded, Recording, StaticWindow
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import Micro
from macrobatch._engine.window import Window
from macrobatch._torch.graph import confinement_of, reach_of, run_confined
from macrobatch._torch.snapshot import Snapshot
from macrobatch._torch.tensors import version_of, zero_all

WARM_UPS = 3

# From a micro-batch, its number of samples and a window to what is differentiated. It must call the models without DDP
# (`without_ddp`), whose Python code a replay would leave out. If it asks for the number of samples, a recording serves
# this number of samples only.
Combine = Callable[[Any, Callable[[], int], Window], Micro]
Leaves = dict[nn.Parameter, nn.Parameter]


class RestartError(Exception):
    """The recordings so far must be dropped."""


class NoItemsError(Exception):
    """A micro-batch has no items, so that an eager micro-step would skip it."""


class Recorder:
    """Records what `_micro_step` of a subclass does."""

    has_backward: bool

    def __init__(self, models: Sequence[nn.Module], capturer: Capturer, *, fuses: bool = False) -> None:
        self.models = models
        self.capturer = capturer
        self.fused = FusedWeights(models, is_on=fuses)
        self.counts_samples = False  # whether the last recording depends on the number of samples
        self._warms_up_outside_pool = False  # whether each shape warms up outside of the pool first
        self.release_memory()

    def release_memory(self) -> None:
        """Forget the memory of all recordings."""
        self._buffers: dict[int, Tensor] = {}  # the gradients, by id of the parameter
        self._versions: dict[int, int] = {}
        self._static: StaticWindow | None = None
        self._pool: Any = None  # exists as long as a recording in it
        self.fused.release_memory()

    # ------------------------------------------------------------------------------------------ one window

    def begin_window(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set ``.grad`` of all recorded parameters to their zeroed buffers; eager micro-steps add to them too."""
        if self._static is not None:
            self._static.clear()
        self.fused.renew()
        with_buffers = [p for p in parameters if id(p) in self._buffers]
        if not with_buffers:
            return
        zero_all([self._buffers[id(p)] for p in with_buffers])
        for parameter in with_buffers:
            parameter.grad = self._buffers[id(parameter)]
            self._versions[id(parameter)] = version_of(self._buffers[id(parameter)])

    def end_window(self, engine: Engine) -> None:
        """Add the sums to the window after its last micro-batch, and detach the buffers that it never used."""
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

    # ------------------------------------------------------------------------------------------ one recording

    def record(
        self, parameters: Sequence[nn.Parameter], micro_batch: Any, samples: int, others: Sequence[Recording]
    ) -> tuple[Recording, float, float]:
        """Record a shape beside the `others`. Returns it, and the milliseconds of a replay and of an eager run."""
        with restoring(self.models), no_autocast_cache(), gradient_leaves(self.models, parameters) as leaves_of:
            return self._record(leaves_of, micro_batch, samples, others)

    def _record(
        self, leaves_of: Leaves, micro_batch: Any, samples: int, others: Sequence[Recording]
    ) -> tuple[Recording, float, float]:
        capturer = self.capturer
        self.counts_samples = False
        static = self._static_for(samples)
        pool = self._pool = self._pool or capturer.new_pool()
        inputs = copy_tensors(micro_batch)

        def unfused() -> Recorded:
            return self._micro_step(inputs, samples, static, leaves_of)

        def micro_step() -> Recorded:
            with self.fused.fusing(leaves_of):
                return unfused()

        with pause_gc(), capturer.claim(pool) as claim:
            for parameter, leaf in leaves_of.items():
                leaf.grad = self._buffer_of(parameter)
            with capturer.warming_up():
                added_to, eager = self._warm_up(unfused, micro_step, leaves_of, claim, is_first=not others)
            for parameter in leaves_of.keys() - added_to:  # it needs no buffer
                leaves_of[parameter].grad = None
                if not any(parameter in other.reached for other in others):
                    del self._buffers[id(parameter)]
            graph, recorded = capturer.capture(micro_step, pool)
        recording = Recording(graph, [leaf for _, leaf in tensors_of(inputs)], self._static, added_to, recorded)
        replayed = min(capturer.milliseconds(lambda: recording.run(micro_batch)) for _ in range(2))
        return recording, replayed, eager

    def _static_for(self, samples: int) -> Any:
        """The memory at fixed addresses to which recordings of so many samples write."""
        raise NotImplementedError

    def _micro_step(self, micro_batch: Any, samples: int, static: Any, leaves_of: Leaves) -> Recorded:
        """Run one micro-step, and write its results to `static`."""
        raise NotImplementedError

    def _count(self, samples: int) -> int:
        """The number of samples, for a micro-step that depends on it."""
        self.counts_samples = True
        return samples

    def _buffer_of(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self._buffers:
            dtype = parameter.grad_dtype or parameter.dtype
            self._buffers[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self._buffers[id(parameter)]

    def _warm_up(
        self,
        unfused: Callable[[], object],
        micro_step: Callable[[], object],
        leaves_of: Leaves,
        claim: PoolClaim,
        *,
        is_first: bool,
    ) -> tuple[set[nn.Parameter], float]:
        """Run a micro-step a few times. Returns the parameters it adds gradients to, and its time in milliseconds.

        The first run is not fused: it shows which weights can be.

        It uses the memory of the pool, to save memory, except for the first recording: a capture may need other sizes
        than its warm-up. But if the model keeps a tensor from there, such as a mask for a length, earlier recordings
        would overwrite it. In this case everything is recorded again.
        """
        device = self.capturer.device
        buffers_before = all_buffers(self.models)
        uses_own_memory = is_first or self._warms_up_outside_pool
        with contextlib.nullcontext() if uses_own_memory else claim.allocating():
            effects = SideEffects(device)
            with self.fused.noting(leaves_of) as uses:
                added_to = reached_parameters(unfused, leaves_of)
            if effects.has_kept_memory() and not uses_own_memory:
                self._warms_up_outside_pool = True
                raise RestartError
        self.fused.prepare(uses)
        times, left = [], []
        with contextlib.nullcontext() if is_first else claim.allocating():
            for _ in range(WARM_UPS - 1):
                effects = SideEffects(device)
                times.append(self.capturer.milliseconds(micro_step))
                left.append(effects.since_start())
        require_no_side_effects(left)
        if not all(map(operator.is_, buffers_before, all_buffers(self.models))):
            raise NotRecordableError("a forward replaces a buffer of the model by another tensor")
        return added_to, min(times)


class MicroStepRecorder(Recorder):
    """Records micro-steps as an eager one would run: a forward, and a backward that adds to buffers of gradients."""

    has_backward = True

    def __init__(
        self,
        models: Sequence[nn.Module],
        capturer: Capturer,
        combine: Combine,
        new_static: Callable[[torch.device], StaticWindow],
        *,
        has_scaler: bool,
        fuses: bool,
    ) -> None:
        super().__init__(models, capturer, fuses=fuses)
        self._combine = combine
        self._new_static = new_static
        self._has_scaler = has_scaler

    def _static_for(self, samples: int) -> StaticWindow:  # noqa: ARG002
        self._static = self._static or self._new_static(self.capturer.device)
        return self._static

    def _micro_step(self, micro_batch: Any, samples: int, static: Any, leaves_of: Leaves) -> Recorded:
        window = static.window()
        micro = self._combine(micro_batch, lambda: self._count(samples), window)
        if not micro.counts or micro.root is None or micro.seed is None:
            raise NoItemsError
        if micro.root.dtype == torch.float16 and not self._has_scaler:
            raise NotRecordableError("the loss is in float16, whose sums need an extra scale; return it in float32")
        require_leaves(micro.root, leaves_of)
        confinement = confinement_of(reach_of(micro.root), set(map(id, leaves_of.values())))
        with self.fused.adding():
            run_confined(micro.root, micro.seed, confinement)
        window.totals.add(micro, window.device)
        return Recorded(window.totals, micro.source)


@contextlib.contextmanager
def restoring(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore random numbers and buffers when the block ends."""
    before = Snapshot(models)
    try:
        yield
    finally:
        before.restore()
