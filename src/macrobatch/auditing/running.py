"""The command: run a program as it is, watch it, and end it after some windows."""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

from macrobatch._io.files import replacing
from macrobatch.auditing.judging import FAILED, judge
from macrobatch.auditing.meeting import Meeting
from macrobatch.auditing.report import AuditReport
from macrobatch.auditing.watcher import Watcher
from macrobatch.errors import UsageError

STATUS = {"exact": 0, "wrong": 1, "unknown": 2}


class _EnoughError(BaseException):
    """Ends the program: enough windows were seen. `except Exception` does not catch it."""


def audit_program(
    program: Sequence[str], *, is_module: bool, windows: int, json_file: str | None, html_file: Path | None
) -> int:
    """Run a program and write what was seen of it. Returns the exit status."""
    if not is_module and not Path(program[0]).is_file():
        raise UsageError(f"there is no program {program[0]}. Name a Python file, or a module after -m.")
    if json_file not in (None, "-"):
        json_file = str(Path(json_file or "").absolute())  # the program may change its folder
    html_file = None if html_file is None else html_file.absolute()
    for file in (html_file, None if json_file in (None, "-") else Path(json_file or "")):
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"there is no folder {file.parent}. Name a file in an existing folder.")

    def end(seen: int) -> None:
        if windows and seen >= windows:
            watcher.stop()  # a program that catches everything runs on
            raise _EnoughError

    shared = None if json_file in (None, "-") else Path(json_file or "").parent
    watcher, meeting = Watcher(end), Meeting(shared if _has_several_nodes() else None)
    report = AuditReport(watcher)
    with _own_output(json_file == "-") as output:
        with watcher.watching():
            failure = _run(program, watcher, is_module=is_module)
        if failure is not None:
            watcher.failures.append(f"{FAILED}: {failure}")
        is_first = _meet(watcher, meeting, report)
        if is_first:
            _write(report, output, json_file, html_file)
    return STATUS[report.verdict] if is_first else 0


def _run(program: Sequence[str], watcher: Watcher, *, is_module: bool) -> str | None:
    """Run the program as Python would. Returns why it failed, or None; what came after enough windows is no failure."""
    before, main = (sys.argv, list(sys.path)), sys.modules["__main__"]
    try:
        if is_module:
            sys.argv = list(program)
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            sys.path.insert(0, str(Path(program[0]).resolve().parent))
            _run_file(Path(program[0]).absolute())
    except _EnoughError:
        return None
    except SystemExit as left:
        if left.code not in (None, 0) and not watcher.has_stopped:
            return f"it ended with status {left.code}"
    except KeyboardInterrupt:
        return None  # the user has seen enough
    except BaseException as error:
        if watcher.has_stopped:
            return None
        if _is_of_runpy(error):
            raise UsageError(f"{error}. Name a module that can be run after -m, or a file.") from None
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        sys.argv, sys.path[:] = before
        sys.modules["__main__"] = main
    if not watcher.has_stopped:
        watcher.finish()
    return None


def _is_of_runpy(error: BaseException) -> bool:
    """Whether there is no such module: `runpy` itself says that, not the program."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ImportError) and frame.f_globals.get("__name__") == "runpy"


def _run_file(file: Path) -> None:
    """Run a file as Python does: ``__file__`` is absolute, and ``sys.argv[0]`` is what was given."""
    code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    sys.modules["__main__"] = main = ModuleType("__main__")
    vars(main).update(__file__=str(file), __builtins__=builtins, __annotations__={}, __cached__=None)
    exec(code, vars(main))


def _has_several_nodes() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")


def _meet(watcher: Watcher, meeting: Meeting, report: AuditReport) -> bool:
    """Bring together what all ranks have seen. Returns whether this rank reports it."""
    world, rank = watcher.world_size, watcher.rank
    if world == 1:
        return True
    meeting.tell(rank, watcher.windows, watcher.failures)
    if rank:
        return False
    told = [one for one in meeting.listen(world) if one is not None]
    report.finish(judge([one.windows for one in told], [f for one in told for f in one.failures], world=world))
    meeting.leave(rank, world, all_listen=False)
    return True


@contextlib.contextmanager
def _own_output(is_alone: bool) -> Iterator[IO[str]]:
    """The standard output. If it must hold nothing else, the program and its children write to standard error."""
    if not is_alone:
        yield sys.stdout
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(saved, "w", encoding="utf-8", closefd=False) as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _write(report: AuditReport, output: IO[str], json_file: str | None, html_file: Path | None) -> None:
    print(f"\n{report}", file=sys.stderr if json_file == "-" else output, flush=True)
    if json_file == "-":
        output.write(report.to_json() + "\n")
    elif json_file is not None:
        with replacing(json_file) as file:
            file.write(report.to_json() + "\n")
    if html_file is not None:
        with replacing(html_file) as file:
            file.write(report.to_html())
