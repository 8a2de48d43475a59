"""`macrobatch train` in processes that can be killed at any moment, and runs compared bitwise.

Starting the command takes seconds, nearly all for imports. So one process imports, and forks a process for every start
of the command, which is then a process like any other: it has its own arguments, output, ranks, and it can be killed.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import commands

STEPS, SAVE_EVERY = 30, 3
SECONDS = 90  # how long one start of the command may take
WORDS = "the cat sat on a mat and saw one more dog run over hills far away"

# ------------------------------------------------------------------------------------------- starting the command


@dataclass
class Started:
    """Processes of one start of the command, one for each rank."""

    command: "Command"
    pids: list[int]
    screen: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        for pid in self.pids:
            os.kill(pid, number)  # not waited for yet, so nobody else has the number

    def wait(self) -> list[int]:
        """The exit status of each; minus the signal where one ended it."""
        statuses = [self.command.asked({"wait": pid, "seconds": SECONDS}) for pid in self.pids]
        self.command.running.remove(self)
        assert None not in statuses, f"still running after {SECONDS} s:\n{self.output}"
        return statuses

    @property
    def output(self) -> str:
        return self.screen.read_text(errors="replace")


class Command:
    """The process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._starts = folder, 0
        self.running: list[Started] = []
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=environment(folder),
        )  # fmt: skip

    def start(
        self, *arguments: object, ranks: int = 1, crash: tuple[str, int] | None = None, memory: int | None = None
    ) -> Started:
        """With `crash`, it kills itself just before so many uses of files whose names begin so.

        With `memory`, it may have so many bytes; 0: as many as it likes, but it says how many that were.
        """
        self._starts += 1
        screen = self.folder / f"screen-{self._starts}"
        question = {"start": ["train", *map(str, arguments)], "ranks": ranks, "screen": str(screen), "crash": crash}
        pids = self.asked(question | {"memory": memory})
        self.running.append(Started(self, pids, screen))
        return self.running[-1]

    def run(self, *arguments: object, ranks: int = 1, memory: int | None = None) -> str:
        """To its good end."""
        return self.ended(self.start(*arguments, ranks=ranks, memory=memory))

    def ended(self, started: Started) -> str:
        """What it said, after its good end."""
        assert set(started.wait()) == {0}, started.output
        return started.output

    def memory_of(self, *arguments: object, ranks: int = 1) -> int:
        """The most bytes that any rank of such a run has, in its good end."""
        started = self.start(*arguments, ranks=ranks, memory=0)
        self.ended(started)
        return max(int(Path(f"{started.screen}.{rank}").read_text()) for rank in range(ranks))

    def asked(self, question: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        for started in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                started.kill()
            started.wait()
        self._server.communicate(timeout=SECONDS)


def environment(folder: Path) -> dict[str, str]:
    return harness.environment(
        OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", MACROBATCH_CACHE=str(folder / "cache"), PYTHONUNBUFFERED="1"
    )


def serve() -> None:
    """Answer questions, one a line: start processes, wait for one."""
    import torch

    for module in commands.IMPORTED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.freeze()  # before the forks, which then share it

    for line in sys.stdin:
        question = json.loads(line)
        answer: list[int] | int | None
        if "start" in question:
            port = free_port() if question["ranks"] > 1 else None
            answer = [forked(question, rank, port) for rank in range(question["ranks"])]
        else:
            answer = waited(question["wait"], question["seconds"])
        print(json.dumps(answer), flush=True)


def forked(question: dict[str, Any], rank: int, port: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    import macrobatch.cli

    screen = os.open(question["screen"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (screen, 1), (screen, 2)):
        os.dup2(source, target)
    if port is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(question["ranks"]), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(question["ranks"])}
    if question["crash"] is not None:
        kill_before(*question["crash"])
    if question["memory"]:
        resource.setrlimit(resource.RLIMIT_DATA, (question["memory"],) * 2)
    elif question["memory"] is not None:
        watch_memory(Path(f"{question['screen']}.{rank}"))
    status = 99
    try:
        status = macrobatch.cli.main(question["start"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def kill_before(folder: str, uses: int) -> None:
    """Let this process kill itself when it opens, makes, renames or removes something there for the so-many-th time."""
    left = uses

    def see(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "shutil.")):
            left -= any(isinstance(one, str | os.PathLike) and str(one).startswith(folder) for one in arguments)
            if left == 0:
                left = -1  # to kill is an event too
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)


def watch_memory(file: Path) -> None:
    """Write the most bytes that this process has had, as often as there are more."""

    def watch() -> None:
        most = 0
        while True:
            status = Path("/proc/self/status").read_text()
            now = 1024 * int(status.partition("VmData:")[2].split()[0])
            if now > most:
                most = now
                file.write_text(str(most))
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()


def waited(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


# ------------------------------------------------------------------------------------------------ runs, and their ends


def settings_in(folder: Path, batch: Sequence[object] = ("--batch-size", 8)) -> list[object]:
    """A small model, data of different lengths, a checkpoint every few steps."""
    draw, words, file = random.Random(0), WORDS.split(), folder / "data.txt"
    texts = (" ".join(draw.choice(words) for _ in range(draw.randrange(3, 60))) for _ in range(200))
    file.write_text("\n\n".join(texts))
    return [
        *("--model", "tiny", "--data", file, "--vocabulary-size", 300, "--seq-len", 48, *batch),
        *("--micro", "tokens:192", "--steps", STEPS, "--save-every", SAVE_EVERY, "--validate-every", 10),
        *("--sample-tokens", 0),
    ]


def lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of its metrics."""
    file = run / "metrics.jsonl"
    content = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]


def taken(run: Path) -> int:
    """The last step in its metrics."""
    return max((row["step"] for row in lines(run)), default=0)


def again(run: Path) -> list[str]:
    """How to go on with it; a process that was killed in its first moments has not begun a run."""
    return ["--resume"] if (run / "run.json").exists() else []


def checkpoints(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def until(started: Started, condition: Callable[[], bool]) -> bool:
    """Wait until it holds. False where the process ended before."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if condition():
            return True
        if not all(is_running(pid) for pid in started.pids):
            return False
        time.sleep(0.002)
    raise AssertionError(f"nothing for {SECONDS} s:\n{started.output}")


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def same(run: Path, other: Path) -> None:
    """Bitwise the same end: the exported model, and all of the last checkpoint; every step is told of, once."""
    assert (run / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()
    last = f"step-{STEPS:08d}"
    assert last in checkpoints(run)
    assert not [name for name in checkpoints(run) if "partial" in name]
    tensors = sorted(path.name for path in (other / "checkpoints" / last).glob("*.safetensors"))
    assert tensors
    for name in tensors:
        ours, theirs = (one / "checkpoints" / last / name for one in (run, other))
        assert ours.read_bytes() == theirs.read_bytes(), name
    told = [(row["step"], row["loss"], row["grad_norm"]) for row in lines(run)]
    assert told == [(row["step"], row["loss"], row["grad_norm"]) for row in lines(other)]
    assert [step for step, _, _ in told] == list(range(1, STEPS + 1))


if __name__ == "__main__":
    serve()
