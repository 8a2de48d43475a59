"""`Outcome`: the result of `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from macrobatch.train.files import rows
from macrobatch.train.record import METRICS, VALIDATION


class Outcome(int):
    """The result of `train`: the exit status, as a number with attributes for the files of the run.

    >>> outcome = Outcome(0, run=Path("runs/tiny-1"), steps=20)
    >>> outcome == 0, outcome.steps, str(outcome.model)
    (True, 20, 'runs/tiny-1/model')

    Attributes:
        run: the run folder.
        steps: the number of optimizer steps that the run has taken, including those before it was resumed.
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
        """The numbers of every step: the lines of ``metrics.jsonl`` as dicts."""
        return rows(self.run / METRICS)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The numbers of every validation: the lines of ``validation.jsonl`` as dicts."""
        return rows(self.run / VALIDATION)

    @property
    def model(self) -> Path:
        """The folder of the exported model, which ``from_pretrained`` of transformers can load."""
        return self.run / "model"
