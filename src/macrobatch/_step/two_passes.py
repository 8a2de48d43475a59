"""Losses of the whole batch, in two passes over its micro-batches.

First each is encoded without a graph. Of all ranks' encodings comes the loss, and its gradient for every encoding. Then
each micro-batch goes forward again, with the random numbers and buffers that it had, and backward from the gradients of
its encodings. `TwoPasses.run` is the main path.

The second pass takes the micro-batches from the last to the first: in this order the backward of one graph of all of
them would come to them, so that gradients add up to the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from macrobatch._cut.memory import is_out_of_memory, requested_memory
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import Cut
from macrobatch._ranks.collectives import all_gather_objects, broadcast_object
from macrobatch._ranks.fsdp1 import FSDP1
from macrobatch._step import validation
from macrobatch._step.encodings import (
    Exchange,
    Layout,
    in_batch_order,
    require_same_layout,
    rows_at,
    take_apart,
    total_of,
)
from macrobatch._step.engine import Engine
from macrobatch._step.gradients import Gradients
from macrobatch._step.joint_window import Bundle, FirstPass, Share
from macrobatch._step.kept_graphs import KeptGraphs
from macrobatch._step.snapshot import History, Random, gpus_of, modules_of
from macrobatch._step.totals import Window, is_zero, wide
from macrobatch._step.turns import Turn
from macrobatch._torch.modules import BatchNorm
from macrobatch.errors import BackendError, BatchError, FitError, counted
from macrobatch.types import Encoded, Items

Coming = Sequence[tuple[Hashable, Callable[[], tuple[Any, int]]]]
# Those of these parts of the batch, each with its number of samples. Without a part, one that counts for nothing.
MicroBatches = Callable[[Sequence[Part | None]], Iterable[tuple[Any, int]]]


@dataclass
class _Own:
    """What the first pass found on this rank, micro-batch by micro-batch."""

    history: History
    layout: Layout | None = None
    tensors: list[list[Tensor]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    numbers: Tensor | None = None  # those items on the device

    def add(self, encoded: object, samples: int) -> None:
        layout, tensors = take_apart(encoded, samples)
        assert isinstance(encoded, Encoded)
        if self.layout is None:
            self.layout = layout
        require_same_layout(self.layout, layout, "in the first", f"in micro-batch {len(self.tensors) + 1}")
        # Copies: a row of a larger tensor would keep all of it.
        self.tensors.append([tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors])
        if encoded.loss is None:
            return
        if self.items and (self.items[0][1] is None) != (encoded.items is None):
            raise BatchError("Encoded must hold items for every micro-batch of a batch, or for none.")
        items = validation.checked_items(encoded.items)
        self.losses.append(validation.checked_value(encoded.loss).detach().reshape(()))
        self.items.append((samples if items is None else items, items))

    def items_of(self, index: int) -> Items:
        """Of the ordinary loss of a micro-batch."""
        found: Items = self.items[index][0] if self.items else None
        return found

    def number(self, index: int) -> Tensor | None:
        """The same on the device."""
        return None if self.numbers is None else self.numbers[index]

    @property
    def is_whole(self) -> bool:
        """Whether no count of items may be a fraction."""
        counts = [self.items_of(index) for index in range(len(self.items))]
        return all(isinstance(n, int) or (isinstance(n, Tensor) and not n.is_floating_point()) for n in counts)

    def ordinary(self, device: torch.device, *, is_mean: bool) -> Tensor:
        """The sum of the ordinary losses, of their items, and how many counts were bad."""
        dtype = wide(device)
        if not self.losses:
            return torch.zeros(3, device=device, dtype=dtype)
        losses = torch.stack([loss.to(device, dtype, non_blocking=True) for loss in self.losses])
        counts = [self.items_of(index) for index in range(len(self.items))]
        if any(isinstance(count, Tensor) for count in counts):
            numbers = torch.stack([_number(count, device, dtype) for count in counts])
        else:
            numbers = torch.tensor(counts, dtype=dtype, device="cpu").to(device, non_blocking=True)
        self.numbers = numbers
        if is_mean:  # one over no items is NaN, and counts for nothing
            losses = losses.masked_fill(numbers == 0, 0) * numbers
        bad = ~(torch.isfinite(numbers) & (numbers >= 0))
        return torch.stack([losses.sum(), numbers.sum(), bad.to(dtype).sum()])


@dataclass(frozen=True)
class _Whole:
    """The encodings of all ranks.

    Attributes:
        layout: what they look like.
        tensors: the rows of the whole batch, and totals.
        start: where this rank's rows begin.
        random: the first rank's random numbers, for the loss.
        first: what else the first pass has counted.
    """

    layout: Layout
    tensors: list[Tensor]
    start: int
    random: Random
    first: FirstPass


class Recorded(Protocol):
    """A recorded first pass."""

    def encode(self, micro_batch: object) -> Encoded:
        """The encodings of a micro-batch, valid until the next."""


class FirstRecordings(Protocol):
    """The recordings of first passes."""

    def open_first(
        self, parameters: Sequence[nn.Parameter], layout: Layout, upcoming: Coming, *, few_shapes: bool
    ) -> None:
        """Record shapes of the window that begins. Encodings look as `layout` says."""

    def find(self, micro_batch: Any, samples: int, key: Hashable) -> Any:
        """The recording for a micro-batch; None if it must run eagerly."""


class SecondRecordings(Protocol):
    """The recordings of second passes, whose micro-batches are `Bundle`."""

    def open(self, gradients: Gradients, upcoming: Coming, *, few_shapes: bool) -> None:
        """Record shapes of the window that begins, and attach the gradient buffers."""

    def find(self, micro_batch: Any, samples: int, key: Hashable) -> Any:
        """The recording for a micro-batch; None if it must run eagerly."""

    def close(self, gradients: Gradients, window: Window | None) -> None:
        """Add what they counted to the window."""


class Recordings(Protocol):
    """Those of both passes."""

    @property
    def first(self) -> FirstRecordings:
        """Of first passes."""

    @property
    def second(self) -> SecondRecordings:
        """Of second passes."""


class TwoPasses:
    """Does windows whose loss is one of the whole batch.

    Args:
        engine: on which they are done.
        encode: ``encode(micro_batch)`` returns an `Encoded`.
        joint: ``joint(encoded)`` returns the loss of the whole batch.
        agree: called by all ranks of a held window before they exchange anything: it raises if one has failed.
        recordings: of passes, where they can be recorded. That begins with the second window: the first shows what
            encodings look like, and which of them have gradients.
        few_shapes: whether batches are cut into few different shapes.
        kept: graphs of first passes, where memory allows some to be kept.
    """

    def __init__(
        self,
        engine: Engine,
        encode: Callable[[Any], object],
        joint: Callable[[Encoded], object],
        agree: Callable[[], None],
        *,
        recordings: Recordings | None = None,
        few_shapes: bool = False,
        kept: KeptGraphs | None = None,
    ) -> None:
        if isinstance(engine.backend, FSDP1):
            raise BackendError(
                "joint= needs DistributedDataParallel or fully_shard: under FullyShardedDataParallel nobody can use "
                "parameters outside of a forward."
            )
        self._engine = engine
        self._encode_one = encode
        self._joint = joint
        self._agree = agree
        self._recordings = recordings
        self._few_shapes = few_shapes
        self._kept = kept
        self._has_looked = False  # whether there is a BatchNorm
        self._changing: set[tuple[int, str]] = set()  # buffers that forwards write to
        self._layout: Layout | None = None  # of the last window's encodings
        self._used: list[bool] = []  # whether each field got a gradient in the last window

    def run(self, cut: Cut, micro_batches: MicroBatches, coming: Coming) -> None:
        """Both passes over a batch, up to the last backward.

        Args:
            cut: how it is cut.
            micro_batches: its parts.
            coming: of each micro-batch its key, and how to get it before its turn.
        """
        self._warn_about_batch_norm()
        turns = cut.part_per_turn()
        own = self._encode(cut, micro_batches(turns), coming)
        if cut.is_held:
            self._agree()
        whole, kept = self._gather(cut, own)
        self._open_second(cut, coming, own, whole.layout, kept)
        gradients = self._differentiate(cut, whole)
        self._layout, self._used = whole.layout, [gradient is not None for gradient in gradients]
        own.history.note()  # what the loss did to buffers stays
        turns[: len(cut.parts)] = reversed(cut.parts)
        try:
            self._pull(cut, micro_batches(turns), own, whole.layout, kept, gradients)
        finally:
            own.history.restore(len(cut.parts))

    # ------------------------------------------------------------------------------------------ the first pass

    def _encode(self, cut: Cut, micro_batches: Iterable[tuple[Any, int]], coming: Coming) -> _Own:
        """The encodings of this rank's micro-batches."""
        engine = self._engine
        own = _Own(History(engine.models, self._changing))
        recordings = None if self._recordings is None or self._layout is None else self._recordings.first
        if recordings is not None and self._layout is not None:
            parameters = engine.open_gradients().parameters
            recordings.open_first(parameters, self._layout, coming, few_shapes=self._few_shapes)
        if self._kept is not None:
            self._kept.begin_window(cut)
        for index, (micro_batch, samples) in enumerate(micro_batches):
            repeats = index >= len(cut.parts)
            with engine.apart(repeats=repeats):
                if not repeats:
                    own.history.note()
                recording: Recorded | None = None
                if recordings is not None and not repeats:
                    recording = recordings.find(micro_batch, samples, cut.parts[index].key)
                kept = self._kept if not repeats and self._kept is not None and self._kept.keeps(index) else None
                if kept is not None:
                    torch.clear_autocast_cache()
                    with engine.spans.of("forward"), kept.measuring(samples):
                        encoded = self._encode_one(micro_batch)
                elif recording is not None:
                    with engine.spans.of("replay"):
                        encoded = recording.encode(micro_batch)
                else:
                    with engine.spans.of("forward"), torch.no_grad():
                        encoded = self._encode_one(micro_batch)
                if not repeats:
                    own.add(encoded, samples)
                if kept is not None and isinstance(encoded, Encoded):
                    kept.keep(index, encoded)
        torch.clear_autocast_cache()  # weights that were cast without a graph would get no gradient
        return own

    # ------------------------------------------------------------------------------------------ the whole batch

    def _gather(self, cut: Cut, own: _Own) -> tuple[_Whole, list[Any]]:
        """All ranks' encodings; and this rank's: rows in the order of the batch, statistics by micro-batch."""
        engine = self._engine
        device, group, samples = engine.device, engine.backend.group, cut.samples.count
        random = Random(gpus_of(engine.models))
        layouts, counts, is_whole = [own.layout], [samples], own.is_whole
        rank = 0
        if group is not None:
            rank = dist.get_rank(group)
            layout = None if own.layout is None else own.layout._replace(tree={})
            said = (layout, samples, is_whole, random if rank == 0 else None)
            with engine.spans.of("communication"):
                everyone = all_gather_objects(said, engine.backend.host_group())
            layouts, counts, wholes, randoms = (list(column) for column in zip(*everyone, strict=True))
            random, is_whole = randoms[0].on(gpus_of(engine.models)), all(wholes)
        layout = self._common_layout(own.layout, layouts)
        order = [sample for part in cut.parts for sample in part.samples]
        kept: list[Any] = []
        sent: list[Tensor] = []
        for index, one in enumerate(layout.fields):
            parts = [tensors[index] for tensors in own.tensors]
            if one.is_sum:
                kept.append(parts)
                sent.append(total_of(parts, one, device))
            else:
                rows = (
                    in_batch_order(parts, order)
                    if parts
                    else torch.empty(0, *one.shape, dtype=one.dtype, device=device)
                )
                kept.append(rows)
                sent.append(rows)
        own.tensors.clear()
        if layout.has_loss:
            sent.append(own.ordinary(device, is_mean=engine.reduction == "mean"))
        if group is not None:
            with engine.spans.of("communication"):
                sent = Exchange(layout, counts, device, group).gather(sent)
        ordinary = sent.pop() if layout.has_loss else None
        tensors = [t.to(one.dtype) if one.is_sum else t for t, one in zip(sent, layout.fields, strict=True)]
        first = FirstPass(sum(counts), ordinary, is_whole)
        return _Whole(layout, tensors, sum(counts[:rank]), random, first), kept

    def _common_layout(self, own: Layout | None, layouts: Sequence[Layout | None]) -> Layout:
        """The layout of all ranks; one without samples learns it from the others."""
        known = [(rank, layout) for rank, layout in enumerate(layouts) if layout is not None]
        source, expected = known[0]
        for rank, layout in known[1:]:
            require_same_layout(expected, layout, f"on rank {source}", f"on rank {rank}")
        if None in layouts:
            hosts = self._engine.backend.host_group()
            received: Layout = broadcast_object(own if layouts[dist.get_rank(hosts)] else None, source, hosts)
            own = own or received
        assert own is not None
        return own

    def _differentiate(self, cut: Cut, whole: _Whole) -> list[Tensor | None]:
        """The gradients of this rank's rows, and of totals; those of parameters are added to the window's."""
        engine = self._engine
        engine.expect_second(whole.first)
        leaves = [
            tensor.detach().requires_grad_(one.has_gradient)
            for tensor, one in zip(whole.tensors, whole.layout.fields, strict=True)
        ]
        whole.tensors.clear()
        before = Random(gpus_of(engine.models))
        asked = None
        try:
            with engine.apart():
                engine.backend.gather_roots()
                whole.random.restore()
                with engine.spans.of("forward"):
                    loss = validation.checked_joint_loss(self._joint(whole.layout.encoded(leaves)))
                engine.backward_joint(loss, [leaf for leaf in leaves if leaf.requires_grad])
        except Exception as error:
            if not is_out_of_memory(error) or (self._kept is not None and self._kept.has_kept):
                raise
            asked = requested_memory(error)
        finally:
            before.restore()
        if asked is not None:
            raise FitError(
                f"memory ran out inside joint, which has the encodings of all {counted(whole.first.samples, 'sample')} "
                f"at once: {asked} more was asked for. Smaller micro-batches do not help there. Compute the loss in "
                "parts (contrastive_loss does), make encodings smaller, or the batch."
            )
        if all(leaf.grad is None for leaf in leaves):
            names = ", ".join(one.path for one in whole.layout.fields)
            raise BatchError(
                f"the gradient of joint reaches no encoding, of {names}: nothing would be learnt from them. Compute "
                "its loss from the fields of the Encoded that it gets, without detach()."
            )
        own = slice(whole.start, whole.start + cut.samples.count)
        return [
            None if leaf.grad is None else leaf.grad if one.is_sum else leaf.grad[own].clone()
            for leaf, one in zip(leaves, whole.layout.fields, strict=True)
        ]

    # ------------------------------------------------------------------------------------------ the second pass

    def _open_second(self, cut: Cut, coming: Coming, own: _Own, layout: Layout, kept: list[Any]) -> None:
        """Record second passes, before there is any gradient."""
        if self._recordings is None or self._layout != layout:
            return

        def bundled(take: Callable[[], tuple[Any, int]], index: int) -> tuple[Any, int]:
            micro_batch, samples = take()
            first = _of_part(kept, layout, cut.parts[index], index)
            gradients = [torch.zeros_like(t) if used else None for t, used in zip(first, self._used, strict=True)]
            return Bundle(micro_batch, first, gradients, own.number(index)), samples

        upcoming = [(key, partial(bundled, take, index)) for index, (key, take) in enumerate(coming)]
        gradients = self._engine.open_gradients()
        self._recordings.second.open(gradients, upcoming, few_shapes=self._few_shapes)

    def _pull(
        self,
        cut: Cut,
        micro_batches: Iterable[tuple[Any, int]],
        own: _Own,
        layout: Layout,
        kept: list[Any],
        gradients: list[Tensor | None],
    ) -> None:
        """The forward and backward of every micro-batch, from the gradients of its encodings."""
        engine, recordings = self._engine, None if self._recordings is None else self._recordings.second
        if not cut.turns:
            engine.join_empty()
        for turn, (micro_batch, samples) in enumerate(micro_batches):
            index, repeats, is_final = len(cut.parts) - 1 - turn, turn >= len(cut.parts), turn == cut.turns - 1
            with engine.micro_batch(Turn(last=is_final and not cut.is_held, repeat=repeats)):
                if repeats:
                    engine.backward(self._share(micro_batch, samples, layout, None, gradients, 0))
                else:
                    graph = None if self._kept is None else self._kept.take(index)
                    if graph is None:
                        own.history.restore(index)
                    first = _of_part(kept, layout, cut.parts[index], index)
                    own_gradients = _of_part(gradients, layout, cut.parts[index], None)
                    items, recording = own.items_of(index), None
                    bundle = Bundle(micro_batch, first, own_gradients, own.number(index))
                    if recordings is not None and not is_zero(items):
                        recording = recordings.find(bundle, samples, cut.parts[index].key)
                    if recording is not None:
                        engine.replay(recording, bundle)
                    else:
                        share = self._share(micro_batch, samples, layout, first, own_gradients, items, graph)
                        graph = None  # it goes with its backward
                        engine.backward(share)
            if not is_final:
                engine.close()
        if recordings is not None and engine.is_open:
            recordings.close(engine.open_gradients(), engine.window)
        if cut.parts and engine.backend.abilities.confines and not engine.open_gradients().exist():
            raise BatchError(
                "no parameter got a gradient: the encodings have no graph (they were detached, or come from frozen "
                "models), and joint uses no parameter that is trained."
            )

    def _share(
        self,
        micro_batch: Any,
        samples: int,
        layout: Layout,
        first: list[Tensor] | None,
        gradients: list[Tensor | None],
        items: Items,
        encoded: object = None,
    ) -> Share:
        """The forward of a micro-batch again, unless it is there; without the first, one that counts for nothing."""
        if encoded is None:
            with self._engine.spans.of("forward"):
                encoded = self._encode_one(micro_batch)
        found, tensors = take_apart(encoded, samples)
        require_same_layout(layout, found, "in the first pass", "in the second")
        assert isinstance(encoded, Encoded)
        return Share(tensors, tensors if first is None else first, gradients, encoded.loss, items)

    def _warn_about_batch_norm(self) -> None:
        """Once: in one big batch its statistics would be others."""
        if self._has_looked:
            return
        self._has_looked = True
        if any(isinstance(module, BatchNorm) and module.training for module in modules_of(self._engine.models)):
            warnings.warn(
                "a BatchNorm in training mode takes its statistics from each micro-batch, not from the whole batch: "
                "with joint= the encodings depend on how the batch is cut. Use LayerNorm or GroupNorm, or put it into "
                "eval mode.",
                stacklevel=6,
            )


def _of_part(fields: Sequence[Any], layout: Layout, part: Part, index: int | None) -> list[Any]:
    """What belongs to a micro-batch: its rows, and its own statistics, or, without its number, those of all."""
    return [
        one
        if one is None or (field.is_sum and index is None)
        else one[index]
        if field.is_sum
        else rows_at(one, part.samples)
        for one, field in zip(fields, layout.fields, strict=True)
    ]


def _number(count: Items, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(count, Tensor):
        return count.detach().reshape(()).to(device, dtype, non_blocking=True)
    return torch.full((), 1 if count is None else count, device=device, dtype=dtype)
