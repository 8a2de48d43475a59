"""The run folder: which one, whose it is, and what says so in it.

``run.json`` tells the settings that a run was begun with, and its identity: what its losses depend on. A folder that
holds anything else than a run to go on with is never written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from macrobatch.errors import UsageError
from macrobatch.train.settings import Settings

Json = dict[str, Any]

DESCRIPTION = "run.json"
PARTIAL = "run.json.partial"
RUNS = "runs"
PATIENCE = 5.0  # seconds for a process that was killed to be gone


def chosen(settings: Settings) -> Path | None:
    """The folder of a run to go on with; None where a new one is to be begun. Refuses a folder of something else."""
    if settings.out is None:
        return _of_this_launch() if _is_restarted() else None
    folder = Path(settings.out)
    if _is_run(folder) and (settings.resume or (_is_restarted() and _launch_of(folder) == launch())):
        return folder
    _require_unused(folder)
    return None


def _require_unused(folder: Path) -> None:
    if folder.is_file():
        raise UsageError(f"--out {folder} is a file. It must be a folder, or a name that is free.")
    if _is_run(folder):
        raise UsageError(f"{folder} holds another run. Add --resume to go on with it, or choose another --out.")
    if folder.is_dir() and (found := sorted(path.name for path in folder.iterdir() if path.name != PARTIAL)):
        raise UsageError(f"{folder} is no run folder, and not empty: it holds {found[0]}. Choose another --out.")


def _is_run(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def made(settings: Settings) -> Path:
    """A new folder, which no other run has."""
    try:
        if settings.out is not None:
            Path(settings.out).mkdir(parents=True, exist_ok=True)
            return Path(settings.out)
        name, number = Path(settings.model).resolve().name if "/" in settings.model else settings.model, 1
        Path(RUNS).mkdir(exist_ok=True)
        while True:
            try:
                (folder := Path(RUNS, f"{name.removesuffix('.json')}-{number}")).mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UsageError(f"the run folder cannot be made: {error}.") from None


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other process may train here. The kernel lets go where this one ends, however it does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):  # a file system without locks: nobody can know
        while not _is_mine(descriptor):
            if time.monotonic() > deadline:
                raise UsageError(f"{folder} is being trained by another process: wait for it, or end it.")
            time.sleep(0.1)


def _is_mine(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- run.json


def described(folder: Path, *, settings: Settings, derived: Mapping[str, str], identity: Json) -> None:
    """Write it down: aside, then renamed."""
    content = {
        "settings": settings.lasting,
        "derived": dict(derived),
        "versions": versions(),
        "identity": identity,
        "launch": launch(),
    }
    aside = folder / PARTIAL
    with aside.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / DESCRIPTION)


def description(folder: Path) -> Json:
    """What is written there."""
    try:
        content: Json = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        if isinstance(content["settings"], dict) and isinstance(content["identity"], dict):
            return content
    except FileNotFoundError:
        raise UsageError(f"{folder} is no run folder: there is no {DESCRIPTION} in it.") from None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{folder / DESCRIPTION} is damaged, or was not written by macrobatch.")


def same_run(folder: Path, identity: Json) -> None:
    """Refuse to go on with a run under settings that would make it another one."""
    saved = description(folder)["identity"]
    here = json.loads(json.dumps(identity))
    differing = [name for name in here if saved.get(name) != here[name]]
    if differing:
        told = "; ".join(f"{name} was {_short(saved.get(name))}, now {_short(here[name])}" for name in differing)
        raise UsageError(f"{folder} is another run: {told}. Go on with its own settings, or choose another --out.")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def versions() -> dict[str, str]:
    """Of what the numbers of a run may depend on."""
    packages = ("macrobatch", "torch", "transformers", "tokenizers")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return "not installed"


# ------------------------------------------------------------------------------------- started again by torchrun


def launch() -> str | None:
    """The same for all attempts of one torchrun; None without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != "none":
        return name
    return f"{socket.gethostname()}-{os.getppid()}"  # without --standalone or --rdzv-id it does not name itself


def _is_restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _launch_of(folder: Path) -> str | None:
    try:
        found = description(folder).get("launch")
    except UsageError:
        return None
    return found if isinstance(found, str) else None


def _of_this_launch() -> Path | None:
    found = [folder for folder in Path(RUNS).glob("*") if _launch_of(folder) == launch()]
    return max(found, key=lambda folder: (folder / DESCRIPTION).stat().st_mtime, default=None)
