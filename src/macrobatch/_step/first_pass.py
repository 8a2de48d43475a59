"""The results of the first pass over a batch: the encodings of this rank, and then those of all ranks together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from macrobatch._cut.policies import Cut
from macrobatch._ranks.collectives import Group, all_gather_objects, broadcast_object
from macrobatch._step import validation
from macrobatch._step.encodings import (
    Exchange,
    Layout,
    Places,
    in_batch_order,
    require_same_layout,
    rows_at,
    take_apart,
    total_of,
)
from macrobatch._step.engine import Engine
from macrobatch._step.joint_window import FirstPass
from macrobatch._step.pass_difference import is_all_double
from macrobatch._step.snapshot import Random, gpus_of
from macrobatch._step.totals import wide
from macrobatch.errors import BatchError
from macrobatch.types import Encoded, Items


@dataclass
class OwnEncodings:
    """The encodings of one rank.

    Attributes:
        layout: the names, shapes and dtypes of the fields; None before the first micro-batch.
        fields: for each field, the tensors of all micro-batches. `join` replaces those with rows by one tensor, in the
            order of the batch.
        losses: the ordinary losses, if there are any.
        items: the numbers of items of those losses.
        numbers: losses and items on the device, shape (micro-batches, 2), after `ordinary`.
    """

    layout: Layout | None = None
    fields: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    items: list[int | float | Tensor] = field(default_factory=list)
    numbers: Tensor | None = None
    _are_samples: bool | None = None  # whether no items were passed, so that samples are counted

    def add(self, encoded: object, samples: int) -> None:
        """Add the encodings of the next micro-batch."""
        layout, tensors = take_apart(encoded, samples)
        assert isinstance(encoded, Encoded)
        if self.layout is None:
            self.layout, self.fields = layout, [[] for _ in tensors]
        count = len(self.fields[0])
        require_same_layout(self.layout, layout, "in the first", f"in micro-batch {count + 1}")
        for parts, tensor in zip(
            self.fields, tensors, strict=True
        ):  # copies: a row would keep the whole tensor that it is a view of
            parts.append(tensor.detach().clone(memory_format=torch.contiguous_format))
        if encoded.loss is not None:
            self._add_loss(encoded.loss, encoded.items, samples)

    def _add_loss(self, loss: Tensor, items: Items, samples: int) -> None:
        if self._are_samples not in (None, items is None):
            raise BatchError("Encoded must hold items for every micro-batch of a batch, or for none.")
        self._are_samples = items is None
        count = validation.checked_items(items)
        # Copies: the caller may reuse the same buffers for the next micro-batch.
        self.losses.append(validation.checked_ordinary(loss, needs_graph=False).detach().reshape(()).clone())
        self.items.append(samples if count is None else count.detach().clone() if isinstance(count, Tensor) else count)

    def items_of(self, index: int) -> Items:
        """The items of the ordinary loss of a micro-batch; None if there is no such loss."""
        return self.items[index] if self.items else None

    def ordinary_of(self, index: int) -> Tensor | None:
        """The ordinary loss of a micro-batch and its items, on the device."""
        return None if self.numbers is None else self.numbers[index]

    @property
    def has_whole_items(self) -> bool:
        """Whether all counts of items are whole numbers by their type."""
        return all(isinstance(n, int) or (isinstance(n, Tensor) and not n.is_floating_point()) for n in self.items)

    def join(self, layout: Layout, order: Sequence[int], device: torch.device) -> list[Tensor]:
        """The rows in the order of the batch, and the totals of statistics. `order`: the sample of each row so far."""
        self.fields = self.fields or [[] for _ in layout.fields]
        joined = []
        for index, one in enumerate(layout.fields):
            parts = self.fields[index]
            if one.is_sum:
                joined.append(total_of(parts, one, device))
                continue
            rows = in_batch_order(parts, order) if parts else torch.empty(0, *one.shape, dtype=one.dtype, device=device)
            self.fields[index] = rows  # frees the parts
            joined.append(rows)
        return joined

    def of_part(self, layout: Layout, places: Places, index: int, device: torch.device) -> list[Tensor]:
        """After `join`: the rows at `places`, and the statistics of micro-batch `index`. Scalars move to the device."""
        pairs = zip(self.fields, layout.fields, strict=True)
        parts = [one[index] if f.is_sum else rows_at(one, places) for one, f in pairs]
        return [part.to(device, non_blocking=True) if not part.dim() else part for part in parts]

    def ordinary(self, device: torch.device, *, is_mean: bool) -> Tensor:
        """The sum of the ordinary losses, the sum of their items, and the number of invalid counts."""
        dtype = wide(device)
        if not self.losses:
            return torch.zeros(3, device=device, dtype=dtype)
        losses = torch.stack([loss.to(device, dtype, non_blocking=True) for loss in self.losses])
        if any(isinstance(count, Tensor) for count in self.items):
            numbers = torch.stack([_number(count, device, dtype) for count in self.items])
        else:
            numbers = torch.tensor(self.items, dtype=dtype, device="cpu").to(device, non_blocking=True)
        self.numbers = torch.stack([losses, numbers], 1)
        if is_mean:  # a mean over no items is NaN, and must add nothing
            losses = losses.masked_fill(numbers == 0, 0) * numbers
        bad = ~(torch.isfinite(numbers) & (numbers >= 0))
        return torch.stack([losses.sum(), numbers.sum(), bad.to(dtype).sum()])


def _number(count: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(count, Tensor):
        return count.reshape(()).to(device, dtype, non_blocking=True)
    return torch.full((), count, device=device, dtype=dtype)


@dataclass(frozen=True)
class WholeBatch:
    """The encodings of all ranks.

    Attributes:
        layout: the names, shapes and dtypes of the fields.
        tensors: the rows of the whole batch, and totals.
        own: the rows of this rank; None for all.
        seed: the seed of the random numbers for the loss, if all ranks must draw the same.
        counted: the other counts of the first pass.
    """

    layout: Layout
    tensors: list[Tensor]
    own: slice | None
    seed: int | None
    counted: FirstPass


def gather(engine: Engine, cut: Cut, own: OwnEncodings) -> WholeBatch:
    """Gather the encodings of all ranks. All ranks call this."""
    device, group, samples = engine.device, engine.backend.group, cut.samples.count
    seed, layout, is_whole, counts, rows = None, own.layout, own.has_whole_items, [samples], None
    if group is not None:
        rank = dist.get_rank(group)
        # The tree may hold classes of the user that cannot be pickled, so it is not sent.
        if rank == 0:  # a new seed in every window, even if nothing else draws random numbers
            seed = Random(gpus_of(engine.models)).seed(engine.window.number)
        said = layout and layout._replace(tree={}), samples, is_whole, seed
        with engine.spans.of("communication"):
            everyone = all_gather_objects(said, engine.backend.host_group())
        layouts, counts, wholes, seeds = (list(column) for column in zip(*everyone, strict=True))
        layout = _common_layout(engine, layout, layouts)
        seed, is_whole = seeds[0], all(wholes)
        start = sum(counts[:rank])
        rows = slice(start, start + samples)
    assert layout is not None, "some rank has samples"
    joined = own.join(layout, [sample for part in cut.parts for sample in part.samples], device)
    if layout.has_loss:
        joined.append(own.ordinary(device, is_mean=engine.reduction == "mean"))
    if group is not None:
        with engine.spans.of("communication"):
            joined = Exchange(layout, counts, device, group).gather(joined)
    ordinary = joined.pop() if layout.has_loss else None
    tensors = [t.to(one.dtype) if one.is_sum else t for t, one in zip(joined, layout.fields, strict=True)]
    first = FirstPass(sum(counts), ordinary, is_whole, is_all_double(engine.models))
    return WholeBatch(layout, tensors, rows, seed, first)


def _common_layout(engine: Engine, own: Layout | None, layouts: Sequence[Layout | None]) -> Layout:
    """The layout of all ranks. A rank without samples gets it from another one."""
    known = [(rank, layout) for rank, layout in enumerate(layouts) if layout is not None]
    source, expected = known[0]
    for rank, layout in known[1:]:
        require_same_layout(expected, layout, f"on rank {source}", f"on rank {rank}")
    if None in layouts:
        own = _received(own, source, engine.backend.host_group())
    assert own is not None
    return own


def _received(own: Layout | None, source: int, hosts: Group) -> Layout:
    """Send the layout of rank `source` to the ranks without one. If it cannot be pickled, all ranks raise an error."""
    packed, why = b"", None
    if dist.get_rank(hosts) == source:
        packed, why = _tried(lambda: pickle.dumps(own), b"")
    packed = broadcast_object(packed, source, hosts)
    if own is None and packed:
        own, why = _tried(lambda: pickle.loads(packed), None)
    failures = [failure for failure in all_gather_objects(why, hosts) if failure is not None]
    if failures:
        raise BatchError(
            f"a rank without samples cannot know what encodings look like: {failures[0]}. Define the classes of fields "
            "in a module, outside of functions, or return plain dicts of tensors."
        )
    assert own is not None
    return own


def _tried(call: Callable[[], Any], otherwise: Any) -> tuple[Any, str | None]:
    """The result of a call and None, or `otherwise` and the error as text."""
    try:
        return call(), None
    except Exception as error:
        return otherwise, f"{type(error).__name__}: {error}"
