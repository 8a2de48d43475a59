"""Programs in processes that start at once: forked from one that has imported torch, which takes seconds.

Such a process has its own arguments, environment, folder, output and end. From the process that it is forked from it
has the flags of Python, and the order of a set of strings.
"""

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import harness

Done = subprocess.CompletedProcess[str]


class Preloaded:
    """Python with some flags, which has imported some modules.

    with Preloaded("torch", flags=("-W", "error")) as python:
        done = python.run("-c", "import torch; print(torch.ones(2).sum())")
    """

    def __init__(self, *modules: str, flags: tuple[str, ...] = ()) -> None:
        command = [sys.executable, *flags, __file__, *modules]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=harness.environment()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=60)

    def run(
        self, *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> Done:
        """What `subprocess.run` says of Python with these words: "-c" and code, "-m" and a module, or a file."""
        with tempfile.TemporaryDirectory() as folder:
            screens = [f"{folder}/stdout", f"{folder}/stderr"]
            question: dict[str, Any] = {"words": [*map(str, words)], "screens": screens, "cwd": str(cwd or Path.cwd())}
            question |= {"env": dict(os.environ if env is None else env), "seconds": timeout}
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(question) + "\n")
            self._server.stdin.flush()
            status = json.loads(self._server.stdout.readline())
            stdout, stderr = (Path(screen).read_text() for screen in screens)
        assert status is not None, f"still running after {timeout} s:\n{stdout}{stderr}"
        return Done([*map(str, words)], status, stdout, stderr)


def serve() -> dict[str, Any] | None:
    """Start a process for each question, and wait for it. Returns the question in that process, and None at the end."""
    for line in sys.stdin:
        question = json.loads(line)
        pid = os.fork()
        if not pid:
            return question
        print(json.dumps(exit_status(pid, question["seconds"])), flush=True)
    return None


def exit_status(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def become(question: dict[str, Any]) -> None:
    """Run its program as if Python had been started with it."""
    modes = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(screen, modes) for screen in question["screens"])]
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(question["cwd"])
    os.environ.clear()
    os.environ.update(question["env"])
    first, *rest = question["words"]
    if first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        run(rest[0], "<string>")
    elif first == "-m":
        sys.path[0], sys.argv = question["cwd"], rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).resolve().parent), [first, *rest]
        run(Path(first).read_text(), first)


def run(source: str, file: str) -> None:
    """Run a program as the main module, which it stays: processes that it starts look for its classes there."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    if Path(file).exists():
        main.__file__ = file
    exec(compile(source, file, "exec"), main.__dict__)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # before the forks, which then share it
    if (asked := serve()) is not None:
        become(asked)
