"""Recordings of the two passes of a loss of the whole batch.

The second pass is a micro-step like any other. Its input (`Pull`) is the micro-batch, the gradients of its encodings
and the results of the first pass. The first pass has no backward: a recording of it leaves encodings at fixed
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from macrobatch._border.arguments import checked_items, checked_ordinary
from macrobatch._checks.joint import PassesDiffer
from macrobatch._checks.pass_difference import on_device
from macrobatch._cudagraph.cache import RecordingCache
from macrobatch._cudagraph.capture import Capturer
from macrobatch._cudagraph.eligibility import NotRecordableError
from macrobatch._cudagraph.recorded_step import Recorded, StaticWindow
from macrobatch._cudagraph.recorder import Leaves, MicroStepRecorder, Recorder
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import Micro
from macrobatch._engine.window import Window
from macrobatch._joint.encodings import Layout, take_apart
from macrobatch._joint.objective import Encodings, FirstPass, Pull
from macrobatch._torch.tensors import copy_all, wide
from macrobatch.types import Encoded, Items, Sum


class JointRecordings(NamedTuple):
    """The recordings of both passes."""

    first: RecordingCache
    second: RecordingCache
    encoder: EncodingRecorder  # of the first pass

    @property
    def has_recordings(self) -> bool:
        """Whether there is any recording."""
        return self.first.has_recordings or self.second.has_recordings

    def forget(self) -> None:
        """Drop all recordings and their memory."""
        self.first.forget()
        self.second.forget()

    def refuse(self, why: str) -> None:
        """Stop recording and replaying, and warn why."""
        self.first.refuse(why)
        self.second.refuse(why)

    def expect(self, layout: Layout) -> None:
        """Set what the encodings of the next window look like."""
        self.encoder.layout = layout


def joint_recordings(
    engine: Engine, encode: Callable[[Any], Any], capturer: Capturer, *, has_scaler: bool, fuses: bool
) -> JointRecordings:
    """The recordings of both passes. ``encode(micro_batch)`` returns an `Encoded`."""

    def combine(pull: Pull, samples: Callable[[], int], window: Window) -> Micro:
        encoded = encode(pull.micro_batch)
        _, tensors = take_apart(encoded, samples())
        items = None if pull.ordinary is None else pull.ordinary[1]
        encodings = Encodings.of(pull, tensors, encoded, items, samples())
        micro = engine.objective.combine(encodings, None, window, repeats=False)
        if micro.root is None:
            raise NotRecordableError("no encoding has a graph")
        return micro

    def new_static(device: torch.device) -> StaticWindow:
        both = FirstPass(1, torch.ones(3, device=device, dtype=wide(device)), True).denominators(device)
        notes = {PassesDiffer.NOTE: torch.zeros((), device=device, dtype=wide(device))}
        return StaticWindow(device, both, weighs=False, has_scaler=has_scaler, notes=notes)

    encoder = EncodingRecorder(engine.models, capturer, encode)
    second = MicroStepRecorder(engine.models, capturer, combine, new_static, has_scaler=has_scaler, fuses=fuses)
    return JointRecordings(RecordingCache(encoder), RecordingCache(second), encoder)


class EncodingRecorder(Recorder):
    """Records first passes: only the forward, whose encodings are stored at fixed addresses."""

    has_backward = False
    layout: Layout  # of the encodings

    def __init__(self, models: Sequence[nn.Module], capturer: Capturer, encode: Callable[[Any], Any]) -> None:
        super().__init__(models, capturer)
        self._encode = encode

    def release_memory(self) -> None:
        super().release_memory()
        self._found: dict[int, StaticEncoding] = {}  # by number of samples

    def _static_for(self, samples: int) -> StaticEncoding:
        if samples not in self._found:
            self._found[samples] = StaticEncoding.of(self.layout, samples, self.capturer.device)
        return self._found[samples]

    @torch.no_grad()
    def _micro_step(self, micro_batch: Any, samples: int, static: Any, leaves_of: Leaves) -> Recorded:  # noqa: ARG002
        encoded = self._encode(micro_batch)
        layout, tensors = take_apart(encoded, self._count(samples))
        if layout != self.layout:
            raise NotRecordableError("encodings look otherwise than before")
        static.store(tensors, encoded.loss, encoded.items)
        return Recorded(output=partial(static.encoded, layout, static.items))


@dataclass
class StaticEncoding:
    """The outputs of a recorded first pass, at fixed addresses. The next replay overwrites them."""

    tensors: list[Tensor]
    loss: Tensor  # the ordinary loss, if there is any
    number: Tensor  # the number of its items, if only the device knows it
    items: Items | torch.dtype = None  # what the host knows of the items: their number, or their dtype

    @staticmethod
    def of(layout: Layout, samples: int, device: torch.device) -> StaticEncoding:
        shapes = [field.shape if field.is_sum else (samples, *field.shape) for field in layout.fields]
        tensors = [torch.empty(s, dtype=f.dtype, device=device) for s, f in zip(shapes, layout.fields, strict=True)]
        return StaticEncoding(tensors, *torch.zeros(2, dtype=wide(device), device=device).unbind())

    def store(self, tensors: Sequence[Tensor], loss: Tensor | None, items: Items) -> None:
        """Copy the results of a forward to the fixed addresses. Recordings contain this call."""
        pairs = [(static, on_device(t, static.device)) for t, static in zip(tensors, self.tensors, strict=True)]
        copy_all([static for static, _ in pairs], [t.to(static.dtype) for static, t in pairs])
        if loss is None:
            return
        self.loss.copy_(checked_ordinary(loss, needs_graph=False).reshape(()))
        self.items = checked_items(items)
        if isinstance(self.items, Tensor):
            self.number.copy_(self.items.reshape(()))
            self.items = self.items.dtype

    def encoded(self, layout: Layout, items: Items | torch.dtype) -> Encoded:
        """The encodings of the last replay, of a recording whose items are known like this."""
        fields = zip(self.tensors, layout.fields, strict=True)
        encoded = layout.encoded([Sum(tensor) if field.is_sum else tensor for tensor, field in fields])
        if layout.has_loss:
            encoded.loss = self.loss.clone()
            encoded.items = self.number.to(items, copy=True) if isinstance(items, torch.dtype) else items
        return encoded
