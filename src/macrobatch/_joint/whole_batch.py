"""The encodings of all ranks together, from which `joint` computes the loss."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from macrobatch._engine.engine import Engine
from macrobatch._joint.encodings import Exchange, Layout, OwnEncodings, require_same_layout
from macrobatch._joint.objective import FirstPass
from macrobatch._ranks.collectives import Group, all_gather_objects, broadcast_object
from macrobatch._torch.snapshot import Random, gpus_of
from macrobatch.errors import BatchError


@dataclass(frozen=True)
class WholeBatch:
    """The encodings of all ranks."""

    layout: Layout
    tensors: list[Tensor]  # the rows of the whole batch, and totals
    own: slice | None  # the rows of this rank; None for all
    seed: int | None  # of the random numbers for the loss, if all ranks must draw the same
    counted: FirstPass


def gather(engine: Engine, own: OwnEncodings, *, is_mean: bool) -> WholeBatch:
    """Gather the encodings of all ranks. All ranks call this."""
    device, group, samples = engine.device, engine.backend.group, own.cut.samples.count
    seed, layout, is_whole, counts, rows = None, own.layout, own.has_whole_items, [samples], None
    if group is not None:
        rank = dist.get_rank(group)
        # The tree may hold classes of the user that cannot be pickled, so it is not sent.
        if rank == 0:  # a new seed in every window, even if nothing else draws random numbers
            seed = Random(gpus_of(engine.models)).seed(engine.open_window().number)
        said = layout and layout._replace(tree={}), samples, is_whole, seed
        with engine.spans.of("communication"):
            everyone = all_gather_objects(said, engine.backend.host_group())
        layouts, counts, wholes, seeds = (list(column) for column in zip(*everyone, strict=True))
        layout = _common_layout(engine, layout, layouts)
        seed, is_whole = seeds[0], all(wholes)
        start = sum(counts[:rank])
        rows = slice(start, start + samples)
    assert layout is not None, "some rank has samples"
    joined = own.join(layout)
    if layout.has_loss:
        joined.append(own.ordinary(is_mean=is_mean))
    if group is not None:
        with engine.spans.of("communication"):
            joined = Exchange(layout, counts, device, group).gather(joined)
    ordinary = joined.pop() if layout.has_loss else None
    tensors = [t.to(one.dtype) if one.is_sum else t for t, one in zip(joined, layout.fields, strict=True)]
    return WholeBatch(layout, tensors, rows, seed, FirstPass(sum(counts), ordinary, is_whole))


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
    packed, why = None, None
    if dist.get_rank(hosts) == source:
        packed, why = _tried(lambda: pickle.dumps(own))
    packed = broadcast_object(packed, source, hosts)
    if own is None and packed is not None:
        own, why = _tried(lambda: pickle.loads(packed))
    failures = [failure for failure in all_gather_objects(why, hosts) if failure is not None]
    if failures:
        raise BatchError(
            f"a rank without samples cannot know what encodings look like: {failures[0]}. Define the classes of fields "
            "in a module, outside of functions, or return plain dicts of tensors."
        )
    assert own is not None
    return own


def _tried(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of a call and None, or None and the error as text."""
    try:
        return call(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
