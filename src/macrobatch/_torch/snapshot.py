"""Restore what a forward and backward change besides gradients: random number generators and buffers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from macrobatch._torch.modules import buffers_of, modules_of, parameters_of
from macrobatch._torch.tensors import unobserved, version_of


class HostRandom:
    """The current state of the host's random number generators (torch, Python, numpy)."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def has_moved(self) -> bool:
        """Whether random numbers were drawn since."""
        return (
            not torch.equal(self._torch, torch.get_rng_state())
            or self._python != random.getstate()
            or (self._numpy is not None and _comparable(self._numpy) != _comparable(_numpy_state()))
        )

    def has_moved_outside_torch(self) -> bool:
        """Whether Python or numpy drew random numbers since."""
        return self.fingerprint()[1:] != HostRandom().fingerprint()[1:]

    def fingerprint(self) -> list[object]:
        """The state in a form that can be compared or hashed."""
        return [_bytes_of(self._torch), self._python, _comparable(self._numpy)]

    def restore(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Random:
    """The current state of all random number generators: those of the host, and of some GPUs."""

    def __init__(self, gpus: Sequence[torch.device], host: HostRandom | None = None) -> None:
        self.host = HostRandom() if host is None else host
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in gpus]

    def restore(self, *, with_host: bool = True) -> None:
        """Restore the state."""
        if with_host:
            self.host.restore()
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)

    def seed(self, number: int) -> int:
        """A seed computed from this state and `number`: the same for the same state and number."""
        digest = hashlib.blake2b(repr((number, self.host.fingerprint())).encode(), digest_size=4)
        for _, state in self._cuda:
            digest.update(_bytes_of(state))
        return int.from_bytes(digest.digest(), "little")


def reseed(seed: int, gpus: Sequence[torch.device]) -> None:
    """Seed all random number generators: those of the host, and of some GPUs."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    for device in gpus:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class _Kept(NamedTuple):
    """A buffer, a copy of its value, and its version counter at that time."""

    buffer: Tensor | None
    value: Tensor | None  # None for an expanded tensor, which cannot be written to
    version: int

    @staticmethod
    def of(buffer: Tensor | None) -> _Kept:
        is_fixed = buffer is None or 0 in buffer.stride()
        return _Kept(buffer, None if is_fixed else buffer.clone(), _version(buffer))  # type: ignore[union-attr]

    def put_back(self, buffers: dict[str, Tensor | None], name: str) -> None:
        buffers[name] = self.buffer  # it may have been replaced by another tensor
        if self.buffer is None or self.value is None:
            return
        if self.buffer.shape != self.value.shape:  # it was resized in place
            self.buffer.resize_(self.value.shape)
        self.buffer.copy_(self.value)


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else version_of(buffer)


class Snapshot:
    """The current state of all random number generators, and the buffers of some modules."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._random = Random(gpus_of(models))
        found = [(buffers, name) for buffers in map(buffers_of, modules_of(models)) for name in buffers]
        self._buffers = [(buffers, name, _Kept.of(buffers[name])) for buffers, name in found]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything."""
        self.restore_random()
        for buffers, name, kept in self._buffers:
            kept.put_back(buffers, name)

    def restore_random(self) -> None:
        """Restore the random number generators only."""
        self._random.restore()


class History:
    """The states of random number generators and buffers at several moments. Any of them can be restored.

    A buffer that has not changed between two moments is stored once. Buffers that were seen to change are added to
    `changing`. Those are copied at every moment, because the writes of a recorded forward cannot be noticed.
    """

    def __init__(self, models: Sequence[nn.Module], changing: set[tuple[int, str]]) -> None:
        self._gpus = gpus_of(models)
        self._changing = changing
        self._buffers = [(buffers, name) for buffers in map(buffers_of, modules_of(models)) for name in buffers]
        # The kernels of batch normalisation write to statistics without a change of their version counters.
        trained = [buffers_of(module) for module in modules_of(models) if module.training]
        changing.update((id(buffers), name) for buffers in trained for name in buffers if name.startswith("running_"))
        self._random: list[Random] = []
        self._moments: list[list[_Kept]] = []
        self._now = [_Kept.of(buffers[name]) for buffers, name in self._buffers]

    def note(self) -> int:
        """Store the current state. Returns the number of this moment."""
        last = self._random[-1].host if self._random else None
        self._random.append(Random(self._gpus, None if last is None or last.has_moved() else last))
        has_changed = not self._moments
        for index, (buffers, name) in enumerate(self._buffers):
            if self._may_have_changed(index):
                self._now[index] = _Kept.of(buffers[name])
                self._changing.add((id(buffers), name))
                has_changed = True
        self._moments.append(list(self._now) if has_changed else self._moments[-1])
        return len(self._moments) - 1

    @torch.no_grad()
    def restore(self, moment: int) -> None:
        """Restore the state of a moment."""
        is_last = moment == len(self._moments) - 1
        # If no random numbers were drawn between these moments, none will be drawn when they are repeated.
        self._random[moment].restore(with_host=self._random[0].host is not self._random[-1].host or is_last)
        for index, ((buffers, name), kept) in enumerate(zip(self._buffers, self._moments[moment], strict=True)):
            if self._now[index].value is not kept.value or self._may_have_changed(index):
                kept.put_back(buffers, name)
                self._now[index] = kept._replace(version=_version(kept.buffer))

    def _may_have_changed(self, index: int) -> bool:
        (buffers, name), known = self._buffers[index], self._now[index]
        is_same = buffers[name] is known.buffer and _version(buffers[name]) == known.version
        return not is_same or (id(buffers), name) in self._changing


def gpus_of(models: Sequence[nn.Module]) -> list[torch.device]:
    """The GPUs of the models' parameters."""
    parameters = (p for module in modules_of(models) for p in parameters_of(module).values() if p is not None)
    return list(dict.fromkeys(p.device for p in parameters if p.is_cuda))


def _numpy_state() -> Any:
    """The state of numpy's generator; None if numpy is not imported."""
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _bytes_of(state: Tensor) -> bytes:
    with unobserved():  # this reads no result of a device
        return bytes(state.tolist())


def _comparable(state: Any) -> list[object] | None:
    return None if state is None else [part.tobytes() if hasattr(part, "tobytes") else part for part in state]
