"""The user's own functions in a run: callbacks after steps and validations, and an evaluation.

If one of them raises an error, the run writes a checkpoint of the last step, and then raises the error.
"""

from __future__ import annotations

import json
import math
import numbers
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import torch
from torch import nn

from macrobatch._io.functions import function_named
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import UsageError
from macrobatch.train import models
from macrobatch.train.settings import Settings
from macrobatch.train.vocabulary import Vocabulary
from macrobatch.train.world import OtherRankError, World

OWN = ("step", "loss", "perplexity")  # names that a validation has anyway


class StopTraining(Exception):  # noqa: N818  # like StopIteration, it is no error
    """A callback raises it to end the run: all ranks stop after the current step, and write a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The argument of a callback of `train`: what has just happened in the run.

    Attributes:
        kind: "step" after an optimizer step, "validation" after a validation.
        step: the number of steps that the run has taken.
        numbers: the numbers of this step or validation: the new line of ``metrics.jsonl`` or ``validation.jsonl``.
        run: the run folder.
    """

    kind: Literal["step", "validation"]
    step: int
    numbers: Mapping[str, Any]
    run: Path


Callback = Callable[[Event], object]
Evaluate = Callable[[Any, Any], Mapping[str, SupportsFloat]]  # of a model and a tokenizer


class Hooks:
    """Calls the callbacks and the evaluation of a run.

    All ranks call the evaluation, and the first rank's numbers count; only the first rank has callbacks.
    `is_stopped` says whether a callback asked to stop, `failure` holds what one of them raised, on any rank.
    """

    def __init__(
        self, settings: Settings, world: World, callbacks: Sequence[Callback] = (), evaluate: Evaluate | None = None
    ) -> None:
        if evaluate is not None and settings.evaluate is not None:
            raise UsageError(f"pass evaluate= or Settings(evaluate={settings.evaluate!r}), not both.")
        for hook in (*callbacks, evaluate):
            if hook is not None and not callable(hook):
                raise UsageError(f"a callback and evaluate must be functions: got {hook!r}.")
        self._settings, self._world = settings, world
        self._callbacks = tuple(callbacks)
        self._evaluate = function_named(settings.evaluate) if settings.evaluate else evaluate
        self._tokenizer: Any = None
        self._is_watched = False
        self.is_stopped = False
        self.failure: Exception | None = None
        best, _ = settings.best_number
        if best not in OWN[1:] and self._evaluate is None:
            raise UsageError(
                f"--best {best}: validations have loss and perplexity only. Name one of these, or a function that "
                "returns more, with --evaluate."
            )

    def agree(self) -> None:
        """Tell all ranks whether the first one has callbacks, and check that all have an evaluation or none has."""
        has_evaluation = [bool(status) for (status,) in self._world.gather([self.evaluates])]
        if len(set(has_evaluation)) > 1:
            raise UsageError(f"evaluate= must be given on all ranks, or on none: got it on {sum(has_evaluation)}.")
        self._is_watched = bool(self._world.gather([bool(self._callbacks)])[0][0])

    @property
    def evaluates(self) -> bool:
        """Whether there is an evaluation."""
        return self._evaluate is not None

    @property
    def _name(self) -> str:
        """The name of the evaluation, for messages."""
        return self._settings.evaluate or str(getattr(self._evaluate, "__name__", "evaluate"))

    @property
    def is_over(self) -> bool:
        """Whether the run has to end."""
        return self.is_stopped or self.failure is not None

    def tell(self, event: Event) -> None:
        """Call the callbacks, and tell all ranks whether they asked to stop or failed."""
        if not self._is_watched or self.failure is not None:
            return
        for callback in self._callbacks if self._world.is_first else ():
            try:
                callback(event)
            except StopTraining:
                self.is_stopped = True
            except Exception as error:
                error.add_note(f"It was raised by a callback, after step {event.step}.")
                self.failure = error
                break
        stopped, failed = self._world.gather([self.is_stopped, self.failure is not None])[0]
        self.is_stopped = bool(stopped)
        if failed and self.failure is None:
            self.failure = OtherRankError("a callback of the first rank failed.")

    def run_evaluation(self, model: nn.Module, vocabulary: Vocabulary) -> dict[str, float]:
        """The numbers that the user's evaluation returns. Empty if there is none, or if it fails (see `failure`)."""
        if self._evaluate is None or self.failure is not None:
            return {}
        try:
            found = self._world.on_all_ranks(lambda: self._call_evaluation(model, vocabulary))
        except Exception as error:
            self.failure = error
            return {}
        told: dict[str, float] = json.loads(self._world.broadcast(json.dumps(found)))
        return told

    def check(self, model: nn.Module, vocabulary: Vocabulary) -> dict[str, float]:
        """Evaluate before the first step, so that an error in the evaluation shows up at once."""
        found = self.run_evaluation(model, vocabulary)
        if self.failure is not None:
            raise self.failure
        return found

    @torch.no_grad()
    def _call_evaluation(self, model: nn.Module, vocabulary: Vocabulary) -> dict[str, float]:
        assert self._evaluate is not None
        device, dtype = self._world.device, models.AUTOCAST.get(self._settings.precision)
        self._tokenizer = self._tokenizer or _tokenizer(vocabulary)
        model.eval()
        try:
            # Random numbers that it draws are not missing in the training, which would be another one without it.
            with (
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                torch.autocast(device.type, dtype=dtype, enabled=dtype is not None),
            ):
                returned = self._evaluate(without_ddp(model), self._tokenizer)
        except Exception as error:
            error.add_note(f"It was raised by the evaluation {self._name}.")
            raise
        finally:
            model.train()
        found = _check_numbers(returned, self._name)
        best, _ = self._settings.best_number
        if best not in (*OWN[1:], *found):
            raise UsageError(
                f"--best {best}: the evaluation returns no such number. It has {', '.join(found) or 'none'}."
            )
        return found


def _tokenizer(vocabulary: Vocabulary) -> Any:
    """The tokenizer as an object of transformers."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        vocabulary.save(folder)
        return AutoTokenizer.from_pretrained(folder)


def _check_numbers(returned: object, name: str) -> dict[str, float]:
    """The result of an evaluation as plain numbers, or an error.

    >>> _check_numbers({"accuracy": torch.tensor(0.5), "right": 3}, "count")
    {'accuracy': 0.5, 'right': 3.0}
    """
    if not isinstance(returned, Mapping):
        raise UsageError(
            f"the evaluation {name} must return a dict of numbers, as {{'accuracy': 0.5}}: got "
            f"{type(returned).__name__}."
        )
    found = {}
    for key, value in returned.items():
        if not isinstance(key, str) or not key:
            raise UsageError(f"the evaluation {name} must name its numbers by texts: got {key!r}.")
        if key in OWN:
            raise UsageError(f"the evaluation {name} returns {key!r}, which a validation has anyway. Rename it.")
        plain = value.item() if getattr(value, "shape", None) == () else value  # of torch or numpy
        if not isinstance(plain, numbers.Real):
            raise UsageError(f"the evaluation {name} must return numbers: {key!r} is {type(value).__name__}.")
        found[key] = float(plain)
    return found


def perplexity_of(loss: float) -> float:
    """The perplexity of a mean loss in nats.

    >>> perplexity_of(0.0), perplexity_of(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf
