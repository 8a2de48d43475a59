"""Trackers: services and libraries that get the numbers of a run, besides the run's own files.

TensorBoard, Weights & Biases, MLflow and Trackio are supported, each through its own library, which is imported when it
is used. A tracker that fails during a run is dropped with one warning: the run's own files have all numbers too.
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
from macrobatch.train.files import replace_whole

State = Literal["finished", "interrupted", "failed"]
Numbers = Mapping[str, float]

EVENTS = "tensorboard"  # a folder inside the run folder
IDS = "trackers.json"  # the id of the run in each tracker
PATIENCE = 60.0  # seconds to wait for uploads at the end of a run

logger = logging.getLogger("macrobatch")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker needs to know about the run."""

    folder: Path  # the folder of the run. The run has the folder's name
    project: str = "macrobatch"  # the name of its project
    config: Mapping[str, Any] = field(default_factory=dict)  # its settings
    # the step of the checkpoint that it resumes from, 0 if it had none; None for a new run
    resume_step: int | None = None
    id: str | None = None  # the id of a resumed run in the tracker; None: it is new there

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """One run in one tracker. If a method raises an error, only the tracking ends, not the run."""

    @property
    def id(self) -> str | None:
        """The id of the run in the tracker; None if the tracker needs only the folder."""

    def add(self, step: int, numbers: Numbers) -> None:
        """Record the numbers of a step, or of a validation after it."""

    def close(self, state: State) -> None:
        """Write pending numbers, and the final state of the run."""


class Trackers:
    """Several trackers as one. A tracker that fails is dropped with a warning."""

    id = None

    def __init__(self, named: Mapping[str, Tracker]) -> None:
        self._named = dict(named)

    def add(self, step: int, numbers: Numbers) -> None:
        """Pass the numbers to each tracker."""
        self._each(lambda tracker: tracker.add(step, numbers))

    def close(self, state: State) -> None:
        """Close each tracker."""
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
        if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") and not _is_installed("sqlalchemy"):
            raise UsageError(
                "--track mlflow: mlflow-skinny cannot keep runs on this machine, as it comes without a database: pip "
                "install mlflow, or set MLFLOW_TRACKING_URI to the address of a server."
            )


def open_trackers(names: Sequence[str], run: TrackedRun) -> Trackers:
    """Begin or resume the run in each of these trackers; without any name, in TensorBoard.

    A tracker that cannot be opened is an error. It is only a warning if the run has already taken steps, which are
    worth more.
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
                    f"--track {name}: {kind.title} could not be opened: {_reason(error)}. {kind.hint} Or choose "
                    "another --track. No run was started."
                ) from None  # its traceback may hold a password
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
    except ValueError:  # if sys.modules has None for it
        return False


def _known_ids(folder: Path) -> dict[str, str]:
    """The ids of the run in its trackers so far."""
    try:
        ids = json.loads((folder / IDS).read_text(encoding="utf-8"))
        return {str(name): str(one) for name, one in ids.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _reason(error: Exception) -> str:
    """The first line of an error."""
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    return without_passwords(text.splitlines()[0].rstrip("."))


def without_passwords(text: str) -> str:
    """A text in which no address has a name and a password any more.

    >>> without_passwords("https://me:secret@host:5000/x is gone")
    'https://***@host:5000/x is gone'
    """
    return re.sub(r"(?<=://)[^/\s]*@", "***@", text)


# --------------------------------------------------------------------------------------------------- TensorBoard


class TensorBoard:
    """A folder of events, as a `Tracker`. A resumed run purges the events of the steps that it takes again."""

    id = None

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer: Any = SummaryWriter(str(run.folder / EVENTS), purge_step=purge, flush_secs=10)
        self._step = run.resume_step or 0
        self._excepthook = threading.excepthook
        threading.excepthook = self._thread_failed
        if run.config:
            lines = [f"    {name} = {json.dumps(value)}" for name, value in run.config.items()]  # a block of Markdown
            self._writer.add_text("settings", "\n".join(lines), self._step)

    def add(self, step: int, numbers: Numbers) -> None:
        """Write the numbers of a step."""
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, state: State) -> None:
        """Write pending events, and the final state of the run."""
        with contextlib.ExitStack() as last:
            last.callback(setattr, threading, "excepthook", self._excepthook)
            last.callback(self._writer.close)
            self._writer.add_text("state", state, self._step)

    def _thread_failed(self, thread: threading.ExceptHookArgs) -> None:
        """Print no traceback for the writer's thread: it stores an error, and the next write raises it."""
        if not type(thread.thread).__module__.startswith("tensorboard."):
            self._excepthook(thread)


# ---------------------------------------------------------------------------------------------- Weights & Biases


class WeightsAndBiases:
    """A run of Weights & Biases. It does not accept a step twice: a resumed run does not send these steps again."""

    EXIT_CODES: Mapping[State, int] = {"finished": 0, "interrupted": 130, "failed": 1}

    def __init__(self, run: TrackedRun) -> None:
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
            reinit="create_new",  # the program that calls `train` may have its own run
            settings=wandb.Settings(**settings),
        )
        self._next = int(self._run.step)

    def add(self, step: int, numbers: Numbers) -> None:
        """Log the numbers of a step."""
        if step >= self._next:
            self._run.log(dict(numbers), step=step)

    def close(self, state: State) -> None:
        """Upload pending numbers."""
        self._run.summary["state"] = state
        self._run.finish(exit_code=self.EXIT_CODES[state])


# ------------------------------------------------------------------------------------------------------- MLflow


class MLflow:
    """A run of MLflow. It keeps all values of a step: those of a step that is taken again come after the earlier ones.

    A thread sends the numbers, because requests take time, and are retried for minutes if the server is gone.
    """

    STATES: Mapping[State, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
    MOST_PARAMETERS, MOST_METRICS, LONGEST = 100, 1000, 6000  # per request, and characters of a parameter

    def __init__(self, run: TrackedRun) -> None:
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
        self._news = threading.Condition()  # protects the next three attributes
        self._waiting: list[Any] = []
        self._state: State | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="macrobatch-mlflow", daemon=True)
        self._thread.start()

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Send the settings as parameters. MLflow does not allow to change those that it already has."""
        from mlflow.entities import Param

        known = self._client.get_run(self.id).data.params
        new = [Param(name, str(value)[: self.LONGEST]) for name, value in config.items() if name not in known]
        for part in _parts(new, self.MOST_PARAMETERS):
            self._client.log_batch(self.id, params=part)

    def add(self, step: int, numbers: Numbers) -> None:
        """Pass the numbers to the thread. Raises its error if it could not send earlier ones."""
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        now = time.time_ns() // 1_000_000
        named = {re.sub(r"[^\w./: -]", "_", name): value for name, value in numbers.items()}
        with self._news:
            self._waiting += [Metric(name, float(value), now, step) for name, value in named.items()]
            self._news.notify()

    def close(self, state: State) -> None:
        """Wait until all numbers are sent, for at most `PATIENCE` seconds."""
        with self._news:
            self._state = state
            self._news.notify()
        self._thread.join(PATIENCE)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it has not taken the last numbers within {PATIENCE:.0f} seconds")

    def _send(self) -> None:
        """Send pending numbers until the run has ended. Runs in the thread."""
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

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        resume = "never" if run.id is None else "allow"
        monitors: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False}  # the run's own numbers are enough
        self._run: Any = trackio.init(
            run.project, name=run.name, config=dict(run.config), resume=resume, embed=False, **monitors
        )
        if run.id is not None:
            self._run.id = run.id  # it searches by name, which another run may have too
        self.id: str = self._run.id
        self._step = run.resume_step or 0

    def add(self, step: int, numbers: Numbers) -> None:
        """Log the numbers of a step."""
        self._step = step
        self._run.log(dict(numbers), step=step)

    def close(self, state: State) -> None:
        """Write the final state of the run."""
        import trackio

        self._run.log({"state": state}, step=self._step)
        trackio.finish()  # finishes the current run, which is this one


# ------------------------------------------------------------------------------------------------------ all of them


@dataclass(frozen=True)
class Kind:
    """A supported tracker: its title, the library to import, the package to install, and how to open it."""

    title: str
    library: str
    package: str
    open: Callable[[TrackedRun], Tracker]
    hint: str = ""


KINDS = {
    "tensorboard": Kind("TensorBoard", "tensorboard", "tensorboard", TensorBoard),
    "wandb": Kind(
        "Weights & Biases", "wandb", "wandb", WeightsAndBiases, "WANDB_MODE=offline keeps all in the run folder."
    ),
    "mlflow": Kind("MLflow", "mlflow", "mlflow", MLflow, "MLFLOW_TRACKING_URI says where it is."),
    "trackio": Kind("Trackio", "trackio", "trackio", Trackio),
}
