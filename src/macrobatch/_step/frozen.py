"""Checks that parameters that are not trained do not change while a window is computed.

For example, a momentum encoder that is updated inside `loss_fn` would be updated in both passes of every micro-batch. A
copy of all frozen weights might be as large as the model. So only their norms are compared, which also show writes to
``.data``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from macrobatch._ranks.collectives import local_tensor
from macrobatch._step.snapshot import modules_of
from macrobatch._step.totals import wide
from macrobatch._torch.modules import parameters_of
from macrobatch._torch.tensors import norms_of_all

ROUNDING = 1e-12  # the relative error of a norm in float64, if threads add in another order


class Frozen:
    """The norms of the untrained parameters of some models.

    Attributes:
        changed: whether each parameter had changed at the call of `compare`; None before it, or without parameters.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        groups: defaultdict[tuple[torch.device, torch.dtype], dict[nn.Parameter, None]] = defaultdict(dict)
        for module in modules_of(models):
            for parameter in parameters_of(module).values():
                if parameter is not None and not parameter.requires_grad and _has_norm(parameter):
                    groups[parameter.device, parameter.dtype][parameter] = None
        self._groups = [list(group) for group in groups.values()]
        self._norms = self._norms_now()
        self.changed: Tensor | None = None

    def compare(self, device: torch.device) -> None:
        """Find out which parameters have changed, as a tensor on this device."""
        found = []
        for now, before in zip(self._norms_now(), self._norms, strict=True):
            has_changed = ((now - before).abs() > ROUNDING * before) | (now.isfinite() != before.isfinite())
            found.append(has_changed.to(device, non_blocking=True))
        self.changed = torch.cat(found) if found else None

    def first_changed(self) -> str:
        """The name of a parameter that has changed. The host waits for it."""
        assert self.changed is not None
        if not self.changed.any():
            return "on another rank one"
        parameter = [p for group in self._groups for p in group][int(self.changed.int().argmax())]
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((repr(name) for name, other in named if other is parameter), "one")

    @torch.no_grad()
    def _norms_now(self) -> list[Tensor]:
        parts = [[local_tensor(parameter) for parameter in group] for group in self._groups]
        return [torch.stack(list(norms_of_all(group, 2, dtype=_norm_dtype(group[0])))) for group in parts]


def _has_norm(parameter: nn.Parameter) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.dtype.itemsize > 1 and not parameter.is_meta


def _norm_dtype(part: Tensor) -> torch.dtype:
    """A dtype with more digits than the parameter: a momentum encoder changes by little."""
    return torch.complex128 if part.is_complex() else wide(part.device)
