"""The best validation so far: it decides which checkpoint to keep besides the last ones, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """The best value of one number in validations, its step, and the number of validations since then.

    >>> best = Best()
    >>> best.is_improved(100, 4.0), best.is_improved(200, 5.0), best.step, best.is_over(1)
    (True, False, 100, True)
    """

    name: str = "loss"  # the name of the number
    is_higher_better: bool = False  # whether the highest value is the best one. Otherwise it is the lowest
    step: int = 0  # the step of the best validation
    value: float | None = None  # its value; None: there was no validation with a finite value
    since: int = 0  # the number of validations after it

    def is_improved(self, step: int, value: float) -> bool:
        """Record a validation, and return whether it is the best one so far."""
        if math.isfinite(value) and (self.value is None or self._is_better(value, self.value)):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self.is_higher_better else value < than

    def is_over(self, patience: int | None) -> bool:
        """Whether the last `patience` validations did not improve. `patience` None: never."""
        return patience is not None and self.since >= patience

    def state_dict(self) -> dict[str, Any]:
        """The state to save, as JSON."""
        return {"of": self._of, "step": self.step, "value": self.value, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Ignore a state that is about another number."""
        if state.get("of", "loss:min") != self._of:
            return
        value = state["value"] if "value" in state else state["loss"]  # its name in older checkpoints
        self.step, self.since = int(state["step"]), int(state["since"])
        self.value = None if value is None else float(value)

    @property
    def _of(self) -> str:
        return f"{self.name}:{'max' if self.is_higher_better else 'min'}"
