"""Recordings of the two passes of a loss of the whole batch.

The second pass is a micro-step like any other. Its input (`Pull`) is the micro-batch, the gradients of its encodings
and the results of the first pass. The first pass has no backward: a recording of it leaves encodings at fixed
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._border.arguments import checked_items, checked_ordinary
from macrobatch._checks.joint import PassesDiffer
from macrobatch._checks.pass_difference import on_device
from macrobatch._cudagraph.cache import MicroBatch, Recorded, RecordingCache
from macrobatch._cudagraph.capture import Graph
from macrobatch._cudagraph.eligibility import NotRecordableError
from macrobatch._cudagraph.recorded_step import Recording, StaticWindow
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import Micro, Totals
from macrobatch._engine.window import Window
from macrobatch._joint.encodings import Layout, take_apart
from macrobatch._joint.objective import Encodings, FirstPass
from macrobatch._torch.tensors import copy_all, wide
from macrobatch.types import Encoded, Items, Sum

Upcoming = Sequence[tuple[Hashable, Callable[[], MicroBatch]]]


class SecondPassCache(RecordingCache):
    """Holds the recordings of second passes. Their micro-batches are of type `Pull`."""

    def _new_static(self) -> StaticWindow:
        device = self._capturer.device
        both = FirstPass(1, torch.ones(3, device=device, dtype=wide(device)), True).denominators(device)
        notes = (PassesDiffer.NOTE,)
        return StaticWindow(device, both, weighs=False, has_scaler=self._has_scaler, notes=notes)

    def _combine(self, micro_batch: Any, samples: int, window: Window) -> Micro:
        encoded, _, _ = self._loss_of(micro_batch.micro_batch, partial(self._count, samples))
        _, tensors = take_apart(encoded, self._count(samples))
        items = None if micro_batch.ordinary is None else micro_batch.ordinary[1]
        encodings = Encodings.of(micro_batch, tensors, encoded, items, samples)
        micro = self._objective.combine(encodings, None, window, repeats=False)
        if micro.root is None:
            raise NotRecordableError("no encoding has a graph")
        return micro


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


class RecordedEncoding(Recording):
    """The recorded first pass of a micro-batch."""

    def __init__(self, graph: Graph, inputs: list[Tensor], static: StaticWindow, layout: Layout, found: StaticEncoding):
        super().__init__(graph, inputs, static, set(), Totals(0, weighs=False))
        self._layout = layout
        self._found = found
        self._items = found.items

    def encode(self, micro_batch: object) -> Encoded:
        """The encodings of a micro-batch, valid until the next call."""
        self.run(micro_batch)
        found = self._found
        fields = zip(found.tensors, self._layout.fields, strict=True)
        encoded = self._layout.encoded([Sum(tensor) if field.is_sum else tensor for tensor, field in fields])
        if self._layout.has_loss:
            encoded.loss = found.loss.clone()
            dtype = self._items
            encoded.items = found.number.to(dtype, copy=True) if isinstance(dtype, torch.dtype) else dtype
        return encoded


class FirstPassCache(RecordingCache):
    """Holds the recordings of first passes."""

    _layout: Layout  # of the encodings

    def _release_memory(self) -> None:
        super()._release_memory()
        self._found: dict[int, StaticEncoding] = {}  # by number of samples

    def open(self, engine: Engine, upcoming: Upcoming, *, few_shapes: bool, layout: Any = None) -> None:
        """Record shapes of the window that begins, if it is worth it."""
        self._check_model(engine.open_store().parameters)
        self._layout = layout
        if not self._is_disabled and not self._is_full:
            self._record_upcoming([], upcoming, few_shapes)

    def _record(self, leaves_of: dict[nn.Parameter, nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        if samples not in self._found:
            self._found[samples] = StaticEncoding.of(self._layout, samples, self._capturer.device)
        self._samples = samples
        return super()._record(leaves_of, micro_batch, samples)

    @torch.no_grad()
    def _micro_step(
        self,
        micro_batch: Any,
        samples: int,
        static: StaticWindow,  # noqa: ARG002
        leaves_of: dict[nn.Parameter, nn.Parameter],  # noqa: ARG002
    ) -> Recorded:
        """Run only the forward, and store its encodings at fixed addresses."""
        encoded, _, _ = self._loss_of(micro_batch, partial(self._count, samples))
        layout, tensors = take_apart(encoded, self._count(samples))
        if layout != self._layout:
            raise NotRecordableError("encodings look otherwise than before")
        self._found[samples].store(tensors, encoded.loss, encoded.items)
        return Recorded(Totals(0, weighs=False))

    def _recording(
        self,
        graph: Graph,
        inputs: list[Tensor],
        static: StaticWindow,
        reached: set[nn.Parameter],  # noqa: ARG002
        recorded: Recorded,  # noqa: ARG002
    ) -> Recording:
        return RecordedEncoding(graph, inputs, static, self._layout, self._found[self._samples])


class JointRecordings:
    """The recordings of both passes.

    Args:
        first: the recordings of first passes.
        second: the recordings of second passes.
    """

    def __init__(self, first: FirstPassCache, second: SecondPassCache) -> None:
        self.first = first
        self.second = second

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
