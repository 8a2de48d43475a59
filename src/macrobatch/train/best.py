"""The best validation so far: which checkpoint to keep besides the last ones, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Best:
    """The lowest validation loss, after which step, and how many validations ago.

    >>> best = Best()
    >>> best.is_improved(100, 4.0), best.is_improved(200, 5.0), best.step, best.is_over(1)
    (True, False, 100, True)
    """

    step: int = 0
    loss: float | None = None
    since: int = 0

    def is_improved(self, step: int, loss: float) -> bool:
        """Take note of a validation. Returns whether none was better."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.step, self.loss, self.since = step, loss, 0
            return True
        self.since += 1
        return False

    def is_over(self, patience: int | None) -> bool:
        """Whether so many validations in a row were no better."""
        return patience is not None and self.since >= patience

    def state_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.step, self.since = int(state["step"]), int(state["since"])
        self.loss = None if state["loss"] is None else float(state["loss"])
