"""The run folder: which one to use, which run it belongs to, and its description ``run.json``.

``run.json`` holds the settings of the run, and its identity: everything that its losses depend on. A folder with other
content than a run to resume is never written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from macrobatch.errors import UsageError, counted
from macrobatch.train.files import replace_whole
from macrobatch.train.settings import Settings

Json = dict[str, Any]

DESCRIPTION = "run.json"
CONFIG = "config.toml"
PARTIAL = "run.json.partial"
RUNS = "runs"
PATIENCE = 5.0  # seconds to wait for a killed process to end


def run_to_resume(settings: Settings) -> Path | None:
    """The folder of the run to resume; None if a new run begins. Refuses a folder with other content."""
    if settings.out is None:
        return _of_this_launch() if _is_restarted() else None
    folder = Path(settings.out)
    if _is_run(folder) and (settings.resume or (_is_restarted() and _launch_of(folder) == launch())):
        return folder
    _require_idle(folder)
    require_unused(folder)
    if settings.resume is True:
        raise UsageError(f"there is no run in {folder}. Check the name, or leave out --resume to begin one there.")
    return None


def require_unused(folder: Path) -> None:
    """Refuse a folder that is not empty."""
    if folder.is_file():
        raise UsageError(f"--out {folder} is a file. It must be a folder, or a name that is free.")
    if _is_run(folder):
        raise UsageError(f"{folder} holds another run. Add --resume to continue that run, or choose another --out.")
    if folder.is_dir() and (found := sorted(path.name for path in folder.iterdir() if path.name != PARTIAL)):
        raise UsageError(f"{folder} is not a run folder, and not empty: it contains {found[0]}. Choose another --out.")


def _is_run(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def create_run_folder(settings: Settings) -> Path:
    """Create a new folder, which no other run has."""
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
        raise UsageError(f"the run folder cannot be created: {error}.") from None


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """A context in which no other process may train in this folder. The kernel unlocks it when this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise _busy_error(folder)
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _require_idle(folder: Path) -> None:
    """Refuse a folder in which another process trains. Ranks share this lock, so that all of them may check at once."""
    if not folder.is_dir():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(descriptor, fcntl.LOCK_SH):
            raise _busy_error(folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a folder, and return whether that worked. On a file system without locks it always seems to work."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _busy_error(folder: Path) -> UsageError:
    pid = _holder(folder)
    return UsageError(
        f"another process trains in {folder}{f' (process {pid})' if pid else ''}. Wait for it, end it"
        f"{f' (kill {pid})' if pid else ''}, or choose another --out."
    )


def _holder(folder: Path) -> int | None:
    """The process that has locked a folder, from /proc/locks: PID and inode are columns of it. None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = str(folder.stat().st_ino)
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode and int(words[4]) > 0:
                return int(words[4])
    return None


# ------------------------------------------------------------------------------------------------------- run.json


def write_run_json(
    folder: Path,
    *,
    settings: Settings,
    derived: Mapping[str, str],
    identity: Json,
    past: Past | None = None,
    unused: Sequence[str] = (),
) -> None:
    """Write ``run.json``. `unused` are settings that have no effect on this run."""
    content: Json = {
        "settings": settings.lasting,
        "unused": list(unused),
        "derived": dict(derived),
        "versions": versions(),
        "identity": identity,
        "launch": launch(),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": _command(),
    }
    if past is not None:
        content |= {"saved": past.is_saved, "earlier": list(past.owners)}
    replace_whole(folder / DESCRIPTION, json.dumps(content, indent=2))


def _command() -> str:
    """The command that started the run: ours, or another program's."""
    program = Path(sys.argv[0])
    is_ours = program.name == "macrobatch" or program.parts[-2:] == ("macrobatch", "__main__.py")
    return shlex.join(["macrobatch" if is_ours else sys.argv[0], *sys.argv[1:]])


def note_saved(folder: Path) -> None:
    """Note that the run has had a checkpoint: if none is found later, it does not start again from the first step."""
    if not description(folder).get("saved"):
        note(folder, saved=True)


def note(folder: Path, **facts: object) -> None:
    """Add facts about how the run ended to ``run.json``: its exit status, a text by the model."""
    content = description(folder)
    if any(content.get(name) != value for name, value in facts.items()):
        replace_whole(folder / DESCRIPTION, json.dumps(content | facts, indent=2))


def description(folder: Path) -> Json:
    """The content of ``run.json``."""
    try:
        content: Json = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        if isinstance(content["settings"], dict) and isinstance(content["identity"], dict):
            return content
    except FileNotFoundError:
        raise UsageError(f"{folder} is no run folder: there is no {DESCRIPTION} in it.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UsageError(f"{folder / DESCRIPTION} is damaged, or was not written by macrobatch.")


@dataclass(frozen=True, kw_only=True)
class Past:
    """The history of a run that is resumed."""

    folder: Path  # the folder of the run
    steps: int  # the number of steps that the run was planned for
    # hashes of its identity, and of those that it had before it was extended. Checkpoints of these owners belong
    # to it
    owners: tuple[str, ...]
    is_saved: bool  # whether it has ever had a checkpoint

    @classmethod
    def of(cls, folder: Path, identity: Json, *, own_warmup: bool) -> Past:
        """The history of the run in a folder. Refuses settings that would make it another run. More steps are allowed.

        `own_warmup`: whether the user set the warm-up. If not, it may follow the number of steps.
        """
        content = description(folder)
        saved, here = content["identity"], json.loads(json.dumps(identity))
        differing = [name for name in here if saved.get(name) != here[name]]
        if "steps" in differing and not own_warmup and _without_warmup(saved) == _without_warmup(here):
            differing = [name for name in differing if name != "learning_rate"]
        if "seed" in differing and "vocabulary" not in differing and "data" in differing:
            differing.remove("data")  # the seed selects the documents for validation, so it explains the difference
        if others := [name for name in differing if name != "steps"]:
            told = "; ".join(said for name in others for said in _differences(name, saved.get(name), here[name]))
            raise UsageError(
                f"{folder} was run with other settings: {told}. Resume it with these, or choose another --out."
            )
        earlier = content.get("earlier") or ()
        return cls(
            folder=folder,
            steps=int(saved["steps"]),
            owners=(digest_of(saved), *map(str, earlier)),
            is_saved=bool(content.get("saved")),
        )

    def require_whole(self, taken: int, steps: int) -> None:
        """Refuse a run whose checkpoints are gone, and one that cannot be extended."""
        if not taken and self.is_saved:
            raise UsageError(
                f"{self.folder} has lost its checkpoints. Is a volume not mounted? Restore them, or start "
                "another run in a new folder."
            )
        if steps < self.steps:
            raise UsageError(
                f"--steps {steps}: {self.folder} has {counted(self.steps, 'step')} and cannot be shortened, because "
                "its learning rate depends on them. Resume it without --steps and --epochs; Ctrl-C ends it sooner, "
                "with a checkpoint and a model."
            )
        if steps != self.steps and taken != self.steps:
            raise UsageError(
                f"{self.folder} has taken {taken} of its {self.steps} steps: only a run that is finished can be "
                "extended. Resume it without --steps and --epochs first."
            )


def _without_warmup(identity: Json) -> list[Any] | None:
    rate = identity.get("learning_rate")
    return [*rate[:1], *rate[2:]] if isinstance(rate, list) else None


def digest_of(identity: Json) -> str:
    """A hash of the identity of a run."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


# The settings that the lists in an identity hold, by name; and the entries that are hashes, of which only a difference
# is known.
LISTS = {
    "learning_rate": ("lr", "warmup", "schedule", "final-lr"),
    "adamw": ("beta1", "beta2", "eps", "weight-decay"),
    "batch_ramp": ("batch-ramp", "batch-ramp-start"),
}
DIGESTS = {"data": "the data is", "vocabulary": "the vocabulary is", "frozen": "the frozen weights are"}


def _differences(name: str, was: Any, now: Any) -> Iterator[str]:
    """The differences between two values of an identity, in words."""
    if name in DIGESTS:
        yield f"{DIGESTS[name]} not the same"
    elif isinstance(was, list) and isinstance(now, list) and name in LISTS:
        for part, before, after in zip(LISTS[name], was, now, strict=False):
            if before != after:
                yield f"{part} was {_short(before)}, now {_short(after)}"
    elif isinstance(was, dict) and isinstance(now, dict):
        for part in dict.fromkeys([*was, *now]):
            if was.get(part) != now.get(part):
                prefix = "batch-size" if (name, part) == ("batch", "samples") else f"{name}-{part}"
                yield f"{prefix} was {_short(was.get(part))}, now {_short(now.get(part))}"
    else:
        yield f"{name.replace('_', '-')} was {_short(was)}, now {_short(now)}"


def _short(value: object) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def versions() -> dict[str, str]:
    """The versions of the packages that the numbers of a run may depend on."""
    packages = ("macrobatch", "torch", "transformers", "tokenizers")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # imported from the sources, without an installation
        return "not installed"


# ------------------------------------------------------------------------------------------ restarts by torchrun


def launch() -> str | None:
    """An id of the torchrun that started this process, the same after restarts; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != "none":
        return name
    return f"{socket.gethostname()}-{os.getppid()}"  # torchrun has no id without --standalone or --rdzv-id


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
