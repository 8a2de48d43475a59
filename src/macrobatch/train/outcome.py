"""What `train` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from macrobatch.train.files import rows
from macrobatch.train.record import METRICS, VALIDATION


class Outcome(int):
    """How a run has ended: the exit status as a number, and where to find what it left.

    >>> outcome = Outcome(0, run=Path("runs/tiny-1"), steps=20)
    >>> outcome == 0, outcome.steps, str(outcome.model)
    (True, 20, 'runs/tiny-1/model')

    Attributes:
        run: the run folder.
        steps: how many steps the run has taken, with those before it was resumed.
    """

    run: Path
    steps: int

    def __new__(cls, status: int, *, run: Path, steps: int) -> Outcome:
        """A number with attributes."""
        made = super().__new__(cls, status)
        made.run, made.steps = run, steps
        return made

    def __repr__(self) -> str:
        return f"Outcome({int(self)}, run={str(self.run)!r}, steps={self.steps})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The numbers of every step."""
        return rows(self.run / METRICS)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The numbers of every validation."""
        return rows(self.run / VALIDATION)

    @property
    def model(self) -> Path:
        """The exported model, for ``from_pretrained`` of transformers."""
        return self.run / "model"
