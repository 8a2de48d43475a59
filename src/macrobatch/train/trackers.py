"""Trackers: where the numbers of a run go besides its own files.

TensorBoard, Weights & Biases, MLflow and Trackio, each through its own library, which is imported when it is asked for.
A tracker that fails while a run goes on is left out, with one warning: all numbers are in the run's own lines too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from macrobatch.errors import UsageError, pip_install
from macrobatch.train.events import Events
from macrobatch.train.files import replace_whole

State = Literal["finished", "interrupted", "failed"]
Numbers = Mapping[str, float]

IDS = "trackers.json"  # what each tracker calls the run
PATIENCE = 60.0  # seconds for an upload when a run has ended

logger = logging.getLogger("macrobatch")


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What a tracker is told of the run.

    Attributes:
        folder: of the run, whose name is that of the run.
        project: that it belongs to.
        config: its settings.
        resume_step: the step of the checkpoint that it goes on from, 0 where it had none; None for a new run.
        id: what the tracker calls a run that goes on; None: it does not know it yet.
    """

    folder: Path
    project: str = "macrobatch"
    config: Mapping[str, Any] = field(default_factory=dict)
    resume_step: int | None = None
    id: str | None = None

    @property
    def name(self) -> str:
        """Of the run."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """One run in one tracker. Any method may raise, which ends nothing but the tracking."""

    @property
    def id(self) -> str | None:
        """What the tracker calls the run; None where its folder says enough."""

    def add(self, step: int, numbers: Numbers) -> None:
        """Take the numbers of a step, or of a validation after it."""

    def close(self, state: State) -> None:
        """Write what is waiting, and how the run has ended."""


class Trackers:
    """Several trackers as one. One that fails is left out from then on, with a warning.

    Args:
        named: the trackers, by the names that users know them by.
    """

    id = None

    def __init__(self, named: Mapping[str, Tracker]) -> None:
        self._named = dict(named)

    def add(self, step: int, numbers: Numbers) -> None:
        """Hand the numbers on to each."""
        self._each(lambda tracker: tracker.add(step, numbers))

    def close(self, state: State) -> None:
        """Close each."""
        self._each(lambda tracker: tracker.close(state))
        self._named.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._named.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._named[name]
                logger.warning("%s no longer gets the numbers of this run: %s", name, _reason(error))
                with contextlib.suppress(Exception):
                    tracker.close("failed")


def require_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose libraries are missing."""
    for name in names:
        kind = KINDS[name]
        if not _is_installed(kind.library):
            raise UsageError(f"--track {name} needs {kind.library}, which is not installed: pip install {kind.package}")


def open_trackers(names: Sequence[str], run: Tracked) -> Trackers:
    """Begin the run in each of these trackers, or go on with it there; in TensorBoard where none is named.

    One that cannot be opened is an error, or only a warning where steps were taken already: those count more.
    """
    ids = _known_ids(run.folder)
    found: dict[str, Tracker] = {}
    for name in names or ("tensorboard",):
        kind = KINDS[name]
        try:
            tracker = kind.open(dataclasses.replace(run, id=ids.get(name)))
        except Exception as error:
            if isinstance(error, ImportError) and not names:
                logger.warning("tensorboard is not installed: no events are written. %s.", pip_install("train"))
                continue
            if not run.resume_step:
                Trackers(found).close("failed")
                raise UsageError(
                    f"--track {name}: {kind.title} could not be opened: {_reason(error)}. {kind.hint} The run has not "
                    "begun, and left nothing behind; or choose another --track."
                ) from error
            logger.warning("%s gets no numbers of this run: %s", kind.title, _reason(error))
            continue
        found[kind.title] = tracker
        if tracker.id is not None and ids.get(name) != tracker.id:
            ids[name] = tracker.id
            replace_whole(run.folder / IDS, json.dumps(ids, indent=2))
    return Trackers(found)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # as of None in sys.modules
        return False


def _known_ids(folder: Path) -> dict[str, str]:
    """What each tracker calls the run so far."""
    try:
        ids = json.loads((folder / IDS).read_text(encoding="utf-8"))
        return {str(name): str(one) for name, one in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _reason(error: Exception) -> str:
    """An error in one line."""
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


# ---------------------------------------------------------------------------------------------- Weights & Biases


class WeightsAndBiases:
    """A run of Weights & Biases. It takes no step that it has had: a run that goes on leaves those as they are."""

    EXIT_CODES: Mapping[State, int] = {"finished": 0, "interrupted": 130, "failed": 1}

    def __init__(self, run: Tracked) -> None:
        import wandb

        self.id = run.id or uuid.uuid4().hex[:8]
        settings: dict[str, Any] = {"console": "off"}  # the screen belongs to the progress bar
        if hasattr(wandb.Settings, "model_fields") and "finish_timeout" in wandb.Settings.model_fields:
            settings["finish_timeout"] = float(os.environ.get("WANDB_FINISH_TIMEOUT", PATIENCE))
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.config),
            reinit="create_new",  # a program around this one may have a run of its own
            settings=wandb.Settings(**settings),
        )
        self._next = int(self._run.step)

    def add(self, step: int, numbers: Numbers) -> None:
        """Log these numbers."""
        if step >= self._next:
            self._run.log(dict(numbers), step=step)

    def close(self, state: State) -> None:
        """Upload what is waiting."""
        self._run.summary["state"] = state
        self._run.finish(exit_code=self.EXIT_CODES[state])


# ------------------------------------------------------------------------------------------------------- MLflow


class MLflow:
    """A run of MLflow. It keeps all values of a step: those that are taken anew come after those that were.

    A thread of its own sends the numbers: requests take time, and are repeated for minutes where the server is gone.
    """

    STATES: Mapping[State, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
    MOST_PARAMETERS, MOST_METRICS, LONGEST = 100, 1000, 6000  # in one request, and of a parameter

    def __init__(self, run: Tracked) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        if run.id is None:
            experiment = self._client.get_experiment_by_name(run.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            self.id: str = self._client.create_run(number, run_name=run.name).info.run_id
        else:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
        self._describe(run.config)
        self._news = threading.Condition()  # of what follows
        self._waiting: list[Any] = []
        self._state: State | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="macrobatch-mlflow", daemon=True)
        self._thread.start()

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Settings are parameters, which cannot be changed any more."""
        from mlflow.entities import Param

        known = self._client.get_run(self.id).data.params
        new = [Param(name, str(value)[: self.LONGEST]) for name, value in config.items() if name not in known]
        for part in _parts(new, self.MOST_PARAMETERS):
            self._client.log_batch(self.id, params=part)

    def add(self, step: int, numbers: Numbers) -> None:
        """Hand these numbers to the thread; raises where it could not send earlier ones."""
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        now = time.time_ns() // 1_000_000
        named = {re.sub(r"[^\w./: -]", "_", name): value for name, value in numbers.items()}
        with self._news:
            self._waiting += [Metric(name, float(value), now, step) for name, value in named.items()]
            self._news.notify()

    def close(self, state: State) -> None:
        """Wait until all is sent, for a while."""
        with self._news:
            self._state = state
            self._news.notify()
        self._thread.join(PATIENCE)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it has not taken the last numbers within {PATIENCE:.0f} seconds")

    def _send(self) -> None:
        """Send whatever is waiting, until the run has ended."""
        try:
            is_open = True
            while is_open:
                with self._news:
                    self._news.wait_for(lambda: self._waiting or self._state)
                    waiting, self._waiting, is_open = self._waiting, [], self._state is None
                for part in _parts(waiting, self.MOST_METRICS):
                    self._client.log_batch(self.id, metrics=part)
            self._client.set_terminated(self.id, status=self.STATES[self._state or "finished"])
        except Exception as error:
            self._failure = error


def _parts(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


# ------------------------------------------------------------------------------------------------------ Trackio


class Trackio:
    """A run of Trackio. It keeps all values of a step, as MLflow does."""

    def __init__(self, run: Tracked) -> None:
        import trackio

        resume = "never" if run.id is None else "allow"
        monitors: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False}  # the run's own numbers are enough
        self._run: Any = trackio.init(
            run.project, name=run.name, config=dict(run.config), resume=resume, embed=False, **monitors
        )
        if run.id is not None:
            self._run.id = run.id  # it looks for the name, which a later run elsewhere may have too
        self.id: str = self._run.id
        self._step = run.resume_step or 0

    def add(self, step: int, numbers: Numbers) -> None:
        """Log these numbers."""
        self._step = step
        self._run.log(dict(numbers), step=step)

    def close(self, state: State) -> None:
        """Write what is waiting."""
        import trackio

        self._run.log({"state": state}, step=self._step)
        trackio.finish()  # of the run that it counts as the present one: this


# ------------------------------------------------------------------------------------------------------ all of them


@dataclass(frozen=True)
class Kind:
    """A tracker that there is: what its makers call it, what to import, what to install, and how to open it."""

    title: str
    library: str
    package: str
    open: Callable[[Tracked], Tracker]
    hint: str = ""


KINDS = {
    "tensorboard": Kind("TensorBoard", "tensorboard", "tensorboard", Events),
    "wandb": Kind(
        "Weights & Biases", "wandb", "wandb", WeightsAndBiases, "WANDB_MODE=offline keeps all in the run folder."
    ),
    "mlflow": Kind("MLflow", "mlflow", "mlflow", MLflow, "MLFLOW_TRACKING_URI says where it is."),
    "trackio": Kind("Trackio", "trackio", "trackio", Trackio),
}
