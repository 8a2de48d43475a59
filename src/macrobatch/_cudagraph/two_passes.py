"""Recordings of the two passes of a loss of the whole batch.

The second pass is a micro-step like any other. Its input (`Bundle`) is the micro-batch, the gradients of its encodings
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

from macrobatch._cudagraph.cache import MicroBatch, RecordingCache
from macrobatch._cudagraph.capture import Graph
from macrobatch._cudagraph.eligibility import NotRecordableError
from macrobatch._cudagraph.recorded_step import Recording, StaticTotals
from macrobatch._step.encodings import Layout, take_apart
from macrobatch._step.joint_window import FirstPass, JointWindow, share_of
from macrobatch._step.pass_difference import is_all_double, on_device
from macrobatch._step.totals import Window, wide
from macrobatch._step.validation import checked_items, checked_ordinary
from macrobatch._torch.tensors import copy_all
from macrobatch.types import Encoded, Items, Sum

Upcoming = Sequence[tuple[Hashable, Callable[[], MicroBatch]]]


class StaticJointTotals(StaticTotals):
    """The totals that recordings of the second pass read, and the number of differences between the passes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ordinary = torch.ones(3, device=device, dtype=wide(device))

    def begin(self, window: Window) -> None:
        super().begin(window)
        assert isinstance(window, JointWindow)
        if window.ordinary is not None:
            self.ordinary.copy_(window.ordinary)


class SecondPassCache(RecordingCache):
    """Holds the recordings of second passes. Their micro-batches are of type `Bundle`."""

    def _new_totals(self) -> StaticTotals:
        return StaticJointTotals(self._capturer.device)

    def _forward(self, micro_batch: Any, samples: int, totals: StaticTotals) -> tuple[Window, Tensor, Any]:
        assert isinstance(totals, StaticJointTotals)
        encoded, _ = self._loss_of(micro_batch.micro_batch, partial(self._count, samples))
        _, tensors = take_apart(encoded, self._count(samples))
        window = JointWindow(number=0, length=1, reduction=self._reduction, multiplier=self._multiplier(totals))
        window.expect(FirstPass(0, totals.ordinary, True, is_all_double(self._models)), self._capturer.device)
        items = None if micro_batch.ordinary is None else micro_batch.ordinary[1]
        weighed = window.weigh(share_of(micro_batch, tensors, encoded, items, samples))
        if weighed.loss is None:
            raise NotRecordableError("no encoding has a graph")
        return window, weighed.loss, weighed


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

    def __init__(self, graph: Graph, inputs: list[Tensor], totals: StaticTotals, layout: Layout, found: StaticEncoding):
        super().__init__(graph, inputs, totals, set(), 0)
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

    def open_first(
        self, parameters: Sequence[nn.Parameter], layout: Layout, upcoming: Upcoming, *, few_shapes: bool
    ) -> None:
        """Record shapes of the window that begins, if it is worth it. `layout` describes their encodings."""
        self._check_model(parameters)
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
        totals: StaticTotals,  # noqa: ARG002
        leaves_of: dict[nn.Parameter, nn.Parameter],  # noqa: ARG002
    ) -> Window:
        """Run only the forward, and store its encodings at fixed addresses."""
        encoded, _ = self._loss_of(micro_batch, partial(self._count, samples))
        layout, tensors = take_apart(encoded, self._count(samples))
        if layout != self._layout:
            raise NotRecordableError("encodings look otherwise than before")
        self._found[samples].store(tensors, encoded.loss, encoded.items)
        return Window(number=0, length=1, reduction=self._reduction)

    def _recording(
        self,
        graph: Graph,
        inputs: list[Tensor],
        totals: StaticTotals,
        reached: set[nn.Parameter],  # noqa: ARG002
        window: Window,  # noqa: ARG002
    ) -> Recording:
        return RecordedEncoding(graph, inputs, totals, self._layout, self._found[self._samples])


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
