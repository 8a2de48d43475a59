"""What is differentiated: a mean or several terms (`_terms`), or a loss of the whole batch (`_joint`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from macrobatch._engine.totals import Denominators, Micro
from macrobatch._engine.verdict import Flags
from macrobatch._engine.window import Window
from macrobatch._ranks.ties import OutputTies


class Objective:
    """Turns what the program hands over into one scalar and its seed. A subclass needs `open` and `combine`.

    The window that it opens says whether denominators are late or early. Nothing else in the engine depends on the
    kind of loss.
    """

    is_mean = True  # whether the losses handed over are means over their items
    num_passes = 1  # how often each micro-batch goes through the model
    ties: OutputTies | None = None  # makes backwards reach all outputs, if micro-batches may lack some
    mean_items: float | Tensor | None = None  # the items of a typical micro-batch, which checkpoints keep

    def open(self, number: int, num_planned: int, device: torch.device) -> Window:
        """A new window."""
        raise NotImplementedError

    def expect(self, window: Window, denominators: Denominators) -> None:
        """Set the early denominators of a window."""
        raise AssertionError("late denominators: divided when the window closes")

    def combine(self, given: Any, items: Any, window: Window, *, repeats: bool, are_samples: bool = False) -> Micro:
        """Check what the program hands over for a micro-batch, and make one scalar of it. This counts nothing yet.

        `repeats`: it has the weight 0. `are_samples`: the program has given no items, so samples are counted.
        """
        raise NotImplementedError

    def catch_up(self, window: Window, device: torch.device) -> None:
        """Join the collectives that other ranks run in a first backward, if this rank has none."""

    def learn(self, window: Window) -> None:
        """Learn from a window that closes, for the next ones."""

    def restore(self, mean_items: float | Tensor | None) -> None:
        """Restore an earlier `mean_items`."""

    def numbers(self, window: Window) -> dict[str, Tensor]:
        """More numbers that ranks sum when a window closes, by name."""
        return {}

    def flags(self, window: Window) -> Flags:
        """Reasons against the step of a window, from what was said of it before."""
        return {}
