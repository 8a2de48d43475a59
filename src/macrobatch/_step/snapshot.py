"""What a forward and backward change besides gradients: put back as if they had not been."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class HostRandom:
    """The random number generators of the host (torch's, Python's, numpy's), as they are now.

    >>> before = HostRandom()
    >>> _ = torch.rand(2)
    >>> before.has_moved()
    True
    >>> before.restore()
    >>> before.has_moved()
    False
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def has_moved(self) -> bool:
        """Whether anybody has drawn from them since."""
        return (
            not torch.equal(self._torch, torch.get_rng_state())
            or self._python != random.getstate()
            or (self._numpy is not None and _comparable(self._numpy) != _comparable(_numpy_state()))
        )

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Snapshot:
    """All random number generators and the buffers of some modules, as they are now.

    >>> model = nn.BatchNorm1d(2)
    >>> before = Snapshot([model])
    >>> _ = model(torch.randn(4, 2))
    >>> before.restore()
    >>> model.num_batches_tracked
    tensor(0)
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._host = HostRandom()
        modules = modules_of(models)
        devices = {p.device for module in modules for p in module._parameters.values() if p is not None and p.is_cuda}
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._buffers = [
            (module, {name: (buffer, _copied(buffer)) for name, buffer in module._buffers.items()})
            for module in modules
            if module._buffers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put it all back."""
        self._host.restore()
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        for module, buffers in self._buffers:
            for name, (buffer, before) in buffers.items():
                module._buffers[name] = buffer  # it may have been replaced, not written to
                if buffer is not None and before is not None:
                    buffer.copy_(before)


def modules_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    """They and all inside of them, each once. (As `nn.Module.modules`, whose generators take many times as long.)"""
    found: dict[nn.Module, None] = {}
    pending = list(reversed(models))
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            pending += [inner for inner in reversed(module._modules.values()) if inner is not None]
    return list(found)


def _numpy_state() -> Any:
    """None where nobody has imported numpy."""
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _comparable(state: Any) -> list[object]:
    return [part.tobytes() if hasattr(part, "tobytes") else part for part in state]


def _copied(buffer: Tensor | None) -> Tensor | None:
    """None for what nobody can write to: an expanded tensor."""
    return None if buffer is None or 0 in buffer.stride() else buffer.clone()
