"""Gradients in groups that one foreach kernel can process, with their norm over all ranks.

Gradients of a group have the same device, dtype and placement. The host does not read their values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._ranks.collectives import Group, local_tensor
from macrobatch._ranks.placements import (
    Spread,
    largest_over,
    layout_of,
    norm_over_ranks,
    redistribute_like,
    spread_over,
)
from macrobatch._torch.foreach import HALF, multiply_alike, norm_of, norms_of, takes_float32
from macrobatch._torch.tensors import unscale_all, wide
from macrobatch.errors import BackendError

# What the gradients of one foreach kernel call have in common: device, dtype, whether they are wider than their
# parameters, and how these are distributed over ranks.
Kind = tuple[torch.device, torch.dtype, bool, Spread]


class GradientGroups:
    """The gradients of a closing window, in groups. `shards`: the ranks with the other parts of plain gradients."""

    def __init__(self, shards: tuple[Group, ...]) -> None:
        self._plain = Spread(shards)
        self._groups: dict[Kind, list[Tensor]] = {}
        self._inverse: tuple[float, Tensor] | None = None  # 1 / divisor as a float32 tensor, with the last divisor
        self.begin()

    def begin(self) -> None:
        """Forget what is known of parameters."""
        self._spreads: dict[Any, Spread] = {}  # by layout, also of parameters without a gradient
        self._spread_by_id: dict[int, Spread] = {}
        self._is_spread = False  # whether parts of a parameter are on several ranks

    def clear(self) -> None:
        """Drop all references to gradients."""
        self._groups = {}

    def gather(self, named: Mapping[str, nn.Parameter], widened: Collection[int]) -> None:
        """Group the gradients of these parameters. `widened`: the ids of those with wider gradients."""
        groups: defaultdict[Kind, list[Tensor]] = defaultdict(list)
        spreads = self._spread_by_id
        for name, parameter in named.items():
            spread = spreads.get(id(parameter)) or self._spread_of(name, parameter)
            if (gradient := parameter.grad) is None:
                continue
            part = gradient
            if gradient.layout is torch.sparse_coo:
                parameter.grad = gradient.coalesce()  # each index once, so that all operations can use the values
                part = parameter.grad.values()
            elif gradient.layout is not torch.strided:
                raise BackendError(
                    f"parameter {name!r} has a gradient of layout {gradient.layout}, which cannot be accumulated "
                    "exactly in one pass. Make it dense, or of layout torch.sparse_coo."
                )
            elif type(gradient) is not Tensor:
                if (placed := redistribute_like(gradient, parameter)) is not gradient:
                    parameter.grad = gradient = placed
                part = local_tensor(gradient)
            groups[part.device, part.dtype, id(parameter) in widened, spread].append(part)
        self._groups = groups

    def _spread_of(self, name: str, parameter: Tensor) -> Spread:
        layout = layout_of(parameter)
        if (spread := self._spreads.get(layout)) is None:
            spread = self._spreads[layout] = self._plain if layout is None else spread_over(*layout, name)
            self._is_spread |= bool(spread.shards)
        self._spread_by_id[id(parameter)] = spread
        return spread

    @property
    def foldable(self) -> bool:
        """Whether the optimizer's kernel can divide by a float32 number as precisely as a pass over the gradients."""
        return all(dtype in (torch.float32, *HALF) and not is_wide for _, dtype, is_wide, _ in self._groups)

    def norm(self, order: float, device: torch.device, note: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients together; infinite or NaN if one of them is.

        `note`: a number above 0 if this rank has something to tell. The returned one is that of all ranks with parts.
        """
        norms: dict[Spread, list[Tensor]] = {spread: [] for spread in self._spreads.values()}
        for (*_, spread), group in self._groups.items():
            norm = norm_of(norms_of([part for part in group if part.numel()], order), order, device)
            norms[spread].append(norm.to(device, wide(device), non_blocking=True))
        whole = {spread: norm_of(parts, order, device) for spread, parts in norms.items()}
        if not self._is_spread:
            return norm_of(list(whole.values()), order, device), self.tell_ranks(note)
        told = torch.zeros((), device=device, dtype=wide(device))
        norm, told = norm_over_ranks(whole, order, told if note is None else told + note.to(device))
        return norm, None if note is None else told

    def tell_ranks(self, note: Tensor | None) -> Tensor | None:
        """The largest `note` of all ranks that hold parts or copies of the gradients."""
        if note is None or not self._spreads:
            return note
        groups = dict.fromkeys(g for spread in self._spreads.values() for g in (*spread.shards, *spread.copies))
        return largest_over(groups, note)

    def divide(self, divisor: float | Tensor, *, with_wide: bool = False) -> None:
        """Divide all gradients in one pass, but those that are wider than their parameters unless `with_wide`."""
        for (device, dtype, is_wide, _), group in self._groups.items():
            if with_wide or not is_wide:
                multiply_alike(group, 1 / divisor, device, dtype)
        self._groups = {}

    def divide_and_check(self, divisor: float | Tensor, device: torch.device) -> Tensor | None:
        """Divide all gradients and check that they are finite, if one kernel can do both. Otherwise do nothing.

        Returns a tensor that is not zero if a gradient was not finite; None if nothing was done.
        """
        if len(self._groups) != 1 or self._is_spread:
            return None
        ((where, dtype, is_wide, _), group), *_ = self._groups.items()
        if is_wide or where != device or dtype not in (torch.float32, *HALF) or not takes_float32(where, dtype):
            return None
        found = torch.zeros((), device=device, dtype=torch.float32)
        inverse = (1 / divisor).float() if isinstance(divisor, Tensor) else self._inverse_of(divisor, device)
        unscale_all(group, found, inverse)
        return found

    def _inverse_of(self, divisor: float, device: torch.device) -> Tensor:
        """1 / divisor as a tensor, kept because most windows have the same divisor."""
        if self._inverse is None or self._inverse[0] != divisor or self._inverse[1].device != device:
            self._inverse = divisor, torch.full((), 1 / divisor, device=device, dtype=torch.float32)
        return self._inverse[1]
