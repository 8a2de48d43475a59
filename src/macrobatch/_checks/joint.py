"""Checks of losses of the whole batch: both passes, and all ranks, must compute the same.

`_joint` asks them where their numbers come up; what they note travels with the window's totals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from macrobatch._checks.pass_difference import differs, ordinary_differs, ranks_differ
from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._engine.verdict import Flag, Flags
from macrobatch._torch.modules import BatchNorm, modules_of
from macrobatch._torch.tensors import version_of, wide
from macrobatch.errors import BatchError, warn
from macrobatch.types import Items


def _flag(engine: Engine, name: str, error: Callable[[int], str]) -> Flags:
    """The flag of a number that must be 0 on all ranks."""
    window = engine.window
    if window is None or (found := window.noted(name)) is None:
        return {}
    return {name: Flag(found != 0, lambda: BatchError(error(window.number)), blocks=True)}


class PassesDiffer(Check):
    """Compares the encodings, the ordinary loss and its items of the second pass with those of the first."""

    name = "passes that differ"
    sentence = "loss_fn computes other encodings in the second pass than in the first."
    cost = "a comparison of all encodings on the device"
    shows = "were not the same in the two passes"
    program = """
        generator = torch.Generator()

        def encode(model, x):
            return Encoded(code=model(x + torch.randn(x.shape, generator=generator)))

        MacroStep(model, optimizer, encode, joint=lambda model, all: all.code.var(), micro=2)(torch.randn(4, 2))
        """
    NOTE = "passes differ"

    def compare(
        self,
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        ordinary: tuple[Tensor, Tensor, Items] | None,
        device: torch.device,
        *,
        is_double: bool,
    ) -> dict[str, Tensor]:
        """The note of a micro-batch. `ordinary`: loss and items of the first pass together, and those of the second."""
        found = differs(first, second, device, is_double=is_double)
        if ordinary is not None:
            other = ordinary_differs(*ordinary, is_double=is_double)
            found = other if found is None else found | other
        return {} if found is None else {self.NOTE: found.to(wide(device))}

    def flags(self, engine: Engine) -> Flags:
        return _flag(engine, self.NOTE, self._message)

    def _message(self, window: int) -> str:
        return (
            "encodings, or the ordinary loss or its items, were not the same in the two passes of window "
            f"{window}; its step was not taken. Each micro-batch goes through loss_fn twice, with the same "
            "weights, buffers and default random number generators. Draw from those alone (no torch.Generator of your "
            "own), and let loss_fn keep nothing from one call to the next. Where layers compute otherwise without a "
            "graph, as the first pass does (nn.TransformerEncoder in eval mode with padding), write `with "
            "torch.enable_grad():` in loss_fn."
        )


class RanksDiffer(Check):
    """Compares the losses that ranks have computed from the same encodings."""

    name = "ranks that differ"
    sentence = "joint returns another loss on one rank than on the others."
    cost = "one number in the exchange of each window"
    shows = "joint did not return the same loss on all ranks"
    num_ranks = 2
    program = """
        model = nn.parallel.DistributedDataParallel(model)

        def joint(model, all):
            return (1 + torch.distributed.get_rank()) * all.code.var()

        encode = lambda model, x: Encoded(code=model(x))
        MacroStep(model, optimizer, encode, joint=joint, micro=2)(torch.randn(4, 2))
        """
    NOTE = "joint losses"  # a vector with the loss of each rank at its place

    def watch(self, engine: Engine) -> bool:
        self._dtype, self._is_double = torch.float32, False
        return engine.backend.group is not None

    def note(self, loss: Tensor, *, is_double: bool) -> None:
        """Note how precise the losses are."""
        self._dtype, self._is_double = loss.dtype, is_double

    def flags(self, engine: Engine) -> Flags:
        window = engine.window
        if window is None or self.NOTE not in window.everyone:
            return {}
        message = (
            f"joint did not return the same loss on all ranks in window {window.number}; its step was not taken. "
            "Every rank computes it from the encodings of all, with the same random numbers. Draw from the default "
            "generators alone (no torch.Generator of your own), and use nothing in it that ranks have each for "
            "themselves: a queue of old encodings is the same on all of them if joint fills it."
        )
        unlike = ranks_differ(window.everyone[self.NOTE], self._dtype, is_double=self._is_double)
        return {self.NOTE: Flag(unlike, lambda: BatchError(message), blocks=True)}


class BatchNormStatistics(Check):
    """Looks in the first window whether a BatchNorm layer in training mode was called in the first pass."""

    name = "statistics of a micro-batch"
    sentence = "With joint=, a BatchNorm layer takes its statistics from micro-batches (a warning)."
    cost = "a look at all modules, once"
    shows = "a BatchNorm in training mode takes its statistics from each micro-batch"
    program = """
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        encode = lambda model, x: Encoded(code=model(x))
        MacroStep(model, optimizer, encode, joint=lambda model, all: all.code.var(), micro=2)(torch.randn(4, 2))
        """

    def watch(self, engine: Engine) -> bool:
        self._models = engine.models
        self._has_looked = False
        self._calls: dict[BatchNorm, int] = {}  # of those in training mode
        return True

    def begin(self) -> None:
        """Find the BatchNorm layers in training mode, before the first pass."""
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
