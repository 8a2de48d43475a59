"""A plugin of pytest that runs the suite of a peer with our class in place of its own, and notes how each test ends.

`python -m peers` sets what it reads from the environment:

- ``PEERS_PACKAGE``: the package of the peer.
- ``PEERS_OURS``: the function that says what takes the place of what, as "module:name"; empty to change nothing.
- ``PEERS_DATASETS``: the folder of stand-ins for datasets.
- ``PEERS_NOTES``: the file for the notes, a line of JSON for each test that begins or ends. Tests that it has already
  are not run again, so that a run that hung or crashed can continue.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers import hub


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Substitute before the suite imports anything: its conftest may prefer its own sources to the installed ones."""
    importlib.import_module(os.environ["PEERS_PACKAGE"])
    cleanup = contextlib.ExitStack()
    early_config.add_cleanup(cleanup.close)
    if data := os.environ.get("PEERS_DATASETS"):
        cleanup.enter_context(hub.datasets_redirected(Path(data)))
    if ours := os.environ["PEERS_OURS"]:
        cleanup.enter_context(substituted(ours))
    early_config.pluginmanager.register(Notes(Path(os.environ["PEERS_NOTES"])))


# ---------------------------------------------------------------------------------------------- our classes

Patch = tuple[type, str, Any, Any]  # a class of theirs, the method that is replaced, ours and theirs


@contextlib.contextmanager
def substituted(name: str) -> Iterator[None]:
    """A context in which our class is in place of theirs."""
    kind, method, ours, theirs = pkgutil.resolve_name(name)()
    setattr(kind, method, ours)
    try:
        yield
    finally:
        setattr(kind, method, theirs)


def _stock_new(cls: type, *_: Any, **__: Any) -> Any:
    """What a class without a ``__new__`` does. One that has had its own cannot lose it again."""
    return object.__new__(cls)


def substitute_trainer() -> Patch:
    """Every `Trainer` of transformers that is made, of whatever class, is one of ``exact(its class)``."""
    from transformers import Trainer

    from macrobatch.transformers import exact
    from macrobatch.transformers.trainer import ExactTrainer

    made: Any = functools.cache(exact)

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(cls if issubclass(cls, ExactTrainer) else made(cls))

    return Trainer, "__new__", new, _stock_new


def substitute_accelerator() -> Patch:
    """Every `Accelerator` of Accelerate that is made is ours. Subclasses of the suite stay as they are."""
    import accelerate

    from macrobatch.accelerate import Accelerator

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(Accelerator if cls is accelerate.Accelerator else cls)

    return accelerate.Accelerator, "__new__", new, _stock_new


def substitute_strategy() -> Patch:
    """Every `Trainer` of Lightning gets an `ExactStrategy` around its strategy, with the steps that it was given."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from macrobatch.errors import BackendError
    from macrobatch.lightning import ExactStrategy

    theirs = Trainer.__init__

    @functools.wraps(theirs)
    def ours(self: Any, **options: Any) -> Any:
        given = options.get("callbacks") or []
        callbacks = given if isinstance(given, list) else [given]
        schedules = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
        number = options.get("accumulate_grad_batches", 1)
        if schedules and number != 1:  # an error of Lightning's
            return theirs(self, **options)
        steps = schedules[0].scheduling if schedules else number
        with contextlib.suppress(BackendError):  # as documented: DeepSpeed, XLA and the first FSDP stay as they are
            options["strategy"] = ExactStrategy(options.get("strategy", "auto"), steps=steps)
            options["callbacks"] = [one for one in callbacks if one not in schedules]
        return theirs(self, **options)

    return Trainer, "__init__", ours, theirs


# ---------------------------------------------------------------------------------------------- notes


class Notes:
    """Writes how each test ends to a file, at once, because the process may be ended at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: dict[str, tuple[str, str]] = {}

    def _write(self, **line: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        before = read_notes(self._path)
        again = [item for item in items if item.nodeid in before]
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item.nodeid not in before]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, end="not collected", why=_reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._ends.pop(nodeid, None)
        self._write(test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "rerun":  # by another plugin
            self._ends.pop(report.nodeid, None)
        elif report.failed or report.skipped or report.when == "call":
            before = self._ends.get(report.nodeid)
            if before is None or before[0] != "failed":
                self._ends[report.nodeid] = (report.outcome, "" if report.passed else _reason(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self._ends:
            end, why = self._ends[nodeid]
            self._write(test=nodeid, end=end, why=why)


def _reason(report: Any) -> str:
    """The line of a report that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:1000]
    if isinstance(report.longrepr, tuple):  # of a skip
        return str(report.longrepr[2])
    return str(report.longrepr)[-1000:]


def read_notes(path: Path) -> dict[str, tuple[str, str]]:
    """How each test ended, and why. A test that began and did not end is "lost"."""
    ends: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the process ended while it wrote
            note = json.loads(line)
            ends[note["test"]] = (note.get("end", "lost"), note.get("why", "the process ended in the middle of it"))
    return ends
