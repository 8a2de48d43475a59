"""Warn if a BatchNorm layer takes its statistics from micro-batches: those of one big batch would differ."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from macrobatch._step.snapshot import modules_of
from macrobatch._torch.modules import BatchNorm
from macrobatch._torch.tensors import version_of
from macrobatch.errors import warn


class BatchNormWarning:
    """Warns once, in the first window: call `begin` before its forwards, and `end` after them."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._has_looked = False
        self._calls: dict[BatchNorm, int] = {}  # of those in training mode

    def begin(self) -> None:
        """Find the BatchNorm layers in training mode."""
        if not self._has_looked:
            found = (module for module in modules_of(self._models) if isinstance(module, BatchNorm))
            self._calls = {module: _calls_of(module) for module in found if module.training}
            self._has_looked = True

    def end(self) -> None:
        """Warn if such a layer was called since `begin`, or may have been because it does not count its calls."""
        calls, self._calls = self._calls, {}
        if any(module.num_batches_tracked is None or _calls_of(module) != before for module, before in calls.items()):
            warn(
                "a BatchNorm in training mode takes its statistics from each micro-batch, not from the whole batch: "
                "with joint= the encodings depend on how the batch is cut. Use LayerNorm or GroupNorm, or put it into "
                "eval mode."
            )


def _calls_of(module: BatchNorm) -> int:
    """A number that grows with every call in training mode."""
    return 0 if module.num_batches_tracked is None else version_of(module.num_batches_tracked)
