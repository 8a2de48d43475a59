"""`macrobatch train` killed, interrupted, restarted, on other ranks, with damaged checkpoints: as if nothing had been.

`harness/killing.py` starts the command; where torchrun starts the ranks, they are started as users do.
"""

import contextlib
import hashlib
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.killing import (
    SECONDS,
    STEPS,
    Command,
    again,
    checkpoints,
    environment,
    is_running,
    lines,
    same,
    settings_in,
    taken,
    until,
)
from harness.ranks import end, start_time

# ------------------------------------------------------------------------------------------------- what a test says


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Iterator[Command]:
    command = Command(tmp_path_factory.mktemp("killed"))
    yield command
    command.close()


@pytest.fixture(scope="module")
def settings(command) -> list[object]:
    return settings_in(command.folder)


@pytest.fixture(scope="module")
def undisturbed(command, settings) -> Callable[[int], Path]:
    """The run that nothing happened to, on so many ranks."""
    made: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in made:
            made[ranks] = command.folder / f"undisturbed-{ranks}"
            command.run(*settings, "--out", made[ranks], ranks=ranks)
        return made[ranks]

    return run


# ------------------------------------------------------------------------------------------------------- kill -9


def test_killed_twenty_times(command, settings, undisturbed):
    """At random moments: while it starts, in the middle of a step, of a save, of the export in the end."""
    run, draw = command.folder / "killed", random.Random(1)
    killed, moments = 0, []
    for kill in range(20):
        before, now = taken(run), time.monotonic()
        started = command.start(*settings, "--out", run, *again(run))
        if kill % 4:  # somewhere within a step, a little further each time; the last ones when all steps are taken
            wanted = min(round(STEPS * kill / 17), STEPS)
            until(started, lambda wanted=wanted: taken(run) >= wanted)
            time.sleep(draw.uniform(0, 1.5) * lines(run)[-1]["seconds"])
        else:  # while it starts
            moment = now + draw.uniform(0, 0.6)
            until(started, lambda moment=moment, before=before: time.monotonic() > moment or taken(run) > before)
        started.kill()
        status = started.wait()
        assert status in ([-signal.SIGKILL], [0]), started.output
        killed += status != [0]
        moments.append(taken(run))
    assert killed >= 15, f"most were killed too late: {moments}"
    assert len(set(moments)) >= 10, f"not many moments: {moments}"
    command.run(*settings, "--out", run, *again(run))
    same(run, undisturbed(1))


def test_killed_at_every_use_of_a_file(command, settings, undisturbed):
    """Before one is opened, made, renamed or removed: some of the places, another stride away each time.

    `make chaos` does this by the hundred.
    """
    run, uses, killed = command.folder / "crashed", 3, 0
    while True:
        started = command.start(*settings, "--out", run, *again(run), crash=(str(run), uses))
        status = started.wait()
        assert status in ([-signal.SIGKILL], [0]), started.output
        if status == [0]:
            break
        killed += 1
        uses += 7
    assert killed >= 10
    same(run, undisturbed(1))


def test_an_adapter_killed_at_uses_of_files(command, settings, undisturbed):
    """Its checkpoints hold no frozen weights, and its export is two folders."""
    adapted = [*settings, "--model", undisturbed(1) / "model", "--lora", "--optimizer", "muon"]
    wanted, run, uses, killed = command.folder / "adapted", command.folder / "crashed adapter", 5, 0
    command.run(*adapted, "--out", wanted)
    while True:
        started = command.start(*adapted, "--out", run, *again(run), crash=(str(run), uses))
        status = started.wait()
        assert status in ([-signal.SIGKILL], [0]), started.output
        if status == [0]:
            break
        killed += 1
        uses += 17
    assert killed >= 4
    same(run, wanted)
    files = [one / "adapter" / "adapter_model.safetensors" for one in (run, wanted)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_killed_ranks_come_back_by_themselves(command, settings, undisturbed):
    """By torchrun --max-restarts, without --resume: first one rank is killed, then the other. In the end it is torchrun
    that gets a signal, and passes it on.
    """
    run = command.folder / "restarted"
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    program = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "macrobatch", "train"]
    screen = command.folder / "torchrun"
    with screen.open("wb") as file:
        launched = subprocess.Popen(
            [*program, *map(str, settings), "--out", str(run)],
            stdout=file, stderr=subprocess.STDOUT, env=environment(command.folder), cwd=command.folder,
        )  # fmt: skip
    seen: set[int] = set()
    try:
        for rank, step in ((1, 4), (0, 8)):
            wait_for(lambda wanted=step: taken(run) >= wanted, launched, screen)
            workers = workers_of(launched.pid)
            seen |= set(workers)
            os.kill(workers[rank], signal.SIGKILL)
        wait_for(lambda: taken(run) >= 12, launched, screen)
        launched.terminate()
        launched.wait(SECONDS)
    finally:
        left = {pid: start_time(pid) for pid in workers_of(launched.pid)}
        end(launched, command.folder)
        for pid, started in left.items():
            with contextlib.suppress(OSError):
                if start_time(pid) == started:
                    os.kill(pid, signal.SIGKILL)
    output = screen.read_text()
    assert len(seen) == 4, output
    assert "SIGTERM: ended after step" in output, output
    assert f"step-{taken(run):08d}" in checkpoints(run)
    command.run(*settings, "--out", run, "--resume", ranks=2)
    same(run, undisturbed(2))


def test_ranks_end_with_their_launcher(command, settings, undisturbed):
    """Torchrun is killed outright, and cannot tell them: they save, and end."""
    run, screen = command.folder / "orphans", command.folder / "torchrun-killed"
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "macrobatch"]
    with screen.open("wb") as file:
        launched = subprocess.Popen(
            [*program, "train", *map(str, settings), "--save-every", "0", "--steps", "2000", "--out", str(run)],
            stdout=file, stderr=subprocess.STDOUT, env=environment(command.folder), cwd=command.folder,
        )  # fmt: skip
    left: dict[int, str] = {}
    try:
        wait_for(lambda: taken(run) >= 3, launched, screen)
        left = {pid: start_time(pid) for pid in workers_of(launched.pid)}
        assert len(left) == 2
        launched.kill()
        launched.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while any(is_same(pid, started) for pid, started in left.items()):
            assert time.monotonic() < deadline, screen.read_text()[-4000:]
            time.sleep(0.05)
    finally:
        end(launched, command.folder)
        for pid, started in left.items():
            if is_same(pid, started):
                os.kill(pid, signal.SIGKILL)
    assert taken(run) < 2000
    assert checkpoints(run) == [f"step-{taken(run):08d}"]


def is_same(pid: int, started: str) -> bool:
    with contextlib.suppress(OSError):
        return start_time(pid) == started and is_running(pid)
    return False


def wait_for(condition: Callable[[], bool], launched: subprocess.Popen, screen: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert launched.poll() is None, screen.read_text()[-4000:]
        assert time.monotonic() < deadline, screen.read_text()[-4000:]
        time.sleep(0.01)


def workers_of(launcher: int) -> list[int]:
    """Its processes, the first rank first."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + (entry / "environ").read_bytes())
            if parent == launcher and rank:
                found[int(rank[1])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


# ------------------------------------------------------------------------------------------------- other ranks


@pytest.mark.parametrize(
    ("first", "then", "parallel"),
    [(2, 1, "ddp"), (2, 4, "ddp"), (1, 2, "ddp"), (2, 1, "fsdp"), (2, 4, "fsdp"), (4, 2, "hsdp")],
)
def test_on_other_ranks(command, settings, undisturbed, first, then, parallel):
    """Saved on some, resumed on others: the same losses to rounding, and every step once."""
    run = command.folder / f"{parallel}-from-{first}-to-{then}"
    shards = ["--shard-ranks", 2] if parallel == "hsdp" else []
    started = command.start(*settings, "--parallel", parallel, *shards, "--out", run, ranks=first)
    assert until(started, lambda: "step-00000012" in checkpoints(run)), started.output
    started.kill()
    assert set(started.wait()) == {-signal.SIGKILL}
    alone = ["--parallel", "ddp"] if then == 1 else []
    command.run(*settings, *alone, "--out", run, "--resume", ranks=then)
    expected, got = lines(undisturbed(1)), lines(run)
    assert [row["step"] for row in got] == list(range(1, STEPS + 1))
    for row, other in zip(got, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["items"] == other["items"]


# --------------------------------------------------------------------------------------------- Ctrl-C and SIGTERM


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGHUP, 1), (signal.SIGTERM, 2)]
)
def test_a_signal_ends_the_window_and_saves(command, settings, undisturbed, number, ranks):
    """Though the step is none of those that are saved. All ranks end together, where only one got the signal too."""
    run = command.folder / f"{number.name}-{ranks}"
    endless = [*settings, "--save-every", 0, "--out", run]
    started = command.start(*endless, ranks=ranks)
    assert until(started, lambda: taken(run) >= 4), started.output
    os.kill(started.pids[-1], number)
    assert started.wait() == [128 + number] * ranks, started.output
    assert "Traceback" not in started.output
    assert f"macrobatch train --resume --out {run}" in started.output
    step = taken(run)
    assert checkpoints(run) == [f"step-{step:08d}"]
    command.run(*settings, "--out", run, "--resume", ranks=ranks)
    same(run, undisturbed(ranks))


def test_a_pipe_that_is_closed_ends_the_window_and_saves(command, settings, undisturbed):
    """As by `| head -3`: nobody will see how it goes on."""
    run = command.folder / "head"
    program = [sys.executable, "-m", "macrobatch", "train", *map(str, settings), "--save-every", "0", "--out", str(run)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, cwd=command.folder, env=environment(command.folder), **pipes) as started:
        for _ in range(3):
            started.stdout.readline()
        started.stdout.close()
        said = started.stderr.read().decode()
    assert started.returncode == 128 + signal.SIGPIPE, said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said  # Python's own complaint when it ends
    assert all(line.startswith("macrobatch: ") for line in said.splitlines()), said
    assert f"after step {taken(run)}, with a checkpoint" in said
    assert f"macrobatch train --resume --out {run}" in said
    assert 1 <= taken(run) < STEPS
    assert checkpoints(run) == [f"step-{taken(run):08d}"]
    command.run(*settings, "--out", run, "--resume")
    same(run, undisturbed(1))


def test_a_terminal_that_is_closed_ends_the_window_and_saves(command, settings, undisturbed):
    run = command.folder / "terminal"
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "macrobatch", "train", *map(str, settings), "--save-every", "0", "--out", str(run)]
    surroundings = environment(command.folder) | {"TERM": "xterm"}
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(program, cwd=command.folder, env=surroundings, start_new_session=True, **pipes) as started:
        os.close(theirs)
        while taken(run) < 2 and started.poll() is None:
            if select.select([ours], [], [], 0.01)[0]:
                os.read(ours, 65536)
        os.close(ours)
        assert started.wait(SECONDS) in (128 + signal.SIGPIPE, 128 + signal.SIGHUP)
    assert checkpoints(run) == [f"step-{taken(run):08d}"]
    command.run(*settings, "--out", run, "--resume")
    same(run, undisturbed(1))


TWICE = """
import os, signal, time
from macrobatch.train.signals import Signals
with Signals(say=lambda text: print(text, flush=True)) as signals:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


def test_the_first_signal_says_what_it_does_and_the_second_ends_at_once():
    with subprocess.Popen([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        try:
            assert started.stdout.readline() == b"ready\n"
            started.send_signal(signal.SIGINT)
            said = started.stdout.readline().decode()
            assert "after this step" in said
            assert "again" in said
            time.sleep(0.3)
            started.send_signal(signal.SIGINT)
            assert started.wait(20) == 128 + signal.SIGINT
            assert started.stderr.read() == b""
        finally:
            started.kill()  # or the test would wait for it


def test_nohup_keeps_a_run_alive():
    program = TWICE.replace('print("ready"', "signal.raise_signal(signal.SIGHUP); print(signals.received")
    program = program.replace("while True:", "if False:")
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + program
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60).stdout == b"0\n"


# ------------------------------------------------------------------------------------------------ two at a time


@pytest.mark.parametrize("attempt", range(3))
def test_two_begin_in_one_new_folder(command, settings, attempt):
    """One of them has it; the other is refused, and leaves no trace."""
    run = command.folder / f"both-{attempt}"
    started = [command.start(*settings, "--out", run, "--seed", seed) for seed in (1, 2)]
    statuses = [one.wait() for one in started]
    assert sorted(statuses) == [[0], [2]], [one.output for one in started]
    winner = statuses.index([0])
    assert json.loads((run / "run.json").read_text())["settings"]["seed"] == winner + 1
    assert [row["step"] for row in lines(run)] == list(range(1, STEPS + 1))
    assert "Traceback" not in started[1 - winner].output


def test_two_processes_in_one_folder(command, settings, undisturbed):
    """The second is refused, and the first does not notice."""
    run = command.folder / "twice"
    started = command.start(*settings, "--out", run)
    assert until(started, lambda: taken(run) >= 2), started.output
    for pid in started.pids:
        os.kill(pid, signal.SIGSTOP)  # it lives, and will not be done before the other has looked
    try:
        said = [refused(command, *settings, "--out", run, *more) for more in ([], ["--resume"])]
    finally:
        for pid in started.pids:
            os.kill(pid, signal.SIGCONT)
    for one in said:
        assert f"another process trains in {run} (process {started.pids[0]})" in one
    assert started.wait() == [0], started.output
    same(run, undisturbed(1))


# ---------------------------------------------------------------------------------- what is damaged, full, foreign


@pytest.fixture(scope="module")
def half(command, settings) -> Path:
    """A run that was killed in the middle, with two checkpoints."""
    run = command.folder / "half"
    started = command.start(*settings, "--keep", STEPS, "--out", run)
    assert until(started, lambda: "step-00000009" in checkpoints(run)), started.output
    started.kill()
    started.wait()
    for name in {*checkpoints(run)} - {"step-00000006", "step-00000009"}:
        shutil.rmtree(run / "checkpoints" / name)
    assert len(checkpoints(run)) == 2
    return run


@pytest.fixture
def copied(half, command, request) -> Path:
    copy = command.folder / re.sub(r"\W+", "-", request.node.name)
    shutil.copytree(half, copy)
    return copy


def spoiled(run: Path, step: int) -> Path:
    file = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def test_a_damaged_checkpoint_is_passed_over(command, settings, copied, undisturbed):
    file = spoiled(copied, 9)
    output = command.run(*settings, "--out", copied, "--resume")
    assert f"skipped. {file} is damaged" in output
    same(copied, undisturbed(1))


def refused(command, *arguments: object, ranks: int = 1) -> str:
    """One clear line, exit status 2."""
    started = command.start(*arguments, ranks=ranks)
    assert started.wait() == [2] * ranks, started.output
    assert "Traceback" not in started.output
    said = [line for line in started.output.splitlines() if line.startswith("macrobatch: ")]
    assert said, started.output
    return said[-1]


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_checkpoints_are_damaged(command, settings, copied):
    """It does not begin again from nothing."""
    for step in (6, 9):
        spoiled(copied, step)
    before = everything_in(copied)
    assert "None of the 2 checkpoints" in refused(command, *settings, "--out", copied, "--resume")
    assert everything_in(copied) == before


def test_a_foreign_checkpoint(command, settings, copied, undisturbed):
    """A folder of that name with something else in it."""
    foreign = copied / "checkpoints" / "step-00000012"
    foreign.mkdir()
    (foreign / "pytorch_model.bin").write_bytes(b"\x80\x04not to be unpickled.")
    output = command.run(*settings, "--out", copied, "--resume")
    assert f"skipped. {foreign} is not a checkpoint" in output
    same_but_names(copied, undisturbed(1))


def same_but_names(run: Path, other: Path) -> None:
    assert (run / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()


def test_a_checkpoint_of_another_model(command, settings, copied):
    """Its own manifest is in order; but it is of a model with other shapes, put there by hand."""
    other = command.folder / "other-model"
    words = [320 if word == 300 else word for word in settings]
    command.run(*words, "--steps", 1, "--out", other)
    shutil.rmtree(copied / "checkpoints")
    shutil.copytree(other / "checkpoints", copied / "checkpoints")
    assert "None of the 1 checkpoints" in refused(command, *settings, "--out", copied, "--resume")


def reworded(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """A manifest with a checksum that is right, which says something else."""
    file = checkpoint / "manifest.json"
    contents = json.loads(file.read_text())["contents"]
    change(contents)
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "contents": contents}))


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def every_chunk(contents: dict, **changes: object) -> None:
    for tensor in contents["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk.update(changes)


HOSTILE = {
    "outside": lambda path: reworded(
        path, lambda said: every_chunk(said, file="../step-00000006/rank-00000.safetensors")
    ),
    "absolute": lambda path: reworded(path, lambda said: every_chunk(said, file="/etc/passwd")),
    "no chunks": lambda path: reworded(path, lambda said: [t.update(chunks=[]) for t in said["tensors"].values()]),
    "no facts": lambda path: reworded(path, lambda said: said.update(facts={})),
    "other facts": lambda path: reworded(path, lambda said: said["facts"].update(stream=[], accumulator="none")),
    "far away": lambda path: reworded(path, lambda said: said["facts"]["stream"].update(position=10**9)),
    "a pipe": lambda path: piped(path / "rank-00000.safetensors"),
    "a pipe for a manifest": lambda path: piped(path / "manifest.json"),
    "deep": lambda path: (path / "manifest.json").write_text("[" * 10**6 + "]" * 10**6),
    "deep facts": lambda path: (path / "manifest.json").write_text('{"contents":' * 10**5 + "1" + "}" * 10**5),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_passed_over(command, settings, copied, undisturbed, name):
    """With a message; it is not read from outside, does not hang, and the run ends as it would have."""
    HOSTILE[name](copied / "checkpoints" / "step-00000009")
    (copied / "checkpoints" / "step-00000015.partial-0011aabb").mkdir()
    output = command.run(*settings, "--out", copied, "--resume")
    assert output.count("A checkpoint is skipped. ") == 1, output
    assert "Traceback" not in output
    same(copied, undisturbed(1))


def test_checkpoints_that_are_gone(command, settings, copied):
    """On a volume that is not mounted, say: it does not begin again, and no line is lost."""
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").mkdir()
    before = everything_in(copied)
    assert "Is a volume not mounted?" in refused(command, *settings, "--out", copied, "--resume")
    assert everything_in(copied) == before


SIZES = {
    "empty": "",
    "cut off": "{",
    "a list": "[]",
    "no list": '{"shapes": 3}',
    "no size": '{"shapes": [{"kind": "x", "sizes": [1], "size": 0, "failed": null}]}',
    "deep": "[" * 10**5,
}


@pytest.mark.parametrize("name", SIZES)
def test_damaged_sizes_that_fit_are_found_anew(command, settings, copied, name):
    (copied / "fit.json").write_text(SIZES[name])
    output = command.run(*settings, "--out", copied, "--resume", "--micro", "auto")
    assert f"{copied / 'fit.json'} is damaged" in output, output
    assert taken(copied) == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk(command, settings, copied, undisturbed, ranks):
    """The run ends with one line, keeps what it had, and goes on when there is room again."""
    disk = command.folder / f"disk-{ranks}"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        run = disk / "run"
        shutil.copytree(copied, run)
        before = checkpoints(run)
        said = refused(command, *settings, "--out", run, "--resume", "--keep", 9, ranks=ranks)
        assert "No space left on device" in said
        left = checkpoints(run)
        assert left[:2] == before
        assert not [name for name in left if "partial" in name]
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True, timeout=20)
        command.run(*settings, "--out", run, "--resume", "--keep", 2, ranks=ranks)
        assert taken(run) == STEPS
        if ranks == 1:
            same(run, undisturbed(1))
    finally:
        subprocess.run(["umount", disk], check=True, timeout=20)


def test_killed_between_the_last_checkpoint_and_the_export(command, settings, undisturbed):
    """A model that an interruption had left is not taken for the model of the end."""
    run = command.folder / "stale"
    started = command.start(*settings, "--out", run)
    assert until(started, lambda: taken(run) >= 4), started.output
    started.kill(signal.SIGTERM)
    started.wait()
    stale = run / "model"
    kept = shutil.copytree(stale, command.folder / "kept") if stale.exists() else None
    command.run(*settings, "--out", run, "--resume")
    same(run, undisturbed(1))
    shutil.rmtree(run / "model")  # as if the process had been killed just before
    if kept:
        shutil.copytree(kept, run / "model")
    (run / "model.before").mkdir()  # and one before it while it put an export in the place of another
    (run / "model.before" / "config.json").write_text("{}")
    assert "complete" in command.run(*settings, "--out", run, "--resume")
    same(run, undisturbed(1))
